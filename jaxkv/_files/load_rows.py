"""Loads rows from a file of `save`, and describes them: `load` and `describe`."""

import dataclasses
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, overload

import jax
import numpy as np

from jaxkv._core.blocks.reblock import (
    BlockPlan,
    GroupRows,
    TokensGone,
    clear_unused,
    describe_lack,
    fill_blocks,
    fit,
    gather_slots,
)
from jaxkv._core.blocks.restore import empty_rows, layer_facts, put_rows, regroup_channels, ungroup_channels
from jaxkv._core.blocks.row_snapshots import RowSnapshots, compact_snapshots, put_row_snapshots
from jaxkv._core.blocks.slot_allocator import place_states, put_row_states
from jaxkv._core.cache.cache import Cache, check_cache
from jaxkv._core.cache.checks import check_on_host
from jaxkv._core.cache.data_parallel import RowShards, leave_mesh
from jaxkv._core.cache.init import init
from jaxkv._core.config.cache_config import CacheConfig, check_config
from jaxkv._core.config.validation import flag, read_list
from jaxkv._core.state.columns import are_too_long
from jaxkv._core.state.errors import CacheFileError
from jaxkv._core.state.state import Pool
from jaxkv._files.format import SNAPSHOTS, SavedCache, stored_states, stored_tensors
from jaxkv._files.multihost_file import open_saved
from jaxkv._files.paths import check_model_name, read_file_path
from jaxkv._files.save_rows import choose_rows


def read_source(path: Any) -> pathlib.Path:
    try:
        return read_file_path("path", path)
    except ValueError as error:
        raise CacheFileError(str(error)) from None


def describe(path: str | os.PathLike) -> SavedCache:
    """Returns config, lengths, model and metadata of a saved cache. Verifies the whole file.

    Raises:
      FileNotFoundError; CacheFileError, a ValueError: as `load`.

    >>> import jaxkv, tempfile
    >>> layer = jaxkv.LayerConfig(num_kv_heads=2, head_dim=8)
    >>> cache = jaxkv.init(jaxkv.CacheConfig(layers=(layer,), max_seqs=2, max_seq_len=64, num_blocks=4))
    >>> path = f"{tempfile.mkdtemp()}/chat.safetensors"
    >>> jaxkv.save(path, cache, rows=[1], metadata={"user": 7})
    >>> saved = jaxkv.describe(path)
    >>> saved.lengths, saved.metadata, saved.config == cache.config
    ((0,), {'user': 7}, True)
    """
    return open_saved(read_source(path))[0]


@overload
def load(
    path: str | os.PathLike[str],
    config: CacheConfig | None = None,
    *,
    into: Cache | None = None,
    rows: Sequence[int | None] | None = None,
    model: str | None = None,
    partial_windows: bool = False,
) -> Cache: ...


@overload
def load(
    path: str | os.PathLike[str],
    config: CacheConfig | None = None,
    *,
    into: RowShards,
    rows: Sequence[int | None] | None = None,
    model: str | None = None,
    partial_windows: bool = False,
) -> RowShards: ...


def load(
    path: str | os.PathLike,
    config: CacheConfig | None = None,
    *,
    into: Cache | RowShards | None = None,
    rows: Sequence[int | None] | None = None,
    model: str | None = None,
    partial_windows: bool = False,
) -> Any:
    """Returns a cache with the rows of a file, or `into` with those rows restored into empty rows.

    The file is memory-mapped, verified, and copied layer by layer. New blocks are allocated: block_size, num_blocks,
    max_seqs, max_seq_len, layout, head_dim_multiple and join_kv may differ from the saved cache's. Shared blocks stay
    shared; with a larger block_size, as far as whole blocks are shared.

    Args:
      config: config of the new cache; its layers and dtypes must match the file's. Default: the saved cache's.
      into: a cache or `RowShards` to restore into instead; it stays unchanged, and a new one is returned.
      rows: for each saved row the row to restore it into, or None to skip it. Default, for rows with tokens: their own
        numbers if all of those are empty, else the first empty rows.
      model: the name or fingerprint that the file must have been saved with; None: any.
      partial_windows: accept rows whose first block of a sliding window is incomplete. Such a row holds only its last
        tokens, and larger blocks may begin with tokens that were not saved. No later token sees those, but a token
        after `truncate` below the saved length might. Set this if rows will not be truncated so far.

    Raises:
      FileNotFoundError: there is no such file.
      DamagedFile: the file was truncated or changed. CacheFileError: the file is intact, but of another model, of other
        layers or dtypes, from a newer version of the format, or its rows do not fit. Both are ValueErrors.

    >>> import jaxkv, tempfile
    >>> sizes = dict(num_layers=1, num_kv_heads=2, head_dim=8, max_seqs=2, max_seq_len=64)
    >>> cache = jaxkv.init(jaxkv.CacheConfig.uniform(**sizes, num_blocks=4))
    >>> path = f"{tempfile.mkdtemp()}/chat.safetensors"
    >>> jaxkv.save(path, jaxkv.extend(cache, [20, 3]))
    >>> jaxkv.load(path, into=cache, rows=[1, None]).lengths.tolist()
    [0, 20]
    """
    path = read_source(path)
    if config is not None and into is not None:
        raise ValueError("load takes config, for a new cache, or into, an existing one, not both.")
    if config is not None:
        check_config(config)
    if into is not None and not isinstance(into, RowShards):
        check_cache(into)
    check_model_name(model)
    partial_windows = flag("partial_windows", partial_windows)
    saved, tensors = open_saved(path)
    if model is not None and model != saved.model:
        whose = "does not say of which model" if saved.model is None else f"is of the model {saved.model!r}"
        raise CacheFileError(
            f"{path} {whose}, but {model!r} was asked for: keys and values of one model mean nothing to another. "
            "Compute them anew, or load without model= if you know better."
        )
    return put_saved(path, saved, tensors, config, into, rows, partial_windows)[0]


