"""What stands in the text of a compiled program."""

import math
import re

DTYPES = {"bf16": "bfloat16", "f32": "float32", "s8": "int8"}
ELSEWHERE = ("parameter", "bitcast", "tuple", "get-tuple-element", "while", "conditional", "custom-call")


def made_as_large(text, pool):
    """What a compiled program makes that has a dtype and as many numbers as an array of a pool, but for the kernels'
    own results, other names for what is there, and what a TPU brings to vector memory.

    Args:
      pool: by name, the pool's arrays or their shapes.
    """
    found, sizes = [], {(x.dtype.name, x.size): name for name, x in pool.items()}
    for result, op in re.findall(r"%[\w.-]+ = (.*?[\])}]) ([a-z][\w-]*)\(", text):
        if op in ELSEWHERE or op.endswith(("start", "update")):  # what goes on beside others names its operands
            continue
        for dtype, axes, memory in re.findall(r"(\w+)\[([\d,]+)\](\{[^}]*\})?", result):
            if "S(1)" not in memory:
                size = math.prod(map(int, axes.split(",")))
                large = [name for (of, least), name in sizes.items() if of == DTYPES.get(dtype) and least <= size]
                found += [f"{op} {dtype}[{axes}] of {name}" for name in large]
    return found
