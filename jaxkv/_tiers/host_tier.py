"""Rows in host memory: `swap_out` and `swap_in`."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._core.blocks.allocator import serve, take
from jaxkv._core.blocks.block_copy import padded_size, put, put_group, read_group
from jaxkv._core.blocks.tables import free, mark_failed
from jaxkv._core.cache.cache import Cache, check_cache
from jaxkv._core.state.arguments import distinct_rows, read_numbers, row_indices, row_mask, scatter_rows
from jaxkv._core.state.columns import are_too_long, rows_entries, skipped_for
from jaxkv._core.state.head_rows import row_sums, seen_by_rows
from jaxkv._core.state.multihost import check_here, place_like
from jaxkv._core.state.state import NULL_BLOCK, TOO_LONG, Pool
from jaxkv._tiers.host_blocks import HostBlocks


def swap_out(cache: Cache, rows: Any) -> tuple[Cache, HostBlocks]:
    """Move rows to host memory and free them. Not for use inside `jit`: how much there is to move is data.

    The blocks of all rows go in one transfer per layer, to pinned memory where the platform has it. A block that
    several rows share is moved with each of them.

    Args:
      rows: `bool[S]`, a row index or a list of them.

    Returns:
      `(cache, host)`: the rows are empty, and `host` holds what they held, in the order of `rows`.

    Raises:
      IndexError: no such row. ValueError: a row named twice, or called inside `jit`.

    >>> import jax.numpy as jnp, jaxkv
    >>> layer = jaxkv.LayerConfig(num_kv_heads=2, head_dim=8)
    >>> cache = jaxkv.init(jaxkv.CacheConfig(layers=(layer,), max_seqs=2, max_seq_len=64, num_blocks=4))
    >>> kv = jnp.ones((1, 2, 20, 2, 8))
    >>> cache, host = jaxkv.swap_out(jaxkv.append(cache, kv, kv, [20, 5]), 0)
    >>> host, cache.lengths.tolist()
    (HostBlocks(20 tokens of 1 rows, 2048 bytes), [0, 5])
    >>> jaxkv.swap_in(cache, 0, host).lengths.tolist()
    [20, 5]
    """
    check_cache(cache)
    rows = read_numbers("rows", rows)
    if isinstance(rows, jax.core.Tracer) or isinstance(cache.lengths, jax.core.Tracer):
        raise ValueError("swap_out cannot be part of jit: how much there is to move is data. Call it between steps.")
    check_here(cache.pools, "swap_out")
    moved, config = _row_list(cache, rows), cache.config
    tables = jax.device_get(cache.tables)
    parts: list[Pool | None] = [None] * cache.num_layers
    first, count, left, thinned = [], [], [], []
    for group, t in enumerate(tables):
        lines = np.concatenate([moved + head * config.max_seqs for head in range(config.group_heads[group])])
        entries, lengths = rows_entries(t, config, group, lines), t.lengths[lines]
        used = entries != NULL_BLOCK
        # A reserved block holds nothing to move.
        used &= np.arange(entries.shape[1]) < -(-lengths // config.block_size)[:, None]
        count.append(used.sum(axis=1, dtype=np.int32))
        first.append(first_columns(used, config.group_sinks[group]))
        left.append(None if t.evicted is None else lengths)
        thinned.append(None if t.thinned is None else t.thinned[lines])
        ids = entries[used]
        padded = np.full(padded_size(len(ids)), NULL_BLOCK, np.int32)
        padded[: len(ids)] = ids
        for layer, part in read_group(cache, group, padded).items():
            parts[layer] = jax.tree.map(_to_host, part)
    host = HostBlocks(
        lengths=np.asarray(seen_by_rows(tables[0], config).lengths)[moved], first=tuple(first), count=tuple(count),
        held=tuple(left), thinned=tuple(thinned), parts=tuple(parts), groups=config.groups, sights=config.group_sights,
        rotates=tuple(map(config.rotates, range(cache.num_layers))),
        kinds=config.kind_names,
        committed=all(x.committed for x in jax.tree.leaves(cache.pools)),
    )  # fmt: skip
    return free(cache, moved), host


def swap_in(cache: Cache, rows: Any, host: HostBlocks) -> Cache:
    """Bring rows back from host memory, equal to the bit, into empty rows of this cache or of another like it.

    Under `jax.jit(jaxkv.swap_in, donate_argnames="cache")` the pools are updated in place.

    Args:
      rows: a row index, or as many as `host` has rows.
      host: what `swap_out` returned.

    Raises:
      ValueError: a row that is not empty (outside `jit`), or blocks of another shape or dtype than the cache's.

    Rows for which there are too few free blocks stay empty and are marked in `cache.failed`, as are rows that are not
    empty inside `jit`.

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
    sizes = tuple(host.blocks[layers[0]].shape[0] for layers in cache.config.groups)
    held = (host.lengths, host.first, host.count, host.held, host.thinned)
    tables, targets = _room_for(cache.replace(pools=()), dst, held, sizes)
    result = cache.replace(tables=tables)
    for group, target in enumerate(targets):
        result = put_group(result, group, lambda layer: _to_device(host.parts[layer], cache, layer), target, put)
    return result


