"""What the kernels do with pools of four bits: a byte holds an entry of a head's values and, above it, one of its keys,
of four bits each or, of k5v3, of three and five.

Words of 32 bits hold four tokens. Two numbers of a word at a time become 16-bit floats where they lie, by a shift, a
mask and an exclusive or, and so the tokens of every 128 come in another order: those of even places, then the others.
Weights and logits follow that order, and scales are brought into it; nothing is moved for keys and values.

A scale belongs to 32 or 64 entries of a head. Queries therefore come once for each such group, 0 in all others, and a
weight goes once into the sum of each: of a product with the values the group's own lanes are kept. The matrix unit's
time goes by keys and values, not by queries, so that this costs it nothing.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.common.batch import StoredKV
from pallas_kernels.common.quantization import TINY, StorageFormat
from pallas_kernels.common.quantization.levels import SCALE_PARTS, Levels

LANES = 128  # of a register, as in `pages`, beside which this module stands
_FRACTION = 7  # bits of a 16-bit float


def has_groups(stored: StoredKV) -> bool:
    """Tells whether a pool is stored as this module reads it."""
    return stored.format.group_size is not None


def count_groups(stored: StoredKV) -> int:
    """Returns the scales of a head's keys; 1 of pools of other formats."""
    if not has_groups(stored):
        return 1
    assert stored.format.group_size is not None and stored.latent_rank is not None
    return stored.latent_rank // stored.format.group_size


def own_queries(q: jax.Array, stored: StoredKV) -> jax.Array:
    """Returns queries of rows of values and keys, which are 0 before the keys, without those zeros."""
    return q[..., stored.latent_rank :] if has_groups(stored) else q


def split_tokens(new: jax.Array, stored: StoredKV, width: int, axis: int) -> jax.Array:
    """Returns a step's rows of values and keys as both apart, keys first, of this width."""
    rank = stored.latent_rank
    return jnp.stack([_pad_last(x, width) for x in (new[..., rank:], new[..., :rank])], axis=axis)


def _pad_last(x: jax.Array, width: int) -> jax.Array:
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])


def heads_together(num_kv_heads: int) -> int:
    """Returns how many KV heads' queries stand together: for each group those of all."""
    return 2 - num_kv_heads % 2


