"""Starts each GPU kernel once, for NVIDIA's profiler, which says what its warps wait for at each instruction.

    python benchmarks/gpu_profile.py --list
    ncu --clock-control none -k "regex:paged_|rule|space" --set detailed --section SourceCounters -f -o kernels \\
        python benchmarks/gpu_profile.py latent int4
    ncu --import kernels.ncu-rep --page details
    ncu --import kernels.ncu-rep --page source --csv

Of one work the profiler takes some 7 seconds, 21 passes of its kernel. NOTES.md has what was found so.
"""

import argparse
import dataclasses
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from gpu_contenders import ours
from gpu_states import LAYERS, STEPS, make_batch, token_axes
from gpu_work import LATENT, LLAMA, Point, inputs

from pallas_kernels.gpu import mixers

# Kernels one by one, and none tuned: only they are looked at.
FLAGS = "--xla_gpu_autotune_level=0 --xla_gpu_enable_command_buffer="
POINTS = {
    "decode": Point(LLAMA, 64, 8192, 16),
    **{kind: Point(LLAMA, 64, 8192, 32, kind=kind) for kind in ("int8", "int4", "float8_e4m3fn")},
    "prefill": Point(LLAMA, 1, 8192, 16, 8192),
    "latent": LATENT,
    "latent-64-heads": dataclasses.replace(LATENT, heads=(64, 1)),
    "latent-prefill": dataclasses.replace(LATENT, batch=1, context=2048, new=2048),
    "chosen": dataclasses.replace(LATENT, context=32_768, chosen=2048),
}
STATES = {name + suffix: (name, new) for name in LAYERS for suffix, new in STEPS.items()}


def find_call(name: str) -> Callable[..., Any]:
    """Returns what starts a kernel."""
    if name in POINTS:
        return ours(POINTS[name])
    shape = LAYERS[STATES[name][0]]
    return lambda arrays, batch: getattr(mixers, shape.op)(**arrays, batch=batch)


def make_arrays(name: str) -> tuple[Any, ...]:
    """Returns the arguments of `find_call`'s."""
    if name in POINTS:
        arrays = inputs(POINTS[name], 1)
        return arrays["q"], arrays["pools"][0], *(arrays[x] for x in ("tables", "lengths", "new"))
    layer, new = STATES[name]
    shape, key = LAYERS[layer], jax.random.key(0)
    states = jax.random.normal(key, (len(new) + 1, *shape.state), jnp.float32)
    return shape.arrays(token_axes(new), key) | {"states": states}, make_batch(new)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*POINTS, *STATES], metavar="NAME", help="of works; see --list")
    parser.add_argument("--list", action="store_true", help="the names of all works")
    options = parser.parse_args()
    if options.list:
        print(*POINTS, *STATES, sep="\n")
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}"
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    for name in options.names:
        jax.block_until_ready(jax.jit(find_call(name))(*make_arrays(name)))
        print(name, flush=True)


if __name__ == "__main__":
    main()
