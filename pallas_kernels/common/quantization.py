"""Quantised storage: numbers of 8 or 4 bits and their scales, symmetric around 0.

A token's keys (and its values) have a scale of their own in each head, so what is stored of them depends on that token
and head alone, never on how steps were split. A latent row, whose first `rank` numbers are its values, has one scale
for those and one for the others. So has a joined row, a head's values and its keys behind them, but its scales are kept
as those of keys and values apart: no query meets both. Kinds of fewer than 8 bits or of 8-bit floats are stored as
uint8: XLA on a CPU converts a whole pool of such a dtype wherever it is read.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

# What the largest number of a token and head becomes.
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int4": 7.0}
FLOATS = ("float8_e4m3fn", "float8_e5m2")
# Of each its bits, and how much less the exponent's bias is than float32's.
MANTISSA = {"float8_e4m3fn": (3, 120), "float8_e5m2": (2, 112)}
GROUP = 32  # entries of a head that share a scale in int4
TINY = 1e-8  # where the largest number is below this, it is taken for this


def storage_of(kind: str) -> jnp.dtype:
    """The dtype of a pool of this kind."""
    return jnp.dtype("int8" if kind == "int8" else "uint8")


def stored_dim(kind: str | None, head_dim: int) -> int:
    """Entries that a head takes in the pool: two to a byte in int4.

    >>> stored_dim("int4", 80), stored_dim("int8", 80), stored_dim(None, 80)
    (40, 80, 80)
    """
    return head_dim // 2 if kind == "int4" else head_dim


def scale_axes(kind: str | None, head_dim: int, rank: int | None = None) -> tuple[int, ...]:
    """What follows `[..., K, block_size]` in the shape of the scales."""
    if kind == "int4":
        return (-(-head_dim // GROUP),)
    return () if rank is None else (2,)


def encode(x: jax.Array, kind: str, scale_dtype: jnp.dtype, rank: int | None = None) -> tuple[jax.Array, jax.Array]:
    """Numbers `[..., D]` as they are stored, and their scales `[...]`; in int4 `[..., ceil(D / 32)]`, of latent rows
    `[..., 2]`.

    A NaN or an infinity anywhere in a head makes its scale NaN, and so all that is read of that token and head.

    >>> stored, scale = encode(jnp.array([[-1.0, 0.25, 0.0, 0.5]]), "int8", jnp.dtype("float32"))
    >>> stored.tolist(), [f"{s:.5f}" for s in scale.tolist()]
    ([[-127, 32, 0, 64]], ['0.00787'])
    """
    if rank is not None and kind != "int4":  # part by part, as kernels do it: a division by both rounds differently
        parts = [encode(part, kind, scale_dtype) for part in (x[..., :rank], x[..., rank:])]
        scale = jnp.stack([scale for _, scale in parts], axis=-1)
        nan = jnp.isnan(scale).any(axis=-1, keepdims=True)
        return jnp.concatenate([stored for stored, _ in parts], axis=-1), jnp.where(nan, jnp.nan, scale)
    x = x.astype(jnp.float32)
    finite = jnp.isfinite(x).all(axis=-1)  # asked for by itself: a maximum may drop a NaN
    x = jnp.where(finite[..., None], x, 0.0)
    largest = jnp.abs(_in_groups(x, kind, None)).max(axis=-1)
    scale = (jnp.maximum(largest, TINY) / LARGEST[kind]).astype(scale_dtype)
    ratio = x / spread_scales(scale, kind, x.shape[-1])
    ratio = jnp.clip(ratio, -LARGEST[kind], LARGEST[kind])  # a scale may have been rounded down
    # By way of 32 bits, for the compiler for tpu7x knows no other.
    stored = _float_bits(ratio, kind) if kind in FLOATS else jnp.round(ratio).astype(jnp.int32).astype(jnp.int8)
    if kind == "int4":
        # Entry i of the first half of a head stands in the low bits of byte i, that of the second half above it.
        low, high = jnp.split(stored.astype(jnp.uint8), 2, axis=-1)
        stored = (low & jnp.uint8(15)) | (high << jnp.uint8(4))
    nan = jnp.asarray(jnp.nan, scale.dtype)
    return stored, jnp.where(jnp.expand_dims(finite, range(finite.ndim, scale.ndim)), scale, nan)


def is_joined(kv_scale, kind: str | None, rank: int | None) -> bool:
    """Whether rows of `rank` values hold keys behind them: then their scales are `[num_blocks + 1, 2, K, block_size]`,
    what rows are multiplied by as keys and what as values. Not in int4, where the entries of a head share none."""
    return rank is not None and kind not in (None, "int4") and kv_scale is not None and len(kv_scale.shape) == 4


def split_rank(kv_scale, kind: str | None, rank: int | None) -> tuple[int | None, int | None]:
    """The rank of rows that have a scale for each of their parts, and that of joined ones: one of them is None."""
    return (None, rank) if is_joined(kv_scale, kind, rank) else (rank, None)


def scale_shape(
    numbers: tuple[int, ...], kind: str | None, head_dim: int, rank: int | None = None, joined: bool = False
) -> tuple[int, ...]:
    """The shape of the scales of a pool whose numbers are `[num_blocks + 1, 2, K, block_size, ...]`, or 1 for 2."""
    blocks, _, num_kv_heads, block_size = numbers[:4]
    return (blocks, 2, num_kv_heads, block_size) if joined else (*numbers[:4], *scale_axes(kind, head_dim, rank))


def encode_joined(x: jax.Array, kind: str, scale_dtype: jnp.dtype, rank: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Joined rows `[..., D]` as they are stored, and the scales of their keys and of their values, `[...]` each."""
    (values, value_scale), (keys, key_scale) = (encode(x, kind, scale_dtype) for x in (x[..., :rank], x[..., rank:]))
    return jnp.concatenate([values, keys], axis=-1), key_scale, value_scale


