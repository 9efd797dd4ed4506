"""Swaps rows to host memory and back: `swap_out` and `swap_in`."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._core.blocks.block_copy import put, put_group, read_group
from jaxkv._core.blocks.reblock import GroupRows
from jaxkv._core.blocks.row_snapshots import put_row_snapshots, read_row_snapshots
from jaxkv._core.blocks.slot_allocator import place_states, put_row_states, take_states
from jaxkv._core.blocks.tables import free
from jaxkv._core.cache.cache import Cache, check_cache
from jaxkv._core.cache.key_bounds import add_bounds
from jaxkv._core.config.cache_config import CacheConfig
from jaxkv._core.config.layer_config import LayerConfig
from jaxkv._core.state.arguments import distinct_rows, read_numbers, row_indices, row_mask
from jaxkv._core.state.columns import rows_entries
from jaxkv._core.state.head_rows import row_tables
from jaxkv._core.state.multihost import place_like
from jaxkv._core.state.state import NULL_BLOCK, Pool
from jaxkv._tiers.host_blocks import HostBlocks, pad
from jaxkv._tiers.host_room import are_empty, find_blocks_of, find_equal_blocks, make_room, may_share


def swap_out(cache: Cache, rows: Any) -> tuple[Cache, HostBlocks]:
    """Moves rows to host memory and frees them. Not for use inside `jit`: the amount to move depends on data.

    The blocks of all rows go in one transfer per layer, to pinned memory where the platform has it. A block that
    several rows share is moved once, and shared again when they come back. Where a cache is on devices of several
    processes, all of them must call this, and each keeps its own devices' shards.

    Args:
      rows: `bool[S]`, a row index or a list of them.

    Returns:
      `(cache, host)`: the rows are empty, and `host` holds their contents, in the order of `rows`.

    Raises:
      IndexError: no such row. ValueError: a row named twice, or called inside `jit`.

    >>> import jax.numpy as jnp, jaxkv
    >>> layer = jaxkv.LayerConfig(num_kv_heads=2, head_dim=8)
    >>> cache = jaxkv.init(jaxkv.CacheConfig(layers=(layer,), max_seqs=2, max_seq_len=64, num_blocks=4))
    >>> kv = jnp.ones((1, 2, 20, 2, 8))
    >>> cache, host = jaxkv.swap_out(jaxkv.append(cache, kv, kv, [20, 5]), 0)
    >>> host, cache.lengths.tolist()
    (HostBlocks(20 tokens of 1 row, 2048 bytes), [0, 5])
    >>> jaxkv.swap_in(cache, 0, host).lengths.tolist()
    [20, 5]
    """
    return swap_out_rows(cache, rows, with_snapshots=True)


def swap_out_rows(cache: Cache, rows: Any, *, with_snapshots: bool) -> tuple[Cache, HostBlocks]:
    """Does `swap_out`, on demand without the snapshots of the rows."""
    check_cache(cache)
    rows = read_numbers("rows", rows)
    if isinstance(rows, jax.core.Tracer) or isinstance(cache.lengths, jax.core.Tracer):
        raise ValueError("swap_out cannot be part of jit: how much there is to move is data. Call it between steps.")
    moved, config = _row_list(cache, rows), cache.config
    tables = jax.device_get(cache.tables)
    pools: list[Pool | None] = [None] * len(cache.pools)
    first, count, order, left, thinned = [], [], [], [], []
    for group, group_tables in enumerate(tables):
        lines = np.concatenate([moved + head * config.max_seqs for head in range(config.group_heads[group])])
        entries, lengths = rows_entries(group_tables, config, group, lines), group_tables.lengths[lines]
        used = entries != NULL_BLOCK
        # A reserved block holds nothing to move.
        used &= np.arange(entries.shape[1]) < -(-lengths // config.block_size)[:, None]
        count.append(used.sum(axis=1, dtype=np.int32))
        first.append(first_columns(used, config.group_sink_blocks[group]))
        left.append(None if group_tables.evicted is None else lengths)
        thinned.append(None if group_tables.thinned is None else group_tables.thinned[lines])
        ids, own = np.unique(entries[used], return_inverse=True)
        order.append(pad(own))
        for layer, blocks in read_group(cache, group, pad(ids)).items():
            pools[layer] = jax.tree.map(_to_host, blocks)
    states = jax.tree.map(_to_host, take_states(cache, moved))
    snapshots = read_row_snapshots(cache, moved) if with_snapshots else None
    if snapshots is not None:
        snapshots = dataclasses.replace(snapshots, states=jax.tree.map(_to_host, snapshots.states))
    lengths = np.asarray(row_tables(tables[0], config).lengths)[moved]
    host = HostBlocks(
        lengths=lengths,
        first=tuple(first),
        count=tuple(count),
        order=tuple(order),
        held=tuple(left),
        thinned=tuple(thinned),
        pools=tuple(pools),
        states=states,
        snapshots=snapshots,
        groups=config.groups,
        retentions=tuple(map(str, config.retentions)),
        rotates=tuple(map(config.rotates, range(len(cache.pools)))),
        kinds=config.kind_names,
        committed=all(getattr(x, "committed", False) for x in jax.tree.leaves(cache.pools)),
    )
    return free(cache, moved), host


def swap_in(cache: Cache, rows: Any, host: HostBlocks) -> Cache:
    """Copies rows back from host memory, equal to the bit, into empty rows of this cache or another like it.

    Under `jax.jit(jaxkv.swap_in, donate_argnames="cache")` the pools are updated in place.

    Args:
      rows: a row index, or one for each row of `host`.
      host: the result of `swap_out`.

    Raises:
      ValueError: a row that is not empty (outside `jit`), or blocks of another shape or dtype than the cache's.

    Full blocks that rows of `host` share are shared again. A full block that equals one of a row of the cache to the
    bit is shared with it, and takes no free block.

    Rows with too few free blocks stay empty and are marked in `cache.failed`. Inside `jit`, rows that are not empty are
    marked too.

    >>> import jaxkv
    >>> sizes = dict(num_layers=1, num_kv_heads=2, head_dim=8, max_seqs=2, max_seq_len=64)
    >>> cache = jaxkv.init(jaxkv.CacheConfig.uniform(**sizes, num_blocks=4))
    >>> cache, host = jaxkv.swap_out(jaxkv.extend(cache, [20, 5]), 0)
    >>> jaxkv.swap_in(cache, 0, host).lengths.tolist()
    [20, 5]
    """
    check_cache(cache)
    dst = row_indices("rows", rows, cache.lengths.shape[0])
    _check_fits(cache, dst, host)
    if not len(host):
        return cache
    return bring_in(cache, dst, host)


def swap_in_beside(cache: Cache, row: Any, host: HostBlocks, source: Any, num_blocks: Any) -> Cache:
    """Copies one row back, sharing what row `source` still holds of `num_blocks` leading blocks that both have.

    `host` may lack the contents of those (`HostBlocks.drop_shared`).
    """
    dst = row_indices("row", row, cache.lengths.shape[0])
    _check_fits(cache, dst, host)
    return bring_in(cache, dst, host, (source, num_blocks))


def bring_in(cache: Cache, dst: jax.Array, host: HostBlocks, beside: tuple[Any, Any] | None = None) -> Cache:
    """Copies a host's rows to rows `dst`, sharing equal blocks, or those of a given row and number."""
    pools = [None if blocks is None else _to_device(blocks, cache, layer) for layer, blocks in enumerate(host.pools)]
    lines = (host.lengths, host.first, host.count, host.order, host.held, host.thinned)
    equal = [jnp.zeros(pools[layers[0]].kv.shape[0], jnp.int32) for layers in host.groups]  # type: ignore[union-attr]
    moved = [x.shape[0] for x in equal]
    if beside is not None:  # blocks that were not moved are counted behind those that were
        equal = [jnp.pad(x, (0, order.shape[0])) for x, order in zip(equal, host.order, strict=True)]
        equal = find_blocks_of(cache, lines, equal, *beside)
    elif may_share(cache):
        equal = find_equal_blocks(cache, pools, lines)
    tables, targets = make_room(cache.replace(pools=()), dst, lines, equal)
    result = cache.replace(tables=tables)
    for group, target in enumerate(targets):
        order = jnp.asarray(host.order[group]) if cache.config.contiguous else None
        target = target if order is not None else target[: moved[group]]
        result = put_group(result, group, functools.partial(_pick_blocks, pools, order), target, put)
    result, snapshots = put_row_states(result, dst, place_states(host.states, cache)), host.snapshots
    if snapshots is not None:
        snapshots = dataclasses.replace(snapshots, states=place_states(snapshots.states, cache))
    return put_row_snapshots(result, dst, snapshots)


