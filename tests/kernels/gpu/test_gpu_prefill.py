"""Chunked and mixed steps against NumPy: interpreted with races detected, or natively on a GPU.

And known mistakes caught: those that only the compiler's output shows are in tests/compile.
"""

import dataclasses

import pytest
from gpu_mistakes import SOURCES, UNSYNCHRONISED, outcome_with, skip_unseen_race, unless_on_a_gpu
from nightly import NIGHTLY, skip_by_day
from planting import Plant
from trials import PREFILL

BY_DAY = (
    "packed",
    "71 heads of two",
    "ring",
    "tails of wide tiles",
    "the window's first token",
    "first tokens, chunks",
    "head_dim 320",
)


@pytest.mark.parametrize("name", PREFILL if NIGHTLY else BY_DAY)
def test_against_numpy(name, interpret, monkeypatch):
    PREFILL[name].use_plans(monkeypatch)
    PREFILL[name].check(interpret)


IN_TURNS, AHEAD = (dataclasses.replace(PREFILL["ring"], form=form) for form in ("turns", "ahead"))
# By name: the trial, how it may end, and what is planted.
MISTAKES = {
    "prefill: one half's token_mask for both": (
        PREFILL["chunk"],
        {"wrong"},
        Plant(
            "attend",
            "(lax.div(anew(item), jnp.int32(chunks)), pl.ds(half() * HALF, HALF))",
            "(lax.div(anew(item), jnp.int32(chunks)), pl.ds(0, HALF))",
        ),
    ),
    "prefill: a tile before some token's chunk taken for wholly seen": (
        PREFILL["the chunk's first token"],
        {"wrong"},
        Plant("attend", "items_ref[anew(item), 7]", "items_ref[anew(item), 7] - 64"),
    ),
    "prefill: a tile behind some token taken for wholly seen": (
        PREFILL["the chunk's first token"],
        {"wrong"},
        Plant("attend", "items_ref[anew(item), 8]", "items_ref[anew(item), 8] + 64"),
    ),
    "prefill: V before the chunk": (
        PREFILL["chunk"],
        {"wrong"},
        Plant("attend", "first_seen = first_token", "first_seen = 0 * first_token"),
    ),
    "prefill: a token sees its successor": (
        PREFILL["ring"],
        {"wrong"},
        Plant("attend", "query - first", "query - first + 1"),
    ),
    "prefill: a tile taken for wholly seen": (
        PREFILL["ring"],
        {"wrong"},
        Plant("attend", "first + (tokens - 1)", "first"),
    ),
    "prefill: V read before the other consumer cleaned its share": (
        PREFILL["tails of wide tiles"],
        {"race", "wrong"},
        Plant("attend", "plgpu.barrier_wait(v_selected.at[slot])", ""),
    ),
    "prefill: a share of V cleaned by nobody": (
        PREFILL["tails of wide tiles"],
        {"wrong", "race"},
        Plant(
            "attend",
            "select_seen_values(values, *seen, share=warpgroup, shares=CONSUMERS)",
            "select_seen_values(values, *seen, share=warpgroup + 1, shares=CONSUMERS)",
        ),
    ),
    "prefill: heads and tokens mixed up": (
        PREFILL["ring"],
        {"wrong"},
        Plant(
            "attend",
            "lax.rem(plgpu.broadcasted_iota(jnp.int32, (HALF,), 0, layout=LAYOUT.reduce(1)), jnp.int32(own))",
            "lax.div(plgpu.broadcasted_iota(jnp.int32, (HALF,), 0, layout=LAYOUT.reduce(1)), jnp.int32(group))",
        ),
    ),
    "prefill: another head's queries": (
        PREFILL["odd places"],
        {"wrong"},
        Plant("attend", "at(first, own, nth)", "at(first, own, 0)"),
    ),
    "prefill: both consumers take the same tokens": (
        PREFILL["odd places"],
        {"wrong"},
        Plant("attend", "first = items_ref[anew(item), 5] + half() * own", "first = items_ref[anew(item), 5]"),
    ),
    "prefill: a token too many written": (
        PREFILL["odd places"],
        {"wrong", "race"},
        Plant("attend", "items_ref[anew(item), 6] - half() * own", "items_ref[anew(item), 6] - half() * own + 1"),
    ),
    "prefill: a token too few written": (
        PREFILL["odd places"],
        {"wrong"},
        Plant("attend", "(32, 16, 8, 4, 2, 1)", "(32, 16, 8, 4, 2)"),
    ),
    "prefill: the rest of the tokens from their beginning": (
        PREFILL["odd places"],
        {"wrong", "race"},
        Plant("attend", "count & -2 * size", "0 * count"),
    ),
    "prefill: another head's output": (
        PREFILL["odd places"],
        {"wrong"},
        Plant("attend", "at(first + begin, size, nth)", "at(first + begin, size, group - 1 - nth)"),
    ),
    "prefill: rows that see nothing not written": (
        PREFILL["more new tokens than tokens"],
        {"wrong"},
        Plant("attend", "items_ref[item, 6] > 0 if chunks == 1 else num_tiles > 0", "num_tiles > 0"),
    ),
    "work: the first key of a row that has none": (
        PREFILL["more new tokens than tokens, chunk"],
        {"wrong"},
        Plant("prefill_items", "stop = jnp.minimum(stop, lengths[row])", ""),
    ),
    "prefill: another token's hole": (
        PREFILL["odd places"],
        {"wrong", "race"},
        Plant("attend", "(anew(item) * halves + half()) * own", "item * 0"),
    ),
    "prefill: holes beyond the first 32": (
        PREFILL["padding"],
        {"wrong"},
        Plant("attend", "jnp.where(i < 32, words[0], words[1])", "words[0]"),
    ),
    "step: sinks of heads in the tokens' order": (
        PREFILL["sinks"],
        {"wrong"},
        Plant(
            "_prefill_rows",
            "sinks.astype(jnp.float32).reshape(num_kv_heads, group, 1)",
            "sinks.astype(jnp.float32).reshape(num_kv_heads, group, 1)[:, ::-1]",
        ),
    ),
    "prefill: a tile of the window's edge taken for wholly seen": (
        PREFILL["the window's first token"],
        {"wrong"},
        Plant("attend", "window_mask.first(part.stop - 1)", "window_mask.first(part.stop - 1) - 1"),
    ),
    "prefill: a window one too wide": (
        PREFILL["the window's first token"],
        {"wrong"},
        Plant("attend", "window_mask.first(query) - first", "window_mask.first(query) - first - 1"),
    ),
    "prefill: V before the window": (
        PREFILL["window"],
        {"wrong"},
        Plant("attend", "(first < part.first_seen) | (first + tokens > part.stop)", "first + tokens > part.stop"),
    ),
    "prefill: V's tail off by one": (
        PREFILL["tails of wide tiles"],
        {"wrong"},
        Plant("attend", "first + tokens > part.stop", "first + tokens > part.stop + 1"),
    ),
    "prefill: K's slot released before the product": (
        PREFILL["ring"],
        {"race"},
        Plant(
            "attend.kernel.ready_keys",
            "plgpu.barrier_wait(k_ready.at[slot])",
            "plgpu.barrier_wait(k_ready.at[slot])\nplgpu.barrier_arrive(k_free.at[slot])",
        ),
        Plant(
            "attend.kernel.softmax",
            "if not quantized:\n"
            "    plgpu.barrier_arrive(k_free.at[slot])\n"
            "elif by_token:\n"
            "    s = s * lax.broadcast_in_dim(scales(slot, 0), s.shape, [1])",
            "if by_token:\n    s = s * lax.broadcast_in_dim(scales(slot, 0), s.shape, [1])",
        ),
    ),
    "prefill: V's slot released before the product": (
        PREFILL["ring"],
        {"race"},
        Plant(
            "attend.kernel.ready_values",
            "plgpu.barrier_wait(v_ready.at[own_slot(slot)])",
            "plgpu.barrier_wait(v_ready.at[own_slot(slot)])\nplgpu.barrier_arrive(v_free.at[own_slot(slot)])",
        ),
        Plant("attend.kernel.add_values", "if not quantized:\n    plgpu.barrier_arrive(v_free.at[own_slot(slot)])", ""),
    ),
    "prefill: V read before it arrives": (
        PREFILL["ring"],
        UNSYNCHRONISED,
        Plant("attend", "if not format.mixes_pairs:\n    plgpu.barrier_wait(v_ready.at[own_slot(slot)])", ""),
    ),
    "prefill, columns: the other's queries not awaited": (
        PREFILL["head_dim 320"],
        {"race", "wrong"},
        Plant("attend.kernel.read_queries", "if splits_columns:\n    meet()", ""),
    ),
    "prefill, columns: the output over queries that are read": (
        PREFILL["head_dim 320"],
        {"race", "wrong"},
        Plant("attend.kernel.write", "if splits_columns:\n    meet()", ""),
    ),
    "prefill, columns: keys' first half alone": (
        PREFILL["head_dim 320"],
        {"wrong"},
        Plant("attend.kernel.weigh", "enumerate(spans)", "enumerate(spans[:1])"),
    ),
    "prefill, columns: one half of V for both": (
        PREFILL["head_dim 320"],
        {"wrong", "race"},
        Plant(
            "attend.kernel.produce",
            "values._replace(first_slot=stages, first_column=width)",
            "values._replace(first_slot=stages)",
        ),
    ),
    "prefill, columns: V's slot released before the product": (
        PREFILL["head_dim 512, ring"],
        {"race", "barrier"},
        Plant(
            "attend.kernel.ready_values",
            "plgpu.barrier_wait(v_ready.at[own_slot(slot)])",
            "plgpu.barrier_wait(v_ready.at[own_slot(slot)])\nplgpu.barrier_arrive(v_free.at[own_slot(slot)])",
        ),
        Plant("attend.kernel.add_values", "if not quantized:\n    plgpu.barrier_arrive(v_free.at[own_slot(slot)])", ""),
    ),
    "prefill, columns: both write the same": (
        PREFILL["head_dim 512"],
        {"wrong", "race"},
        Plant("attend.kernel.columns", "anew(warpgroup) * width", "anew(warpgroup) * 0"),
    ),
    "prefill, columns: V's tail not cleaned": (
        PREFILL["head_dim 320"],
        {"wrong"},
        Plant("attend", "select_seen_values(values, *seen)", ""),
    ),
    "prefill: output not rescaled": (
        PREFILL["ring"],
        {"wrong"},
        Plant("attend", "add_values(part, i, rescaled(acc, alpha), weights)", "add_values(part, i, acc, weights)"),
    ),
    "prefill: a turn not awaited": (
        IN_TURNS,
        {"barrier"},
        Plant(
            "attend",
            "await_turn()\nacc = accumulate(interpret, acc, (weights, values))",
            "acc = accumulate(interpret, acc, (weights, values))",
        ),
    ),
    "prefill, ahead: V's slot released before the product": (
        AHEAD,
        {"race", "wrong"},
        Plant("attend.kernel.overlapped", "plgpu.barrier_arrive(v_free.at[slot_of(i - 1)])", ""),
        Plant("attend.kernel.overlapped", "await_turn()", "plgpu.barrier_arrive(v_free.at[slot_of(i - 1)])"),
    ),
    "prefill, ahead: V of the tile itself": (
        AHEAD,
        {"wrong", "race", "barrier"},
        Plant("attend", "ready_values(part, i - 1)", "ready_values(part, i)"),
    ),
    "prefill, ahead: output not rescaled": (
        AHEAD,
        {"wrong"},
        Plant(
            "attend",
            "(rescaled(acc, alpha), m, total, weights.astype(q.dtype))",
            "(acc, m, total, weights.astype(q.dtype))",
        ),
    ),
    "prefill, ahead: the first tile's sum forgotten": (
        AHEAD,
        {"wrong"},
        Plant("attend", "(weights, _, m, total)", "(weights, _, m, _)"),
    ),
    "step: chunks without tiles counted": (
        PREFILL["chunks"],
        {"wrong"},
        Plant("_prefill_rows", "items[..., 4] > items[..., 3]", "items[..., 4] >= 0"),
    ),
    "step: one item too few": (
        PREFILL["tight items"],
        {"wrong"},
        Plant(
            "_prefill_items",
            "(num_tokens - rows) // item_tokens + rows",
            "(num_tokens - rows) // item_tokens + rows - 1",
        ),
    ),
    "prefill: padding not zeroed": (
        PREFILL["packed"],
        {"wrong"},
        Plant("attend", "fill_holes()", ""),
    ),
    "step: padding not zeroed where the context is cut": (
        PREFILL["chunks"],
        {"wrong"},
        Plant("_prefill_rows", "out = jnp.where(token.valid[:, None, None], out, jnp.zeros_like(out))", ""),
    ),
    "prefill: first tokens left out": (
        PREFILL["first tokens"],
        {"wrong"},
        Plant(
            "attend",
            "WindowMask.from_spec(mask, capacity)",
            "WindowMask.from_spec(mask, capacity)._replace(sink_tokens=0)",
        ),
    ),
    "prefill: first tokens counted twice": (
        PREFILL["first tokens, wide tiles"],
        {"wrong"},
        Plant("walk_from", "jnp.maximum(tile - before, 0)", "jnp.where(tile > 0, tile - before, 0)"),
    ),
}


@unless_on_a_gpu
@skip_by_day("those of decode, in test_gpu_decode.py")
@pytest.mark.parametrize("name", MISTAKES)
def test_mistake(name, monkeypatch):
    skip_unseen_race(name)
    trial, expected, *plants = MISTAKES[name]
    assert outcome_with(monkeypatch, trial, *plants) in expected


def test_every_mistake_can_be_made():
    SOURCES.check_plants(MISTAKES)
