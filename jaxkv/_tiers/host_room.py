"""Allocates blocks for rows that return from the host, and finds equal blocks that are in the cache already."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._core.blocks.tables import mark_failed
from jaxkv._core.cache.cache import Cache
from jaxkv._core.state.arguments import scatter_rows
from jaxkv._core.state.columns import are_too_long, columns_of, skipped_for
from jaxkv._core.state.head_rows import sum_rows
from jaxkv._core.state.state import NULL_BLOCK, TOO_LONG, Pool
from jaxkv._tiers.shared_blocks import (
    find_block_shard,
    grant_shared_rows,
    list_entries,
    match_group_blocks,
    put_entries,
    take_shared_blocks,
)


def may_share(cache: Cache) -> bool:
    """Tells whether a row of the cache holds a full block, which rows from the host could share."""
    if cache.config.contiguous:
        return False
    if isinstance(cache.lengths, jax.core.Tracer):
        return True
    return any(bool((np.asarray(tables.lengths) >= cache.config.block_size).any()) for tables in cache.tables)


@jax.jit
def find_equal_blocks(cache: Cache, pools: list[Pool | None], lines: Any) -> list[jax.Array]:
    """Returns, for each group, `i32[B]`: blocks of the cache that equal blocks of a host and can be shared."""
    lengths, firsts, counts, orders, left, _ = jax.tree.map(jnp.asarray, lines)
    found = []
    for group, sink_blocks in enumerate(cache.config.group_sink_blocks):
        entries = list_entries(firsts[group], counts[group], orders[group], sink_blocks)
        tokens = jnp.tile(lengths, cache.config.group_heads[group]) if left[group] is None else left[group]
        found.append(match_group_blocks(cache, group, entries, tokens, pools))
    return found


def find_blocks_of(cache: Cache, lines: Any, none: list[jax.Array], source: Any, num_blocks: Any) -> list[jax.Array]:
    """Returns, for each group, `i32[B]`: what row `source` still holds of the first `num_blocks` of a host's row."""
    lengths, firsts, counts, orders, *_ = jax.tree.map(jnp.asarray, lines)
    found = []
    for group, (tables, sink_blocks) in enumerate(zip(cache.tables, cache.config.group_sink_blocks, strict=True)):
        entries = list_entries(firsts[group], counts[group], orders[group], sink_blocks)
        end = (entries.column + 1) * cache.config.block_size
        shared = entries.is_there & (entries.column < num_blocks) & (end <= lengths[0])
        skipped = None if tables.skipped is None else tables.skipped[source]
        column, width = columns_of(entries.column, skipped, sink_blocks), tables.tables.shape[1]
        is_shared = shared & (column >= 0) & (column < width)
        place = jnp.where(is_shared, entries.block, none[group].shape[0])
        own = tables.tables[source, jnp.clip(column, 0, width - 1)]
        found.append(none[group].at[place].set(own, mode="drop"))
    return found


