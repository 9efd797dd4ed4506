"""The GPU kernels over quantised pools: any bits under NaN scales in everything that must not be read."""

import jax.numpy as jnp
import numpy as np
import pytest
from gpu_mistakes import SOURCES, outcome_with, unless_on_a_gpu
from nightly import NIGHTLY
from planting import Plant
from trials import QUANTISED_DECODE, QUANTISED_PREFILL

from pallas_kernels import gpu
from pallas_kernels.gpu import dequantize

TRIALS = {f"decode, {name}": trial for name, trial in QUANTISED_DECODE.items()}
TRIALS |= {f"prefill, {name}": trial for name, trial in QUANTISED_PREFILL.items()}
BY_DAY = ("decode, int8, lengths", "prefill, e5m2")

RING, PREFILL_RING = QUANTISED_DECODE["int8, ring"], QUANTISED_PREFILL["int8, ring"]
LENGTHS = QUANTISED_DECODE["int8, lengths"]
# What is wrong, on which trial, the outcomes that show it, and what is planted.
MISTAKES = {
    "the scale of another token": (
        RING,
        {"wrong", "race", "barrier"},
        Plant("fetch", "(slot, which, here)", "(slot, which, pl.ds(0, piece))"),
    ),
    "the scale of another head": (
        LENGTHS,
        {"wrong"},
        Plant("fetch", "(block, which, head, span)", "(block, which, 0, span)"),
    ),
    "the scale of another block": (
        RING,
        {"wrong"},
        Plant("fetch", "(block, which, head, span)", "(places[0][0], which, head, span)"),
    ),
    "K's scales for V's": (
        RING,
        {"wrong"},
        Plant("fetch", "(block, which, head, span)", "(block, 0, head, span)"),
    ),
    "scales read before they arrive": (
        RING,
        {"wrong", "race", "barrier"},
        Plant("arrivals", "3 * pieces", "pieces"),
    ),
    "decode: V's scales left out": (
        RING,
        {"wrong"},
        Plant("split", "p = p * lax.broadcast_in_dim(value_scales, p.shape, [0])", ""),
    ),
    "decode: K's slot released before it is widened": (
        RING,
        {"race", "wrong"},
        Plant("split", "plgpu.barrier_arrive(k_free.at[slot])", ""),
        Plant(
            "split",
            "plgpu.barrier_wait(k_ready.at[slot])",
            "plgpu.barrier_wait(k_ready.at[slot])\nplgpu.barrier_arrive(k_free.at[slot])",
        ),
    ),
    "prefill: one consumer's share not awaited": (
        PREFILL_RING,
        {"race", "wrong", "barrier"},
        Plant("attend", "plgpu.barrier_wait(widened[which])", ""),
    ),
    "prefill, columns: keys widened by the other not awaited": (
        QUANTISED_PREFILL["e4m3, head_dim 320"],
        {"race", "wrong", "barrier"},
        Plant("attend.kernel.widen_own_keys", "meet()", ""),
    ),
    "prefill, columns: V over keys that are read": (
        QUANTISED_PREFILL["e4m3, head_dim 320"],
        {"race", "wrong", "barrier"},
        Plant("attend.kernel.ready_values", "meet()", ""),
    ),
    "prefill: V's scales for K's": (
        PREFILL_RING,
        {"wrong"},
        Plant("attend", "scales(slot, 0)", "scales(slot, 1)"),
    ),
}
MISTAKES_BY_DAY = ("the scale of another token", "scales read before they arrive")


@pytest.mark.parametrize("name", TRIALS if NIGHTLY else BY_DAY)
def test_against_numpy(name, interpret, monkeypatch):
    TRIALS[name].use_plans(monkeypatch)
    TRIALS[name].check(interpret)


def emulate(program, x):
    """What a program of PTX, of the few instructions that ours have, makes of registers `u32[n]`."""
    kept = {"$1": x}
    for line in (line.strip().rstrip(";") for line in program.strip().splitlines()[2:-1]):
        name, arguments = line.split(" ", 1)
        to, *given = (word.strip() for word in arguments.split(","))
        values = [kept[word] if word in kept else np.full_like(x, int(word, 0)) for word in given]
        name, _, type_ = name.rpartition(".")
        if name == "prmt":
            of_both = np.stack([x[:, None].view(np.uint8) for x in values[:2]], axis=1).reshape(len(x), 8)
            chosen = [int(given[2], 0) >> 4 * i & 15 for i in range(4)]
            signs = (of_both.view(np.int8) >> 7).view(np.uint8)
            picked = np.stack([(signs if i & 8 else of_both)[:, i & 7] for i in chosen], axis=1)
            kept[to] = np.ascontiguousarray(picked).view(np.uint32)[:, 0]
        elif type_ == "b32":
            kept[to] = {"mov": lambda x: x, "and": np.bitwise_and, "xor": np.bitwise_xor, "shl": np.left_shift}[name](
                *values
            )
        else:
            halves = [x.view({"bf16x2": jnp.bfloat16, "f16x2": np.float16}[type_]) for x in values]
            with np.errstate(invalid="ignore"):
                made = {"sub": np.subtract, "mul": np.multiply, "min": np.fmin, "max": np.fmax}[name](*halves)
            kept[to] = made.view(np.uint32)
    return kept["$0"]


@pytest.mark.parametrize(("kind", "dtype"), dequantize.PAIRS)
def test_bytes_widened_in_pairs(kind, dtype):
    """Every byte is the number that it stands for, in either place. What is not stored, NaN and infinity, is finite."""
    low, high = (x.ravel().astype(np.uint32) for x in np.meshgrid(np.arange(256), np.arange(256)))
    pairs = emulate(dequantize.PAIRS[kind, dtype], low | high << 8).view(jnp.dtype(dtype)).reshape(-1, 2)
    stored = np.stack([low, high], axis=1).astype(np.uint8).view(jnp.dtype(kind)).astype(np.float32)
    finite = np.isfinite(stored)
    assert (pairs.astype(np.float32)[finite] == stored[finite]).all()
    assert np.isfinite(pairs.astype(np.float32)).all()
    assert finite.sum() >= 0.9 * finite.size


def test_all_formats_are_widened_in_pairs():
    assert set(dequantize.PAIRS) == {(kind, dtype) for kind in gpu.FORMATS for dtype in ("bfloat16", "float16")}


@unless_on_a_gpu
@pytest.mark.parametrize("name", MISTAKES if NIGHTLY else MISTAKES_BY_DAY)
def test_mistake(name, monkeypatch):
    trial, expected, *plants = MISTAKES[name]
    assert outcome_with(monkeypatch, trial, *plants) in expected


def test_every_mistake_can_be_made():
    SOURCES.check_plants(MISTAKES)
