"""tpu-inference's ragged paged attention v3 for the compiler's cycle model, beside ours in `tpu_cycles.py`.

Its kernel is taken from a checkout of https://github.com/vllm-project/tpu-inference as it is, with its default sizes of
blocks; in decode it is given the one that holds a row's keys, which is in its favour, as those by default hold 4,096.
Keys are in its pool already: it writes none. What it keeps in scalar memory the model reads as 0. So its state, which
says whose turn each of two buffers is, and what was sent from it, stands here as arithmetic of its loops' counters, and
where it divides by a power of two it shifts. Its copies are counted like ours.
"""

import importlib.util
import pathlib
import re
import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from tpu_works import Scalars, Work, number

PACKAGE = "tpu_inference.kernels.ragged_paged_attention.v3"
GENERATION = {"v6e": 6, "tpu7x": 7}
VMEM_BYTES = 64 * 2**20  # more than it needs, and what XLA leaves beside its own
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128


def forms(work: Work) -> list[tuple[int, ...]]:
    """Its one form, which has no parameter, where it is made for a work with counters that are simple to tell."""
    plain = work._replace(context=0, tokens=1, rows=1) in (Work("decode"), Work("prefill"))
    return [()] if plain and (work.kernel == "prefill" or work.context <= 4096) else []


def kernel_of(work: Work) -> str:
    """How the name of the kernel begins that does a work."""
    return "RPAd" if work.kernel == "decode" else "RPAm"


def copies_needed(work: Work, name: str) -> int:
    """In, of keys and values: a block of them by pages, a copy of each, some of nothing."""
    new, bq, bkv = _sizes(work, name)
    blocks = work.rows * -(-new // bq) * -(-(work.context + work.tokens * (work.kernel == "prefill")) // bkv)
    return blocks * bkv // work.block_size


def commit_of(folder: str) -> str:
    """Of a checkout; unknown where it has no history."""
    done = subprocess.run(["git", "-C", folder, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def compile_peer(folder: str, chip: str, work: Work, array: Callable[..., Any]) -> None:
    """Compile its step for the same work; the process may be ended by the compiler once the profile is written: on
    bfloat16 exponentials and masks of 16 bits, which only programs to be profiled trip over."""
    kernel = load(pathlib.Path(folder), PACKAGE, ("util", "kernel"))["kernel"]
    loops: list[Any] = []  # the counters of the loops that are being traced, outermost first
    divide = kernel.cdiv
    kernel.cdiv = lambda a, b: divide(a, b) if isinstance(a, int) else (a + b - 1) >> (b.bit_length() - 1)
    kernel.get_tpu_version = lambda: GENERATION[chip]
    kernel.pl = _Pallas(loops, work)
    blocks = work.table // work.block_size
    tokens = work.rows * work.tokens
    q, k = array(tokens, HEADS, HEAD_DIM), array(tokens, KV_HEADS, HEAD_DIM)
    cache = array(max(4096, 2 * work.rows * blocks) + 1, work.block_size, KV_HEADS, 2, HEAD_DIM)
    scalars = [array(n, dtype="int32") for n in (work.rows, work.rows * blocks, work.rows + 1, 3)]
    sizes = {"d_block_sizes": (1, work.context, 1, work.context)} if work.kernel == "decode" else {}
    options = {"sm_scale": 0.1, "update_kv_cache": False, "vmem_limit_bytes": VMEM_BYTES} | sizes
    kernel.ragged_paged_attention.lower(q, k, k, cache, *scalars, **options).compile()


def load(folder: pathlib.Path, package: str, modules: tuple[str, ...]) -> dict[str, Any]:
    """Modules of a package, without the packages around it, which want what is not here."""
    names, found = package.split("."), {}
    for i in range(len(names)):
        sys.modules.setdefault(".".join(names[: i + 1]), types.ModuleType("empty"))
    for name in modules:
        spec = importlib.util.spec_from_file_location(f"{package}.{name}", folder / f"{'/'.join(names)}/{name}.py")
        assert spec is not None and spec.loader is not None
        found[name] = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        setattr(sys.modules[package], name, found[name])
        spec.loader.exec_module(found[name])
    return found


def _sizes(work: Work, name: str) -> tuple[int, int, int]:
    """A row's new tokens, and of queries and keys how many are in a block, as a kernel's name says."""
    bq, bkv = (int(size) for size in re.findall(r"-b(?:q|kv)_(\d+)_", name))
    return (1 if work.kernel == "decode" else work.tokens), bq, bkv


class _Pallas:
    """Pallas as its kernel sees it: loops are remembered while they are traced, scalars are arithmetic."""

    def __init__(self, loops: list[Any], work: Work):
        self.loops, self.work = loops, work

    def __getattr__(self, name: str) -> Any:
        return getattr(pl, name)

    def loop(self, *bounds, **options):
        def decorate(body):
            def remembered(i):
                self.loops.append(i)
                body(i)
                self.loops.pop()

            pl.loop(*bounds, **options)(remembered)

        return decorate

    def pallas_call(self, body, *args, **kwargs):
        given = self.scalars(kwargs["name"])
        return pl.pallas_call(lambda *refs: body(*given, *refs[len(given) :]), *args, **kwargs)

    def scalars(self, name: str) -> list[Scalars]:
        work, loops = self.work, self.loops
        new, bq, bkv = _sizes(work, name)
        length = work.context + (work.tokens if work.kernel == "prefill" else 0)
        q_blocks, kv_blocks = -(-new // bq), -(-length // bkv)
        mine = name.startswith(kernel_of(work))
        if mine and any(-(-(length - new + (i + 1) * bq) // bkv) != kv_blocks for i in range(q_blocks)):
            raise ValueError(f"{name}: its blocks of queries have not as many blocks of keys each.")

        def blocks_before(of_keys: bool):
            row, *inner = loops
            before = row * q_blocks + (inner[0] if inner else 0)
            return before * kv_blocks + (inner[1] if len(inner) > 1 else 0) if of_keys else before

        def turn(i: int):
            return blocks_before(of_keys=i == 1) & 1

        class Sent(Scalars):
            """Which row's output and which block of it was sent last from a buffer: of two reads the first asks for
            the row."""

            asked = 0

            def __getitem__(self, i):
                self.asked += 1
                last = work.rows * q_blocks - 1
                block = blocks_before(of_keys=False) - 2 if len(loops) > 1 else jnp.int32(last - (last - i) % 2)
                row = block if q_blocks == 1 else jnp.where(block < 0, -1, 0)
                return jnp.asarray(row if self.asked % 2 else 0 if q_blocks == 1 else block, "int32")

        blocks = work.rows * work.table // work.block_size
        rows = [0] * 3 if not mine else [work.rows] * 3 if work.kernel == "decode" else [0, 0, work.rows]
        return [
            number(length, work.rows),
            Scalars(lambda i: i + 1, shape=(blocks,)),
            Scalars(lambda i: i * new),
            Scalars(lambda i: number(rows[i])[i], shape=(3,)),  # where decode's rows end, chunks' and all others'
            Scalars(turn),
            Sent(turn),
            number(0),  # of keys and values none were sent
        ]
