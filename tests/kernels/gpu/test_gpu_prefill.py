"""Chunked and mixed steps against the reference: interpreted with races detected, or natively on a GPU."""

import jax
import pytest

from pallas_kernels import gpu, testing
from pallas_kernels.gpu import tuning
from pallas_kernels.gpu.tiles import Tile
from pallas_kernels.testing import Case

B16, F16 = {"dtype": "bfloat16"}, {"dtype": "float16"}
CASES = [
    Case((5, 0, 150, 64), (3, 0, 70, 1), **B16),  # mixed: the last row decodes
    Case((5, 0, 150, 64), (3, 0, 70, 1), packed=True, padding=3, num_heads=5, num_kv_heads=1, sinks=True, **B16),
    Case((300, 20), (130, 2), window=50, num_heads=1, num_kv_heads=1, block_size=24, packed=True, **F16),
    Case((200, 20), (20, 2), window=50, soft_cap=4.0, num_kv_heads=1, head_dim=256, block_size=8, **B16),
    Case(  # a window that sees some tiles wholly
        (90, 7),
        (40, 7),
        num_heads=20,
        num_kv_heads=1,
        head_dim=80,
        stored_head_dim=128,
        block_size=256,
        window=80,
        **F16,
    ),
    Case((9, 3), (1, 0), packed=True, **B16),
]


def check(case, interpret):
    inputs, options = testing.make_inputs(case), testing.make_options(case)
    assert gpu.unsupported("paged_attention", dict(q=inputs.q, kv=inputs.kv)) is None
    attend = jax.jit(lambda *a: gpu.paged_attention(*a, **options, return_lse=True, interpret=interpret))
    out, lse = attend(*inputs)
    expected_out, expected_lse = testing.expected(case, inputs, return_lse=True)
    testing.assert_close(out, expected_out)
    testing.assert_close(lse, expected_lse, dtype=case.dtype)


@pytest.mark.usefixtures("small_plans")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_reference(case, interpret):
    check(case, interpret)


def test_wide_tiles(monkeypatch, interpret):
    """128 tokens a tile, of which the two consumers clean two swizzled tiles each."""
    monkeypatch.setattr(tuning, "prefill_plan", lambda *_: tuning.PrefillPlan(Tile(tokens=128, stages=2)))
    monkeypatch.setattr(tuning, "decode_plan", lambda *_: tuning.DecodePlan(Tile(tokens=64, stages=2), num_blocks=1))
    check(Case((390,), (40,), num_heads=2, num_kv_heads=1, head_dim=128, **B16), interpret)
