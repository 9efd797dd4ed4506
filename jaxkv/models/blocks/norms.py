"""RMS norms, in float32 (Zhang and Sennrich, 2019: https://arxiv.org/abs/1910.07467)."""

import functools

import jax
import jax.numpy as jnp


@functools.partial(jax.jit, static_argnames=("eps", "offset"))  # traced once for all layers
def normalize(x: jax.Array, weight: jax.Array | None = None, *, eps: float, offset: float = 0.0) -> jax.Array:
    """Computes the RMS norm over the weight's axes, times `offset + weight`; without a weight, over the last axis."""
    y, ndim = x.astype(jnp.float32), 1 if weight is None else weight.ndim
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=tuple(range(-ndim, 0)), keepdims=True) + eps)
    if weight is None:
        return y.astype(x.dtype)
    scale = weight.astype(jnp.float32) + offset
    return (y * jnp.expand_dims(scale, tuple(range(x.ndim - ndim)))).astype(x.dtype)
