"""Rows that hold fewer tokens than they have queries, with the TPU kernels on the interpreter; and mistakes caught."""

import dataclasses
import functools

import interpreter
import numpy as np
import pytest
import quantised_pools
import short_rows
from interpreter import PLAIN
from nightly import NIGHTLY, skip_by_day
from numpy_attention import attention
from planting import Plant
from quantised_pools import JOINED, LATENT as QUANTISED_LATENT, NIBBLES, NIBBLES_BF16
from tpu_mistakes import SOURCES, check_noticed, check_unbroken

from pallas_kernels import testing, tpu
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


RESIDUAL = 20
ENDS = (0, 1, 2, RESIDUAL - 1, RESIDUAL, RESIDUAL + 1, 31, 32, 33, 0, RESIDUAL + 128, RESIDUAL + 129, 300)
DECODE = dict(lengths=ENDS, new=(0, *[1] * 8, 0, 1, 1, 1))
STEP = dict(lengths=(149, 30, 1, 21, 3, 140, 0), new=(1, 12, 1, 1, 3, 40, 0), packed=True, padding=2)
# Name -> a case, its format, and the tokens of a segment, of which the last holds none but the newest tokens.
RESIDUAL_CASES = {
    "plain": (Case(**DECODE, **GROUP, **F32, block_size=16), None, 16),
    "window": (Case(**DECODE, window=9, soft_cap=3.0, sink_tokens=3, **GROUP, **F32, block_size=16), None, 16),
    "mixed": (Case(**STEP, **GROUP, **BF16, block_size=16), None, 16),
    "mixed, window": (Case(**STEP, window=9, **GROUP, **F32, block_size=16), None, 16),
    "int8": (Case(**DECODE, **GROUP, **F32, block_size=128), "int8", 128),
    "int8, mixed": (Case(**STEP, **GROUP, **F32, block_size=128), "int8", 128),
    "int4": (Case(**DECODE, **NIBBLES_OF_8, **NIBBLES_BF16), "int4", 128),
    "int4, mixed": (Case(**STEP, window=30, **NIBBLES_OF_8, **NIBBLES), "int4", 128),
    "latent": (Case(**DECODE, **(LATENT | {"dtype": "float32"}), block_size=16), None, 16),
}  # fmt: skip


def check_but_to_the_newest(tpu, named, mode):
    """Compares with a write, and with NumPy over rows that end so many tokens earlier."""
    case, kind, step_tokens = named
    whole = dataclasses.replace(case, window=None, sink_tokens=None)  # a window begins so many tokens earlier
    (q, kv, *rest), stored, _ = short_rows.make_inputs(whole, kind)
    rank, options = {"rank": case.rank}, testing.make_options(case)
    of_kind = {} if kind is None else {"kind": kind}
    k, v = interpreter.new_tokens(case, q)

    def write(kv, scale, k, v):
        scaled = {} if kind is None else {"kv_scale": scale}
        pools = interpreter.write_kv(kv, k, v, *rest, **scaled, **of_kind, **rank)
        return (pools, None) if kind is None else pools

    nan = [None if x is None else np.full_like(x, np.nan) for x in (k, v)]
    kv, scale = write(kv, stored.get("kv_scale"), *nan)  # what attends before it writes is caught
    given = {} if kind is None else {"kv_scale": scale}
    (out, lse), written = interpreter.run(
        functools.partial(tpu.write_and_attend, residual_length=RESIDUAL, **of_kind), q, k, v, kv, *rest, mode=mode,
        return_lse=True, step_tokens=step_tokens, **given, **options,
    )  # fmt: skip
    kv, scale = write(kv, scale, k, v)
    quantised_pools.assert_written([written] if kind is None else written, [kv] if kind is None else [kv, scale])
    held = kv if kind is None else testing.decode(case, kv, scale, kind)
    tables, lengths, new = rest
    wanted, wanted_lse = attention(q, held, tables, np.maximum(lengths - RESIDUAL, 0), new, **options)
    testing.assert_close(out, wanted)
    assert not np.asarray(out, np.float32)[np.isneginf(wanted_lse)].any()
    testing.assert_close(lse, wanted_lse, dtype=case.dtype)


@pytest.mark.parametrize("mode", interpreter.MODES if NIGHTLY else ["races"])
@pytest.mark.parametrize("name", RESIDUAL_CASES if NIGHTLY else ["mixed, window", "int4"])
def test_but_to_the_newest(name, mode):
    check_but_to_the_newest(tpu, RESIDUAL_CASES[name], interpreter.MODES[mode])


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
    "the newest tokens seen": (
        check_but_to_the_newest, RESIDUAL_CASES["plain"], PLAIN,
        Plant("_kernel", "limit - 1 - residual_length", "limit - 1"),
    ),
    "what sees nothing is not told": (
        check_but_to_the_newest, RESIDUAL_CASES["plain"], PLAIN,
        Plant("_attend", "pages, stand, may_see_nothing = walk", "pages, stand, may_see_nothing = *walk[:2], False"),
    ),
    "the newest tokens seen by many": (
        check_but_to_the_newest, RESIDUAL_CASES["mixed, window"], PLAIN,
        Plant("attend_to_new", "jnp.maximum(kv_lens - residual_length, 0)", "kv_lens"),
    ),
    "the newest tokens seen by lone ones of a mixed step": (
        check_but_to_the_newest, RESIDUAL_CASES["mixed, window"], PLAIN,
        Plant(
            "attend_to_new",
            "dict(new_kv=new_kv, targets=targets, residual_length=residual_length)",
            "dict(new_kv=new_kv, targets=targets)",
        ),
    ),
    "a lone token of a mixed step not written": (
        check_but_to_the_newest, RESIDUAL_CASES["int8, mixed"], PLAIN,
        Plant("attend_to_new", "jnp.where(begin < places, targets, 0)", "jnp.where(begin < 0, targets, 0)"),
    ),
    "a lone token written where its row does not end": (
        check_but_to_the_newest, RESIDUAL_CASES["plain"], PLAIN,
        Plant("_kernel", "_insert(new, here[i], limit - 1 - begin, pages, tile)",
              "_insert(new, here[i], stand(limit) - begin, pages, tile)"),
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
