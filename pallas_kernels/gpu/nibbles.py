"""What the kernels do with pools of four bits, or of k5v3's five and three: bytes become 16-bit numbers in registers,
times their groups' scales.

A byte holds an entry of a head's first half and, above it, one of the second. So a tile has half as many columns as
numbers: those of the low bits come first and those of the high bits behind them, each half padded to whole tiles, and
queries come in that order. Two bytes that a thread loads together become two registers of two numbers each.

A code goes to the top of a 16-bit float's fraction, for a number from `2 ** bits` on or from 2 to 4. What that is over
the code and a half is taken away, and a level is `h (h^2 + cubic)`. Of k5v3 the lowest bit of a key stands above its
value: keys are widened from the tiles of both. A scale belongs to 32 or 64 entries of a head. No product has one for
all that it sums, so keys are multiplied by theirs here, as values are.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.common.quantization import StorageFormat
from pallas_kernels.common.quantization.levels import Levels
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
    values: Any = None  # the tile's, as they are stored, where they have bits of these keys


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
    x = [plgpu.load(stored, layout=LAYOUT)]
    if scaled.values is not None:
        beside = scaled.values.at[pl.ds(token, HALF), pl.ds(column, x[0].shape[1])]
        x.append(plgpu.load(beside, layout=LAYOUT))
    if in_pairs:
        return _widen_pairs(x, scaled, format, jnp.dtype(dtype), token=token, column=column)
    groups = scaled.groups
    lines = [scaled.scales[i][:, : groups.piece * groups.count].reshape(-1, groups.count) for i in range(2)]
    lines = [line[token : token + HALF].astype(jnp.float32) for line in lines]
    factors = format.hide_bad_scales(*lines)
    order = [groups.find_group(column + i, half) for half in range(2) for i in range(0, x[0].shape[1], BESIDE)]
    each = [jnp.broadcast_to(factors[scaled.which][:, g : g + 1], (HALF, BESIDE)) for g in order]
    numbers = format.read_pair(x[0], x[-1])[scaled.which]  # values need no keys
    return (numbers * jnp.concatenate(each, axis=1)).astype(dtype)


TWO = {"bfloat16": "bf16x2", "float16": "f16x2"}  # of a dtype in a register, for PTX
NIBBLE = 4  # bits


def make_numbers(levels: Levels, dtype: str) -> str:
    """Returns PTX that makes two numbers of the low bits of two bytes, `$2`, times `$3`, and two of the others, times
    `$4`. Of five bits the lowest stands above the three of the same place in `$5`."""
    pair, fraction, bits, step = TWO[dtype], jnp.finfo(dtype).nmant, levels.bits, _find_step(levels, dtype)
    kept = min(bits, NIBBLE)  # of a nibble

    def mask(count: int) -> int:
        return 0x10001 * ((1 << fraction) - (1 << fraction - count))

    def move(code: str, left: int) -> str:
        return f"{'shr' if left < 0 else 'shl'}.b32 {code}, both, {abs(left)};"

    def read(code: str, scale: str, first: int) -> str:
        """Of the bits from the `first` on."""
        lines = [move(code, fraction - kept - first)]
        if bits > NIBBLE:  # the other byte stands above, and by the mask bits are of the one or of the other
            lines.append(move("lowest", fraction - bits - (8 + first + NIBBLE - 1)))
            lines.append(f"lop3.b32 {code}, {code}, lowest, {mask(NIBBLE):#x}, 0xe4;")
        # The exponent, which turns a code's sign over.
        exponent = _twice(2**bits * step, dtype) | 0x10001 << fraction - 1
        lines += [
            f"lop3.b32 {code}, {code}, {mask(bits):#x}, {exponent:#x}, 0x6a;",
            f"sub.{pair} {code}, {code}, over;",
            f"fma.rn.{pair} square, {code}, {code}, cubic;",
            f"mul.{pair} {code}, {code}, {scale};",
            f"mul.{pair} {code}, {code}, square;",
        ]
        return "\n        ".join(lines)

    return f"""{{
        .reg .b32 both, low, high, lowest, square, over, cubic;
        prmt.b32 both, $2, {"$5, 0x5140" if bits > NIBBLE else "0, 0x4140"};
        mov.b32 over, {_twice((1.5 * 2**bits - 0.5) * step, dtype):#x};
        mov.b32 cubic, {_twice(levels.cubic * step**2, dtype):#x};
        {read("low", "$3", 0)}
        {read("high", "$4", NIBBLE)}
        mov.b32 $0, low;
        mov.b32 $1, high;
        }}"""


def _find_step(levels: Levels, dtype: str) -> float:
    """Returns how far apart codes are. Levels are by its cube smaller, and scales larger: of float16 one may be below
    the least normal number."""
    return 2.0 ** (1 - levels.bits) if dtype == "float16" else 1.0


def _twice(number: float, dtype: str) -> int:
    """Returns a register that has the number in both halves."""
    return 0x10001 * int(np.array(number, jnp.dtype(dtype)).view(np.uint16))


def _convert_scales(given: str, target: str, levels: Levels, dtype: str) -> str:
    """Returns PTX that brings two scales into the dtype."""
    if dtype == "bfloat16":
        return f"mov.b32 {target}, {given};"
    factor = np.float32(_find_step(levels, dtype) ** -3).view(np.uint32)
    return f"""shl.b32 low, {given}, 16;
        and.b32 high, {given}, 0xffff0000;
        mul.f32 low, low, 0f{factor:08x};
        mul.f32 high, high, 0f{factor:08x};
        cvt.rn.{TWO[dtype]}.f32 {target}, high, low;"""


def make_key_scales(levels: tuple[Levels, Levels], dtype: str) -> str:
    """Returns PTX that makes two scales of keys, `$1`, NaN where those of values, `$2`, are not finite."""
    return f"""{{
        .reg .b32 keys, values, low, high, nothing;
        {_convert_scales("$1", "keys", levels[0], dtype)}
        {_convert_scales("$2", "values", levels[1], dtype)}
        mov.b32 nothing, 0;
        fma.rn.{TWO[dtype]} $0, values, nothing, keys;
        }}"""


def make_value_scales(levels: Levels, dtype: str) -> str:
    """Returns PTX that makes two scales of values, `$1`, finite, also times the last level."""
    most = 2.0**100
    if dtype == "float16":
        largest = float(jnp.finfo(dtype).max) / (levels.last * _find_step(levels, dtype) ** 3)
        most = float(np.nextafter(np.float16(largest), np.float16(0)))
    return f"""{{
        .reg .b32 values, low, high, most, least;
        {_convert_scales("$1", "values", levels, dtype)}
        mov.b32 most, {_twice(most, dtype):#x};
        mov.b32 least, {_twice(-most, dtype):#x};
        min.{TWO[dtype]} values, values, most;
        max.{TWO[dtype]} $0, values, least;
        }}"""


def _widen_pairs(given: list, scaled: Scaled, format: StorageFormat, dtype, *, token: int, column: int):
    groups, levels = scaled.groups, format.levels
    assert levels is not None
    program = make_numbers(levels[scaled.which], dtype.name)
    tokens, columns = given[0].shape
    shape = plgpu.ShapeDtypeStruct((tokens, 2 * columns), dtype, layout=LAYOUT)

    @plgpu.inline_mgpu(arg_types=(*[LAYOUT] * len(given), plgpu.RefType()), return_type=shape)
    def widen_pairs(_, x, *others):
        *others, scales = others
        i16, i32 = (ir.IntegerType.get_signless(bits) for bits in (16, 32))
        pair, of_both = ir.VectorType.get((2,), mgpu.utils.dtype_to_ir_type(dtype)), ir.VectorType.get((1,), i32)
        two = llvm.StructType.get_literal([i32, i32])
        factors = [_read_factors(scales, scaled, levels, dtype, token + rows) for rows in (0, 8)]
        halves = np.empty_like(x.registers), np.empty_like(x.registers)

        def read(register):
            """Two bytes."""
            return arith.extui(i32, vector.extract(vector.bitcast(ir.VectorType.get((1,), i16), register), [], [0]))

        for at, register in np.ndenumerate(x.registers):
            both, beside = read(register), [read(other.registers[at]) for other in others]
            # By columns, and by the rows that a thread has of each 16.
            mine = [factors[at[4]][groups.find_group(column + BESIDE * at[1], half)] for half in range(2)]
            wide = llvm.inline_asm(two, [both, *mine, *beside], program, "=r,=r" + ",r" * (3 + len(beside)))
            for half, registers in enumerate(halves):
                number = llvm.extractvalue(i32, wide, [half])
                registers[at] = vector.bitcast(pair, vector.broadcast(of_both, number))
        registers = np.concatenate(halves, axis=1)
        return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

    return widen_pairs(*given, scaled.scales)


def _read_factors(scales, scaled: Scaled, levels: tuple[Levels, Levels], dtype, token: int) -> list:
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
            program, given = make_key_scales(levels, dtype.name), zip(load(0, nth), values, strict=True)
        else:
            program, given = make_value_scales(levels[1], dtype.name), ((x,) for x in values)
        for operands in given:
            both = llvm.inline_asm(i32, list(operands), program, "=r" + ",r" * len(operands))
            pair = vector.bitcast(ir.VectorType.get((2,), wide), vector.broadcast(ir.VectorType.get((1,), i32), both))
            for i in range(min(together, 2)):
                twice = vector.broadcast(ir.VectorType.get((2,), wide), vector.extract(pair, [], [i]))
                found.append(vector.extract(vector.bitcast(ir.VectorType.get((1,), i32), twice), [], [0]))
    return found
