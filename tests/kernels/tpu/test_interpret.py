"""The TPU kernels against the reference, on the interpreter. NaN in everything that must not be read."""

import dataclasses
import math

import interpreter
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from nightly import NIGHTLY

import pallas_kernels
from pallas_kernels import testing, tpu
from pallas_kernels.common.batch import bundle_call
from pallas_kernels.testing import Case
from pallas_kernels.tpu.step import tile_tokens

pytestmark = pytest.mark.timeout(240, method="thread")
BF16 = {"dtype": "bfloat16", "stored_head_dim": 128}
F32 = {"dtype": "float32", "stored_head_dim": 128}
LATENT = {"dtype": "bfloat16", "stored_head_dim": 256}
ONE = (1, 1, 1, 1, 1)
SHORT_AND_LONG = (0, 5, 20, 44, 45, 53, 100, 200), (0, 1, 1, 1, 1, 1, 1, 1)

# Lengths around the borders of blocks and steps, rows that are empty or not in the step, at the ends and between.
DECODE = [
    (Case((0, 37, 0, 64, 1, 17, 0), (0, 1, 0, 1, 1, 1, 0), block_size=8, **F32), 32),
    (Case((15, 16, 17, 54, 97), ONE, 10, 2, 128, 16, window=20, soft_cap=30.0, sinks=True, **BF16), 32),
    (Case((513, 9, 1023), (1, 0, 1), 8, 1, 128, 64, window=64, **BF16), 128),
    (Case((49, 96, 150), (1, 1, 1), 4, 4, 80, 48, sinks=True, **F32), 96),
    (Case((255, 256, 3), (1, 1, 1), 6, 2, 256, 128, dtype="bfloat16", soft_cap=50.0), 256),
    # A block is several pages; of the first tokens one in part.
    (Case((200, 130), (1, 1), 14, 2, 96, 256, scale=0.3, window=5, sink_tokens=33, **BF16), 64),
    (Case((0, 0), (0, 0), padding=1, **BF16), 64),
    (Case((70, 33), (1, 1), 5, 1, 128, 16, max_blocks=9, **BF16), None),
    # Latent rows: of more than a register's lanes, of which values fill one; an empty row, blocks of several pages.
    (Case((97, 0, 37, 64), (1, 0, 1, 1), 6, 1, 136, 16, rank=72, scale=0.1, window=50, sinks=True, **LATENT), 32),
    (Case((200, 130), (1, 1), 8, 1, 200, 128, rank=130, scale=0.1, soft_cap=20.0, **LATENT), 64),
    # Rows shorter than first tokens and window, as long, one longer, and much longer; first tokens that end inside a
    # page and at its edge, that take several pages, and more than a step has.
    (Case(*SHORT_AND_LONG, 2, 1, 64, 8, window=24, sink_tokens=5, **F32), 32),
    (Case(*SHORT_AND_LONG, 2, 1, 64, 8, window=24, sink_tokens=16, **F32), 32),
    (Case(*SHORT_AND_LONG, 5, 1, 80, 8, window=19, sink_tokens=20, **F32), 32),
    (Case((41, 60, 100, 200), (1, 1, 1, 1), 2, 1, 64, 8, window=1, sink_tokens=40, **F32), 32),
    (Case((15, 54, 97, 150), (1, 1, 0, 1), 10, 2, 128, 16, window=20, sink_tokens=4, soft_cap=30.0, **BF16), 32),
    (Case((97, 0, 37, 164), (1, 0, 1, 1), 6, 1, 136, 16, rank=72, scale=0.1, window=50, sink_tokens=3, **LATENT), 32),
    (Case((513, 9, 257, 256), (1, 1, 1, 1), 4, 1, 128, 16, **BF16), None),  # one head: segments of 256
    # Steps of unequally many pages, more than twice around the slots that there are.
    (Case((121, 300, 5, 0, 37), (1, 1, 1, 0, 1), 2, 1, 128, 8, **F32), 16),
    # Keys and values joined: rows of several heads, of one, and of more than a register's lanes.
    (Case((121, 300, 0, 37), (1, 1, 0, 1), 10, 2, 128, 16, rank=64, scale=0.1, window=200, sinks=True, **BF16), None),
    (Case((257, 256, 5), (1, 1, 1), 5, 1, 128, 16, rank=64, scale=0.1, **BF16), None),
    (
        Case(
            (121, 96, 5), (1, 1, 1), 3, 3, 256, 8, rank=96, scale=0.1, soft_cap=30.0, **{**F32, "stored_head_dim": 256}
        ),
        32,
    ),
    # Values of 128 and keys of 192 in one row.
    (Case((61, 33), (1, 1), 4, 2, 320, 16, rank=128, scale=0.1, **{**BF16, "stored_head_dim": 384}), None),
    # Keys that are the values, as a whole.
    (Case((97, 0, 37), (1, 0, 1), 6, 1, 128, 16, rank=128, scale=0.1, window=50, sinks=True, **BF16), 32),
]
# (new, length) pairs of PEERS' matrices and more; decode rows among them, alone, and none.
MIXED = [
    # One row's context fills a step of 64, worked on without a pause.
    (Case((37, 1, 0, 64, 140, 16, 17), (20, 1, 0, 1, 64, 2, 17), block_size=8, padding=2, **F32), 32),
    (
        Case(
            (0, 37, 5, 64, 140),
            (0, 1, 5, 3, 60),
            10,
            2,
            128,
            16,
            window=20,
            soft_cap=30.0,
            sinks=True,
            packed=True,
            **BF16,
        ),
        64,
    ),
    (Case((1328, 18, 463, 37), (1, 5, 129, 37), 8, 1, 128, 64, packed=True, padding=7, **BF16), None),
    (Case((3, 40, 0), (1, 1, 0), 4, 2, 128, 16, packed=True, padding=1, **BF16), None),
    (Case((180, 70), (150, 3), 2, 1, 256, 256, dtype="float32", packed=True, window=33, sinks=True), 64),
    # A window longer than some steps: all keys of one are seen by all queries, or by none.
    (Case((150, 40, 90), (33, 1, 40), 3, 1, 128, 16, packed=True, window=50, **BF16), 16),
    (
        Case((137, 5, 64), (20, 5, 1), 6, 1, 136, rank=72, scale=0.1, window=20, sink_tokens=17, packed=True, **LATENT),
        32,
    ),
    (
        Case((37, 1, 0, 64, 90, 117), (20, 1, 0, 1, 64, 17), block_size=8, padding=2, window=12, sink_tokens=5, **F32),
        32,
    ),
    (
        Case((37, 5, 164, 240), (1, 5, 3, 60), 10, 2, 128, 16, packed=True, window=20, sink_tokens=18, **BF16),
        64,
    ),
    (Case((150, 40, 190), (33, 1, 40), 3, 1, 128, 16, packed=True, window=50, sink_tokens=40, **BF16), 16),
    # Keys and values joined.
    (Case((150, 40, 0, 90), (33, 1, 0, 40), 10, 2, 128, 16, rank=64, scale=0.1, packed=True, sinks=True, **BF16), 64),
    (Case((97, 40), (20, 1), 6, 1, 128, 16, rank=128, scale=0.1, packed=True, window=50, sinks=True, **BF16), 32),
]

