"""Chats in turn on models with windows: what an engine's prefix cache finds in half as many blocks again as their
windows need."""

import random

import pytest
from checksum_model import LONGEST, VOCAB, Checksum, continuation
from nightly import NIGHTLY

import jaxkv

WINDOW = 8
ROW = {"max_seqs": 2, "max_seq_len": LONGEST, "block_size": 2, "step_tokens": 8, "prefix_cache": True}
OPTIONS = {
    "device": {},
    "first tokens": {},
    "host": {"spill_bytes": 10_000},
    "steps at once": {"steps_per_dispatch": 3},
    "guesses": {"draft": "ngram", "draft_tokens": 2},
    "samples": {},
}


@pytest.mark.parametrize("name", OPTIONS if NIGHTLY else ("device", "first tokens", "host"))
def test_chats_in_turn_find_what_was_said(name):
    windows = ((WINDOW, 3), None) if name == "first tokens" else (WINDOW, None)
    draw, chats, found, findable = random.Random(name), 6, 0, 0
    own = chats * (WINDOW // 2 + 1 + 2 * (name == "first tokens"))
    blocks = (8, 200) if name == "host" else (3 * own // 2, 200)
    engine = jaxkv.Engine(Checksum(windows), **ROW, **OPTIONS[name], group_blocks=blocks)
    said = [[draw.randrange(VOCAB) for _ in range(12)] for _ in range(chats)]
    for turn in range(4):
        for i, chat in enumerate(said):
            before = engine.stats()["tokens_saved"]
            request = engine.submit(chat, max_new_tokens=5, salt="ab"[i % 2], n=2 if name == "samples" else 1)
            list(engine.run())
            assert all(one.tokens == continuation(windows, chat, 5, None) for one in request.samples)
            if turn:
                found += engine.stats()["tokens_saved"] - before
                findable += (len(chat) - 4 - 1) // 2 * 2  # all but its last token was computed
            said[i] = [*chat, *request.tokens, *(draw.randrange(VOCAB) for _ in range(4))]
            engine.prefix.check_invariants(engine.cache)
    jaxkv.check_invariants(engine.cache)
    assert found >= 0.9 * findable


def test_room_for_a_row_that_comes_back_is_made_group_by_group():
    """A row in host memory needs few blocks of a window, however long it is."""
    engine = jaxkv.Engine(Checksum((WINDOW, None)), **ROW, group_blocks=(12, 40))
    list(engine.stream([[7, *range(20)]], 3))
    kept = engine.prefix.stats()["blocks"]
    assert kept[0] > 4 and kept[1] > 10
    engine._cache_manager.make_room([4, 35])
    assert engine.prefix.stats()["blocks"] == [min(kept[0], 8), 5]


def test_tokens_that_fit_with_a_prefix_cache():
    windows = (WINDOW,) * 5 + (None,)
    sizes = {"max_seqs": 4, "max_seq_len": LONGEST, "block_size": 2, "step_tokens": 8, "memory_bytes": 20_000}
    with_, without = (jaxkv.Engine(Checksum(windows), **sizes, prefix_cache=x).config.num_blocks for x in (True, False))
    assert without < 1.3 * with_
