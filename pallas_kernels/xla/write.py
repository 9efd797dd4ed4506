"""The cache write in plain XLA, for every platform, and the write before paged attention."""

import jax
import jax.numpy as jnp

from pallas_kernels.common.batch import MaskSpec, PagedBatch, SoftmaxOptions, StoredKV, leave_out_newest
from pallas_kernels.common.ragged_layout import find_slots, locate
from pallas_kernels.common.xla_cpu import stack_pair
from pallas_kernels.xla.attention import paged_attention


def write_kv(k, v, stored: StoredKV, batch: PagedBatch) -> StoredKV:
    """Stores what [`pallas_kernels.write_kv`][] does, by one in-place scatter, and one more of scales."""
    kv, format = stored.kv, stored.format
    block, offset = find_places(k.shape[:-2], batch, kv)
    tokens = k[..., None, :, :] if v is None else stack_pair(k, v, -3)
    tokens = tokens.reshape(block.shape[0], kv.shape[1], *k.shape[-2:])

    def put(pool: jax.Array, values: jax.Array, *minor: slice) -> jax.Array:
        # unique_indices: no two tokens share a place, and without the promise GPUs would write with atomics.
        place = pool.at[block, :, :, offset, *minor]
        return place.set(values.astype(pool.dtype), mode="drop", unique_indices=True)

    if not format.is_quantized:
        return stored.replace(put(kv, tokens, slice(0, k.shape[-1])), stored.scale)
    assert stored.scale is not None
    if stored.packed_rank is not None:
        numbers, *both = format.encode_packed(tokens, stored.scale.dtype, stored.packed_rank)
        scales = jnp.concatenate(both, axis=1)
    else:
        numbers, scales = format.encode(tokens, stored.scale.dtype, stored.latent_rank, axis=1)
    return stored.replace(put(kv, numbers, slice(0, numbers.shape[-1])), put(stored.scale, scales))


def find_places(token_axes: tuple[int, ...], batch: PagedBatch, pool: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the blocks and offsets, `i32[tokens]`, to which a step's tokens are written in a pool."""
    token = jax.tree.map(jnp.ravel, locate(token_axes, *batch[1:4]))
    slots = find_slots(token, batch.block_tables, pool.shape[0], pool.shape[3])
    # Others go to places of their own past the pool's end, where mode="drop" drops them. Not to -1, which would wrap.
    dropped = pool.shape[0] + jnp.arange(slots.block.shape[0], dtype=jnp.int32)
    return jnp.where(slots.exists, slots.block, dropped), slots.offset


def write_and_attend(q, k, v, stored: StoredKV, batch: PagedBatch, mask: MaskSpec, options: SoftmaxOptions):
    """Writes, then attends."""
    stored = write_kv(k, v, stored, batch)
    return paged_attention(q, stored, *leave_out_newest(batch, mask), options), stored
