"""Queries that see all of a row, and rows that read once what they share, with the TPU kernels on the interpreter."""

import dataclasses
import functools

import interpreter
import jax.numpy as jnp
import pytest
import sharing
from nightly import NIGHTLY

from pallas_kernels import testing, tpu
from pallas_kernels.common import shared_prefix as prefixes
from pallas_kernels.testing import Case

pytestmark = pytest.mark.timeout(240, method="thread")
BF16 = {"dtype": "bfloat16", "stored_head_dim": 128}
F32 = {"dtype": "float32", "stored_head_dim": 128}
LATENT = {"dtype": "bfloat16", "stored_head_dim": 256}
MODES = interpreter.MODES if NIGHTLY else {"races": interpreter.RACES}

# Rows shorter than their queries, empty ones that some or none ask, one query alone, several tiles of them.
MEMORIES = {
    "packed": Case((17, 0, 33, 5), (20, 3, 1, 0), 5, 1, 128, 8, packed=True, padding=2, **F32),
    "padded": Case((40, 0, 9), (130, 130, 1), 2, 1, 64, 16, soft_cap=3.0, sinks=True, **BF16),
    "one token a row": Case((40, 0, 9), (1, 1, 0), 10, 2, 80, 16, sinks=True, **BF16),
}


@pytest.mark.skipif(not NIGHTLY, reason="by day those of a group are such queries, below")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MEMORIES)
def test_queries_that_see_all_of_a_row(name, mode):
    case = MEMORIES[name]
    inputs = testing.make_inputs(dataclasses.replace(case, new=(0,) * len(case.new)))
    q = testing.make_inputs(dataclasses.replace(case, lengths=case.new)).q
    inputs = inputs._replace(q=q, new=jnp.asarray(case.new, jnp.int32))
    options = testing.make_options(case) | {"causal": False}
    out, lse = interpreter.run(tpu.paged_attention, *inputs, mode=MODES[mode], return_lse=True, **options)
    expected, expected_lse = testing.expected(case, inputs, return_lse=True, causal=False)
    testing.assert_close(out, expected)
    testing.assert_close(lse, expected_lse, dtype=case.dtype)


# A row in no group, one that shares all but its last token, an empty one, one that is not in the step.
CASES = {
    "decode, the write fused": (
        Case((25, 33, 40, 0, 20), (1, 1, 1, 0, 0), 5, 1, 80, 8, sinks=True, **F32), {(0, 2): 3}, None,
    ),
    "groups of 5 and 1": (
        Case((49, 50, 33, 20, 40, 37, 0, 44), (1, 1, 1, 1, 1, 1, 0, 0), 14, 2, 128, 16, soft_cap=3.0, **BF16),
        {(0, 2, 3, 4, 5): 1, (1,): 3}, None,
    ),
    "mixed": (
        Case((52, 50, 36, 20, 40, 37), (4, 1, 3, 1, 4, 33), 7, 1, 128, 16, packed=True, padding=3, **BF16),
        {(0, 2, 4): 2, (1, 3): 1}, None,
    ),
    "tree": (Case((52, 50, 36), (4, 1, 3), 2, 1, 128, 16, tree=True, **BF16), {(0, 2): 2}, None),
    "spans": (Case((52, 50, 36), (4, 1, 3), 2, 1, 128, 16, spans=True, **BF16), {(0, 2): 2}, None),
    "64 rows": (Case((17,) * 64 + (30,), (1,) * 65, 2, 1, 128, 16, **BF16), {tuple(range(64)): 1}, None),
    "latent": (
        Case((49, 20, 33), (1, 1, 1), 6, 1, 136, 16, rank=72, scale=0.1, **LATENT), {(0, 2): 2}, None,
    ),
    "keys and values joined, the write fused": (
        Case((49, 20, 33), (1, 1, 1), 6, 2, 128, 16, rank=64, scale=0.1, **BF16), {(0, 2): 2}, None,
    ),
    "int8": (Case((300, 260), (2, 1), 4, 2, 128, 128, packed=True, **BF16), {(0, 1): 2}, "int8"),
}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES if NIGHTLY else ["decode, the write fused"])
def test_rows_get_what_they_get_by_themselves(name, mode, monkeypatch):
    monkeypatch.setattr(prefixes, "WORTH_ROWS", 0)
    case, groups, kind = CASES[name]
    run = functools.partial(interpreter.run, mode=MODES[mode])
    small = {} if kind else {"step_tokens": 32}
    sharing.check(tpu, run, case, groups, kind, writes="write" in name, **small)
