"""Computes products of tokens with weights, in the form that is fastest on a CPU.

XLA for CPUs packs a product's right operand into tiles, which takes longer than a product of few tokens. With a single
token it uses one core, and first converts weights of bfloat16 to float32. It has no grouped product: it copies the
weights of all groups, and multiplies every token with all of them. Other platforms do none of this.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.xla.row_product import can_sum, multiply_rows
from pallas_kernels.xla.tile_reads import zero_for

FEW = 32  # tokens; with more the tiles pay
# With how many tokens at most a product is computed as sums, by the bytes of a number and `outputs_first`. One token
# times float32 `[O, I]` is left to XLA: its one core takes less time than two take for the sums.
SUMMED = {(2, True): 4, (2, False): 4, (4, False): 4}
GROUP_TOKENS = 4, 128  # minimum and maximum number of tokens at a time in a grouped product


@functools.partial(jax.jit, static_argnames=("outputs_first", "dtype"))  # traced once for all layers
def product(x: jax.Array, weight: jax.Array, *, outputs_first: bool = True, dtype: Any = None) -> jax.Array:
    """Computes `[..., I]` times `[O, I]`, or `[I, O]` without `outputs_first`: `[..., O]`, in `dtype`, by default x's.

    >>> import jax.numpy as jnp
    >>> product(jnp.ones((2, 3)), jnp.ones((4, 3))).tolist()
    [[3.0, 3.0, 3.0, 3.0], [3.0, 3.0, 3.0, 3.0]]
    """
    *front, size = x.shape
    count = math.prod(front)

    def plain(x: jax.Array, weight: jax.Array) -> jax.Array:
        return jnp.tensordot(x, weight, axes=(-1, 1 if outputs_first else 0), preferred_element_type=dtype)

    def pad_to_two(x: jax.Array, weight: jax.Array) -> jax.Array:
        y = _keep_form(plain(jnp.pad(x.reshape(count, size), ((0, 1), (0, 0))), weight))
        return y[:count].reshape(*front, -1)

    def multiply_turned(x: jax.Array, weight: jax.Array) -> jax.Array:
        x = jnp.pad(x.reshape(count, size), ((0, _columns(count) - count), (0, 0)))
        y = _keep_form(jnp.tensordot(weight, x, axes=(1, 1), preferred_element_type=dtype))
        return y[:, :count].T.reshape(*front, -1)

    if _is_summed(count, x, weight, size, outputs_first):
        return _sum_products(plain, x, weight, outputs_first)
    if count == 1 and x.dtype == jnp.bfloat16:
        form = pad_to_two
    elif 1 < count <= FEW and x.dtype == jnp.float32 and outputs_first:
        form = multiply_turned  # the weight as the left operand, which is read in place
    else:
        return plain(x, weight)
    return jax.lax.platform_dependent(x, weight, cpu=form, default=plain)


Product = Callable[[jax.Array, jax.Array], jax.Array]


def dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
) -> jax.Array:
    """Computes `jax.lax.dot_general`, on a CPU in the form of `product` where few tokens meet a kernel `[I, O]`: for
    Flax's layers, as their `dot_general`.

    >>> import jax.numpy as jnp
    >>> dot_general(jnp.ones((1, 4, 8)), jnp.ones((4, 8, 2)), (((1, 2), (0, 1)), ((), ()))).tolist()
    [[32.0, 32.0]]
    """
    options = {"precision": precision, "preferred_element_type": preferred_element_type, "out_sharding": out_sharding}
    given = {name: option for name, option in options.items() if option is not None}

    def plain(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return jax.lax.dot_general(lhs, rhs, dimension_numbers, **given)

    (inner, kernel_inner), batch = dimension_numbers
    front = lhs.shape[: lhs.ndim - len(inner)]
    is_plain = set(given) - {"preferred_element_type"} or any(map(len, batch))
    is_kernel = tuple(inner) == tuple(range(len(front), lhs.ndim)) and tuple(kernel_inner) == tuple(range(len(inner)))
    size = math.prod(lhs.shape[len(front) :])
    if is_plain or not is_kernel or not _is_summed(math.prod(front), lhs, rhs, size, outputs_first=False):
        return plain(lhs, rhs)
    return _sum_products(plain, lhs, rhs, outputs_first=False, num_inner=len(inner))


def _is_summed(count: int, x: jax.Array, weight: jax.Array, size: int, outputs_first: bool) -> bool:
    """Tells whether a CPU sums products of so many tokens. Where devices share weights, and which axis is known, a
    product is left to XLA: a divided axis cannot be cut into pieces."""
    mesh = jax.typeof(weight).sharding.mesh
    is_local = mesh.empty or mesh.are_all_axes_manual
    same = x.dtype == weight.dtype and jnp.issubdtype(x.dtype, jnp.floating)
    return same and is_local and 0 < count <= SUMMED.get((x.dtype.itemsize, outputs_first), 0) and can_sum(size)


def _sum_products(
    plain: Product, x: jax.Array, weight: jax.Array, outputs_first: bool, num_inner: int = 1
) -> jax.Array:
    """Computes `plain(x, weight)`, a product over the last `num_inner` axes of x; on a CPU as sums.

    Its derivatives are those of `plain`, and so is it under `vmap`, whose rows XLA puts together to one product.
    """
    inner = x.shape[x.ndim - num_inner :]

    def multiply_and_sum(x: jax.Array, weight: jax.Array) -> jax.Array:
        size, result = math.prod(inner), jax.eval_shape(plain, x, weight)
        flat = weight.reshape((-1, size) if outputs_first else (size, -1))
        y = multiply_rows(x.reshape(-1, size), flat, outputs_first=outputs_first)
        return y.reshape(result.shape).astype(result.dtype)

    @jax.custom_batching.custom_vmap
    def chosen(x: jax.Array, weight: jax.Array) -> jax.Array:
        return jax.lax.platform_dependent(x, weight, cpu=multiply_and_sum, default=plain)

    @chosen.def_vmap
    def rows_of_one_product(axis_size: int, batched: Any, x: jax.Array, weight: jax.Array) -> tuple[jax.Array, bool]:
        del axis_size
        return jax.vmap(plain, in_axes=[0 if is_batched else None for is_batched in batched])(x, weight), True

    @jax.custom_jvp
    def product(x: jax.Array, weight: jax.Array) -> jax.Array:
        return chosen(x, weight)

    @product.defjvp
    def derive(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
        return product(*primals), jax.jvp(plain, primals, tangents)[1]

    return product(x, weight)


def split_heads(x: jax.Array, heads: tuple[int, ...]) -> jax.Array:
    """Reshapes a product's `[..., I]` to `[..., *heads]`. Keeps the heads from becoming an axis of the product where a
    TPU would choose an axis order and then transpose."""
    front = x.shape[:-1]
    if moves_heads(math.prod(front), heads[-1]):
        x = jax.lax.platform_dependent(x, tpu=_keep_form, default=lambda x: x)
    return x.reshape(*front, *heads)


def moves_heads(num_tokens: int, head_dim: int) -> bool:
    """Tells whether heads as an axis of a product cost time on a TPU.

    By the v6e cycle model they cost 0.5 to 2 % of a layer of Llama 3 8B from 64 tokens on, and more than half of a
    latent layer's queries, of 192, for any number of tokens. Few tokens are faster with that axis if heads are whole
    registers; heads of less than a register are slower without it."""
    return head_dim >= 128 and (num_tokens > FEW or head_dim % 128 != 0)


def _columns(count: int) -> int:
    """Returns the padded number of columns of a right operand: half a vector, a vector, or two."""
    return count if count <= 5 else next(size for size in (8, 16, 32) if count <= size)


def _keep_form(x: jax.Array) -> jax.Array:
    """Keeps XLA from simplifying a product's form by its operands or its uses."""
    return jax.lax.optimization_barrier(x)


