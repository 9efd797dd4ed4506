"""The TPU kernels over quantised pools: any numbers under NaN scales in everything that must not be read."""

import functools

import interpreter
import jax
import numpy as np
import pytest
from interpreter import PLAIN, RACES
from jax.experimental import pallas as pl
from nightly import NIGHTLY
from planting import Plant
from tpu_mistakes import SOURCES, broken

import pallas_kernels
from pallas_kernels import testing, tpu
from pallas_kernels.common.quantization import FORMATS, pack_nibbles, unpack_nibbles
from pallas_kernels.testing import Case
from pallas_kernels.tpu import nibbles

pytestmark = pytest.mark.timeout(240, method="thread")
F32 = {"dtype": "float32", "stored_head_dim": 128, "block_size": 128}
BF16 = {**F32, "dtype": "bfloat16"}
LATENT = {**F32, "stored_head_dim": 256, "scale": 0.1}
LATENT_BF16 = {**LATENT, "dtype": "bfloat16"}
# Keys and values joined: of several heads or one, in one register's lanes or two, with padding behind them or without.
JOINED = {**F32, "scale": 0.1, "joined": True}
JOINED_BF16 = {**JOINED, "dtype": "bfloat16"}
# In four bits: several groups of entries or one, pairs of heads or not, with padding behind them or without.
NIBBLES = {**JOINED, "stored_head_dim": 256}
NIBBLES_BF16 = {**NIBBLES, "dtype": "bfloat16"}
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
}
WRITES = [
    Case((128, 0, 129, 255, 300, 17, 127), (128, 0, 4, 127, 170, 1, 0), 2, 2, 128, packed=True, padding=3, **BF16),
    Case((256, 31), (1, 3), 3, 3, 96, padding=1, **F32),
    Case((131, 0, 128), (5, 0, 128), 2, 1, 136, rank=72, packed=True, padding=3, **LATENT),
    Case((131, 0, 128), (5, 0, 128), 6, 3, 80, rank=40, packed=True, padding=3, **JOINED),
]

NIBBLE_WRITES = [Case((131, 0, 128), (5, 0, 128), 6, 2, 256, rank=128, packed=True, padding=3, **NIBBLES)]


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


def stored(case, kind):
    inputs, scale, held = testing.quantise(case, testing.make_inputs(case), kind, FORMATS[kind].scale_dtype)
    return inputs, scale, held


def check(case, out, lse, held, **options):
    wanted, wanted_lse = testing.expected(case, held, return_lse=True, **options)
    testing.assert_close(out, wanted)
    testing.assert_close(lse, wanted_lse, dtype=case.dtype)


def assert_written(got, wanted):
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == b.dtype
        a, b = (np.asarray(x.astype("float32") if x.dtype == "bfloat16" else x) for x in (a, b))
        np.testing.assert_array_equal(a, b)  # a NaN equals a NaN


def check_decode(tpu, kind, case, mode):
    (q, kv, *rest), scale, _ = stored(case, kind)
    k, v = interpreter.new_tokens(case, q)
    nan = np.full_like(k, np.nan)  # what attends before it writes is caught
    kv, scale = interpreter.write_kv(
        kv, nan, None if v is None else nan, *rest, kv_scale=scale, kind=kind, rank=case.rank
    )
    (out, lse), written = interpreter.run(
        functools.partial(tpu.write_and_attend, kind=kind), q, k, v, kv, *rest, mode=mode,
        **testing.make_options(case), kv_scale=scale, return_lse=True,
    )  # fmt: skip
    expected = interpreter.write_kv(kv, k, v, *rest, kv_scale=scale, kind=kind, rank=case.rank)
    assert_written(written, expected)
    held = testing.decode(case, *expected, kind)
    check(case, out, lse, testing.Inputs(q, held, *rest))


def check_attention(tpu, kind, case, mode, **options):
    inputs, scale, held = stored(case, kind)
    # With the LSE in one mode and without it in the other, where the kernel sums the weights in another way.
    wanted = not mode.detect_races
    result = interpreter.run(
        functools.partial(tpu.paged_attention, kind=kind), *inputs, mode=mode, **testing.make_options(case),
        kv_scale=scale, return_lse=wanted, **options,
    )  # fmt: skip
    out, lse = result if wanted else (result, testing.expected(case, held, return_lse=True)[1])
    check(case, out, lse, held)


