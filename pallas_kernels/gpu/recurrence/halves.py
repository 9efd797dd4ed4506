"""Numbers of float32 in two halves of 16 bits, as the matrix unit takes them: 8 leading bits and the 8 behind them."""

from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from pallas_kernels.gpu.tiles import LAYOUT, InterpretParams

# PTX that rounds two numbers at once, and again what is left of them. From JAX's own operations LLVM takes the pair of
# leading bits apart and puts others together, four instructions more for six.
HALVE_PAIR = """{
    .reg .b32 leading, low, high;
    cvt.rn.bf16x2.f32 leading, $3, $2;
    shl.b32 low, leading, 16;
    and.b32 high, leading, 0xffff0000;
    sub.f32 low, $2, low;
    sub.f32 high, $3, high;
    cvt.rn.bf16x2.f32 $1, high, low;
    mov.b32 $0, leading;
    }"""


def halve(interpret: InterpretParams, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns numbers' leading bits, and those behind them."""
    if interpret is None:
        return _halve_pairs(x)
    leading = x.astype(jnp.bfloat16)
    return leading, (x - leading.astype(jnp.float32)).astype(jnp.bfloat16)


def _halve_pairs(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    half = plgpu.ShapeDtypeStruct(x.shape, jnp.bfloat16, layout=LAYOUT)

    @plgpu.inline_mgpu(arg_types=(LAYOUT,), return_type=(half, half))
    def halve_pairs(_, x):
        i32 = ir.IntegerType.get_signless(32)
        both = llvm.StructType.get_literal([i32, i32])
        word, pair = ir.VectorType.get((1,), i32), ir.VectorType.get((2,), ir.BF16Type.get())
        halves = np.empty_like(x.registers), np.empty_like(x.registers)
        for at, register in np.ndenumerate(x.registers):
            numbers = [vector.extract(register, [], [i]) for i in (0, 1)]
            made = llvm.inline_asm(both, numbers, HALVE_PAIR, "=r,=r,f,f")
            for i, half in enumerate(halves):
                half[at] = vector.bitcast(pair, vector.broadcast(word, llvm.extractvalue(i32, made, [i])))
        return [mgpu.FragmentedArray(_registers=half, _layout=x.layout, _is_signed=None) for half in halves]

    return tuple(halve_pairs(x))


def put(interpret: InterpretParams, x: jax.Array, targets: Any, piece: Any = slice(None)) -> None:
    """Stores halves of numbers."""
    for half, target in zip(halve(interpret, x), targets, strict=True):
        target.at[:, piece][...] = half


def pair_halves(a: Any, b: Any) -> tuple[tuple[Any, Any], ...]:
    """Returns what a product of numbers in halves is a sum of; that of their last bits is left out."""
    return (a[0], b[0]), (a[0], b[1]), (a[1], b[0])
