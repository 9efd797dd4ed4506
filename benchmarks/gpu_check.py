"""The GPU kernels' numerics on the chip."""

import functools
import itertools
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from gpu_book import TRYING, Book
from gpu_plans import BY_WARPS, FORMS, use_form
from gpu_states import check_chunks, check_states

from pallas_kernels import gpu, testing, xla
from pallas_kernels.testing import Case

HUNG = 60  # seconds for one case, its compilation included
STEPS = 1000  # of decode, while rows come and go

KERNELS = {  # what a kind of case starts, the simplest first: the first to hang is the one to look at
    "short": "paged_decode_split",
    "decode": "paged_decode_split and paged_decode_merge",
    "few": "paged_decode_split and paged_decode_merge, several tokens a row",
    "one row": "paged_prefill",
    "mixed": "paged_prefill, paged_decode_split and paged_decode_merge",
    "quantised": "paged_prefill, paged_decode_split and paged_decode_merge of 8 bits",
    "four bits": "paged_prefill, paged_decode_split and paged_decode_merge of 4 bits",
    "latent": "paged_latent_decode and paged_decode_merge",
    "latent mixed": "paged_latent_prefill, paged_latent_decode and paged_decode_merge",
    **{form: f"paged_prefill in the form {form}" for form in FORMS},
    BY_WARPS: "paged_prefill, paged_decode_split and paged_decode_merge with products by warps",
    "states": "gated_delta_rule and state_space",
    "chunks of states": "channel_chunks, delta_chunks, space_chunks, and what runs before and beside them",
}
CHECKS_OF_STATES = {"states": check_states, "chunks of states": check_chunks}
KINDS = {"quantised": ("int8", "float8_e4m3fn", "float8_e5m2"), "four bits": ("int4", "k5v3")}


