"""Products with bytes as they lie, on a CPU: nothing of what is read from a quantized pool is widened.

The other side becomes digits of base 128, two for numbers of 16 bits and three for float32: each row is counted in
units of a 16,256th, or a 2,080,768th, of its largest number.
"""

import jax
import jax.numpy as jnp
import numpy as np

BITS = 7
BASE = 1 << BITS
ROUNDER = 1.5 * 2.0**23


def product(subscripts: str, a: jax.Array, b: jax.Array, num_digits: int) -> jax.Array:
    """`jnp.einsum(subscripts, a, b)` in float32, of rows `a [..., rows, n]` summed over their last axis, with bytes.

    A row that is not finite everywhere gives NaN, as nothing else does. Sums of up to 133,000 products fit 32 bits.

    >>> a, b = jnp.array([[0.5, -1.0]]), jnp.array([[127, 1], [2, -128]], jnp.int8)
    >>> product("qd,cd->qc", a, b, num_digits=2).round(2).tolist()
    [[62.5, 129.0]]
    """
    digits, unit = _split_digits(a, num_digits)
    *batch, rows, n = a.shape
    sums = jnp.einsum(subscripts, digits.reshape(*batch, num_digits * rows, n), b, preferred_element_type=jnp.int32)
    sums = sums.astype(jnp.float32).reshape(*batch, num_digits, rows, -1)
    total, *lower = jnp.unstack(sums, axis=-3)
    for digit in lower:
        total = BASE * total + digit
    return jax.lax.optimization_barrier(total * unit)  # put together once, not by each that reads it


def _split_digits(x: jax.Array, num_digits: int) -> tuple[jax.Array, jax.Array]:
    """Splits rows `[..., rows, n]` into digits `i8[..., num_digits, rows, n]`, the highest first, and their units
    `[..., rows, 1]`."""
    x = x.astype(jnp.float32)
    size = jnp.abs(x)
    largest = size.max(axis=-1, keepdims=True)
    # Asked of the sum, for a maximum may drop a NaN. A unit of 0 would be divided by.
    unit = jnp.maximum(largest / ((BASE - 1) * BASE ** (num_digits - 1)), jnp.finfo(jnp.float32).tiny)
    unit = jnp.where(jnp.isfinite(size.sum(axis=-1, keepdims=True)), unit, jnp.nan)
    # Rounded by adding 1.5 * 2 ** 23, whose last bits then count: a CPU converts less fast.
    whole = jax.lax.bitcast_convert_type(x * (1 / unit) + ROUNDER, jnp.int32) - np.float32(ROUNDER).view(np.int32)
    place = jnp.arange(num_digits, dtype=jnp.int32).reshape(*(1,) * (x.ndim - 2), num_digits, 1, 1)
    digits = jnp.expand_dims(whole, -3) >> BITS * (num_digits - 1 - place)
    return jnp.where(place == 0, digits, digits & (BASE - 1)).astype(jnp.int8), unit
