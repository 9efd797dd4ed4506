"""Checks and statistics of a cache on the host: failed rows, consistency, usage. They read arrays from the device."""

from typing import Any, NamedTuple

import jax
import numpy as np

from jaxkv._core.cache.cache import Cache, check_cache
from jaxkv._core.cache.key_bounds import count_filled
from jaxkv._core.cache.pool_access import decode_keys
from jaxkv._core.cache.state_checks import check_states, count_states, describe_snapshots
from jaxkv._core.config.cache_config import CacheConfig
from jaxkv._core.config.validation import MOST_TOKENS
from jaxkv._core.state.columns import relative
from jaxkv._core.state.errors import CacheError, OutOfBlocks, OutOfWindow, SequenceTooLong
from jaxkv._core.state.head_rows import group_by_row, list_blocks, row_tables, sum_rows
from jaxkv._core.state.state import GONE, NULL_BLOCK, STALE, TOO_LONG, BlockTables

LEFT_OUT = (
    "A failed row keeps the tokens that it had, and steps leave it out until free empties it, or swap_out and swap_in, "
    "which keep its tokens. To go on,"
)
UNCHANGED = "The row is unchanged"


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
    lacks = [lack for g, tables in enumerate(groups) for lack in _lacks(tables, g, cache.config)]
    groups = tuple(row_tables(tables, cache.config) for tables in groups)
    tables = groups[0]  # the same rows fail in every group
    rows = np.flatnonzero(tables.failed)
    if not rows.size:
        return
    limit = cache.config.max_seq_len
    too_long = [r for r in rows if tables.needed[r] == TOO_LONG]
    senseless = [r for r in rows if tables.wanted[r] < 0]
    gone = [r for r in rows if tables.needed[r] == GONE]
    if too_long:
        holders = _list(f"row {r} (it holds {tables.lengths[r]})" for r in too_long)
        at_once = " at once" if cache.config.is_endless else ""
        raise SequenceTooLong(
            f"The limit of max_seq_len = {limit} tokens{at_once} would be exceeded by {holders}. {LEFT_OUT} truncate "
            "such rows in the cache of before the call, or give the cache a larger max_seq_len."
        )
    stale = [r for r in rows if tables.wanted[r] == STALE]
    senseless = [r for r in senseless if r not in stale]
    if stale:
        raise CacheError(
            f"The plan of a step does not fit the block tables of {_list(f'row {r}' for r in stale)}, so no token of "
            "it was stored there. Call plan_step after the last function that changes the tables. free clears the "
            "failure."
        )
    if senseless:
        raise CacheError(
            f"The request for {_list(f'row {r}' for r in senseless)} is invalid: it has a negative number of tokens, "
            "more tokens than the step's arrays have slots for, or a row index out of range. If extend was not called "
            f"before this step, its numbers are those of the last one. {UNCHANGED}; free clears the failure."
        )
    if gone and cache.state_slots is not None:
        asked = _list(f"row {r} ({tables.lengths[r]} tokens) to {tables.wanted[r]} tokens" for r in gone)
        layers = _list(map(str, cache.config.recurrent_layers))
        raise OutOfWindow(
            f"Truncating {asked} goes back to where recurrent layers ({layers}) hold no state: there is the one of the "
            f"present length, and that of 0 tokens{describe_snapshots(cache, map(int, gone))}. {UNCHANGED}: free it "
            "and compute its tokens again, or fork it before the tokens that you may drop. Where keep is to drop "
            "tokens of a step, name the rows in extend(guesses=)."
        )
    if gone:
        asked = _list(f"row {r} ({tables.lengths[r]} tokens) to {tables.wanted[r]} tokens" for r in gone)
        forgetful = [g for g, rule in enumerate(cache.config.retentions) if rule.visible_tokens or rule.evict]
        rules = map(cache.config.name_kept, forgetful)
        raise OutOfWindow(
            f"Truncating {asked} goes back to tokens that layers that keep {_list(dict.fromkeys(rules))} have freed. "
            f"{UNCHANGED}: free it and compute its tokens again, or fork it before the tokens that you may drop."
        )
    # Reports the group that lacks most blocks.
    lack = max(lacks, key=lambda lack: int(lack.needed[rows].max()) - lack.num_free)
    group, needed, row_blocks, num_free, num_blocks = lack
    tables, num_shards = groups[group], cache.tables[group].num_shards
    is_late = all(needed[r] <= num_free for r in rows)  # blocks have been freed since
    need = "needed" if is_late else "needs"
    needs = _list(
        f"row {r} ({_count(tables.lengths[r], 'token')}, {_count(row_blocks[r], 'block')}) {need} "
        f"{_count(needed[r], 'more block')} for {_count(tables.wanted[r], 'token')}"
        for r in rows
    )
    free = f"{'only now ' * is_late}{num_free} of {num_blocks} blocks {'is' if num_free == 1 else 'are'} free"
    where = "" if len(groups) == 1 else f" in the layers {cache.config.describe_group(group)}"
    where += "" if num_shards == 1 else f" on one of {num_shards} devices"
    kept = np.count_nonzero(tables.kept)
    index = f" (a PrefixCache keeps {kept}: its make_room frees some)" if kept else ""
    raise OutOfBlocks(
        f"{_capitalize(needs)}, but {free}{where}{index}. {LEFT_OUT} free or truncate rows in the cache of before the "
        f"call, or raise the cache's {cache.config.size_argument}."
    )