def _pick_blocks(pools: list[Pool | None], order: jax.Array | None, layer: int) -> Pool:
    """Returns the moved blocks of a layer, or, where none can be shared, those of each row in `order`."""
    blocks = pools[layer]
    assert blocks is not None  # of a layer that has blocks
    return blocks if order is None else jax.tree.map(lambda x: x[order], blocks)


def make_host(
    config: CacheConfig, lengths: np.ndarray, group_rows: Sequence[GroupRows], pools: Sequence[Pool | None], states: Any
) -> HostBlocks:
    """Returns rows of `lengths` tokens as `swap_in` takes them.

    Args:
      config: of the cache they are for.
      group_rows: what the rows hold in each group. Blocks count from 1, in the order of `pools`; 0: none.
      pools: the blocks of each layer; bounds are added where the cache has them.
    """
    used, bounded = [group.tables != NULL_BLOCK for group in group_rows], list(pools)
    for group, layers in enumerate(config.groups):
        for layer in layers:
            if (blocks := bounded[layer]) is not None:
                bounded[layer] = add_bounds(blocks, group_rows[group].tables, group_rows[group].lengths, config, layer)
    return HostBlocks(
        lengths=np.asarray(lengths, np.int32),
        pools=tuple(bounded),
        states=states,
        groups=config.groups,
        first=tuple(map(first_columns, used, config.group_sink_blocks)),
        count=tuple(x.sum(axis=1, dtype=np.int32) for x in used),
        order=tuple(pad(group.tables[x] - 1) for group, x in zip(group_rows, used, strict=True)),
        held=tuple(None if group.thinned is None else group.lengths for group in group_rows),
        thinned=tuple(group.thinned for group in group_rows),
        kinds=config.kind_names,
        retentions=tuple(map(str, config.retentions)),
        rotates=tuple(map(config.rotates, range(len(config.layers)))),
    )


