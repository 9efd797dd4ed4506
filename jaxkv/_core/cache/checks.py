"""Checks and statistics of a cache on the host: failed rows, consistency, usage. They read arrays from the device."""

from typing import Any, NamedTuple

import jax
import numpy as np

from jaxkv._core.cache.cache import Cache, check_cache
from jaxkv._core.cache.key_bounds import filled_of
from jaxkv._core.cache.pool_access import numbers
from jaxkv._core.config.cache_config import CacheConfig
from jaxkv._core.config.validation import MOST_TOKENS
from jaxkv._core.state.columns import relative
from jaxkv._core.state.errors import CacheError, OutOfBlocks, OutOfWindow, SequenceTooLong
from jaxkv._core.state.head_rows import block_numbers, by_row, row_sums, seen_by_rows
from jaxkv._core.state.state import GONE, NULL_BLOCK, STALE, TOO_LONG, BlockTables


def check(cache: Cache) -> None:
    """Raises if a request of any row could not be met. The message names the rows, what they need and what is free.

    Raises:
      SequenceTooLong: a row would have held more than `max_seq_len` tokens at once.
      OutOfBlocks: there were too few free blocks.
      OutOfWindow: a row was truncated to where layers with a window have freed tokens that it would attend to.
      CacheError: a request was invalid: a negative number of tokens, more than were given, or a row out of range; or a
        plan was made for other tables.

    >>> import jaxkv
    >>> layer = jaxkv.LayerConfig(num_kv_heads=2, head_dim=8)
    >>> cache = jaxkv.init(jaxkv.CacheConfig(layers=(layer,), max_seqs=2, max_seq_len=64, num_blocks=2))
    >>> jaxkv.check(jaxkv.extend(cache, [10, 40]))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    jaxkv.OutOfBlocks: Row 1 (0 tokens, 0 blocks) needs 3 more blocks for 40 tokens, but 1 of 2 blocks is free. ...
    """
    check_on_host(cache, "check")
    groups = jax.device_get(cache.tables)
    lacks = [lack for g, t in enumerate(groups) for lack in _lacks(t, g, cache.config)]
    groups = tuple(seen_by_rows(t, cache.config) for t in groups)
    t = groups[0]  # the same rows fail in every group
    rows = np.flatnonzero(t.failed)
    if not rows.size:
        return
    limit = cache.config.max_seq_len
    too_long = [r for r in rows if t.needed[r] == TOO_LONG]
    senseless = [r for r in rows if t.wanted[r] < 0]
    gone = [r for r in rows if t.needed[r] == GONE]
    if too_long:
        holders = _list(f"row {r} (it holds {t.lengths[r]})" for r in too_long)
        at_once = " at once" if cache.config.is_endless else ""
        raise SequenceTooLong(
            f"More than max_seq_len = {limit} tokens{at_once} were asked for in {holders}. The row is as it was "
            "before; truncate or free it, or give the cache a larger max_seq_len."
        )
    stale = [r for r in rows if t.wanted[r] == STALE]
    senseless = [r for r in senseless if r not in stale]
    if stale:
        raise CacheError(
            f"A step was computed with a plan that was made for other tables, of {_list(f'row {r}' for r in stale)}: "
            "no token of it was stored. Call plan_step after the last function that changes the tables; free clears "
            "the row."
        )
    if senseless:
        raise CacheError(
            f"A request that makes no sense was made for {_list(f'row {r}' for r in senseless)}: a negative number of "
            "tokens, more tokens than the step's arrays have places for, or a row out of range. The row is as it was "
            "before; free clears it."
        )
    if gone:
        asked = _list(f"row {r} ({t.lengths[r]} tokens) to {t.wanted[r]} tokens" for r in gone)
        reaches, evicts = cache.config.group_reaches, cache.config.group_evicts
        named = zip(_sights(cache), reaches, evicts, strict=True)
        sights = _list(dict.fromkeys(f"{s} tokens" if reach else s for s, reach, evict in named if reach or evict))
        raise OutOfWindow(
            f"Truncating {asked} goes back to what layers {sights} have given back. The row "
            "is as it was before; free it and compute its tokens again, or fork it before it goes on."
        )
    # Reports the group that lacks most blocks.
    lack = max(lacks, key=lambda lack: int(lack.needed[rows].max()) - lack.num_free)
    group, needed, held, num_free, num_blocks = lack
    t, parts = groups[group], cache.tables[group].parts
    needs = _list(
        f"row {r} ({t.lengths[r]} tokens, {held[r]} blocks) needs {_more(needed[r])} for {t.wanted[r]} tokens"
        for r in rows
    )
    free = f"{num_free} of {num_blocks} blocks {'is' if num_free == 1 else 'are'} free"
    where = "" if len(groups) == 1 else f" in the layers {_sights(cache)[group]}"
    where += "" if parts == 1 else f" on one of {parts} devices"
    kept = np.count_nonzero(t.kept)
    index = f" (a PrefixCache keeps {kept}: its make_room gives some back)" if kept else ""
    raise OutOfBlocks(
        f"{needs[0].upper()}{needs[1:]}, but {free}{where}{index}. The row is as it was before; free or truncate rows, "
        "or give the cache more num_blocks."
    )


