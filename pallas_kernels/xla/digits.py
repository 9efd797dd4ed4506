"""Products with bytes as they lie, on a CPU: nothing of what is read from a quantised pool is widened.

The other side becomes two digits of base 128, which hold more than its own 16 bits do of what counts: each row's are
counted in units of a 16,256th of its largest number.
"""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.joining import paired

BASE = 128
LARGEST = 127 * BASE
ROUNDER = 1.5 * 2.0**23


def product(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """`jnp.einsum(subscripts, a, b)` in float32, of rows `a [..., rows, n]` summed over their last axis, with bytes.

    A row that is not finite everywhere gives NaN, as nothing else does. Sums of up to 133,000 products fit 32 bits.

    >>> product("qd,cd->qc", jnp.array([[0.5, -1.0]]), jnp.array([[127, 1], [2, -128]], jnp.int8)).round(2).tolist()
    [[62.5, 129.0]]
    """
    digits, unit = _in_digits(a)
    *batch, two, rows, n = digits.shape
    sums = jnp.einsum(subscripts, digits.reshape(*batch, two * rows, n), b, preferred_element_type=jnp.int32)
    high, low = jnp.unstack(sums.astype(jnp.float32).reshape(*batch, two, rows, -1), axis=-3)
    return jax.lax.optimization_barrier((BASE * high + low) * unit)  # put together once, not by each that reads it


def _in_digits(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rows `[..., rows, n]` as high and low digits `i8[..., 2, rows, n]`, and their units `[..., rows, 1]`."""
    x = x.astype(jnp.float32)
    size = jnp.abs(x)
    # Asked of the sum, for a maximum may drop a NaN. A unit of 0 would be divided by.
    unit = jnp.maximum(size.max(axis=-1, keepdims=True) / LARGEST, jnp.finfo(jnp.float32).tiny)
    unit = jnp.where(jnp.isfinite(size.sum(axis=-1, keepdims=True)), unit, jnp.nan)
    # Rounded by adding 1.5 * 2 ** 23, whose last bits then count: a CPU converts less fast.
    whole = jax.lax.bitcast_convert_type(x * (1 / unit) + ROUNDER, jnp.int32) - np.float32(ROUNDER).view(np.int32)
    return paired(whole >> 7, whole & (BASE - 1), -3).astype(jnp.int8), unit
