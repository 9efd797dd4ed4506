"""Products of operands, by the matrix instructions that the chip has, summed in registers.

Those of Hopper read operands from shared memory, and go on beside what the warpgroup does next (`wgmma`). Blackwell
chips have none of these. What all chips have are instructions of a warp (`mma`), which read both operands from
registers, where pieces of them are loaded first. Sums lie in registers as Hopper's do, so that nothing else in a kernel
differs. Blackwell's own instructions (`tcgen05`) are faster in prefill, but keep sums in a memory of their own, and
those of the 12th capability lack them.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

from pallas_kernels.gpu import chips
from pallas_kernels.gpu.tiles import LAYOUT, InterpretParams, full, tick

PIECE = 64  # numbers of a swizzled line of shared memory, of which no part is loaded
DEPTH = 16  # of an instruction: so few lines of a right operand are loaded at once, for the registers' sake


class Transposed(NamedTuple):
    """A right operand that lies in shared memory as `[N, K]`."""

    ref: Any


# `[M, K]`, in shared memory, or in registers as `LAYOUT` says; and `[K, N]` in shared memory.
Pair = tuple[Any, Any]


def multiply(interpret: InterpretParams, shape: tuple[int, int], *pairs: Pair) -> jax.Array:
    """Returns the sum of products of operands' pairs, `f32[M, N]`."""
    return multiply_while(lambda: None, interpret, shape, *pairs)[0]


def multiply_while(
    meanwhile: Callable[[], Any], interpret: InterpretParams, shape: tuple[int, int], *pairs: Pair
) -> tuple[jax.Array, Any]:
    """Returns the sum of products, and what is computed while the matrix unit is at them, if it can."""
    if interpret is not None or not chips.find_chip().has_wgmma:
        return accumulate(interpret, full(shape, 0.0, LAYOUT), *pairs), meanwhile()

    def sum_products(acc_ref):
        _begin(acc_ref, pairs)
        made = meanwhile()
        return acc_ref[...], made

    return pl.run_scoped(sum_products, plgpu.ACC(shape, jnp.float32))


def multiply_and_accumulate(
    use: Callable[[jax.Array], Any],
    interpret: InterpretParams,
    shape: tuple[int, int],
    pair: Pair,
    acc: jax.Array,
    other: Pair,
    meanwhile: Callable[[], None],
) -> tuple[jax.Array, Any]:
    """Returns `acc` and the product of the other pair, and what `use` makes of the first pair's, while that goes on.

    Args:
      meanwhile: called once both have begun.
    """
    if interpret is not None or not chips.find_chip().has_wgmma:
        product = multiply(interpret, shape, pair)
        acc = accumulate(interpret, acc, other)
        meanwhile()
        return acc, use(product)

    def products(product_ref, acc_ref):
        acc_ref[...] = acc
        _begin(product_ref, [pair])
        _begin(acc_ref, [other])
        meanwhile()
        used = use(plgpu.wgmma_accumulator_load(product_ref, wait_n=1))
        return acc_ref[...], used

    return pl.run_scoped(products, *(plgpu.ACC(x, jnp.float32) for x in (shape, acc.shape)))


def accumulate(interpret: InterpretParams, acc: jax.Array, *pairs: Pair) -> jax.Array:
    """Returns `acc` and the sum of products."""
    return accumulate_all(interpret, (acc,), pairs)[0]


def accumulate_all(
    interpret: InterpretParams, totals: tuple[jax.Array, ...], *sums: tuple[Pair, ...]
) -> tuple[jax.Array, ...]:
    """Returns totals, to each of which the matrix unit has added a sum of products. All are waited for at once."""
    if not chips.find_chip().has_wgmma:
        return tuple(_add_by_warps(interpret, total, pairs) for total, pairs in zip(totals, sums, strict=True))
    if interpret is not None:
        return tuple(_interpret(interpret, total, pairs) for total, pairs in zip(totals, sums, strict=True))

    def add(acc_refs):
        for acc_ref, pairs in zip(acc_refs, sums, strict=True):
            _begin(acc_ref, pairs)

    return pl.run_state(add)(tuple(plgpu.ACC.init(total) for total in totals))


def _begin(acc_ref: Any, pairs: Any) -> None:
    for a, b in pairs:
        plgpu.wgmma(acc_ref, a, b.ref.T if isinstance(b, Transposed) else b)


def _interpret(interpret: InterpretParams, total: jax.Array, pairs: tuple[Pair, ...]) -> jax.Array:
    """Adds products as the interpreter does, which multiplies nothing that lies in registers, and adds to no sum.

    Its race detector does not see what products read, so operands are read beside them.
    """
    for a, b in pairs:
        tick(interpret)
        left, right = a[...], b.ref[...].T if isinstance(b, Transposed) else b[...]
        tick(interpret)
        if isinstance(a, jax.Array):
            total = total + _dot(left, right)
        else:
            total = total + pl.run_scoped(functools.partial(_multiply, (a, b)), plgpu.ACC(total.shape, jnp.float32))
    return total


