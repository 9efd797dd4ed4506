"""Paged attention and the cache write in plain XLA, for every platform."""

import jax.numpy as jnp

from pallas_kernels import reference
from pallas_kernels._tokens import locate

paged_attention = reference.paged_attention  # placeholder until the work-list version lands


def write_kv(kv, k, v, tables, lengths, new, *, offsets=None):
    """What [`pallas_kernels.write_kv`][] means, as one in-place scatter."""
    token_axes, head_dim = k.shape[:-2], k.shape[-1]
    token = locate(token_axes, lengths, new, offsets)
    block_size = kv.shape[3]
    block = tables[token.row, token.position // block_size].reshape(-1)
    count = block.shape[0]
    # Padding goes to places of its own past the pool's end, where mode="drop" drops it. Not to -1, which would wrap.
    dropped = kv.shape[0] + jnp.arange(count, dtype=jnp.int32)
    block = jnp.where(token.valid.reshape(-1), block, dropped)
    offset = token.position.reshape(-1) % block_size
    tokens = jnp.stack([k, v], axis=-3).reshape(count, 2, -1, head_dim).astype(kv.dtype)
    # unique_indices: no two tokens share a place, and without the promise GPUs would write with atomics.
    return kv.at[block, :, :, offset, :head_dim].set(tokens, mode="drop", unique_indices=True)
