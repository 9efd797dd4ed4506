"""A rotation of each head before quantization, which spreads a few large channels over all channels.

Channels much larger than the others determine the scale, and the others are rounded away. A Hadamard matrix mixes all
channels with equal weight, as in QuaRot (https://arxiv.org/abs/2404.00456). The matrix depends on no data. Queries are
rotated like the keys, which keeps the logits, and the output, rotated like the values, is rotated back.
"""

import functools

import jax
import jax.numpy as jnp


def rotate(x: jax.Array, *, deterministic: bool = False) -> jax.Array:
    """Rotates `[..., D]` and keeps the dtype. Rotating twice changes nothing: the matrix is its own inverse.

    D is a power of two times an odd n; the factor n is mixed by a reflection with entries `1 - 2 / n` and `-2 / n`.

    Args:
      deterministic: add in one order, whatever the other axes are. A CPU's or GPU's product of few rows may add in
        another order than that of many; sums of pairs take up to twice as long. A TPU's has one order.

    >>> x = jnp.arange(80.0)
    >>> bool(jnp.allclose(rotate(rotate(x)), x, atol=1e-4)), bool(jnp.isclose((rotate(x) ** 2).sum(), (x**2).sum()))
    (True, True)
    """
    size = x.shape[-1]
    power = size & -size
    parts = x.reshape(*x.shape[:-1], size // power, power).astype(jnp.float32)
    in_order = functools.partial(jax.lax.platform_dependent, tpu=_multiply, default=_add_pairs)
    mixed = in_order(parts) if deterministic else _multiply(parts)
    if size != power:
        mixed -= 2 * mixed.mean(axis=-2, keepdims=True)
    return mixed.reshape(x.shape).astype(x.dtype)


def _multiply(x: jax.Array) -> jax.Array:
    """Returns `[..., n]` times the Hadamard matrix of a power of two, n."""
    power = x.shape[-1]
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (power, power), axis) for axis in (0, 1))
    signs = 1 - 2 * (jax.lax.population_count(row & column) & 1)
    return jnp.matmul(x, signs.astype(jnp.float32) * power**-0.5, precision="highest")


def _add_pairs(x: jax.Array) -> jax.Array:
    """Returns the same by sums and differences of pairs: the fast Walsh-Hadamard transform."""
    power, width, mixed = x.shape[-1], 1, x
    while width < power:
        pairs = mixed.reshape(*x.shape[:-1], power // (2 * width), 2, width)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        mixed, width = jnp.stack([first + second, first - second], axis=-2), 2 * width
    return mixed.reshape(x.shape) * power**-0.5