@functools.partial(jax.jit, static_argnames="sizes")
def _room_for(cache: Cache, dst: jax.Array, held: Any, sizes: tuple[int, ...]) -> tuple[Any, list[jax.Array]]:
    """The tables of a cache without its pools once they have blocks for what `held` says of the rows of a `HostBlocks`,
    and for each group where its blocks go, `i32[size]`. One program, for outside of any its loop would be compiled each
    time."""
    lengths, firsts, counts, left, thinned = jax.tree.map(jnp.asarray, held)
    config, number = cache.config, lengths.shape[0]
    too_long = are_too_long(lengths, left, config)
    sensible = _are_empty(cache, dst)
    granted = sensible & ~too_long
    aheads = [jnp.minimum(count, sinks) for count, sinks in zip(counts, config.group_sinks, strict=True)]
    ends = [first + count - ahead for first, count, ahead in zip(firsts, counts, aheads, strict=True)]
    skips = [skipped_for(first, end, config, g) for g, (first, end) in enumerate(zip(firsts, ends, strict=True))]
    firsts = [first - skipped for first, skipped in zip(firsts, skips, strict=True)]  # now columns
    for t, end, skipped in zip(cache.tables, ends, skips, strict=True):
        granted &= (end - skipped <= t.tables.shape[1]).reshape(-1, number).all(axis=0)
    needs = [  # of each part of a group's blocks, if they are in parts
        count.reshape(t.parts, -1, number).sum(axis=1, dtype=jnp.int32)
        for count, t in zip(counts, cache.tables, strict=True)
    ]
    if not config.contiguous:
        granted &= serve([jnp.where(granted[None], need, 0) for need in needs], cache.tables)
    refused, wanted = ~granted, jnp.where(sensible | too_long, lengths, -1)

    def of_rows(x: jax.Array, rows: jax.Array) -> jax.Array:
        """What is said of the rows of the host for rows of the cache."""
        return scatter_rows(jnp.zeros(config.max_seqs, x.dtype), jnp.where(rows, dst, config.max_seqs), x)

    tables, targets = [], []
    for group, (t, first, count, ahead) in enumerate(zip(cache.tables, firsts, counts, aheads, strict=True)):
        heads, all_lines = config.group_heads[group], t.lengths.shape[0]
        line = jnp.where(granted, dst, all_lines)[None] + config.max_seqs * jnp.arange(heads, dtype=jnp.int32)[:, None]
        line = line.ravel()  # past the end: dropped

        def put_into(old: Any, new: Any, line: jax.Array = line) -> Any:
            return None if old is None else old.at[line].set(new, mode="drop")

        if not config.contiguous:
            none = jnp.zeros(all_lines, jnp.int32)
            if config.group_sinks[group]:
                t = take(t, put_into(none, ahead), at=none)
            t = take(t, put_into(none, count - ahead), at=put_into(none, first))
        needed = jnp.stack([of_rows(jnp.where(too_long, TOO_LONG, need), refused) for need in needs[group]])
        needed = needed[0] if t.parts == 1 else needed
        t = mark_failed(t, of_rows(refused, refused), of_rows(wanted, refused), needed)
        seen = jnp.tile(lengths, heads)
        kept = seen if left[group] is None else left[group]
        t = dataclasses.replace(
            t, lengths=put_into(t.lengths, kept), new=put_into(t.new, 0), evicted=put_into(t.evicted, seen - kept),
            thinned=put_into(t.thinned, thinned[group]), skipped=put_into(t.skipped, skips[group]),
        )  # fmt: skip
        tables.append(t)
        # Block i is the (i - start)-th of the line in whose range it lies.
        i, end = jnp.arange(sizes[group], dtype=jnp.int32), jnp.cumsum(count)
        of = jnp.searchsorted(end, i, side="right", method="compare_all")
        own = jnp.minimum(of, count.shape[0] - 1)
        number_of = i - (end - count)[own]  # of the line's blocks
        column = number_of + jnp.where(number_of < ahead[own], 0, (first - ahead)[own])
        target = t.tables[jnp.minimum(line[own], all_lines - 1), jnp.clip(column, 0, t.tables.shape[1] - 1)]
        targets.append(jnp.where((of < count.shape[0]) & (line[own] < all_lines), target, NULL_BLOCK))
    return tuple(tables), targets


