"""The GPU kernels on the chip: numerics, then speed against the memory's and against other implementations.

    python benchmarks/gpu.py             everything, in at most 8 minutes; writes results/gpu.json as it goes
    python benchmarks/gpu.py --quick     what matters most, in 90 seconds
    python benchmarks/gpu.py --check     the numerics alone, in less than 3 minutes; names a kernel that hangs
    python benchmarks/gpu.py --dry-run   a little of everything in the interpreter, without a GPU; writes nothing

Decode is bound by memory: its measure is the bytes of K and V that the rows hold, over the time, as a share of what a
program reads in the same run that does nothing but read. NOTES.md has what each row was predicted to take.
"""

import argparse
import collections
import dataclasses
import importlib.metadata
import itertools
import os
import pathlib
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs memory beside JAX

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from _harness import save, table
from gpu_check import check, watchdog
from gpu_contenders import Model, Point, contenders, inputs, seconds_of

import pallas_kernels

LONGEST_MEASUREMENT = 20  # seconds, its compilation included
MAX_BYTES = 30e9  # of K and V in one measurement


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="what matters most")
    parser.add_argument("--check", action="store_true", help="the numerics alone")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes in the interpreter; writes nothing")
    parser.add_argument("--seconds", type=float, help="time for all of it; default: 480, or 90 if quick")
    options = parser.parse_args()
    if not options.dry_run and (obstacle := why_not_here()):
        raise SystemExit(f"{obstacle} Without a Hopper GPU: --dry-run.")
    interpret = plgpu.InterpretGPUParams() if options.dry_run else None
    end = time.perf_counter() + (options.seconds or (90 if options.quick else 480))
    each, seconds = (1, 300) if options.dry_run else (2, 30) if options.quick else (12, 150 if options.check else 100)
    failures = check(interpret, each=each, seconds=seconds)
    rows = [{"what": "wrong", "error": failure} for failure in failures]
    for row in () if options.check else measure(end, interpret):
        rows.append(row)
        print(*(f"{key}={value}" for key, value in row.items()), flush=True)
        if not options.dry_run:  # after every row, so that whatever stops the run loses none
            save("gpu", rows, max_bytes=MAX_BYTES, jaxlib=importlib.metadata.version("jaxlib"))
    if rows and not options.check:
        shown = ("what", "heads", "batch", "context", "new", "block", "by", "seconds", "share", "tflops")
        table([{key: row.get(key, "") for key in shown} for row in rows])
    if failures:
        raise SystemExit(f"{len(failures)} cases differ from the reference.")


def why_not_here() -> str | None:
    """Why there is nothing to measure on this machine, or None."""
    arrays = {
        name: jax.ShapeDtypeStruct(shape, dtype)
        for name, shape, dtype in (
            ("q", (1, 1, 1, 128), jnp.bfloat16), ("kv", (2, 2, 1, 16, 128), jnp.bfloat16),
            ("tables", (1, 1), jnp.int32), ("lengths", (1,), jnp.int32), ("new", (1,), jnp.int32),
        )
    }  # fmt: skip
    try:
        choice = pallas_kernels.explain(**arrays)
    except Exception as e:  # no driver, or none that fits
        return f"JAX finds no usable device: {e!r:.300}."
    return None if choice.implementation == "gpu" else choice.reason