# What goes by a token's chunk, its tree or its span. Rows' first places in a chunk, their last, and one between; trees
# under a window or in chunks, where depth is what counts; one token more than a word has bits.
SIGHTS_OF_ONE = [
    (Case((97, 96, 0, 300), (1, 1, 0, 1), 2, 1, 128, 8, chunk=24, **F32), 32),
    (Case((33, 32, 150), (1, 1, 1), 4, 2, 128, 16, chunk=32, sinks=True, **BF16), 64),
    (Case((97, 48), (1, 1), 6, 1, 136, 16, rank=72, scale=0.1, chunk=32, **LATENT), 32),
]
SIGHTS = [
    (Case((50, 5), (7, 3), 2, 1, 128, 8, chunk=12, tree=True, packed=True, padding=1, **F32), 16),
    (Case((90, 37, 5, 40), (64, 1, 3, 20), 2, 1, 128, 8, chunk=24, packed=True, padding=2, **F32), 32),
    (Case((85, 20, 64), (33, 3, 1), 5, 1, 128, 16, tree=True, packed=True, **BF16), 32),
    (Case((100, 9), (64, 2), 2, 1, 128, 16, tree=True, window=5, sinks=True, **BF16), 64),
    (Case((60, 9, 90), (40, 3, 1), 2, 1, 128, 8, spans=True, packed=True, padding=2, **F32), 16),
    (Case((60, 90), (40, 1), 2, 1, 128, 8, spans=True, window=3, **F32), 16),
    (Case((60, 90), (20, 3), 6, 1, 136, 16, rank=72, scale=0.1, spans=True, chunk=32, **LATENT), 32),
    # A tree whose context ends among the first tokens.
    (Case((90, 12), (20, 10), 2, 1, 128, 8, tree=True, packed=True, padding=1, window=6, sink_tokens=5, **F32), 16),
    (Case((100, 9), (64, 9), 2, 1, 128, 16, tree=True, window=1, sink_tokens=4, sinks=True, **BF16), 64),
    (Case((160, 9, 90), (40, 3, 1), 7, 1, 128, 8, spans=True, window=30, sink_tokens=13, **F32), 32),
]