class _Lack(NamedTuple):
    """The blocks that rows need of a group, or of one of its shards, and those that are there."""

    group: int
    needed: np.ndarray  # i32[S]
    held: np.ndarray  # i32[S]
    num_free: int
    num_blocks: int


def _lacks(t: BlockTables, group: int, config: CacheConfig) -> list[_Lack]:
    lines: Any = t.needed, np.sum(t.tables != NULL_BLOCK, axis=1)
    needed, held = (x.reshape(t.parts, -1, config.max_seqs) for x in lines)
    each = t.num_blocks // t.parts
    return [
        _Lack(group, needed[part, 0], held[part].sum(axis=0), int(num_free), each)
        for part, num_free in enumerate(np.atleast_1d(t.num_free))
    ]


def check_invariants(cache: Cache) -> None:
    """Raises AssertionError unless the whole state is consistent. For tests and debugging; reads all arrays.

    >>> import jaxkv
    >>> sizes = dict(num_layers=1, num_kv_heads=2, head_dim=8, max_seqs=2, max_seq_len=64)
    >>> cache = jaxkv.init(jaxkv.CacheConfig.uniform(**sizes, num_blocks=4))
    >>> jaxkv.check_invariants(cache)
    >>> jaxkv.check_invariants(cache.replace(tables=cache.tables * 2))
    Traceback (most recent call last):
    AssertionError: one BlockTables for each group
    """
    check_on_host(cache, "check_invariants")
    config = cache.config
    assert len(cache.tables) == len(config.groups), "one BlockTables for each group"
    assert len(cache.pools) == config.num_layers, "one pool for each layer"
    for layer, pool in enumerate(cache.pools):
        if pool is None:
            stands_alone = config.owner(layer) == layer and config.stack(layer)[0] == layer
            assert not stands_alone, f"layer {layer} has a pool, shares another's, or is stacked behind another"
            continue
        shapes = tuple(None if x is None else x.shape for x in (pool.kv, pool.scale, pool.bounds))
        assert shapes == config.stack_shapes(layer, pool.parts), f"layer {layer}: the pool's shape"
        assert pool.parts == cache.tables[config.group(layer)].parts, f"layer {layer}: parts of tables and pool"
        blocks = pool.kv.shape[0] // len(config.stack(layer)) // pool.parts
        null_blocks = pool.kv[::blocks] if pool.parts == 1 else pool.kv
        # Each process checks its own shards; a cache of NumPy arrays, as from device_get, is whole.
        on_host = not isinstance(null_blocks, jax.Array)
        here = [null_blocks] if on_host else [shard.data for shard in null_blocks.addressable_shards]
        here = here if pool.parts == 1 else [np.asarray(x)[::blocks] for x in here]
        assert not any(np.asarray(x).any() for x in here), f"layer {layer}: the null block was written"
        if pool.bounds is not None:
            _check_bounds(cache, layer)
    groups = jax.device_get(cache.tables)
    for group, t in enumerate(groups):
        _check_tables(t, config, group)
        for field in ("seen", "new", "offsets", "failed", "wanted"):
            said, first = (_said_of_rows(one, field, config) for one in (t, groups[0]))
            # Eviction ends the row's step in its layer.
            alike = (said == first) | ((said == 0) | (first == 0) if field == "new" else False)
            assert alike.all(), f"every group says the same of rows: {field}"


def _check_bounds(cache: Cache, layer: int) -> None:
    """Asserts that the bounds of each block in a stack contain all keys that rows hold there; NaN bounds pass."""
    config, tables = cache.config, jax.device_get(cache.layer(layer).tables)
    tables = relative(tables, config.block_size)
    for one in config.stack(layer):
        pool = cache.pool(one)
        keys, bounds = (np.asarray(x, np.float32)[1:] for x in (numbers(pool, config, one)[:, 0], pool.bounds))
        filled = filled_of(np.asarray(tables.tables), np.asarray(tables.lengths), config.block_size, len(keys))
        is_free = np.arange(config.block_size) >= filled[:, None]
        low, high = bounds[:, 0, :, None], bounds[:, 1, :, None]
        for is_inside, what in ((keys >= low) | np.isnan(low), "below"), ((keys <= high) | np.isnan(high), "above"):
            assert (is_inside | is_free[:, None, :, None]).all(), f"layer {one}: no key is {what} its block's bounds"


