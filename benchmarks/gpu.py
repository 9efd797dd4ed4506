"""The GPU kernels on the chip: numerics, then speed against the memory's and against other implementations.

    python benchmarks/gpu.py             everything, in at most 8 minutes; writes results/gpu.json as it goes
    python benchmarks/gpu.py --check     the numerics alone, in less than 3 minutes
    python benchmarks/gpu.py --dry-run   a little of everything in the interpreter, without a GPU; writes nothing

Decode is bound by memory: its measure is the bytes of K and V that the rows hold, over the time, as a share of the copy
bandwidth of the same run. Every call of a measurement reads other blocks, so that the L2 cache does not answer for the
memory; the dense competitors read the same arrays again and again, which flatters them where those are small.
"""

import argparse
import dataclasses
import functools
import importlib.metadata
import itertools
import random
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from _harness import save, table
from jax import lax

import pallas_kernels
from pallas_kernels import gpu, testing, xla
from pallas_kernels.testing import Case

HEADS = ((32, 8), (64, 8), (32, 32))
L2_BYTES = 52_428_800
CHECK_SECONDS = 150
LONGEST_MEASUREMENT = 20  # seconds, its compilation included
MAX_BYTES = 30e9  # of K and V in one measurement


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="the numerics alone")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes in the interpreter; writes nothing")
    parser.add_argument("--seconds", type=float, default=480, help="time for all of it")
    options = parser.parse_args()
    if not options.dry_run and (obstacle := why_not_here()):
        raise SystemExit(f"{obstacle} Without a Hopper GPU: --dry-run.")
    interpret = plgpu.InterpretGPUParams() if options.dry_run else None
    end = time.perf_counter() + options.seconds
    failures = check(itertools.islice(cases(), 2) if options.dry_run else cases(), interpret)
    rows = [{"what": "wrong", "error": failure} for failure in failures]
    for row in () if options.check else measure(end, interpret):
        rows.append(row)
        print(*(f"{key}={value}" for key, value in row.items()), flush=True)
        if not options.dry_run:  # after every row, so that whatever stops the run loses none
            save("gpu", rows, max_bytes=MAX_BYTES, jaxlib=importlib.metadata.version("jaxlib"))
    if not options.check:
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


# Numerics


