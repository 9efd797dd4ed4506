"""Negative controls: the kernels with a known mistake must fail on the rung of the ladder that should catch it.

The mistakes that only the compiler's output shows are in tests/compile.
"""

import dataclasses

import jax
import pytest
from gpu_mistakes import SOURCES, outcome, plant
from nightly import NIGHTLY
from planting import Plant
from trials import DECODE, PREFILL

pytestmark = pytest.mark.skipif(jax.default_backend() == "gpu", reason="a known-bad kernel may hang a GPU")


UNSYNCHRONISED = {"race", "wrong", "barrier"}
IN_TURNS, AHEAD = (dataclasses.replace(PREFILL["ring"], form=form) for form in ("turns", "ahead"))
# By name: the trial, how it may end, and what is planted.
MISTAKES = {
    "decode: V read before it arrives": (
        DECODE["ring"],
        UNSYNCHRONISED,
        Plant("split", "plgpu.barrier_wait(v_ready.at[slot])", ""),
    ),
    "decode: K's slot released before the product": (
        DECODE["ring"],
        {"race"},
        Plant(
            "split",
            "plgpu.barrier_wait(k_ready.at[slot])",
            "plgpu.barrier_wait(k_ready.at[slot])\nplgpu.barrier_arrive(k_free.at[slot])",
        ),
        Plant(
            "split",
            "if not quantized:\n"
            "    plgpu.barrier_arrive(k_free.at[slot])\n"
            "else:\n"
            "    s = s * lax.broadcast_in_dim(key_scales, s.shape, [0])",
            "if quantized:\n    s = s * lax.broadcast_in_dim(key_scales, s.shape, [0])",
        ),
    ),
    "decode: V's slot released before the product": (
        DECODE["ring"],
        {"race"},
        Plant(
            "split",
            "plgpu.barrier_wait(v_ready.at[slot])",
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
        Plant("split", "q_ref.at[place + t, *heads]", "q_ref.at[place + t, pl.ds(0, group)]"),
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
    "work: a span cut off at its item's end": (
        PREFILL["spans"],
        {"wrong"},
        Plant(
            "prefill_items",
            "(tiles.start, tiles.stop, tiles.tokens, tiles[3:])",
            "(tiles.start, stop, tiles.tokens, tiles[3:])",
        ),
    ),
    "work: token_masks in another order than items": (
        PREFILL["spans"],
        {"wrong"},
        Plant("prefill_items", "token_masks[order]", "token_masks"),
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
            "else:\n"
            "    s = s * lax.broadcast_in_dim(scales(slot, 0), s.shape, [1])",
            "if quantized:\n    s = s * lax.broadcast_in_dim(scales(slot, 0), s.shape, [1])",
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
        Plant("attend", "plgpu.barrier_wait(v_ready.at[own_slot(slot)])", ""),
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
            "await_turn()\nacc = accumulate(interpret, acc, weights, values)",
            "acc = accumulate(interpret, acc, weights, values)",
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
    "work: chunks that overlap": (
        PREFILL["chunks"],
        {"wrong"},
        Plant("prefill_items", "chunk + 1", "chunk + 2"),
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
    "work: lengths beyond the table": (
        DECODE["beyond the table"],
        {"wrong", "buffer has shape"},
        Plant("decode_items", "jnp.clip(length, 0, capacity)", "length"),
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
    "decode: first tokens left out": (
        DECODE["first tokens"],
        {"wrong"},
        Plant(
            "attend",
            "WindowMask.from_spec(mask, capacity)",
            "WindowMask.from_spec(mask, capacity)._replace(sink_tokens=0)",
        ),
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
    "work: the gap walked": (
        DECODE["first tokens"],
        {"wrong"},
        Plant("decode_items", "first = walk_from(first, window_mask, tile_tokens)", "first *= 0"),
    ),
    "decode: first tokens counted twice": (
        DECODE["first tokens, cut"],
        {"wrong"},
        Plant("walk_from", "jnp.maximum(tile - before, 0)", "jnp.where(tile > 0, tile - before, 0)"),
    ),
    "prefill: first tokens counted twice": (
        PREFILL["first tokens, wide tiles"],
        {"wrong"},
        Plant("walk_from", "jnp.maximum(tile - before, 0)", "jnp.where(tile > 0, tile - before, 0)"),
    ),
    "decode: columns of another place in the head": (
        DECODE["head_dim 80"],
        {"wrong"},
        Plant("decode:split", "head * 0", "head * 0 + 8"),
    ),
    "work: rows that begin with their chunk": (
        DECODE["more rows than a chunk"],
        {"wrong", "barrier"},
        Plant("decode_items", "b + along(x, 0)", "b"),
    ),
    "work: a row's items where the next one's are": (
        DECODE["lengths"],
        {"wrong", "barrier"},
        Plant("decode_items", "line < nth + j * ROWS_AT_ONCE", "line <= nth + j * ROWS_AT_ONCE"),
    ),
    "work: the rows in parts listed in one place": (
        DECODE["window, cut"],
        {"wrong", "buffer has shape"},
        Plant("decode_items", "wide(nth_cut, 1)", "wide(0 * nth_cut, 1)"),
    ),
    "work: the last tile left out": (
        DECODE["ring"],
        {"wrong"},
        Plant("decode_items", "length + (tile_tokens - 1)", "length"),
    ),
    "work: the first token's window not heeded": (
        DECODE["few tokens, window"],
        {"wrong"},
        Plant("decode_items", "length - count", "length - 1"),
    ),
}
BY_DAY = (
    "decode: V read before it arrives", "decode: V's tail off by one", "merge: a row that no thread block takes",
    "fetch: ids beyond the pool",
)  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES if NIGHTLY else BY_DAY)
def test_mistake(name, monkeypatch):
    if "released" in name and jax.__version_info__ < (0, 12):
        pytest.skip("JAX 0.11's interpreter does not see this race")
    trial, expected, *plants = MISTAKES[name]
    trial.use_plans(monkeypatch)
    plant(monkeypatch, *plants)
    assert outcome(trial) in expected


def test_every_mistake_can_be_made():
    for name, (_, _, *plants) in MISTAKES.items():
        assert SOURCES.broken(*plants), name
