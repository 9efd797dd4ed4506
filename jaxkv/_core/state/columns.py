"""Columns of a row's blocks in its block table.

A table has columns for the blocks that a row can hold at once. In layers with a window or chunks, a longer row slides
along the table: columns of freed blocks leave, later columns move up, and `skipped` counts those that left. The first
`sink_blocks` blocks, which such a layer may keep, stay in the first columns.

Kernels do not know of this. They get rows that begin with their table: `relative`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._core.config.cache_config import CacheConfig
from jaxkv._core.config.validation import MOST_TOKENS
from jaxkv._core.state.state import NULL_BLOCK, BlockTables


def columns_of(block: Any, skipped: Any, sink_blocks: int) -> Any:
    """Returns the columns of a row's blocks; -1 for one that left the table. Arrays broadcast; NumPy stays NumPy."""
    if skipped is None:
        return block
    maths = np if isinstance(block, np.ndarray) else jnp
    column = maths.where(block < sink_blocks, block, block - skipped)
    return maths.where((block < sink_blocks) | (column >= sink_blocks), column, np.int32(-1))


def blocks_of(column: Any, skipped: Any, sink_blocks: int) -> Any:
    """Returns the row's blocks in the given columns, the inverse of `columns_of`."""
    if skipped is None:
        return column
    maths = np if isinstance(column, np.ndarray) else jnp
    return maths.where(column < sink_blocks, column, column + skipped)


def logical_entries(entries: Any, skipped: Any, width: int, sink_blocks: int) -> Any:
    """Returns the entries of tables `[S, M]` with a column for each of a row's first `width` blocks, `i32[S, width]`.
    NumPy stays NumPy."""
    if skipped is None and entries.shape[1] >= width:
        return entries[:, :width]
    maths = np if isinstance(entries, np.ndarray) else jnp
    block = maths.arange(width, dtype=np.int32)[None]
    column = columns_of(block, None if skipped is None else skipped[:, None], sink_blocks)
    column = maths.broadcast_to(column, (entries.shape[0], width))
    there = (column >= 0) & (column < entries.shape[1])
    found = maths.take_along_axis(entries, maths.clip(column, 0, entries.shape[1] - 1), axis=1)
    return maths.where(there, found, np.int32(NULL_BLOCK))


def row_entries(entries: np.ndarray, skipped: Any, config: CacheConfig, group: int) -> np.ndarray:
    """Returns `i32[blocks]`, the blocks of a row in order, from its `entries` of a group's table on the host."""
    own = None if skipped is None else np.reshape(skipped, 1)
    width = len(entries) + (0 if own is None else int(own[0]))
    return logical_entries(entries[None], own, width, config.group_sink_blocks[group])[0]


def rows_entries(tables: BlockTables, config: CacheConfig, group: int, lines: np.ndarray) -> np.ndarray:
    """Returns `i32[n, blocks]`, the blocks of head rows `i32[n]` of a group's tables on the host, in order. There are
    as many columns as the table has, or more if rows have slid."""
    skipped = None if tables.skipped is None else np.asarray(tables.skipped)[lines]
    entries = np.asarray(tables.tables)[lines]
    width = entries.shape[1] + (0 if skipped is None else int(skipped.max(initial=0)))
    return logical_entries(entries, skipped, width, config.group_sink_blocks[group])


def are_too_long(lengths: Any, held: Sequence[Any], config: CacheConfig) -> Any:
    """Returns `bool[n]`, the rows of `lengths` i32[n] tokens that a cache cannot hold, however many blocks it has.

    Args:
      held: for each group the tokens that its head rows hold if it evicts, else None.
    """
    if not config.is_endless:
        return lengths > config.max_seq_len
    found = lengths > MOST_TOKENS
    for group, own in enumerate(held):
        if own is None:
            at_once = lengths - config.first_position(group, lengths)
        else:
            rows = lengths.shape[0]  # none where no row is asked for
            at_once = own.reshape(own.size // max(rows, 1), rows).max(axis=0, initial=0)
        found = found | (at_once > config.max_seq_len)
    return found


def relative(tables: BlockTables, block_size: int) -> BlockTables:
    """Returns tables whose rows begin with their table: `lengths` leaves out blocks that left."""
    if tables.skipped is None:
        return tables
    return dataclasses.replace(tables, lengths=tables.lengths - tables.skipped * block_size, skipped=None)


def skipped_for(first: Any, end: Any, config: CacheConfig, group: int) -> Any:
    """Returns the blocks that leave the table of a row that holds blocks `first` to `end` and its `sink_blocks`."""
    sink_blocks, unit, width = config.group_sink_blocks[group], config.group_units[group], config.table_widths[group]
    maths = jnp if isinstance(end, jax.Array) else np
    skipped = maths.maximum(first - sink_blocks, 0) // unit * unit
    return maths.where(end > width, skipped, skipped * 0)


def columns_for(entries: np.ndarray, config: CacheConfig, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns table entries `i32[n, M]` and the number of blocks that left, for rows of a group that will hold blocks
    `i32[n, blocks]`, in order."""
    width, sink_blocks, count = config.table_widths[group], config.group_sink_blocks[group], entries.shape[1]
    block = np.arange(count)
    used = entries != NULL_BLOCK
    end = np.max(np.where(used, block + 1, 0), axis=1, initial=0)
    first = np.min(np.where(used & (block >= sink_blocks), block, end[:, None]), axis=1, initial=count)
    skipped = skipped_for(first, end, config, group).astype(np.int32)
    number = blocks_of(np.arange(width)[None], skipped[:, None], sink_blocks)
    padded = np.pad(entries, ((0, 0), (0, 1)), constant_values=NULL_BLOCK)
    return np.take_along_axis(padded, np.minimum(number, count), axis=1).astype(np.int32), skipped


def slide(tables: BlockTables, needed: jax.Array, sink_blocks: int, unit: int) -> BlockTables:
    """Removes the columns of freed blocks from rows that need more columns, `needed` i32[S], than there are. Most steps
    have no such rows, and then nothing runs."""
    if tables.skipped is None:
        return tables
    width = tables.tables.shape[1]
    State = tuple[jax.Array, jax.Array, jax.Array]

    def is_short(state: State) -> jax.Array:
        return jnp.any(state[0])

    def move(state: State) -> State:
        short, entries, skipped = state
        column = jnp.arange(width, dtype=jnp.int32)[None]
        first = jnp.min(jnp.where((entries != NULL_BLOCK) & (column >= sink_blocks), column, width), axis=1)
        count = jnp.where(short & (first < width), (first - sink_blocks) // unit * unit, 0)
        source = jnp.where(column < sink_blocks, column, column + count[:, None])
        moved = jnp.take_along_axis(entries, jnp.minimum(source, width - 1), axis=1)
        # No row is short any more; `&` keeps the mesh axes that the flag varies over.
        return short & False, jnp.where(source < width, moved, NULL_BLOCK), skipped + count

    state = (needed > width, tables.tables, tables.skipped)
    _, entries, skipped = jax.lax.while_loop(is_short, move, state)
    return dataclasses.replace(tables, tables=entries, skipped=skipped)
