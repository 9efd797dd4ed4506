"""Arrays put together so that XLA fuses it with what comes before and after.

On a CPU a concatenation is a kernel of its own, which runs by itself and is compiled anew wherever it stands, in every
layer: of the kernels of a decoder's step they were more than a third. What is padded or selected is fused, and compiled
once for all layers.
"""

import jax
import jax.numpy as jnp


def side_by_side(left: jax.Array, right: jax.Array) -> jax.Array:
    """Computes `jnp.concatenate([left, right], axis=-1)`."""
    before, behind, front = left.shape[-1], right.shape[-1], [(0, 0)] * (left.ndim - 1)
    is_left = jnp.arange(before + behind) < before
    return jnp.where(is_left, jnp.pad(left, [*front, (0, behind)]), jnp.pad(right, [*front, (before, 0)]))


def stack_pair(first: jax.Array, second: jax.Array, axis: int) -> jax.Array:
    """Computes `jnp.stack([first, second], axis)`, for a negative axis."""
    first, second = (jnp.expand_dims(x, axis) for x in (first, second))
    number = jnp.arange(2).reshape(2, *(1,) * (-1 - axis))
    return jnp.where(number == 0, first, second)


def compute_once[T](x: T) -> T:
    """Returns `x`, which XLA computes once on a CPU, before all that reads it: else it computes it again in each
    fusion that reads it, which takes longer to compile and to run. Elsewhere XLA does as it likes."""
    return jax.lax.platform_dependent(x, cpu=jax.lax.optimization_barrier, default=lambda x: x)
