"""Compile a kernel that widens a tile of four bits, for an H200, and run its PTX in NumPy: no interpreter does that.

python gpu_widen.py JOB ...
"""

import itertools
import json
import os
import sys

import gpu_compile
import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from planting import Plant
from ptx_emulator import run_kernel

from pallas_kernels.common.quantization import FORMATS
from pallas_kernels.gpu import dequantize, nibbles
from pallas_kernels.gpu.recurrence import halves
from pallas_kernels.gpu.tiles import LAYOUT, Tile, store

TOKENS = 128


def widened(head_dim, which, dtype="bfloat16", piece=32, *, from_registers=False, kind="int4"):
    """How far the numbers of keys (0) or values (1) are from what they stand for, at most; and which tokens' are NaN.

    One scale of a value is infinite: keys of that token and group are NaN.
    """
    columns, format = -(-head_dim // 64) * 32, FORMATS[kind]
    count = 2 if format.mixes_pairs else 1  # of tiles: keys are widened with the values'
    groups = nibbles.EntryGroups(format.group_size, head_dim, piece)
    slots, (wide, _, scales) = dequantize.slots_and_wide(
        jnp.uint8, jnp.dtype(dtype), format, Tile(tokens=TOKENS, stages=count), 2 * columns, groups
    )

    def kernel(bytes_ref, scale_ref, out_ref, bytes_s, scales_s, wide_s):
        for i in range(count):
            bytes_s.at[i][...] = plgpu.load(bytes_ref.at[i], layout=LAYOUT, optimized=False)
        for i, j, first in itertools.product(range(2), range(TOKENS // piece), range(0, groups.line, 64)):
            some = pl.ds(first, 64)
            line = plgpu.load(scale_ref.at[i, j, some], layout=LAYOUT.reduce(1), optimized=False)
            store(scales_s.at[0, i, j, some], line)
        plgpu.commit_smem()
        mine = bytes_s.at[which if format.mixes_pairs else 0]
        beside = bytes_s.at[1] if format.mixes_pairs and which == 0 else None
        scaled = nibbles.Scaled(groups, scales_s.at[0], which, beside)
        if not from_registers:
            dequantize.widen(mine, wide_s, format, in_pairs=True, scaled=scaled)
            plgpu.commit_smem()
        for token in range(0, TOKENS, 64):
            rows = pl.ds(token, 64)
            if from_registers:
                part = mine.at[rows]
                x = nibbles.widened(part, wide_s.dtype, format, scaled, in_pairs=True, token=token)
            else:
                x = plgpu.load(wide_s.at[rows], layout=LAYOUT)
            store(out_ref.at[rows], x)

    def f(stored, scale):
        shape = jax.ShapeDtypeStruct((TOKENS, 2 * columns), dtype)
        return plgpu.kernel(kernel, out_type=shape, scratch_types=[slots, scales, wide])(stored, scale)

    shapes = (count, TOKENS, columns), (2, TOKENS // piece, groups.line)
    rng = np.random.default_rng(0)
    stored = rng.integers(0, 256, shapes[0], np.uint8)
    scale = np.asarray(rng.uniform(0.001, 1, (2, TOKENS, groups.count)), format.scale_dtype)
    scale[1, 70, -1] = np.inf
    lines = np.zeros(shapes[1], scale.dtype)
    lines[..., : piece * groups.count] = scale.reshape(2, TOKENS // piece, -1)
    out = np.zeros((TOKENS, 2 * columns), dtype)
    arrays = gpu_compile.array(shapes[0], jnp.uint8), gpu_compile.array(shapes[1], format.scale_dtype)
    run_kernel(assembly_of(f, *arrays), 128, [stored, lines, out])

    def entries(x):  # without the padding of either half
        return np.asarray(x, np.float32).reshape(TOKENS, 2, columns)[..., : head_dim // 2].reshape(TOKENS, head_dim)

    got, levels = entries(out), entries(format.read_pair(*map(jnp.asarray, (stored[0], stored[-1])))[which])
    wanted = levels * np.repeat(scale[which].astype(np.float32), format.group_size, axis=1)[:, :head_dim]
    known = np.isfinite(wanted) & np.isfinite(got)
    return {
        "off": float(np.abs(got / wanted - 1)[known].max()),
        "nan": np.isnan(got).any(axis=1).nonzero()[0].tolist(),
        "known": float(known.mean()),
    }


def halved():
    """How many halves of numbers are not the numbers rounded, and what is left of them rounded."""

    def kernel(x_ref, leading_ref, rest_ref):
        x = plgpu.load(x_ref, layout=LAYOUT, optimized=False)
        for half, ref in zip(halves.halve(None, x), (leading_ref, rest_ref), strict=True):
            store(ref, half)

    rng, shape, out = np.random.default_rng(0), (64, 64), jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
    x = rng.standard_normal(shape).astype(np.float32) * np.exp2(rng.integers(-40, 40, shape)).astype(np.float32)
    x[:, :4] = 0.0, -0.0, 3.0, 1 + 2.0**-8  # and what lies in the middle of two
    found = [np.zeros(shape, jnp.bfloat16) for _ in range(2)]
    assembly = assembly_of(plgpu.kernel(kernel, out_type=(out, out)), gpu_compile.array(shape, jnp.float32))
    run_kernel(assembly, 128, [x, *found])
    leading = x.astype(jnp.bfloat16)
    wanted = leading, (x - leading.astype(np.float32)).astype(jnp.bfloat16)
    return {"wrong": [int((np.asarray(a) != b).sum()) for a, b in zip(found, wanted, strict=True)]}


def planted_half():
    """Negative control: what is left of the other number of a pair."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(halves, "HALVE_PAIR", halves.HALVE_PAIR.replace("sub.f32 low, $2", "sub.f32 low, $3"))
        return halved()


def assembly_of(f, *arrays):
    """The PTX of a program that is one kernel."""
    os.environ["MOSAIC_GPU_DUMP_PTX"] = "1"
    for other in ("PTXAS", "RESOURCES"):  # which gpu_compile.py asks for
        os.environ.pop(f"MOSAIC_GPU_DUMP_{other}", None)
    with jax.set_mesh(gpu_compile.sharding().mesh), gpu_compile.standard_output() as assembly:
        jax.jit(f).lower(*arrays).compile()
        assembly.seek(0)
        return assembly.read()


def planted(symbol, right, wrong, *given, kind="int4"):
    """Negative control: the same with a mistake in it."""
    from gpu_mistakes import plant

    def job():
        with pytest.MonkeyPatch.context() as patch:
            plant(patch, Plant(f"nibbles:{symbol}", right, wrong))
            return widened(*given or (96, 0), kind=kind)

    return job


JOBS = {
    "halved": halved,
    "control: halved": planted_half,
    "keys": lambda: widened(128, 0, from_registers=True),
    "values": lambda: widened(128, 1),
    "float16, keys": lambda: widened(128, 0, "float16", from_registers=True),
    "float16, values": lambda: widened(128, 1, "float16"),
    **{f"keys of {n}": lambda n=n: widened(n, 0, piece=64, from_registers=True) for n in (64, 80, 96, 192, 256)},
    **{f"values of {n}": lambda n=n: widened(n, 1, piece=64) for n in (64, 80, 96, 192, 256)},
    **{
        f"{('keys', 'values')[which]} of {n}, groups of 64": lambda n=n, which=which: widened(
            n, which, kind="k5v3", from_registers=which == 0
        )
        for n, which in itertools.product((64, 96, 128, 192, 256), (0, 1))
    },
    **{
        f"{('keys', 'values')[which]} of 64, float16, groups of 64": lambda which=which: widened(
            64, which, "float16", kind="k5v3"
        )
        for which in range(2)
    },
    "values of 32, float16": lambda: widened(32, 1, "float16", piece=128),
    "control: lanes": planted("_read_factors", "arith.shrui(thread, constant(2))", "arith.shrui(thread, constant(3))"),
    "control: warps": planted("_read_factors", "constant(48)", "constant(16)"),
    "control: pieces without padding": planted(
        "_read_factors", "constant(line)", "constant(groups.piece * groups.count)"
    ),
    "control: the other's scales": planted("_read_factors", "load(0, nth)", "load(1, nth)"),
    "control: rows": planted("_widen_pairs", "(0, 8)", "(0, 0)"),
    "control: groups": planted("_widen_pairs", "groups.find_group(column + BESIDE * at[1], half)", "at[1] // 4"),
    "control: halves": planted(
        "_widen_pairs", "np.concatenate(halves, axis=1)", "np.concatenate(halves[::-1], axis=1)"
    ),
    "control: columns of a part": planted("_widen_pairs", "column + BESIDE * at[1]", "BESIDE * at[1]", 256, 1),
    "control: no lowest bits": planted("make_numbers", "mask(NIBBLE)", "mask(bits)", kind="k5v3"),
    "control: values with the keys' bits": planted("make_numbers", "mask(bits)", "mask(NIBBLE)", 96, 1, kind="k5v3"),
    "control: lowest bits of other columns": planted(
        "widened", "pl.ds(column, x[0].shape[1])", "pl.ds(0, x[0].shape[1])", 256, 0, kind="k5v3"
    ),
    "control: lowest bits of other tokens": planted("widened", "pl.ds(token, HALF)", "pl.ds(0, HALF)", kind="k5v3"),
    "control: lowest bits of the keys' bytes": planted(
        "_widen_pairs", "[both, *mine, *beside]", "[both, *mine, both]", kind="k5v3"
    ),
}


if __name__ == "__main__":
    for job in sys.argv[1:]:
        print("JOB", json.dumps({job: JOBS[job]()}), flush=True)