def first_columns(used: np.ndarray, sink_blocks: int) -> np.ndarray:
    """Returns `i32[n]`: the first used column of each row after the `sink_blocks` columns of its first tokens, which a
    window keeps."""
    return np.argmax(used & (np.arange(used.shape[1]) >= sink_blocks), axis=1).astype(np.int32)


def _row_list(cache: Cache, rows: Any) -> np.ndarray:
    """Returns the indices of `rows`, a mask or indices known on the host."""
    count = cache.lengths.shape[0]
    if rows.dtype == bool:
        return np.flatnonzero(row_mask("rows", rows, count))
    return distinct_rows("rows", rows, count)


def _describe_groups(groups: Sequence[Sequence[int]], retentions: Sequence[str]) -> str:
    pairs = zip(groups, retentions, strict=True)
    return "the groups " + ", ".join(f"{list(layers)} {retention}" for layers, retention in pairs)


def _check_fits(cache: Cache, dst: jax.Array, host: HostBlocks) -> None:
    if not isinstance(host, HostBlocks):
        raise ValueError(f"host must be what swap_out returned, not {type(host).__name__}.")
    if dst.shape[0] != len(host):
        raise ValueError(f"rows must name {len(host)} rows, one for each that was swapped out, not {dst.shape[0]}.")
    groups, retentions = cache.config.groups, tuple(map(str, cache.config.retentions))
    if (host.groups, host.retentions) != (groups, retentions):
        raise ValueError(
            f"These blocks come from a cache whose layers form {_describe_groups(host.groups, host.retentions)}, but "
            f"here they form {_describe_groups(groups, retentions)}: swap them into a cache like the one they come "
            "from."
        )
    for layers in cache.config.groups:
        for layer in layers:
            kinds, pools = (host.kinds, cache.config.kind_names), (host.pools[layer], cache.layer(layer).pool)
            given, own = (_describe_pool(pool, kind[layer]) for pool, kind in zip(pools, kinds, strict=True))
            if given != own:
                raise ValueError(
                    f"The blocks of layer {layer} are {given}, but the cache's are {own}: swap them into a cache "
                    "like the one they come from."
                )
            if host.rotates[layer] != cache.config.rotates(layer):
                raise ValueError(
                    f"The blocks of layer {layer} have rotate={host.rotates[layer]}, but the cache's have "
                    f"{cache.config.rotates(layer)}: swap them into a cache like the one they come from."
                )
    theirs, ours = [_describe_states(x) for x in host.states], [_describe_arrays(x) for x in cache.config.layers]
    ours = ours if cache.states else []
    if theirs != ours:
        raise ValueError(
            f"The states of these rows are {theirs}, but the cache's layers keep {ours}: swap them into a cache like "
            "the one they come from."
        )
    if isinstance(dst, jax.core.Tracer) or isinstance(cache.lengths, jax.core.Tracer):
        return
    indices = np.asarray(dst).tolist()
    if len(set(indices)) != len(indices):
        raise ValueError(f"rows names a row twice: {indices}.")
    empty = are_empty(cache.replace(pools=()), dst)
    taken = [row for row, is_empty in zip(indices, np.asarray(empty), strict=True) if not is_empty]
    if taken:
        raise ValueError(
            f"Rows can only be swapped into empty rows, but {taken} hold tokens or blocks: free them first."
        )


