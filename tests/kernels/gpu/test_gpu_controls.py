"""Negative controls: the kernels with a known mistake must fail on the rung of the ladder that should catch it.

The mistakes that only the compiler's output shows are in tests/compile.
"""

import dataclasses
import re

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from mutants import mutant
from nightly import NIGHTLY
from trials import DECODE, PREFILL, Trial

from pallas_kernels import gpu
from pallas_kernels.gpu import decode, latent, prefill, step, tiles, work_items as work

pytestmark = pytest.mark.skipif(jax.default_backend() == "gpu", reason="a known-bad kernel may hang a GPU")


def outcome(trial: Trial) -> str:
    """How interpreting a trial ends: "right", "wrong", "race", "barrier", "buffer has shape" (read
    out of bounds), or the exception."""
    interpret_pallas_call.reset_gpu_interpret_mode_state()
    try:
        trial.check(plgpu.InterpretGPUParams(detect_races=True, num_tma_threads_per_device=64))
        races = interpret_pallas_call.get_races()
        return "race" if races is not None and races.races_found else "right"
    except AssertionError:
        return "wrong"
    except Exception as e:  # newer interpreters raise on a race, and on a barrier left behind
        named = re.findall(r"\brace\b|barrier|buffer has shape", str(e).lower())
        return named[0] if named else repr(e)
    finally:
        interpret_pallas_call.reset_gpu_interpret_mode_state()


def put_in_place(module, changes, monkeypatch) -> None:
    """Let the backend use `module` with these changes."""
    copy = mutant(module, *changes)
    if module is step:
        monkeypatch.setattr(gpu, "attend", copy.attend)
    elif module is tiles:
        for user in (decode, prefill, latent):
            for name in ("fetch", "select_seen_values", "safe_maximum", "logits_base2", "tile_at", "add_sink"):
                monkeypatch.setattr(user, name, getattr(copy, name))
        monkeypatch.setattr(work, "walk_from", copy.walk_from)
    else:
        if module is work:
            copy.WAVES, copy.FEW_TILES = work.WAVES, work.FEW_TILES
        monkeypatch.setattr(step, module.__name__.rpartition(".")[2], copy)


def early(which: str, indent: int) -> tuple[tuple[str, str], ...]:
    """A slot that is released as soon as it is full; `indent`: how far in the line stands that releases it."""
    wait, free = f"plgpu.barrier_wait({which}_ready.at[slot])", f"plgpu.barrier_arrive({which}_free.at[slot])"
    release = f"if kind is None:\n{' ' * indent}{free}"
    return (release, release.replace(free, "pass")), (wait, f"{wait}; {free}")


