"""The TPU kernels over quantised pools: any numbers under NaN scales in everything that must not be read."""

import functools

import interpreter
import jax
import jax.numpy as jnp
import pytest
from interpreter import PLAIN, RACES
from nightly import NIGHTLY
from quantised_pools import (
    BF16,
    F32,
    JOINED,
    JOINED_BF16,
    LATENT,
    LATENT_BF16,
    NIBBLE_WRITES,
    NIBBLES,
    NIBBLES_BF16,
    WRITES,
    assert_written,
    check_attention,
    check_write,
    check_write_and_attention,
    stored,
)

import pallas_kernels
from pallas_kernels import testing, tpu
from pallas_kernels.common.quantization import FORMATS
from pallas_kernels.testing import Case

pytestmark = pytest.mark.timeout(240, method="thread")
# Lengths around the borders of blocks, rows that are empty or not in the step; odd groups and head_dims.
DECODE = {
    "int8": [
        Case((0, 129, 128, 300, 1, 127), (0, 1, 1, 1, 1, 0), 10, 2, 80, **F32),
        Case((255, 70), (1, 1), 4, 4, 128, window=100, sink_tokens=4, soft_cap=30.0, sinks=True, **BF16),
        Case((300, 5), (1, 1), 7, 1, 128, **{**F32, "block_size": 256}),
        # Latent rows, whose values end inside a register, or with one.
        Case((129, 0, 70), (1, 0, 1), 3, 1, 136, rank=72, window=100, **LATENT),
        Case((130, 5), (1, 1), 6, 1, 160, rank=128, **{**LATENT_BF16, "block_size": 256}),
        Case((129, 0, 70), (1, 0, 1), 6, 2, 80, rank=40, window=100, sinks=True, **JOINED),
        Case((130, 128), (1, 1), 5, 1, 192, rank=96, **{**JOINED_BF16, "stored_head_dim": 256}),
    ],
    "float8_e4m3fn": [
        Case((130, 128, 0), (1, 1, 0), 10, 2, 80, **F32),
        Case((130, 127), (1, 1), 7, 1, 128, rank=64, **JOINED),
        Case((130, 5), (1, 1), 6, 1, 160, rank=128, **LATENT),
    ],
    "float8_e5m2": [
        Case((130, 127), (1, 1), 4, 2, 128, **F32),
        Case((300, 5), (1, 1), 5, 1, 80, window=100, **BF16),
    ],
    "int4": [
        Case((129, 5), (1, 1), 2, 2, 128, rank=64, **NIBBLES),
        Case((0, 129, 128, 300, 1, 127), (0, 1, 1, 1, 1, 0), 4, 2, 192, rank=96, **NIBBLES),
        Case(
            (255, 70), (1, 1), 8, 4, 256, rank=128, window=100, sink_tokens=4, soft_cap=30.0, sinks=True, **NIBBLES_BF16
        ),
        Case((300, 5), (1, 1), 7, 1, 64, rank=32, **{**NIBBLES, "block_size": 256}),
        Case((129, 5), (1, 1), 4, 1, 512, rank=256, **{**NIBBLES, "stored_head_dim": 512}),  # Gemma's
        Case((131, 70), (1, 1), 6, 3, 192, rank=96, **NIBBLES),
    ],
    "k5v3": [
        Case((129, 5), (1, 1), 2, 2, 128, rank=64, **NIBBLES),
        Case((0, 129, 128, 300, 1, 127), (0, 1, 1, 1, 1, 0), 4, 2, 256, rank=128, **NIBBLES),
        Case((255, 70), (1, 1), 6, 3, 384, rank=192, window=100, **{**NIBBLES_BF16, "stored_head_dim": 512}),
        Case((300, 5), (1, 1), 7, 1, 128, rank=64, **{**NIBBLES, "block_size": 256}),
        Case((129, 5), (1, 1), 4, 1, 512, rank=256, **{**NIBBLES, "stored_head_dim": 512}),
    ],
}
MIXED = {
    "int8": [
        Case((300, 129, 40, 17), (150, 1, 40, 2), 4, 2, 80, packed=True, padding=3, **F32),
        Case((270, 20), (40, 3), 5, 1, 128, packed=True, window=90, sink_tokens=4, sinks=True, soft_cap=20.0, **BF16),
        Case((300, 20), (20, 3), 2, 1, 136, rank=72, packed=True, **LATENT),
        Case((270, 20, 129), (40, 3, 1), 3, 1, 160, rank=128, packed=True, padding=2, tree=True, **LATENT_BF16),
        Case((300, 129, 20), (20, 1, 3), 4, 2, 80, rank=40, packed=True, padding=2, **JOINED),
    ],
    "float8_e4m3fn": [
        Case((140, 20), (20, 3), 2, 1, 128, packed=True, **F32),
        Case((270, 20), (40, 3), 3, 1, 136, rank=72, packed=True, padding=2, **LATENT_BF16),
    ],
    "float8_e5m2": [
        Case((270, 20), (40, 3), 5, 1, 128, packed=True, window=90, sinks=True, **BF16),
        Case((270, 20), (40, 3), 5, 1, 128, rank=64, packed=True, window=90, **JOINED_BF16),
    ],
    "int4": [
        Case((300, 129, 40, 17), (150, 1, 40, 2), 4, 2, 256, rank=128, packed=True, padding=3, **NIBBLES),
        Case(
            (270, 20),
            (40, 3),
            5,
            1,
            192,
            rank=96,
            packed=True,
            window=90,
            sink_tokens=4,
            sinks=True,
            soft_cap=20.0,
            **NIBBLES_BF16,
        ),
    ],
    "k5v3": [
        Case((300, 129, 40, 17), (150, 1, 40, 2), 4, 2, 256, rank=128, packed=True, padding=3, **NIBBLES),
        Case((270, 20), (40, 3), 5, 1, 128, rank=64, packed=True, window=90, sink_tokens=4, **NIBBLES_BF16),
    ],
}


