"""The allocator: index arithmetic on `BlockTables` on the device, without a loop over blocks or tokens."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxkv._core.state.head_rows import repeat_for_shards, sum_shards
from jaxkv._core.state.state import NULL_BLOCK, BlockTables


def count_blocks(lengths: jax.Array, block_size: int) -> jax.Array:
    """Returns the number of blocks that hold `lengths` tokens."""
    return (lengths + block_size - 1) // block_size


def grant_rows(needs: Sequence[jax.Array], groups: Sequence[BlockTables]) -> jax.Array:
    """Returns `bool[S]`, the rows that get the `needs[g][s]` blocks they ask for: in order, all or nothing per row.

    A group whose blocks are in shards has `needs[g][p, s]`.
    """
    need = jnp.concatenate([jnp.atleast_2d(need) for need in needs])  # [G, S]
    num_free = jnp.concatenate([jnp.atleast_1d(tables.num_free) for tables in groups])[:, None]

    def missing(served: jax.Array) -> jax.Array:
        return served & (jnp.cumsum(jnp.where(served[None], need, 0), axis=1) > num_free).any(axis=0)

    def drop(served: jax.Array) -> jax.Array:
        # Rows before the first one that lacks blocks are final; no row that needs more than they leave can be served.
        first = jnp.argmax(missing(served))
        before = jnp.arange(served.shape[0]) < first
        left = num_free - jnp.sum(jnp.where((served & before)[None], need, 0), axis=1, keepdims=True, dtype=jnp.int32)
        return served & (before | (need <= left).all(axis=0))

    # No iteration while there are blocks for all rows. (The first guess is computed from the data, so that it varies
    # over the same mesh axes inside `shard_map`.)
    return jax.lax.while_loop(lambda served: missing(served).any(), drop, (need <= num_free).all(axis=0))


def take_blocks(tables: BlockTables, count: jax.Array, at: jax.Array | None = None) -> BlockTables:
    """Puts `count[s]` free blocks into each row's table from column `at[s]` on; default: after the row's last block.

    The caller makes sure that there are enough free blocks.
    """
    width, end = tables.tables.shape[1], tables.end if at is None else at
    next_free = repeat_for_shards(first_free(tables), tables)
    # A row's new blocks are consecutive in the free list. Each row fetches a slice of table width, aligned so that its
    # first new block falls on its first unused column.
    windows = next_free + _cumsum(count, tables.num_shards) - count - end + width
    free_list = jnp.pad(tables.free_list, width)
    fresh = jax.vmap(lambda start: jax.lax.dynamic_slice_in_dim(free_list, start, width))(windows)
    column = jnp.arange(width, dtype=jnp.int32)[None]
    is_fresh = (column >= end[:, None]) & (column < (end + count)[:, None])
    tables = dataclasses.replace(tables, tables=jnp.where(is_fresh, fresh, tables.tables))
    return mark_taken(tables, sum_shards(count, tables))


def mark_taken(tables: BlockTables, count: jax.Array) -> BlockTables:
    """Marks the next `count` free blocks of each shard as used."""
    tables = dataclasses.replace(tables, num_free=tables.num_free - count)
    return dataclasses.replace(tables, peak=jnp.maximum(tables.peak, tables.num_used))


def pick_free_blocks(tables: BlockTables, taken: jax.Array) -> jax.Array:
    """Returns a free block wherever `taken` bool[S, M] is True, else the null block. The blocks stay marked as free."""
    at = _cumsum(taken.ravel(), tables.num_shards).reshape(taken.shape) - 1
    next_free = first_free(tables)
    at += next_free if tables.num_shards == 1 else repeat_for_shards(next_free, tables)[:, None]
    return jnp.where(taken, tables.free_list.at[at].get(mode="fill", fill_value=NULL_BLOCK), NULL_BLOCK)


def replace_entries(tables: BlockTables, entries: jax.Array, kept: jax.Array | None = None) -> BlockTables:
    """Replaces the table by `entries` i32[S, M], and frees the blocks that nothing refers to any more.

    New entries, and blocks newly in `kept` i32[N + 1], must be in use already. Blocks freed last are taken first.
    """
    old, changed = tables.tables, entries != tables.tables
    left = tables.refcounts + _references(tables, entries, changed) - _references(tables, old, changed)
    if kept is not None:
        left += (kept != 0).astype(jnp.int32) - (tables.kept != 0).astype(jnp.int32)
    freed = (left == 0).at[NULL_BLOCK].set(False)
    rank, next_free = _cumsum(freed, tables.num_shards), first_free(tables)
    if tables.num_shards > 1:
        next_free = jnp.repeat(next_free, freed.shape[0] // tables.num_shards)
    block = jnp.arange(freed.shape[0], dtype=jnp.int32)
    place = jnp.where(freed, next_free - rank, tables.num_blocks + block)  # past the end: dropped
    return dataclasses.replace(
        tables,
        tables=entries,
        # A free block keeps the 1 its next owner needs, so that `take_blocks` writes no counts.
        refcounts=left + freed.astype(jnp.int32),
        kept=tables.kept if kept is None else kept,
        free_list=jnp.asarray(tables.free_list).at[place].set(block, mode="drop", unique_indices=True),
        num_free=tables.num_free + (rank[-1] if tables.num_shards == 1 else rank.reshape(tables.num_shards, -1)[:, -1]),
    )


def free_leading_blocks(tables: BlockTables, first: jax.Array, sink_blocks: int = 0) -> BlockTables:
    """Frees the blocks before column `first[s]` of each row, except its first `sink_blocks`.

    Most steps have none to free, and then nothing runs.
    """
    column, end = jnp.arange(tables.tables.shape[1], dtype=jnp.int32)[None], tables.end
    first_column = end - tables.num_blocks_per_row
    if sink_blocks:
        first_column += jnp.minimum(end, sink_blocks)
    State = tuple[jax.Array, jax.Array, jax.Array, jax.Array]

    def more(state: State) -> jax.Array:
        dropped, *_ = state
        return jnp.any(first_column + dropped < first)

    def drop(state: State) -> State:
        """Drops one block of each row that has one to drop."""
        dropped, refcounts, free_list, num_free = state
        at = first_column + dropped
        block = jnp.take_along_axis(tables.tables, jnp.minimum(at, column.size - 1)[:, None], axis=1)[:, 0]
        block = jnp.where(at < first, block, tables.num_blocks + 1)  # past the end: dropped
        left = refcounts.at[block].add(-1, mode="drop")
        # If several rows drop the same block, one of them frees it.
        row = jnp.arange(block.size, dtype=jnp.int32)
        lowest = jnp.full_like(refcounts, block.size).at[block].min(row, mode="drop")
        freed = (left.at[block].get(mode="fill", fill_value=1) == 0) & (
            lowest.at[block].get(mode="fill", fill_value=-1) == row
        )
        rank = jnp.cumsum(freed, dtype=jnp.int32)
        place = jnp.where(freed, tables.num_blocks - num_free - rank, tables.num_blocks + row)
        return (
            dropped + 1,
            left.at[jnp.where(freed, block, tables.num_blocks + 1)].set(1, mode="drop"),  # for its next owner
            free_list.at[place].set(block, mode="drop", unique_indices=True),
            num_free + rank[-1],
        )

    # The counter is computed from the data, as in `grant_rows`.
    state = (jnp.zeros_like(first), tables.refcounts, tables.free_list, tables.num_free)
    _, refcounts, free_list, num_free = jax.lax.while_loop(more, drop, state)
    return dataclasses.replace(
        tables,
        tables=jnp.where((column >= sink_blocks) & (column < first[:, None]), NULL_BLOCK, tables.tables),
        refcounts=refcounts,
        free_list=free_list,
        num_free=num_free,
    )


def first_free(tables: BlockTables) -> jax.Array:
    """Returns the index in the free list of the next block to take: `i32[]`, or `i32[P]` with P shards."""
    if tables.num_shards == 1:
        return tables.num_blocks - tables.num_free
    end = tables.num_blocks // tables.num_shards * jnp.arange(1, tables.num_shards + 1, dtype=jnp.int32)
    return end - tables.num_free


def _cumsum(x: jax.Array, num_shards: int) -> jax.Array:
    """Computes the cumulative sum within each shard."""
    x = x if num_shards == 1 else x.reshape(num_shards, -1)
    return jnp.cumsum(x, axis=-1, dtype=jnp.int32).reshape(-1)


def _references(tables: BlockTables, entries: jax.Array, counted: jax.Array) -> jax.Array:
    """Counts how often each block is in `entries` under `counted`, `i32[N + 1]`; 0 for the null block."""
    entries = jnp.where(counted & (entries != NULL_BLOCK), entries, tables.refcounts.shape[0])
    return jnp.zeros_like(tables.refcounts).at[entries].add(1, mode="drop")
