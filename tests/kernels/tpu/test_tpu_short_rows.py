"""Rows that hold fewer tokens than they have queries, with the TPU kernels on the interpreter; and mistakes caught."""

import functools

import interpreter
import pytest
import short_rows
from interpreter import PLAIN
from nightly import NIGHTLY, skip_by_day
from planting import Plant
from quantised_pools import JOINED, LATENT as QUANTISED_LATENT, NIBBLES, NIBBLES_BF16
from tpu_mistakes import SOURCES, check_noticed, check_unbroken

from pallas_kernels import tpu
from pallas_kernels.testing import Case

pytestmark = pytest.mark.timeout(240, method="thread")
F32 = {"dtype": "float32", "stored_head_dim": 128}
BF16 = {"dtype": "bfloat16", "stored_head_dim": 128}
LATENT = dict(num_heads=8, num_kv_heads=1, head_dim=136, rank=72, scale=0.1, dtype="bfloat16", stored_head_dim=256)
TILE = 16  # queries
GROUP = dict(num_heads=8, num_kv_heads=1)
NIBBLES_OF_8 = dict(**GROUP, head_dim=256, rank=128)
draw = functools.partial(short_rows.draw_case, edges=(8, TILE), block_size=8)
draw_wide = functools.partial(short_rows.draw_case, edges=(TILE, 128), count=9)
PACKED = dict(packed=True, padding=3, **GROUP)
CASES = {
    "packed": (draw(0, **PACKED, **F32), None),
    "padded": (draw(1, padding=1, **GROUP, **F32), None),
    "few": (draw(0, count=5, **PACKED, **F32), None),
    "window": (draw(2, window=7, soft_cap=3.0, scale=0.3, **PACKED, **BF16), None),
    "first tokens": (draw(3, window=7, sink_tokens=5, **PACKED, **F32), None),
    "chunk": (draw(4, chunk=8, **PACKED, **F32), None),
    "sinks": (draw(5, sinks=True, **PACKED, **BF16), None),
    "hundreds": (
        short_rows.draw_case(6, (128,), longest=300, count=6, block_size=16, packed=True, **GROUP, **BF16), None,
    ),
    "one query a row": (Case((0, 1, 0, 8, 9, 37), (1, 1, 0, 1, 1, 1), block_size=8, **GROUP, **F32), None),
    "latent": (draw(7, packed=True, **LATENT), None),
    "int4": (short_rows.draw_case(1, (TILE,), count=4, packed=True, **NIBBLES_OF_8, **NIBBLES), "int4"),
    "int4, padded": (draw_wide(9, padding=1, **NIBBLES_OF_8, **NIBBLES), "int4"),
    "int4, packed": (draw_wide(10, packed=True, window=90, **NIBBLES_OF_8, **NIBBLES_BF16), "int4"),
    "int4, first tokens": (
        draw_wide(11, packed=True, window=90, sink_tokens=4, **NIBBLES_OF_8, **NIBBLES_BF16), "int4",
    ),
    "int8": (draw_wide(12, block_size=128, **PACKED, **F32), "int8"),
    "float8": (draw_wide(13, block_size=128, **PACKED, **BF16), "float8_e4m3fn"),
    "joined int8": (draw_wide(14, packed=True, rank=40, head_dim=80, **GROUP, **JOINED), "int8"),
    "latent int8": (draw_wide(15, packed=True, rank=72, head_dim=136, **GROUP, **QUANTISED_LATENT), "int8"),
}  # fmt: skip


def check(tpu, named, mode, **options):
    """With the LSE in one mode and without it in the other, where the kernel sums the weights in another way."""
    case, kind = named
    options |= {"step_tokens": 16} if case.block_size < 128 else {}
    of_kind = functools.partial(tpu.paged_attention, **({} if kind is None else {"kind": kind}))

    def attend(*inputs, kind=None, **others):
        return interpreter.run(of_kind, *inputs, mode=mode, **options, **others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{tpu.__name__}.step.tile_tokens", lambda *_: TILE)
        short_rows.check(attend, case, kind, with_lse=not mode.detect_races)


@pytest.mark.parametrize("mode", interpreter.MODES if NIGHTLY else ["plain"])
@pytest.mark.parametrize("name", CASES if NIGHTLY else ["int4"])
def test_attention(name, mode):
    check(tpu, CASES[name], interpreter.MODES[mode])


@skip_by_day("a step of tiles differs only in how they are cut")
@pytest.mark.parametrize("name", ["packed", "int4, packed", "one query a row"])
def test_deterministic(name):
    check(tpu, CASES[name], PLAIN, deterministic=True)


# name: (what to run, on which case, in which mode, what is planted). None may wait for a copy that nobody starts.
CONTROLS = {
    "lengths raised to the queries'": (
        check, CASES["few"], PLAIN,
        Plant(
            "attend_to_new",
            "jnp.clip(kv_lens, 0, tables.shape[1] * kv.shape[3])",
            "jnp.clip(kv_lens, query_lens, tables.shape[1] * kv.shape[3])",
        ),
    ),
    "the first queries for those that see": (
        check, CASES["few"], PLAIN, Plant("attend_to_new", "begin + query_lens - seeing", "begin"),
    ),
    "a lone query that sees the null block": (
        check, CASES["one query a row"], PLAIN,
        Plant(
            "decode_step",
            "jnp.clip(kv_lens - query_lens + 1, 0, capacity)",
            "jnp.clip(kv_lens - query_lens, 0, capacity - 1) + 1",
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("control", CONTROLS if NIGHTLY else ["a lone query that sees the null block"])
def test_control(control, tmp_path, monkeypatch):
    check_noticed(CONTROLS[control], tmp_path, monkeypatch)


def test_every_mistake_can_be_made():
    SOURCES.check_plants(CONTROLS)


@skip_by_day("test_attention passes on the same cases")
def test_unbroken(tmp_path, monkeypatch):
    check_unbroken(CONTROLS, tmp_path, monkeypatch)
