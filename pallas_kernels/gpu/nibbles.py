"""What the kernels do with pools of four bits: bytes become 16-bit numbers in registers, times their groups' scales.

A byte holds an entry of a head's first half and, above it, one of the second. So a tile has half as many columns as
numbers: those of the low bits come first and those of the high bits behind them, each half padded to whole tiles, and
queries come in that order. Two bytes that a thread loads together become two registers of two numbers each.

A code goes to the top of a 16-bit float's fraction, for a number from 16 to 32 or from 2 to 4. What that is over the
code and a half is taken away, and a level is `h (h^2 + 140)`. A scale belongs to 32 or 64 entries of a head.
No product has one for all that it sums, so keys are multiplied by theirs here, as values are.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.common.quantization import StorageFormat
from pallas_kernels.gpu.tiles import LAYOUT, Operands, Tile

LINE = 64  # scales: a bulk copy into shared memory begins on 128 bytes
MOST_COPIED = 256  # scales of one bulk copy
BESIDE = 8  # columns of the matrix unit's layout: their entries have one scale
HALF = 64  # tokens that are widened together


@dataclasses.dataclass(frozen=True)
class EntryGroups:
    """Which entries share a scale, and how a tile's scales lie in shared memory: `[2, pieces, line]`."""

    size: int  # of a group
    head_dim: int
    piece: int  # tokens of a bulk copy

    @property
    def count(self) -> int:
        """Scales of a head."""
        return -(-self.head_dim // self.size)

    @property
    def line(self) -> int:
        """Places for the scales of a piece."""
        return -(-self.piece * self.count // LINE) * LINE

    @property
    def copies(self) -> list[tuple[int, int]]:
        """The first scale and the number of each bulk copy of a piece's."""
        total = self.piece * self.count
        return [(first, min(MOST_COPIED, total - first)) for first in range(0, total, MOST_COPIED)]

    def find_group(self, column: int, half: int) -> int:
        """Returns the group of a column of the low bits (0) or of the high ones (1); of padding any."""
        return min((column + half * self.head_dim // 2) // self.size, self.count - 1)


class Scaled(NamedTuple):
    """Where the scales of a tile's keys (0) or values (1) are."""

    groups: EntryGroups
    scales: Any  # [2, pieces, line], in shared memory
    which: int


def find_groups(operands: Operands, tile: Tile) -> EntryGroups | None:
    """Returns the groups of a pool of four bits; None of any other."""
    size, block_size = operands.stored.format.group_size, operands.stored.kv.shape[3]
    return None if size is None else EntryGroups(size, operands.head_dim, tile.piece(block_size))


def column_spans(columns: int) -> list[tuple[int, int]]:
    """Returns the columns of bytes that are widened at a time: those whose numbers fill whole swizzled tiles."""
    width = columns if columns % 64 else 64
    return [(first, width) for first in range(0, columns, width)]


def widened(stored, dtype, format: StorageFormat, scaled: Scaled, *, in_pairs: bool, token: int, column: int = 0):
    """Numbers of 64 tokens in registers, as `LAYOUT` says: of the low bits, and behind them of the high ones.

    Args:
      stored: bytes `[64, columns]` of a tile, from this token and column on.
      in_pairs: as the chip does it, which is not for the interpreter.
    """
    x = plgpu.load(stored, layout=LAYOUT)
    if in_pairs:
        return _widen_pairs(x, scaled, jnp.dtype(dtype), token=token, column=column)
    groups = scaled.groups
    lines = [scaled.scales[i][:, : groups.piece * groups.count].reshape(-1, groups.count) for i in range(2)]
    lines = [line[token : token + HALF].astype(jnp.float32) for line in lines]
    factors = format.hide_bad_scales(*lines)
    order = [groups.find_group(column + i, half) for half in range(2) for i in range(0, x.shape[1], BESIDE)]
    each = [jnp.broadcast_to(factors[scaled.which][:, g : g + 1], (HALF, BESIDE)) for g in order]
    return (format.from_bits(x) * jnp.concatenate(each, axis=1)).astype(dtype)


def _make_numbers(dtype: str, left: tuple[int, int], mask: int, exponent: int, over: int, cubic: int) -> str:
    """PTX that makes two numbers of the low bits of two bytes, `$2`, times `$3`, and two of the others, times `$4`.

    Args:
      left: by how many places the low bits move to the left, and the high ones of a byte.
      exponent: what makes a number of a code, whose sign bit it turns over.
    """

    def move(code: str, by: int) -> str:
        return f"{'shl' if by > 0 else 'shr'}.b32 {code}, both, {abs(by)};"

    def read(code: str, scale: str) -> str:
        return f"""
        lop3.b32 {code}, {code}, {mask:#x}, {exponent:#x}, 0x6a;
        sub.{dtype} {code}, {code}, over;
        fma.rn.{dtype} square, {code}, {code}, cubic;
        mul.{dtype} {code}, {code}, {scale};
        mul.{dtype} {code}, {code}, square;"""

    return f"""{{
        .reg .b32 both, low, high, square, over, cubic;
        prmt.b32 both, $2, 0, 0x4140;
        mov.b32 over, {over:#x};
        mov.b32 cubic, {cubic:#x};
        {move("low", left[0])}
        {move("high", left[1])}{read("low", "$3")}{read("high", "$4")}
        mov.b32 $0, low;
        mov.b32 $1, high;
        }}"""


# Of float16, where a scale may be below the least normal number, the 512th part, and of scales 512 times.
NUMBERS = {
    "bfloat16": _make_numbers("bf16x2", (3, -1), 0x00780078, 0x41C041C0, 0x41BC41BC, 0x430C430C),  # 16, 23.5, 140
    "float16": _make_numbers("f16x2", (6, 2), 0x03C003C0, 0x42004200, 0x41E041E0, 0x40604060),  # 2, 2.9375, 140 / 64
}
# PTX of two scales: of keys in the dtype, which are NaN where those of values are not finite; and of values, finite.
_TO_FLOAT16 = """shl.b32 low, {0}, 16;
        and.b32 high, {0}, 0xffff0000;
        mul.f32 low, low, 0f44000000;
        mul.f32 high, high, 0f44000000;
        cvt.rn.f16x2.f32 {1}, high, low;"""
_KEYS = """{{
        .reg .b32 keys, values, low, high, nothing;
        {0}
        {1}
        mov.b32 nothing, 0;
        fma.rn.{2} $0, values, nothing, keys;
        }}"""
_VALUES = """{{
        .reg .b32 values, low, high, most, least;
        {0}
        mov.b32 most, {2:#x};
        mov.b32 least, {3:#x};
        min.{1} values, values, most;
        max.{1} $0, values, least;
        }}"""
KEY_SCALES = {
    "bfloat16": _KEYS.format("mov.b32 keys, $1;", "mov.b32 values, $2;", "bf16x2"),
    "float16": _KEYS.format(_TO_FLOAT16.format("$1", "keys"), _TO_FLOAT16.format("$2", "values"), "f16x2"),
}
VALUE_SCALES = {
    "bfloat16": _VALUES.format("mov.b32 values, $1;", "bf16x2", 0x71807180, 0xF180F180),  # 2 ** 100
    # Times the last level it is the largest number.
    "float16": _VALUES.format(_TO_FLOAT16.format("$1", "values"), "f16x2", 0x758F758F, 0xF58FF58F),
}


def _widen_pairs(x, scaled: Scaled, dtype, *, token: int, column: int):
    groups, program = scaled.groups, NUMBERS[dtype.name]
    tokens, columns = x.shape
    shape = plgpu.ShapeDtypeStruct((tokens, 2 * columns), dtype, layout=LAYOUT)

    @plgpu.inline_mgpu(arg_types=(LAYOUT, plgpu.RefType()), return_type=shape)
    def widen_pairs(_, x, scales):
        i16, i32 = (ir.IntegerType.get_signless(bits) for bits in (16, 32))
        pair, of_both = ir.VectorType.get((2,), mgpu.utils.dtype_to_ir_type(dtype)), ir.VectorType.get((1,), i32)
        two = llvm.StructType.get_literal([i32, i32])
        factors = [_read_factors(scales, scaled, dtype, token + rows) for rows in (0, 8)]
        halves = np.empty_like(x.registers), np.empty_like(x.registers)
        for at, register in np.ndenumerate(x.registers):
            both = vector.extract(vector.bitcast(ir.VectorType.get((1,), i16), register), [], [0])
            # By columns, and by the rows that a thread has of each 16.
            mine = [factors[at[4]][groups.find_group(column + BESIDE * at[1], half)] for half in range(2)]
            wide = llvm.inline_asm(two, [arith.extui(i32, both), *mine], program, "=r,=r,r,r,r")
            for half, registers in enumerate(halves):
                number = llvm.extractvalue(i32, wide, [half])
                registers[at] = vector.bitcast(pair, vector.broadcast(of_both, number))
        registers = np.concatenate(halves, axis=1)
        return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

    return widen_pairs(x, scaled.scales)


def _read_factors(scales, scaled: Scaled, dtype, token: int) -> list:
    """A token's scales for a thread, each twice in a register: of its first row of `LAYOUT`, counted from `token`."""
    groups, i32 = scaled.groups, ir.IntegerType.get_signless(32)
    bf16, wide = ir.BF16Type.get(), mgpu.utils.dtype_to_ir_type(dtype)

    def constant(n: int):
        return arith.constant(i32, n)

    thread = mgpu.thread_idx()
    row = arith.andi(arith.shrui(thread, constant(2)), constant(7))
    warp = arith.andi(arith.shrui(thread, constant(1)), constant(48))  # 16 rows each
    place = arith.addi(arith.addi(warp, row), constant(token))
    pieces, line = ir.MemRefType(scales.type).shape[1:]
    first = arith.addi(
        arith.muli(arith.divui(place, constant(groups.piece)), constant(line)),
        arith.muli(arith.remui(place, constant(groups.piece)), constant(groups.count)),
    )
    pointer = mgpu.utils.memref_ptr(scales)
    together = math.gcd(groups.count, 8)  # in one load

    def load(which: int, nth: int) -> list:
        """Scales from the `nth` on, two in a register."""
        start = arith.addi(first, constant(which * pieces * line + nth))
        at = mgpu.utils.getelementptr(pointer, [start], bf16)
        if together == 1:
            i16 = ir.IntegerType.get_signless(16)
            return [arith.extui(i32, llvm.load(i16, at))]
        words = vector.bitcast(
            ir.VectorType.get((together // 2,), i32), llvm.load(ir.VectorType.get((together,), bf16), at)
        )
        return [vector.extract(words, [], [i]) for i in range(together // 2)]

    found = []
    for nth in range(0, groups.count, together):
        values = load(1, nth)
        if scaled.which == 0:
            program, given = KEY_SCALES[dtype.name], zip(load(0, nth), values, strict=True)
        else:
            program, given = VALUE_SCALES[dtype.name], ((x,) for x in values)
        for operands in given:
            both = llvm.inline_asm(i32, list(operands), program, "=r" + ",r" * len(operands))
            pair = vector.bitcast(ir.VectorType.get((2,), wide), vector.broadcast(ir.VectorType.get((1,), i32), both))
            for i in range(min(together, 2)):
                twice = vector.broadcast(ir.VectorType.get((2,), wide), vector.extract(pair, [], [i]))
                found.append(vector.extract(vector.bitcast(ir.VectorType.get((1,), i32), twice), [], [0]))
    return found
