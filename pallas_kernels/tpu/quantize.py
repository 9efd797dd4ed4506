"""What the kernels do with quantized pools: numbers of 8 bits into the matrix unit's own, and their scales.

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

from pallas_kernels.common.batch import StoredKV
from pallas_kernels.common.quantization import StorageFormat
from pallas_kernels.tpu import nibbles
from pallas_kernels.tpu.pages import LANES

FORMATS = ("int8", "float8_e4m3fn", "float8_e5m2", "int4", "k5v3")


def widen(stored: jax.Array, format: StorageFormat, dtype: Any, which: int) -> jax.Array:
    """Returns stored keys (0) or values (1) in the dtype that is multiplied. Any bits of values give finite numbers; a
    key's NaN stays in its own logit, and that is selected."""
    if not format.is_quantized:
        return stored
    if format.group_size is not None:
        return nibbles.widen_half(stored, format, which, dtype)
    if format.float8 is None:
        return format.from_bits(stored).astype(dtype)
    # tpu7x has the conversion, and for chips before it the compiler knows a shorter way than `from_bits`.
    stored = _clear_not_finite(stored, format) if which == 1 else stored
    return lax.bitcast_convert_type(stored, format.declared_dtype).astype(dtype)


def _clear_not_finite(stored: jax.Array, format: StorageFormat) -> jax.Array:
    """Returns 8-bit floats of which those that are not finite, which are never stored, are others: four at a time."""
    assert format.float8 is not None
    least = format.float8.not_finite
    words = pltpu.bitcast(stored, jnp.uint32)
    # From the least on a byte carries into its sign's place. Its lowest set bit is what makes it finite.
    carried = (words & jnp.uint32(0x7F7F7F7F)) + jnp.uint32(0x01010101 * (0x80 - least))
    shift = 8 - (least & -least).bit_length()
    turned = lax.shift_right_logical(carried & jnp.uint32(0x80808080), jnp.uint32(shift))
    return pltpu.bitcast(words ^ turned, stored.dtype)


def encodable(dtype: Any) -> Any:
    """In what new keys and values are handed to a kernel, which quantizes them."""
    return jnp.dtype(dtype if dtype == jnp.bfloat16 else jnp.float32)


def scales_along_lanes(stored: StoredKV):
    """Returns scales as kernels have them, tokens last. Those of four bits, `[num_blocks + 1, 2, K, block_size, G]`,
    become `[num_blocks + 1, 2, K G, block_size]`. Those of latent rows, `[num_blocks + 1, 1, 1, block_size, 2]`,
    become `[num_blocks + 1, 1, 2, block_size]`, as which they lie in a TPU's memory anyway: nothing is copied."""
    scale = stored.scale
    if scale is not None and nibbles.has_groups(stored):
        return jnp.swapaxes(scale, -1, -2).reshape(*scale.shape[:2], -1, scale.shape[3])
    return scale if stored.half_rank is None or scale is None else jnp.swapaxes(scale[:, 0], -1, -2)


def scales_as_given(scale, stored: StoredKV):
    """Returns what `scales_along_lanes` was given."""
    if scale is not None and nibbles.has_groups(stored):
        blocks, parts, _, block_size = scale.shape
        return jnp.swapaxes(scale.reshape(blocks, parts, -1, nibbles.count_groups(stored), block_size), -1, -2)
    return scale if stored.half_rank is None or scale is None else jnp.swapaxes(scale, -1, -2)[:, None]


def quantize(x: jax.Array, stored: StoredKV) -> tuple[jax.Array, list[jax.Array]]:
    """Encodes by what a kernel can do: the numbers of `[..., D]` in 32 bits, each of their scales `[...]`. Those of
    packed rows are of keys first. Of four bits it is `nibbles.encode_pair`."""
    format, rank = stored.format, stored.latent_rank
    if rank is None:
        numbers, scale = format.encode(x, jnp.dtype(jnp.float32))
        return numbers.astype(jnp.int32), [scale]
    x = x.astype(jnp.float32)
    is_value = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1) < rank
    halves = [format.encode(jnp.where(mine, x, 0.0), jnp.dtype(jnp.float32)) for mine in (is_value, ~is_value)]
    numbers = halves[0][0].astype(jnp.int32) + halves[1][0].astype(jnp.int32)
    values, others = (scale for _, scale in halves)
    if stored.is_packed:
        return numbers, [others, values]
    nan = jnp.isnan(values + others)  # of the one or the other: then of both
    return numbers, [jnp.where(nan, jnp.nan, scale) for scale in (values, others)]


def queries_by_scale(q: jax.Array, stored: StoredKV) -> list[tuple[jax.Array, slice]]:
    """Returns queries `[..., D']` for each scale that keys have, and the lanes of the keys that they meet."""
    rank = stored.half_rank
    if not stored.format.is_quantized or rank is None:
        return [(q, slice(None))]
    below, above = rank // LANES * LANES, -(-rank // LANES) * LANES
    halves = [(q[..., :above], slice(0, above)), (q[..., below:], slice(below, None))]
    if below == above:
        return halves
    values, others = ((x, lanes, lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)) for x, lanes in halves)
    wide = jnp.float32  # selects want 32 bits
    first = jnp.where(values[2] < rank, values[0].astype(wide), 0.0).astype(q.dtype)
    second = jnp.where(others[2] < rank - below, 0.0, others[0].astype(wide)).astype(q.dtype)
    return [(first, values[1]), (second, others[1])]


def read_scales(buffer, head: int, stored: StoredKV) -> tuple[list[jax.Array], jax.Array]:
    """Returns what each part of the logits of a head's tokens is multiplied by, and what their weights are:
    `[1, tokens]`, from pages of scales `[pages, 2, K, page_size]`; of latent rows `[pages, 1, 2, page_size]`."""

    def line(part, head):
        return jnp.concatenate([buffer[page, part, pl.ds(head, 1)] for page in range(buffer.shape[0])], axis=1)

    if stored.half_rank is None:
        keys, values = stored.format.hide_bad_scales(line(0, head), line(1, head))
        return [keys], values
    keys, values = stored.format.hide_bad_scales(line(0, 0), line(0, 0))
    return [keys, line(0, 1)], values
