"""Compile the kernels that update states for an H200 on a machine without one; as gpu_compile.py does for attention's.

python gpu_compile_states.py JOB ...
A job of gpu_compile.py is called attention:JOB here, one of gpu_widen.py widen:JOB, and one of gpu_products.py
products:JOB, so that one process runs all. With b200: or rtx: before it a job is done for another chip.
"""

import json
import sys

import gpu_compile
import gpu_products
import gpu_widen
import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import pytest
from gpu_compile import array, compile_, count_launches, fate
from planting import Plant
from swizzle_alignment import record_slices

import pallas_kernels
from pallas_kernels.gpu.tiles import LAYOUT, SINGLE_ROWS, store

gpu_compile.KERNELS += (
    "delta_rule_channel_pairs",
    "delta_rule_channel_chunks",
    "delta_rule_pairs",
    "gated_delta_rule_chunks",
    "gated_delta_rule",
    "state_space_chunks",
    "state_space",
)
ROWS, SLOTS = 32, 65


def delta(heads, *, keys=128, values=128, channels=False, axes=(ROWS, 1), **others):
    """Arrays of a delta rule with so many heads of values and of keys."""
    arrays = {name: array((*axes, heads[1], keys)) for name in ("q", "k")} | {"v": array((*axes, heads[0], values))}
    arrays["g"] = array((*axes, heads[0], keys) if channels else (*axes, heads[0]), jnp.float32)
    arrays["beta"] = array((*axes, heads[0]), jnp.float32)
    return step("gated_delta_rule", arrays, {}, (heads[0], keys, values), axes, **others)


def space(heads, *, keys=128, values=64, axes=(ROWS, 1), **others):
    """Arrays of a state space with so many heads and groups."""
    arrays = {"x": array((*axes, heads[0], values)), "dt": array((*axes, heads[0]), jnp.float32)}
    arrays |= {name: array((*axes, heads[1], keys)) for name in ("B", "C")}
    fixed = {name: array((heads[0],), jnp.float32) for name in ("A", "D")}
    return step("state_space", arrays, fixed, (heads[0], values, keys), axes, **others)


def step(op, arrays, fixed, state, axes, *, stored=jnp.float32, snapshots=0, every=16, donate=True, rows=ROWS):
    """A step of two layers through the door: their kernel, and what the program does to their pools."""
    row = array((rows,), jnp.int32)
    given = {name: row for name in ("slots", "to_slots", "lengths", "new", *(["offsets"] if len(axes) == 1 else []))}
    options = {"every": every} if snapshots else {}
    if snapshots:
        given["snapshot_slots"] = array((rows, snapshots), jnp.int32)
    pools = tuple(array((SLOTS, *state), stored) for _ in range(2))

    def layers(pools, arrays, fixed, given):
        value, written = "x" if op == "state_space" else "v", []
        for pool in pools:
            y, pool = getattr(pallas_kernels, op)(
                **arrays, **fixed, **given, **options, states=pool, implementation="gpu"
            )
            arrays = arrays | {value: arrays[value] + y}  # so that each layer waits for the one before
            written.append(pool)
        return arrays[value], tuple(written)

    compiled, kernels = compile_(layers, pools, arrays, fixed, given, donate_argnums=(0,) if donate else ())
    *ahead, kernel = kernels.values()
    return kernel | {"ahead": ahead} | fate(compiled, pools) | {"launches": count_launches(compiled)}


def without_fence():
    """A state is copied to where threads may still read the last one."""
    from gpu_mistakes import plant

    with pytest.MonkeyPatch.context() as patch:
        plant(patch, Plant("update_states", "pl.when(i > 0)(plgpu.commit_smem)", ""))
        jax.clear_caches()
        return JOBS["qwen3-next"]()


def beside_even_places():
    """Two numbers of tokens are loaded at once wherever a chunk begins."""
    from gpu_mistakes import plant

    with pytest.MonkeyPatch.context() as patch:
        plant(patch, Plant("load_numbers", "layout == COLUMN", "layout is None"))
        jax.clear_caches()
        return JOBS["odd-space-chunks"]()