def in_a_mode(cases, *by_day):
    """By day those cases, each in one of the two modes; by night all in both."""
    chosen = [
        pytest.param(*case, mode, id=f"{case[0]}-{name}")
        for i, case in enumerate(cases)
        for name, mode in interpreter.MODES.items()
        if NIGHTLY or (i in by_day and (name == "races") == (i % 2 == 0))
    ]
    return pytest.mark.parametrize(("case", "step_tokens", "mode"), chosen)


def steps(step_tokens):
    return {} if step_tokens is None else {"step_tokens": step_tokens}


@in_a_mode(DECODE, 0, 5, 8, 17, 18)
def test_decode_with_the_write_fused(case, step_tokens, mode):
    interpreter.check_write_and_attention(tpu, case, mode, **steps(step_tokens))


@in_a_mode(DECODE[:2], 1)
def test_decode(case, step_tokens, mode):
    interpreter.check_attention(tpu, case, mode, **steps(step_tokens))


@in_a_mode(MIXED, 6)
def test_mixed(case, step_tokens, mode):
    interpreter.check_attention(tpu, case, mode, **steps(step_tokens))


@pytest.mark.timeout(120, method="thread")
@pytest.mark.skipif(not NIGHTLY, reason="the kernel has nothing to do")
@pytest.mark.parametrize("packed", [True, False])
def test_decode_rows_only_and_a_window(packed):
    """A step with room for many tokens a row where none has more than one: the prefill kernel has nothing to do."""
    case = Case((150, 33), (1, 1), 2, 1, 128, 16, packed=packed, padding=1, window=32, **BF16)
    interpreter.check_attention(tpu, case, interpreter.PLAIN, step_tokens=32)


@in_a_mode(SIGHTS_OF_ONE, 0)
def test_decode_in_chunks_with_the_write_fused(case, step_tokens, mode):
    interpreter.check_write_and_attention(tpu, case, mode, **steps(step_tokens))


@in_a_mode(SIGHTS, 0)
def test_what_goes_by_the_token(case, step_tokens, mode):
    interpreter.check_attention(tpu, case, mode, **steps(step_tokens))


def test_write_and_attend_of_a_mixed_step():
    case, step_tokens = MIXED[1]
    interpreter.check_write_and_attention(tpu, case, interpreter.PLAIN, **steps(step_tokens))


def test_block_ids_are_not_trusted():
    """Unused table entries may be anything, and a write to a block that is not there goes nowhere."""
    case = Case((33, 40), (1, 1), block_size=16, max_blocks=5, **F32)
    q, kv, tables, lengths, new = testing.make_inputs(case)
    k, v = jax.random.normal(jax.random.key(0), (2, 2, 1, 2, 64))
    wild = tables.at[:, 3:].set(jnp.asarray([10**9, -5])).at[1, 2].set(kv.shape[0])
    out, written = interpreter.run(tpu.write_and_attend, q, k, v, kv, wild, lengths, new, mode=interpreter.PLAIN)
    expected = pallas_kernels.write_kv(kv, k, v, tables, lengths, new, implementation="reference")
    lost = tables[1, 2]  # row 1's last block, which its table lost
    np.testing.assert_array_equal(interpreter.bits(written), interpreter.bits(expected.at[lost].set(kv[lost])))
    testing.assert_close(out[:1], pallas_kernels.reference.paged_attention(q, expected, tables, lengths, new)[:1])


