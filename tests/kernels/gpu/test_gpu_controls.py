"""Negative controls: each kernel with a known mistake must fail on the rung of the ladder that should catch it.

The mistakes that only the compiler's output shows are in tests/compile.
"""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from mutants import mutant

from pallas_kernels import gpu, testing
from pallas_kernels.gpu import decode, prefill, step, tiles, tuning, work
from pallas_kernels.testing import Case

CASE = Case(lengths=(300,), new=(1,), num_heads=4, num_kv_heads=1, dtype="bfloat16")
CHUNK = Case(lengths=(190,), new=(70,), num_heads=2, num_kv_heads=1, dtype="bfloat16")
TILE = tiles.Tile(tokens=64, stages=2)


def outcome(case: Case = CASE) -> str:
    """How interpreting a case ends: "right", "wrong", "race", "barrier", or the exception."""
    inputs = testing.make_inputs(case)
    interpret_pallas_call.reset_gpu_interpret_mode_state()
    interpret = plgpu.InterpretGPUParams(detect_races=True, num_tma_threads_per_device=64)
    try:
        out = jax.jit(lambda *inputs: gpu.paged_attention(*inputs, interpret=interpret))(*inputs)
        out = np.asarray(out)
        if interpret_pallas_call.get_races().races_found:
            return "race"
        testing.assert_close(out, testing.expected(case, inputs))
    except AssertionError:
        return "wrong"
    except Exception as e:  # newer interpreters raise on a race, and on a barrier left behind
        return "race" if "race" in str(e).lower() else "barrier" if "barrier" in str(e).lower() else repr(e)
    finally:
        interpret_pallas_call.reset_gpu_interpret_mode_state()
    return "right"


@pytest.fixture(autouse=True)
def one_item(monkeypatch):
    if jax.default_backend() == "gpu":
        pytest.skip("a known-bad kernel may hang a GPU")
    plan = tuning.DecodePlan(TILE, num_blocks=1)
    monkeypatch.setattr(work, "WAVES", 1)
    monkeypatch.setattr(tuning, "decode_plan", lambda head_dim, columns: plan)
    monkeypatch.setattr(tuning, "prefill_plan", lambda head_dim, block_size: tuning.PrefillPlan(TILE))


@pytest.mark.parametrize("case", [CASE, CHUNK], ids=["decode", "prefill"])
def test_without_a_mistake(case):
    assert outcome(case) == "right"


DECODE_MISTAKES = {
    "V read before it arrives": ({"race", "wrong", "barrier"}, ("plgpu.barrier_wait(v_ready.at[slot])", "pass")),
    "K's slot released before the product": (
        {"race"},
        ("plgpu.barrier_arrive(k_free.at[slot])", "pass"),
        (
            "plgpu.barrier_wait(k_ready.at[slot])",
            "plgpu.barrier_wait(k_ready.at[slot]); plgpu.barrier_arrive(k_free.at[slot])",
        ),
    ),
    "V's slot released before the product": (
        {"race"},
        ("plgpu.barrier_arrive(v_free.at[slot])", "pass"),
        (
            "plgpu.barrier_wait(v_ready.at[slot])",
            "plgpu.barrier_wait(v_ready.at[slot]); plgpu.barrier_arrive(v_free.at[slot])",
        ),
    ),
    "one token too many": ({"wrong"}, ("seen = position < length", "seen = position < length + 1")),
    "garbage times zero": (
        {"wrong"}, ("select_seen_values(v_s.at[slot], first_seen - first, length - first)", "pass"),
    ),
    "sum not rescaled": (
        {"wrong"}, ("total = total * lax.broadcast_in_dim(alpha, total.shape, [1]) + p", "total = total + p"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", DECODE_MISTAKES)
def test_decode_mistake(mistake, monkeypatch):
    if "released" in mistake and jax.__version_info__ < (0, 12):
        pytest.skip("JAX 0.11's interpreter does not see this race")
    expected, *changes = DECODE_MISTAKES[mistake]
    monkeypatch.setattr(step, "decode", mutant(decode, *changes))
    assert outcome() in expected


FETCH_MISTAKES = {
    "slot refilled while read": ({"race", "barrier"}, ("plgpu.barrier_wait(free_ref.at[slot])", "pass")),
    "the wrong block": ({"wrong"}, ("(tile.tokens // piece) + j, low", "(tile.tokens // piece) + j + 1, low")),
}  # fmt: skip


@pytest.mark.parametrize("mistake", FETCH_MISTAKES)
def test_fetch_mistake(mistake, monkeypatch):
    expected, *changes = FETCH_MISTAKES[mistake]
    monkeypatch.setattr(decode, "fetch", mutant(tiles, *changes).fetch)
    assert outcome() in expected


PREFILL_MISTAKES = {
    "a token sees its successor": ({"wrong"}, ("seen = key <= query", "seen = key <= query + 1")),
    "a tile taken for wholly seen": (
        {"wrong"},
        ("partly_seen = first + (tokens - 1) > first_token", "partly_seen = first > first_token"),
    ),
    "V read before the other consumer cleaned its share": (
        {"race", "wrong"},
        ("plgpu.barrier_wait(v_selected.at[slot])", "pass"),
    ),
    "a share of V cleaned by nobody": (
        {"wrong", "race"},
        ("share=warpgroup, shares=CONSUMERS", "share=warpgroup + 1, shares=CONSUMERS"),
    ),
    "heads and tokens mixed up": ({"wrong"}, ("lax.div(query, jnp.int32(group))", "query")),
}


@pytest.mark.parametrize("mistake", PREFILL_MISTAKES)
def test_prefill_mistake(mistake, monkeypatch):
    expected, *changes = PREFILL_MISTAKES[mistake]
    monkeypatch.setattr(step, "prefill", mutant(prefill, *changes))
    assert outcome(CHUNK) in expected