def _multiply(pair: Pair, acc_ref: Any) -> jax.Array:
    _begin(acc_ref, [pair])
    return acc_ref[...]


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.dot(a.astype(jnp.float32), b.astype(jnp.float32))


def _add_by_warps(interpret: InterpretParams, total: jax.Array, pairs: tuple[Pair, ...]) -> jax.Array:
    """Adds products, `DEPTH` columns of the left operand and as many lines of the right one at a time. The interpreter
    does the same with arrays for registers."""
    # Of a transposed operand, columns are lines of memory, and half as many are loaded at once for twice as deep.
    is_transposed = all(isinstance(b, Transposed) for _, b in pairs)
    width = min(PIECE // 2 if is_transposed else PIECE, total.shape[1])
    spans = [pl.ds(first, min(width, total.shape[1] - first)) for first in range(0, total.shape[1], width)]
    parts = [total[:, x.start : x.start + x.size] for x in spans] if len(spans) > 1 else [total]
    for a, b in pairs:
        tick(interpret)
        for first in range(0, a.shape[1], PIECE):
            lefts = _load_left(interpret, a, first)
            for nth, span in enumerate(spans):
                for left, right in zip(lefts, _load_right(interpret, b, first, span), strict=True):
                    parts[nth] = parts[nth] + _dot(left, right) if interpret else plgpu.mma(parts[nth], left, right)
        tick(interpret)
    return join(parts, axis=1, interpret=interpret)


def _load(interpret: InterpretParams, ref: Any, layout: Any) -> jax.Array:
    return ref[...] if interpret is not None else plgpu.load(ref, layout=layout(ref.dtype))


def _load_left(interpret: InterpretParams, a: Any, first: int) -> list[jax.Array]:
    """Returns 64 columns of a left operand, `DEPTH` at a time, as a warp's instructions take them."""
    if isinstance(a, jax.Array):
        return [_select_columns(interpret, a, first + i) for i in range(0, PIECE, DEPTH)]
    loaded = _load(interpret, a.at[:, pl.ds(first, PIECE)], plgpu.Layout.MMA_LHS)
    return [loaded[:, i : i + DEPTH] for i in range(0, PIECE, DEPTH)]


def _select_columns(interpret: InterpretParams, x: jax.Array, first: int) -> jax.Array:
    """Returns `DEPTH` columns of what lies in registers as a left operand. The registers stay: eight columns of a sum
    beside eight others are a tile of it."""
    if interpret is not None:
        return x[:, first : first + DEPTH]
    layout, shape = plgpu.Layout.MMA_LHS(x.dtype), (x.shape[0], DEPTH)
    selected = plgpu.ShapeDtypeStruct(shape, x.dtype, layout=layout)

    @plgpu.inline_mgpu(arg_types=(LAYOUT,), return_type=selected)
    def select_columns(_, x):
        left, eights = layout.to_mgpu(), slice(first // 8, (first + DEPTH) // 8)
        registers = x.registers[:, eights].reshape(left.registers_shape(shape))
        return mgpu.FragmentedArray(_registers=registers, _layout=left, _is_signed=None)

    return select_columns(x)


def _load_right(interpret: InterpretParams, b: Any, first: int, span: pl.Slice) -> Iterator[jax.Array]:
    """Yields 64 lines of a right operand's columns, `DEPTH` at a time. If it is transposed, all are loaded at once."""
    if isinstance(b, Transposed):
        ref = b.ref.at[span, pl.ds(first, PIECE)]
        loaded = ref[...].T if interpret is not None else _load(interpret, ref.T, plgpu.Layout.MMA_RHS)
        yield from (loaded[i : i + DEPTH] for i in range(0, PIECE, DEPTH))
    else:
        for i in range(0, PIECE, DEPTH):
            yield _load(interpret, b.at[pl.ds(first + i, DEPTH), span], plgpu.Layout.MMA_RHS)


def join(parts: list[jax.Array], *, axis: int, interpret: InterpretParams = None) -> jax.Array:
    """Returns arrays that lie in registers as `LAYOUT` says beside one another."""
    if len(parts) == 1:
        return parts[0]
    if interpret is not None:
        return jnp.concatenate(parts, axis=axis)
    shape = tuple(sum(x.shape[i] for x in parts) if i == axis else n for i, n in enumerate(parts[0].shape))
    joined = plgpu.ShapeDtypeStruct(shape, parts[0].dtype, layout=LAYOUT)

    @plgpu.inline_mgpu(arg_types=(LAYOUT,) * len(parts), return_type=joined)
    def put_beside_each_other(_, *parts):
        registers = np.concatenate([x.registers for x in parts], axis=axis)
        return mgpu.FragmentedArray(_registers=registers, _layout=parts[0].layout, _is_signed=None)

    return put_beside_each_other(*parts)
