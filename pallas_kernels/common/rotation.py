"""A rotation of each head before quantization, which spreads a few large channels over all channels.

Channels much larger than the others determine the scale, and the others are rounded away. A Hadamard matrix mixes all
channels with equal weight, as in QuaRot (https://arxiv.org/abs/2404.00456). The matrix depends on no data. Queries are
rotated like the keys, which keeps the logits, and the output, rotated like the values, is rotated back.
"""

import jax
import jax.numpy as jnp


def rotate(x: jax.Array) -> jax.Array:
    """Rotates `[..., D]` and keeps the dtype. Rotating twice changes nothing: the matrix is its own inverse.

    D is a power of two times an odd n; the factor n is mixed by a reflection with entries `1 - 2 / n` and `-2 / n`.

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