def cases() -> Iterator[Case]:
    """Every value of each axis several times, in random company: small shapes, since the reference is slow."""
    random.seed(0)
    for i in range(56):
        head_dim = random.choice((64, 80, 96, 128, 256))
        lengths = tuple(random.choice((0, 1, 7, 64, 129, 500, 1500)) for _ in range(4))
        decode = i % 2 == 0
        new = tuple(min(n, 1 if decode else random.choice((0, 1, 2, 65, 200))) for n in lengths)
        num_kv_heads = random.choice((1, 2))
        yield Case(
            lengths=lengths, new=new, num_kv_heads=num_kv_heads,
            num_heads=num_kv_heads * random.choice((1, 2, 4, 5, 7, 8, 16)),
            head_dim=head_dim, stored_head_dim=-(-head_dim // 64) * 64, dtype=random.choice(("bfloat16", "float16")),
            block_size=random.choice((8, 16, 24, 32, 64, 128, 256)), packed=random.random() < 0.5, padding=i % 3,
            window=random.choice((None, 1, 100)), soft_cap=random.choice((None, 5.0)), sinks=random.random() < 0.3,
        )  # fmt: skip


def check(cases: Iterator[Case], interpret) -> list[str]:
    """Compare each case with the reference, as many as there is time for; what differs or does not run."""
    start, agreed, skipped, failures = time.perf_counter(), 0, 0, []
    for case in cases:
        if time.perf_counter() - start > CHECK_SECONDS:
            skipped += 1
            continue
        if interpret is not None:
            case = dataclasses.replace(case, lengths=(70, 5), new=(min(case.new[0], 3) or 1, 1))
        try:
            check_case(case, interpret)
        except Exception as e:  # the other cases and the measurements are worth having all the same
            failures.append(f"{case}: {repr(e)[:300]}")
            print("WRONG", failures[-1], flush=True)
        else:
            agreed += 1
    spent = time.perf_counter() - start
    print(f"{agreed} cases agree with the reference, {len(failures)} do not, {skipped} were skipped; {spent:.0f} s.")
    return failures


def check_case(case: Case, interpret) -> None:
    inputs, options = testing.make_inputs(case), testing.make_options(case)

    def attend(*inputs):
        return gpu.paged_attention(*inputs, **options, return_lse=True, interpret=interpret)

    out, lse = jax.jit(attend)(*inputs)
    expected_out, expected_lse = jax.jit(lambda *x: testing.expected(case, testing.Inputs(*x), return_lse=True))(
        *inputs
    )
    testing.assert_close(out, expected_out)
    testing.assert_close(lse, expected_lse, dtype=case.dtype)


# Speed


@dataclasses.dataclass(frozen=True)
class Point:
    """A step in which each of `batch` rows has `context` tokens, `new` of them the step's."""

    heads: tuple[int, int]
    batch: int
    context: int
    block: int
    new: int = 1
    head_dim: int = 128

    @property
    def kv_bytes(self) -> int:
        return self.batch * self.context * self.heads[1] * self.head_dim * 2 * 2

    @property
    def flops(self) -> float:
        """Of causal attention: both products, over what each new token sees."""
        seen = self.context - self.new / 2
        return 4 * self.batch * self.new * seen * self.heads[0] * self.head_dim

    @property
    def copies(self) -> int:
        """Sets of blocks to go through, so that the L2 cache holds none of the next when its turn comes."""
        return max(1, -(-4 * L2_BYTES // self.kv_bytes))

    @property
    def count(self) -> int:
        """Calls that take about 50 ms at half the speed to hope for."""
        return max(3, min(1000, int(0.05 / (self.kv_bytes / 2e12 + self.flops / 3e14 + 10e-6))))


def inputs(point: Point, copies: int) -> dict[str, Any]:
    """The step's arrays: blocks in random order, enough for `copies` sets of all rows, with one table for each set."""
    key = jax.random.key(0)
    held = -(-point.context // point.block)
    blocks = copies * point.batch * held
    order = jax.random.permutation(key, blocks).astype(jnp.int32) + 1
    return {
        "q": jax.random.normal(key, (point.batch, point.new, point.heads[0], point.head_dim), jnp.bfloat16),
        "kv": jax.random.normal(key, (blocks + 1, 2, point.heads[1], point.block, point.head_dim), jnp.bfloat16),
        "tables": order.reshape(copies, point.batch, held),
        "lengths": jnp.full(point.batch, point.context, jnp.int32),
        "new": jnp.full(point.batch, point.new, jnp.int32),
    }


def seconds_per_call(step: Callable, carry: Any, *constants: Any, count: int) -> float:
    """Device time of `carry = step(i, carry, *constants)`, `count` times in one program, the best of three."""

    @functools.partial(jax.jit, donate_argnums=0)
    def run(carry, *constants):  # a static count: the loop's condition never goes to the host
        return lax.fori_loop(0, count, lambda i, carry: step(i, carry, *constants), carry)

    spent = []
    carry = jax.block_until_ready(run(jax.tree.map(jnp.copy, carry), *constants))
    for _ in range(3):
        start = time.perf_counter()
        carry = jax.block_until_ready(run(carry, *constants))
        spent.append(time.perf_counter() - start)
    return min(spent) / count


def ours(interpret) -> Callable:
    def step(i, q, kv, tables, lengths, new):
        return gpu.paged_attention(q, kv, tables[i % tables.shape[0]], lengths, new, interpret=interpret)

    return step


def by_xla(i, q, kv, tables, lengths, new):
    return xla.paged_attention(q, kv, tables[i % tables.shape[0]], lengths, new)


def by_triton(i, q, k, v, tables, lengths):
    from jax.experimental.pallas.ops.gpu import paged_attention as triton

    return triton.paged_attention(q[:, 0], k, v, tables[i % tables.shape[0]], lengths)[:, None].astype(q.dtype)


def by_cudnn(i, q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=q.shape[1] > 1, implementation="cudnn")


def by_torch(point: Point) -> float:
    """PyTorch's attention on a dense cache."""
    import torch

    (heads, kv_heads), new = point.heads, point.new
    q = torch.randn(point.batch, heads, new, point.head_dim, dtype=torch.bfloat16, device="cuda")
    k, v = torch.randn(2, point.batch, kv_heads, point.context, point.head_dim, dtype=torch.bfloat16, device="cuda")
    attend = torch.nn.functional.scaled_dot_product_attention
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for count in (3, 30):
        start.record()
        for _ in range(count):
            attend(q, k, v, is_causal=new > 1, enable_gqa=True)
        stop.record()
        torch.cuda.synchronize()
    return start.elapsed_time(stop) / 1000 / count


def competitors(point: Point, arrays: dict[str, Any], interpret) -> Iterator[tuple[str, Callable[[], float]]]:
    """Name and measurement of each implementation that can do this step."""
    q, kv, tables, lengths, new = arrays.values()
    seconds = functools.partial(seconds_per_call, count=point.count if interpret is None else 1)
    yield "ours", lambda: seconds(ours(interpret), q, kv, tables, lengths, new)
    if interpret is None and point.new == 1 and point.block == 16 and point.batch == 32:
        yield "write", lambda: write_share(point, arrays)
    if interpret is not None or point.block != 16:  # the others once: they do not get better with the block
        return
    if point.new == 1:
        # [K, blocks, block_size, D] each: Triton's layout.
        yield "triton", lambda: seconds(by_triton, q, *(jnp.swapaxes(kv[:, i], 0, 1) for i in (0, 1)), tables, lengths)
    if point.kv_bytes < 2e9:
        yield "xla", lambda: seconds(by_xla, q, kv, tables, lengths, new)
    if point.new in (1, point.context):
        shape = (point.batch, point.context, point.heads[1], point.head_dim)
        yield "cudnn", lambda: seconds(by_cudnn, q, jnp.ones(shape, q.dtype), jnp.ones(shape, q.dtype))
        yield "torch", lambda: by_torch(point)


def copy_bandwidth(num_bytes: float) -> float:
    """Bytes read and written a second by a program that does nothing else."""
    x = jnp.zeros(int(num_bytes) // 4, jnp.float32)
    return 2 * x.nbytes / seconds_per_call(lambda i, x: x + 1, x, count=20)


def write_share(point: Point, arrays: dict[str, Any]) -> float:
    """The cache write's part of a decode step's attention: what a step takes more if it writes first."""
    q, kv, tables, lengths, new = arrays.values()
    k = jnp.ones((point.batch, 1, point.heads[1], point.head_dim), q.dtype)

    def step(i, carry, tables, lengths, new, write):
        q, kv = carry
        if write:
            kv = pallas_kernels.write_kv(kv, k, k, tables[0], lengths, new)
        return gpu.paged_attention(q, kv, tables[i % tables.shape[0]], lengths, new), kv

    with_it, without = (
        seconds_per_call(functools.partial(step, write=write), (q, kv), tables, lengths, new, count=point.count)
        for write in (True, False)
    )
    return (with_it - without) / with_it


def points() -> Iterator[Point]:
    """Decode at every combination, and prefill; what matters most first, for the case that time runs out."""
    yield from (Point((32, 8), batch, new, 16, new) for batch, new in ((1, 2048), (1, 8192), (8, 1024), (32, 512)))
    yield Point((32, 8), 4, 8192, 16, 512)  # a chunk
    decode = [
        Point(heads, batch, context, block)
        for heads, block, context, batch in itertools.product(
            HEADS, (16, 64, 128), (2048, 32768, 8192, 512), (32, 1, 256, 8, 64)
        )
    ]
    yield from (point for point in decode if point.kv_bytes <= MAX_BYTES)


def measure(end: float, interpret) -> Iterator[dict[str, Any]]:
    """One row for each point and implementation, until the time is up."""
    warnings.filterwarnings("ignore", category=DeprecationWarning)  # JAX's Triton kernel
    copy = {"what": "copy", "by": "jax"}
    bandwidth = None
    try:
        bandwidth = copy_bandwidth(2e9 if interpret is None else 1e6)
        yield copy | {"bytes_per_second": bandwidth}
    except Exception as e:  # the times are worth having without their share of it
        yield copy | {"error": repr(e)[:200]}
    todo = list(points()) if interpret is None else [Point((2, 1), 1, 70, 16), Point((2, 1), 1, 70, 16, 3)]
    skipped = 0
    for point in todo:
        row = {"what": "decode" if point.new == 1 else "prefill", **dataclasses.asdict(point)}
        if time.perf_counter() > end - LONGEST_MEASUREMENT:
            skipped += 1
            continue
        try:
            arrays = inputs(point, copies=point.copies if interpret is None else 1)
        except Exception as e:  # no memory for it, say
            yield row | {"error": repr(e)[:200]}
            continue
        for name, run in competitors(point, arrays, interpret):
            if time.perf_counter() > end - LONGEST_MEASUREMENT:
                skipped += 1
                continue
            try:
                spent = run()
            except Exception as e:  # a competitor that cannot do it is a result too
                yield row | {"by": name, "error": repr(e)[:200]}
                continue
            if name == "write":
                yield row | {"what": "write", "by": "xla", "share": spent}
            elif point.new == 1:
                share = {"share": point.kv_bytes / spent / bandwidth} if bandwidth else {}
                yield row | {"by": name, "seconds": spent, **share}
            else:
                yield row | {"by": name, "seconds": spent, "tflops": point.flops / spent / 1e12}
        del arrays
    if skipped:
        print(f"{skipped} measurements were skipped: the time was up.")


if __name__ == "__main__":
    main()
