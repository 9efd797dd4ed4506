"""Paged attention on TPUs, in Pallas Mosaic TPU.

Rows with one new token go to the decode kernel, which can write it as well; rows with more are cut into tiles of
queries for the prefill kernel. A mixed step runs both, and neither pays for the other's rows.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.tokens import locate
from pallas_kernels.tpu.step import attend, decode_step, pad
from pallas_kernels.tpu.support import unsupported as unsupported


def paged_attention(q, kv, tables, lengths, new, *, interpret=False, **options):
    """What [`pallas_kernels.paged_attention`][] means. `interpret`: run on the CPU, `pltpu.InterpretParams()`."""
    return attend(q, kv, tables, lengths, new, interpret=interpret, **options)


def write_kv(kv, k, v, tables, lengths, new, *, offsets=None):
    """What [`pallas_kernels.write_kv`][] means: a scatter of rows of the minor dimension, in place if kv is donated.

    A scatter of whole tokens, or of a part of the minor dimension, is less work on paper, but for many tokens XLA then
    turns the whole pool into another layout and back.
    """
    k, v = (pad(x, kv.shape[-1]) for x in (k, v))
    token_axes, num_kv_heads, block_size = k.shape[:-2], kv.shape[2], kv.shape[3]
    token = jax.tree.map(jnp.ravel, locate(token_axes, lengths, new, offsets))
    block = tables[token.row, token.position // block_size]
    head = jnp.arange(2 * num_kv_heads, dtype=jnp.int32)[None]  # of the keys, then of the values
    place = (block[:, None] * (2 * num_kv_heads) + head) * block_size + (token.position % block_size)[:, None]
    rows = kv.reshape(-1, kv.shape[-1])
    # Padding goes to places of its own past the pool's end, where it is dropped.
    place = jnp.where(
        token.valid[:, None], place, rows.shape[0] + jnp.arange(place.size, dtype=jnp.int32).reshape(place.shape)
    )
    values = jnp.stack([k, v], axis=-3).reshape(place.size, kv.shape[-1]).astype(kv.dtype)
    rows = rows.at[place.reshape(-1)].set(values, mode="drop", unique_indices=True)
    return rows.reshape(kv.shape)


def write_and_attend(q, k, v, kv, tables, lengths, new, *, interpret=False, **options):
    """What [`pallas_kernels.write_and_attend`][] means: one kernel for a decode step `[S, 1, H, D]`, else two."""
    if q.ndim == 4 and q.shape[1] == 1:
        return decode_step(q, kv, tables, lengths, new, k=k, v=v, interpret=interpret, **options)
    kv = write_kv(kv, k, v, tables, lengths, new, offsets=options.get("offsets"))
    return attend(q, kv, tables, lengths, new, interpret=interpret, **options), kv
