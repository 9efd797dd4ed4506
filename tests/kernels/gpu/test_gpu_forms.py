"""The other forms of prefill that a plan may choose: right, without races, and in the order that they are there for."""

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import pytest
from gpu_plans import FORMS
from gpu_trial import B16, ONE, Trial
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from nightly import NIGHTLY
from quantised_trials import QUANTISED_DECODE, QUANTISED_PREFILL
from state_trials import TRIALS as STATES
from trials import DECODE, LATENT, PREFILL

from pallas_kernels import gpu, testing
from pallas_kernels.gpu import chips, prefill
from pallas_kernels.gpu.chips import GpuChip
from pallas_kernels.testing import Case

INTERPRETED = [form for form in FORMS if "registers" not in form]
BY_DAY = (
    ("4, 3, 2, 1 and 0 tiles", "turns, ahead"),
    ("tails of wide tiles", "turns"),
    ("tails of wide tiles", "ahead"),
)


def formed(trial: Trial, form: str) -> Trial:
    return dataclasses.replace(trial, form=form)


@pytest.mark.parametrize(
    ("name", "form"), [(name, form) for name in PREFILL for form in INTERPRETED] if NIGHTLY else BY_DAY
)
def test_against_numpy(name, form, interpret, monkeypatch):
    trial = formed(PREFILL[name], form)
    trial.use_plans(monkeypatch)
    trial.check(interpret)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="sees the interpreter's products")
@pytest.mark.parametrize("form", [*["turns"] * NIGHTLY, "turns, ahead"])
def test_one_multiplies_while_the_other_does_its_softmax(form, interpret, monkeypatch):
    """Which consumer's products are issued, in time: of seven tiles with K and with V, each one's two together but for
    the first tile's with K and the last one's with V."""
    issued, product = [], gpu_callbacks.wgmma

    @functools.wraps(product)
    def record(**arguments):
        issued.append(arguments["thread"].warpgroup_id)
        return product(**arguments)

    monkeypatch.setattr(gpu_callbacks, "wgmma", record)
    trial = formed(PREFILL["ring"], form)
    trial.use_plans(monkeypatch)
    trial.check(interpret)
    first, second = sorted(set(issued))
    assert issued == [first, second, *[first, first, second, second] * 6, first, second]


REFUSED = {  # a trial in all forms at once, and what of them is done
    "the interpreter": (PREFILL["ring"], (False, True, True)),
    "masks from memory": (PREFILL["tree"], (False, True, False)),
    "a quantised pool": (QUANTISED_PREFILL["e5m2"], (False, False, False)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_takes_another_form(name, monkeypatch):
    trial, expected = REFUSED[name]
    trial = formed(trial, "registers, turns, ahead")
    trial.use_plans(monkeypatch)
    attend, taken = prefill.attend, []

    def spy(operands, items, holes, plan, **options):
        taken.append((plan.weights_in_registers, plan.in_turns, plan.ahead))
        return attend(operands, items, holes, plan, **options)

    monkeypatch.setattr(prefill, "attend", spy)
    inputs, options = trial.inputs()
    if trial.kind is not None:
        inputs, options["kv_scale"], _ = testing.quantise(trial.case, inputs, trial.kind)
        options["kind"] = trial.kind
    interpret = plgpu.InterpretGPUParams()
    jax.eval_shape(lambda *x: testing.run(gpu.paged_attention, *x, **options, interpret=interpret), *inputs)
    assert taken == [expected]


# Chips with a warp's products alone, of much shared memory and of little.
BLACKWELL = GpuChip("NVIDIA B200", 148, "10.0"), GpuChip("NVIDIA GeForce RTX 5090", 170, "12.0")
TRIALS: dict[str, Any] = {f"decode, {name}": trial for name, trial in (DECODE | QUANTISED_DECODE).items()}
TRIALS |= {f"prefill, {name}": trial for name, trial in (PREFILL | QUANTISED_PREFILL).items()}
TRIALS |= {f"latent, {name}": trial for name, trial in LATENT.items()}
TRIALS |= {f"states, {name}": trial for name, trial in STATES.items()}
BY_WARPS = {
    "10.0": ("decode, tails", "prefill, tails", "decode, int8, lengths", "states, delta, chunks of one row"),
    "12.0": ("prefill, head_dim 256",),
}


@pytest.mark.parametrize(
    ("chip", "name"),
    [(chip, name) for chip in BLACKWELL for name in (TRIALS if NIGHTLY else BY_WARPS[chip.capability])],
    ids=lambda x: x.name if isinstance(x, GpuChip) else x,
)
def test_products_by_warps(chip, name, interpret, monkeypatch):
    """As on Blackwell; Hopper has these instructions, too."""
    monkeypatch.setattr(chips, "find_chip", lambda: chip)
    trial = TRIALS[name]
    if isinstance(trial, Trial):
        if chip.capability == "12.0" and (refusal := trial.find_refusal()):
            pytest.skip(refusal)
        trial.use_plans(monkeypatch)
    trial.check(interpret)


LITTLE = {
    "head_dim 512": (Trial(Case((70,), (5,), head_dim=512, **ONE)), True),
    "int8, head_dim 256": (Trial(Case((70,), (5,), head_dim=256, block_size=32, **ONE), kind="int8"), True),
    "int4, head_dim 192": (Trial(Case((70,), (5,), head_dim=192, block_size=32, **ONE), kind="int4"), True),
    "latent rows": (Trial(Case((70,), (5,), num_kv_heads=1, head_dim=576, rank=512, scale=0.1, **B16)), True),
    "head_dim 256": (Trial(Case((70,), (5,), head_dim=256, **ONE)), False),
    "int8": (Trial(Case((70,), (5,), head_dim=128, block_size=32, **ONE), kind="int8"), False),
}


@pytest.mark.parametrize("name", LITTLE)
def test_what_little_shared_memory_refuses(name, monkeypatch):
    trial, is_refused = LITTLE[name]
    assert trial.find_refusal() is None
    monkeypatch.setattr(chips, "find_chip", lambda: BLACKWELL[1])
    refusal = trial.find_refusal()
    assert bool(refusal) == is_refused
    if refusal is not None:
        assert "101,376 bytes" in refusal and "RTX 5090" in refusal and "implementation=None" in refusal
