"""Requests that come and go: each gets what it would get alone, whoever is beside it and whatever runs ahead."""

import itertools
import math
import random
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checksum_model import LONGEST, VOCAB, Checksum, continuation, weight
from compiled import compiled
from nightly import NIGHTLY

import jaxkv
from jaxkv._core.state.interrupts import Numbers
from jaxkv._engine.frontend.warmup import call_all
from jaxkv._engine.requests.sampling import KINDS

WINDOWS = (None, 7)[: 1 + NIGHTLY]  # by day one layer, which is half of what there is to compile
ROOM = {"max_seqs": 3, "max_seq_len": LONGEST, "block_size": 3, "num_blocks": 18, "step_tokens": 7}
WAYS = {"swapped": {"swap": "always"}, "computed again": {"swap": "never"}, "prefix cache": {"prefix_cache": True}}
KNOWN = [[random.Random(i).randrange(VOCAB) for _ in range(30)] for i in range(3)]


def new_engine(way="computed again", windows=WINDOWS, *, ahead=1, first=0, **options):
    engine = jaxkv.Engine(Checksum(windows), **ROOM | WAYS[way] | options)
    engine._core.ahead = ahead
    engine._reader.numbers = Numbers(first)
    return engine


def some_prompt(draw):
    return draw.choice(KNOWN)[: draw.randint(1, 26)] + [draw.randrange(VOCAB) for _ in range(draw.randint(0, 5))]


def assert_empty(engine):
    jaxkv.check_invariants(engine.cache)
    assert engine.cache.is_empty and not engine._cache_manager.has_rows_to_free
    assert engine.prefix or engine.cache.blocks_in_use == 0


@pytest.mark.parametrize("way", WAYS)
def test_requests_come_and_go_at_random(way):
    engine, draw, requests, told = new_engine(way), random.Random(way), {}, {}
    for _ in range(600 if NIGHTLY else 150):
        if draw.random() < 0.3:
            prompt, count = some_prompt(draw), draw.randint(1, 14)
            eos = draw.choice([None, draw.randrange(VOCAB), [draw.randrange(VOCAB) for _ in range(9)]])
            request = engine.submit(prompt, count, eos=eos, salt=draw.choice([None, "a"]), n=draw.choice([1, 1, 3]))
            stops = {eos} if isinstance(eos, int) else set(eos or ())
            requests |= {sample: (prompt, count, stops) for sample in request.samples}
        if requests and draw.random() < 0.1:
            draw.choice(list(requests)).cancel()
        for request, token in engine.step():
            told.setdefault(request, []).append(token)
    for request, token in engine.run():
        told.setdefault(request, []).append(token)
    assert engine.is_idle
    cancelled = 0
    for request, (prompt, count, stops) in requests.items():
        expected = continuation(WINDOWS, prompt, count, None)
        end = next((i for i, token in enumerate(expected) if token in stops), len(expected))
        assert request.done and [*request.tokens, None] == told[request]
        if request.tokens != expected[:end]:
            assert request.stopped and request.tokens == expected[: len(request.tokens)]
            cancelled += 1
    assert 0 < cancelled < len(requests) / 2
    assert_empty(engine)


@pytest.mark.parametrize("way", WAYS if NIGHTLY else ["swapped", "computed again"])  # one config, one program
def test_running_ahead_changes_nothing(way):
    """The same tokens, stops, swaps, prefix hits and steps as an engine that reads each step before the next."""

    def outcome(ahead, stops):
        engine, draw = new_engine(way, (None,), ahead=ahead), random.Random(7)
        outputs = []
        for _ in range(4):
            prompts = [some_prompt(draw) for _ in range(7)]
            counts, eos = [draw.randint(1, 14) for _ in prompts], draw.choice([[], range(20)]) if stops else None
            requests = [engine.submit(p, n, eos=eos) for p, n in zip(prompts, counts, strict=True)]
            list(engine.run())
            outputs += [request.tokens for request in requests]
        assert_empty(engine)
        return outputs, {name: found for name, found in engine.stats().items() if not name.endswith("_seconds")}

    (tokens, stats), (same_tokens, same_stats) = outcome(1, False), outcome(0, False)
    assert tokens == same_tokens
    assert stats == same_stats
    assert way == "prefix cache" or stats["set_back"] > 0
    assert way != "prefix cache" or stats["tokens_saved"] > 0
    assert outcome(1, True)[0] == outcome(0, True)[0] != tokens


