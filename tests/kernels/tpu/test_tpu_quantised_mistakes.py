"""Kernels over quantised pools broken on purpose: the checks must fail on each. Four bits are in `test_tpu_nibbles`."""

import pytest
from interpreter import PLAIN
from nightly import NIGHTLY
from planting import Plant
from quantised_pools import F32, JOINED, LATENT, WRITES, check_attention, check_write, check_write_and_attention
from tpu_mistakes import NOTICED, SOURCES, broken

from pallas_kernels.testing import Case

pytestmark = pytest.mark.timeout(240, method="thread")
SMALL_DECODE = Case((129, 5), (1, 1), 2, 2, 128, **F32)
SMALL_LATENT = Case((129, 5), (1, 1), 2, 1, 136, rank=72, **LATENT)
SMALL_LATENT_PREFILL = Case((300, 9), (20, 4), 2, 1, 136, rank=72, packed=True, **LATENT)
SMALL_JOINED = Case((129, 5), (1, 1), 4, 2, 128, rank=64, **JOINED)
SMALL_JOINED_PREFILL = Case((300, 9), (20, 4), 4, 2, 128, rank=64, packed=True, **JOINED)
SMALL_PREFILL = Case((300, 9), (20, 4), 2, 2, 128, packed=True, **F32)
WRITE, _, LATENT_WRITE, JOINED_WRITE = WRITES


def check_float_decode(tpu, _, case, mode):
    check_write_and_attention(tpu, "float8_e4m3fn", case, mode)


def check_float_attention(tpu, _, case, mode):
    check_attention(tpu, "float8_e5m2", case, mode)


# name: (what to run, on which case, what is planted)
CONTROLS = {
    "scales not awaited": (
        check_write_and_attention,
        SMALL_DECODE,
        Plant("_kernel", "await_pages(buffers, slot, count)", "await_pages(buffers[:1], slot, count)"),
    ),
    "the scale of another token": (
        check_write_and_attention,
        SMALL_DECODE,
        Plant(
            "read_scales",
            "jnp.concatenate([buffer[page, part, pl.ds(head, 1)] for page in range(buffer.shape[0])], axis=1)",
            "jnp.concatenate([buffer[page, part, pl.ds(head, 1)] for page in range(buffer.shape[0])], axis=1)[:, ::-1]",
        ),
    ),
    "the scale of another head": (
        check_write_and_attention,
        SMALL_DECODE,
        Plant("read_scales", "pl.ds(head, 1)", "pl.ds(0, 1)"),
    ),
    "K's scales for V's": (
        check_write_and_attention,
        SMALL_DECODE,
        Plant("read_scales", "line(1, head)", "line(0, head)"),
    ),
    "scales that nobody sees": (
        check_write_and_attention,
        SMALL_DECODE,
        Plant(
            "read_scales",
            "stored.format.hide_bad_scales(line(0, head), line(1, head))",
            "(line(0, head), line(1, head))",
        ),
    ),
    "a new scale in another place": (
        check_write_and_attention,
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
        WRITE,
        Plant("_kernel", "ends[entry] > first", "ends[entry] > first + 1"),
    ),
    "latent: scales not awaited": (
        check_write_and_attention,
        SMALL_LATENT,
        Plant("_kernel", "await_pages(buffers, slot, count)", "await_pages(buffers[:1], slot, count)"),
    ),
    "latent: the scale of the other part": (
        check_write_and_attention,
        SMALL_LATENT,
        Plant("read_scales", "line(0, 1)", "line(0, 0)"),
    ),
    "latent: the scale of another token": (
        check_write_and_attention,
        SMALL_LATENT,
        Plant(
            "read_scales",
            "jnp.concatenate([buffer[page, part, pl.ds(head, 1)] for page in range(buffer.shape[0])], axis=1)",
            "jnp.concatenate([buffer[page, part, pl.ds(head, 1)] for page in range(buffer.shape[0])], axis=1)[:, ::-1]",
        ),
    ),
    "latent: values without their scale": (
        check_write_and_attention,
        SMALL_LATENT,
        Plant("_attend", "weights * value_scales", "weights"),
    ),
    "latent: scales that nobody sees": (
        check_write_and_attention,
        SMALL_LATENT,
        Plant(
            "read_scales",
            "keys, values = stored.format.hide_bad_scales(line(0, 0), line(0, 0))",
            "keys = values = line(0, 0)",
        ),
    ),
    "latent: values in both products": (
        check_write_and_attention,
        SMALL_LATENT,
        Plant("queries_by_scale", "rank - below", "0"),
    ),
    "latent: the others in both products": (
        check_write_and_attention,
        SMALL_LATENT,
        Plant("queries_by_scale", "values[2] < rank", "values[2] < LANES"),
    ),
    "latent: a new token's scales swapped": (
        check_write_and_attention,
        SMALL_LATENT,
        Plant(
            "_encode",
            "[_fill_lanes(x) for x in scales]",
            "[_fill_lanes(x) for x in scales[::-1]]",
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
        LATENT_WRITE,
        Plant("quantize", "values + others", "values"),
    ),
    "latent, write: one part's scale for both": (
        check_write,
        LATENT_WRITE,
        Plant("quantize", "jnp.where(nan, jnp.nan, scale)", "jnp.where(nan, jnp.nan, values)"),
    ),
    "joined: K's scales for V's": (
        check_write_and_attention,
        SMALL_JOINED,
        Plant("read_scales", "line(1, head)", "line(0, head)"),
    ),
    "joined: a new token's scales swapped": (
        check_write_and_attention,
        SMALL_JOINED,
        Plant("quantize", "[others, values]", "[values, others]"),
    ),
    "joined: a new token's scales of another head": (
        check_write_and_attention,
        SMALL_JOINED,
        Plant(
            "_encode",
            "jnp.concatenate(wide, axis=1 if stored.is_packed else 2)",
            "jnp.concatenate(wide, axis=1)[:, :, ::-1]",
        ),
    ),
    "joined: one scale for a new row": (
        check_write_and_attention,
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
        JOINED_WRITE,
        Plant("quantize", "[others, values]", "[values, others]"),
    ),
    "joined, write: both scales in one place": (
        check_write,
        JOINED_WRITE,
        Plant("_kernel", "of_scales[slot, part, :, these]", "of_scales[slot, 0, :, these]"),
    ),
}
BY_DAY = ("joined: a new token's scales of another head", "float8: values that are not finite")


@pytest.mark.parametrize("control", CONTROLS if NIGHTLY else BY_DAY)
def test_control(control, tmp_path, monkeypatch):
    check, case, *plants = CONTROLS[control]
    tpu = broken(tmp_path, monkeypatch, *plants)  # a mistake that does not fit is not one that is noticed
    with pytest.raises(NOTICED):
        check(tpu, "int8", case, PLAIN)


def test_every_mistake_can_be_made():
    SOURCES.check_plants(CONTROLS)
