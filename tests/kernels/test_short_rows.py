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
from pallas_kernels.xla import tile_sizes

EDGES = (5, tile_sizes.find_sizes().queries)  # of blocks, and of tiles of queries
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


@pytest.mark.parametrize("implementation", [None, "reference"])
def test_a_step_but_to_its_newest_tokens(implementation):
    """Where no kernel does both, what is written is all, and rows are read as if they were shorter."""
    case = Case((0, 1, 19, 20, 21, 40), (0, 1, 3, 1, 21, 1), block_size=8, packed=True, window=9)
    q, kv, *rest = testing.make_inputs(case)
    k, v = np.random.default_rng(1).standard_normal((2, q.shape[0], *kv.shape[2:3], 64), np.float32)
    kv = jnp.where(jnp.isnan(kv), 0, kv)
    tables, lengths, new = rest
    named = dict(zip(("tables", "lengths", "new"), rest, strict=True))
    options = dict(window=9, return_lse=True, implementation=implementation)
    (out, lse), written = pallas_kernels.write_and_attend(q, k, v, kv, **named, residual_length=20, **options)
    np.testing.assert_array_equal(written, pallas_kernels.write_kv(kv, k, v, *rest))
    shorter = jnp.maximum(lengths - 20, 0)
    wanted, wanted_lse = pallas_kernels.paged_attention(q, written, tables, shorter, new, **options)
    np.testing.assert_array_equal(out, wanted)
    np.testing.assert_array_equal(lse, wanted_lse)
    read = pallas_kernels.paged_attention(q, written, *rest, residual_length=20, **options)
    for got, wanted in zip(read, (out, lse), strict=True):
        np.testing.assert_array_equal(got, wanted)
    by_definition = pallas_kernels.reference.paged_attention(q, written, *rest, residual_length=20, window=9)
    testing.assert_close(out, by_definition)
    told = pallas_kernels.explain("write_and_attend", q=q, k=k, v=v, kv=kv, **named, residual_length=20, platform="tpu")
    assert told.implementation == "xla" and "residual_length" not in told.reason  # for float32 of 64 numbers


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"residual_length": 0}, "an integer from 1 to 2147483647, not 0: None means"),
        ({"residual_length": True}, "must be an integer"),
        ({"residual_length": 2.0}, "must be an integer"),
        ({"residual_length": 4, "chunk": 8}, "combined with chunk: leave one out"),
        ({"residual_length": 4, "causal": False}, "combined with causal=False"),
    ],
)
def test_what_a_residual_length_cannot_be(options, said):
    q, kv, *rest = testing.make_inputs(Case((5,), (1,)))
    k = jnp.zeros((1, 1, kv.shape[2], q.shape[-1]), q.dtype)
    with pytest.raises(ValueError, match=said):
        pallas_kernels.write_and_attend(q, k, k, kv, *rest, **options)
    with pytest.raises(ValueError, match=said):
        pallas_kernels.paged_attention(q, kv, *rest, **options)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_kernels_read_all_but_the_newest_tokens(platform):
    """For them rows end earlier, so none has to know of it."""
    q, kv = (jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in ((2, 1, 8, 128), (9, 2, 2, 64, 128)))
    given = dict(q=q, kv=kv, tables=jax.ShapeDtypeStruct((2, 4), jnp.int32), platform=platform)
    choices = [pallas_kernels.explain(**given, **options) for options in ({}, {"residual_length": 20})]
    assert choices[0] == choices[1] and choices[0].implementation != "xla"