def check_write(tpu, kind, case, mode):
    inputs, scale, _ = stored(case, kind)
    k, v = interpreter.new_tokens(case, inputs.q)
    valid = pallas_kernels.locate(k.shape[:-2], inputs.lengths, inputs.new).valid
    valid = np.asarray(valid)[..., None, None]
    k, v = (None if x is None else np.where(valid, x, np.asarray(np.nan, x.dtype)) for x in (k, v))
    k[(0,) * (k.ndim - 1) + (-1,)] = np.nan  # then all of that token is
    arguments = (inputs.kv, k, v, *inputs[2:])
    options = {"kind": kind, "rank": case.rank}
    written = interpreter.run(functools.partial(tpu.write_kv, **options), *arguments, mode=mode, kv_scale=scale)
    assert_written(written, interpreter.write_kv(*arguments, kv_scale=scale, **options))


@in_a_mode(DECODE, ("int8", 3), ("float8_e4m3fn", 0))
def test_decode_with_the_write_fused(kind, case, mode):
    check_decode(tpu, kind, case, mode)


@in_a_mode(MIXED, ("float8_e4m3fn", 0), ("int8", 4))
def test_mixed(kind, case, mode):
    steps = {"step_tokens": 128} if case.rank == 72 else {}  # the context then fills two steps, taken at once
    check_attention(tpu, kind, case, mode, **steps)


@in_a_mode({"int8": WRITES, "int4": NIBBLE_WRITES}, ("int8", 0), ("int8", 3))
def test_write(kind, case, mode):
    check_write(tpu, kind, case, mode)


def check_float_decode(tpu, _, case, mode):
    check_decode(tpu, "float8_e4m3fn", case, mode)


def check_nibble_decode(tpu, _, case, mode):
    check_decode(tpu, "int4", case, mode)


def check_nibble_attention(tpu, _, case, mode):
    check_attention(tpu, "int4", case, mode)


def check_nibble_write(tpu, _, case, mode):
    check_write(tpu, "int4", case, mode)


def check_float_attention(tpu, _, case, mode):
    check_attention(tpu, "float8_e5m2", case, mode)