@jax.jit
def make_room(cache: Cache, dst: jax.Array, lines: Any, equal: list[jax.Array]) -> tuple[Any, list[jax.Array]]:
    """Returns the tables of a cache, without its pools, with blocks for the rows of a host; and for each group the
    destination of its blocks, `i32[B]`; `i32[m]` of a contiguous cache, which shares none.

    This is one program, since outside of any its loop would be compiled each time.

    Args:
      lines: the row metadata of a `HostBlocks`.
      equal: for each group `i32[B]`, an equal block that the cache has already.
    """
    lengths, firsts, counts, orders, left, thinned = jax.tree.map(jnp.asarray, lines)
    config, number = cache.config, lengths.shape[0]
    entries = [
        list_entries(first, count, order, sink_blocks)
        for first, count, order, sink_blocks in zip(firsts, counts, orders, config.group_sink_blocks, strict=True)
    ]
    too_long = are_too_long(lengths, left, config)
    sensible = are_empty(cache, dst)
    granted = sensible & ~too_long
    skips = []
    for group, (group_tables, first, count) in enumerate(zip(cache.tables, firsts, counts, strict=True)):
        end = first + count - jnp.minimum(count, config.group_sink_blocks[group])
        skips.append(skipped_for(first, end, config, group))
        granted &= (end - skips[-1] <= group_tables.tables.shape[1]).reshape(-1, number).all(axis=0)
    entries = [e.skip(skipped[e.line]) for e, skipped in zip(entries, skips, strict=True)]
    shards = [
        find_block_shard(e, count.shape[0], there.shape[0], group_tables.num_shards)
        for e, count, there, group_tables in zip(entries, counts, equal, cache.tables, strict=True)
    ]
    if config.contiguous:
        taken = [jnp.zeros(there.shape, bool) for there in equal]
        needs = [jnp.zeros((group_tables.num_shards, number), jnp.int32) for group_tables in cache.tables]
    else:
        granted, taken, needs = grant_shared_rows(cache.tables, entries, equal, shards, granted)
    refused, wanted = ~granted, jnp.where(sensible | too_long, lengths, -1)

    def map_to_rows(x: jax.Array, rows: jax.Array) -> jax.Array:
        """Maps values of the host's rows to rows of the cache."""
        return scatter_rows(jnp.zeros(config.max_seqs, x.dtype), jnp.where(rows, dst, config.max_seqs), x)

    tables, targets = [], []
    for group, (group_tables, e) in enumerate(zip(cache.tables, entries, strict=True)):
        heads, all_lines = config.group_heads[group], group_tables.lengths.shape[0]
        line = jnp.where(granted, dst, all_lines)[None] + config.max_seqs * jnp.arange(heads, dtype=jnp.int32)[:, None]
        line = jnp.minimum(line, all_lines).ravel()  # past the end: dropped

        def put_into(old: Any, new: Any, line: jax.Array = line) -> Any:
            return None if old is None else old.at[line].set(new, mode="drop")

        if config.contiguous:
            own = group_tables.tables.at[line[e.line], e.column].get(mode="fill", fill_value=NULL_BLOCK)
            targets.append(jnp.where(e.is_there, own, NULL_BLOCK))
        else:
            group_tables, block = take_shared_blocks(group_tables, taken[group], shards[group])
            group_tables = put_entries(
                group_tables, e, line, jnp.where(taken[group], block, equal[group]), taken[group]
            )
            targets.append(block)
        needed = jnp.stack([map_to_rows(jnp.where(too_long, TOO_LONG, need), refused) for need in needs[group]])
        needed = needed[0] if group_tables.num_shards == 1 else needed
        group_tables = mark_failed(group_tables, map_to_rows(refused, refused), map_to_rows(wanted, refused), needed)
        seen = jnp.tile(lengths, heads)
        kept = seen if left[group] is None else left[group]
        group_tables = dataclasses.replace(
            group_tables, lengths=put_into(group_tables.lengths, kept), new=put_into(group_tables.new, 0)
        )
        group_tables = dataclasses.replace(
            group_tables,
            evicted=put_into(group_tables.evicted, seen - kept),
            thinned=put_into(group_tables.thinned, thinned[group]),
        )
        tables.append(dataclasses.replace(group_tables, skipped=put_into(group_tables.skipped, skips[group])))
    return tuple(tables), targets


@jax.jit
def are_empty(cache: Cache, rows: jax.Array) -> jax.Array:
    """Returns `bool[n]`: which rows exist, are empty, and are named for the first time."""
    inside = (rows >= 0) & (rows < cache.lengths.shape[0])
    at = jnp.where(inside, rows, 0)
    blocks = sum_rows(cache.tables[0].num_blocks_per_row, cache.config)
    has_blocks = jnp.zeros(rows.shape, bool) if cache.config.contiguous else blocks[at] > 0
    named_before = jnp.any(jnp.tril(rows[:, None] == rows[None], -1), axis=1)
    return inside & (cache.lengths[at] == 0) & ~has_blocks & ~named_before
