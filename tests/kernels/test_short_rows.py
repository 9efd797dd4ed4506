"""Rows that hold fewer tokens than they have queries: the reference and XLA, and gradients through them.

The kernels' are in `tpu/test_tpu_short_rows.py` and `gpu/test_gpu_short_rows.py`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import short_rows
from cases import in_tiles
from nightly import NIGHTLY

import pallas_kernels
from pallas_kernels import testing
from pallas_kernels.testing import Case
from pallas_kernels.xla import work_list as work

EDGES = (5, work.PREFILL_QUERIES)  # of blocks, and of tiles of queries
PADDED = dict(block_size=5, padding=1)
PACKED = dict(block_size=5, packed=True, padding=3)
BF16 = {"dtype": "bfloat16"}
LATENT = dict(num_kv_heads=1, head_dim=24, rank=16, scale=0.2)
SINGLE = ((0, 1, 0, 5, 6, 37), (1, 1, 0, 1, 1, 1))
CASES = {
    "packed": (short_rows.draw_case(0, EDGES, **PACKED), None),
    "padded": (short_rows.draw_case(1, EDGES, **PADDED), None),
    "window": (short_rows.draw_case(2, EDGES, window=7, soft_cap=3.0, scale=0.3, **PACKED), None),
    "first tokens": (short_rows.draw_case(3, EDGES, window=7, sink_tokens=6, **PADDED), None),
    "chunk": (short_rows.draw_case(4, EDGES, chunk=9, **PACKED), None),
    "sinks": (short_rows.draw_case(5, EDGES, sinks=True, **PACKED), None),
    "hundreds": (short_rows.draw_case(6, (64,), longest=300, block_size=16, packed=True), None),
    "one query a row": (Case(*SINGLE, block_size=5), None),
    "one query a row, window": (Case(*SINGLE, block_size=5, window=3), None),
    "int4": (short_rows.draw_case(7, EDGES, window=9, **PACKED, **BF16), "int4"),
    "int8": (short_rows.draw_case(8, EDGES, **PADDED), "int8"),
    "float8": (short_rows.draw_case(9, EDGES, **PACKED, **BF16), "float8_e4m3fn"),
    "latent": (short_rows.draw_case(10, EDGES, **PACKED, **LATENT), None),
    "latent int4": (short_rows.draw_case(11, EDGES, **PACKED, **LATENT | {"head_dim": 96, "rank": 64}), "int4"),
    "joined int4": (
        short_rows.draw_case(12, EDGES, head_dim=64, rank=32, scale=0.2, joined=True, **PACKED, **BF16), "int4",
    ),
}  # fmt: skip


def parametrize_cases(*names):
    """Parametrizes a test over all cases by night, and over these by day."""
    return pytest.mark.parametrize("name", CASES if NIGHTLY else names)


def attend(implementation, *inputs, widen=lambda inputs: inputs, **options):
    run = functools.partial(pallas_kernels.paged_attention, implementation=implementation)
    return short_rows.run_jitted(run, *widen(testing.Inputs(*inputs)), **options)


@parametrize_cases("packed", "first tokens", "int4")
def test_the_reference(name):
    short_rows.check(functools.partial(attend, "reference"), *CASES[name])


@parametrize_cases("window", "one query a row", "int4")
def test_xla_in_tiles(name):
    short_rows.check(functools.partial(attend, "xla", widen=in_tiles), *CASES[name])


@parametrize_cases("padded", "int4")
def test_xla_at_once(name):
    short_rows.check(functools.partial(attend, "xla"), *CASES[name])


@parametrize_cases("packed")
def test_xla_deterministic(name):
    short_rows.check(functools.partial(attend, "xla", widen=in_tiles, deterministic=True), *CASES[name])


@pytest.mark.parametrize("name", ["packed", "window", "sinks", "latent"] if NIGHTLY else ["window"])
def test_gradients_are_those_of_the_reference(name):
    """None goes to queries that see nothing, and none comes from them."""
    case, _ = CASES[name]
    inputs, _, _ = short_rows.make_inputs(case)
    options = testing.make_options(case)
    weights = np.random.default_rng(1).standard_normal((2, *inputs.q.shape)).astype(np.float32)

    def loss(implementation, q, kv):
        out, lse = pallas_kernels.paged_attention(
            q, kv, *inputs[2:], **options, return_lse=True, implementation=implementation
        )
        return (weights[0, ..., : case.rank] * out).sum() + (weights[1, ..., 0] * jnp.maximum(lse, -1e9)).sum()

    actual, expected = (
        jax.jit(jax.grad(functools.partial(loss, name), argnums=(0, 1)))(*inputs[:2]) for name in ("xla", "reference")
    )
    for got, wanted in zip(actual, expected, strict=True):
        assert np.abs(wanted).max() > 0.01
        np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-5 * np.abs(wanted).max())
    token = pallas_kernels.locate(inputs.q.shape[:-2], inputs.lengths, inputs.new)
    blind = np.asarray(token.position < 0)
    assert blind.any() and not np.asarray(actual[0])[blind].any()
