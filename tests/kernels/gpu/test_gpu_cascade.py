"""Queries that see all of a row, and rows that read once what they share, with the GPU kernels."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
import sharing
from gpu_trial import Trial
from nightly import NIGHTLY

from pallas_kernels import gpu, testing
from pallas_kernels.common import shared_prefix as prefixes
from pallas_kernels.testing import Case

pytestmark = pytest.mark.skipif(
    not NIGHTLY, reason="by day the same is tried with the TPU kernels, and these are traced"
)
B16 = {"dtype": "bfloat16"}
LATENT = dict(rank=128, scale=0.1, stored_head_dim=192, **B16)

# Rows shorter than their queries, empty ones that some or none ask, one query alone, several items of them; few
# queries of each row go to the decode kernels.
MEMORIES = {
    "packed": Case((17, 0, 150, 5), (20, 3, 1, 0), 5, 1, packed=True, padding=2, **B16),
    "padded": Case((70, 0, 9), (130, 130, 1), 2, 1, soft_cap=3.0, sinks=True, **B16),
    "few": Case((150, 0, 2, 70), (3, 1, 3, 0), 10, 2, sinks=True, **B16),
    "latent": Case((17, 0, 150, 5), (20, 3, 1, 0), 5, 1, 136, packed=True, padding=2, **LATENT),
    "latent, few": Case((150, 0, 2, 70), (3, 1, 3, 0), 10, 1, 136, **LATENT),
    "one token a row": Case((40, 0, 9), (1, 1, 0), 7, 1, 80, stored_head_dim=128, sinks=True, **B16),
}


@pytest.mark.parametrize("name", MEMORIES)
def test_queries_that_see_all_of_a_row(name, interpret, monkeypatch):
    case = MEMORIES[name]
    cut = {"wave": 12} if name == "few" else {}
    Trial(case, **cut).use_plans(monkeypatch)
    inputs = testing.make_inputs(dataclasses.replace(case, new=(0,) * len(case.new)))
    q = testing.make_inputs(dataclasses.replace(case, lengths=case.new)).q
    inputs = inputs._replace(q=q, new=jnp.asarray(case.new, jnp.int32))
    options = testing.make_options(case) | {"causal": False}
    attend = jax.jit(lambda *x: testing.run(gpu.paged_attention, *x, **options, return_lse=True, interpret=interpret))
    out, lse = attend(*inputs)
    expected, expected_lse = testing.expected(case, inputs, return_lse=True, causal=False)
    testing.assert_close(out, expected)
    testing.assert_close(lse, expected_lse, dtype=case.dtype)


# A row in no group, one that shares all but its last token, an empty one, one that is not in the step.
CASES = {
    "decode": (Case((25, 33, 40, 0, 20), (1, 1, 1, 0, 0), 5, 1, block_size=8, sinks=True, **B16), {(0, 2): 3}, None),
    "groups of 5 and 1": (
        Case((49, 150, 33, 20, 40, 37, 0, 44), (1, 1, 1, 1, 1, 1, 0, 0), 14, 2, 80, stored_head_dim=128, **B16),
        {(0, 2, 3, 4, 5): 1, (1,): 9}, None,
    ),
    "mixed": (
        Case((52, 50, 36, 20, 40, 37), (4, 1, 3, 1, 4, 33), 7, 1, packed=True, padding=3, **B16),
        {(0, 2, 4): 2, (1, 3): 1}, None,
    ),
    "latent rows": (
        Case((52, 50, 36, 20, 40, 37), (4, 1, 3, 1, 4, 9), 7, 1, 136, packed=True, padding=3, **LATENT),
        {(0, 2, 4): 2, (1, 3): 1}, None,
    ),
    "nobody shares": (Case((25, 33), (1, 1), 2, 1, **B16), {}, None),
    "tree": (Case((52, 50, 36), (4, 1, 3), 2, 1, tree=True, **B16), {(0, 2): 2}, None),
    "64 rows": (Case((17,) * 64 + (30,), (1,) * 65, 2, 1, **B16), {tuple(range(64)): 1}, None),
    "int8": (Case((70, 66), (2, 1), 4, 2, block_size=32, packed=True, **B16), {(0, 1): 2}, "int8"),
    "int4": (Case((70, 66), (2, 1), 4, 2, 80, block_size=32, stored_head_dim=128, **B16), {(0, 1): 2}, "int4"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_rows_get_what_they_get_by_themselves(name, interpret, monkeypatch):
    monkeypatch.setattr(prefixes, "WORTH_ROWS", 0)
    case, groups, kind = CASES[name]
    Trial(case, chunks=2).use_plans(monkeypatch)

    def run(function, arrays, **static):
        return jax.jit(lambda arrays: function(arrays, **static))(arrays)

    sharing.check(gpu, run, case, groups, kind, interpret=interpret, branches=False)