def test_several_steps_in_one_dispatch():
    engine, draw = new_engine("prefix cache", steps_per_dispatch=4), random.Random(3)
    for _ in range(6):
        prompts = [some_prompt(draw) for _ in range(draw.randint(1, 4))]
        counts, eos = [draw.randint(1, 14) for _ in prompts], draw.choice([None, 5])
        requests = [engine.submit(p, n, eos=eos) for p, n in zip(prompts, counts, strict=True)]
        list(engine.run())
        for request, prompt, count in zip(requests, prompts, counts, strict=True):
            assert request.tokens == continuation(WINDOWS, prompt, count, eos)
    assert_empty(engine)
    engine = new_engine(steps_per_dispatch=4, block_size=4)
    request = engine.submit([1, 2, 3], 33)
    dispatches = 0
    while not request.done:
        engine.step()
        dispatches += 1
    assert request.tokens == continuation(WINDOWS, [1, 2, 3], 33, None)
    assert dispatches <= 10 and engine.steps == 33


def test_a_requests_draws_are_its_own():
    """The same alone and in a crowd, in another order, with other requests' filters beside it, and set back."""
    draw = random.Random(5)
    choices = [{"temperature": 0.6}, {"temperature": 0.9, "top_k": 5}, {}, {"temperature": 0.7, "top_p": 0.5}]
    asked = [(some_prompt(draw), {"max_new_tokens": 12} | choices[i % 4]) for i in range(12)]
    crowd = new_engine()
    requests = [crowd.submit(prompt, **choice) for prompt, choice in asked]
    list(crowd.run())
    assert crowd.set_back > 0
    for i in (0, 1, 2, 5, 7):
        alone = new_engine(first=i)
        request = alone.submit(asked[i][0], **asked[i][1])
        list(alone.run())
        assert request.tokens == requests[i].tokens
    other = new_engine(seed=1)
    request = other.submit(asked[0][0], **asked[0][1])
    list(other.run())
    assert request.tokens != requests[0].tokens


@pytest.mark.parametrize("way", WAYS)
def test_samples_share_the_prompts_blocks(way):
    prompt = KNOWN[0][:20]
    engine = new_engine(way)
    request = engine.submit(prompt, 5, temperature=0.5, n=3)
    most_shared = 0
    while not request.done:
        engine.step()
        if not engine.prefix:
            most_shared = max([most_shared, *(s["blocks_shared"] for s in jaxkv.stats(engine.cache)["groups"])])
    assert engine.prefix or most_shared == 6  # all that the prompt fills, before its last token
    assert engine.tokens == 19 + 3 * 5
    assert request.tokens == request.samples[0].tokens and len({tuple(s.tokens) for s in request.samples}) == 3
    for i, sample in enumerate(request.samples):
        alone = new_engine(first=i)
        same = alone.submit(prompt, 5, temperature=0.5)
        list(alone.run())
        assert same.tokens == sample.tokens
    several = [engine.submit(prompt[:k], 4, n=5) for k in (1, 2, 20)]  # more than there are rows
    several[1].samples[0].cancel()
    list(engine.run())
    for k, request in zip((1, 2, 20), several, strict=True):
        assert request.done
        for sample in request.samples:
            assert sample.stopped or sample.tokens == continuation(WINDOWS, prompt[:k], 4, None)
    several = engine.submit(prompt, 4, n=3)
    engine.step()
    several.cancel()
    assert several.done and list(engine.run()) == [(sample, None) for sample in several.samples]
    assert_empty(engine)


def test_each_has_its_own_limit_stop_tokens_and_salt():
    engine, prompt = new_engine("prefix cache", (None,)), KNOWN[1][:12]
    expected = continuation((None,), prompt, 12, None)
    requests = [
        engine.submit(prompt, 12, eos=expected[3]),
        engine.submit(prompt, 2),
        engine.submit(prompt, 12, salt="a"),
    ]
    list(engine.run())
    assert [r.tokens for r in requests] == [expected[: expected.index(expected[3])], expected[:2], expected]
    for salt, hits in (("a", 1), ("b", 0), (None, 1), (b"a", 0)):
        before = engine.stats()["hits"]
        engine.submit(prompt, 1, salt=salt)
        list(engine.run())
        assert engine.stats()["hits"] - before == hits


