"""Rows that hold fewer tokens than they have queries, with the GPU kernels."""

import functools

import pytest
import short_rows
from gpu_trial import B16, F16, Trial
from nightly import NIGHTLY

from pallas_kernels import gpu, testing
from pallas_kernels.testing import Case

ITEM = 16  # tokens of an item of prefill, with so many heads
GROUP = dict(num_heads=8, num_kv_heads=1)
PACKED = dict(packed=True, padding=3, **GROUP)
draw = functools.partial(short_rows.draw_case, edges=(8, ITEM), block_size=8)
draw_wide = functools.partial(short_rows.draw_case, edges=(ITEM, 32), count=9, block_size=32)
LATENT = dict(head_dim=136, stored_head_dim=192, rank=128, scale=0.1, **B16)
SINGLE = ((0, 1, 0, 31, 33, 70), (1, 1, 0, 1, 1, 1))
FEW = ((0, 1, 2, 3, 70, 0, 5), (3, 3, 3, 3, 3, 0, 0))
CASES = {
    "packed": Trial(draw(0, **PACKED, **B16)),
    "padded": Trial(draw(1, padding=1, **GROUP, **B16)),
    "packed, cut into chunks": Trial(draw(2, **PACKED, **B16), chunks=2),
    "window": Trial(draw(3, window=7, soft_cap=3.0, scale=0.3, **PACKED, **B16)),
    "first tokens": Trial(draw(4, window=7, sink_tokens=5, **PACKED, **F16), chunks=2),
    "chunk": Trial(draw(5, chunk=8, **PACKED, **B16)),
    "chunk, before all keys": Trial(Case((0,), (9,), chunk=8, packed=True, block_size=8, **GROUP, **B16)),
    "sinks": Trial(draw(6, sinks=True, **PACKED, **B16)),
    "hundreds": Trial(
        short_rows.draw_case(7, (128,), longest=300, count=6, block_size=32, packed=True, **GROUP, **B16)
    ),
    "columns of their own": Trial(draw(8, count=6, packed=True, num_kv_heads=1, head_dim=320, **B16)),
    "ahead": Trial(draw(9, count=6, **PACKED, **B16), form="ahead"),
    "one query a row": Trial(Case(*SINGLE, block_size=8, **GROUP, **B16)),
    "one query a row, cut": Trial(Case(*SINGLE, block_size=8, window=60, **GROUP, **B16), wave=12),
    "few queries": Trial(Case(*FEW, block_size=8, **GROUP, **B16), wave=12),
    "few queries, window": Trial(Case(*FEW, block_size=8, window=2, **GROUP, **B16)),
    "latent": Trial(draw(10, packed=True, **GROUP, **LATENT)),
    "latent, chunk": Trial(draw(11, count=6, chunk=8, packed=True, **GROUP, **LATENT), chunks=2),
    "latent, one query a row": Trial(Case(*SINGLE, block_size=8, **GROUP, **LATENT)),
    "int4, small": Trial(Case((0, 4, 0), (1, 9, 3), packed=True, block_size=32, **GROUP, **B16), kind="int4"),
    "int4": Trial(draw_wide(12, **PACKED, **B16), kind="int4"),
    "int4, window": Trial(draw_wide(13, padding=1, window=9, **GROUP, **B16), kind="int4"),
    "int4, first tokens": Trial(draw_wide(14, window=9, sink_tokens=5, head_dim=128, **PACKED, **B16), kind="int4"),
    "int4, one query a row": Trial(Case(*SINGLE, block_size=32, **GROUP, **B16), kind="int4"),
    "int4, few queries": Trial(Case(*FEW, block_size=32, **GROUP, **B16), kind="int4", wave=12),
    "int8": Trial(draw_wide(15, **PACKED, **B16), kind="int8"),
    "float8": Trial(draw_wide(16, padding=1, **GROUP, **B16), kind="float8_e4m3fn"),
}


@pytest.mark.parametrize("name", CASES if NIGHTLY else ["chunk, before all keys", "int4, small"])
def test_attention(name, interpret, monkeypatch):
    trial = CASES[name]
    trial.use_plans(monkeypatch)
    attend = functools.partial(testing.run, gpu.paged_attention, interpret=interpret)
    short_rows.check(functools.partial(short_rows.run_jitted, attend), trial.case, trial.kind)


@pytest.mark.skipif(not NIGHTLY, reason="what is done is the same, in other items")
@pytest.mark.parametrize("name", ["packed", "one query a row", "int4"])
def test_deterministic(name, interpret, monkeypatch):
    trial = CASES[name]
    trial.use_plans(monkeypatch)
    attend = functools.partial(testing.run, gpu.paged_attention, interpret=interpret, deterministic=True)
    short_rows.check(functools.partial(short_rows.run_jitted, attend), trial.case, trial.kind)
