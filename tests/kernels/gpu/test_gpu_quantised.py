"""The GPU kernels over quantised pools: any bits under NaN scales in everything that must not be read."""

import pytest
from gpu_mistakes import SOURCES, outcome_with, unless_on_a_gpu
from nightly import NIGHTLY
from planting import Plant
from trials import QUANTISED_DECODE, QUANTISED_PREFILL

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
        Plant(
            "split",
            "plgpu.barrier_wait(k_ready.at[slot])",
            "plgpu.barrier_wait(k_ready.at[slot])\nplgpu.barrier_arrive(k_free.at[slot])",
        ),
        Plant("split", "plgpu.commit_smem()\nplgpu.barrier_arrive(k_free.at[slot])", "plgpu.commit_smem()"),
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


@unless_on_a_gpu
@pytest.mark.parametrize("name", MISTAKES if NIGHTLY else MISTAKES_BY_DAY)
def test_mistake(name, monkeypatch):
    trial, expected, *plants = MISTAKES[name]
    assert outcome_with(monkeypatch, trial, *plants) in expected


def test_every_mistake_can_be_made():
    SOURCES.check_plants(MISTAKES)
