"""The GPU kernels over quantised pools: any bits under NaN scales in everything that must not be read."""

import jax
import pytest
from nightly import NIGHTLY
from test_gpu_controls import outcome
from trials import QUANTISED_DECODE, QUANTISED_PREFILL

from pallas_kernels.gpu import decode, dequantize as quantised, prefill, tiles

TRIALS = {f"decode, {name}": trial for name, trial in QUANTISED_DECODE.items()}
TRIALS |= {f"prefill, {name}": trial for name, trial in QUANTISED_PREFILL.items()}
BY_DAY = ("decode, int8, lengths", "prefill, e5m2")

RING, PREFILL_RING = QUANTISED_DECODE["int8, ring"], QUANTISED_PREFILL["int8, ring"]
LENGTHS = QUANTISED_DECODE["int8, lengths"]
# What is wrong, on which trial, the outcomes that show it, and the module with what to find and what to put there.
MISTAKES = {
    "the scale of another token": (
        RING, {"wrong", "race", "barrier"}, tiles, "scales[1].at[slot, which, here]",
        "scales[1].at[slot, which, pl.ds(0, piece)]",
    ),
    "the scale of another head": (
        LENGTHS, {"wrong"}, tiles, "scales[0].at[block, which, head", "scales[0].at[block, which, 0",
    ),
    "the scale of another block": (
        RING, {"wrong"}, tiles, "scales[0].at[block, which", "scales[0].at[places[0][0], which",
    ),
    "K's scales for V's": (RING, {"wrong"}, tiles, "scales[0].at[block, which", "scales[0].at[block, 0"),
    "scales read before they arrive": (RING, {"wrong", "race", "barrier"}, quantised, "3 * pieces", "pieces"),
    "decode: V's scales left out": (
        RING, {"wrong"}, decode, "p = p * lax.broadcast_in_dim(value_scales, p.shape, [0])", "pass",
    ),
    "decode: K's slot released before it is widened": (
        RING, {"race", "wrong"}, decode, "plgpu.barrier_wait(k_ready.at[slot])",
        "plgpu.barrier_wait(k_ready.at[slot]); plgpu.barrier_arrive(k_free.at[slot])",
        "plgpu.commit_smem()\n                    plgpu.barrier_arrive(k_free.at[slot])", "plgpu.commit_smem()",
    ),
    "prefill: one consumer's share not awaited": (
        PREFILL_RING, {"race", "wrong", "barrier"}, prefill, "plgpu.barrier_wait(widened[which])", "pass",
    ),
    "prefill: V's scales for K's": (PREFILL_RING, {"wrong"}, prefill, "scales(slot, 0)", "scales(slot, 1)"),
}  # fmt: skip
MISTAKES_BY_DAY = ("the scale of another token", "scales read before they arrive")


@pytest.mark.parametrize("name", TRIALS if NIGHTLY else BY_DAY)
def test_against_numpy(name, interpret, monkeypatch):
    TRIALS[name].use_plans(monkeypatch)
    TRIALS[name].check(interpret)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="a known-bad kernel may hang a GPU")
@pytest.mark.parametrize("name", MISTAKES if NIGHTLY else MISTAKES_BY_DAY)
def test_mistake(name, monkeypatch):
    from mutants import mutant

    trial, expected, module, *changes = MISTAKES[name]
    copy = mutant(module, *zip(changes[::2], changes[1::2], strict=True))
    trial.use_plans(monkeypatch)
    if module in (decode, prefill):
        from pallas_kernels.gpu import step

        monkeypatch.setattr(step, module.__name__.rpartition(".")[2], copy)
    else:
        for user in (decode, prefill):
            for changed in ("fetch",) if module is tiles else ("arrivals",):
                monkeypatch.setattr(user, changed, getattr(copy, changed))
    assert outcome(trial) in expected