UNSYNCHRONISED = {"race", "wrong", "barrier"}
IN_TURNS, AHEAD = (dataclasses.replace(PREFILL["ring"], form=form) for form in ("turns", "ahead"))
# By name: the module, the trial, how it may end, and what is changed. The first of each group are for every day.
MISTAKES = {
    "decode: V read before it arrives": (
        decode, DECODE["ring"], UNSYNCHRONISED, ("plgpu.barrier_wait(v_ready.at[slot])", "pass"),
    ),
    "decode: K's slot released before the product": (decode, DECODE["ring"], {"race"}, *early("k", indent=20)),
    "decode: V's slot released before the product": (decode, DECODE["ring"], {"race"}, *early("v", indent=20)),
    "decode: queries read before they arrive": (
        decode, DECODE["ring"], UNSYNCHRONISED, ("plgpu.barrier_wait(q_ready)", "pass"),
    ),
    "decode: one token too many": (
        decode, DECODE["tails"], {"wrong"}, ("seen = position < length\n", "seen = position < length + 1\n"),
    ),
    "decode: garbage times zero": (
        decode, DECODE["tails"], {"wrong"},
        ("select_seen_values(values, first_seen - first, length - first, sinks)", "pass"),
    ),
    "decode: V's tail off by one": (
        decode, DECODE["tails"], {"wrong"}, ("(first + tokens > length))", "(first + tokens > length + 1))"),
    ),
    "decode: V before the window": (
        decode, DECODE["window"], {"wrong"}, ("(first < first_seen) | (first + tokens", "(first + tokens"),
    ),
    "decode: a window one too wide": (
        decode, DECODE["the window's first token"], {"wrong"},
        ("covers(position, first_seen)", "covers(position, first_seen - 1)"),
    ),
    "decode: a window one too narrow": (
        decode, DECODE["the window's first token"], {"wrong"},
        ("covers(position, first_seen)", "covers(position, first_seen + 1)"),
    ),
    "decode: sum not rescaled": (
        decode, DECODE["ring"], {"wrong"},
        ("total = total * lax.broadcast_in_dim(alpha, total.shape, [1]) + p", "total = total + p"),
    ),
    "decode: the first KV head's queries for all": (
        decode, DECODE["lengths"], {"wrong"},
        ("source = q_ref.at[place + t, *heads]", "source = q_ref.at[place + t, pl.ds(0, group)]"),
    ),
    "decode: rows that see nothing not written": (
        decode, DECODE["lengths"], {"wrong"},
        ("(warpgroup == 0) & (role != UNUSED)", "(warpgroup == 0) & (num_tiles > 0)"),
    ),
    "decode: a sink for who sees nothing": (
        tiles, DECODE["sinks"], {"wrong"}, ("jnp.where(m == -jnp.inf, -jnp.inf, sink)", "sink"),
    ),
    "decode: a token sees its successor": (
        decode, DECODE["few tokens"], {"wrong"}, ("last = length - new + token", "last = length - new + token + 1"),
    ),
    "decode: padding sees the row": (decode, DECODE["few tokens"], {"wrong"}, (" & (token < new)", "")),
    "decode: one window for all tokens": (
        decode, DECODE["few tokens, the window's first token"], {"wrong"},
        ("covers(position, reach.first(last))", "covers(position, first_seen)"),
    ),
    "decode: the window of the last token": (
        decode, DECODE["few tokens, window"], {"wrong"},
        ("jnp.maximum(reach.first(length - new), 0)", "jnp.maximum(reach.first(length - 1), 0)"),
    ),
    "decode: the chunk of the last token": (
        decode, DECODE["few tokens, chunk"], {"wrong"},
        ("jnp.maximum(reach.first(length - new), 0)", "jnp.maximum(reach.first(length - 1), 0)"),
    ),
    "decode: the first row's tree for all": (
        decode, DECODE["tree"], {"wrong"}, ("sight_ref.at[row, i]", "sight_ref.at[0, i]"),
    ),
    "decode: a tree taken for a chain": (
        decode, DECODE["tree, window"], {"wrong"},
        ("if sight is not None:\n                lines", "if False:\n                lines"),
    ),
    "step: a tree's heads and tokens mixed up": (
        step, DECODE["tree"], {"wrong"},
        ("jnp.repeat(tiles.tokens, q.shape[1] // num_kv_heads, axis=2)",
         "jnp.tile(tiles.tokens, (1, 1, q.shape[1] // num_kv_heads))"),
    ),
    "step: the first token's ancestors for all": (
        step, DECODE["tree"], {"wrong"}, ("start[:, None] + nth, nth <", "start[:, None] + 0 * nth, nth <"),
    ),
    "step: no chunk for rows of one token": (
        step, DECODE["chunk"], {"wrong"}, ("window, chunk, sink", "window, chunk if width > 1 else None, sink"),
    ),
    "prefill: one half's sight for both": (
        prefill, PREFILL["chunk"], {"wrong"},
        ("pl.ds(half * HALF, HALF)\n                lines", "pl.ds(0, HALF)\n                lines"),
    ),
    "prefill: a tile before some token's chunk taken for wholly seen": (
        prefill, PREFILL["the chunk's first token"], {"wrong"},
        ("items_ref[anew(item), 7])", "items_ref[anew(item), 7] - 64)"),
    ),
    "prefill: a tile behind some token taken for wholly seen": (
        prefill, PREFILL["the chunk's first token"], {"wrong"},
        ("items_ref[anew(item), 8])", "items_ref[anew(item), 8] + 64)"),
    ),
    "prefill: V before the chunk": (
        prefill, PREFILL["chunk"], {"wrong"}, ("first_seen = first_token\n", "first_seen = 0 * first_token\n"),
    ),
    "work: a span cut off at its item's end": (
        work, PREFILL["spans"], {"wrong"}, ("tiles.start, tiles.stop, tiles.tokens", "tiles.start, stop, tiles.tokens"),
    ),
    "work: sights in another order than items": (
        work, PREFILL["spans"], {"wrong"}, ("else sights[order]", "else sights"),
    ),
    "merge: the last item counted again": (
        decode, DECODE["window, cut"], {"wrong"}, ("jnp.where(item < stop, 0.0, -jnp.inf)", "0.0"),
    ),
    "merge: a row that no thread block takes": (
        decode, DECODE["window, cut"], {"wrong"}, ("items_ref[nth + i * at_once, j]", "items_ref[nth + i, j]"),
    ),
    "merge: parts not weighed": (
        decode, DECODE["window, cut"], {"wrong"}, ("jnp.exp2(x_lse - safe)", "jnp.where(x_lse == -jnp.inf, 0.0, 1.0)"),
    ),
    "fetch: slot refilled while read": (
        tiles, DECODE["ring"], {"race", "barrier"}, ("plgpu.barrier_wait(free_ref.at[slot])", "pass"),
    ),
    "fetch: the wrong block": (
        tiles, DECODE["ring"], {"wrong"}, ("(tile.tokens // piece) + j\n", "(tile.tokens // piece) + j + 1\n"),
    ),
    "fetch: ids beyond the pool": (
        tiles, DECODE["wild ids"], {"wrong"}, ("jnp.clip(block, 0, num_blocks - 1)", "jnp.maximum(block, 0)"),
    ),
    "fetch: negative ids": (
        tiles, DECODE["wild ids"], {"wrong"},
        ("jnp.clip(block, 0, num_blocks - 1)", "jnp.minimum(block, num_blocks - 1)"),
    ),
    "values: one too many kept": (tiles, DECODE["tails"], {"wrong"}, ("(place < stop)", "(place <= stop)")),
    "values: one too many kept before the window": (
        tiles, DECODE["window"], {"wrong"}, ("seen = place >= first if", "seen = place >= first - 1 if"),
    ),
    "softmax: no maximum yet": (
        tiles, DECODE["few tokens"], {"wrong"}, ("return jnp.where(m == -jnp.inf, 0.0, m)", "return m"),
    ),
    "prefill: a token sees its successor": (
        prefill, PREFILL["ring"], {"wrong"}, ("(query - first, s.shape", "(query - first + 1, s.shape"),
    ),
    "prefill: a tile taken for wholly seen": (
        prefill, PREFILL["ring"], {"wrong"},
        ("partly_seen = first + (tokens - 1) > part.first_token", "partly_seen = first > part.first_token"),
    ),
    "prefill: V read before the other consumer cleaned its share": (
        prefill, PREFILL["tails of wide tiles"], {"race", "wrong"},
        ("plgpu.barrier_wait(v_selected.at[slot])", "pass"),
    ),
    "prefill: a share of V cleaned by nobody": (
        prefill, PREFILL["tails of wide tiles"], {"wrong", "race"},
        ("share=warpgroup, shares=CONSUMERS", "share=warpgroup + 1, shares=CONSUMERS"),
    ),
    "prefill: heads and tokens mixed up": (
        prefill, PREFILL["ring"], {"wrong"},
        ("query = lax.rem(plgpu.broadcasted_iota(jnp.int32, (HALF,), 0, layout=LAYOUT.reduce(1)), jnp.int32(own))",
         "query = lax.div(plgpu.broadcasted_iota(jnp.int32, (HALF,), 0, layout=LAYOUT.reduce(1)), jnp.int32(group))"),
    ),
    "prefill: another head's queries": (
        prefill, PREFILL["odd places"], {"wrong"},
        ("q_ref.at[at(first, own, nth)]", "q_ref.at[at(first, own, 0)]"),
    ),
    "prefill: both consumers take the same tokens": (
        prefill, PREFILL["odd places"], {"wrong"},
        ("first = items_ref[anew(item), 5] + half * own", "first = items_ref[anew(item), 5]"),
    ),
    "prefill: a token too many written": (
        prefill, PREFILL["odd places"], {"wrong", "race"},
        ("items_ref[anew(item), 6] - half * own)", "items_ref[anew(item), 6] - half * own + 1)"),
    ),
    "prefill: a token too few written": (
        prefill, PREFILL["odd places"], {"wrong"},
        ("for size in (32, 16, 8, 4, 2, 1)", "for size in (32, 16, 8, 4, 2)"),
    ),
    "prefill: the rest of the tokens from their beginning": (
        prefill, PREFILL["odd places"], {"wrong", "race"}, ("copy(count & (-2 * size), size)", "copy(0 * count, size)"),
    ),
    "prefill: another head's output": (
        prefill, PREFILL["odd places"], {"wrong"},
        ("out_ref.at[at(first + begin, size, nth)]", "out_ref.at[at(first + begin, size, group - 1 - nth)]"),
    ),
    "prefill: rows that see nothing not written": (
        prefill, PREFILL["more new tokens than tokens"], {"wrong"},
        ("items_ref[item, 6] > 0 if chunks == 1 else num_tiles > 0", "num_tiles > 0"),
    ),
    "prefill: another token's hole": (
        prefill, PREFILL["odd places"], {"wrong", "race"},
        ("(anew(item) * CONSUMERS + half) * own + i", "item * 0 + i"),
    ),
    "prefill: holes beyond the first 32": (
        prefill, PREFILL["padding"], {"wrong"}, ("word = jnp.where(i < 32, words[0], words[1])", "word = words[0]"),
    ),
    "step: sinks of heads in the tokens' order": (
        step, PREFILL["sinks"], {"wrong"},
        ("reshape(num_kv_heads, group, 1), group)", "reshape(num_kv_heads, group, 1)[:, ::-1], group)"),
    ),
    "prefill: a tile of the window's edge taken for wholly seen": (
        prefill, PREFILL["the window's first token"], {"wrong"},
        ("partly_seen |= first < reach.first(part.stop - 1)", "partly_seen |= first < reach.first(part.stop - 1) - 1"),
    ),
    "prefill: a window one too wide": (
        prefill, PREFILL["the window's first token"], {"wrong"},
        ("reach.first(query) - first", "reach.first(query) - first - 1"),
    ),
    "prefill: V before the window": (
        prefill, PREFILL["window"], {"wrong"}, ("(first < part.first_seen) | (first + tokens", "(first + tokens"),
    ),
    "prefill: V's tail off by one": (
        prefill, PREFILL["tails of wide tiles"], {"wrong"},
        ("(first + tokens > part.stop))", "(first + tokens > part.stop + 1))"),
    ),
    "prefill: K's slot released before the product": (prefill, PREFILL["ring"], {"race"}, *early("k", indent=16)),
    "prefill: V's slot released before the product": (prefill, PREFILL["ring"], {"race"}, *early("v", indent=16)),
    "prefill: V read before it arrives": (
        prefill, PREFILL["ring"], UNSYNCHRONISED, ("plgpu.barrier_wait(v_ready.at[slot])", "pass"),
    ),
    "prefill: output not rescaled": (
        prefill, PREFILL["ring"], {"wrong"}, ("rescaled(acc, alpha), weights), m", "acc, weights), m"),
    ),
    "prefill: a turn not awaited": (
        prefill, IN_TURNS, {"barrier"}, ("await_turn()\n            acc = accumulate", "acc = accumulate"),
    ),
    "prefill, ahead: V's slot released before the product": (
        prefill, AHEAD, {"race", "wrong"}, ("plgpu.barrier_arrive(v_free.at[slot_of(i - 1)])", "pass"),
        ("await_turn()\n\n            def", "plgpu.barrier_arrive(v_free.at[slot_of(i - 1)])\n\n            def"),
    ),
    "prefill, ahead: V of the tile itself": (
        prefill, AHEAD, {"wrong", "race", "barrier"}, ("ready_values(part, i - 1)", "ready_values(part, i)"),
    ),
    "prefill, ahead: output not rescaled": (
        prefill, AHEAD, {"wrong"}, ("return rescaled(acc, alpha), m, total, weights", "return acc, m, total, weights"),
    ),
    "prefill, ahead: the first tile's sum forgotten": (
        prefill, AHEAD, {"wrong"},
        ("weights, _, m, total = weigh(part, jnp", "weights, _, m, _ = weigh(part, jnp"),
    ),
    "step: chunks without tiles counted": (
        step, PREFILL["chunks"], {"wrong"}, ("items[..., 4] > items[..., 3])", "items[..., 4] >= 0)"),
    ),
    "work: chunks that overlap": (
        work, PREFILL["chunks"], {"wrong"}, ("for n in (chunk, chunk + 1))", "for n in (chunk, chunk + 2))"),
    ),
    "step: one item too few": (
        step, PREFILL["tight items"], {"wrong"}, ("// item_tokens + rows  #", "// item_tokens + rows - 1  #"),
    ),
    "work: lengths beyond the table": (
        work, DECODE["beyond the table"], {"wrong", "buffer has shape"}, ("jnp.clip(length, 0, capacity)", "length"),
    ),
    "step: offsets not heeded": (
        step, DECODE["explicit offsets"], {"wrong"},
        ("default_offsets(new) if offsets is None else offsets", "default_offsets(new)"),
    ),
    "prefill: padding not zeroed": (
        prefill, PREFILL["packed"], {"wrong"}, ("fill_holes()\n\n", "pass\n\n"),
    ),
    "step: padding not zeroed where the context is cut": (
        step, PREFILL["chunks"], {"wrong"},
        ("out = jnp.where(token.valid[:, None, None], out, jnp.zeros_like(out))\n", "\n"),
    ),
    "decode: first tokens left out": (
        step, DECODE["first tokens"], {"wrong"}, ("window, chunk, sink_tokens), soft", "window, chunk, None), soft"),
    ),
    "prefill: first tokens left out": (
        step, PREFILL["first tokens"], {"wrong"}, ("window, chunk, sink_tokens), soft", "window, chunk, None), soft"),
    ),
    "decode: the gap's values": (
        decode, DECODE["first tokens"], {"wrong"},
        ("first_seen - first, length - first, sinks)", "first_seen - first, length - first, tokens)"),
    ),
    "decode: the gap seen": (
        decode, DECODE["first tokens of a tile"], {"wrong"},
        ("covers(position, first_seen)", "covers(position, first_seen - tokens)"),
    ),
    "fetch: the gap read": (
        tiles, DECODE["first tokens"], {"wrong"},
        ("jnp.where(nth < sink_tiles(reach, tokens), nth, place)", "place"),
    ),
    "work: the gap walked": (
        work, DECODE["first tokens"], {"wrong"},
        ("            first = walk_from(first, reach, tile_tokens)\n", "            first *= 0\n"),
    ),
    "decode: first tokens counted twice": (
        tiles, DECODE["first tokens, cut"], {"wrong"},
        ("jnp.maximum(tile - before, 0) if before", "jnp.where(tile > 0, tile - before, 0) if before"),
    ),
    "prefill: first tokens counted twice": (
        tiles, PREFILL["first tokens, wide tiles"], {"wrong"},
        ("jnp.maximum(tile - before, 0) if before", "jnp.where(tile > 0, tile - before, 0) if before"),
    ),
    "decode: columns of another place in the head": (
        decode, DECODE["head_dim 80"], {"wrong"}, ("pl.ds(head * 0, head_dim)", "pl.ds(head * 0 + 8, head_dim)"),
    ),
    "work: rows that begin with their chunk": (
        work, DECODE["more rows than a chunk"], {"wrong", "barrier"},
        ("b + along(x, 0) for b, x in", "b for b, x in"),
    ),
    "work: a row's items where the next one's are": (
        work, DECODE["lengths"], {"wrong", "barrier"}, ("earlier = line < nth", "earlier = line <= nth"),
    ),
    "work: the rows in parts listed in one place": (
        work, DECODE["window, cut"], {"wrong", "buffer has shape"},
        ("own_line == wide(nth_cut, 1)", "own_line == wide(0 * nth_cut, 1)"),
    ),
    "work: the last tile left out": (
        work, DECODE["ring"], {"wrong"},
        ("lax.div(length + (tile_tokens - 1), ", "lax.div(length, "),
    ),
    "work: the first token's window not heeded": (
        work, DECODE["few tokens, window"], {"wrong"}, ("reach.first(length - count)", "reach.first(length - 1)"),
    ),
}  # fmt: skip
BY_DAY = (
    "decode: V read before it arrives", "decode: V's tail off by one", "merge: a row that no thread block takes",
    "fetch: ids beyond the pool", "prefill: V before the window",
)  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES if NIGHTLY else BY_DAY)
def test_mistake(name, monkeypatch):
    if "released" in name and jax.__version_info__ < (0, 12):
        pytest.skip("JAX 0.11's interpreter does not see this race")
    module, trial, expected, *changes = MISTAKES[name]
    trial.use_plans(monkeypatch)
    put_in_place(module, changes, monkeypatch)
    assert outcome(trial) in expected


def test_every_mistake_can_be_made():
    """By day too: the text that each changes is still there."""
    for module, _, _, *changes in MISTAKES.values():
        mutant(module, *changes)