class _Lack(NamedTuple):
    """The blocks that rows need of a group, or of one of its shards, and those that are there."""

    group: int
    needed: np.ndarray  # i32[S]
    row_blocks: np.ndarray  # i32[S]: those that they have
    num_free: int
    num_blocks: int


def _lacks(tables: BlockTables, group: int, config: CacheConfig) -> list[_Lack]:
    lines: Any = tables.needed, np.sum(tables.tables != NULL_BLOCK, axis=1)
    needed, row_blocks = (x.reshape(tables.num_shards, -1, config.max_seqs) for x in lines)
    each = tables.num_blocks // tables.num_shards
    return [
        _Lack(group, needed[shard, 0], row_blocks[shard].sum(axis=0), int(num_free), each)
        for shard, num_free in enumerate(np.atleast_1d(tables.num_free))
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
    assert len(cache.pools) == len(config.layers), "one pool for each layer"
    for layer, pool in enumerate(cache.pools):
        if pool is None:
            stands_alone = config.owner(layer) == layer and config.stack(layer)[:1] == (layer,)
            assert not stands_alone, f"layer {layer} has a pool, shares another's, or is stacked behind another"
            continue
        shapes = tuple(None if x is None else x.shape for x in pool.arrays)
        assert shapes == config.stack_shapes(layer, pool.num_shards), f"layer {layer}: the pool's shape"
        num_shards = cache.tables[config.group(layer)].num_shards
        assert pool.num_shards == num_shards, f"layer {layer}: shards of tables and pool"
        blocks = pool.kv.shape[0] // len(config.stack(layer)) // pool.num_shards
        null_blocks = pool.kv[::blocks] if pool.num_shards == 1 else pool.kv
        # Each process checks its own shards; a cache of NumPy arrays, as from device_get, is whole.
        on_host = not isinstance(null_blocks, jax.Array)
        here = [null_blocks] if on_host else [shard.data for shard in null_blocks.addressable_shards]
        here = here if pool.num_shards == 1 else [np.asarray(x)[::blocks] for x in here]
        assert not any(np.asarray(x).any() for x in here), f"layer {layer}: the null block was written"
        if pool.bounds is not None:
            _check_bounds(cache, layer)
    check_states(cache)
    groups = jax.device_get(cache.tables)
    for group, tables in enumerate(groups):
        _check_tables(tables, config, group)
        for field in ("seen", "new", "offsets", "failed", "wanted"):
            said, first = (_row_field(candidate, field, config) for candidate in (tables, groups[0]))
            # Eviction ends the row's step in its layer.
            alike = (said == first) | ((said == 0) | (first == 0) if field == "new" else False)
            assert alike.all(), f"every group says the same of rows: {field}"


def _check_bounds(cache: Cache, layer: int) -> None:
    """Asserts that the bounds of each block in a stack contain all keys that rows hold there; NaN bounds pass."""
    config, tables = cache.config, jax.device_get(cache.layer(layer).tables)
    tables = relative(tables, config.block_size)
    for member in config.stack(layer):
        pool = cache.pool(member)
        keys, bounds = (np.asarray(x, np.float32)[1:] for x in (decode_keys(pool, config, member), pool.bounds))
        filled = count_filled(np.asarray(tables.tables), np.asarray(tables.lengths), config.block_size, len(keys))
        is_free = np.arange(config.block_size) >= filled[:, None]
        low, high = bounds[:, 0, :, None], bounds[:, 1, :, None]
        for is_inside, what in ((keys >= low) | np.isnan(low), "below"), ((keys <= high) | np.isnan(high), "above"):
            assert (is_inside | is_free[:, None, :, None]).all(), f"layer {member}: no key is {what} its block's bounds"


def _row_field(tables: BlockTables, field: str, config: CacheConfig) -> np.ndarray:
    """Returns a field of a group's tables for rows; asserts that all head rows agree."""
    lines = group_by_row(getattr(tables, field), config)
    assert (lines == lines[0]).all(), f"all heads say the same of a row: {field}"
    return lines[0]


def _check_tables(tables: BlockTables, config: CacheConfig, group: int) -> None:
    block_size, num_blocks = config.block_size, tables.free_list.shape[0]
    most = MOST_TOKENS if config.is_endless else config.max_seq_len
    held_most = most if tables.evicted is None else config.max_seq_len
    assert ((tables.lengths >= 0) & (tables.lengths <= held_most)).all(), f"lengths fit: {tables.lengths}"
    assert ((tables.new >= 0) & (tables.new <= tables.lengths)).all(), (
        f"new within [0, lengths]: {tables.new} of {tables.lengths}"
    )
    if tables.evicted is not None and tables.thinned is not None:
        assert ((tables.evicted >= 0) & (tables.seen <= most)).all(), f"seen fits: {tables.lengths}, {tables.evicted}"
        assert ((tables.thinned >= 0) & (tables.thinned <= tables.lengths - tables.new)).all(), (
            f"thinned: {tables.thinned} of {tables.lengths}"
        )
        assert ((tables.thinned == 0) | (tables.evicted > 0)).all(), (
            f"thinned, so some are gone: {tables.thinned}, {tables.evicted}"
        )
    numbers, lines = list_blocks(tables), np.split(tables.tables, tables.num_shards)
    each, num_free = num_blocks // tables.num_shards, np.atleast_1d(tables.num_free)
    assert ((num_free >= 0) & (num_free <= each)).all(), f"num_free within [0, {each}]: {tables.num_free}"
    for own, entries in zip(np.split(numbers, tables.num_shards), lines, strict=True):
        assert np.isin(entries, [NULL_BLOCK, *own]).all(), "table entries name blocks, of their shard"
    used = tables.tables != NULL_BLOCK
    assert tables.tables.shape[1] == config.table_widths[group], f"the table's columns: {tables.tables.shape}"
    column = np.arange(tables.tables.shape[1])
    end = np.max(np.where(used, column + 1, 0), axis=1)
    sink_blocks = config.group_sink_blocks[group]
    first_seen = config.first_retained_block(group, tables.lengths - tables.new)
    assert (tables.skipped is not None) == config.group_slides[group], "rows slide where they can outgrow their table"
    if tables.skipped is not None:
        assert (tables.skipped % config.group_units[group] == 0).all(), f"rows slide by whole chunks: {tables.skipped}"
        assert ((tables.skipped >= 0) & ((tables.skipped == 0) | (tables.lengths > 0))).all(), (
            f"an empty row begins anew: {tables.skipped}"
        )
        assert ((tables.skipped == 0) | (first_seen >= sink_blocks + tables.skipped)).all(), (
            f"what is seen is there: {tables.skipped}"
        )
        first_seen, tables = first_seen - tables.skipped, relative(tables, block_size)
    first = np.min(np.where(used & (column >= sink_blocks), column, end[:, None]), axis=1)
    together = (column >= first[:, None]) | (column < sink_blocks)
    assert (used == (together & (column < end[:, None]))).all(), "a row's entries stand together"
    first = np.where((first <= sink_blocks) | (end <= sink_blocks), 0, first)
    assert (end >= -(-tables.lengths // block_size)).all(), (
        f"every row has the blocks for its tokens: {end}, {tables.lengths}"
    )
    seen = np.where(tables.lengths > 0, first_seen, 0)
    assert (first <= seen).all(), f"what this step's tokens see is held: {first}, {seen}"
    counts = np.bincount(tables.tables.ravel(), minlength=len(tables.refcounts))
    counts[NULL_BLOCK] = 0
    assert np.isin(np.flatnonzero(tables.kept), numbers).all(), "the null block is nobody's"
    holders = counts + (tables.kept != 0)
    lists = zip(np.asarray(tables.free_list).reshape(tables.num_shards, -1), num_free.tolist(), strict=True)
    free_of = [own[each - count :] for own, count in lists]
    free = np.concatenate(free_of)
    assert len(set(free.tolist())) == len(free) and np.isin(free, numbers).all(), "a block is free at most once"
    in_shard = zip(np.split(numbers, tables.num_shards), free_of, strict=True)
    assert all(np.isin(some, own).all() for own, some in in_shard), "a block is free in its shard"
    assert (holders[free] == 0).all(), "a free block is in no table and not kept"
    assert len(free) + np.count_nonzero(holders) == num_blocks, "every block is free, in a table or kept"
    expected = np.maximum(holders, 1)
    expected[NULL_BLOCK] = 0
    assert (tables.refcounts == expected).all(), f"refcounts {tables.refcounts}, but there are {expected}"
    full = column < (tables.lengths // block_size)[:, None]
    assert config.contiguous or (holders[tables.tables[used & ~full]] == 1).all(), (
        "a block that can still be written has one owner"
    )
    assert tables.num_used <= tables.peak <= num_blocks, "peak is the most ever in use"
    assert (tables.failed | (tables.wanted == 0)).all(), "wanted only where failed"


def stats(cache: Cache) -> dict[str, Any]:
    """Returns the usage of a cache as plain numbers.

    Returns:
      A dict: blocks (total, used, free, peak, shared by several rows, kept by a `PrefixCache`), tokens, bytes, rows in
      use, failed rows, and waste: slots in rows' blocks that hold no token, in total and per row. Shared blocks are
      full. With several groups of layers, blocks and waste are sums; `groups` has the numbers of each group. Tokens are
      those seen; `held_per_row` in `groups` counts those that layers which evict still hold, summed over heads if they
      evict by heads. With recurrent layers, `states` has the use of the slots for states.

    >>> import jaxkv
    >>> layer = jaxkv.LayerConfig(num_kv_heads=2, head_dim=8)
    >>> cache = jaxkv.init(jaxkv.CacheConfig(layers=(layer,), max_seqs=2, max_seq_len=64, num_blocks=8))
    >>> jaxkv.stats(jaxkv.extend(cache, [20, 0]))["waste"]
    12
    """
    check_on_host(cache, "stats")
    config, tables = cache.config, jax.device_get(cache.tables)
    groups = [_group_stats(group_tables, config, g) for g, group_tables in enumerate(tables)]
    group_tables = row_tables(tables[0], config)
    waste_per_row = np.sum([group["waste_per_row"] for group in groups], axis=0)
    summed = {
        field: sum(group[field] for group in groups) for field in groups[0] if field.startswith(("num", "blocks"))
    }
    return summed | {
        "block_size": config.block_size,
        "rows": group_tables.lengths.shape[0],
        "rows_used": int((group_tables.lengths > 0).sum()),
        "rows_failed": int(group_tables.failed.sum()),
        "tokens": int(group_tables.lengths.sum()),
        "tokens_per_row": group_tables.lengths.tolist(),
        "waste": int(waste_per_row.sum()),
        "waste_per_row": waste_per_row.tolist(),
        "bytes": cache.bytes,
        "bytes_used": sum(group["bytes_used"] for group in groups),
        "bytes_peak": sum(group["bytes_peak"] for group in groups),
        "dense_bytes": config.dense_bytes,
        **count_states(cache),
        "groups": groups,
    }


def _group_stats(tables: BlockTables, config: CacheConfig, group: int) -> dict[str, Any]:
    num_blocks = tables.free_list.shape[0]
    used = int(tables.num_used)
    entries = tables.tables != NULL_BLOCK
    end = np.max(np.where(entries, np.arange(1, tables.tables.shape[1] + 1), 0), axis=1)
    of_columns = relative(tables, config.block_size).lengths
    counts = np.bincount(tables.tables.ravel(), minlength=len(tables.refcounts))[1:]
    return {
        "window": config.group_windows[group],
        "chunk": config.group_chunks[group],
        "evict": config.group_evicts[group],
        "layers": config.groups[group],
        "num_blocks": num_blocks,
        "blocks_used": used,
        "blocks_free": num_blocks - used,
        "blocks_shared": int((counts > 1).sum()),
        "blocks_kept": int(np.count_nonzero(tables.kept)),
        "blocks_peak": int(tables.peak),
        # A row has empty slots after its last token only; blocks that left a window precede.
        "waste_per_row": sum_rows(end * config.block_size - of_columns, config).tolist(),
        "held_per_row": sum_rows(tables.lengths, config).tolist(),
        "bytes_used": used * config.bytes_per_group_block(group),
        "bytes_peak": int(tables.peak) * config.bytes_per_group_block(group),
    }


def check_on_host(cache: Cache, function: str) -> None:
    """Raises ValueError unless `cache` is one cache with known numbers, which `function` reads."""
    check_cache(cache)
    if isinstance(cache.lengths, jax.core.Tracer):
        raise ValueError(
            f"{function} cannot be part of jit, grad or vmap: it reads numbers of the cache, which are known outside "
            "alone. Call it between steps."
        )
    if isinstance(cache.lengths, jax.ShapeDtypeStruct):
        raise ValueError(
            f"{function} reads numbers of the cache, and this one has only shapes, as jax.eval_shape returns them: "
            "make it with jaxkv.init. Its sizes are in cache.config."
        )
    if (shape := np.shape(cache.lengths)[:-1]) != ():
        raise ValueError(
            f"This is a stack of {list(shape)} caches, and {function} takes one by itself: "
            "jax.tree.map(lambda x: x[i], caches)."
        )


def _list(items: Any) -> str:
    items = list(items)
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def _capitalize(sentence: str) -> str:
    return f"{sentence[0].upper()}{sentence[1:]}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