def test_offsets_may_leave_gaps():
    case = Case((20, 33, 5, 40), (3, 17, 0, 1), 2, 1, 128, 16, packed=True, padding=19, **BF16)
    inputs = testing.make_inputs(case)
    offsets = jnp.asarray([2, 9, 28, 30], jnp.int32)
    out, lse = interpreter.run(
        tpu.paged_attention, *inputs, mode=interpreter.PLAIN, offsets=offsets, return_lse=True, step_tokens=16
    )
    expected, expected_lse = testing.expected(case, inputs, offsets=offsets, return_lse=True)
    testing.assert_close(out, expected)
    testing.assert_close(lse, expected_lse, dtype=case.dtype)
    assert not np.asarray(out[5:9]).any() and not np.asarray(out[31:]).any() and np.asarray(out[30]).any()


def test_what_is_wrong_with_a_row_stays_in_it():
    """A mixed step with a row longer than its table, and block ids that are none: the other rows do not notice."""
    case = Case((20, 33, 40, 64), (3, 17, 1, 1), 2, 1, 128, 16, packed=True, padding=1, **BF16)
    q, kv, tables, lengths, new = testing.make_inputs(case)
    wild = tables.at[1].set(jnp.asarray([10**9, -3, 5, 5])).at[2].set(-(2**31)).at[0, 2:].set(10**9)
    lengths = lengths.at[3].set(500)
    kv = jnp.where(jnp.isnan(kv), 0, kv)
    out = interpreter.run(tpu.paged_attention, q, kv, wild, lengths, new, mode=interpreter.PLAIN, step_tokens=16)
    testing.assert_close(out[:3], testing.expected(case, testing.make_inputs(case))[:3])
    assert out.shape == q.shape


def test_no_tokens_at_all():
    case = Case((20, 33), (0, 0), 2, 1, 128, 16, packed=True, **BF16)
    inputs = testing.make_inputs(case)
    assert inputs.q.shape[0] == 0
    out, lse = testing.run(tpu.paged_attention, *inputs, return_lse=True)
    assert out.shape == (0, 2, 128) and lse.shape == (0, 2)


def test_nan_stays_in_its_row():
    case, step_tokens = DECODE[0]
    q, kv, tables, lengths, new = testing.make_inputs(case)
    clean = interpreter.run(
        tpu.paged_attention, q, kv, tables, lengths, new, mode=interpreter.PLAIN, **steps(step_tokens)
    )
    kv = kv.at[tables[3]].set(jnp.nan)
    dirty = interpreter.run(
        tpu.paged_attention, q, kv, tables, lengths, new, mode=interpreter.PLAIN, **steps(step_tokens)
    )
    assert np.isnan(dirty[3]).all()
    others = np.arange(len(case.lengths)) != 3
    np.testing.assert_array_equal(np.asarray(clean)[others], np.asarray(dirty)[others])


def test_a_window_reads_no_block_outside_it():
    """Blocks that slid out of the window may be freed, and be NaN or another row's."""
    case = Case((200, 64), (1, 20), window=20, block_size=16, packed=True, **F32)
    inputs = testing.make_inputs(case)
    expected = testing.expected(case, inputs)
    tables = inputs.tables.at[0, :11].set(0).at[1, 0].set(0)
    kv = inputs.kv.at[0].set(jnp.nan)
    out = interpreter.run(
        tpu.paged_attention, inputs.q, kv, tables, *inputs[3:], mode=interpreter.PLAIN, window=20, step_tokens=64
    )
    testing.assert_close(out, expected)


def test_scale_and_cap_may_be_traced_and_the_front_door_agrees():
    case = Case((20, 37), (1, 1), block_size=16, soft_cap=30.0, scale=0.2, **F32)
    inputs = testing.make_inputs(case)

    @jax.jit
    def attend(inputs, scale, soft_cap):
        return pallas_kernels.paged_attention(*inputs, scale=scale, soft_cap=soft_cap, implementation="tpu")

    with pltpu.force_tpu_interpret_mode(interpreter.PLAIN):
        out = attend(inputs, jnp.float32(0.2), jnp.float32(30.0))
    testing.assert_close(out, testing.expected(case, inputs))


