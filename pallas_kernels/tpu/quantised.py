"""What the kernels do with quantised pools: numbers of 8 bits into the matrix unit's own, and their scales.

A block's scales, `[2, K, block_size]` of float32, lie along lanes. A key's is applied to its logits and a value's to
its weights, for those are fewer than the entries of a head, and the products stay exact.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.kinds import numbers

KINDS = ("int8", "float8_e4m3fn", "float8_e5m2")


def widen(stored: jax.Array, kind: str | None, dtype: Any) -> jax.Array:
    """Stored numbers in the dtype that is multiplied; any bits give finite ones."""
    return stored if kind is None else numbers(stored, kind).astype(dtype)


def encodable(dtype: Any) -> Any:
    """In what new keys and values are handed to a kernel, which quantises them."""
    return jnp.dtype(dtype if dtype == jnp.bfloat16 else jnp.float32)
