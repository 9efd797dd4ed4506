"""The decode kernels against NumPy: interpreted with races detected, or natively on a GPU; and known mistakes caught.

The mistakes that only the compiler's output shows are in tests/compile.
"""

import jax
import jax.numpy as jnp
import pytest
from gpu_mistakes import SOURCES, UNSYNCHRONISED, outcome_with, skip_unseen_race, unless_on_a_gpu
from gpu_trial import SMALL, Trial
from nightly import NIGHTLY
from planting import Plant
from trials import DECODE

from pallas_kernels import gpu, testing
from pallas_kernels.common.masks import WindowMask
from pallas_kernels.gpu import decode, prefill, tiles, work_items as work
from pallas_kernels.testing import Case

BY_DAY = (
    "first tokens, cut", "wild ids", "tree, chunk", "71 heads, window",
)  # fmt: skip


@pytest.mark.parametrize("name", DECODE if NIGHTLY else BY_DAY)
def test_against_numpy(name, interpret, monkeypatch):
    DECODE[name].use_plans(monkeypatch)
    DECODE[name].check(interpret)


def test_trials_are_what_they_say(interpret, monkeypatch):
    """A ring refilled three times, and as many items as tiles."""
    for name, items in (("ring", [8]), ("one item for each of many tiles", [1] * 40)):
        trial = DECODE[name]
        trial.use_plans(monkeypatch)
        inputs = trial.inputs()[0]
        rows, *_ = work.decode_items(
            inputs.lengths, inputs.new, 1, work.Cutting(10**4, WindowMask(), 64, trial.wave, 100), alone_of=None,
            interpret=interpret,
        )  # fmt: skip
        sizes = rows[:, 2] - rows[:, 1]
        assert sizes[sizes > 0].tolist() == items


@pytest.mark.skipif(not NIGHTLY, reason="the same kernel with other numbers")
def test_traced_scale_and_cap(interpret, monkeypatch):
    case = Case(lengths=(20, 70), new=(1, 1), dtype="bfloat16", scale=0.2, soft_cap=4.0)
    Trial(case, **SMALL).use_plans(monkeypatch)
    inputs = testing.make_inputs(case)

    @jax.jit
    def attend(scale, soft_cap, *inputs):
        return testing.run(gpu.paged_attention, *inputs, scale=scale, soft_cap=soft_cap, interpret=interpret)

    testing.assert_close(attend(0.2, 4.0, *inputs), testing.expected(case, inputs))


@pytest.mark.skipif(not NIGHTLY, reason="by day it is only lowered, in test_gpu_lower.py")
def test_vmap(interpret, monkeypatch):
    """Two caches of one shape, side by side."""
    case = Case(lengths=(20, 70), new=(1, 1), dtype="bfloat16")
    Trial(case).use_plans(monkeypatch)
    inputs = [testing.make_inputs(case, seed) for seed in (0, 1)]
    batched = jax.tree.map(lambda *x: jnp.stack(x), *inputs)
    out = jax.vmap(lambda *inputs: testing.run(gpu.paged_attention, *inputs, interpret=interpret))(*batched)
    for i in range(2):
        testing.assert_close(out[i], testing.expected(case, inputs[i]))


@pytest.mark.skipif(not NIGHTLY, reason="by day it is only lowered, in test_gpu_lower.py")
@pytest.mark.parametrize("name", ["window, cut", "explicit offsets"])
def test_what_varies_among_devices(name, interpret, monkeypatch):
    """In a `shard_map` JAX takes neither warps nor references: without them the results are the same."""
    for module in (tiles, decode, prefill):
        monkeypatch.setattr(module, "varies", lambda x: True)
    DECODE[name].use_plans(monkeypatch)
    DECODE[name].check(interpret)


