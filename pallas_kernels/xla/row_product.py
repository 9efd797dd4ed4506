"""Products of a few rows with a matrix as sums that XLA for CPUs computes while it reads the matrix once.

XLA for CPUs computes a product of one row by one core, if both are of float32. A matrix of bfloat16 it first writes
down in float32, and with two rows or more it packs the matrix into tiles: both take several times as long as to read
it. A sum it gives to a library that multiplies first, into memory. `sum_unrolled` is a sum that it does not give away:
a loop without branches over the numbers that lie side by side, divided over cores.

All of this can go when XLA for CPUs divides products of one row over cores, and multiplies bfloat16 as it lies. See
`LlvmGemv` in its `dot_kernel_emitter.cc` and `IsReduceOpOffloadedToYnn` in its `ynn_support.cc`.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.xla.tile_reads import zero_for

LANES = 8  # numbers of float32 in a vector
MOST = 24  # numbers summed one after another: with more the compiler keeps a loop, and computes one number at a time
LEAST = 4  # with fewer the sums of sums take as long
STREAMS = 8  # rows of a matrix `[I, O]` that are read side by side


def can_sum(size: int) -> bool:
    """Tells whether rows of so many numbers can be summed in pieces of equal size.

    >>> can_sum(576), can_sum(577)
    (True, False)
    """
    return size % LANES == 0 and _count_summands(size // LANES, MOST) >= LEAST


def multiply_rows(x: jax.Array, weight: jax.Array, *, outputs_first: bool) -> jax.Array:
    """Computes rows `[R, I]` times `[O, I]`, or `[I, O]` without `outputs_first`: `f32[R, O]`. `can_sum(I)` must hold.

    >>> import jax.numpy as jnp
    >>> multiply_rows(jnp.ones((1, 32)), jnp.ones((2, 32)), outputs_first=True).tolist()
    [[32.0, 32.0]]
    """
    rows, size = x.shape
    x = jax.lax.optimization_barrier(x.astype(jnp.float32))  # else converted again for every output
    if outputs_first:
        summands = _count_summands(size // LANES, MOST)
        shape = (size // (summands * LANES), summands, LANES)
        products = weight.reshape(-1, 1, *shape).astype(jnp.float32) * x.reshape(1, rows, *shape)
        sums = _keep(sum_unrolled(products, 3))
        return _sum_all(sums.reshape(*sums.shape[:2], -1), axis=2).T
    summands = _count_summands(size, STREAMS)
    products = weight.reshape(summands, -1, 1, weight.shape[1]).astype(jnp.float32) * x.T.reshape(summands, -1, rows, 1)
    return _sum_all(_keep(sum_unrolled(products, 0)), axis=0)


def sum_unrolled(x: jax.Array, axis: int) -> jax.Array:
    """Returns the sum over an axis of float32, which must be short, in the order in which it lies.

    It is written as a difference, which no library takes for a sum.
    """
    return jax.lax.reduce(x, zero_for(x), lambda a, b: a - (-b), (axis,))


def _sum_all(x: jax.Array, axis: int) -> jax.Array:
    """Returns the sum over an axis of any length, in short sums."""
    front, behind = x.shape[:axis], x.shape[axis + 1 :]
    while (size := x.shape[axis]) > 1:
        summands = _count_summands(size, MOST)
        if summands == 1:  # a prime
            return x.sum(axis)
        x = _keep(sum_unrolled(x.reshape(*front, summands, size // summands, *behind), axis))
    return x.reshape(*front, *behind)


def _count_summands(size: int, most: int) -> int:
    """Returns the largest divisor of a size that is no larger than `most`."""
    return max(count for count in range(1, most + 1) if size % count == 0)


def _keep(x: jax.Array) -> jax.Array:
    return jax.lax.optimization_barrier(x)
