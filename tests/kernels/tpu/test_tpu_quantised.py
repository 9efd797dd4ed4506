"""The TPU kernels over quantised pools: any numbers under NaN scales in everything that must not be read."""

import functools

import interpreter
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreter import PLAIN, RACES
from nightly import NIGHTLY
from test_negative_controls import broken

import pallas_kernels
from pallas_kernels import kinds, testing, tpu, xla
from pallas_kernels.testing import Case

pytestmark = pytest.mark.timeout(240, method="thread")
F32 = {"dtype": "float32", "stored_head_dim": 128, "block_size": 128}
BF16 = {**F32, "dtype": "bfloat16"}
# Lengths around the borders of blocks, rows that are empty or not in the step; odd groups and head_dims.
DECODE = {
    "int8": [
        Case((0, 129, 128, 300, 1, 127), (0, 1, 1, 1, 1, 0), 10, 2, 80, **F32),
        Case((255, 70), (1, 1), 4, 4, 128, window=100, sink_tokens=4, soft_cap=30.0, sinks=True, **BF16),
        Case((300, 5), (1, 1), 7, 1, 128, **{**F32, "block_size": 256}),
    ],
    "float8_e4m3fn": [Case((130, 128, 0), (1, 1, 0), 10, 2, 80, **F32)],
    "float8_e5m2": [Case((130, 127), (1, 1), 4, 2, 128, **F32)],
}
MIXED = {
    "int8": [
        Case((300, 129, 40, 17), (150, 1, 40, 2), 4, 2, 80, packed=True, padding=3, **F32),
        Case((270, 20), (40, 3), 5, 1, 128, packed=True, window=90, sink_tokens=4, sinks=True, soft_cap=20.0, **BF16),
    ],
    "float8_e4m3fn": [Case((140, 20), (20, 3), 2, 1, 128, packed=True, **F32)],
}
WRITES = [
    Case((128, 0, 129, 255, 300, 17, 127), (128, 0, 4, 127, 170, 1, 0), 2, 2, 128, packed=True, padding=3, **BF16),
    Case((256, 31), (1, 3), 3, 3, 96, padding=1, **F32),
]


def in_a_mode(cases, by_day="int8"):
    """By day the first case of a kind with races detected, by night all in both modes."""
    return pytest.mark.parametrize(
        ("kind", "case", "mode"),
        [
            pytest.param(kind, case, mode, id=f"{kind}-{case}-{name}")
            for kind, some in cases.items()
            for i, case in enumerate(some)
            for name, mode in (("plain", PLAIN), ("races", RACES))
            if NIGHTLY or (kind == by_day and i == 0 and name == "races")
        ],
    )


def stored(case, kind):
    inputs, scale, held = testing.quantise(case, testing.make_inputs(case), kind)
    return inputs, scale, held


def new_tokens(case, q):
    shape = (2, *q.shape[:-2], case.num_kv_heads, case.head_dim)
    return jax.random.normal(jax.random.key(0), shape, q.dtype)


def check(case, out, lse, held, **options):
    wanted, wanted_lse = testing.expected(case, held, return_lse=True, **options)
    testing.assert_close(out, wanted)
    testing.assert_close(lse, wanted_lse, dtype=case.dtype)


def assert_written(got, wanted):
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))  # a NaN equals a NaN


def check_decode(tpu, kind, case, mode):
    (q, kv, *rest), scale, _ = stored(case, kind)
    k, v = new_tokens(case, q)
    nan = jnp.full_like(k, jnp.nan)  # what attends before it writes is caught
    kv, scale = xla.write_kv(kv, nan, nan, *rest, kv_scale=scale, kind=kind)
    (out, lse), written = interpreter.run(
        functools.partial(tpu.write_and_attend, kind=kind), q, k, v, kv, *rest, mode=mode,
        **testing.make_options(case), kv_scale=scale, return_lse=True,
    )  # fmt: skip
    expected = xla.write_kv(kv, k, v, *rest, kv_scale=scale, kind=kind)
    assert_written(written, expected)
    held = kinds.decode(*expected, kind, case.head_dim)
    check(case, out, lse, testing.Inputs(q, held, *rest))


