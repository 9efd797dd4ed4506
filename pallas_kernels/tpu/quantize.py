"""What the kernels do with quantised pools: numbers of 8 bits into the matrix unit's own, and their scales.

A block's scales, `[2, K, block_size]` of float32, lie along lanes. A key's is applied to its logits and a value's to
its weights, for those are fewer than the entries of a head, and the products stay exact. A latent row has two scales,
of the numbers that are its values and of the others: its logits are the sum of two products, each with its own. Of a
joined row, a head's values and its keys behind them, queries meet the keys alone: its scales are as those of a head's.
In what follows `rank` is of latent rows, and `joined` of joined ones.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.common.quantization import encode, numbers, sound_scales
from pallas_kernels.tpu.pages import LANES

KINDS = ("int8", "float8_e4m3fn", "float8_e5m2")
# The least bits, without the sign, of what is not finite, and how far below the sign the bit is that makes it finite.
NOT_FINITE = {"float8_e4m3fn": (0x7F, 7), "float8_e5m2": (0x7C, 5)}


def widen(stored: jax.Array, kind: str | None, dtype: Any, which: int) -> jax.Array:
    """Stored keys (0) or values (1) in the dtype that is multiplied. Any bits of values give finite numbers; a key's
    NaN stays in its own logit, and that is selected."""
    if kind not in NOT_FINITE:
        return stored if kind is None else numbers(stored, kind).astype(dtype)
    # tpu7x has the conversion, and for chips before it the compiler knows a shorter way than `numbers`.
    stored = _finite(stored, kind) if which == 1 else stored
    return lax.bitcast_convert_type(stored, jnp.dtype(kind)).astype(dtype)


def _finite(stored: jax.Array, kind: str) -> jax.Array:
    """Floats of 8 bits of which those that are not finite, which `encode` never stores, are others: four at a time."""
    least, shift = NOT_FINITE[kind]
    words = pltpu.bitcast(stored, jnp.uint32)
    # From the least on a byte carries into its sign's place.
    carried = (words & jnp.uint32(0x7F7F7F7F)) + jnp.uint32(0x01010101 * (0x80 - least))
    turned = lax.shift_right_logical(carried & jnp.uint32(0x80808080), jnp.uint32(shift))
    return pltpu.bitcast(words ^ turned, stored.dtype)


def encodable(dtype: Any) -> Any:
    """In what new keys and values are handed to a kernel, which quantises them."""
    return jnp.dtype(dtype if dtype == jnp.bfloat16 else jnp.float32)


def along_lanes(kv_scale, rank: int | None):
    """Scales as kernels have them, tokens last. Those of latent rows, `[num_blocks + 1, 1, 1, block_size, 2]`, become
    `[num_blocks + 1, 1, 2, block_size]`, as which they lie in a TPU's memory anyway: nothing is copied."""
    return kv_scale if rank is None or kv_scale is None else jnp.swapaxes(kv_scale[:, 0], -1, -2)


def as_given(kv_scale, rank: int | None):
    """What `along_lanes` was given."""
    return kv_scale if rank is None or kv_scale is None else jnp.swapaxes(kv_scale, -1, -2)[:, None]


def quantise(x: jax.Array, kind: str, rank: int | None, joined: int | None) -> tuple[jax.Array, list[jax.Array]]:
    """`quantization.encode` by what a kernel can do: the numbers of `[..., D]` in 32 bits, each of their scales
    `[...]`. Those of joined rows are of keys first."""
    if rank is None and joined is None:
        stored, scale = encode(x, kind, jnp.dtype(jnp.float32))
        return stored.astype(jnp.int32), [scale]
    x = x.astype(jnp.float32)
    is_value = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1) < (rank or joined)
    parts = [encode(jnp.where(mine, x, 0.0), kind, jnp.dtype(jnp.float32)) for mine in (is_value, ~is_value)]
    stored = parts[0][0].astype(jnp.int32) + parts[1][0].astype(jnp.int32)
    values, others = (scale for _, scale in parts)
    if rank is None:
        return stored, [others, values]
    nan = jnp.isnan(values + others)  # of the one or the other: then of both
    return stored, [jnp.where(nan, jnp.nan, scale) for scale in (values, others)]


def queries_by_scale(q: jax.Array, kind: str | None, rank: int | None) -> list[tuple[jax.Array, slice]]:
    """Queries `[..., D']` for each scale that keys have, and the lanes of the keys that they meet."""
    if kind is None or rank is None:
        return [(q, slice(None))]
    below, above = rank // LANES * LANES, -(-rank // LANES) * LANES
    parts = [(q[..., :above], slice(0, above)), (q[..., below:], slice(below, None))]
    if below == above:
        return parts
    values, others = ((x, lanes, lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)) for x, lanes in parts)
    wide = jnp.float32  # selects want 32 bits
    first = jnp.where(values[2] < rank, values[0].astype(wide), 0.0).astype(q.dtype)
    second = jnp.where(others[2] < rank - below, 0.0, others[0].astype(wide)).astype(q.dtype)
    return [(first, values[1]), (second, others[1])]


def scales_of(buffer, head: int, kind: str, rank: int | None) -> tuple[list[jax.Array], jax.Array]:
    """Of a head's tokens in pages of scales `[pages, 2, K, page_size]`, of latent rows `[pages, 1, 2, page_size]`, what
    each part of their logits is multiplied by, and what their weights are: `[1, tokens]`."""

    def line(part, head):
        return jnp.concatenate([buffer[page, part, pl.ds(head, 1)] for page in range(buffer.shape[0])], axis=1)

    if rank is None:
        keys, values = sound_scales(line(0, head), line(1, head), kind)
        return [keys], values
    keys, values = sound_scales(line(0, 0), line(0, 0), kind)
    return [keys, line(0, 1)], values