def numbers(stored: jax.Array, kind: str | None) -> jax.Array:
    """What is stored as numbers that a scale is still missing from, in a dtype that holds them exactly."""
    if kind in FLOATS:
        return float_numbers(stored, kind).astype(jnp.bfloat16)
    if kind == "int4":
        signed = stored.astype(jnp.int8)  # the top bits of a byte are its sign
        low = jnp.right_shift(jnp.left_shift(signed, jnp.int8(4)), jnp.int8(4))
        return jnp.concatenate([low, jnp.right_shift(signed, jnp.int8(4))], axis=-1)
    return stored


def widened(stored: jax.Array) -> jax.Array:
    """Bytes with a sign as float32.

    By way of their bits, which are put into a float of 2 ** 23: XLA for CPUs converts bytes four times slower.

    >>> widened(jnp.array([-128, -1, 0, 127], jnp.int8)).tolist()
    [-128.0, -1.0, 0.0, 127.0]
    """
    bits = (stored.astype(jnp.int32) + 128) | (150 << 23)
    return jax.lax.bitcast_convert_type(bits, jnp.float32) - (2.0**23 + 128)


def float_numbers(stored: jax.Array, kind: str) -> jax.Array:
    """The bits of floats of 8 as float32. Those that `encode` never stores, of NaN and infinity, give some number."""
    mantissa, bias = MANTISSA[kind]
    bits = stored.astype(jnp.int32)
    magnitude = bits & 0x7F
    # The fractions of the least normal number have no exponent: they get its, and what it stands for is taken away.
    small = magnitude < 1 << mantissa
    wide = (magnitude + (jnp.where(small, bias + 1, bias) << mantissa)) << (23 - mantissa)
    number = jax.lax.bitcast_convert_type(wide, jnp.float32) - jnp.where(small, 2.0 ** (bias - 126), 0.0)
    return jnp.where(bits >= 128, -number, number)


def _float_bits(x: jax.Array, kind: str) -> jax.Array:
    """Float32 within a float of 8 bits' range as its bits, rounded to the nearest, ties to even.

    In integers, for XLA's compiler for TPUs ends the process at the conversion.
    """
    mantissa, bias = MANTISSA[kind]
    cut = 23 - mantissa
    wide = jax.lax.bitcast_convert_type(jnp.abs(x), jnp.int32)
    normal = ((wide + ((1 << (cut - 1)) - 1) + ((wide >> cut) & 1)) >> cut) - (bias << mantissa)
    small = jnp.round(jnp.abs(x) * 2.0 ** (126 + mantissa - bias)).astype(jnp.int32)
    magnitude = jnp.where(jnp.abs(x) < 2.0 ** (bias - 126), small, normal)
    return jnp.where(x < 0, magnitude + 128, magnitude).astype(jnp.uint8)


def spread_scales(scale: jax.Array, kind: str | None, head_dim: int, rank: int | None = None) -> jax.Array:
    """Scales as what each entry of a head is multiplied by: `[..., D]`, or `[..., 1]` where they have one."""
    scale = scale.astype(jnp.float32)
    if kind == "int4":
        return jnp.repeat(scale, GROUP, axis=-1)[..., :head_dim]
    if rank is not None:
        return jnp.where(np.arange(head_dim) < rank, scale[..., :1], scale[..., 1:])
    return scale[..., None]


def sound_scales(keys: jax.Array, values: jax.Array, kind: str) -> tuple[jax.Array, jax.Array]:
    """Scales of keys and values such that what no query sees does nothing in a kernel, whatever they hold.

    A weight of 0 times NaN is NaN, so a value's scale that is not finite becomes 0, and the key's NaN in its stead, for
    logits are selected. Who sees such a token gets NaN in that head, in the LSE too.
    """
    most = float(jnp.finfo(jnp.float32).max) / LARGEST[kind]
    finite = (values <= most) & (values >= -most)
    return jnp.where(finite, keys, jnp.nan), jnp.where(finite, values, 0.0)


def sum_by_scale(x: jax.Array, kind: str | None, rank: int | None = None) -> jax.Array:
    """Sums over the entries `[..., D]` that share a scale: the opposite of `spread_scales`."""
    return _in_groups(x, kind, rank).sum(axis=-1)


def decode(
    stored: jax.Array, scale: jax.Array, kind: str | None, head_dim: int, rank: int | None = None
) -> jax.Array:  # fmt: skip
    """What is stored as float32 `[..., D]`."""
    stored = stored[..., : stored_dim(kind, head_dim)]
    return numbers(stored, kind).astype(jnp.float32) * spread_scales(scale, kind, head_dim, rank)


def _in_groups(x: jax.Array, kind: str | None, rank: int | None) -> jax.Array:
    """`[..., D]` to `[..., groups, entries]`, those that share a scale together and zeros behind them."""
    if kind != "int4" and rank is None:
        return x

    def padded(x: jax.Array, size: int) -> jax.Array:
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])])

    if kind == "int4":
        count = math.ceil(x.shape[-1] / GROUP)
        return padded(x, count * GROUP).reshape(*x.shape[:-1], count, GROUP)
    size = max(rank or 0, x.shape[-1] - (rank or 0))
    return jnp.stack([padded(x[..., :rank], size), padded(x[..., rank:], size)], axis=-2)