def test_sharing_is_not_counted_across_salts():
    """Two tenants with one prompt need twice its blocks: the second waits instead of being set back."""
    engine = new_engine("prefix cache", (None,), num_blocks=12, max_seqs=2)
    requests = [engine.submit(KNOWN[2][:24], 6, salt=salt) for salt in "ab"]
    list(engine.run())
    assert [r.tokens for r in requests] == [continuation((None,), KNOWN[2][:24], 6, None)] * 2
    assert engine.set_back == 0


def test_run_serves_what_is_submitted_from_its_loop():
    engine, requests = new_engine(), []
    requests.append(engine.submit([1, 2], 3))
    pairs = []
    for request, token in engine.run():
        pairs.append((request, token))
        if len(requests) < 5:
            requests.append(engine.submit([len(requests)], 2))
        if len(requests) == 5:
            requests[4].cancel()
            requests[4].cancel()
            engine.cancel(requests[4])
    assert all(request.done for request in requests) and len(requests) == 5
    assert [[t for r, t in pairs if r is request] for request in requests] == [[*r.tokens, None] for r in requests]
    assert list(engine.run()) == [] == engine.step()
    assert_empty(engine)


def test_leaving_run_leaves_the_requests():
    engine = new_engine()
    request = engine.submit([4, 5], 9)
    first = list(itertools.islice(engine.run(), 3))
    assert [token for _, token in [*first, *engine.run()]] == [*request.tokens, None]
    assert request.tokens == continuation(WINDOWS, [4, 5], 9, None)


def test_ends_are_told_once():
    """By the last item of each, whatever ended it: at its first token, cancelled before and after it began, at once."""
    prompt = KNOWN[0][:6]
    expected = continuation(WINDOWS, prompt, 12, None)
    stop = next(token for token in expected if token != expected[0])
    for steps in (1, 4):
        engine = new_engine(steps_per_dispatch=steps)
        asked = {"stops": {"eos": stop, "logprobs": 1}, "at once": {"eos": [stop, expected[0]]}, "limit": {}}
        requests = {name: engine.submit(prompt, 12, **options) for name, options in asked.items()}
        requests["cancelled"], requests["waits"] = engine.submit(prompt, 12), engine.submit(prompt, 12, n=2)
        told = {}
        for request, token in engine.run():
            assert not engine.is_idle or request.done
            told.setdefault(request, []).append(token)
            if request is requests["cancelled"] and len(told[request]) == 2:
                request.cancel()
                requests["waits"].cancel()
        assert engine.is_idle and engine.step() == []
        ends = {name: request.ended for name, request in requests.items()}
        assert ends == {
            "stops": "eos", "at once": "eos", "limit": "length", "cancelled": "cancelled", "waits": "cancelled",
        }  # fmt: skip
        for sample in (sample for request in requests.values() for sample in request.samples):
            assert told[sample] == [*sample.tokens, None]
        stopped, at_once = requests["stops"], requests["at once"]
        assert stopped.stop_token == stop and at_once.stop_token == expected[0] and not at_once.tokens
        likely = math.log(math.e / (math.e + VOCAB - 1))
        assert stopped.stop_logprob == pytest.approx(likely) and at_once.stop_logprob is None
        assert requests["limit"].stop_token is requests["cancelled"].stop_token is None
    engine = new_engine()
    request = engine.submit(prompt, 5)
    request.cancel()  # from outside of any loop
    assert not engine.is_idle and engine.step() == [(request, None)] and engine.is_idle


def test_two_streams_in_turns():
    engine, ends = new_engine(), []
    streams = [engine.stream([KNOWN[i][:5], KNOWN[i][:9]], [6, 8]) for i in range(2)]
    outputs = [[[], []], [[], []]]
    for pair in itertools.zip_longest(*streams):
        for stream, told in enumerate(pair):
            if told is not None:
                outputs[stream][told[0]].append(told[1])
    for i in range(2):
        assert outputs[i] == [continuation(WINDOWS, KNOWN[i][:k], n, None) for k, n in ((5, 6), (9, 8))]
    assert not ends
    assert_empty(engine)


def test_a_cancelled_request_leaves_its_row_at_once():
    engine = new_engine()
    request = engine.submit([3, 1], 9)
    for _ in range(3):
        engine.step()
    assert not engine.cache.is_empty
    new_engine().cancel(request)  # whichever is asked: it is the other's
    assert engine.cache.is_empty and engine.cache.blocks_in_use == 0