def yardsticks(num_bytes: float) -> Iterator[tuple[str, Callable[[], float]]]:
    """Bytes a second of programs that do nothing else: one reads and writes, as a copy does, and one only reads."""
    x = jax.random.normal(jax.random.key(0), (int(num_bytes) // 4,), jnp.float32)
    for name, f, moved in (("copy", lambda x: x + 1, 2 * x.nbytes), ("read", jnp.max, x.nbytes)):
        program = jax.jit(f)
        yield name, lambda program=program, moved=moved: moved / seconds_of(lambda: program(x), moved / 4e12)


def work() -> Iterator[Point | tuple[Model, Point]]:
    """What is measured, what matters most first, for the case that time runs out."""
    llama, latent = (32, 8), Point((128, 1), 32, 4096, 64, head_dim=576, rank=512)
    yield Point(llama, 32, 2048, 16)
    yield Model(), Point(llama, 8, 2048, 16)
    yield Point(llama, 1, 2048, 16, 2048)
    yield Point(llama, 1, 32768, 16)
    yield Point(llama, 32, 2048, 64)
    for heads in (128, 16, 64):  # DeepSeek V3, V2-Lite and Kimi K2
        yield dataclasses.replace(latent, heads=(heads, 1))
    yield dataclasses.replace(latent, heads=(128, 1), batch=1, context=2048, new=2048)
    yield Model(), Point(llama, 32, 2048, 16)
    yield Point(llama, 256, 512, 16)
    yield Point(llama, 8, 2048, 16, 4)  # a draft of three tokens checked
    yield Point(llama, 4, 8192, 16, 512)  # a chunk
    yield from (Point(llama, batch, new, 16, new) for batch, new in ((1, 8192), (8, 1024), (32, 512)))
    yield Model(), Point(llama, 1, 8192, 16)
    decode = (
        Point(heads, batch, context, block)
        for heads, block, context, batch in itertools.product(
            (llama, (64, 8), (32, 32)), (16, 64, 128), (2048, 32768, 8192, 512), (32, 1, 256, 8, 64)
        )
    )
    first = {
        Point(llama, 32, 2048, 16),
        Point(llama, 1, 32768, 16),
        Point(llama, 32, 2048, 64),
        Point(llama, 256, 512, 16),
    }
    yield from (point for point in decode if point.kv_bytes <= MAX_BYTES and point not in first)


def measure(end: float, interpret) -> Iterator[dict[str, Any]]:
    """One row for each piece of work and contender, until the time is up."""
    warnings.filterwarnings("ignore", category=DeprecationWarning)  # JAX's Triton kernel
    dry = interpret is not None
    bandwidth: dict[str, float] = {}
    for name, run in yardsticks(1e6 if dry else 4e9):
        row, bandwidth[name] = attempt({"what": name, "by": "jax"}, run)
        yield row | ({"bytes_per_second": bandwidth[name]} if bandwidth[name] else {})
    tiny = Point((2, 1), 1, 70, 16)
    tiny_latent = Point((16, 1), 1, 70, 16, head_dim=192, rank=128)
    todo = [tiny, tiny_latent, dataclasses.replace(tiny, new=17), (Model(2, 16, 16), tiny)] if dry else work()
    skipped = 0
    for piece in todo:
        model, point = piece if isinstance(piece, tuple) else (None, piece)
        row = {"what": "model" if model else "decode" if point.new == 1 else "prefill", **dataclasses.asdict(point)}
        if time.perf_counter() > end - LONGEST_MEASUREMENT:
            skipped += 1
            continue
        if model:
            runs = iter([("ours", lambda m=model, p=point: m.seconds(p, interpret))])
            moved = model.bytes(point)
        else:
            made, arrays = attempt(row, lambda p=point: inputs(p, 1 if dry else p.pools))
            if arrays is None:  # no memory for it, say
                yield made
                continue
            runs, moved = contenders(point, arrays, interpret), point.kv_bytes
        while time.perf_counter() <= end - LONGEST_MEASUREMENT:
            named, contender = attempt(row | {"by": "?"}, lambda runs=runs: next(runs, ()))
            if not contender:
                if contender is None:  # its data do not fit
                    yield named
                break
            name, run = contender
            found, spent = attempt(row | {"by": name}, run, 600 if dry else 60)
            program = None
            if isinstance(spent, tuple):
                spent, program = spent
            if spent:
                found["seconds"] = spent
                if point.new == 1:
                    found |= {"share": moved / spent / bandwidth["read"]} if bandwidth.get("read") else {}
                else:
                    found["tflops"] = point.flops / spent / 1e12
            yield found
            if program is not None and not dry:
                times, kernels = attempt(row | {"what": "kernels", "by": name}, lambda p=program: kernel_seconds(p))
                yield times | {"kernels": kernels}
    if skipped:
        yield {"what": "skipped", "pieces": skipped}


def attempt(row: dict[str, Any], run: Callable[[], Any], patience: float = 60) -> tuple[dict[str, Any], Any]:
    """What it gives; or None, and the row with the reason: a contender that cannot do it is a result too."""
    try:
        with watchdog(str(row), patience):
            return row, run()
    except StopIteration:
        return row, ()
    except Exception as e:
        return row | {"error": repr(e)[:200]}, None


def kernel_seconds(run: Callable[[], Any]) -> dict[str, list[float]]:
    """Of each kernel that one run starts, by name: how often, and the mean of its seconds on the device."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        spent = collections.defaultdict(list)
        for file in pathlib.Path(folder).rglob("*.xplane.pb"):
            for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
                for line in plane.lines if "/device:GPU" in plane.name else ():
                    for event in line.events if "Stream" in line.name else ():
                        spent[event.name].append(event.duration_ns / 1e9)
    return {name: [len(times), sum(times) / len(times)] for name, times in spent.items()}


if __name__ == "__main__":
    main()