def _describe_states(states: Any) -> Any:
    """Describes a layer's states: their dtypes and shapes, by name."""
    return jax.tree.map(lambda x: f"{x.dtype}{list(x.shape[1:])}", states)


def _describe_arrays(layer: LayerConfig) -> Any:
    """Describes what a layer keeps, as `_describe_states` does; None if that is no state."""
    return layer.states and {array.name: f"{array.dtype}{list(array.shape)}" for array in layer.states}


def _describe_pool(pool: Pool | None, kind: str) -> str:
    """Describes a pool's blocks: their kind, dtypes and shapes."""
    if pool is None:
        return ""
    words = ("", " with scales ", " with bounds ", " with index keys ", " with their scales ")
    arrays = {word: x for word, x in zip(words, pool.arrays, strict=True) if x is not None}
    return "".join(f"{word}{x.dtype if word else kind or x.dtype}{list(x.shape[1:])}" for word, x in arrays.items())


def _to_device(blocks: Pool | None, cache: Cache, layer: int) -> Pool:
    """Returns blocks on the device, or devices, of the cache's pool of a layer."""
    assert blocks is not None  # of a layer that has blocks
    return jax.tree.map(place_like, blocks, pool_for(blocks, cache, layer).like(blocks))


def pool_for(blocks: Pool, cache: Cache, layer: int) -> Pool:
    """Returns the pool that blocks are for, without bounds if they have none."""
    pool = cache.layer(layer).pool
    return pool.tokens if blocks.bounds is None else pool


def _to_host(x: jax.Array) -> jax.Array:
    """Copies to the host, to pinned memory where the platform has it: transfers are fastest there."""
    kinds = {memory.kind for device in x.devices() for memory in device.addressable_memories()}
    kind = "pinned_host" if "pinned_host" in kinds else None
    return x if kind is None else jax.device_put(x, x.sharding.with_memory_kind(kind))