def test_log_probabilities_are_the_models_own():
    engine = new_engine(logits_hook=lambda logits, rows: jnp.roll(logits, 1, axis=1))
    plain, told = engine.submit([3, 1], 5), engine.submit([3, 1], 5, temperature=0.1, logprobs=3)
    many = engine.submit([3, 1], 2, logprobs=VOCAB)
    other = engine.submit([2], 5, logprobs=1)  # in a row whose likeliest tokens are others
    list(engine.run())
    assert all(token in logprobs for token, logprobs in zip(other.tokens, other.logprobs, strict=True))
    assert plain.logprobs == [] and len(told.logprobs) == 5 and [len(d) for d in many.logprobs] == [VOCAB] * 2
    likely = 1 - math.log(math.e + VOCAB - 1)
    for token, logprobs in zip(told.tokens, told.logprobs, strict=True):
        assert len(logprobs) in (3, 4) and token in logprobs
        assert max(logprobs.values()) == pytest.approx(likely) and logprobs[token] == pytest.approx(likely - 1)
    for logprobs in many.logprobs:
        assert sum(map(math.exp, logprobs.values())) == pytest.approx(1, abs=1e-5)


def by_row(logits, rows):
    """What depends on each token of a row at its place, on its length and on its request's number."""
    place = jnp.arange(rows.tokens.shape[1], dtype=jnp.int32)[None]
    known = jnp.where(place < rows.lengths[:, None], (rows.tokens + 1) * weight(3, place), 0)
    nothing = jnp.where(place < rows.lengths[:, None], 0, (rows.tokens < 10**6).astype(jnp.int32)).sum(axis=1)
    total = jnp.sum(known, axis=1, dtype=jnp.int32) + rows.lengths + 5 * rows.numbers + nothing
    return jax.nn.one_hot(total % VOCAB, VOCAB)


@pytest.mark.parametrize("way", WAYS if NIGHTLY else ["swapped"])
def test_a_hook_sees_what_its_row_holds(way):
    engine, draw = new_engine(way, logits_hook=by_row), random.Random(11)
    for _ in range(2):
        prompts = [some_prompt(draw) for _ in range(8)]
        requests = [s for p in prompts for s in engine.submit(p, 12, n=draw.choice([1, 2])).samples]
        list(engine.run())
        for request in requests:
            tokens = list(request.prompt)
            while len(tokens) < min(len(request.prompt) + 12, LONGEST):
                total = sum((token + 1) * int(weight(3, p)) for p, token in enumerate(tokens))
                tokens.append((total + len(tokens) + 5 * request.number) % VOCAB)
            assert request.tokens == tokens[len(request.prompt) :]
    assert engine.prefix or engine.set_back
    with pytest.raises(ValueError, match=r"logits_hook must return logits \[3, 97\], as it is given, not \[97\]"):
        bad = new_engine(way, logits_hook=lambda logits, rows: logits[0])
        bad.submit([1], 1)
        bad.step()


BAD = [
    ({"prompt": [1.5]}, r"must be a list of token ids, integers, not \[1.5\]"),
    ({"prompt": "abc"}, "must be a list of token ids, not 'abc': encode it first, say by jaxkv.text.Tokenizer"),
    ({"prompt": []}, "The prompt cannot be continued: it is empty"),
    ({"prompt": [1] * LONGEST}, f"it has {LONGEST} tokens, and max_seq_len = {LONGEST} must hold one more"),
    ({"max_new_tokens": 2.5}, "max_new_tokens must be an integer, not 2.5"),
    ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, not 0"),
    ({"temperature": -1}, "temperature must be at least 0, not -1"),
    ({"top_k": 10**12}, "top_k must be at most 2147483647"),
    ({"top_p": 0}, "top_p must be above 0 and at most 1, not 0"),
    ({"eos": "abc"}, "eos must be a token id, several, or None, not 'abc'"),
    ({"salt": 5}, "salt must be a str, bytes or None, not 5"),
    ({"n": 0}, "n must be at least 1, not 0"),
    ({"n": 10**9}, "n must be at most 65536"),
    ({"logprobs": -1}, "logprobs must be at least 0, not -1"),
    ({"logprobs": True}, "logprobs must be an integer, not True"),
]


