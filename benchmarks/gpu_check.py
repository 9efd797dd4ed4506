"""The GPU kernels' numerics on the chip, and a watchdog: a kernel that waits for ever is named, and the run ends."""

import contextlib
import dataclasses
import faulthandler
import itertools
import os
import random
import threading
import time
from collections.abc import Iterator
from unittest import mock

import jax

from pallas_kernels import gpu, testing
from pallas_kernels.gpu import tuning
from pallas_kernels.testing import Case

SECONDS = 150
HUNG = 60  # seconds for one case or measurement, its compilation included

KERNELS = {  # what a kind of case starts, the simplest first: the first to hang is the one to look at
    "short": "paged_decode_split",
    "decode": "paged_decode_split and paged_decode_merge",
    "few": "paged_decode_split and paged_decode_merge, several tokens a row",
    "one row": "paged_prefill",
    "registers": "paged_prefill with its weights in registers",
    "mixed": "paged_prefill, paged_decode_split and paged_decode_merge",
    "latent": "paged_latent_decode and paged_decode_merge",
    "latent mixed": "paged_latent_prefill, paged_latent_decode and paged_decode_merge",
}


@contextlib.contextmanager
def watchdog(what: str, seconds: float = HUNG) -> Iterator[None]:
    """End the process with status 3, and say what it was at, if the block takes longer: the device cannot be asked."""

    def give_up() -> None:
        print(f"HUNG for {seconds:.0f} s: {what}", flush=True)
        faulthandler.dump_traceback()
        os._exit(3)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def cases(kind: str) -> Iterator[Case]:
    """Every value of each axis several times, in random company: small shapes, since the reference is slow."""
    chosen = random.Random(kind)
    for i in itertools.count():
        head_dim = chosen.choice((64, 80, 96, 128, 256))
        longest = (0, 1, 7, 63, 64, 129, 191) if kind == "short" else (0, 1, 7, 63, 64, 127, 129, 500, 1500)
        lengths = tuple(chosen.choice(longest) for _ in range(1 if kind in ("one row", "registers") else 4))
        group = chosen.choice((1, 2, 4, 5, 7, 8) if kind == "few" else (1, 2, 4, 5, 7, 8, 16))
        most_new = {"short": (1,), "decode": (1,), "latent": (0, 1), "few": (0, 1, 2, 4)}.get(kind, (0, 1, 2, 65, 200))
        new = tuple(min(n, chosen.choice(most_new)) for n in lengths)
        if not any(new):
            continue
        num_kv_heads, rows = chosen.choice((1, 2)), {}
        if kind.startswith("latent"):
            num_kv_heads, group = 1, chosen.choice((1, 5, 7, 16, 40, 64, 128))
            rank, rope = chosen.choice(((512, 64), (512, 64), (256, 32), (128, 8), (384, 0)))
            head_dim, rows = rank + rope, {"rank": rank, "scale": (rank + rope) ** -0.5}
        yield Case(
            lengths=lengths, new=new, num_kv_heads=num_kv_heads, num_heads=num_kv_heads * group, **rows,
            head_dim=head_dim, stored_head_dim=-(-head_dim // 64) * 64, dtype=chosen.choice(("bfloat16", "float16")),
            block_size=chosen.choice((8, 16, 24, 32, 64, 128, 256)), window=chosen.choice((None, 1, 100)),
            packed=kind in ("one row", "mixed", "latent mixed") and chosen.random() < 0.5,
            padding=i % 3 if kind.endswith("mixed") else 0,
            soft_cap=chosen.choice((None, 5.0)), sinks=chosen.random() < 0.3,
        )  # fmt: skip


def check(interpret, *, each: int, seconds: float = SECONDS) -> list[str]:
    """Compare cases of every kind with the reference; what differs or does not run."""
    start, agreed, skipped, failures = time.perf_counter(), 0, 0, []
    todo = ((name, case) for name in KERNELS for case in itertools.islice(cases(name), each))
    for kind, case in todo:
        if time.perf_counter() - start > seconds:
            skipped += 1
            continue
        try:
            form = in_registers() if kind == "registers" else contextlib.nullcontext()
            with form, watchdog(f"{KERNELS[kind]}: {case}", HUNG if interpret is None else 600):
                check_case(case, interpret)
        except Exception as e:  # the other cases and the measurements are worth having all the same
            failures.append(f"{KERNELS[kind]}: {case}: {repr(e)[:300]}")
            print("WRONG", failures[-1], flush=True)
        else:
            agreed += 1
    spent = time.perf_counter() - start
    print(f"{agreed} cases agree with the reference, {len(failures)} do not, {skipped} were skipped; {spent:.0f} s.")
    return failures


def in_registers() -> contextlib.AbstractContextManager:
    """Plans of prefill whose weights are multiplied from registers, which no interpreter has tried."""
    planned = tuning.prefill_plan
    return mock.patch.object(
        tuning, "prefill_plan", lambda *asked: dataclasses.replace(planned(*asked), weights_in_registers=True)
    )


def check_case(case: Case, interpret) -> None:
    inputs, options = testing.make_inputs(case), testing.make_options(case)

    def attend(*inputs):
        return gpu.paged_attention(*inputs, **options, return_lse=True, interpret=interpret)

    out, lse = jax.jit(attend)(*inputs)
    reference = jax.jit(lambda *x: testing.expected(case, testing.Inputs(*x), return_lse=True))
    expected_out, expected_lse = reference(*inputs)
    testing.assert_close(out, expected_out)
    testing.assert_close(lse, expected_lse, dtype=case.dtype)