def put_saved(
    path: Any,
    saved: SavedCache,
    tensors: Mapping[str, np.ndarray],
    config: CacheConfig | None,
    into: Cache | RowShards | None,
    rows: Sequence[int | None] | None,
    partial_windows: bool = False,
) -> tuple[Any, list[int]]:
    """Does `load` of what was read from `path`, and returns the rows that they are in, too."""
    config = into.config if into is not None else config or saved.config
    rows = None if rows is None else read_list("rows", rows)
    check_layers(path, saved.config, config)
    shards = into.shards if isinstance(into, RowShards) else [] if into is None else [into]
    for shard in shards:
        check_on_host(shard, "load")
    empty = np.concatenate(list(map(empty_rows, shards))) if shards else np.ones(config.max_seqs, bool)
    source, target = _places(path, np.array(saved.lengths), rows, config, empty)
    if not isinstance(into, RowShards):
        cache = _put(path, saved, tensors, config, into, source, target, partial_windows)
        return cache, target.tolist()
    number, found = config.max_seqs // len(shards), []
    for i, shard in enumerate(shards):
        own = target // number == i
        places = source[own], target[own] - i * number
        with leave_mesh(into):
            found.append(_put(path, saved, tensors, shard.config, shard, *places, partial_windows))
    return into.with_shards(found), target.tolist()


def _put(
    path: pathlib.Path,
    saved: SavedCache,
    tensors: Mapping[str, np.ndarray],
    config: CacheConfig,
    into: Cache | None,
    source: np.ndarray,
    target: np.ndarray,
    partial_windows: bool,
) -> Cache:
    """Returns a cache of this config, or `into`, with saved rows `source` in its rows `target`."""
    free = config.group_blocks if into is None else jax.device_get([t.num_free for t in into.tables])
    group_rows = [read_group_rows(saved, tensors, g, source) for g in range(len(saved.groups))]
    plans = _fit(path, saved, group_rows, source, config, free, partial_windows)

    def read(layer: int) -> Pool:
        return lay_blocks(tensors, config, layer, plans[layer].padded)

    loaded = fill_blocks(group_rows, saved.groups, plans, config)
    try:
        cache = init(config) if into is None else into
    except ValueError as error:
        raise CacheFileError(f"{path} cannot be loaded here: {error} Or load it with a smaller config=.") from error
    cache = put_rows(cache, target, np.array(saved.lengths)[source], loaded, read, in_place=into is None)
    states = place_states(saved_states(tensors, config, source), cache)
    snapshots = saved_snapshots(saved, tensors, source, config)
    if snapshots is not None:
        snapshots = dataclasses.replace(snapshots, states=place_states(snapshots.states, cache))
    return put_row_snapshots(put_row_states(cache, target, states), target, snapshots)


def saved_snapshots(
    saved: SavedCache, tensors: Mapping[str, np.ndarray], rows: np.ndarray, config: CacheConfig
) -> RowSnapshots | None:
    """Returns the snapshots of rows `i32[n]` of a file for a cache of a config; None if they have none."""
    every = saved.config.snapshot_every
    if SNAPSHOTS not in tensors or every is None:
        return None
    states = saved_states(tensors, config, slice(None), kind="snapshot")
    return compact_snapshots(tensors[SNAPSHOTS][rows], every, states, first=1)


def saved_states(
    tensors: Mapping[str, np.ndarray], config: CacheConfig, rows: Any, kind: str = "state"
) -> tuple[dict[str, np.ndarray] | None, ...]:
    """Returns the saved states `[n, ...]` of rows `i32[n]` of a file for a cache of a config; nothing without recurrent
    layers."""
    if not config.recurrent_layers:
        return ()
    found: list[dict[str, np.ndarray] | None] = [{} if layer.is_recurrent else None for layer in config.layers]
    for (i, name), array in stored_states(config).items():
        own = found[i]
        assert own is not None
        own[name] = regroup_channels(tensors[f"{kind}.{i}.{name}"][rows], array.shape)
    return tuple(found)


def lay_blocks(tensors: Mapping[str, np.ndarray], config: CacheConfig, layer: int, slots: np.ndarray) -> Pool:
    """Returns a layer's saved numbers, scales and index keys at `slots` of the file, in the pool's layout without its
    padding."""

    def read(name: str) -> np.ndarray:
        return clear_unused(gather_slots(tensors[f"{name}.{layer}"], slots, first=1), slots)

    found = {name.partition(".")[0]: read(name.partition(".")[0]) for name in stored_tensors(config, layer)}
    return Pool.bundle(config.form(layer).pack(found.pop("layer"), axis=1), **found)


