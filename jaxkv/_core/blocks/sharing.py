"""Rows that share blocks: `fork`, `reorder` and `truncate`.

They keep the invariant that a block that can still be written belongs to exactly one row: whoever would write into a
shared block gets a copy of it here, so that the decode path never copies.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._core.blocks.allocator import count_blocks, grant_rows, replace_entries, take_blocks
from jaxkv._core.blocks.block_copy import copy_blocks, stack_blocks
from jaxkv._core.blocks.slot_allocator import adopt_slots, has_snapshot, refuse_guesses, roll_slots_back
from jaxkv._core.blocks.tables import mark_failed
from jaxkv._core.cache.cache import Cache, check_cache
from jaxkv._core.state.arguments import is_known, read_numbers, row_counts, row_indices, scatter_rows
from jaxkv._core.state.columns import blocks_of, relative
from jaxkv._core.state.head_rows import any_head, repeat_for_heads, source_head_rows, sum_needs, sum_shards
from jaxkv._core.state.state import GONE, NULL_BLOCK, BlockTables


def fork(cache: Cache, src: Any, dst: Any) -> Cache:
    """Makes rows `dst` continue from rows `src`: full blocks are shared, the partial last block is copied.

    The blocks that a dst row held before are freed, and used for the copies if all copies can then be made. A dst row
    without a block for its copy stays as it was and is marked in `cache.failed`.

    Args:
      src, dst: row indices, or equally long lists of them. No dst row may be the src row of another one.

    Raises:
      ValueError, IndexError: rows known on the host overlap or are out of range. On the device, a dst row with such a
        src is marked in `cache.failed`. A dst out of range, or below 0, names no row that could be marked, and is
        ignored, as padding is in `free`.

    Sharing blocks by reference counts follows vLLM (https://arxiv.org/abs/2309.06180).

    >>> import jaxkv
    >>> layer = jaxkv.LayerConfig(num_kv_heads=2, head_dim=8)
    >>> cache = jaxkv.init(jaxkv.CacheConfig(layers=(layer,), max_seqs=3, max_seq_len=64, num_blocks=8))
    >>> cache = jaxkv.fork(jaxkv.extend(cache, [40, 0, 0]), 0, [1, 2])
    >>> cache.lengths.tolist(), cache.blocks_in_use  # 2 full blocks shared, 3 partial ones
    ([40, 40, 40], 5)
    """
    check_cache(cache)
    rows = cache.lengths.shape[0]
    given = read_numbers("src", src), read_numbers("dst", dst)
    src, dst = row_indices("src", given[0], rows), row_indices("dst", given[1], rows)
    if all(map(is_known, given)):
        _check_pairs(*(np.atleast_1d(x).tolist() for x in given))
    if src.shape not in (dst.shape, (1,)):
        raise ValueError(f"src and dst must be equally long, but have {src.shape[0]} and {dst.shape[0]} rows.")
    return _fork(cache, src, dst)


@jax.jit
def _fork(cache: Cache, src: jax.Array, dst: jax.Array) -> Cache:
    rows = cache.lengths.shape[0]
    itself = jnp.arange(rows, dtype=jnp.int32)
    asked = scatter_rows(itself, dst, jnp.broadcast_to(src, dst.shape))
    source = jnp.clip(asked, 0, rows - 1)
    moved = asked != itself
    sensible = (asked == source) & ~moved[source]
    granted = _servable(cache, moved & sensible, lambda tables, rows: _adoption(cache, tables, source, rows))
    return _become(cache, source, granted, moved & ~granted, sensible)


def share_first_blocks(cache: Cache, src: Any, dst: Any, num_blocks: Any) -> Cache:
    """Makes an empty row `dst` begin with the first `num_blocks` blocks of row `src`, which must be full.

    Every layer must keep all its tokens.
    """

    def begin(tables: BlockTables) -> BlockTables:
        taken = _columns(tables)[0] < num_blocks
        row = jnp.where(taken, tables.tables[src], tables.tables[dst])
        tables = replace_entries(tables, tables.tables.at[dst].set(row))
        return dataclasses.replace(
            tables,
            lengths=tables.lengths.at[dst].set(num_blocks * cache.config.block_size),
            new=tables.new.at[dst].set(0),
        )

    return cache.replace(tables=tuple(map(begin, cache.tables)))


def reorder(cache: Cache, order: Any) -> Cache:
    """Makes every row s a fork of row `order[s]`, all at once, as in beam search.

    The call is all or nothing: with too few blocks for the copies nothing changes, and every row that should have
    changed is marked in `cache.failed`. A permutation copies nothing.

    Args:
      order: `i32[S]`; `order[s] == s` leaves row s alone.

    >>> import jaxkv
    >>> layer = jaxkv.LayerConfig(num_kv_heads=2, head_dim=8)
    >>> cache = jaxkv.init(jaxkv.CacheConfig(layers=(layer,), max_seqs=3, max_seq_len=64, num_blocks=8))
    >>> jaxkv.reorder(jaxkv.extend(cache, [40, 20, 5]), [1, 0, 0]).lengths.tolist()
    [20, 40, 40]
    """
    check_cache(cache)
    rows = cache.lengths.shape[0]
    if is_known(order := read_numbers("order", order)):
        row_indices("order", order, rows)
    return _reorder(cache, row_counts("order", order, rows))


@jax.jit
def _reorder(cache: Cache, order: jax.Array) -> Cache:
    rows = cache.lengths.shape[0]
    moved = order != jnp.arange(rows, dtype=jnp.int32)
    source = jnp.clip(order, 0, rows - 1)
    sensible = jnp.all(source == order)
    enough = sensible & _all_fit(cache, [_adoption(cache, tables, source, moved) for tables in cache.tables])
    return _become(cache, source, moved & enough, moved & ~enough, sensible)


def truncate(cache: Cache, lengths: Any) -> Cache:
    """Rolls rows back to their first `lengths[s]` tokens and frees the blocks no longer needed, reserved ones too.

    A row that is not longer stays as it is. If a row's new last block is partial and shared, the row gets a copy of the
    block. A row stays as it was and is marked in `cache.failed` if there is no free block for that copy, if layers with
    a sliding window have freed tokens that the next token would attend to, or if `evict` has dropped some of the tokens
    that would stay. So is a row with states, unless it goes back to 0 tokens or to one of its `snapshots`. Otherwise
    rolling back to where the last `extend` started succeeds, unless tokens were evicted since.

    Args:
      lengths: `i32[S]`, evicted tokens counted too.

    >>> import jaxkv
    >>> layer = jaxkv.LayerConfig(num_kv_heads=2, head_dim=8)
    >>> cache = jaxkv.init(jaxkv.CacheConfig(layers=(layer,), max_seqs=2, max_seq_len=64, num_blocks=8))
    >>> jaxkv.truncate(jaxkv.extend(cache, [40, 20]), [10, 64]).lengths.tolist()
    [10, 20]
    """
    check_cache(cache)
    return _truncate(cache, row_counts("lengths", lengths, cache.lengths.shape[0]))


@jax.jit
def _truncate(cache: Cache, target: jax.Array) -> Cache:
    refuse_guesses(cache, "rows are truncated")
    shorter = (target >= 0) & (target < cache.lengths)
    gone = shorter & (target > 0) & ~has_snapshot(cache, target)
    for group, tables in enumerate(cache.tables):
        if tables.evicted is not None and tables.thinned is not None:
            thinned = repeat_for_heads(target, tables) < tables.evicted + tables.thinned
            gone |= shorter & (target > 0) & any_head(thinned, cache.config)
            continue
        sink_blocks = cache.config.group_sink_blocks[group]
        first, end = cache.config.first_retained_block(group, target), count_blocks(target, cache.config.block_size)
        block = _columns(tables)
        if tables.skipped is not None:
            block = blocks_of(block, tables.skipped[:, None], sink_blocks)
            gone |= shorter & (jnp.maximum(first, sink_blocks) < jnp.minimum(end, sink_blocks + tables.skipped))
        seen = (block >= first[:, None]) & (block < end[:, None])
        gone |= shorter & (seen & (tables.tables == NULL_BLOCK)).any(axis=1)
    granted = _servable(cache, shorter & ~gone, lambda tables, rows: _truncation(cache, tables, target, rows))

    def shorten(tables: BlockTables) -> BlockTables:
        refused, needed = (shorter & ~granted) | (target < 0), jnp.where(gone, GONE, 1)
        tables = mark_failed(tables, refused, jnp.where(target < 0, -1, target), needed)
        rows, lengths = repeat_for_heads(granted, tables), _count_held(tables, target)
        emptied = rows & repeat_for_heads(target == 0, tables)
        return dataclasses.replace(
            tables,
            lengths=jnp.where(rows, lengths, tables.lengths),
            new=jnp.where(rows, 0, tables.new),
            skipped=None if tables.skipped is None else jnp.where(emptied, 0, tables.skipped),
            evicted=None if tables.evicted is None else jnp.where(emptied, 0, tables.evicted),
            thinned=None if tables.thinned is None else jnp.where(emptied, 0, tables.thinned),
        )

    changed = _carry_out(cache, lambda tables: _truncation(cache, tables, target, granted), shorten)
    return changed.replace(state_slots=roll_slots_back(cache, target, granted))


def _count_held(tables: BlockTables, target: jax.Array) -> jax.Array:
    """Returns how many of the first `target` i32[S] tokens of each row are held, for each head row."""
    target = repeat_for_heads(target, tables)
    return target if tables.evicted is None else jnp.maximum(target - tables.evicted, 0)


class _Plan(NamedTuple):
    """Planned changes to the tables of one group."""

    entries: jax.Array  # i32[S, M]: the new table, without the last blocks that will be copied
    copied: jax.Array  # bool[S]: whether the row gets a copy of a block
    block: jax.Array  # i32[S]: the block that is copied
    column: jax.Array  # i32[S]: the column of the copy in the row's table


def _adoption(cache: Cache, tables: BlockTables, source: jax.Array, moved: jax.Array) -> _Plan:
    """Plans that rows under `moved` become copies of rows `source`."""
    source, moved = source_head_rows(source, tables), repeat_for_heads(moved, tables)
    block_size, length = cache.config.block_size, relative(tables, cache.config.block_size).lengths[source]
    if cache.config.contiguous:  # every row keeps its own block
        first_column = jnp.zeros_like(source)
        return _Plan(tables.tables, moved & (length > 0), tables.tables[source, 0], first_column)
    # If a source row moves too, the first row that becomes it inherits its last block; all others need a copy.
    index = jnp.arange(source.shape[0], dtype=jnp.int32)
    takers = jnp.where(moved, index, source.shape[0])
    first_taker = jnp.full_like(source, source.shape[0]).at[source].min(takers)
    inherits = moved[source] & (first_taker[source] == index)
    copied = moved & (length % block_size > 0) & ~inherits
    keep = count_blocks(length, block_size) - copied.astype(jnp.int32)
    entries = jnp.where(_columns(tables) < keep[:, None], tables.tables[source], NULL_BLOCK)
    column = jnp.minimum(length // block_size, entries.shape[1] - 1)
    return _Plan(jnp.where(moved[:, None], entries, tables.tables), copied, tables.tables[source, column], column)


def _truncation(cache: Cache, tables: BlockTables, target: jax.Array, shorter: jax.Array) -> _Plan:
    """Plans that rows under `shorter` keep their first `target` tokens."""
    target, shorter = _count_held(tables, target), repeat_for_heads(shorter, tables)
    block_size = cache.config.block_size
    if tables.skipped is not None:  # columns count from the first block that stays in the table
        target = jnp.maximum(target - tables.skipped * block_size, 0)
    column = jnp.clip(target // block_size, 0, tables.tables.shape[1] - 1)
    block = tables.tables[jnp.arange(target.shape[0]), column]
    if cache.config.contiguous:
        return _Plan(tables.tables, jnp.zeros_like(shorter), block, column)
    copied = shorter & (target % block_size > 0) & (tables.refcounts[block] > 1)
    keep = count_blocks(target, block_size) - copied.astype(jnp.int32)
    dropped = shorter[:, None] & (_columns(tables) >= keep[:, None])
    return _Plan(jnp.where(dropped, NULL_BLOCK, tables.tables), copied, block, column)


def _columns(tables: BlockTables) -> jax.Array:
    return jnp.arange(tables.tables.shape[1], dtype=jnp.int32)[None]


def _blocks_taken(cache: Cache, copied: jax.Array) -> jax.Array:
    """Returns `i32[S]`, the blocks that the copies take from the pool."""
    return jnp.zeros(copied.shape, jnp.int32) if cache.config.contiguous else copied.astype(jnp.int32)


def _servable(cache: Cache, wanted: jax.Array, plan_for: Callable[[BlockTables, jax.Array], _Plan]) -> jax.Array:
    """Returns the wanted rows that can change. All can if the free blocks, with those that the call frees, suffice for
    the copies; else rows are served in order with the blocks that were free before."""
    plans = [plan_for(tables, wanted) for tables in cache.tables]
    pairs = zip(plans, cache.tables, strict=True)
    served = grant_rows(
        [sum_needs(_blocks_taken(cache, p.copied), group_tables, cache.config) for p, group_tables in pairs],
        cache.tables,
    )
    return wanted & (served | _all_fit(cache, plans))


def _all_fit(cache: Cache, plans: list[_Plan]) -> jax.Array:
    """Tells whether there are enough blocks for all planned copies once the plans have freed theirs."""
    enough = jnp.array(True)
    for tables, plan in zip(cache.tables, plans, strict=True):
        freed = tables if cache.config.contiguous else replace_entries(tables, plan.entries)
        enough &= jnp.all(sum_shards(_blocks_taken(cache, plan.copied), tables) <= freed.num_free)
    return enough


def _become(cache: Cache, source: jax.Array, granted: jax.Array, refused: jax.Array, sensible: jax.Array) -> Cache:
    """Makes rows under `granted` copies of rows `source`, failures included; marks rows under `refused` as failed."""

    def inherit(tables: BlockTables) -> BlockTables:
        changed, like = repeat_for_heads(granted, tables), source_head_rows(source, tables)

        def from_source(x: jax.Array | None) -> jax.Array | None:
            return None if x is None else jnp.where(changed, x[like], x)

        names = ("lengths", "failed", "wanted", "needed", "skipped", "evicted", "thinned")
        rows: dict[str, Any] = {name: from_source(getattr(tables, name)) for name in names}
        wanted = jnp.where(sensible, cache.lengths[source], -1)
        tables = dataclasses.replace(tables, new=jnp.where(changed, 0, tables.new), **rows)
        return mark_failed(tables, refused, wanted, 1)

    changed = _carry_out(cache, lambda tables: _adoption(cache, tables, source, granted), inherit)
    return changed.replace(state_slots=adopt_slots(cache, source, granted))


def _carry_out(
    cache: Cache, plan_for: Callable[[BlockTables], _Plan], update_rows: Callable[[BlockTables], BlockTables]
) -> Cache:
    """Changes every group's tables as planned, copies the blocks, and updates the tables' row fields."""
    pools, groups = list(cache.pools), []
    for group, tables in enumerate(cache.tables):
        plan = plan_for(tables)
        changed = tables
        if not cache.config.contiguous:
            # Given by column: the row's earlier blocks may have left the window, so that no block precedes this one.
            changed = take_blocks(
                replace_entries(tables, plan.entries), _blocks_taken(cache, plan.copied), at=plan.column
            )
        target = changed.tables[jnp.arange(plan.column.shape[0]), plan.column]
        target = jnp.where(plan.copied, target, NULL_BLOCK)
        for stack in cache.config.group_stacks(group):
            source, places = (stack_blocks(x, len(stack), tables.num_blocks + 1) for x in (plan.block, target))
            pools[stack[0]] = copy_blocks(cache.layer(stack[0]).pool, source, places)
        groups.append(update_rows(changed))
    return cache.replace(tables=tuple(groups), pools=tuple(pools))


def _check_pairs(src: list[int], dst: list[int]) -> None:
    if len(set(dst)) != len(dst):
        raise ValueError(f"dst names a row twice: {dst}. A row can become a fork of one row only.")
    both = sorted(d for s, d in zip(src * (len(dst) if len(src) == 1 else 1), dst, strict=False) if d in src and s != d)
    if both:
        raise ValueError(f"Rows {both} are in src and in dst of the same call; use reorder to exchange rows.")