@functools.partial(jax.jit, static_argnames="outputs_first")
def product_by_heads(x: jax.Array, weights: jax.Array, *, outputs_first: bool) -> jax.Array:
    """Computes `[..., H, I]` times `[H, O, I]`, or `[H, I, O]` without `outputs_first`, by head: `[..., H, O]`.

    >>> import jax.numpy as jnp
    >>> product_by_heads(jnp.ones((1, 2, 3)), jnp.ones((2, 4, 3)), outputs_first=True).shape
    (1, 2, 4)
    """
    *front, heads, size = x.shape
    count, inner = math.prod(front), "hoi" if outputs_first else "hio"

    def plain(x: jax.Array, weights: jax.Array) -> jax.Array:
        return jnp.einsum(f"...hi,{inner}->...ho", x, weights)

    def pad_to_two(x: jax.Array, weights: jax.Array) -> jax.Array:
        """Pads, which fixes the order of the tokens' axes. Otherwise XLA would transpose the weights."""
        x = jnp.moveaxis(x.reshape(count, heads, size), 0, 1)
        y = jnp.einsum(f"hti,{inner}->hto", _keep_form(jnp.pad(x, ((0, 0), (0, 1), (0, 0)))), weights)
        return jnp.moveaxis(y[:, :count], 1, 0).reshape(*front, heads, -1)

    if count == 0 or (x.dtype != jnp.bfloat16 and (count == 1 or outputs_first)):
        return plain(x, weights)
    return jax.lax.platform_dependent(x, weights, cpu=pad_to_two, default=plain)


