"""Where each token of a step lies: its row, its position, and whether it is there at all.

Tokens come in two layouts, told apart by rank. Padded `[S, T, ...]`: row s uses the first `new[s]` of its T places.
Packed `[N, ...]`: the rows' tokens one after another, row s from `offsets[s]` on, with a tail of padding allowed.
"""

import functools
from typing import NamedTuple

import jax
import jax.export
import jax.numpy as jnp


@functools.partial(jax.export.register_namedtuple_serialization, serialized_name="pallas_kernels.Tokens")
class Tokens(NamedTuple):
    """One entry per token place, `[S, T]` padded or `[N]` packed.

    >>> token = locate((2, 2), lengths=jnp.array([5, 1]), new=jnp.array([2, 1]))
    >>> token.row.tolist(), token.valid.tolist()
    ([[0, 0], [1, 1]], [[True, True], [True, False]])
    """

    row: jax.Array  # i32: the row the token belongs to; in range also for padding
    position: jax.Array  # i32: its absolute position in the row; 0 for padding
    valid: jax.Array  # bool: False for padding


def default_offsets(new: jax.Array) -> jax.Array:
    """`i32[S]`: where each row's tokens start when `new[s]` tokens of every row lie one after another."""
    return jnp.cumsum(new) - new


def locate(shape: tuple[int, ...], lengths: jax.Array, new: jax.Array, offsets: jax.Array | None = None) -> Tokens:
    """Row, position and validity of every token of a step whose token axes have `shape` (`(S, T)` or `(N,)`).

    Args:
      shape: `(S, T)` for padded tokens, `(N,)` for packed ones.
      lengths, new: `i32[S]`, tokens of each row, this step's included, and how many are this step's.
      offsets: `i32[S]`, where each row's packed tokens start; default: one row after another.

    >>> locate((4,), lengths=jnp.array([5, 1]), new=jnp.array([2, 1])).position.tolist()
    [3, 4, 0, 0]
    """
    return _locate(tuple(shape), lengths, new, offsets)


@functools.partial(jax.jit, static_argnums=0)
def _locate(shape: tuple[int, ...], lengths: jax.Array, new: jax.Array, offsets: jax.Array | None) -> Tokens:
    if len(shape) == 2:
        row, index = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    else:
        offsets = default_offsets(new) if offsets is None else offsets
        token = jnp.arange(shape[0], dtype=jnp.int32)
        # Rows without tokens share their successor's offset: the last row that starts at or before a token has it.
        row = jnp.searchsorted(offsets, token, side="right", method="compare_all").astype(jnp.int32) - 1
        row = jnp.maximum(row, 0)
        index = token - offsets[row]
    valid = (index >= 0) & (index < new[row])
    position = jnp.where(valid, lengths[row] - new[row] + index, 0)
    return Tokens(row, position, valid)


class TokenSlots(NamedTuple):
    """Where the tokens of a step are stored in a pool, an entry per token place."""

    block: jax.Array  # i32: any number where the token has no slot
    offset: jax.Array  # i32: within the block
    exists: jax.Array  # bool: False for padding, beyond the row's table, and in blocks that are not reserved


def find_slots(token: Tokens, tables: jax.Array, num_blocks: int, block_size: int) -> TokenSlots:
    """Returns the slots of a step's tokens in a pool of so many blocks, the null block 0 included.

    >>> token = Tokens(jnp.array([0, 0, 0]), jnp.array([3, 4, 8]), jnp.array([True, True, True]))
    >>> find_slots(token, jnp.array([[5, 0]]), num_blocks=9, block_size=4).exists.tolist()
    [True, False, False]
    """
    row, position, valid = token
    size = jnp.full_like(position, block_size)
    column, offset = jax.lax.div(position, size), jax.lax.rem(position, size)
    block = tables[row, column]
    in_table = (position >= 0) & (column < tables.shape[1])
    return TokenSlots(block, offset, valid & in_table & (block > 0) & (block < num_blocks))
