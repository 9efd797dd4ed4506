"""Samples of a request that lose their rows come back as forks: computed again, from the host, or from a file."""

import functools

import numpy as np
import pytest
from checksum_model import LONGEST, VOCAB, Checksum
from hybrid_model import Hybrid
from nightly import NIGHTLY

import jaxkv

MODEL, WINDOWS, HYBRID = Checksum((None,)), Checksum((None, 7)), Hybrid()
# Of eight samples 8 blocks are one prompt's, and each has up to 4 of its own: 40 in all.
SIZES = {"max_seqs": 8, "max_seq_len": LONGEST, "block_size": 3, "step_tokens": 16}
ROOM, TIGHT = 60, 26
PROMPT = np.random.default_rng(0).integers(0, VOCAB, 25).tolist()
ASKED = {"n": 8, "temperature": 0.5, "seed": 7}


def tokens_of(request):
    return [sample.tokens for sample in request.samples]


@functools.cache
def expected(model=MODEL):
    engine = jaxkv.Engine(model, num_blocks=ROOM, **SIZES)
    request = engine.submit(PROMPT, 11, **ASKED)
    list(engine.run())
    return tokens_of(request), engine.steps


def note_swaps(engine):
    """A list of the blocks that come back with each row from the host, in the layer that has most."""
    moved, cache_manager = [], engine._cores[0].cache_manager
    cache_manager._swap_in = functools.partial(note_blocks, cache_manager._swap_in, moved)
    return moved


@pytest.mark.parametrize("swap", [*["never"] * NIGHTLY, "always"])
def test_siblings_come_back_as_forks(swap):
    tokens, steps = expected()
    engine = jaxkv.Engine(MODEL, num_blocks=TIGHT, swap=swap, **SIZES)
    request, most = engine.submit(PROMPT, 11, **ASKED), 0
    while not request.done:
        engine.step()
        rows = np.asarray(engine.cache.lengths)
        most = max(most, int(np.count_nonzero(rows > len(PROMPT))))
        jaxkv.check_invariants(engine.cache)
    assert tokens_of(request) == tokens
    stats = engine.stats()
    assert stats["set_back"] > 0 and (stats["swapped_out"] > 0) == (swap == "always")
    assert most >= 4 and engine.steps <= 1.7 * steps


@pytest.mark.parametrize(("model", "swap"), [(WINDOWS, "never"), (WINDOWS, "always"), *[(HYBRID, "always")] * NIGHTLY])
def test_siblings_of_layers_that_keep_less(model, swap):
    """Window layers and states have lost what the siblings had in common: rows from the host bring that and share the
    rest, and rows that are computed again fork from the first of them that is."""
    tokens, _ = expected(model)
    engine = jaxkv.Engine(model, num_blocks=22, swap=swap, **SIZES)
    request, moved = engine.submit(PROMPT, 11, **ASKED), note_swaps(engine)
    while not request.done:
        engine.step()
        jaxkv.check_invariants(engine.cache)
    assert tokens_of(request) == tokens and engine.cache.blocks_in_use == 0
    assert engine.set_back >= 5
    if swap == "always":  # of 12 blocks 8 are the prompt's
        assert len(moved) >= 5 and max(moved) <= 4
    else:  # the prompt and 10 of each; 326 tokens if each computes it again
        assert engine.tokens <= 250


def note_blocks(swap_in, moved, leaves, row, host, *others):
    """Swaps a row in, and notes how many blocks were given for it."""
    moved.append(max(x.shape[0] for x in host.blocks if x is not None))
    return swap_in(leaves, row, host, *others)


def test_a_loaded_engine_shares_again(tmp_path):
    """The rows of a file are read one by one, and what they share is in the cache once."""
    tokens, _ = expected()
    engine = jaxkv.Engine(MODEL, num_blocks=ROOM, **SIZES)
    engine.submit(PROMPT, 11, **ASKED)
    while engine.cache.lengths.min() <= len(PROMPT):
        engine.step()
    blocks = engine.cache.blocks_in_use
    engine.save(tmp_path / "engine.safetensors")
    other = jaxkv.Engine(MODEL, num_blocks=TIGHT + 8, **SIZES)
    requests = other.load(tmp_path / "engine.safetensors")
    moved = note_swaps(other)
    other.step()
    assert sum(moved) <= blocks + 8 and len(moved) == 8, "what is shared travels once"
    assert other.cache.blocks_in_use <= blocks + 8 and (np.asarray(other.cache.lengths) > len(PROMPT)).all()
    list(other.run())
    assert [request.tokens for request in requests] == tokens


@pytest.mark.skipif(not NIGHTLY, reason="by day the ones above")
@pytest.mark.parametrize("swap", ["never", "always", "auto"])
@pytest.mark.parametrize("windows", [(None,), (None, 7), ((7, 4), None)])
def test_samples_at_random(swap, windows):
    rng = np.random.default_rng(5)
    roomy = jaxkv.Engine(Checksum(windows), num_blocks=200, **SIZES)
    tight = jaxkv.Engine(Checksum(windows), num_blocks=TIGHT, swap=swap, **SIZES)
    for _ in range(60):
        asked = [
            (rng.integers(0, VOCAB, rng.integers(1, 30)).tolist(), int(rng.integers(1, 14)), int(rng.integers(1, 6)))
            for _ in range(3)
        ]
        pairs = [
            [engine.submit(prompt, count, n=n, temperature=0.5, seed=i) for engine in (roomy, tight)]
            for i, (prompt, count, n) in enumerate(asked)
        ]
        for engine in (roomy, tight):
            list(engine.run())
        for ours, theirs in pairs:
            assert tokens_of(ours) == tokens_of(theirs)
        jaxkv.check_invariants(tight.cache)
        assert tight.cache.blocks_in_use == 0
    assert tight.set_back > 0