def test_bad_requests_change_nothing():
    engine = new_engine("prefix cache")
    for _ in range(ROOM["max_seqs"] + 1):
        for arguments, sentence in BAD:
            with pytest.raises(ValueError, match=sentence):
                engine.submit(**{"prompt": [1, 2]} | arguments)
        with pytest.raises(ValueError, match="salt must be a str"):
            engine.stream([[1, 2]], 3, salt=5)
    assert not engine._core.is_busy and engine.steps == 0
    request = engine.submit(np.array([1, 2], np.int64), np.int32(4), np.float32(0), eos=np.int64(0), n=np.int8(1))
    list(engine.run())
    assert request.number == 0 and request.tokens == continuation(WINDOWS, [1, 2], 4, 0)


def test_numbers_of_every_kind_mean_the_same():
    tokens = continuation(WINDOWS, [7, 7], 9, None)
    stop = tokens[4]
    expected = tokens[: tokens.index(stop)]
    engine = new_engine()
    for eos in (
        stop,
        np.int64(stop),
        np.array(stop),
        jnp.int32(stop),
        {stop},
        np.array([stop, 96]),
        (stop, np.uint8(stop)),
    ):
        request = engine.submit(jnp.array([7, 7]), 9, eos=eos)
        list(engine.run())
        assert request.tokens == expected


def test_first_use_compiles_a_chunk_a_step_and_the_zeros_of_a_pool():
    """With shapes that no other test has."""

    def serve():
        engine = jaxkv.Engine(Checksum((None,)), max_seqs=2, max_seq_len=43, block_size=3, num_blocks=23, step_tokens=9)
        requests = [engine.submit([i, 1, 2], 4) for i in range(2)]
        assert engine.cache.lengths.committed  # else all would compile again for what comes back from the host
        assert len(list(engine.run())) == 8 + len(requests)
        assert all(request.done for request in requests)

    jnp.zeros(3, jnp.float32)  # the conversion of its 0 is in other tests, too
    assert compiled(serve) <= 3


WARMED = [(0, KINDS, False), (3, ("sampled",), False), (0, ("greedy",), True)]


# By day one kind, with a prefix cache: log-probabilities have all programs once more.
@pytest.mark.parametrize(("logprobs", "kinds", "prefix_cache"), WARMED if NIGHTLY else WARMED[2:])
def test_after_warmup_nothing_compiles(logprobs, kinds, prefix_cache):
    """With shapes that no other test has."""
    engine = jaxkv.Engine(
        Checksum((None, 5)), max_seqs=5 + logprobs + prefix_cache, max_seq_len=41, block_size=3, num_blocks=61,
        step_tokens=70 if NIGHTLY else 20, steps_per_dispatch=3, swap="never", seed=9, prefix_cache=prefix_cache,
    )  # fmt: skip
    draw = random.Random(2)

    def serve():
        requests = []
        for i in range(16):
            asked = {
                "greedy": {},
                "sampled": {"temperature": 0.8},
                "filtered": {"temperature": 0.5, "top_k": 3, "n": 2},
            }
            choice = asked[kinds[i % len(kinds)]]
            requests.append(
                engine.submit([i % 4] * draw.randint(1, 20), draw.randint(1, 15), logprobs=logprobs, **choice)
            )
            engine.step()
        requests[3].cancel()
        list(engine.run())
        list(engine.stream([[1, 2], [3]], 4, **choice))

    assert compiled(lambda: engine.warmup(kinds=kinds, logprobs={0, logprobs}, progress=False)) > 5
    assert compiled(serve) == 0
    assert not prefix_cache or engine.stats()["tokens_saved"] > 0
    assert_empty(engine)
    with pytest.raises(ValueError, match="kinds must be among 'greedy', 'sampled' and 'filtered', not 'best'"):
        engine.warmup(kinds=["best"])


def test_warmup_shows_a_bar_only_if_asked(monkeypatch):
    """In a notebook without widgets tqdm warns as soon as it is imported."""
    shown, called = [], []
    monkeypatch.setitem(sys.modules, "tqdm.auto", types.SimpleNamespace(tqdm=lambda x, **_: shown.append(1) or x))
    for progress in (False, True):
        call_all([lambda: called.append(1)], progress)
    assert len(called) == 2 and len(shown) == 1