# By name: the trial, how it may end, and what is planted.
MISTAKES = {
    "decode: V read before it arrives": (
        DECODE["ring"],
        UNSYNCHRONISED,
        Plant("split", "if not format.mixes_pairs:\n    plgpu.barrier_wait(v_ready.at[slot])", ""),
    ),
    "decode: K's slot released before the product": (
        DECODE["ring"],
        {"race"},
        Plant("split", "if groups is None:\n    plgpu.barrier_arrive(k_free.at[slot])", ""),
        Plant(
            "split",
            "plgpu.barrier_wait(k_ready.at[slot])",
            "plgpu.barrier_wait(k_ready.at[slot])\nplgpu.barrier_arrive(k_free.at[slot])",
        ),
    ),
    "decode: V's slot released before the product": (
        DECODE["ring"],
        {"race"},
        Plant(
            "split",
            "if not format.mixes_pairs:\n    plgpu.barrier_wait(v_ready.at[slot])",
            "plgpu.barrier_wait(v_ready.at[slot])\nplgpu.barrier_arrive(v_free.at[slot])",
        ),
        Plant("split", "if not quantized:\n    plgpu.barrier_arrive(v_free.at[slot])", ""),
    ),
    "decode: queries read before they arrive": (
        DECODE["ring"],
        UNSYNCHRONISED,
        Plant("decode:split", "plgpu.barrier_wait(q_ready)", ""),
    ),
    "decode: one token too many": (
        DECODE["tails"],
        {"wrong"},
        Plant("split", "position < length", "position < length + 1"),
    ),
    "decode: garbage times zero": (
        DECODE["tails"],
        {"wrong"},
        Plant("split", "select_seen_values(values, first_seen - first, length - first, sinks)", ""),
    ),
    "decode: V's tail off by one": (
        DECODE["tails"],
        {"wrong"},
        Plant("decode:split", "first + tokens > length", "first + tokens > length + 1"),
    ),
    "decode: V before the window": (
        DECODE["window"],
        {"wrong"},
        Plant("decode:split", "(first < first_seen) | (first + tokens > length)", "first + tokens > length"),
    ),
    "decode: a window one too wide": (
        DECODE["the window's first token"],
        {"wrong"},
        Plant("split", "window_mask.covers(position, first_seen)", "window_mask.covers(position, first_seen - 1)"),
    ),
    "decode: a window one too narrow": (
        DECODE["the window's first token"],
        {"wrong"},
        Plant("split", "window_mask.covers(position, first_seen)", "window_mask.covers(position, first_seen + 1)"),
    ),
    "decode: sum not rescaled": (
        DECODE["ring"],
        {"wrong"},
        Plant("split", "total * lax.broadcast_in_dim(alpha, total.shape, [1])", "total"),
    ),
    "decode: the first KV head's queries for all": (
        DECODE["lengths"],
        {"wrong"},
        Plant("split", "q_ref.at[place + t, heads, span]", "q_ref.at[place + t, pl.ds(0, group), span]"),
    ),
    "decode: rows that see nothing not written": (
        DECODE["lengths"],
        {"wrong"},
        Plant("split", "role != UNUSED", "num_tiles > 0"),
    ),
    "decode: a sink for who sees nothing": (
        DECODE["sinks"],
        {"wrong"},
        Plant("add_sink", "jnp.where(m == -jnp.inf, -jnp.inf, sink)", "sink"),
    ),
    "decode: a token sees its successor": (
        DECODE["few tokens"],
        {"wrong"},
        Plant("decode:split", "length - new + token", "length - new + token + 1"),
    ),
    "decode: padding sees the row": (
        DECODE["few tokens"],
        {"wrong"},
        Plant("decode:split", "(position <= last) & (token < new)", "position <= last"),
    ),
    "decode: one window for all tokens": (
        DECODE["few tokens, the window's first token"],
        {"wrong"},
        Plant("decode:split", "window_mask.first(last)", "first_seen"),
    ),
    "decode: the window of the last token": (
        DECODE["few tokens, window"],
        {"wrong"},
        Plant("decode:split", "window_mask.first(length - new)", "window_mask.first(length - 1)"),
    ),
    "decode: the chunk of the last token": (
        DECODE["few tokens, chunk"],
        {"wrong"},
        Plant("decode:split", "window_mask.first(length - new)", "window_mask.first(length - 1)"),
    ),
    "decode: the first row's tree for all": (
        DECODE["tree"],
        {"wrong"},
        Plant("split", "(row, i)", "(0, i)"),
    ),
    "decode: a tree taken for a chain": (
        DECODE["tree, window"],
        {"wrong"},
        Plant("decode:split", "token_mask is not None", "False"),
    ),
    "step: a tree's heads and tokens mixed up": (
        DECODE["tree"],
        {"wrong"},
        Plant(
            "_decode_rows",
            "jnp.repeat(tiles.tokens, q.shape[1] // num_kv_heads, axis=2)",
            "jnp.tile(tiles.tokens, (1, 1, q.shape[1] // num_kv_heads))",
        ),
    ),
    "step: the first token's ancestors for all": (
        DECODE["tree"],
        {"wrong"},
        Plant("_decode_rows", "start[:, None] + nth", "start[:, None] + 0 * nth"),
    ),
    "step: no chunk for rows of one token": (
        DECODE["chunk"],
        {"wrong"},
        Plant(
            "attend",
            "WindowMask.from_spec(mask, capacity)",
            "WindowMask.from_spec(mask, capacity)._replace(chunk=mask.chunk if width > 1 else None)",
        ),
    ),
    "merge: the last item counted again": (
        DECODE["window, cut"],
        {"wrong"},
        Plant("merge", "jnp.where(item < stop, 0.0, -jnp.inf)", "0.0"),
    ),
    "merge: a row that no thread block takes": (
        DECODE["window, cut"],
        {"wrong"},
        Plant("merge", "i * at_once", "i"),
    ),
    "merge: parts not weighed": (
        DECODE["window, cut"],
        {"wrong"},
        Plant("merge", "jnp.exp2(x_lse - safe)", "jnp.where(x_lse == -jnp.inf, 0.0, 1.0)"),
    ),
    "fetch: slot refilled while read": (
        DECODE["ring"],
        {"race", "barrier"},
        Plant("fetch", "plgpu.barrier_wait(free_ref.at[nth])", ""),
    ),
    "fetch: the wrong block": (
        DECODE["ring"],
        {"wrong"},
        Plant(
            "fetch",
            "tile_at(start + i, first_seen, window_mask, tile.tokens) * (tile.tokens // piece) + j",
            "tile_at(start + i, first_seen, window_mask, tile.tokens) * (tile.tokens // piece) + j + 1",
        ),
    ),
    "fetch: ids beyond the pool": (
        DECODE["wild ids"],
        {"wrong"},
        Plant("fetch", "jnp.clip(block, 0, num_blocks - 1)", "jnp.maximum(block, 0)"),
    ),
    "fetch: negative ids": (
        DECODE["wild ids"],
        {"wrong"},
        Plant("fetch", "jnp.clip(block, 0, num_blocks - 1)", "jnp.minimum(block, num_blocks - 1)"),
    ),
    "values: one too many kept": (
        DECODE["tails"],
        {"wrong"},
        Plant("select_seen_values", "place < stop", "place <= stop"),
    ),
    "values: one too many kept before the window": (
        DECODE["window"],
        {"wrong"},
        Plant(
            "select_seen_values",
            "place >= first if sinks is None else (place >= first) | (place < sinks)",
            "place >= first - 1 if sinks is None else (place >= first) | (place < sinks)",
        ),
    ),
    "softmax: no maximum yet": (
        DECODE["few tokens"],
        {"wrong"},
        Plant("safe_maximum", "jnp.where(m == -jnp.inf, 0.0, m)", "m"),
    ),
    "step: offsets not heeded": (
        DECODE["explicit offsets"],
        {"wrong"},
        Plant(
            "attend",
            "default_offsets(query_lens) if query_starts is None else query_starts",
            "default_offsets(query_lens)",
        ),
    ),
    "decode: first tokens left out": (
        DECODE["first tokens"],
        {"wrong"},
        Plant(
            "attend",
            "WindowMask.from_spec(mask, capacity)",
            "WindowMask.from_spec(mask, capacity)._replace(sink_tokens=0)",
        ),
    ),
    "decode: the gap's values": (
        DECODE["first tokens"],
        {"wrong"},
        Plant(
            "split",
            "select_seen_values(values, first_seen - first, length - first, sinks)",
            "select_seen_values(values, first_seen - first, length - first, tokens)",
        ),
    ),
    "decode: the gap seen": (
        DECODE["first tokens of a tile"],
        {"wrong"},
        Plant("split", "window_mask.covers(position, first_seen)", "window_mask.covers(position, first_seen - tokens)"),
    ),
    "fetch: the gap read": (
        DECODE["first tokens"],
        {"wrong"},
        Plant("tile_at", "jnp.where(nth < sink_tiles(window_mask, tokens), nth, place)", "place"),
    ),
    "decode: first tokens counted twice": (
        DECODE["first tokens, cut"],
        {"wrong"},
        Plant("walk_from", "jnp.maximum(tile - before, 0)", "jnp.where(tile > 0, tile - before, 0)"),
    ),
    "decode: the head's first columns for all": (
        Trial(Case((70,), (1,), 2, 1, 320, dtype="bfloat16")),
        {"race"},
        Plant("copied_spans", "pl.ds(first, width)", "pl.ds(0 * first, width)"),
    ),
}
MISTAKES_BY_DAY = (
    "decode: V read before it arrives", "decode: V's tail off by one", "merge: a row that no thread block takes",
    "fetch: ids beyond the pool",
)  # fmt: skip


@unless_on_a_gpu
@pytest.mark.parametrize("name", MISTAKES if NIGHTLY else MISTAKES_BY_DAY)
def test_mistake(name, monkeypatch):
    skip_unseen_race(name)
    trial, expected, *plants = MISTAKES[name]
    assert outcome_with(monkeypatch, trial, *plants) in expected


def test_every_mistake_can_be_made():
    SOURCES.check_plants(MISTAKES)
