"""The GPU kernels over quantised pools: any bits under NaN scales in everything that must not be read."""

import jax.numpy as jnp
import numpy as np
import pytest
from gpu_mistakes import SOURCES, UNSYNCHRONISED, outcome_with, unless_on_a_gpu
from nightly import NIGHTLY
from planting import Plant
from ptx_emulator import run_inline
from quantised_trials import QUANTISED_DECODE, QUANTISED_PREFILL

from pallas_kernels import gpu
from pallas_kernels.common.quantization import FORMATS
from pallas_kernels.gpu import dequantize, nibbles

TRIALS = {f"decode, {name}": trial for name, trial in QUANTISED_DECODE.items()}
TRIALS |= {f"prefill, {name}": trial for name, trial in QUANTISED_PREFILL.items()}
BY_DAY = ("decode, int8, lengths", "prefill, e5m2", "decode, int4, one tile")

RING, PREFILL_RING = QUANTISED_DECODE["int8, ring"], QUANTISED_PREFILL["int8, ring"]
LENGTHS = QUANTISED_DECODE["int8, lengths"]
# What is wrong, on which trial, the outcomes that show it, and what is planted.
MISTAKES = {
    "the scale of another token": (
        RING,
        {"wrong", "race", "barrier"},
        Plant("fetch", "(slot, which, here)", "(slot, which, pl.ds(0, piece))"),
    ),
    "the scale of another head": (
        LENGTHS,
        {"wrong"},
        Plant("fetch", "(block, which, head, span)", "(block, which, 0, span)"),
    ),
    "the scale of another block": (
        RING,
        {"wrong"},
        Plant("fetch", "(block, which, head, span)", "(places[0][0], which, head, span)"),
    ),
    "K's scales for V's": (
        RING,
        {"wrong"},
        Plant("fetch", "(block, which, head, span)", "(block, 0, head, span)"),
    ),
    "scales read before they arrive": (
        RING,
        {"wrong", "race", "barrier"},
        Plant("arrivals", "3 * pieces", "pieces"),
    ),
    "decode: V's scales left out": (
        RING,
        {"wrong"},
        Plant("split", "p = p * lax.broadcast_in_dim(value_scales, p.shape, [0])", ""),
    ),
    "decode: K's slot released before it is widened": (
        RING,
        {"race", "wrong"},
        Plant("split", "if groups is None:\n    plgpu.barrier_arrive(k_free.at[slot])", ""),
        Plant(
            "split",
            "plgpu.barrier_wait(k_ready.at[slot])",
            "plgpu.barrier_wait(k_ready.at[slot])\nplgpu.barrier_arrive(k_free.at[slot])",
        ),
    ),
    "prefill: one consumer's share not awaited": (
        PREFILL_RING,
        {"race", "wrong", "barrier"},
        Plant("attend", "plgpu.barrier_wait(widened[which])", ""),
    ),
    "prefill, columns: keys widened by the other not awaited": (
        QUANTISED_PREFILL["e4m3, head_dim 320"],
        {"race", "wrong", "barrier"},
        Plant("attend.kernel.widen_own_keys", "meet()", ""),
    ),
    "prefill, columns: V over keys that are read": (
        QUANTISED_PREFILL["e4m3, head_dim 320"],
        {"race", "wrong", "barrier"},
        Plant("attend.kernel.ready_values", "meet()", ""),
    ),
    "prefill: V's scales for K's": (
        PREFILL_RING,
        {"wrong"},
        Plant("attend", "scales(slot, 0)", "scales(slot, 1)"),
    ),
}
FOUR_BITS, FOUR_BITS_RING = QUANTISED_DECODE["int4, groups across halves"], QUANTISED_DECODE["int4, ring"]
K5V3_RING, K5V3_PREFILL = QUANTISED_DECODE["k5v3, ring"], QUANTISED_PREFILL["k5v3, mixed"]
MISTAKES |= {
    "int4: the scale of the other half's group": (
        FOUR_BITS,
        {"wrong"},
        Plant("EntryGroups.find_group", "column + half * self.head_dim // 2", "column"),
    ),
    "int4: padding counted as entries": (
        FOUR_BITS,
        {"wrong"},
        Plant("EntryGroups.find_group", "half * self.head_dim // 2", "half * 64"),
    ),
    "int4: queries in one piece": (
        FOUR_BITS,
        {"wrong"},
        Plant("step:attend", "_pad_columns(q, kernel_head_dim(head_dim), parts)", "_pad_columns(q, 128, 1)"),
    ),
    "int4: the output in one piece": (
        FOUR_BITS,
        {"wrong"},
        Plant("step:attend", "_drop_columns(out, rank or head_dim, parts)", "_drop_columns(out, rank or head_dim, 1)"),
    ),
    "int4: the scales of another piece": (
        FOUR_BITS_RING,
        {"wrong", "race", "barrier"},
        Plant("fetch", "(slot, which, j, pl.ds(begin, size))", "(slot, which, 0, pl.ds(begin, size))"),
    ),
    "int4: scales of another place in the block": (
        QUANTISED_DECODE["int4, window, head_dim 256"],
        {"wrong"},
        Plant("fetch", "span.start * groups.count + begin", "begin"),
    ),
    "int4: scales read before they arrive": (
        FOUR_BITS_RING,
        {"wrong", "race", "barrier"},
        Plant("arrivals", "(1 + 2 * len(groups.copies)) * pieces", "pieces"),
    ),
    "int4: V's scales released with the keys": (
        FOUR_BITS_RING,
        {"race", "wrong"},
        Plant(
            "split",
            "if groups is None:\n    plgpu.barrier_arrive(k_free.at[slot])",
            "plgpu.barrier_arrive(k_free.at[slot])",
        ),
        Plant("split", "if groups is not None:\n    plgpu.barrier_arrive(k_free.at[slot])", ""),
    ),
    "int4: K's scales for V's": (
        FOUR_BITS_RING,
        {"wrong"},
        Plant("nibbles:widened", "factors[scaled.which]", "factors[0]"),
    ),
    "int4: scales that nobody sees": (
        FOUR_BITS,
        {"wrong"},
        Plant("nibbles:widened", "format.hide_bad_scales(*lines)", "lines"),
    ),
    "int4: tokens of the first half of a tile": (
        QUANTISED_PREFILL["int4, wide tiles"],
        {"wrong"},
        Plant("nibbles:widened", "line[token : token + HALF]", "line[:HALF]"),
    ),
    "k5v3: the scale of a group of 32": (
        QUANTISED_DECODE["k5v3, ring"],
        {"wrong"},
        Plant(
            "EntryGroups.find_group",
            "(column + half * self.head_dim // 2) // self.size",
            "(column + half * self.head_dim // 2) // 32",
        ),
    ),
    "k5v3: scales of a token as if of 32": (
        QUANTISED_DECODE["k5v3, head_dim 256"],
        {"wrong", "race", "barrier"},
        Plant(
            "find_groups",
            "EntryGroups(size, operands.head_dim, tile.piece(block_size))",
            "EntryGroups(32, operands.head_dim, tile.piece(block_size))",
        ),
    ),
    "int4, prefill: K's scales for V's": (
        QUANTISED_PREFILL["int4, ring"],
        {"wrong"},
        Plant(
            "attend.kernel.widen_together",
            "nibbles.Scaled(groups, wide[2].at[slot], which, values)",
            "nibbles.Scaled(groups, wide[2].at[slot], 0, values)",
        ),
    ),
    "k5v3: keys without their lowest bits": (
        K5V3_RING,
        {"wrong"},
        Plant("nibbles:widened", "plgpu.load(beside, layout=LAYOUT)", "0 * plgpu.load(beside, layout=LAYOUT)"),
    ),
    "k5v3: lowest bits of other tokens": (
        QUANTISED_PREFILL["k5v3, half a group"],
        {"wrong"},
        Plant("nibbles:widened", "pl.ds(token, HALF)", "pl.ds(0, HALF)"),
    ),
    "k5v3: lowest bits of other columns": (
        QUANTISED_DECODE["k5v3, head_dim 256"],
        {"wrong"},
        Plant("nibbles:widened", "pl.ds(column, x[0].shape[1])", "pl.ds(0, x[0].shape[1])"),
    ),
    "k5v3: values read as keys are": (
        K5V3_RING,
        {"wrong"},
        Plant("nibbles:widened", "format.read_pair(x[0], x[-1])[scaled.which]", "format.read_pair(x[0], x[-1])[0]"),
    ),
    "k5v3, decode: values not awaited for the keys": (
        K5V3_RING,
        UNSYNCHRONISED,
        Plant("split", "if format.mixes_pairs:\n    plgpu.barrier_wait(v_ready.at[slot])", ""),
        Plant(
            "split",
            "if not format.mixes_pairs:\n    plgpu.barrier_wait(v_ready.at[slot])",
            "plgpu.barrier_wait(v_ready.at[slot])",
        ),
    ),
    "k5v3, decode: V's slot released before the keys are widened": (
        K5V3_RING,
        UNSYNCHRONISED,
        Plant(
            "split",
            "if format.mixes_pairs:\n    plgpu.barrier_wait(v_ready.at[slot])",
            "plgpu.barrier_wait(v_ready.at[slot])\nplgpu.barrier_arrive(v_free.at[slot])",
        ),
        Plant("split", "if quantized:\n    plgpu.barrier_arrive(v_free.at[slot])", ""),
    ),
    "k5v3, prefill: values not awaited for the keys": (
        K5V3_PREFILL,
        UNSYNCHRONISED,
        Plant("attend", "if format.mixes_pairs:\n    plgpu.barrier_wait(v_ready.at[own_slot(slot)])", ""),
        Plant(
            "attend",
            "if not format.mixes_pairs:\n    plgpu.barrier_wait(v_ready.at[own_slot(slot)])",
            "plgpu.barrier_wait(v_ready.at[own_slot(slot)])",
        ),
    ),
    "k5v3, prefill: another slot's lowest bits": (
        K5V3_PREFILL,
        UNSYNCHRONISED,
        Plant(
            "attend",
            "v_s.at[slot] if which == 0 and format.mixes_pairs else None",
            "v_s.at[0] if which == 0 and format.mixes_pairs else None",
        ),
    ),
}
MISTAKES_BY_DAY = ("the scale of another token", "scales read before they arrive")


