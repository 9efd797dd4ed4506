"""Find loads, stores and products of swizzled shared memory that begin beside the swizzle's pattern.

A thread swizzles by the place in the slice that it is given, a bulk copy and the matrix unit by the address. These are
one where the slice begins at a multiple of the pattern, 8 rows. Elsewhere numbers are taken from other places, and no
interpreter sees it: there nothing is swizzled.
"""

import contextlib
import math

from jax._src.lib.mlir import ir
from jax.experimental.mosaic.gpu import fragmented_array, mma_utils

MOST = 1 << 32
PASSED_ON = "memref.transpose", "memref.expand_shape", "memref.collapse_shape", "memref.cast"


@contextlib.contextmanager
def record_slices():
    """A list that gets what is found of the kernels that are lowered meanwhile, and how many slices were looked at."""
    found, looked_at = [], set()
    transfer, describe = fragmented_array.FragmentedArray.transfer_tiled, mma_utils.create_descriptor

    def look(ref, swizzle):
        pattern = 8 * int(swizzle or 16)
        if pattern <= 128 or not isinstance(ref.type, ir.MemRefType) or (multiple := multiple_of(ref)) is None:
            return
        looked_at.add(str(ref))
        if multiple % pattern:
            found.append(f"{ref.type} begins at a multiple of {multiple} bytes, not of {pattern}")

    def transfer_and_look(ref, swizzle, *rest, **options):
        look(ref, swizzle)
        return transfer(ref, swizzle, *rest, **options)

    def describe_and_look(ref, *rest, **options):
        look(ref, options["swizzle"])
        return describe(ref, *rest, **options)

    fragmented_array.FragmentedArray.transfer_tiled = staticmethod(transfer_and_look)
    mma_utils.create_descriptor = describe_and_look
    try:
        yield found, looked_at
    finally:
        fragmented_array.FragmentedArray.transfer_tiled = staticmethod(transfer)
        mma_utils.create_descriptor = describe


def multiple_of(value):
    """Returns of how many bytes the place of a slice of shared memory is known to be a multiple, or the greatest power
    of two that divides an index; None: of no place, as where layouts are tried."""
    owner = value.owner
    if isinstance(owner, ir.Block):
        return 1
    op = owner.operation if isinstance(owner, ir.OpView) else owner
    operands = list(op.operands)
    if op.name == "gpu.dynamic_shared_memory":
        return MOST
    if op.name in PASSED_ON:
        return multiple_of(operands[0])
    if op.name == "memref.view":
        first = multiple_of(operands[0])
        return first and math.gcd(first, multiple_of(operands[1]))
    if op.name == "memref.subview":
        first, rest = multiple_of(operands[0]), iter(operands[1:])
        if first is None:
            return None
        kind = ir.MemRefType(operands[0].type)
        strides, _ = kind.get_strides_and_offset()
        dynamic = ir.ShapedType.get_dynamic_stride_or_offset()
        for offset, stride in zip(op.attributes["static_offsets"], strides, strict=True):
            index = multiple_of(next(rest)) if offset == dynamic else power_of_two(offset)
            first = math.gcd(first, index * stride * kind.element_type.width // 8)
        return first
    if op.name == "arith.constant":
        return power_of_two(ir.IntegerAttr(op.attributes["value"]).value)
    if op.name in ("arith.index_cast", "arith.index_castui", "arith.extsi", "arith.extui"):
        return multiple_of(operands[0])
    if op.name in ("arith.addi", "arith.subi"):
        return math.gcd(*map(multiple_of, operands))
    if op.name == "arith.muli":
        return min(MOST, math.prod(map(multiple_of, operands)))
    return None if op.name == "builtin.unrealized_conversion_cast" and not operands else 1


def power_of_two(n: int) -> int:
    """Returns the greatest that divides n."""
    return n & -n or MOST