def cases(kind: str) -> Iterator[Case]:
    """Every value of each axis several times, in random company: small shapes, since the reference is slow."""
    chosen = random.Random(kind)
    for i in itertools.count():
        head_dim = chosen.choice((64, 80, 96, 128, 256))
        longest = (0, 1, 7, 63, 64, 129, 191) if kind == "short" else (0, 1, 7, 63, 64, 127, 129, 500, 1500)
        lengths = tuple(chosen.choice(longest) for _ in range(1 if kind in ("one row", *FORMS) else 4))
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
        block_size = chosen.choice((8, 16, 24, 32, 64, 128, 256))
        if kind in KINDS:
            block_size = -(-block_size // 32) * 32
        yield Case(
            lengths=lengths, new=new, num_kv_heads=num_kv_heads, num_heads=num_kv_heads * group, **rows,
            head_dim=head_dim, stored_head_dim=-(-head_dim // 64) * 64, dtype=chosen.choice(("bfloat16", "float16")),
            block_size=block_size, window=chosen.choice((None, 1, 100)),
            packed=kind in ("one row", "mixed", "latent mixed") and chosen.random() < 0.5,
            padding=i % 3 if kind.endswith("mixed") else 0,
            soft_cap=chosen.choice((None, 5.0)), sinks=chosen.random() < 0.3,
        )  # fmt: skip


def check(book: Book, interpret, *, each: int, seconds: float, only_kind: str | None = None) -> list[dict[str, Any]]:
    """Compare cases of every kind with the reference, and many steps with XLA's path; what differs or does not run.

    Of every kind one, then of every kind another, so that a time too short leaves none out; or of one kind alone. A
    kind that hung or broke the device is not tried again.
    """
    start, skipped = time.perf_counter(), 0
    tried = (row for row in book.rows if row["what"] == "check")
    bad = {row["by"] for row in tried if row.get("error") == TRYING or "broken" in row}
    todo: list[tuple[str, str, Callable[[], dict[str, Any]]]] = []
    for nth, kind in itertools.product(range(each), KERNELS):
        if kind in CHECKS_OF_STATES:
            todo.append((kind, f"{nth}: rows of states", functools.partial(CHECKS_OF_STATES[kind], nth, interpret)))
            continue
        case = next(itertools.islice(cases(kind), nth, None))
        todo.append((kind, f"{nth}: {case}", functools.partial(check_case, case, interpret, kind, nth)))
    steps = 3 if interpret is not None else STEPS
    todo.insert(len(KERNELS), ("steps", f"{steps} steps of decode", lambda: check_steps(steps, interpret)))
    for kind, name, run in todo:
        if only_kind not in (None, kind):
            continue
        what = {"what": "check", "by": kind, "kernels": KERNELS.get(kind, KERNELS["decode"]), "case": name}
        if kind in bad or not book.wants(what) or time.perf_counter() - start > seconds:
            skipped += 1
            continue
        book.attempt(what, run, HUNG if interpret is None else 600, quiet=True)
    done = [row for row in book.rows if row["what"] == "check"]
    wrong = [row for row in done if "error" in row]
    spent = time.perf_counter() - start
    print(
        f"{len(done) - len(wrong)} cases agree with the reference, {len(wrong)} do not, {skipped} were skipped; "
        f"{spent:.0f} s.", flush=True,
    )  # fmt: skip
    return wrong


def check_case(case: Case, interpret, kind: str, nth: int) -> dict[str, Any]:
    inputs, options = testing.make_inputs(case), testing.make_options(case)
    held, quantised = inputs, {}
    if kind in KINDS:
        name = quantised["kind"] = KINDS[kind][nth % len(KINDS[kind])]
        inputs, quantised["kv_scale"], held = testing.quantise(case, inputs, name)

    def attend(*inputs):
        return testing.run(gpu.paged_attention, *inputs, **options, **quantised, return_lse=True, interpret=interpret)

    with use_form(kind):
        out, lse = jax.jit(attend)(*inputs)
    reference = jax.jit(lambda *x: testing.expected(case, testing.Inputs(*x), return_lse=True))
    expected_out, expected_lse = reference(*held)
    testing.assert_close(out, expected_out)
    testing.assert_close(lse, expected_lse, dtype=case.dtype)
    return {"agrees": True}


def check_steps(steps: int, interpret) -> dict[str, Any]:
    """Decode while rows come, grow and go, one program for all: what nobody holds is NaN, the null block too."""
    sizes = (32, 16, 4, 128, 16, 80) if interpret is None else (3, 2, 1, 64, 16, 9)
    rows, heads, num_kv_heads, head_dim, block, held = sizes
    capacity, pool_blocks = block * held, rows * held + 1

    @jax.jit
    def step(lengths, key):
        keys = jax.random.split(key, 6)
        gone, come = (jax.random.bernoulli(key, p, (rows,)) for key, p in zip(keys[:2], (0.01, 0.1), strict=True))
        begun = jnp.where(come, jax.random.randint(keys[2], (rows,), 1, capacity), 0)
        lengths = jnp.where(gone | (lengths >= capacity), 0, jnp.where(lengths == 0, begun, lengths + 1))
        new = (lengths > 0).astype(jnp.int32)
        tables = (jax.random.permutation(keys[3], pool_blocks - 1).astype(jnp.int32) + 1).reshape(rows, held)
        place = jnp.arange(capacity).reshape(held, block) < lengths[:, None, None]
        kept = jnp.zeros((pool_blocks, block), bool).at[tables].set(place)
        kv = jax.random.normal(keys[4], (pool_blocks, 2, num_kv_heads, block, head_dim), jnp.bfloat16)
        kv = jnp.where(kept[:, None, None, :, None], kv, jnp.nan)
        tables = jnp.where(place.any(axis=2), tables, 0)
        q = jax.random.normal(keys[5], (rows, 1, heads, head_dim), jnp.bfloat16)
        out = testing.run(gpu.paged_attention, q, kv, tables, lengths, new, interpret=interpret)
        expected = testing.run(xla.paged_attention, q, kv, tables, lengths, new)
        return lengths, jnp.abs(out.astype(jnp.float32) - expected.astype(jnp.float32)).max()

    lengths, worst = jnp.zeros(rows, jnp.int32), []
    for key in jax.random.split(jax.random.key(0), steps):
        lengths, error = step(lengths, key)
        worst.append(error)
    error = float(jnp.stack(worst).max())  # NaN if any is
    assert error < 0.05, f"a step's output differs by {error}"
    return {"agrees": True, "largest_error": error}