@pytest.mark.parametrize("name", TRIALS if NIGHTLY else BY_DAY)
def test_against_numpy(name, interpret, monkeypatch):
    TRIALS[name].use_plans(monkeypatch)
    TRIALS[name].check(interpret)


@pytest.mark.parametrize(("kind", "dtype"), dequantize.PAIRS)
def test_bytes_widened_in_pairs(kind, dtype):
    """Every byte is the number that it stands for, in either place. What is not stored, NaN and infinity, is finite."""
    low, high = (x.ravel().astype(np.uint32) for x in np.meshgrid(np.arange(256), np.arange(256)))
    (pairs,) = run_inline(dequantize.PAIRS[kind, dtype], low | high << 8)
    pairs = pairs.view(jnp.dtype(dtype)).reshape(-1, 2)
    stored = np.stack([low, high], axis=1).astype(np.uint8).view(jnp.dtype(kind)).astype(np.float32)
    finite = np.isfinite(stored)
    assert (pairs.astype(np.float32)[finite] == stored[finite]).all()
    assert np.isfinite(pairs.astype(np.float32)).all()
    assert finite.sum() >= 0.9 * finite.size


# A level's sum is rounded, half a unit of the last place, and so are two products.
CLOSE = {"bfloat16": 3 * 2**-8, "float16": 3 * 2**-11}