def grouped_product(x: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    """Computes `jax.lax.ragged_dot`: the first `sizes[0]` of tokens `[N, I]` times `weights[0]`, and so on, `[N, O]`.

    Args:
      x: tokens; their number is the sum of the `i32[E]` sizes.
      weights: `[E, I, O]`.

    >>> import jax.numpy as jnp
    >>> grouped_product(jnp.ones((3, 2)), jnp.asarray([[[1.0], [1]], [[2], [2]]]), jnp.asarray([1, 2])).tolist()
    [[2.0], [4.0], [4.0]]
    """
    return _grouped_product(x, weights, sizes)


@jax.custom_vjp
def _grouped_product(x: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    return jax.lax.platform_dependent(x, weights, sizes, cpu=_group_by_group, default=jax.lax.ragged_dot)


def _forward(x: jax.Array, weights: jax.Array, sizes: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return _grouped_product(x, weights, sizes), (x, weights, sizes)


def _backward(kept: tuple[jax.Array, ...], cotangent: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x, weights, sizes = kept
    _, pull = jax.vjp(lambda x, weights: jax.lax.ragged_dot(x, weights, sizes), x, weights)
    return (*pull(cotangent), None)


_grouped_product.defvjp(_forward, _backward)


@jax.jit  # traced once for all layers
def _group_by_group(x: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    """Computes a few tokens of one group at a time, in order: later groups overwrite writes past a group's end."""
    num_tokens, (groups, _, outputs) = x.shape[0], weights.shape
    least, most = GROUP_TOKENS
    together = min(max(least, 1 << (-(-num_tokens // groups) - 1).bit_length()), most)  # a group's share, or more
    turns = -(-sizes // together)
    ends, turn_ends = jnp.cumsum(sizes), jnp.cumsum(turns)
    x = jnp.pad(x, ((0, together), (0, 0)))

    def turn(i: jax.Array, y: jax.Array) -> jax.Array:
        group = jnp.searchsorted(turn_ends, i, side="right", method="compare_all")
        start = ends[group] - sizes[group] + together * (i - turn_ends[group] + turns[group])
        tokens = jax.lax.dynamic_slice_in_dim(x, start, together)
        return jax.lax.dynamic_update_slice_in_dim(y, tokens @ weights[group], start, axis=0)

    nothing = jnp.zeros((num_tokens + together, outputs), x.dtype) + zero_for(x, weights, sizes).astype(x.dtype)
    return jax.lax.fori_loop(0, turn_ends[-1], turn, nothing)[:num_tokens]
