"""What each token sees, as kernels are told it, against counting place by place; and mistakes that this notices."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nightly import NIGHTLY
from planting import Plant, Sources, plant_in_copy
from seen import seen_by

import pallas_kernels
from pallas_kernels import testing
from pallas_kernels.common import masks
from pallas_kernels.common.batch import MaskSpec, PagedBatch, SoftmaxOptions, StoredKV
from pallas_kernels.common.ragged_layout import default_offsets, locate
from pallas_kernels.xla.spans import attend_spans

SOURCES = Sources(pathlib.Path(pallas_kernels.__file__).parent, "pallas_kernels")
LENGTHS, NEW = (44, 0, 21, 70), (9, 0, 1, 40)
PLACES, TILE = 80, 3
CASES = {
    "chunk": dict(chunk=16),
    "an odd chunk": dict(chunk=7),
    "tree": dict(tree=True),
    "tree, window": dict(tree=True, window=4),
    "tree, window, first tokens": dict(tree=True, window=4, sink_tokens=34),
    "tree, chunk": dict(tree=True, chunk=8),
    "spans": dict(spans=True),
    "spans, window": dict(spans=True, window=3),
    "spans, window, first tokens": dict(spans=True, window=3, sink_tokens=32),
    "spans, chunk": dict(spans=True, chunk=5),
}


def differs(module, packed=True, **asked) -> str:
    """Where the module's masks are wrong; "" if nowhere."""
    case = testing.Case(LENGTHS, NEW, padding=2, packed=packed, **asked)
    options = testing.make_options(case)
    lengths, new = jnp.asarray(LENGTHS, jnp.int32), jnp.asarray(NEW, jnp.int32)
    axes = (sum(NEW) + 2,) if case.packed else (len(NEW), max(NEW) + 2)
    start = default_offsets(new) if case.packed else jnp.arange(len(NEW), dtype=jnp.int32) * axes[1]
    token = jax.tree.map(jnp.ravel, locate(axes, lengths, new))
    tree, spans = (None if (x := options.get(name)) is None else x.reshape(-1) for name in ("tree", "spans"))
    window_mask = module.WindowMask(case.window, case.chunk, case.sink_tokens or 0)
    if spans is not None and not module.are_runs(token, spans):
        return "runs"
    found = module.find_token_mask(token, lengths - new, start, axes[-1], window_mask, tree, spans)
    rows = [(row, first) for row, count in enumerate(NEW) for first in range(0, count, TILE)]
    nth = np.array([[first + i for i in range(TILE)] for _, first in rows], np.int32)
    row = np.array([row for row, _ in rows])
    there = jnp.asarray(nth < np.array(NEW)[row][:, None])
    tiles = module.tile_masks(found, start[row][:, None] + jnp.asarray(nth), there)
    lines = [tiles.tokens[:, i, :, None] for i in range(tiles.tokens.shape[1])]
    seen = np.asarray(
        module.is_visible(jnp.arange(PLACES, dtype=jnp.int32)[None, None], *lines[:3], lines[3:], window_mask)
    )
    for tile, (row, _) in enumerate(rows):
        before, first = LENGTHS[row] - NEW[row], int(start[row])
        of_row = [None if x is None else np.asarray(x)[first : first + NEW[row]] for x in (tree, spans)]
        expected, by_window = (
            [
                seen_by(int(t), before, before + int(t), case.window, case.chunk, *of_row, sink_tokens)
                for t in nth[tile]
                if t < NEW[row]
            ]
            for sink_tokens in (window_mask.sink_tokens, 0)
        )
        actual = [set(np.flatnonzero(x).tolist()) for x in seen[tile]]
        if actual != expected + [set()] * (TILE - len(expected)):
            return "seen"
        # First tokens are walked in any case; those of a tree may stand behind others.
        walked = expected if case.tree and before < window_mask.sink_tokens else by_window
        places, by_all = set.union(*walked), set.intersection(*walked)
        begin, end = int(tiles.start[tile]), int(tiles.stop[tile])
        oldest = max(int(window_mask.first(jnp.int32(before))), 0) if case.tree else min(places)
        oldest = 0 if walked is expected else oldest
        if not oldest <= begin <= min(places) or end != max(places) + 1:
            return "walk"  # a tree's may begin at places that none of these tokens see
        sure = set(range(int(tiles.sure_start[tile]), int(tiles.sure_stop[tile])))
        if not sure <= set.intersection(*expected) or (len(sure) < 3 and len(by_all) > 9):
            return "sure"
    return ""


@pytest.mark.parametrize("packed", [True, False] if NIGHTLY else [True])
@pytest.mark.parametrize("name", CASES)
def test_against_counting(name, packed):
    assert not differs(masks, packed, **CASES[name])