def levels_of(kind, which, dtype):
    """Of keys (0) or values (1), and how many times larger scales are in the dtype."""
    levels = FORMATS[kind].levels[which]
    return levels, 1 if dtype == "bfloat16" else 8 ** (levels.bits - 1)


@pytest.mark.parametrize("dtype", nibbles.TWO)
@pytest.mark.parametrize(("kind", "which"), [("int4", 0), ("k5v3", 0), ("k5v3", 1)])
def test_codes_widened_in_pairs(kind, which, dtype):
    """Every code of two bytes, of keys whatever their values, is its level times its scale, in all four places."""
    low, high = (x.ravel().astype(np.uint32) for x in np.meshgrid(np.arange(256), np.arange(256)))
    other = np.random.default_rng(0).permutation(low | high << 8)
    levels, unit = levels_of(kind, which, dtype)
    given = np.array([0.01, 0.03]).astype(jnp.bfloat16)
    scales = [np.full_like(low, 0x10001 * int((x * unit).astype(dtype).view(np.uint16))) for x in given]
    made = run_inline(nibbles.make_numbers(levels, dtype), low | high << 8, *scales, other, outputs=2)
    got = np.stack([x.view(jnp.dtype(dtype)).reshape(-1, 2) for x in made], axis=2).astype(np.float32)
    mine, beside = (jnp.asarray([x & 255, x >> 8], jnp.uint8).T[..., None] for x in (low | high << 8, other))
    numbers = FORMATS[kind].read_pair(*((mine, beside) if which == 0 else (beside, mine)))[which]
    wanted = np.asarray(numbers) * given.astype(np.float32)
    assert np.abs(got / wanted - 1).max() < CLOSE[dtype]


