"""The other forms of prefill that a plan may choose: right, without races, and in the order that they are there for."""

import dataclasses
import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import pytest
from gpu_plans import FORMS
from gpu_trial import Trial
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from nightly import NIGHTLY
from quantised_trials import QUANTISED_PREFILL
from trials import PREFILL

from pallas_kernels import gpu, testing
from pallas_kernels.gpu import prefill

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