def check_attention(tpu, kind, case, mode):
    inputs, scale, held = stored(case, kind)
    # With the LSE in one mode and without it in the other, where the kernel sums the weights in another way.
    wanted = not mode.detect_races
    result = interpreter.run(
        functools.partial(tpu.paged_attention, kind=kind), *inputs, mode=mode, **testing.make_options(case),
        kv_scale=scale, return_lse=wanted,
    )  # fmt: skip
    out, lse = result if wanted else (result, testing.expected(case, held, return_lse=True)[1])
    check(case, out, lse, held)


def check_write(tpu, kind, case, mode):
    inputs, scale, _ = stored(case, kind)
    k, v = new_tokens(case, inputs.q)
    valid = pallas_kernels.locate(k.shape[:-2], inputs.lengths, inputs.new).valid
    k, v = (jnp.where(valid[..., None, None], x, jnp.nan) for x in (k, v))
    arguments = (inputs.kv, k, v, *inputs[2:])
    written = interpreter.run(functools.partial(tpu.write_kv, kind=kind), *arguments, mode=mode, kv_scale=scale)
    assert_written(written, xla.write_kv(*arguments, kv_scale=scale, kind=kind))


@in_a_mode(DECODE)
def test_decode_with_the_write_fused(kind, case, mode):
    check_decode(tpu, kind, case, mode)


@in_a_mode(MIXED, by_day="float8_e4m3fn")
def test_mixed(kind, case, mode):
    check_attention(tpu, kind, case, mode)


@in_a_mode({"int8": WRITES})
def test_write(kind, case, mode):
    check_write(tpu, kind, case, mode)


SMALL_DECODE = Case((129, 5), (1, 1), 2, 2, 128, **F32)
SMALL_PREFILL = Case((300, 9), (20, 4), 2, 2, 128, packed=True, **F32)
# name: (what to run, on which case, the file, what to find there, what to put instead)
CONTROLS = {
    "scales not awaited": (
        check_decode, SMALL_DECODE, "decode.py",
        "for pages_of, arrived in buffers:",
        "for pages_of, arrived in buffers[:1]:",
    ),
    "the scale of another token": (
        check_decode, SMALL_DECODE, "decode.py",
        "jnp.concatenate(line, axis=1), (group",
        "jnp.concatenate(line, axis=1)[:, ::-1], (group",
    ),
    "the scale of another head": (
        check_decode, SMALL_DECODE, "decode.py", "pl.ds(head, 1)]", "pl.ds(0, 1)]",
    ),
    "K's scales for V's": (
        check_decode, SMALL_DECODE, "decode.py", "spread(i, head)", "spread(0, head)",
    ),
    "scales that nobody sees": (
        check_decode, SMALL_DECODE, "decode.py", "return sound_scales(keys, values, kind)", "return keys, values",
    ),
    "a new scale in another place": (
        check_decode, SMALL_DECODE, "decode.py",
        "2) == inside - top",
        "2) == (inside if old.ndim == 3 else 0) + inside - top",
    ),
    "prefill: scales not awaited": (
        check_attention, SMALL_PREFILL, "pages.py",
        "for _, buffer, semaphore in streams:",
        "for _, buffer, semaphore in streams[:1]:",
    ),
    "prefill: the scale of another head": (
        check_attention, SMALL_PREFILL, "prefill.py", "pl.ds(head, 1)]", "pl.ds(0, 1)]",
    ),
    "prefill: scales that nobody sees": (
        check_attention, SMALL_PREFILL, "prefill.py",
        "return sound_scales(keys, values, kind)",
        "return keys, values",
    ),
    "write: only part of what is new": (
        check_write, WRITES[0], "write.py", "(ends[entry] > first)", "(ends[entry] > first + 1)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("control", CONTROLS if NIGHTLY else list(CONTROLS)[::12])
def test_control(control, tmp_path, monkeypatch):
    check, case, *change = CONTROLS[control]
    with pytest.raises((AssertionError, jax.errors.JaxRuntimeError)):
        check(broken(tmp_path, monkeypatch, *change), "int8", case, PLAIN)
