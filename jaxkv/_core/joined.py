"""Keys and values of a head in one row of the pool, `[v | k]`, in layers that `CacheConfig.joins`.

A TPU stores rows of 128 lanes: of a head_dim of 64 half of every row would be padding. A joined row is a latent one,
whose first numbers are the values: kernels read it as they read those, by queries that are 0 where values stand. Scales
of what is quantised are those of keys and values apart, `[num_blocks + 1, 2, K, block_size]`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.joining import side_by_side


def rows(k: jax.Array, v: jax.Array) -> jax.Array:
    """Keys and values `[.., D]` as rows `[.., 2 D]`."""
    return side_by_side(v, k)


def queries(q: jax.Array) -> jax.Array:
    """Queries `[.., D]` of rows' keys, `[.., 2 D]`."""
    return jnp.pad(q, [(0, 0)] * (q.ndim - 1) + [(q.shape[-1], 0)])


def together(kv: Any, axis: int) -> Any:
    """Keys and values at `axis`, `[.., 2, .., D]`, as rows `[.., 1, .., 2 D]`. NumPy stays NumPy."""
    numpy = np if isinstance(kv, np.ndarray) else jnp
    k, v = numpy.split(kv, 2, axis=axis)
    return numpy.concatenate([v, k], axis=-1)


def apart(kv: Any, head_dim: int, axis: int) -> Any:
    """The opposite of `together`; rows may be padded."""
    numpy = np if isinstance(kv, np.ndarray) else jnp
    v, k = kv[..., :head_dim], kv[..., head_dim : 2 * head_dim]
    return numpy.concatenate([k, v], axis=axis)