SMALL_DECODE = Case((129, 5), (1, 1), 2, 2, 128, **F32)
SMALL_LATENT = Case((129, 5), (1, 1), 2, 1, 136, rank=72, **LATENT)
SMALL_LATENT_PREFILL = Case((300, 9), (20, 4), 2, 1, 136, rank=72, packed=True, **LATENT)
SMALL_JOINED = Case((129, 5), (1, 1), 4, 2, 128, rank=64, **JOINED)
SMALL_JOINED_PREFILL = Case((300, 9), (20, 4), 4, 2, 128, rank=64, packed=True, **JOINED)
SMALL_NIBBLES = Case((129, 5), (1, 1), 4, 2, 128, rank=64, **NIBBLES)
SMALL_NIBBLES_PREFILL = Case((300, 9), (20, 4), 4, 2, 128, rank=64, packed=True, **NIBBLES)
SMALL_PREFILL = Case((300, 9), (20, 4), 2, 2, 128, packed=True, **F32)
# name: (what to run, on which case, what is planted)
CONTROLS = {
    "scales not awaited": (
        check_decode,
        SMALL_DECODE,
        Plant("_kernel", "await_pages(buffers, slot, count)", "await_pages(buffers[:1], slot, count)"),
    ),
    "the scale of another token": (
        check_decode,
        SMALL_DECODE,
        Plant(
            "read_scales",
            "jnp.concatenate([buffer[page, part, pl.ds(head, 1)] for page in range(buffer.shape[0])], axis=1)",
            "jnp.concatenate([buffer[page, part, pl.ds(head, 1)] for page in range(buffer.shape[0])], axis=1)[:, ::-1]",
        ),
    ),
    "the scale of another head": (
        check_decode,
        SMALL_DECODE,
        Plant("read_scales", "pl.ds(head, 1)", "pl.ds(0, 1)"),
    ),
    "K's scales for V's": (
        check_decode,
        SMALL_DECODE,
        Plant("read_scales", "line(1, head)", "line(0, head)"),
    ),
    "scales that nobody sees": (
        check_decode,
        SMALL_DECODE,
        Plant(
            "read_scales",
            "stored.format.hide_bad_scales(line(0, head), line(1, head))",
            "(line(0, head), line(1, head))",
        ),
    ),
    "a new scale in another place": (
        check_decode,
        SMALL_DECODE,
        Plant("_insert", "inside - top", "(inside if old.ndim == 3 else 0) + inside - top"),
    ),
    "prefill: scales not awaited": (
        check_attention,
        SMALL_PREFILL,
        Plant("_kernel", "await_pages(buffers, slot, coming)", "await_pages(buffers[:1], slot, coming)"),
    ),
    "prefill: the scale of another head": (
        check_attention,
        SMALL_PREFILL,
        Plant("read_scales", "pl.ds(head, 1)", "pl.ds(0, 1)"),
    ),
    "prefill: scales that nobody sees": (
        check_attention,
        SMALL_PREFILL,
        Plant(
            "read_scales",
            "stored.format.hide_bad_scales(line(0, head), line(1, head))",
            "(line(0, head), line(1, head))",
        ),
    ),
    "float8: values that are not finite": (
        check_float_decode,
        SMALL_DECODE,
        Plant("widen", "_finite(stored, kind) if which == 1 else stored", "stored"),
    ),
    "float8: what is finite is another number": (
        check_float_decode,
        SMALL_DECODE,
        Plant("_clear_not_finite", "128 - least", "129 - least"),
    ),
    "float8, prefill: values that are not finite": (
        check_float_attention,
        SMALL_PREFILL,
        Plant("widen", "_finite(stored, kind) if which == 1 else stored", "stored"),
    ),
    "write: only part of what is new": (
        check_write,
        WRITES[0],
        Plant("_kernel", "ends[entry] > first", "ends[entry] > first + 1"),
    ),
    "latent: scales not awaited": (
        check_decode,
        SMALL_LATENT,
        Plant("_kernel", "await_pages(buffers, slot, count)", "await_pages(buffers[:1], slot, count)"),
    ),
    "latent: the scale of the other part": (
        check_decode,
        SMALL_LATENT,
        Plant("read_scales", "line(0, 1)", "line(0, 0)"),
    ),
    "latent: the scale of another token": (
        check_decode,
        SMALL_LATENT,
        Plant(
            "read_scales",
            "jnp.concatenate([buffer[page, part, pl.ds(head, 1)] for page in range(buffer.shape[0])], axis=1)",
            "jnp.concatenate([buffer[page, part, pl.ds(head, 1)] for page in range(buffer.shape[0])], axis=1)[:, ::-1]",
        ),
    ),
    "latent: values without their scale": (
        check_decode,
        SMALL_LATENT,
        Plant("_attend", "weights * value_scales", "weights"),
    ),
    "latent: scales that nobody sees": (
        check_decode,
        SMALL_LATENT,
        Plant(
            "read_scales",
            "keys, values = stored.format.hide_bad_scales(line(0, 0), line(0, 0))",
            "keys = values = line(0, 0)",
        ),
    ),
    "latent: values in both products": (
        check_decode,
        SMALL_LATENT,
        Plant("queries_by_scale", "rank - below", "0"),
    ),
    "latent: the others in both products": (
        check_decode,
        SMALL_LATENT,
        Plant("queries_by_scale", "values[2] < rank", "values[2] < LANES"),
    ),
    "latent: a new token's scales swapped": (
        check_decode,
        SMALL_LATENT,
        Plant(
            "_encode",
            "[jnp.broadcast_to(x[..., None], (*x.shape, LANES)) for x in scales]",
            "[jnp.broadcast_to(x[..., None], (*x.shape, LANES)) for x in scales[::-1]]",
        ),
    ),
    "latent, prefill: scales not awaited": (
        check_attention,
        SMALL_LATENT_PREFILL,
        Plant("_kernel", "await_pages(buffers, slot, coming)", "await_pages(buffers[:1], slot, coming)"),
    ),
    "latent, prefill: the scale of the other part": (
        check_attention,
        SMALL_LATENT_PREFILL,
        Plant("read_scales", "line(0, 1)", "line(0, 0)"),
    ),
    "latent, prefill: values without their scale": (
        check_attention,
        SMALL_LATENT_PREFILL,
        Plant(
            "_attend",
            "widen(values, stored.format, jnp.float32, 1).T * scales",
            "widen(values, stored.format, jnp.float32, 1).T",
        ),
    ),
    "latent, write: a NaN in one part alone": (
        check_write,
        WRITES[2],
        Plant("quantize", "values + others", "values"),
    ),
    "latent, write: one part's scale for both": (
        check_write,
        WRITES[2],
        Plant("quantize", "jnp.where(nan, jnp.nan, scale)", "jnp.where(nan, jnp.nan, values)"),
    ),
    "joined: K's scales for V's": (
        check_decode,
        SMALL_JOINED,
        Plant("read_scales", "line(1, head)", "line(0, head)"),
    ),
    "joined: a new token's scales swapped": (
        check_decode,
        SMALL_JOINED,
        Plant("quantize", "[others, values]", "[values, others]"),
    ),
    "joined: a new token's scales of another head": (
        check_decode,
        SMALL_JOINED,
        Plant(
            "_encode",
            "jnp.concatenate(wide, axis=1 if stored.is_packed else 2)",
            "jnp.concatenate(wide, axis=1)[:, :, ::-1]",
        ),
    ),
    "joined: one scale for a new row": (
        check_decode,
        SMALL_JOINED,
        Plant(
            "quantize",
            "lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1) < rank",
            "lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1) < 128",
        ),
    ),
    "joined, prefill: K's scales for V's": (
        check_attention,
        SMALL_JOINED_PREFILL,
        Plant("read_scales", "line(1, head)", "line(0, head)"),
    ),
    "joined, write: scales swapped": (
        check_write,
        WRITES[3],
        Plant("quantize", "[others, values]", "[values, others]"),
    ),
    "joined, write: both scales in one place": (
        check_write,
        WRITES[3],
        Plant("_kernel", "of_scales[slot, part, :, these]", "of_scales[slot, 0, :, these]"),
    ),
    "int4: values read as keys": (
        check_nibble_decode,
        SMALL_NIBBLES,
        Plant("widen_half", "(-3, 5) if which == 1 else (1, 9)", "(-3, 5)"),
    ),
    "int4: tokens taken as they lie": (
        check_nibble_decode,
        SMALL_NIBBLES,
        Plant("decode:_attend", "nibbles.place_tokens(place) if by_group else place", "place"),
    ),
    "int4: scales as they lie": (
        check_nibble_decode,
        SMALL_NIBBLES,
        Plant(
            "_order_lanes",
            "place_tokens(lax.broadcasted_iota(jnp.int32, x.shape, 1))",
            "lax.broadcasted_iota(jnp.int32, x.shape, 1)",
        ),
    ),
    "int4: the scale of another group": (
        check_nibble_decode,
        SMALL_NIBBLES,
        Plant("spread_lines", "(head + i) * groups + g", "(head + i) * groups"),
    ),
    "int4: the lanes of another group": (
        check_nibble_decode,
        SMALL_NIBBLES,
        Plant("pick_lanes", "(g + 1) * size", "(g + 1) * size + 1"),
    ),
    "int4: scales that nobody sees": (
        check_nibble_decode,
        SMALL_NIBBLES,
        Plant("read_page_scales", "stored.format.hide_bad_scales(lines(0), lines(1))", "(lines(0), lines(1))"),
    ),
    "int4: a new token's keys for its values": (
        check_nibble_decode,
        SMALL_NIBBLES,
        Plant("pack_codes", "((keys & 15) << 4) | (values & 15)", "((values & 15) << 4) | (keys & 15)"),
    ),
    "int4: the first of the scales tried": (
        check_nibble_decode,
        SMALL_NIBBLES,
        Plant("encode_groups", "lost < least", "lost < 0"),
    ),
    "int4, prefill: tokens taken as they lie": (
        check_nibble_attention,
        SMALL_NIBBLES_PREFILL,
        Plant("prefill:_attend", "nibbles.place_tokens(place) if by_group else place", "place"),
    ),
    "int4, prefill: the scale of another head": (
        check_nibble_attention,
        SMALL_NIBBLES_PREFILL,
        Plant("spread_scales", "head * groups + g", "g"),
    ),
    "int4, prefill: K's scales for V's": (
        check_nibble_attention,
        SMALL_NIBBLES_PREFILL,
        Plant("_attend", "scale_numbers(values, part, head, 1)", "scale_numbers(values, part, head, 0)"),
    ),
    "int4, write: scales of one head for all": (
        check_nibble_write,
        NIBBLE_WRITES[0],
        Plant("write:_kernel", "x[head : head + 1]", "x[:1]"),
    ),
}


