"""The allocator: index arithmetic on `BlockTables`, on the device, without a loop over blocks or tokens."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxkv._state import NULL_BLOCK, BlockTables


def blocks_for(lengths: jax.Array, block_size: int) -> jax.Array:
    """How many blocks hold `lengths` tokens."""
    return (lengths + block_size - 1) // block_size


def serve(need: jax.Array, num_free: jax.Array) -> jax.Array:
    """`bool[S]`: which rows get the `need[s]` blocks they ask for: in order, each all or nothing."""

    def missing(served: jax.Array) -> jax.Array:
        return served & (jnp.cumsum(jnp.where(served, need, 0)) > num_free)

    def drop(served: jax.Array) -> jax.Array:
        # The rows before the first that misses are served for good; no row that needs more than they leave can be.
        first = jnp.argmax(missing(served))
        index = jnp.arange(need.shape[0])
        left = num_free - jnp.sum(jnp.where(served & (index < first), need, 0), dtype=jnp.int32)
        return served & ((index < first) | (need <= left))

    # No iteration at all as long as there are blocks for everyone. (The first guess is computed from the data so that,
    # inside `shard_map`, it varies over the same mesh axes.)
    return jax.lax.while_loop(lambda served: missing(served).any(), drop, need <= num_free)


def take(tables: BlockTables, count: jax.Array) -> BlockTables:
    """Append `count[s]` free blocks to the table of each row. There must be as many."""
    width, held = tables.tables.shape[1], tables.held
    next_free = tables.num_blocks - tables.num_free
    # The blocks of one row stand one after another in the free list: fetch a whole window of it for each row, laid so
    # that the first of them falls on the row's first unused column.
    windows = next_free + jnp.cumsum(count) - count - held + width
    free_list = jnp.pad(tables.free_list, width)
    fresh = jax.vmap(lambda start: jax.lax.dynamic_slice_in_dim(free_list, start, width))(windows)
    column = jnp.arange(width, dtype=jnp.int32)[None]
    is_fresh = (column >= held[:, None]) & (column < (held + count)[:, None])
    num_free = tables.num_free - jnp.sum(count, dtype=jnp.int32)
    return dataclasses.replace(
        tables,
        tables=jnp.where(is_fresh, fresh, tables.tables),
        num_free=num_free,
        peak=jnp.maximum(tables.peak, tables.num_blocks - num_free),
    )


def replace_entries(tables: BlockTables, entries: jax.Array) -> BlockTables:
    """Put `entries` i32[S, M] in the place of the table, and free the blocks that nothing refers to any more.

    New entries must be blocks that some row holds. Blocks freed last are taken first.
    """
    old, changed = tables.tables, entries != tables.tables
    left = tables.refcounts + _references(tables, entries, changed) - _references(tables, old, changed)
    freed = (left == 0).at[NULL_BLOCK].set(False)
    rank = jnp.cumsum(freed, dtype=jnp.int32)
    next_free = tables.num_blocks - tables.num_free
    block = jnp.arange(freed.shape[0], dtype=jnp.int32)
    place = jnp.where(freed, next_free - rank, tables.num_blocks + block)  # past the end: dropped
    return dataclasses.replace(
        tables,
        tables=entries,
        refcounts=left
        + freed.astype(jnp.int32),  # a free block keeps the 1 its next owner needs, so that `take` writes no counts
        free_list=tables.free_list.at[place].set(block, mode="drop", unique_indices=True),
        num_free=tables.num_free + rank[-1],
    )


def _references(tables: BlockTables, entries: jax.Array, counted: jax.Array) -> jax.Array:
    """`i32[N + 1]`: how often each block stands under `counted`; never the null block."""
    entries = jnp.where(counted & (entries != NULL_BLOCK), entries, tables.num_blocks + 1)
    return jnp.zeros_like(tables.refcounts).at[entries].add(1, mode="drop")
