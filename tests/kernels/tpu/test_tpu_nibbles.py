"""Four bits in the TPU kernels: encoded as XLA does, read in both halves of a byte, and known mistakes caught.

The kernels over such pools are checked in test_tpu_quantised.py.
"""

import functools
import re

import jax
import numpy as np
import pytest
from interpreter import PLAIN
from jax.experimental import pallas as pl
from nightly import skip_by_day
from planting import Plant
from quantised_pools import NIBBLE_WRITES, NIBBLES, check_attention, check_write, check_write_and_attention
from tpu_mistakes import NOTICED, SOURCES, broken

from pallas_kernels.common.batch import StoredKV
from pallas_kernels.common.quantization import FORMATS, pack_nibbles, unpack_nibbles
from pallas_kernels.testing import Case
from pallas_kernels.tpu import nibbles

pytestmark = pytest.mark.timeout(240, method="thread")


@pytest.mark.parametrize(("kind", "head_dim"), [("int4", 96), ("k5v3", 192)])
def test_a_kernel_encodes_four_bits_as_xla_does(kind, head_dim):
    """Of numbers of all sizes, zeros alone, and a NaN: the same codes under the same scales."""
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((8, 2, 2, head_dim)) * 10.0 ** rng.integers(-9, 9, (8, 2, 2, 1))).astype(np.float32)
    x[0, 0, 0, head_dim // 3 : head_dim // 3 * 2], x[1, 1, 1, 5] = 0, np.nan
    pool = StoredKV(None, None, FORMATS[kind], head_dim, is_packed=True)
    both, scales = jax.jit(lambda x: nibbles.encode_pair(x[:, :1], x[:, 1:], pool))(x)
    stored, scale = jax.jit(functools.partial(FORMATS[kind].encode, axis=1))(x)
    np.testing.assert_array_equal(both.astype(np.uint8), pack_nibbles(stored[:, :1], stored[:, 1:]))
    scales = np.concatenate([np.stack(x, axis=-1) for x in scales], axis=1)
    np.testing.assert_array_equal(scales, scale.astype(np.float32))


@pytest.mark.parametrize("size", [32, 64])
def test_squares_are_summed_exactly(size):
    """Whole numbers of up to 18 bits, by products of numbers of 8."""
    most = 378**2  # parts that a level misses: of the last one, by the least of the scales tried
    x = np.random.default_rng(0).integers(0, most + 1, (4, 8, 128))
    x[0], x[1] = most, 2**16 + 2**8 + 1
    sums = np.repeat(x.reshape(4, 8, -1, size).sum(axis=-1), size, axis=-1)
    np.testing.assert_array_equal(nibbles._sum_lanes(x.astype(np.float32), size), sums)


@pytest.mark.parametrize("kind", ["int4", "k5v3"])
def test_a_kernel_reads_four_bits(kind):
    """Every byte: its keys and its values, tokens of even places before the others."""
    rows = np.arange(256, dtype=np.uint8).reshape(128, 2).repeat(64, axis=1)

    def kernel(rows, keys, values):
        keys[...], values[...] = (nibbles.widen_half(rows[...], FORMATS[kind], which, np.float32) for which in (0, 1))

    shape = jax.ShapeDtypeStruct((128, 128), np.float32)
    found = pl.pallas_call(kernel, out_shape=(shape, shape), interpret=PLAIN)(rows)
    in_order = np.concatenate([rows[::2], rows[1::2]])
    for got, wanted in zip(found, FORMATS[kind].read_pair(*unpack_nibbles(in_order)), strict=True):
        np.testing.assert_array_equal(got, wanted)


SMALL_NIBBLES = Case((129, 5), (1, 1), 4, 2, 128, rank=64, **NIBBLES)
SMALL_NIBBLES_PREFILL = Case((300, 9), (20, 4), 4, 2, 128, rank=64, packed=True, **NIBBLES)
TWO_GROUPS = Case((129, 5), (1, 1), 4, 2, 256, rank=128, **NIBBLES)
TWO_GROUPS_PREFILL = Case((300, 9), (20, 4), 4, 2, 256, rank=128, packed=True, **NIBBLES)
# name, which begins with a kind: (what to run, on which case, what is planted)
CONTROLS = {
    "int4: values read as keys": (
        check_write_and_attention,
        SMALL_NIBBLES,
        Plant("widen_half", "levels.bits - _FRACTION if which == 1 else 1", "levels.bits - _FRACTION"),
    ),
    "int4: tokens taken as they lie": (
        check_write_and_attention,
        SMALL_NIBBLES,
        Plant("decode:_attend", "nibbles.place_tokens(place) if by_group else place", "place"),
    ),
    "int4: scales as they lie": (
        check_write_and_attention,
        SMALL_NIBBLES,
        Plant(
            "_order_lanes",
            "place_tokens(lax.broadcasted_iota(jnp.int32, x.shape, 1))",
            "lax.broadcasted_iota(jnp.int32, x.shape, 1)",
        ),
    ),
    "int4: the scale of another group": (
        check_write_and_attention,
        SMALL_NIBBLES,
        Plant("spread_lines", "(head + i) * groups + g", "(head + i) * groups"),
    ),
    "int4: the lanes of another group": (
        check_write_and_attention,
        SMALL_NIBBLES,
        Plant("pick_lanes", "(g + 1) * size", "(g + 1) * size + 1"),
    ),
    "int4: scales that nobody sees": (
        check_write_and_attention,
        SMALL_NIBBLES,
        Plant("read_page_scales", "stored.format.hide_bad_scales(lines(0), lines(1))", "(lines(0), lines(1))"),
    ),
    "int4: a new token's keys for its values": (
        check_write_and_attention,
        SMALL_NIBBLES,
        Plant("encode_pair", "pack_codes(*codes, format)", "pack_codes(*codes[::-1], format)"),
    ),
    "int4: the first of the scales tried": (
        check_write_and_attention,
        SMALL_NIBBLES,
        Plant("encode_groups", "lost < least", "lost < 0"),
    ),
    "int4, prefill: tokens taken as they lie": (
        check_attention,
        SMALL_NIBBLES_PREFILL,
        Plant("prefill:_attend", "nibbles.place_tokens(place) if by_group else place", "place"),
    ),
    "int4, prefill: the scale of another head": (
        check_attention,
        SMALL_NIBBLES_PREFILL,
        Plant("spread_scales", "head * groups + g", "g"),
    ),
    "int4, prefill: K's scales for V's": (
        check_attention,
        SMALL_NIBBLES_PREFILL,
        Plant("_attend", "scale_numbers(values, part, head, 1)", "scale_numbers(values, part, head, 0)"),
    ),
    "int4, write: scales of one head for all": (
        check_write,
        NIBBLE_WRITES[0],
        Plant("write:_kernel", "x[head : head + 1]", "x[:1]"),
    ),
    "k5v3: levels of keys for values": (
        check_write_and_attention,
        TWO_GROUPS,
        Plant("widen_half", "-levels.cubic", "-format.levels[0].cubic"),
    ),
    "k5v3: codes of four bits each": (
        check_write_and_attention,
        TWO_GROUPS,
        Plant("pack_codes", "(keys & of_keys) << format.levels[1].bits", "(keys & of_keys) << 4"),
    ),
    "k5v3, write: scales of keys searched for values": (
        check_write,
        NIBBLE_WRITES[0],
        Plant(
            "encode_pair",
            "zip((keys, values), format.levels, strict=True)",
            "((keys, format.levels[0]), (values, format.levels[0]))",
        ),
    ),
    "k5v3: queries by 32 entries": (
        check_write_and_attention,
        TWO_GROUPS,
        Plant("spread_queries", "stored.format.group_size", "32"),
    ),
    "k5v3: lanes by 32 entries": (
        check_write_and_attention,
        TWO_GROUPS,
        Plant(
            "_per_head",
            "nibbles.pick_lanes(products, groups, stored.format.group_size)",
            "nibbles.pick_lanes(products, groups, 32)",
        ),
    ),
    "k5v3: scales searched by 32 entries": (
        check_write_and_attention,
        TWO_GROUPS,
        Plant("encode_groups", "size = format.group_size", "size = 32"),
    ),
    "k5v3, prefill: scales by 32 entries": (
        check_attention,
        TWO_GROUPS_PREFILL,
        Plant("spread_scales", "stored.format.group_size", "32"),
    ),
    "k5v3, write: scales searched by 32 entries": (
        check_write,
        NIBBLE_WRITES[0],
        Plant("encode_groups", "size = format.group_size", "size = 32"),
    ),
}


@skip_by_day("those of other formats, in test_tpu_quantised_mistakes.py")
@pytest.mark.parametrize("control", CONTROLS)
def test_control(control, tmp_path, monkeypatch):
    check, case, *plants = CONTROLS[control]
    tpu = broken(tmp_path, monkeypatch, *plants)  # a mistake that does not fit is not one that is noticed
    with pytest.raises(NOTICED):
        check(tpu, re.split("[:,]", control)[0], case, PLAIN)


def test_every_mistake_can_be_made():
    SOURCES.check_plants(CONTROLS)