@pytest.mark.parametrize(
    "control",
    CONTROLS if NIGHTLY else ["joined: a new token's scales of another head", "float8: values that are not finite"],
)
def test_control(control, tmp_path, monkeypatch):
    check, case, *plants = CONTROLS[control]
    with pytest.raises((AssertionError, jax.errors.JaxRuntimeError)):
        check(broken(tmp_path, monkeypatch, *plants), "int8", case, PLAIN)


def test_every_mistake_can_be_made():
    for name, (_, _, *plants) in CONTROLS.items():
        assert SOURCES.broken(*plants), name


def test_a_kernel_encodes_four_bits_as_xla_does():
    """Of numbers of all sizes, zeros alone, and a NaN: the same codes under the same scales."""
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((8, 2, 2, 96)) * 10.0 ** rng.integers(-9, 9, (8, 2, 2, 1))).astype(np.float32)
    x[0, 0, 0, 32:64], x[1, 1, 1, 5] = 0, np.nan
    codes, scales = jax.jit(lambda x: nibbles.encode_groups(x, FORMATS["int4"], 3))(x)
    stored, scale = jax.jit(FORMATS["int4"].encode)(x)
    both = nibbles.pack_codes(codes[:, :1], codes[:, 1:]).astype(np.uint8)
    np.testing.assert_array_equal(both, pack_nibbles(stored[:, :1], stored[:, 1:]))
    np.testing.assert_array_equal(np.stack(scales, axis=-1), scale.astype(np.float32))


