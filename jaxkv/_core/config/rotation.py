"""A rotation of each head that spreads what a few channels hold over all of them, before numbers are quantised.

Where some channels are much larger than the others, they set the scale, and the others are rounded away. A Hadamard
matrix mixes all channels with equal weight, as in QuaRot (https://arxiv.org/abs/2404.00456): it depends on no data,
queries rotated like the keys see the same logits, and the output, rotated like the values, is rotated back.
"""

import jax
import jax.numpy as jnp


def rotate(x: jax.Array) -> jax.Array:
    """`[..., D]` rotated, in the same dtype. To rotate twice is to do nothing: the matrix is its own inverse.

    D is a power of two times an odd number; along that one it is the reflection of all ones, `1 - 2 / n` and `-2 / n`.

    >>> x = jnp.arange(80.0)
    >>> bool(jnp.allclose(rotate(rotate(x)), x, atol=1e-4)), bool(jnp.isclose((rotate(x) ** 2).sum(), (x**2).sum()))
    (True, True)
    """
    size = x.shape[-1]
    power = size & -size
    parts = x.reshape(*x.shape[:-1], size // power, power).astype(jnp.float32)
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (power, power), axis) for axis in (0, 1))
    signs = 1 - 2 * (jax.lax.population_count(row & column) & 1)
    mixed = jnp.matmul(parts, signs.astype(jnp.float32) * power**-0.5, precision="highest")
    if size != power:
        mixed -= 2 * mixed.mean(axis=-2, keepdims=True)
    return mixed.reshape(x.shape).astype(x.dtype)
