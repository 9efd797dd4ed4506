"""Attention over chosen tokens by the TPU kernels, interpreted: against the reference with a mask of them."""

import functools

import interpreter
import jax
import jax.numpy as jnp
import pytest
from chosen import B16, LATENT_ROWS, Chosen
from nightly import NIGHTLY

import pallas_kernels
from pallas_kernels import tpu
from pallas_kernels.testing import Case
from pallas_kernels.xla.chosen import chosen_rows

pytestmark = pytest.mark.timeout(240, method="thread")
ROWS = dict(num_heads=8, **LATENT_ROWS, **B16)
TRIALS = {
    "two rows": Chosen(Case((70, 9), (1, 1), **ROWS | {"num_heads": 2}), top_k=20),
    "latent": Chosen(Case((150, 9, 0, 1), (1, 1, 0, 1), **ROWS)),
    "latent, several tokens": Chosen(Case((90, 5), (3, 2), num_heads=5, **LATENT_ROWS, **B16), top_k=12),
    "plain, packed": Chosen(
        Case((130, 0, 40), (2, 0, 3), packed=True, padding=2, sinks=True, soft_cap=5.0, window=60, **B16), top_k=130
    ),
    "head_dim 80, blocks of 8, float32": Chosen(Case((70,), (1,), head_dim=80, block_size=8), top_k=130),
    "int8": Chosen(Case((70, 20), (1, 1), block_size=32, **B16), kind="int8", top_k=20),
    "latent, int8": Chosen(Case((70, 20), (1, 1), block_size=32, **ROWS), kind="int8", top_k=20),
}  # fmt: skip


def check(name, mode):
    """Checks a trial in a mode of the interpreter."""

    def run(attend, *arrays):
        def interpreted(*arrays, interpret):
            return attend(*arrays, functools.partial(tpu.paged_attention, interpret=interpret))

        return interpreter.run(interpreted, *arrays, mode=interpreter.MODES[mode])

    TRIALS[name].check(run)


@pytest.mark.parametrize("mode", interpreter.MODES)
@pytest.mark.parametrize("name", TRIALS)
def test_against_the_reference(name, mode):
    if not NIGHTLY and (name, mode) != ("two rows", "races"):
        pytest.skip("by day two rows pass in one mode, and in test_gpu_chosen.py all are brought together for XLA")
    check(name, mode)


@pytest.mark.skipif(not NIGHTLY, reason="by day the rows that GPUs' kernels read are brought together so")
def test_many_queries_take_turns(monkeypatch):
    monkeypatch.setattr(chosen_rows, "MOST_BYTES", 2 * 128 * 640 * 2)  # of two queries
    check("latent, several tokens", "plain")


def shapes(*axes, width=640, top_k=2048, heads=128, dtype="bfloat16"):
    """A step over latent rows as DeepSeek V3.2's."""
    shape = jax.ShapeDtypeStruct
    rows = axes[0] if len(axes) == 2 else 4
    return dict(
        q=shape((*axes, heads, 576), dtype), kv=shape((9, 1, 1, 64, width), dtype), rank=512, scale=0.1,
        tables=shape((rows, 512), jnp.int32), lengths=shape((rows,), jnp.int32), new=shape((rows,), jnp.int32),
        tokens=shape((*axes, top_k), jnp.int32), platform="tpu",
    )  # fmt: skip


def test_who_runs():
    for arguments in (shapes(32, 1), shapes(32, 4), shapes(4096), shapes(32, 1, width=576)):
        assert pallas_kernels.explain(**arguments).implementation == "tpu"
    refused = {"pools of bfloat16 or float32, not float16": shapes(2, 1, dtype="float16")}
    for why, arguments in refused.items():
        choice = pallas_kernels.explain(**arguments)
        assert choice.implementation == "xla" and why in choice.reason


def test_a_step_of_no_token():
    given = shapes(0)
    static = {name: given.pop(name) for name in ("rank", "scale")} | {"implementation": "tpu"}
    q, kv, _ = (given.pop(name) for name in ("q", "kv", "platform"))
    found = jax.eval_shape(functools.partial(pallas_kernels.paged_attention, **static), q, kv, **given)
    assert found.shape == (0, 128, 512)


def test_what_is_not_told_is_no_reason():
    arguments = shapes(32, 1)
    del arguments["kv"], arguments["rank"]
    assert pallas_kernels.explain(**arguments).implementation == "tpu"
