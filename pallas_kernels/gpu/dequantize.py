"""What the kernels do with quantized pools: tiles of 8 bits widened in shared memory, and their scales.

A tile comes as it is stored, half the bytes, and becomes the matrix unit's 16-bit operand by way of registers. Beside
keys of 8 bits the matrix unit would want queries of 8 bits, and those would lose as much again as the keys have. Scales
come with the keys. A key's is applied to its logits and a value's to its weights, so that the products are exact. Of
four bits all of it is otherwise, by `nibbles`.
"""

import itertools
import math

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.common.quantization import StorageFormat
from pallas_kernels.gpu import nibbles
from pallas_kernels.gpu.nibbles import EntryGroups, Scaled
from pallas_kernels.gpu.tiles import LAYOUT, OPERAND, Tile

FORMATS = ("int8", "float8_e4m3fn", "float8_e5m2", "int4", "k5v3")
SCALES_AT_ONCE = 32  # a bulk copy into shared memory begins on 128 bytes


def _scaled(shift: int, mask: int, factor: int, dtype: str) -> str:
    """PTX of 8-bit floats: sign, exponent and fraction go where `dtype` has them, and a factor makes up for the bias.
    That is exact, below the least normal number too; bits of NaN and infinity give finite numbers."""
    return f"""{{
        .reg .b32 both, factor;
        prmt.b32 both, $1, 0, 0x9180;
        shl.b32 both, both, {shift};
        and.b32 both, both, {mask:#x};
        mov.b32 factor, {factor:#x};
        mul.{dtype} $0, both, factor;
        }}"""


# PTX that makes two 16-bit numbers of the two bytes in the low half of a register.
PAIRS = {
    # 128 and the low seven bits, less 128 or, of a negative number, 256: the sign is the exponent's last bit.
    ("int8", "bfloat16"): """{
        .reg .b32 both, low, high;
        prmt.b32 both, $1, 0x43004300, 0x7150;
        and.b32 low, both, 0xff7fff7f;
        and.b32 high, both, 0xff80ff80;
        sub.bf16x2 $0, low, high;
        }""",
    # 1024 + 128 and the number.
    ("int8", "float16"): """{
        .reg .b32 both, base;
        prmt.b32 both, $1, 0x64006400, 0x7150;
        xor.b32 both, both, 0x00800080;
        mov.b32 base, 0x64806480;
        sub.f16x2 $0, both, base;
        }""",
    ("float8_e4m3fn", "bfloat16"): _scaled(4, 0x87F087F0, 0x7B807B80, "bf16x2"),  # 2 ** 120
    ("float8_e4m3fn", "float16"): _scaled(7, 0xBF80BF80, 0x5C005C00, "f16x2"),  # 2 ** 8
    ("float8_e5m2", "bfloat16"): _scaled(5, 0x8FE08FE0, 0x77807780, "bf16x2"),  # 2 ** 112
    # The upper byte of its float16, NaN and infinity as well: those become the largest that there is.
    ("float8_e5m2", "float16"): """{
        .reg .b32 both, most, least;
        prmt.b32 both, $1, 0, 0x1202;
        mov.b32 most, 0x7b007b00;
        mov.b32 least, 0xfb00fb00;
        min.f16x2 both, both, most;
        max.f16x2 $0, both, least;
        }""",
}


