"""Converts rows that have slid along their table to rows that begin with it, as kernels read them.

Kernels measure no positions but distances, so a row may be shorter by what has left its table. Where more counts than
distances, columns are put back.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv._core.state.columns import blocks_of, columns_of, logical_entries, relative
from jaxkv._core.state.state import Layer

# Of how many tokens the pieces may be that sums of a deterministic step are made of: a whole number of blocks, where
# blocks are smaller. They must be cut alike, however far a row has slid.
PIECES = (64, 128, 256, 1024)


def add_columns(layer: Layer, *, aligned: bool, apart: bool) -> Layer:
    """Returns a layer with as many of the columns that a row has left behind as a call needs.

    Args:
      aligned: what is cut into `PIECES` is cut where it would be from position 0 on.
      apart: first tokens are as far from the others as positions say, or `max_seq_len` at the most.
    """
    tables, config = layer.tables, layer.config
    if tables.skipped is None or not (aligned or apart):
        return layer
    width, most = tables.tables.shape[1], config.max_blocks_per_seq
    if apart:
        left, width = jnp.minimum(tables.skipped, most), width + most
    else:
        units = (max(1, tokens // config.block_size) for tokens in PIECES)
        unit = math.lcm(config.group_units[layer.group], *units)
        left, width = tables.skipped % unit, width + unit - 1
    entries = logical_entries(tables.tables, left, width, config.group_sink_blocks[layer.group])
    tables = dataclasses.replace(tables, tables=entries, skipped=tables.skipped - left)
    return dataclasses.replace(layer, tables=tables)


def begin_with_table(layer: Layer) -> Layer:
    """Returns a layer whose rows are as long as what has not left their tables."""
    return dataclasses.replace(layer, tables=relative(layer.tables, layer.config.block_size))


def columns_of_blocks(layer: Layer, blocks: Any) -> jax.Array:
    """Returns the columns of blocks `i32[S, n]`. Blocks that have left go behind the others."""
    tables, block = layer.tables, jnp.asarray(blocks)
    width = tables.tables.shape[1]
    if tables.skipped is not None:
        column = columns_of(block, tables.skipped[:, None], layer.config.group_sink_blocks[layer.group])
        block = jnp.sort(jnp.where((block < 0) | (column < 0), width, column), axis=1)
    return jnp.where(block < width, block, -1)


def mask_of_columns(layer: Layer, mask: jax.Array, row: jax.Array) -> jax.Array:
    """Returns what a mask `bool[S, T, C]` or `bool[N, C]` of tokens of rows `i32[S or N]` says of the places in their
    tables, `[.., M * block_size]`; False beyond its end."""
    position, count = _positions(layer, row), mask.shape[-1]
    position = position[:, None] if mask.ndim == 3 else position
    index = jnp.broadcast_to(jnp.minimum(position, max(count - 1, 0)), (*mask.shape[:-1], position.shape[-1]))
    return jnp.take_along_axis(mask, index, axis=-1) & (position < count) if count else mask


def places_of_tokens(layer: Layer, tokens: jax.Array, row: jax.Array) -> jax.Array:
    """Returns the places in their tables of the positions `tokens`, i32[S, T, n] or i32[N, n], of tokens of rows
    `i32[S or N]`; -1 of what has left the table."""
    tables, size, sink_blocks = layer.tables, layer.config.block_size, layer.config.group_sink_blocks[layer.group]
    assert tables.skipped is not None
    block, skipped = tokens // size, jnp.expand_dims(tables.skipped[row], range(1, tokens.ndim))
    column = columns_of(block, skipped, sink_blocks)
    return jnp.where((tokens < 0) | (column < 0), -1, column * size + tokens % size)


def _positions(layer: Layer, row: jax.Array) -> jax.Array:
    """Returns the position of each place in the tables of rows `i32[n]`: `i32[n, M * block_size]`."""
    tables, size, sink_blocks = layer.tables, layer.config.block_size, layer.config.group_sink_blocks[layer.group]
    assert tables.skipped is not None
    column = jnp.arange(tables.tables.shape[1], dtype=jnp.int32)[None]
    block = blocks_of(column, tables.skipped[row][:, None], sink_blocks)
    position = block[:, :, None] * size + jnp.arange(size, dtype=jnp.int32)[None, None]
    return position.reshape(row.shape[0], -1)
