"""Quantised storage: numbers of 8 or 4 bits and their scales, symmetric around 0.

A token's keys (and its values) have a scale of their own in each head, so what is stored of them depends on that token
and head alone, never on how steps were split. Kinds of fewer than 8 bits or of 8-bit floats are stored as uint8: XLA on
a CPU converts a whole pool of such a dtype wherever it is read.
"""

import math

import jax
import jax.numpy as jnp

# What the largest number of a token and head becomes.
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int4": 7.0}
FLOATS = ("float8_e4m3fn", "float8_e5m2")
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


def scale_axes(kind: str, head_dim: int) -> tuple[int, ...]:
    """What follows `[..., K, block_size]` in the shape of the scales."""
    return (-(-head_dim // GROUP),) if kind == "int4" else ()


def encode(x: jax.Array, kind: str, scale_dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Numbers `[..., D]` as they are stored, and their scales `[...]` (int4: `[..., ceil(D / 32)]`).

    A NaN or an infinity anywhere in a head makes its scale NaN, and so all that is read of that token and head.

    >>> stored, scale = encode(jnp.array([[-1.0, 0.25, 0.0, 0.5]]), "int8", jnp.dtype("float32"))
    >>> stored.tolist(), [f"{s:.5f}" for s in scale.tolist()]
    ([[-127, 32, 0, 64]], ['0.00787'])
    """
    x = x.astype(jnp.float32)
    finite = jnp.isfinite(x).all(axis=-1)  # asked for by itself: a maximum may drop a NaN
    x = jnp.where(finite[..., None], x, 0.0)
    groups = _in_groups(x) if kind == "int4" else x
    scale = (jnp.maximum(jnp.abs(groups).max(axis=-1), TINY) / LARGEST[kind]).astype(scale_dtype)
    ratio = groups / scale.astype(jnp.float32)[..., None]
    ratio = jnp.clip(ratio, -LARGEST[kind], LARGEST[kind])  # a scale may have been rounded down
    if kind in FLOATS:
        stored = jax.lax.bitcast_convert_type(ratio.astype(kind), jnp.uint8)
    else:
        stored = jnp.round(ratio).astype(jnp.int8)
    if kind == "int4":
        # Entry i of the first half of a head stands in the low bits of byte i, that of the second half above it.
        low, high = jnp.split(stored.reshape(*x.shape[:-1], -1)[..., : x.shape[-1]].astype(jnp.uint8), 2, axis=-1)
        stored = (low & jnp.uint8(15)) | (high << jnp.uint8(4))
    nan = jnp.asarray(jnp.nan, scale.dtype)
    return stored, jnp.where(jnp.expand_dims(finite, range(finite.ndim, scale.ndim)), scale, nan)


def numbers(stored: jax.Array, kind: str | None) -> jax.Array:
    """What is stored as numbers that a scale is still missing from, in a dtype that holds them exactly."""
    if kind in FLOATS:
        return jax.lax.bitcast_convert_type(stored, jnp.dtype(kind)).astype(jnp.bfloat16)
    if kind == "int4":
        signed = stored.astype(jnp.int8)  # the top bits of a byte are its sign
        low = jnp.right_shift(jnp.left_shift(signed, jnp.int8(4)), jnp.int8(4))
        return jnp.concatenate([low, jnp.right_shift(signed, jnp.int8(4))], axis=-1)
    return stored


def spread_scales(scale: jax.Array, kind: str | None, head_dim: int) -> jax.Array:
    """Scales as what each entry of a head is multiplied by: `[..., D]`, or `[..., 1]` where they have one."""
    if kind == "int4":
        return jnp.repeat(scale.astype(jnp.float32), GROUP, axis=-1)[..., :head_dim]
    return scale.astype(jnp.float32)[..., None]


def sum_by_scale(x: jax.Array, kind: str | None) -> jax.Array:
    """Sums over the entries `[..., D]` that share a scale: the opposite of `spread_scales`."""
    return _in_groups(x).sum(axis=-1) if kind == "int4" else x.sum(axis=-1)


def decode(stored: jax.Array, scale: jax.Array, kind: str | None, head_dim: int) -> jax.Array:
    """What is stored as float32 `[..., D]`."""
    stored = stored[..., : stored_dim(kind, head_dim)]
    return numbers(stored, kind).astype(jnp.float32) * spread_scales(scale, kind, head_dim)


def _in_groups(x: jax.Array) -> jax.Array:
    """`[..., D]` to `[..., ceil(D / 32), 32]`, zeros at the end."""
    count = math.ceil(x.shape[-1] / GROUP)
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, count * GROUP - x.shape[-1])])
    return padded.reshape(*x.shape[:-1], count, GROUP)