def slots_and_wide(storage_dtype, dtype, format: StorageFormat, tile: Tile, head_dim: int, groups=None) -> tuple:
    """Shared memory for a ring of K's tiles, or V's; and if quantized a tile of each to multiply, and the scales."""
    if not format.is_quantized:
        return plgpu.SMEM((tile.stages, tile.tokens, head_dim), dtype, transforms=OPERAND), ()
    columns = head_dim // format.numbers_per_entry
    bytes_of_tiles = math.gcd(columns, 64)
    transforms = (plgpu.TilingTransform((8, bytes_of_tiles)), plgpu.SwizzleTransform(bytes_of_tiles))  # type: ignore[abstract]
    slots = plgpu.SMEM((tile.stages, tile.tokens, columns), storage_dtype, transforms=transforms)
    wide = plgpu.SMEM((tile.tokens, head_dim), dtype, transforms=OPERAND)
    if groups is None:
        scales = plgpu.SMEM((tile.stages, 2, tile.tokens), jnp.float32)
    else:
        scales = plgpu.SMEM((tile.stages, 2, tile.tokens // groups.piece, groups.line), format.scale_dtype)
    return slots, (wide, wide, scales)


def arrivals(format: StorageFormat, pieces: int, groups: EntryGroups | None = None) -> tuple[int, int]:
    """Bulk copies that fill a slot of K, with the scales of both, and one of V."""
    if groups is not None:
        return (1 + 2 * len(groups.copies)) * pieces, pieces
    return (3 * pieces if format.is_quantized else pieces), pieces


def load_scales(scales, format: StorageFormat) -> tuple:
    """A tile's scales `[2, tokens]`, of keys and of values, as one for each of its tokens as rows of a product."""
    return format.hide_bad_scales(*(plgpu.load(scales.at[i], layout=LAYOUT.reduce(1)) for i in range(2)))


def settle_scales(scales, format: StorageFormat) -> None:
    """The same in place, where tokens are columns: both would take more registers than there are."""
    scales.at[0][...], scales.at[1][...] = load_scales(scales, format)


def widen(stored, wide, format: StorageFormat, *, in_pairs: bool, scaled: Scaled | None = None, share=0, shares=1):
    """A tile as the matrix unit wants it. What no kernel stores, NaN and infinity, becomes finite.

    With `shares` warpgroups at it, each does the part that is its `share`.
    """
    tokens, columns = stored.shape
    spans = [(first, 64) for first in range(0, columns, 64)] if scaled is None else nibbles.column_spans(columns)
    # One swizzled tile at a time, for the registers' sake.
    for i, (token, (column, width)) in enumerate(itertools.product(range(0, tokens, 64), spans)):

        @pl.when(share == i % shares)
        def _(token=token, column=column, width=width):
            rows = pl.ds(token, 64)
            part = stored.at[rows, pl.ds(column, width)]
            numbers = widened(part, wide.dtype, format, in_pairs=in_pairs, scaled=scaled, token=token, column=column)
            if numbers.shape[1] == wide.shape[1]:
                wide.at[rows][...] = numbers
                return
            halves = [numbers] if scaled is None else [numbers[:, :width], numbers[:, width:]]
            for nth, half in enumerate(halves):
                wide.at[rows, pl.ds(nth * columns + column, width)][...] = half


def widened(
    stored, dtype, format: StorageFormat, *, in_pairs: bool, scaled: Scaled | None = None, token: int = 0, column=0
):
    """A part of a tile in registers, as `LAYOUT` says, from this token and column on: `in_pairs`, which is not for the
    interpreter, or else as Pallas does it. Of int8 that is by way of registers that neighbours exchange, and else of
    float32, one by one. What is `scaled` is times its scales, and each entry is two numbers: see `nibbles`."""
    if scaled is not None:
        return nibbles.widened(stored, dtype, format, scaled, in_pairs=in_pairs, token=token, column=column)
    if in_pairs:
        return _widen_pairs(plgpu.load(stored, layout=LAYOUT), jnp.dtype(dtype), format)
    x = plgpu.load(stored, layout=plgpu.Layout.WGMMA_UPCAST_2X)
    if format.float8 is not None:
        x = jax.lax.bitcast_convert_type(x, format.declared_dtype).astype(jnp.float32)
        x = jnp.where((x <= format.largest) & (x >= -format.largest), x, 0.0)
    return plgpu.layout_cast(x.astype(dtype), LAYOUT)


def _widen_pairs(x, dtype, format: StorageFormat):
    """Bytes in registers as 16-bit numbers. Two are loaded together, into what becomes one register of both."""
    program = PAIRS[format.name, dtype.name]

    @plgpu.inline_mgpu(arg_types=(LAYOUT,), return_type=plgpu.ShapeDtypeStruct(x.shape, dtype, layout=LAYOUT))
    def widen_pairs(_, x):
        i16, i32 = (ir.IntegerType.get_signless(bits) for bits in (16, 32))
        pair = ir.VectorType.get((2,), mgpu.utils.dtype_to_ir_type(dtype))
        registers = np.empty_like(x.registers)
        for at, register in np.ndenumerate(x.registers):
            both = vector.extract(vector.bitcast(ir.VectorType.get((1,), i16), register), [], [0])
            wide = llvm.inline_asm(i32, [arith.extui(i32, both)], program, "=r,r")
            registers[at] = vector.bitcast(pair, vector.broadcast(ir.VectorType.get((1,), i32), wide))
        return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

    return widen_pairs(x)
