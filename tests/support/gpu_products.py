"""Compile products, as on Blackwell by warps, and run their PTX in NumPy: the interpreter has no registers of a warp.

python gpu_compile_states.py b200:products:JOB ...
"""

import functools
import itertools

import gpu_compile
import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_widen import assembly_of
from ptx_emulator import run_kernel

from pallas_kernels.gpu import products
from pallas_kernels.gpu.tiles import LAYOUT, OPERAND, full, store


def product(left, right, *, shape=(64, 128, 64), dtype="bfloat16"):
    """How far a sum and two products are from what they should be, at most.

    Args:
      left: where the left operand is: "memory", "transposed" in it, or "registers".
      right: "memory" or "transposed".
      shape: lines, depth and columns.
    """
    lines, depth, columns = shape
    left_shape = (depth, lines) if left == "transposed" else (lines, depth)
    right_shape = (max(columns, 64), depth) if right == "transposed" else (depth, columns)

    def kernel(a_ref, b_ref, out_ref, a_s, b_s):
        for ref, target in ((a_ref, a_s), (b_ref, b_s)):
            target[...] = plgpu.load(ref, layout=LAYOUT, optimized=False)
        plgpu.commit_smem()
        a = {"memory": a_s, "transposed": a_s.T, "registers": None}[left]
        if a is None:
            a = plgpu.load(a_s, layout=LAYOUT)
        b = products.Transposed(b_s.at[pl.ds(0, columns)]) if right == "transposed" else b_s
        total = products.accumulate(None, full((lines, columns), 1.0, LAYOUT), (a, b), (a, b))
        store(out_ref, total)

    rng = np.random.default_rng(0)
    a, b = (np.asarray(rng.standard_normal(x), dtype) for x in (left_shape, right_shape))
    out = np.zeros((lines, columns), np.float32)
    scratch = [plgpu.SMEM(x, dtype, transforms=OPERAND) for x in (left_shape, right_shape)]

    def f(a, b):
        shape = jax.ShapeDtypeStruct(out.shape, jnp.float32)
        return plgpu.kernel(kernel, out_type=shape, scratch_types=scratch)(a, b)

    arrays = (gpu_compile.array(x.shape, x.dtype) for x in (a, b))
    run_kernel(assembly_of(f, *arrays), 128, [a, b, out])
    a, b = a.astype(np.float32), b.astype(np.float32)
    wanted = 1 + 2 * (a.T if left == "transposed" else a) @ (b[:columns].T if right == "transposed" else b)
    return {"off": float(np.abs(out - wanted).max())}


def wrong(name, spoil, *given):
    """Negative control: the same with a function of `products` spoiled, `spoil(function, *arguments)`."""

    def job():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(products, name, functools.partial(spoil, getattr(products, name)))
            return product(*given)

    return job


FORMS = itertools.product(("memory", "transposed", "registers"), ("memory", "transposed"))
SHAPES = {"8 columns": (64, 128, 8), "24 columns": (128, 64, 24), "256 columns": (64, 64, 256)}
JOBS = {
    **{f"{left}, {right}": lambda form=(left, right): product(*form) for left, right in FORMS},
    **{name: lambda shape=shape: product("memory", "transposed", shape=shape) for name, shape in SHAPES.items()},
    "256 columns, registers": lambda: product("registers", "memory", shape=(64, 128, 256)),
    "float16": lambda: product("registers", "memory", dtype="float16"),
    "control: columns": wrong("_select_columns", lambda f, i, x, first: f(i, x, 0), "registers", "memory"),
    "control: lines": wrong("_load_right", lambda f, i, b, first, span: f(i, b, 0, span), "memory", "memory"),
    "control: spans": wrong(
        "_load_right", lambda f, i, b, first, span: f(i, b, first, pl.ds(0, span.size)), "memory", "transposed"
    ),
    "control: parts": wrong("join", lambda f, parts, **axis: f(parts[::-1], **axis), "memory", "transposed"),
}