def first_columns(used: np.ndarray, sinks: int) -> np.ndarray:
    """`i32[n]`: the first column of each row that is used, but for the `sinks` of its first tokens, which a window may
    leave behind."""
    return np.argmax(used & (np.arange(used.shape[1]) >= sinks), axis=1).astype(np.int32)


def _row_list(cache: Cache, rows: Any) -> np.ndarray:
    """The indices of `rows`, a mask or indices known on the host."""
    count = cache.lengths.shape[0]
    if rows.dtype == bool:
        return np.flatnonzero(row_mask("rows", rows, count))
    return distinct_rows("rows", rows, count)


def _check_fits(cache: Cache, dst: jax.Array, host: HostBlocks) -> None:
    if not isinstance(host, HostBlocks):
        raise ValueError(f"host must be what swap_out returned, not {type(host).__name__}.")
    if dst.shape[0] != len(host):
        raise ValueError(f"rows must name {len(host)} rows, one for each that was swapped out, not {dst.shape[0]}.")
    groups, sights = cache.config.groups, cache.config.group_sights
    if (host.groups, host.sights) != (groups, sights):
        raise ValueError(
            f"These blocks come from a cache whose layers form the groups {host.groups} {host.sights}, but "
            f"here they form {groups} {sights}: swap them into a cache like the one they come from."
        )
    for layers in cache.config.groups:
        for layer in layers:
            kinds, parts = (host.kinds, cache.config.kind_names), (host.parts[layer], cache.layer(layer).pool)
            held, own = (_described(part, kind[layer]) for part, kind in zip(parts, kinds, strict=True))
            if held != own:
                raise ValueError(
                    f"The blocks of layer {layer} are {held}, but the cache's are {own}: swap them into a cache "
                    "like the one they come from."
                )
            if host.rotates[layer] != cache.config.rotates(layer):
                raise ValueError(
                    f"The blocks of layer {layer} have rotate={host.rotates[layer]}, but the cache's have "
                    f"{cache.config.rotates(layer)}: swap them into a cache like the one they come from."
                )
    if isinstance(dst, jax.core.Tracer) or isinstance(cache.lengths, jax.core.Tracer):
        return
    indices = np.asarray(dst).tolist()
    if len(set(indices)) != len(indices):
        raise ValueError(f"rows names a row twice: {indices}.")
    empty = _are_empty(cache.replace(pools=()), dst)
    taken = [row for row, is_empty in zip(indices, np.asarray(empty), strict=True) if not is_empty]
    if taken:
        raise ValueError(
            f"Rows can only be swapped into empty rows, but {taken} hold tokens or blocks: free them first."
        )


@jax.jit
def _are_empty(cache: Cache, rows: jax.Array) -> jax.Array:
    """`bool[n]`: which of the rows exist, hold nothing, and are named for the first time."""
    inside = (rows >= 0) & (rows < cache.lengths.shape[0])
    at = jnp.where(inside, rows, 0)
    blocks = row_sums(cache.tables[0].held, cache.config)
    held = jnp.zeros(rows.shape, bool) if cache.config.contiguous else blocks[at] > 0
    named_before = jnp.any(jnp.tril(rows[:, None] == rows[None], -1), axis=1)
    return inside & (cache.lengths[at] == 0) & ~held & ~named_before


def _described(pool: Pool | None, kind: str) -> str:
    """The kind of a pool's blocks, and the dtypes and shapes of what is stored."""
    fields = {"": "kv", " with scales ": "scale", " with bounds ": "bounds"}
    arrays = {word: getattr(pool, field, None) for word, field in fields.items()}
    named = {word: kind if field == "kv" else None for word, field in fields.items()}
    return "".join(f"{word}{named[word] or x.dtype}{list(x.shape[1:])}" for word, x in arrays.items() if x is not None)


def _to_device(part: Pool | None, cache: Cache, layer: int) -> Pool:
    """Blocks in the memory of the device, or devices, that the cache's pool of a layer lies on."""
    assert part is not None  # of a layer that has blocks
    return jax.tree.map(place_like, part, pool_for(part, cache, layer).like(part))


def pool_for(part: Pool, cache: Cache, layer: int) -> Pool:
    """The pool that some blocks are for, without the bounds if they have none."""
    pool = cache.layer(layer).pool
    return pool.tokens if part.bounds is None else pool


def _to_host(x: jax.Array) -> jax.Array:
    """In pinned host memory where the platform has it, for which transfers are fastest."""
    kinds = {memory.kind for device in x.devices() for memory in device.addressable_memories()}
    kind = "pinned_host" if "pinned_host" in kinds else None
    return x if kind is None else jax.device_put(x, x.sharding.with_memory_kind(kind))
