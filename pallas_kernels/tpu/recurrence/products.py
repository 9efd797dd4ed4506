"""Products of matrices of float32 in parts of bfloat16, which add up to each number, and the sizes of a chunk.

Sixteen rows take a matrix unit as long whatever their depth and width, up to 256 x 256: parts lie side by side in depth
and width, and what would be four products is one.
"""

import jax.numpy as jnp
from jax import lax

CHUNK = 64  # tokens
LEAST_GATE = -100.0  # its exponential is 0 in float32
PAIR = 2 * CHUNK  # lanes of two heads' triangles side by side
MINOR, INNER, OUTER = ((1,), (1,)), ((1,), (0,)), ((0,), (0,))  # which axes are summed over


def split(x, digits):
    """Returns so many parts of each number of `x`, in bfloat16, which add up to it: three exactly."""
    parts = []
    for _ in range(digits):
        parts.append(x.astype(jnp.bfloat16))
        x = x - parts[-1].astype(jnp.float32)
    return parts


def pack_left(parts, axis=1):
    """Returns parts side by side, as `multiply_left` takes them."""
    return [jnp.concatenate([parts[0], x], axis=axis) for x in parts[1:]]


def multiply_left(left, b, contract=INNER):
    """Returns a product in float32 of numbers of two parts, all of their digits; of three, those of float32."""
    axis = contract[1][0]
    side = jnp.concatenate(b[:2], axis=1 - axis)
    found = dot(left[0], jnp.concatenate([side, side], axis=axis), contract)
    width = found.shape[1] // 2
    found = found[:, :width] + found[:, width:]
    return found if len(b) == 2 else found + dot(left[1], jnp.concatenate([b[2], b[0]], axis=axis), contract)


def multiply(a, b, contract):
    """Returns the same of parts that do not stand side by side yet."""
    return multiply_left(pack_left(a, contract[0][0]), b, contract)


def multiply_rows(a, b):
    """Returns the product of `a`, turned, and `b`: of two parts all digits, of three those of float32."""
    pairs = [(x, y) for i, x in enumerate(a) for y in b[: max(2, len(b) - i)]]
    return dot(*(jnp.concatenate(x, axis=0) for x in zip(*pairs, strict=True)), OUTER)


def dot(a, b, contract):
    return lax.dot_general(a, b, (contract, ((), ())), preferred_element_type=jnp.float32)


def ones(mask):
    return mask.astype(jnp.float32).astype(jnp.bfloat16)