@pytest.mark.parametrize("dtype", nibbles.TWO)
@pytest.mark.parametrize("kind", ["int4", "k5v3"])
def test_scales_of_groups(kind, dtype):
    """Those of values become finite, and keys' NaN where they were not; no number of the dtype is too large."""
    (of_keys, key_unit), (of_values, value_unit) = (levels_of(kind, which, dtype) for which in range(2))
    most = 65_504 / of_keys.last
    finite = np.array([0, 1e-9, 0.004, most / 26, most * 0.999]).astype(jnp.bfloat16)
    bad = np.array([np.nan, np.inf, -np.inf, 3e38]).astype(jnp.bfloat16)
    given = np.concatenate([finite, bad]).view(np.uint16).astype(np.uint32)
    beside = np.full_like(given, int(finite[2:3].view(np.uint16)[0]))
    for first, second in ((given, beside), (beside, given)):  # in the lower and in the upper half
        both, other = first | second << 16, beside | beside << 16
        (values,) = run_inline(nibbles.make_value_scales(of_values, dtype), both)
        (keys,) = run_inline(nibbles.make_key_scales(FORMATS[kind].levels, dtype), other, both)
        values, keys = (x.view(jnp.dtype(dtype)).reshape(-1, 2).astype(np.float32) for x in (values, keys))
        mine = 0 if first is given else 1
        wanted = finite.astype(np.float32) * value_unit
        np.testing.assert_allclose(values[: len(finite), mine], wanted, rtol=1e-3, atol=6e-8)
        last = of_values.last / value_unit
        assert (np.abs(values[:, mine] * last) <= float(jnp.finfo(dtype).max)).all()
        assert np.isnan(keys[len(finite) :, mine][:3]).all() and not np.isnan(keys[: len(finite)]).any()
        np.testing.assert_allclose(keys[: len(finite), mine], float(finite[2]) * key_unit, rtol=1e-3)
        assert not np.isnan(keys[:, 1 - mine]).any() and np.isfinite(values).all()


def test_all_formats_are_widened_in_pairs():
    eight_bits = [kind for kind in gpu.FORMATS if FORMATS[kind].group_size is None]
    assert set(dequantize.PAIRS) == {(kind, dtype) for kind in eight_bits for dtype in ("bfloat16", "float16")}


@unless_on_a_gpu
@pytest.mark.parametrize("name", MISTAKES if NIGHTLY else MISTAKES_BY_DAY)
def test_mistake(name, monkeypatch):
    trial, expected, *plants = MISTAKES[name]
    assert outcome_with(monkeypatch, trial, *plants) in expected


def test_every_mistake_can_be_made():
    SOURCES.check_plants(MISTAKES)
