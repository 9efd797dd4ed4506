"""The decode kernels against NumPy: interpreted with races detected, or natively on a GPU."""

import jax
import jax.numpy as jnp
import pytest
from nightly import NIGHTLY
from trials import DECODE, SMALL, Trial

from pallas_kernels import gpu, testing
from pallas_kernels.common.masks import WindowMask
from pallas_kernels.gpu import decode, prefill, step, work_items as work
from pallas_kernels.testing import Case

BY_DAY = (
    "first tokens, cut", "wild ids", "tree, chunk", "71 heads, window",
)  # fmt: skip


@pytest.mark.parametrize("name", DECODE if NIGHTLY else BY_DAY)
def test_against_numpy(name, interpret, monkeypatch):
    DECODE[name].use_plans(monkeypatch)
    DECODE[name].check(interpret)


def test_trials_are_what_they_say(interpret, monkeypatch):
    """A ring refilled three times, and as many items as tiles."""
    for name, items in (("ring", [8]), ("one item for each of many tiles", [1] * 40)):
        trial = DECODE[name]
        trial.use_plans(monkeypatch)
        inputs = trial.inputs()[0]
        rows, *_ = work.decode_items(
            inputs.lengths, inputs.new, 1, work.Cutting(10**4, WindowMask(), 64, trial.wave, 100), alone_of=None,
            interpret=interpret,
        )  # fmt: skip
        sizes = rows[:, 2] - rows[:, 1]
        assert sizes[sizes > 0].tolist() == items


@pytest.mark.skipif(not NIGHTLY, reason="the same kernel with other numbers")
def test_traced_scale_and_cap(interpret, monkeypatch):
    case = Case(lengths=(20, 70), new=(1, 1), dtype="bfloat16", scale=0.2, soft_cap=4.0)
    Trial(case, **SMALL).use_plans(monkeypatch)
    inputs = testing.make_inputs(case)

    @jax.jit
    def attend(scale, soft_cap, *inputs):
        return testing.run(gpu.paged_attention, *inputs, scale=scale, soft_cap=soft_cap, interpret=interpret)

    testing.assert_close(attend(0.2, 4.0, *inputs), testing.expected(case, inputs))


@pytest.mark.skipif(not NIGHTLY, reason="by day it is only lowered, in test_gpu_lower.py")
def test_vmap(interpret, monkeypatch):
    """Two caches of one shape, side by side."""
    case = Case(lengths=(20, 70), new=(1, 1), dtype="bfloat16")
    Trial(case).use_plans(monkeypatch)
    inputs = [testing.make_inputs(case, seed) for seed in (0, 1)]
    batched = jax.tree.map(lambda *x: jnp.stack(x), *inputs)
    out = jax.vmap(lambda *inputs: testing.run(gpu.paged_attention, *inputs, interpret=interpret))(*batched)
    for i in range(2):
        testing.assert_close(out[i], testing.expected(case, inputs[i]))


@pytest.mark.skipif(not NIGHTLY, reason="by day it is only lowered, in test_gpu_lower.py")
@pytest.mark.parametrize("name", ["window, cut", "explicit offsets"])
def test_what_varies_among_devices(name, interpret, monkeypatch):
    """In a `shard_map` JAX takes neither warps nor references: without them the results are the same."""
    for module in (step, decode, prefill):
        monkeypatch.setattr(module, "varies", lambda x: True)
    DECODE[name].use_plans(monkeypatch)
    DECODE[name].check(interpret)