def spread_queries(q: jax.Array, stored: StoredKV, width: int) -> jax.Array:
    """Returns queries `[.., H, D]` once for each group, 0 but in that: one axis of `K / heads_together` times G times
    the queries of the heads together, `[.., H G, width]`."""
    size, groups, num_kv_heads = stored.format.group_size, count_groups(stored), stored.kv.shape[2]
    q = _pad_last(q, width)
    some = q.shape[-2] // num_kv_heads * heads_together(num_kv_heads)
    by_heads = q.reshape(*q.shape[:-2], q.shape[-2] // some, 1, some, width)
    mine = np.arange(width) // size == np.arange(groups)[:, None, None]
    return jnp.where(mine, by_heads, jnp.zeros((), q.dtype)).reshape(*q.shape[:-2], q.shape[-2] * groups, width)


def place_tokens(lanes: jax.Array) -> jax.Array:
    """Returns which token of a segment stands at each of its places."""
    inside = lanes & (LANES - 1)
    half = LANES // 2
    return lanes - inside + jnp.where(inside < half, 2 * inside, 2 * inside - (LANES - 1))


def widen_half(stored: jax.Array, format: StorageFormat, which: int, dtype: Any) -> jax.Array:
    """Returns the keys (0) or the values (1) of bytes `[tokens, D]`, tokens in the order of `place_tokens`."""
    assert format.levels is not None
    levels = format.levels[which]
    first = levels.bits - _FRACTION if which == 1 else 1  # from the lowest bits of a byte, or from the highest
    words = pltpu.bitcast(stored, jnp.int32)  # [tokens / 4, D]
    offset = jnp.bfloat16(1.5 * 2**levels.bits - 0.5)  # of the float over the code and a half
    codes = (_place_codes(words, shift, levels.bits) for shift in (first, first + 8))
    halves = [pltpu.bitcast(code, jnp.bfloat16) - offset for code in codes]
    each = LANES // 2
    parts = [x[at : at + each] for at in range(0, halves[0].shape[0], each) for x in halves]
    half = jnp.concatenate(parts).astype(dtype)
    return half * (half * half - jnp.asarray(-levels.cubic, dtype))  # the model of cycles takes no sum with a constant


def _place_codes(words: jax.Array, shift: int, bits: int) -> jax.Array:
    """Returns two codes of each word as the first bits of the fractions of two 16-bit floats from `2 ** bits` on."""
    mask, sign = (1 << _FRACTION) - (1 << _FRACTION - bits), 1 << _FRACTION - 1
    exponent = bits + 127 << _FRACTION
    moved = words << -shift if shift < 0 else lax.shift_right_logical(words, jnp.int32(shift))
    return (moved & jnp.int32(mask * 0x10001)) ^ jnp.int32((exponent | sign) * 0x10001)  # which turns a sign bit over


def read_group_scales(buffer: Any, stored: StoredKV) -> tuple[jax.Array, jax.Array]:
    """Returns a segment's scales of keys and of values, `[K G, tokens]`, such that what no query sees does nothing,
    from pages `[pages, 2, K G, page_size]`."""
    pages = [read_page_scales(buffer.at[page], stored) for page in range(buffer.shape[0])]
    keys, values = (jnp.concatenate(lines, axis=1) for lines in zip(*pages, strict=True))
    return keys, values


def read_page_scales(page: Any, stored: StoredKV) -> tuple[jax.Array, jax.Array]:
    """Returns the same of one page, `[2, K G, page_size]`."""

    def lines(which: int) -> jax.Array:
        x = page[which].astype(jnp.float32)
        return jnp.concatenate([_order_lanes(x[:, at : at + LANES]) for at in range(0, x.shape[1], LANES)], axis=1)

    return stored.format.hide_bad_scales(lines(0), lines(1))


def spread_scales(pages: Any, which: int, head: Any, stored: StoredKV, width: int) -> jax.Array:
    """Returns what each number of a head's keys (0) or values (1) is multiplied by, `[tokens, width]`, from pages of
    lines that `read_page_scales` made: a product with zeros and ones, which is exact."""
    groups, size = count_groups(stored), stored.format.group_size
    lines = [
        jnp.concatenate([pages[page, which, pl.ds(head * groups + g, 1)] for page in range(pages.shape[0])], axis=1)
        for g in range(groups)
    ]
    shape = (groups, width)
    ones = lax.broadcasted_iota(jnp.int32, shape, 0) == lax.broadcasted_iota(jnp.int32, shape, 1) // size
    return lax.dot_general(
        jnp.concatenate(lines).astype(jnp.bfloat16),
        jnp.where(ones, 1.0, 0.0).astype(jnp.bfloat16),
        (((0,), (0,)), ((), ())),
        preferred_element_type=jnp.float32,
    )


def _order_lanes(x: jax.Array) -> jax.Array:
    """Returns `[.., 128]` in the order of `place_tokens`."""
    place = place_tokens(lax.broadcasted_iota(jnp.int32, x.shape, 1))
    return jnp.take_along_axis(x, place, axis=1, mode="promise_in_bounds")


def spread_lines(lines: jax.Array, group: int, num_kv_heads: int) -> jax.Array:
    """Returns scales `[K G, tokens]` for the rows of queries, `group` of which share each."""
    together, groups = heads_together(num_kv_heads), lines.shape[0] // num_kv_heads
    order = [
        (head + i) * groups + g
        for head in range(0, num_kv_heads, together) for g in range(groups) for i in range(together)
    ]  # fmt: skip
    return jnp.concatenate([jnp.broadcast_to(lines[i : i + 1], (group, lines.shape[1])) for i in order])


def sum_groups(x: jax.Array, num_kv_heads: int, groups: int) -> jax.Array:
    """Returns the sums over the groups of rows of queries, `[H, ..]`."""
    sums = []
    for some in jnp.split(x, num_kv_heads // heads_together(num_kv_heads)):
        sums.append(functools.reduce(jnp.add, jnp.split(some, groups)))
    return jnp.concatenate(sums)


def repeat_heads(x: jax.Array, num_kv_heads: int, groups: int) -> jax.Array:
    """Returns rows `[H, ..]` once for each group: the transpose of `sum_groups`."""
    each = jnp.split(x, num_kv_heads // heads_together(num_kv_heads))
    return jnp.concatenate([some for some in each for _ in range(groups)])


def pick_lanes(x: jax.Array, groups: int, size: int) -> jax.Array:
    """Returns products with values `[G n, D]`, of n rows for each group, as `[n, D]`: of each row its group's lanes."""
    *parts, picked = jnp.split(x, groups)
    lane = lax.broadcasted_iota(jnp.int32, picked.shape, 1)
    for g, part in reversed(list(enumerate(parts))):
        picked = jnp.where(lane < (g + 1) * size, part, picked)
    return picked


def encode_pair(keys: jax.Array, values: jax.Array, stored: StoredKV) -> tuple[jax.Array, list[list[jax.Array]]]:
    """Returns keys and values `[.., D]` as bytes, in 32 bits, and of each group the scales `[..]`, in float32, of keys
    and of values."""
    format, groups = stored.format, count_groups(stored)
    assert format.levels is not None
    # Both in one block of code: while sums over lanes are under way for the one, the other is divided.
    codes, scales = zip(
        *(encode_groups(x, format, levels, groups) for x, levels in zip((keys, values), format.levels, strict=True)),
        strict=True,
    )
    return pack_codes(*codes, format), list(scales)


def encode_groups(
    x: jax.Array, format: StorageFormat, levels: Levels, groups: int
) -> tuple[jax.Array, list[jax.Array]]:
    """Returns what `StorageFormat.encode` does, by what a kernel can do: codes of `[.., D]` in 32 bits, and of each
    group the scales `[..]`, in float32.

    A group's sums are products with ones, which leave them in all of its lanes.
    """
    size = format.group_size
    assert size is not None
    x = x.astype(jnp.float32)
    lane = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1) // size
    bad = jnp.max(jnp.where(x - x == 0, 0.0, 1.0), axis=-1)
    x = jnp.where(bad[..., None] == 0, x, 0.0)
    size_of = jnp.abs(x)
    tops = [jnp.max(jnp.where(lane == g, size_of, 0.0), axis=-1, keepdims=True) for g in range(groups)]

    def spread(lines: list[jax.Array]) -> jax.Array:
        found = jnp.zeros_like(x)
        for g, line in enumerate(lines):
            found = jnp.where(lane == g, line, found)
        return found

    largest = spread(tops)
    unit = jnp.maximum(largest, TINY) / levels.last
    parts = levels.count_parts(size_of, unit)
    least, best = None, jnp.full_like(unit, float(levels.scales_tried[0]))
    for tried, tried_unit in zip(levels.scales_tried, levels.units_tried, strict=True):
        lost = _sum_lanes(jnp.square(levels.pick(parts, tried_unit) - parts), size)
        if least is None:
            least = lost
            continue
        best = jnp.where(lost < least, float(tried), best)
        least = jnp.minimum(lost, least)
    # Rounded as the pool's scales are, before numbers are divided by it.
    scale = (unit * (best / float(SCALE_PARTS))).astype(format.scale_dtype).astype(jnp.float32)
    codes = levels.find_codes(x / scale)
    scale = jnp.where(largest > 0, scale, 0.0)
    scales = [jnp.max(jnp.where(lane == g, scale, 0.0), axis=-1) for g in range(groups)]
    return codes, [jnp.where(bad == 0, scale, jnp.nan) for scale in scales]  # a maximum may drop a NaN


def _sum_lanes(x: jax.Array, size: int) -> jax.Array:
    """Returns the sums of each `size` lanes, whole numbers below 2 ** 24, in all of them.

    A square of 18 bits is three numbers of 8, which the matrix unit multiplies by ones and adds without an error."""
    width = x.shape[-1]
    first = x.reshape(-1, width)
    high = first.astype(jnp.bfloat16)
    rest = first - high.astype(jnp.float32)
    middle = rest.astype(jnp.bfloat16)
    low = (rest - middle.astype(jnp.float32)).astype(jnp.bfloat16)
    row, column = (lax.broadcasted_iota(jnp.int32, (3 * width, width), axis) for axis in (0, 1))
    ones = jnp.where(lax.rem(row, jnp.int32(width)) // size == column // size, 1.0, 0.0).astype(jnp.bfloat16)
    parts = jnp.concatenate([high, middle, low], axis=1)
    return lax.dot_general(parts, ones, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32).reshape(x.shape)


def pack_codes(keys: jax.Array, values: jax.Array, format: StorageFormat) -> jax.Array:
    """Returns bytes, in 32 bits, of the codes of keys and of values."""
    assert format.levels is not None
    of_keys, of_values = ((1 << levels.bits) - 1 for levels in format.levels)
    return ((keys & of_keys) << format.levels[1].bits) | (values & of_values)
