"""What a request leaves in the prefix cache, and what counts as found there."""

import random

import pytest
from checksum_model import LONGEST, VOCAB, Checksum, continuation

import jaxkv

WINDOWS = (None, 7)
ROOM = {"max_seqs": 3, "max_seq_len": LONGEST, "block_size": 3, "step_tokens": 7, "prefix_cache": True}
PROMPT = list(range(3, 17))


def kept(engine, tokens):
    return engine.prefix.known([*tokens, 0])


@pytest.mark.parametrize("windows", [(None,), WINDOWS])
@pytest.mark.parametrize("n", [1, 2])
def test_a_request_leaves_what_it_is_to_leave(windows, n):
    engine = jaxkv.Engine(Checksum(windows), **ROOM, num_blocks=60)
    for first, keep_prefix, expected in ((20, False, 0), (30, "prompt", 12), (40, True, 21)):
        prompt = [first, *PROMPT[:13]]
        request = engine.submit(prompt, 9, keep_prefix=keep_prefix, n=n)
        before = engine.prefix.stats()["blocks"]
        list(engine.run())
        assert all(sample.tokens == continuation(windows, prompt, 9, None) for sample in request.samples)
        # Of the last token nothing is computed.
        assert kept(engine, [*prompt, *request.tokens]) == expected
        assert keep_prefix or engine.prefix.stats()["blocks"] == before
    jaxkv.check_invariants(engine.cache)
    assert engine.submit(PROMPT, 1, keep_prefix="prompt", n=2).samples[1].params.keep_prefix == "prompt"


def test_nobody_shares_with_who_leaves_nothing_but_it_shares_with_others():
    engine = jaxkv.Engine(Checksum(WINDOWS), **ROOM, num_blocks=60)
    requests = [engine.submit(PROMPT, 5, keep_prefix=False) for _ in range(2)]
    list(engine.run())
    assert engine.stats()["hits"] == 0 and engine.tokens == 2 * (len(PROMPT) + 4)
    requests += [engine.submit(PROMPT, 5), engine.submit(PROMPT, 5, keep_prefix=False)]
    list(engine.run())
    assert engine.stats()["hits"] == 1
    assert all(request.tokens == continuation(WINDOWS, PROMPT, 5, None) for request in requests)


@pytest.mark.parametrize("keep_prefix", [None, "output", 1, ["prompt"]])
def test_other_ways_to_keep_are_refused(keep_prefix):
    engine = jaxkv.Engine(Checksum(WINDOWS), **ROOM, num_blocks=60)
    with pytest.raises(ValueError, match=r"keep_prefix must be True, False or 'prompt', not .*\."):
        engine.submit(PROMPT, 5, keep_prefix=keep_prefix)
    assert engine.is_idle


def test_what_is_kept_goes_with_a_saved_engine(tmp_path):
    engine = jaxkv.Engine(Checksum(WINDOWS), **ROOM, num_blocks=60)
    for first, keep_prefix in ((20, False), (30, "prompt"), (40, True)):
        engine.submit([first, *PROMPT], 9, keep_prefix=keep_prefix)
    for _ in range(4):
        engine.step()
    engine.save(tmp_path / "engine")
    other = jaxkv.Engine(Checksum(WINDOWS), **ROOM, num_blocks=60)
    requests = other.load(tmp_path / "engine")
    assert [request.params.keep_prefix for request in requests] == [False, "prompt", True]
    list(other.run())
    assert [kept(other, [*r.prompt, *r.tokens]) for r in requests] == [0, 15, 21]


@pytest.mark.parametrize("keep_prefix", [True, "prompt", False])
def test_what_is_found_of_itself_does_not_count(keep_prefix):
    """Prompts with nothing in common, in too little room."""
    draw = random.Random(1)
    engine = jaxkv.Engine(Checksum((None,)), **ROOM, num_blocks=14)
    requests = [
        engine.submit([i, *(draw.randrange(VOCAB) for _ in range(11))], 14, keep_prefix=keep_prefix, n=1 + i % 2)
        for i in range(5)
    ]
    list(engine.run())
    stats = engine.stats()
    assert stats["set_back"] and (stats["hits"], stats["tokens_saved"], stats["hit_rate"]) == (0, 0, 0)
    assert stats["lookups"] == len(requests) and stats["tokens_asked"] == 12 * len(requests)
    for request in requests:
        assert all(s.tokens == continuation((None,), request.prompt, 14, None) for s in request.samples)
    jaxkv.check_invariants(engine.cache)


def test_a_lookup_that_is_repeated_does_not_count():
    config = jaxkv.CacheConfig.uniform(num_layers=1, num_kv_heads=1, head_dim=8, max_seqs=2, max_seq_len=64)
    prefix, tokens = jaxkv.PrefixCache(config), list(range(40))
    cache = prefix.insert(jaxkv.extend(jaxkv.init(config), [40, 0]), 0, tokens)
    before, match = prefix.stats(), prefix.match(tokens, is_repeat=True)
    assert match.num_tokens and prefix.adopt(cache, 1, match).lengths[1] == match.num_tokens
    assert prefix.stats() == before
    with pytest.raises(ValueError, match="is_repeat must be True or False"):
        prefix.match(tokens, is_repeat=2)