def shape(*axes, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(axes, dtype)


@pytest.mark.parametrize(
    ("changes", "way_out"),
    [
        ({"kv": shape(9, 2, 2, 16, 64)}, "CacheConfig(head_dim_multiple=128)"),
        ({"kv": shape(9, 2, 2, 8, 128)}, "choose 16"),
        ({"kv": shape(9, 2, 2, 16, 128, dtype="float16")}, "bfloat16 or float32"),
        ({"q": shape(2, 1, 4, 64, dtype="float32")}, "cast q"),
        ({"q": shape(256, 1, 4, 64), "tables": shape(256, 8192, dtype="int32")}, "block_size=256"),
        ({"mask": shape(2, 1, 32, dtype="bool")}, "mask"),
        ({"q": shape(2, 1, 2048, 64), "kv": shape(9, 2, 2048, 16, 128)}, "shard the heads"),
        ({"q": shape(131072, 2, 64), "tables": shape(61, 4096, dtype="int32")}, "block_size=32"),
        ({"q": shape(9_000_000, 16, 64)}, "send fewer"),
        ({"kv_scale": shape(9, 2, 2, 16, dtype="float32")}, "kv_scale"),
        (
            {"kv": shape(9, 1, 2, 128, 128, dtype="int8"), "kv_scale": shape(9, 1, 2, 128, 2, dtype="float32")}
            | {"q": shape(2, 1, 4, 128), "kind": "int8", "rank": 64},
            "of one head, not of 2",
        ),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_refusals_name_the_way_out(changes, way_out):
    arguments = {"q": shape(2, 1, 4, 64), "kv": shape(9, 2, 2, 16, 128), "tables": shape(2, 4, dtype="int32")}
    assert tpu.unsupported("paged_attention", bundle_call(**arguments)) is None
    assert way_out in tpu.unsupported("paged_attention", bundle_call(**arguments | changes))
    choice = pallas_kernels.explain(platform="tpu", **arguments | changes)
    assert choice.implementation == "xla" and way_out in choice.reason
    with pytest.raises(NotImplementedError, match="TPU"):
        pallas_kernels.explain(implementation="tpu", **arguments | changes)


def test_a_write_stays_in_place_where_attention_is_refused():
    """XLA's own scatter of many tokens would copy the pool on a TPU."""
    arguments = {"kv": shape(9, 2, 2, 8, 128, dtype="float16"), "tables": shape(256, 8192, dtype="int32")}
    assert pallas_kernels.explain("paged_attention", platform="tpu", **arguments).implementation == "xla"
    assert pallas_kernels.explain("write_kv", platform="tpu", **arguments).implementation == "tpu"


@pytest.mark.parametrize(
    ("heads", "num_kv_heads", "head_dim", "tokens"),
    [(32, 8, 128, 128), (32, 4, 128, 128), (28, 4, 128, 128), (32, 2, 128, 128), (64, 1, 128, 64), (8, 1, 128, 256),
     (4, 1, 128, 256), (2, 2, 128, 512), (16, 1, 640, 128), (128, 1, 640, 16)],
)  # fmt: skip
def test_tiles_are_cut_by_all_heads(heads, num_kv_heads, head_dim, tokens):
    """Groups of 8 with 4 KV heads have as many products in a loop as groups of 4 with 8. Latent ones fill memory."""
    parts = 1 if head_dim > 128 else 2
    kv = jax.ShapeDtypeStruct((99, parts, num_kv_heads, 16, head_dim), jnp.bfloat16)
    tables = jax.ShapeDtypeStruct((2, 64), jnp.int32)
    assert tile_tokens(1024, heads, kv, tables, kv.dtype) == tokens
    small = max(min(tokens, 128), 512 // (heads // num_kv_heads))
    assert tile_tokens(1024, heads, kv, tables, kv.dtype, deterministic=True) == (small if heads < 128 else tokens)
    assert tile_tokens(5, heads, kv, tables, kv.dtype) == max(128 // math.gcd(heads // num_kv_heads, 128), 16)


@pytest.mark.skipif(not NIGHTLY, reason="every case has its blocks in an order of its own")
def test_block_order_does_not_matter():
    """The same tokens in other physical blocks give the same bits."""
    case = dataclasses.replace(DECODE[1][0], window=None)
    inputs = testing.make_inputs(case)
    order = np.random.default_rng(5).permutation(inputs.kv.shape[0])
    moved = inputs._replace(kv=inputs.kv[np.argsort(order)], tables=jnp.asarray(order, jnp.int32)[inputs.tables])
    a, b = (interpreter.run(tpu.paged_attention, *x, mode=interpreter.PLAIN, step_tokens=32) for x in (inputs, moved))
    np.testing.assert_array_equal(interpreter.bits(a), interpreter.bits(b))
