"""Blocks of which a device holds a part: what lies where, as index arithmetic.

Every block is cut into `count` runs of `size` tokens, and a pool holds run `number` of each. So tables, lengths and
positions are those of whole rows, the same on every device, and a row's tokens go round the devices, run by run. What a
device holds of a row is a row of its own, of blocks of `size` tokens: writes, and reads that go by no positions, are
those of such a row, in whatever backend.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.common.batch import Call, PagedBatch
from pallas_kernels.common.ragged_layout import locate


def count_local_tokens(position: jax.Array, shard: jax.Array, size: int) -> jax.Array:
    """Returns how many of a row's tokens before `position`, which is not negative, are at hand.

    >>> count_local_tokens(jnp.arange(9), jnp.array([1, 2]), 2).tolist()
    [0, 0, 0, 1, 2, 2, 2, 3, 4]
    """
    number, whole = shard[0].astype(position.dtype), shard[1].astype(position.dtype) * size
    number, whole = (jnp.broadcast_to(x, position.shape) for x in (number, whole))
    return jax.lax.div(position, whole) * size + jnp.clip(jax.lax.rem(position, whole) - number * size, 0, size)


def position_of(block: jax.Array, offset: jax.Array, shard: jax.Array, size: int) -> jax.Array:
    """Returns the position of what lies at `offset` of the part of a row's logical block that is at hand."""
    return (block * shard[1] + shard[0]) * size + offset


def select_local_tokens(
    k: jax.Array, v: jax.Array | None, batch: PagedBatch, size: int
) -> tuple[jax.Array, jax.Array | None, PagedBatch]:
    """Returns a step's keys and values that are stored here, in the layout they came in, packed ones one row after
    another; and the rows that they belong to."""
    tables, kv_lens, query_lens, query_starts, shard = batch
    assert shard is not None
    token_axes, before = k.shape[:-2], kv_lens - query_lens
    local_lens, local_before = (count_local_tokens(x, shard, size) for x in (kv_lens, before))
    local = PagedBatch(tables, local_lens, local_lens - local_before)
    token = locate(token_axes, local_lens, local.query_lens)
    nth = position_of(token.position // size, token.position % size, shard, size) - before[token.row]
    if len(token_axes) == 1:
        starts = jnp.cumsum(query_lens) - query_lens if query_starts is None else query_starts
        at: Any = (jnp.clip(starts[token.row] + nth, 0, max(token_axes[0] - 1, 0)),)
    else:
        at = (token.row, jnp.clip(nth, 0, max(token_axes[1] - 1, 0)))
    return k[at], None if v is None else v[at], local


def select_local_rows(batch: PagedBatch, size: int) -> PagedBatch:
    """Returns rows as far as they are at hand, read by no query where nothing is."""
    assert batch.context_shard is not None
    local = count_local_tokens(batch.kv_lens, batch.context_shard, size)
    return batch._replace(kv_lens=local, query_lens=jnp.where(local > 0, batch.query_lens, 0), context_shard=None)


def reads_whole_rows(call: Call) -> bool:
    """Tells whether every query sees all of its row, so that positions do not matter."""
    mask, options = call.mask, call.options
    if not (call.q.ndim == 4 and call.q.shape[1] == 1) and mask.causal:
        return False
    # What goes by positions or by the places of whole rows cannot be said of the part of a row that is at hand.
    by_position: tuple = (mask.window, mask.mask, mask.spans, mask.tree, mask.chunk, mask.blocks, mask.sink_tokens)
    by_position += (mask.tokens,)
    return all(x is None for x in (*by_position, options.alibi, options.shared))
