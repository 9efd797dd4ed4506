"""Saves rows of a cache to a file: `save`. For the file see `format`."""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxkv._core.blocks.restore import pool_layers
from jaxkv._core.cache.cache import Cache, check_cache
from jaxkv._core.cache.data_parallel import RowShards, leave_mesh
from jaxkv._core.config.cache_config import CacheConfig
from jaxkv._core.state.arguments import require_host, row_indices
from jaxkv._core.state.multihost import is_local
from jaxkv._files.format import SNAPSHOTS, SavedCache, stored_states, stored_tensors, write_saved
from jaxkv._files.multihost_file import SavedShards, write_shards
from jaxkv._files.paths import check_model_name, read_file_path
from jaxkv._files.rows_to_save import RowsToSave


def save(
    path: str | os.PathLike,
    cache: Cache | RowShards,
    rows: Sequence[int] | None = None,
    *,
    model: str | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Writes rows of a cache to a file, replaced atomically: a crash leaves the old file.

    Blocks that several rows share are stored once. A step's bookkeeping, reserved blocks, failures and tokens outside
    of a sliding window are not stored. With a cache on the devices of several processes, each process writes a file of
    its own beside this one, which lists them, with its KV heads and all states of recurrent layers. All processes call
    this, with one path that all can reach.

    Args:
      path: the file, by custom `*.safetensors`.
      rows: the rows to save; default: all, including empty rows.
      model: the name of the model that computed the keys and values, or a fingerprint; `load` compares it.
      metadata: anything else to store that JSON can hold.

    Raises:
      ValueError, IndexError: rows that do not exist or are named twice, a model or metadata that cannot be stored.

    >>> import jax.numpy as jnp, jaxkv, tempfile
    >>> layer = jaxkv.LayerConfig(num_kv_heads=2, head_dim=8)
    >>> cache = jaxkv.init(jaxkv.CacheConfig(layers=(layer,), max_seqs=2, max_seq_len=64, num_blocks=4))
    >>> kv = jnp.ones((1, 2, 20, 2, 8))
    >>> cache = jaxkv.append(cache, kv, kv, [20, 3])
    >>> path = f"{tempfile.mkdtemp()}/chat.safetensors"
    >>> jaxkv.save(path, cache, model="llama")
    >>> jaxkv.load(path, model="llama")
    Cache(3 of 4 blocks used, 23 tokens in 2 of 2 rows, 1 layer, 5.0 KiB)
    """
    file = read_file_path("path", path)
    check_model_name(model)
    if not isinstance(cache, RowShards):
        check_cache(cache)
    config = cache.config
    written = RowsToSave(cache, choose_rows(rows, config.max_seqs))

    def write(path: pathlib.Path, config: CacheConfig, here: Callable[..., Any] = _all_of) -> None:
        shapes = _find_shapes(written, config)
        write_saved(path, dataclasses.replace(saved, config=config), shapes, written.tensors(here))

    saved = _describe_written(written, config, model, {} if metadata is None else metadata)
    if is_local(cache.pools):
        with leave_mesh(cache):
            write(file, config)
    else:
        assert isinstance(cache, Cache)
        shards = SavedShards(cache)
        write_shards(file, saved, shards, functools.partial(write, here=shards.here))


def _describe_written(
    written: RowsToSave, config: CacheConfig, model: str | None, metadata: Mapping[str, Any]
) -> SavedCache:
    return SavedCache(
        config=config,
        lengths=tuple(written.lengths.tolist()),
        model=model,
        metadata=metadata,
        block_size=written.block_size,
        groups=config.groups,
    )


def _find_shapes(written: RowsToSave, config: CacheConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each tensor by name, in their order."""
    shapes = {"lengths": written.lengths.shape} | {f"tables.{g}": x.shape for g, x in enumerate(written.tables)}
    shapes |= {f"held.{g}": x.shape for g, x in written.held.items()}
    for i in pool_layers(config):
        for name, (heads, minor) in stored_tensors(config, i).items():
            slots = config.layers[i].count_entries(written.block_size)
            shapes[name] = (written.num_blocks(config.group(i)), *heads, slots, *minor)
    for (i, name), array in stored_states(config).items():
        shapes[f"state.{i}.{name}"] = (len(written.lengths), *array.shape)
    if written.snapshots is not None:
        shapes[SNAPSHOTS] = written.snapshots.table.shape
        for (i, name), array in stored_states(config).items():
            shapes[f"snapshot.{i}.{name}"] = (written.num_snapshots, *array.shape)
    return shapes


def read_rows(cache: Cache, rows: np.ndarray) -> tuple[SavedCache, dict[str, np.ndarray]]:
    """Returns what `save` writes of rows `i32[n]`: their description, and the tensors by name."""
    written = RowsToSave(cache, rows)
    names = _find_shapes(written, cache.config)
    return _describe_written(written, cache.config, None, {}), dict(zip(names, written.tensors(_all_of), strict=True))


def _all_of(x: Any, read: Callable[[Any], Any]) -> Any:
    return read(x)


def choose_rows(rows: Sequence[int] | None, max_seqs: int) -> np.ndarray:
    """Returns rows as `i32[n]`, all of them for None. Raises ValueError, IndexError for what are no different rows."""
    if rows is None:
        return np.arange(max_seqs)
    chosen = np.asarray(row_indices("rows", require_host("rows", rows), max_seqs))
    if len(set(chosen.tolist())) < len(chosen) or ((chosen < 0) | (chosen >= max_seqs)).any():
        raise ValueError(f"rows must be different rows from 0 to {max_seqs - 1}, not {chosen.tolist()}.")
    return chosen
