"""Products of tokens with weights, in the form in which a CPU does those of few tokens fastest.

XLA for CPUs brings a product's right operand into tiles, which takes longer than a product of few tokens, and where one
token meets weights of bfloat16 it first writes all of them down in float32. Other platforms do neither.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

FEW = 32  # tokens; with more the tiles pay


def product(x: jax.Array, weight: jax.Array, *, outputs_first: bool = True, dtype: Any = None) -> jax.Array:
    """`[..., I]` times `[O, I]`, or `[I, O]` without `outputs_first`: `[..., O]`, in `dtype`, by default x's.

    >>> import jax.numpy as jnp
    >>> product(jnp.ones((2, 3)), jnp.ones((4, 3))).tolist()
    [[3.0, 3.0, 3.0, 3.0], [3.0, 3.0, 3.0, 3.0]]
    """
    *front, size = x.shape
    y = _product(x.reshape(-1, size), weight, outputs_first, jnp.dtype(x.dtype if dtype is None else dtype))
    return y.reshape(*front, y.shape[-1])


@functools.partial(jax.jit, static_argnums=(2, 3))  # traced once for all layers
def _product(x: jax.Array, weight: jax.Array, outputs_first: bool, dtype: jnp.dtype) -> jax.Array:
    def plain(x: jax.Array, weight: jax.Array) -> jax.Array:
        return jnp.tensordot(x, weight, axes=(1, 1 if outputs_first else 0), preferred_element_type=dtype)

    def padded(x: jax.Array, weight: jax.Array) -> jax.Array:
        return _kept(plain(jnp.pad(x, ((0, 1), (0, 0))), weight))[:1]

    def turned(x: jax.Array, weight: jax.Array) -> jax.Array:
        x = jnp.pad(x, ((0, _columns(count) - count), (0, 0)))
        return _kept(jnp.tensordot(weight, x, axes=(1, 1), preferred_element_type=dtype))[:, :count].T

    count = x.shape[0]
    if count == 1 and x.dtype == jnp.bfloat16:
        form = padded
    elif 1 < count <= FEW and x.dtype == jnp.float32 and outputs_first:
        form = turned  # the weight as the left operand, which is read as it lies
    else:
        return plain(x, weight)
    return jax.lax.platform_dependent(x, weight, cpu=form, default=plain)


def _columns(count: int) -> int:
    """Of a right operand, padded: half a vector of them, a vector, or two."""
    return count if count <= 5 else next(size for size in (8, 16, 32) if count <= size)


def _kept(y: jax.Array) -> jax.Array:
    """XLA would undo what the form of a product is, seeing what becomes of it."""
    return jax.lax.optimization_barrier(y)