# By name: the case that notices, and what is planted. In each of these the interpreted kernels would be wrong, too.
MISTAKES = {
    "a chunk that begins one late": (
        "chunk",
        Plant("WindowMask.first", "position & -self.chunk", "position + 1 & -self.chunk"),
    ),
    "an odd chunk taken for a window": (
        "an odd chunk",
        Plant("WindowMask.first", "position - lax.rem(position, jnp.int32(self.chunk))", "position - self.chunk + 1"),
    ),
    "a window one too wide": (
        "tree, window",
        Plant("WindowMask.first", "self.window - 1", "self.window"),
    ),
    "a tree's token at its place": (
        "tree, window",
        Plant("find_token_mask", "base + found.depth", "token.position"),
    ),
    "an ancestor at its place": (
        "tree, window",
        Plant("find_token_mask", "found.depth.at", "jnp.arange(found.depth.size).at"),
    ),
    "ancestors before the chunk": (
        "tree, chunk",
        Plant("find_token_mask", "seen &= window_mask.covers(base[:, None] + theirs, first[:, None])", ""),
    ),
    "a tree's token that sees its place's context": (
        "tree",
        Plant("find_token_mask", "base - 1", "token.position"),
    ),
    "an ancestor among the first tokens forgotten": (
        "tree, window, first tokens",
        Plant(
            "find_token_mask",
            "window_mask.covers(base[:, None] + theirs, first[:, None])",
            "base[:, None] + theirs >= first[:, None]",
        ),
    ),
    "a walk from the window where first tokens end in a tree": (
        "tree, window, first tokens",
        Plant("find_token_mask", "jnp.where(base < window_mask.sink_tokens, 0, first)", "first"),
    ),
    "first tokens forgotten": (
        "spans, window, first tokens",
        Plant("is_visible", "window_mask.covers(key, first)", "key >= first"),
    ),
    "first tokens behind a token": (
        "spans, window, first tokens",
        Plant(
            "is_visible",
            "window_mask.covers(key, first) & (key <= last)",
            "(key >= first) & (key <= last) | (key < window_mask.sink_tokens)",
        ),
    ),
    "bits of the first word only": (
        "tree",
        Plant("is_visible", "jnp.where(nth >> 5 == i, bits, word)", "bits if i == 0 else word"),
    ),
    "bits that come round again": (
        "tree",
        Plant("is_visible", "jnp.where(nth >> 5 == i, bits, word)", "jnp.where(nth >> 5 <= i, word, bits)"),
    ),
    "bits counted from one": (
        "tree",
        Plant("is_visible", "key - before", "key - before + 1"),
    ),
    "a bit for two tokens": (
        "tree",
        Plant("is_visible", "WORD - 1", "WORD - 2"),
    ),
    "a span that does not look back": (
        "spans, window",
        Plant("find_token_mask", "jnp.minimum(first, own - back)", "first"),
    ),
    "a span that does not look ahead": (
        "spans",
        Plant("find_token_mask", "own + ahead", "own"),
    ),
    "a span over two rows": (
        "spans",
        Plant("_run_around", "inside[1:] & inside[:-1]", "inside[1:]"),
        Plant("_run_around", "token.row[1:] == token.row[:-1]", "inside[:-1]"),
    ),
    "no span taken for one": (
        "spans",
        Plant("_run_around", "token.valid & (spans != 0)", "token.valid"),
    ),
    "a walk that ends at the last context": (
        "tree",
        Plant("tile_masks", "jnp.maximum(last, own)", "last"),
    ),
    "a walk from the last token's chunk": (
        "chunk",
        Plant(
            "tile_masks", "jnp.min(jnp.where(there, first, FAR), axis=1)", "jnp.max(jnp.where(there, first, 0), axis=1)"
        ),
    ),
    "sure of what the first token sees": (
        "chunk",
        Plant(
            "tile_masks", "jnp.min(jnp.where(there, last, FAR), axis=1)", "jnp.max(jnp.where(there, last, 0), axis=1)"
        ),
    ),
    "sure of the first token's chunk": (
        "chunk",
        Plant(
            "tile_masks", "jnp.max(jnp.where(there, first, 0), axis=1)", "jnp.min(jnp.where(there, first, FAR), axis=1)"
        ),
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake(name):
    case, *plants = MISTAKES[name]
    _, broken = plant_in_copy(SOURCES, *plants)
    assert differs(broken, **CASES[case])


def test_spans_in_pieces_go_to_xla():
    """The device decides, for only it knows the numbers: the kernel where each span is one run, else XLA. Padding (here
    the second row's last place) is in no span."""
    inputs = testing.make_inputs(testing.Case((20, 9), (4, 3), block_size=8))

    def kernel(q, *_, **__):
        return jnp.full_like(q, 7)

    attend = jax.jit(
        lambda spans, q, kv, *x: attend_spans(
            kernel, q, StoredKV(kv), PagedBatch(*x), MaskSpec(spans=spans), SoftmaxOptions()
        )
    )
    for runs in ([[3, 3, 0, 5], [3, 5, 5, 3]], [[0, 4, 0, 7], [4, 4, 7, 7]]):
        assert (attend(jnp.asarray(runs, jnp.int32), *inputs) == 7).all()
    pieces = jnp.asarray([[3, 0, 3, 0], [0, 0, 0, 0]], jnp.int32)
    out = attend(pieces, *inputs)
    assert (out[0] != 7).any() and not np.isnan(out).any()  # test_attention_variants.py has its values


@pytest.mark.parametrize(("platform", "dtype"), [("tpu", "bfloat16"), ("cuda", "bfloat16")])
def test_trees_too_large_for_bits_go_to_xla_by_name(platform, dtype):
    shape = jax.ShapeDtypeStruct
    given = dict(kv=shape((9, 2, 2, 16, 128), dtype), tables=shape((2, 4), jnp.int32))
    for axes, fits in (((2, 64), True), ((2, 65), False), ((64,), True), ((65,), False)):
        choice = pallas_kernels.explain(
            q=shape((*axes, 4, 128), dtype), tree=shape(axes, jnp.int32), platform=platform, **given
        )
        assert (choice.implementation == "xla") != fits
        assert fits or ("at most 64 tokens" in choice.reason and f"not {axes[-1]}: leave" in choice.reason)