def in_a_mode(cases, *by_day):
    """By day the cases that are named by their kind and number, with races detected; by night all in both modes."""
    return pytest.mark.parametrize(
        ("kind", "case", "mode"),
        [
            pytest.param(kind, case, mode, id=f"{kind}-{case}-{name}")
            for kind, some in cases.items()
            for i, case in enumerate(some)
            for name, mode in (("plain", PLAIN), ("races", RACES))
            if NIGHTLY or (name == "races" and (kind, i) in by_day)
        ],
    )


@in_a_mode(DECODE, ("int8", 3), ("float8_e4m3fn", 0))
def test_decode_with_the_write_fused(kind, case, mode):
    check_write_and_attention(tpu, kind, case, mode)


@in_a_mode(MIXED, ("float8_e4m3fn", 0), ("int8", 4))
def test_mixed(kind, case, mode):
    steps = {"step_tokens": 128} if case.rank == 72 else {}  # the context then fills two steps, taken at once
    check_attention(tpu, kind, case, mode, **steps)


@in_a_mode(MIXED, ("int8", 4))
def test_mixed_with_the_write(kind, case, mode):
    """A row of one token is written by the kernel that reads it, the others before."""
    check_write_and_attention(tpu, kind, case, mode)


def test_a_lone_token_without_a_place_goes_nowhere():
    """Of a mixed step: rows that lost their block or are longer than their table, and a token that is not there."""
    case = Case((20, 130, 140, 256, 17), (3, 1, 1, 1, 1), 2, 1, 128, packed=True, **F32)
    (q, kv, tables, lengths, new), scale, _ = stored(case, "int8")
    k, v = interpreter.new_tokens(case, q)
    wild = tables.at[1, 1].set(10**9).at[2, 1].set(kv.shape[0])
    lengths = lengths.at[3].set(tables.shape[1] * 128 + 1)
    offsets = jnp.asarray([0, 3, 4, 5, 7], jnp.int32)  # the last one's is behind all tokens
    given = {"offsets": offsets, "kv_scale": scale}
    of_kind = functools.partial(tpu.write_and_attend, kind="int8")
    out, written = interpreter.run(of_kind, q, k, v, kv, wild, lengths, new, mode=PLAIN, **given)
    expected = pallas_kernels.write_kv(kv, k, v, wild, lengths, new, kind="int8", implementation="xla", **given)
    assert_written(written, expected)
    held = testing.decode(case, *expected, "int8")
    seen = pallas_kernels.reference.paged_attention(q, held, tables, lengths, new, offsets=offsets)
    testing.assert_close(out[:3], seen[:3])


@in_a_mode({"int8": WRITES, "int4": NIBBLE_WRITES, "k5v3": NIBBLE_WRITES}, ("int8", 0), ("int8", 3))
def test_write(kind, case, mode):
    check_write(tpu, kind, case, mode)


@pytest.mark.parametrize("kind", ["int8", "float8_e4m3fn", "int4", "k5v3"])
def test_latent_rows_of_a_kind_are_chosen(kind):
    arrays = {
        "kv": ((9, 1, 1, 128, 256), FORMATS[kind].storage_dtype),
        "kv_scale": ((9, 1, 1, 128, *FORMATS[kind].scale_axes(160, 128)), "float32"),
        "tables": ((2, 4), "int32"),
    }
    arguments = {name: jax.ShapeDtypeStruct(*x) for name, x in arrays.items()}
    arguments |= dict(kind=kind, rank=128, platform="tpu")
    q, k = (jax.ShapeDtypeStruct((2, 1, heads, 160), "bfloat16") for heads in (6, 1))
    chosen = [
        pallas_kernels.explain("paged_attention", q=q, **arguments),
        pallas_kernels.explain("write_kv", k=k, **arguments),
        pallas_kernels.explain("write_and_attend", q=q, k=k, **arguments),
    ]
    assert {x.implementation for x in chosen} == {"tpu" if FORMATS[kind].group_size is None else "xla"}


def test_joined_rows_of_several_heads_are_chosen():
    """By their scales: other rows of several heads, which have two each, are not read."""
    q, kv = (jax.ShapeDtypeStruct(*x) for x in (((2, 1, 4, 128), "bfloat16"), ((9, 1, 2, 128, 128), "int8")))
    joined, latent = (jax.ShapeDtypeStruct(x, "float32") for x in ((9, 2, 2, 128), (9, 1, 2, 128, 2)))
    tables = jax.ShapeDtypeStruct((2, 4), "int32")
    given = dict(q=q, kv=kv, tables=tables, kind="int8", rank=64, platform="tpu")
    for op in ("paged_attention", "write_and_attend"):
        assert pallas_kernels.explain(op, kv_scale=joined, **given).implementation == "tpu"
        assert "of one head, not of 2" in pallas_kernels.explain(op, kv_scale=latent, **given).reason