def test_a_kernel_reads_four_bits():
    """Every byte: its keys and its values, tokens of even places before the others."""
    rows = np.arange(256, dtype=np.uint8).reshape(128, 2).repeat(64, axis=1)

    def kernel(rows, keys, values):
        keys[...], values[...] = (nibbles.widen_half(rows[...], which, np.float32) for which in (0, 1))

    shape = jax.ShapeDtypeStruct((128, 128), np.float32)
    found = pl.pallas_call(kernel, out_shape=(shape, shape), interpret=PLAIN)(rows)
    in_order = np.concatenate([rows[::2], rows[1::2]])
    for got, bits in zip(found, unpack_nibbles(in_order), strict=True):
        np.testing.assert_array_equal(got, FORMATS["int4"].from_bits(bits))


@pytest.mark.parametrize("kind", ["int8", "float8_e4m3fn", "int4"])
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
    assert {x.implementation for x in chosen} == {"xla" if kind == "int4" else "tpu"}


def test_joined_rows_of_several_heads_are_chosen():
    """By their scales: other rows of several heads, which have two each, are not read."""
    q, kv = (jax.ShapeDtypeStruct(*x) for x in (((2, 1, 4, 128), "bfloat16"), ((9, 1, 2, 128, 128), "int8")))
    joined, latent = (jax.ShapeDtypeStruct(x, "float32") for x in ((9, 2, 2, 128), (9, 1, 2, 128, 2)))
    tables = jax.ShapeDtypeStruct((2, 4), "int32")
    given = dict(q=q, kv=kv, tables=tables, kind="int8", rank=64, platform="tpu")
    for op in ("paged_attention", "write_and_attend"):
        assert pallas_kernels.explain(op, kv_scale=joined, **given).implementation == "tpu"
        assert "of one head, not of 2" in pallas_kernels.explain(op, kv_scale=latent, **given).reason