def _said_of_rows(t: BlockTables, field: str, config: CacheConfig) -> np.ndarray:
    """Returns a field of a group's tables for rows; asserts that all head rows agree."""
    lines = by_row(getattr(t, field), config)
    assert (lines == lines[0]).all(), f"all heads say the same of a row: {field}"
    return lines[0]


def _check_tables(t: BlockTables, config: CacheConfig, group: int) -> None:
    block_size, num_blocks = config.block_size, t.free_list.shape[0]
    most = MOST_TOKENS if config.is_endless else config.max_seq_len
    held_most = most if t.evicted is None else config.max_seq_len
    assert ((t.lengths >= 0) & (t.lengths <= held_most)).all(), f"lengths fit: {t.lengths}"
    assert ((t.new >= 0) & (t.new <= t.lengths)).all(), f"new within [0, lengths]: {t.new} of {t.lengths}"
    if t.evicted is not None and t.thinned is not None:
        assert ((t.evicted >= 0) & (t.seen <= most)).all(), f"seen fits: {t.lengths}, {t.evicted}"
        assert ((t.thinned >= 0) & (t.thinned <= t.lengths - t.new)).all(), f"thinned: {t.thinned} of {t.lengths}"
        assert ((t.thinned == 0) | (t.evicted > 0)).all(), f"thinned, so some are gone: {t.thinned}, {t.evicted}"
    each, numbers, lines = num_blocks // t.parts, block_numbers(t), np.split(t.tables, t.parts)
    num_free = np.atleast_1d(t.num_free)
    assert ((num_free >= 0) & (num_free <= each)).all(), f"num_free within [0, {each}]: {t.num_free}"
    for own, entries in zip(np.split(numbers, t.parts), lines, strict=True):
        assert np.isin(entries, [NULL_BLOCK, *own]).all(), "table entries name blocks, of their part"
    used = t.tables != NULL_BLOCK
    assert t.tables.shape[1] == config.table_widths[group], f"the table's columns: {t.tables.shape}"
    column = np.arange(t.tables.shape[1])
    end = np.max(np.where(used, column + 1, 0), axis=1)
    sinks = config.group_sinks[group]
    first_seen = config.first_seen(group, t.lengths - t.new)
    assert (t.skipped is not None) == config.group_slides[group], "rows slide where they can outgrow their table"
    if t.skipped is not None:
        assert (t.skipped % config.group_units[group] == 0).all(), f"rows slide by whole chunks: {t.skipped}"
        assert ((t.skipped >= 0) & ((t.skipped == 0) | (t.lengths > 0))).all(), f"an empty row begins anew: {t.skipped}"
        assert ((t.skipped == 0) | (first_seen >= sinks + t.skipped)).all(), f"what is seen is there: {t.skipped}"
        first_seen, t = first_seen - t.skipped, relative(t, block_size)
    first = np.min(np.where(used & (column >= sinks), column, end[:, None]), axis=1)
    together = (column >= first[:, None]) | (column < sinks)
    assert (used == (together & (column < end[:, None]))).all(), "a row's entries stand together"
    first = np.where((first <= sinks) | (end <= sinks), 0, first)
    assert (end >= -(-t.lengths // block_size)).all(), f"every row has the blocks for its tokens: {end}, {t.lengths}"
    seen = np.where(t.lengths > 0, first_seen, 0)
    assert (first <= seen).all(), f"what this step's tokens see is held: {first}, {seen}"
    counts = np.bincount(t.tables.ravel(), minlength=len(t.refcounts))
    counts[NULL_BLOCK] = 0
    assert np.isin(np.flatnonzero(t.kept), numbers).all(), "the null block is nobody's"
    holders = counts + (t.kept != 0)
    lists = zip(np.asarray(t.free_list).reshape(t.parts, -1), num_free.tolist(), strict=True)
    free_of = [own[each - count :] for own, count in lists]
    free = np.concatenate(free_of)
    assert len(set(free.tolist())) == len(free) and np.isin(free, numbers).all(), "a block is free at most once"
    in_part = zip(np.split(numbers, t.parts), free_of, strict=True)
    assert all(np.isin(some, own).all() for own, some in in_part), "a block is free in its part"
    assert (holders[free] == 0).all(), "a free block is in no table and not kept"
    assert len(free) + np.count_nonzero(holders) == num_blocks, "every block is free, in a table or kept"
    expected = np.maximum(holders, 1)
    expected[NULL_BLOCK] = 0
    assert (t.refcounts == expected).all(), f"refcounts {t.refcounts}, but there are {expected}"
    full = column < (t.lengths // block_size)[:, None]
    assert config.contiguous or (holders[t.tables[used & ~full]] == 1).all(), (
        "a block that can still be written has one owner"
    )
    assert t.num_used <= t.peak <= num_blocks, "peak is the most ever in use"
    assert (t.failed | (t.wanted == 0)).all(), "wanted only where failed"


def stats(cache: Cache) -> dict[str, Any]:
    """Returns the usage of a cache as plain numbers.

    Returns:
      A dict: blocks (total, used, free, peak, shared by several rows, kept by a `PrefixCache`), tokens, bytes, rows in
      use, failed rows, and waste: slots in rows' blocks that hold no token, in total and per row. Shared blocks are
      full. With several groups of layers, blocks and waste are sums; `groups` has the numbers of each group. Tokens are
      those seen; `held_per_row` in `groups` counts those that layers which evict still hold, summed over heads if they
      evict by heads.

    >>> import jaxkv
    >>> layer = jaxkv.LayerConfig(num_kv_heads=2, head_dim=8)
    >>> cache = jaxkv.init(jaxkv.CacheConfig(layers=(layer,), max_seqs=2, max_seq_len=64, num_blocks=8))
    >>> jaxkv.stats(jaxkv.extend(cache, [20, 0]))["waste"]
    12
    """
    check_on_host(cache, "stats")
    config, tables = cache.config, jax.device_get(cache.tables)
    groups = [_group_stats(t, config, g) for g, t in enumerate(tables)]
    t = seen_by_rows(tables[0], config)
    waste_per_row = np.sum([group["waste_per_row"] for group in groups], axis=0)
    summed = {
        field: sum(group[field] for group in groups) for field in groups[0] if field.startswith(("num", "blocks"))
    }
    return summed | {
        "block_size": config.block_size,
        "rows": t.lengths.shape[0],
        "rows_used": int((t.lengths > 0).sum()),
        "rows_failed": int(t.failed.sum()),
        "tokens": int(t.lengths.sum()),
        "tokens_per_row": t.lengths.tolist(),
        "waste": int(waste_per_row.sum()),
        "waste_per_row": waste_per_row.tolist(),
        "bytes": cache.bytes,
        "bytes_used": sum(group["bytes_used"] for group in groups),
        "bytes_peak": sum(group["bytes_peak"] for group in groups),
        "dense_bytes": config.dense_bytes,
        "groups": groups,
    }


def _group_stats(t: BlockTables, config: CacheConfig, group: int) -> dict[str, Any]:
    num_blocks = t.free_list.shape[0]
    used = int(t.num_used)
    entries = t.tables != NULL_BLOCK
    end = np.max(np.where(entries, np.arange(1, t.tables.shape[1] + 1), 0), axis=1)
    of_columns = relative(t, config.block_size).lengths
    counts = np.bincount(t.tables.ravel(), minlength=len(t.refcounts))[1:]
    return {
        "window": config.group_windows[group],
        "chunk": config.group_chunks[group],
        "evict": config.group_evicts[group],
        "layers": config.groups[group],
        "num_blocks": num_blocks,
        "blocks_used": used,
        "blocks_free": num_blocks - used,
        "blocks_shared": int((counts > 1).sum()),
        "blocks_kept": int(np.count_nonzero(t.kept)),
        "blocks_peak": int(t.peak),
        # A row has empty slots after its last token only; blocks that left a window precede.
        "waste_per_row": row_sums(end * config.block_size - of_columns, config).tolist(),
        "held_per_row": row_sums(t.lengths, config).tolist(),
        "bytes_used": used * config.bytes_per_group_block(group),
        "bytes_peak": int(t.peak) * config.bytes_per_group_block(group),
    }


def check_on_host(cache: Cache, function: str) -> None:
    """Raises ValueError unless `cache` is one cache with known numbers, which `function` reads."""
    check_cache(cache)
    if isinstance(cache.lengths, jax.core.Tracer):
        raise ValueError(
            f"{function} cannot be part of jit, grad or vmap: it reads numbers of the cache, which are known outside "
            "alone. Call it between steps."
        )
    if (shape := np.shape(cache.lengths)[:-1]) != ():
        raise ValueError(
            f"This is a stack of {list(shape)} caches, and {function} takes one by itself: "
            "jax.tree.map(lambda x: x[i], caches)."
        )


def _list(parts: Any) -> str:
    parts = list(parts)
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _sights(cache: Cache) -> list[str]:
    """Returns what tokens attend to in the layers of each group, in words."""
    return [cache.config.layers[layers[0]].sight for layers in cache.config.groups]


def _more(blocks: int) -> str:
    return f"{blocks} more block{'' if blocks == 1 else 's'}"