def beside_swizzle():
    """The second half of lines is loaded from where it begins."""

    def load_half(x_ref, y_ref, x_s, ready):
        plgpu.copy_gmem_to_smem(x_ref, x_s, ready)
        plgpu.barrier_wait(ready)
        store(y_ref, plgpu.load(x_s.at[:, pl.ds(64, 64)], layout=LAYOUT, optimized=False))

    scratch = [plgpu.SMEM((64, 128), jnp.bfloat16, transforms=SINGLE_ROWS), plgpu.Barrier()]
    out = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
    with record_slices() as (found, _):
        jax.jit(plgpu.kernel(load_half, out_type=out, scratch_types=scratch)).lower(array((64, 128)))
    return {"beside_swizzle": sorted(set(found))}


PROMPTS, ODD = {"axes": (2048,), "rows": 4}, {"axes": (77,), "rows": 3}
JOBS = {
    "qwen3-next": lambda: delta((32, 16)),
    "kimi-linear": lambda: delta((32, 32), channels=True),
    "nemotron-h": lambda: space((128, 8)),
    "olmo-hybrid": lambda: delta((30, 30), keys=96, values=192),
    "falcon-h1": lambda: space((32, 1), keys=256),
    "keys-256": lambda: delta((8, 8), keys=256, channels=True),
    "qwen3-next-16-bits": lambda: delta((32, 16), stored=jnp.bfloat16),
    "qwen3-next-snapshots": lambda: delta((32, 16), snapshots=1),
    "qwen3-next-4-tokens": lambda: delta((32, 16), axes=(ROWS, 4)),
    "qwen3-next-prompts": lambda: delta((32, 16), snapshots=8, **PROMPTS),
    "kimi-linear-prompts": lambda: delta((32, 32), channels=True, snapshots=8, **PROMPTS),
    "kimi-linear-chunks": lambda: delta((32, 32), channels=True, **PROMPTS),
    "kimi-linear-chunks-16-bits": lambda: delta(
        (32, 32), channels=True, stored=jnp.bfloat16, snapshots=8, every=64, **PROMPTS
    ),
    "qwen3-next-chunks": lambda: delta((32, 16), **PROMPTS),
    "qwen3-next-chunks-16-bits": lambda: delta((32, 16), stored=jnp.bfloat16, snapshots=8, every=64, **PROMPTS),
    "delta-64-chunks": lambda: delta((8, 8), keys=64, values=64, stored=jnp.bfloat16, **PROMPTS),
    "qwen3-next-mixed": lambda: delta((32, 16), axes=(256,), snapshots=4, every=64),
    "nemotron-h-prompts": lambda: space((128, 8), **PROMPTS),
    "granite-4-prompts": lambda: space((48, 1), stored=jnp.bfloat16, **PROMPTS),
    "falcon-h1-prompts": lambda: space((32, 1), keys=256, **PROMPTS),
    # Heads, tokens and sizes such that what begins at an even place, or at a multiple of four, does so by no accident.
    "odd-space-chunks": lambda: space((5, 5), **ODD),
    "odd-delta-chunks": lambda: delta((5, 5), keys=64, values=64, **ODD),
    "odd-space-tokens": lambda: space((5, 1), keys=96, values=48, stored=jnp.bfloat16, **ODD),
    "odd-delta-tokens": lambda: delta((5, 5), keys=40, values=64, channels=True, stored=jnp.bfloat16, **ODD),
    "control-not-donated": lambda: delta((32, 16), donate=False),
    "control-no-fence": without_fence,
    "control-misaligned": beside_even_places,
    "control-beside-swizzle": beside_swizzle,
    **{f"attention:{name}": job for name, job in gpu_compile.JOBS.items()},
    **{f"widen:{name}": job for name, job in gpu_widen.JOBS.items()},
    **{f"products:{name}": job for name, job in gpu_products.JOBS.items()},
}
JOBS |= {f"{chip}:{name}": gpu_compile.target_chip(chip, job) for chip in ("b200", "rtx") for name, job in JOBS.items()}


if __name__ == "__main__":
    for job in sys.argv[1:]:
        print("JOB", json.dumps({job: JOBS[job]()}), flush=True)