def read_group_rows(saved: SavedCache, tensors: Mapping[str, np.ndarray], group: int, rows: np.ndarray) -> GroupRows:
    """Returns the tokens that saved rows hold in a group's layers."""
    number = len(saved.lengths)
    lines = np.concatenate([rows + head * number for head in range(saved.config.group_heads[group])])
    tables, both = tensors[f"tables.{group}"], tensors.get(f"held.{group}")
    if both is None:
        return GroupRows(tables[lines], tensors["lengths"][lines])
    return GroupRows(tables[lines], both[0, lines], both[1, lines])


def _fit(
    path: pathlib.Path,
    saved: SavedCache,
    group_rows: list[GroupRows],
    source: np.ndarray,
    config: CacheConfig,
    free: Sequence[Any],
    partial: bool,
) -> dict[int, BlockPlan]:
    """Plans, for each layer with a pool, the blocks of saved rows `source`, within the `free` blocks of its group."""
    lengths = np.array(saved.lengths)[source]
    own = [None if x.thinned is None else x.lengths for x in group_rows]
    for row, length, too_long in zip(source, lengths, are_too_long(lengths, own, config), strict=True):
        if too_long:
            raise CacheFileError(
                f"Row {row} of {path} has {length} tokens, but max_seq_len = {config.max_seq_len}: give the cache a "
                "larger one, or leave the row out."
            )
    try:
        plans = fit(config, saved.groups, group_rows, saved.block_size, partial=partial)
    except TokensGone as gone:
        raise CacheFileError(
            f"Row {source[gone.row]} of {path} holds the tokens of {config.name_layer(gone.layer)} from {gone.start} "
            f"on, the others fell out of its window, but its blocks of {config.block_size} begin at {gone.needed}: "
            f"load it with a block_size that divides {saved.block_size}, or, if it will not be truncated to fewer than "
            f"its {lengths[gone.row]} tokens, with partial_windows=True."
        ) from None
    for layers, num_free in zip(config.groups, free, strict=True):
        if (lack := describe_lack(plans[layers[0]], num_free)) and not config.contiguous:
            need, few = lack
            raise CacheFileError(
                f"The rows of {path} need {need} blocks of {config.block_size} tokens, but {few} "
                f"{'is' if few == 1 else 'are'} free: raise the cache's {config.size_argument}, free rows of it, or "
                "leave rows out."
            )
    return plans


def _places(
    path: pathlib.Path, lengths: np.ndarray, rows: Sequence[int | None] | None, config: CacheConfig, empty: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the saved rows to restore, and the rows to restore them into."""
    if rows is None:
        source, target = np.flatnonzero(lengths > 0), np.flatnonzero(empty)
        if np.isin(source, target).all():
            return source, source
        if len(source) > len(target):
            raise CacheFileError(
                f"{path} has {len(source)} rows with tokens, but only {len(target)} of the cache's {config.max_seqs} "
                "rows are empty: free some, or say in rows= which to load and where to."
            )
        return source, target[: len(source)]
    if len(rows) != len(lengths):
        raise ValueError(
            f"{path} has {len(lengths)} rows, but rows names {len(rows)}: give each its row, or None to leave it out."
        )
    source = np.array([i for i, row in enumerate(rows) if row is not None], int)
    target = choose_rows([row for row in rows if row is not None], config.max_seqs)
    if not empty[target].all():
        row = target[~empty[target]][0]
        raise ValueError(f"Row {row} of the cache is not empty: free it first, or load into another.")
    return source, target


def check_layers(path: pathlib.Path | str, saved: CacheConfig, config: CacheConfig) -> None:
    """Raises CacheFileError unless a cache of `config` can hold the keys and values of `saved`."""
    if saved.num_layers != config.num_layers:
        raise CacheFileError(
            f"{path} has {saved.num_layers} layers, but the cache has {config.num_layers}: it is of another model."
        )
    if saved.residual_length != config.residual_length:
        raise CacheFileError(
            f"{path} was saved with residual_length={saved.residual_length}, but the cache has "
            f"{config.residual_length}: load it into a cache with the same."
        )
    for i in range(len(config.layers)):
        theirs, ours = (ungroup_channels(layer_facts(c, i)) for c in (saved, config))
        wrong = [name for name in ours | theirs if theirs.get(name) != ours.get(name)]
        if set(wrong) <= {"dtype", "rotate"} and "dtype" in wrong:
            raise CacheFileError(
                f"{path} has layer {i} in {theirs['dtype']}, but the cache has {ours['dtype']}: load it into a cache "
                f"of {theirs['dtype']}; keys and values are not converted."
            )
        if wrong:
            raise CacheFileError(
                f"{path} has layer {i} with {', '.join(f'{name} = {theirs.get(name)}' for name in wrong)}, but the "
                f"cache has {', '.join(str(ours.get(name)) for name in wrong)}: it is of another model."
            )
