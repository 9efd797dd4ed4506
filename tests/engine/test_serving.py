"""Requests that are iterated, awaited, called back and cancelled from any thread, and stop sequences."""

import asyncio
import gc
import math
import random
import sys
import threading
import time

import jax
import jax.numpy as jnp
import pytest
from checksum_model import VOCAB, Placed, Several
from flax import nnx
from nightly import NIGHTLY

import jaxkv
from jaxkv._engine.frontend.metrics import MEANINGS, find_quantiles
from jaxkv._engine.requests.stops import IdStops, TextStops
from jaxkv.text.tokenizer import TextStream

PROMPT, COUNT = [3, 1, 4, 1, 5], 20
SIZES = dict(max_seqs=4, max_seq_len=48, block_size=4)
WAYS = {
    "plain": {}, "several steps": {"steps_per_dispatch": 3}, "guesses": {"draft": "ngram"},
    "prefix cache": {"prefix_cache": True, "num_blocks": 30},
}  # fmt: skip


class Letters:
    """A tokenizer of which each token is a letter, or half of one."""

    def decode(self, tokens, special=False):
        return "".join("abcdefghijklmnop"[token % 16] for token in tokens)

    def stream(self, prompt=()):
        return TextStream(self, list(prompt))


@pytest.fixture(scope="module")
def model():
    return Several()


@pytest.fixture(scope="module")
def lone(model):
    """What a request gets by itself."""
    with jaxkv.Engine(model, **SIZES) as engine:
        yield lambda prompt, count: engine.submit(prompt, count).result(60)


@pytest.fixture
def engine(model):
    with jaxkv.Engine(model, **SIZES) as engine:
        yield engine


def test_whoever_waits_takes_the_steps(engine, lone):
    request, other = engine.submit(PROMPT, COUNT), engine.submit(PROMPT[:2], 3)
    assert next(iter(request)) == lone(PROMPT, COUNT)[0], "each iterator begins at the first token"
    assert list(request) == list(request) == request.result() == lone(PROMPT, COUNT)
    assert other.result(0.1) == other.tokens == lone(PROMPT[:2], 3)
    times = request.times
    assert times.submitted <= times.first_token == times.tokens[0] <= times.tokens[-1] <= times.ended
    assert len(times.tokens) == COUNT and times.tokens == sorted(times.tokens)
    ended = dict.fromkeys(r for r, token in engine.step() + engine.step() if token is None)
    assert list(ended) in ([request, other], [other, request]), "step names them all the same"


def test_one_thread_steps_and_others_wait(engine, lone):
    requests = [engine.submit(PROMPT, n) for n in range(1, COUNT)]
    found = {}

    def follow(i):
        found[i] = list(requests[i]) if i % 2 else requests[i].result(60)

    threads = [threading.Thread(target=follow, args=(i,)) for i in range(len(requests))]
    for thread in threads:
        thread.start()
    while not engine.is_idle:
        engine.step()
    for thread in threads:
        thread.join(60)
    assert [found[i] for i in range(len(requests))] == [lone(PROMPT, n) for n in range(1, COUNT)]


def test_a_timeout_loses_nothing(engine, lone):
    before = threading.active_count()
    with engine.serve():
        request = engine.submit(PROMPT, COUNT)
        with pytest.raises(TimeoutError, match="has not ended after 0 s"):
            request.result(0)
        with pytest.raises(RuntimeError, match="served by a thread of its own"):
            engine.step()
        with pytest.raises(RuntimeError, match="served by a thread of its own"):
            list(engine.run())
        with pytest.raises(RuntimeError, match="served already"), engine.serve():
            pass
        assert request.result(60) == lone(PROMPT, COUNT)
        assert "served" in repr(engine)
    assert not engine.is_served and threading.active_count() == before
    left = engine.submit(PROMPT, 3)
    assert left.result() == lone(PROMPT, 3), "without serve whoever waits takes the steps again"


def test_others_may_use_the_engine_meanwhile(engine, lone, tmp_path):
    with engine.serve():
        requests = [engine.submit(PROMPT, 30) for _ in range(3)]
        for _ in range(3):
            engine.save(tmp_path / "engine")
            assert engine.stats()["waiting"] >= 0 and engine.cache.num_layers
        engine.reset()  # all rows are computed again
        assert [request.result(60) for request in requests] == [lone(PROMPT, 30)] * 3


def test_saved_while_it_is_served(model, tmp_path):
    """The thread that serves takes the engine again at once: who waits comes before its next step."""
    with jaxkv.Engine(model, **SIZES | {"max_seq_len": 4096, "num_blocks": 1024}) as engine:
        engine.save(tmp_path / "engine")  # which compiles
        with engine.serve():
            request = engine.submit(PROMPT, 4000, on_token=lambda *_: time.sleep(0.001))
            next(iter(request))
            engine.save(tmp_path / "engine")
            request.cancel()
            engine.wait(60)
        (again,) = engine.load(tmp_path / "engine")
        assert 0 < len(again.tokens) < 2000
        again.cancel()


def test_callbacks(engine, lone):
    pairs = []
    with engine.serve():
        request = engine.submit(PROMPT, 4, n=2, on_token=lambda *pair: pairs.append(pair))
        request.result(60)
        engine.wait(60)
        failed = engine.submit(PROMPT, COUNT, on_token=lambda request, token: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            failed.result(60)
        with pytest.raises(ZeroDivisionError):
            list(failed)
        assert failed.ended == "error" and "ZeroDivisionError" in failed.error
        assert engine.submit(PROMPT, 4).result(60) == lone(PROMPT, 4), "the others go on"
        engine.wait(60)
    for sample in request.samples:
        assert [token for r, token in pairs if r is sample] == [*lone(PROMPT, 4), None]
    assert engine.cache.blocks_in_use == 0


def test_a_callback_that_asks_its_thread_to_end(engine, lone):
    """It would end the thread of all others."""

    def leave(request, token):
        raise SystemExit

    with engine.serve():
        request, other = engine.submit(PROMPT, 4, on_token=leave), engine.submit(PROMPT, COUNT)
        assert other.result(60) == lone(PROMPT, COUNT) and engine.is_served
        with pytest.raises(RuntimeError, match=r"on_token raised SystemExit\(\)"):
            request.result(60)
    request = engine.submit(PROMPT, 4, on_token=leave)
    with pytest.raises(SystemExit):
        request.result(60)


def test_who_waits_takes_the_steps_when_the_thread_that_serves_has_ended(model, lone):
    """A step that asks its thread to end has told those who wait that nobody serves them any more."""
    left = [1]

    def hook(logits, rows):
        if left and left.pop() and threading.current_thread().name == "jaxkv-engine":
            raise SystemExit
        return logits

    with jaxkv.Engine(model, **SIZES, logits_hook=hook) as engine, engine.serve():
        assert engine.submit(PROMPT, 4).result(60) == lone(PROMPT, 4)
        assert not engine.is_served


def test_an_error_that_cannot_be_tidied_up_leaves_nobody_waiting(model, monkeypatch):
    """As where there is no memory for a new cache: the thread ends, and who waits hears of the error by a step."""
    left = [1]

    def hook(logits, rows):
        if left and left.pop():
            raise ValueError("only once")
        return logits

    def fail(*_):
        raise RuntimeError("no memory")

    with jaxkv.Engine(model, **SIZES, logits_hook=hook) as engine, engine.serve():
        for name in ("tidy", "reset"):
            monkeypatch.setattr(engine._loop, name, fail)
        with pytest.raises(ValueError, match="only once"):
            engine.submit(PROMPT, 4).result(60)
        assert not engine.is_served
        monkeypatch.undo()


def test_event_loops(engine, lone):
    async def follow(count):
        request = engine.submit(PROMPT, count)
        return [token async for token in request]

    async def follow_all():
        return await asyncio.gather(*(follow(count) for count in range(1, 9)))

    wanted = [lone(PROMPT, count) for count in range(1, 9)]
    assert asyncio.run(follow_all()) == wanted
    with engine.serve():
        assert asyncio.run(follow_all()) == wanted


def test_places_to_wait(model):
    with jaxkv.Engine(model, max_waiting=2, **SIZES) as engine:
        requests = [engine.submit(PROMPT, 3) for _ in range(2)]
        with pytest.raises(jaxkv.EngineFull, match="2 requests wait, and max_waiting is 2"):
            engine.submit(PROMPT, 3)
        requests[1].cancel()
        assert engine.num_waiting == 1, "who is cancelled leaves its place at once"
        requests[1] = engine.submit(PROMPT, 3)
        engine.step()
        for _ in range(2):  # the first two take the last rows, the others wait for one
            late = [engine.submit(PROMPT, 3) for _ in range(2)]
            engine.step()
        assert engine.num_waiting == 2
        for request in late:
            request.cancel()
        assert engine.num_waiting == 0 and engine.stats()["waiting"] == 0
        several = engine.submit(PROMPT, 3, n=2)
        engine.step()
        other = engine.submit(PROMPT, 3)
        several.cancel()
        assert engine.num_waiting == 1, "neither sample takes the place of another request"
        other.cancel()
        assert engine.submit(PROMPT, 3).result() == requests[0].result()
        engine.wait()
        assert engine.submit(PROMPT, 2, n=4).result(), "an empty queue takes any number of samples"
        engine.submit(PROMPT, 30)
        refused = []

        def submit():
            while not engine._is_draining:
                time.sleep(1e-3)
            with pytest.raises(jaxkv.EngineFull, match="it is drained"):
                engine.submit(PROMPT, 3)
            refused.append(True)

        with engine.serve():
            thread = threading.Thread(target=submit)
            thread.start()
            assert engine.drain(60) and engine.is_idle
            thread.join(60)
        assert refused or not engine._is_draining
        long = engine.submit(PROMPT, 30)
        assert not engine.drain(0) and not long.done
        assert len(long.result()) == 30


def test_a_failing_step_ends_its_requests_and_no_others(model):
    calls = []

    def hook(logits, rows):
        calls.append(logits.shape)
        if len(calls) == 1:
            raise KeyError("of the hook")
        return logits

    with jaxkv.Engine(model, logits_hook=hook, **SIZES) as engine, engine.serve():
        with pytest.raises(KeyError, match="of the hook"):
            engine.submit(PROMPT, 3).result(60)
        assert len(engine.submit(PROMPT, 3).result(60)) == 3


def test_close_ends_those_who_wait(model):
    engine = jaxkv.Engine(model, **SIZES)
    with engine.serve():
        request, ended = engine.submit(PROMPT, 40), []
        thread = threading.Thread(target=lambda: ended.append(request.result(60)))
        thread.start()
        next(iter(request))
        engine.close()
        thread.join(60)
    assert request.done and len(ended) == 1 and repr(engine) == "Engine(closed)"
    with pytest.raises(RuntimeError, match="closed"), engine.serve():
        pass
    engine = jaxkv.Engine(model, **SIZES)
    request = engine.submit(PROMPT, 3)
    del engine
    gc.collect()
    with pytest.raises(RuntimeError, match="its engine is gone"):
        request.result()


def test_an_idle_server_sleeps(engine):
    with engine.serve():
        engine.submit(PROMPT, 3).result(60)
        engine.wait(60)
        before = time.thread_time(), time.process_time()
        time.sleep(0.3)
        assert time.process_time() - before[1] < 0.1


def run_threads(engine, client, count):
    """Serves an engine to so many threads, which are changed as often as Python can, and looks at what is left."""
    before, interval = threading.active_count(), sys.getswitchinterval()
    threads = [threading.Thread(target=client, args=(i,)) for i in range(count)]
    sys.setswitchinterval(1e-6)
    try:
        with engine.serve():
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(1200)
            engine.wait(60)
    finally:
        sys.setswitchinterval(interval)
    assert engine.is_idle and engine.stats()["running"] == engine.stats()["waiting"] == 0
    jaxkv.check_invariants(engine.cache)
    assert engine.prefix is not None or engine.cache.blocks_in_use == 0
    assert threading.active_count() == before


@pytest.mark.parametrize("way", WAYS)
def test_threads_come_and_go(model, lone, way):
    wrong, known = [], [lone(PROMPT[:k], COUNT) for k in range(1, 6)]
    with jaxkv.Engine(model, **(SIZES | WAYS[way])) as engine:

        def client(number):
            draw = random.Random(number)
            for _ in range(300 if NIGHTLY else 12):
                size, count = draw.randint(1, 5), draw.randint(1, COUNT)
                request, how = engine.submit(PROMPT[:size], count, n=draw.choice([1, 1, 2])), draw.random()
                if how < 0.2:
                    request.cancel()
                elif how < 0.4:
                    for _ in request:  # a client that goes away
                        request.cancel()
                else:
                    found = list(request) if how < 0.7 else request.result(120)
                    if found != known[size - 1][:count]:
                        wrong.append((found, known[size - 1][:count]))

        run_threads(engine, client, 30 if NIGHTLY else 6)
    assert not wrong


def draw_options(draw):
    """A prompt of a few, and options of a request, with what it is stopped by."""
    text = draw.choice(["import ", "def f(x):\n    ret", "class A:\n", "for i in ra", "x = [", "import "])
    options = {"max_new_tokens": draw.randint(1, 12), "n": draw.choice([1, 1, 1, 3])}
    if draw.random() < 0.4:
        options |= {"temperature": draw.choice([0.5, 1.3]), "seed": draw.randrange(3), "top_p": draw.choice([0.9, 1.0])}
    if draw.random() < 0.4:
        options |= {"stop": draw.choice([[[10]], [[32, 32], [40, 41]], [[101, 32]]])}
    if draw.random() < 0.2:
        options |= {"eos": draw.choice([[10], [101, 110]]), "include_stop": True}
    return tuple(text.encode()), options


@pytest.mark.skipif(not NIGHTLY, reason="ten thousand requests of a real model, three ways")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("way", [{"prefix_cache": True}, {"draft": "ngram"}, {"steps_per_dispatch": 2}])
def test_threads_of_random_options(way):
    small, sizes = jaxkv.models.small(), dict(max_seqs=16, max_seq_len=64)
    wrong, known, before = [], {}, {id(x) for x in jax.live_arrays()}
    draws = [draw_options(random.Random(i)) for i in range(150)]
    with jaxkv.Engine(small, **sizes | {"max_seqs": 3}) as engine:
        for i, (prompt, options) in enumerate(draws):
            known[i] = [sample.tokens for sample in _ended(engine.submit(list(prompt), **options)).samples]
    with jaxkv.Engine(small, num_blocks=60, **sizes, **way) as engine:

        def client(number):
            draw = random.Random(number)
            for _ in range(334):
                i, how = draw.randrange(len(draws)), draw.random()
                prompt, options = draws[i]
                request = engine.submit(list(prompt), **options, priority=draw.choice([0, 0, -1, 2]))
                if how < 0.15:
                    request.cancel()
                elif how < 0.3:
                    for _ in request:
                        request.cancel()
                elif how < 0.6:
                    found = list(request)
                    if found != known[i][0]:
                        wrong.append((i, found, known[i]))
                else:
                    found = [sample.tokens for sample in _ended(request).samples]
                    if found != known[i]:
                        wrong.append((i, found, known[i]))

        run_threads(engine, client, 30)
    assert not wrong
    gc.collect()
    small_parts = {id(x) for x in jax.tree.leaves(nnx.state(small))}
    assert not [x.shape for x in jax.live_arrays() if id(x) not in before | small_parts]


def _ended(request):
    request.result(300)
    return request


def first_stop(output, stops):
    """Where the first stop sequence ends, and where it begins."""
    found = [(i + len(s), i) for i in range(len(output)) for s in stops if output[i : i + len(s)] == list(s)]
    return min(found, default=(len(output), len(output)))


@pytest.mark.parametrize("way", WAYS)
def test_stop_sequences(model, lone, way):
    output = lone(PROMPT, COUNT)
    draw = random.Random(1)
    with jaxkv.Engine(model, **(SIZES | WAYS[way])) as engine:
        for _ in range(8):
            begins = [draw.randrange(COUNT) for _ in range(2)]
            stops = [output[i : i + draw.randint(1, 4)] for i in begins] + [[VOCAB - 1] * 3, [*output[2:4], VOCAB - 1]]
            handed = []
            request = engine.submit(PROMPT, COUNT, stop=stops, logprobs=1, on_token=lambda _, t: handed.append(t))  # noqa: B023
            end, begin = first_stop(output, stops)
            assert list(request) == request.tokens == output[:begin] and handed == [*output[:begin], None]
            assert request.ended == "stop" and list(request.stop_sequence) in stops
            assert [max(found) >= 0 for found in request.logprobs] == [True] * begin
            kept = engine.submit(PROMPT, COUNT, stop=stops, include_stop=True)
            assert list(kept) == output[:end]
        never = engine.submit(PROMPT, 6, stop=[[*output[4:6], VOCAB - 1]])
        assert list(never) == output[:6] and never.ended == "length" and never.stop_sequence is None
        engine.wait()
        jaxkv.check_invariants(engine.cache)


def test_stop_strings(model, lone):
    output, letters = lone(PROMPT, COUNT), Letters()
    text = letters.decode(output)
    with jaxkv.Engine(model, **SIZES) as engine:
        for stop in (text[3:6], [text[5:7], text[9:12], "?"], [text[-2:]], "?", [text[4:6] + "?"], []):
            request = engine.submit(PROMPT, COUNT, stop=stop, tokenizer=letters)
            shown = []
            for _ in request:
                shown.append(request.text)
            stops = [stop] if isinstance(stop, str) else stop
            end = min((text.index(s) for s in stops if s in text), default=COUNT)
            assert request.text == text[:end] and request.tokens == output[:end]
            assert all(text[:end].startswith(part) for part in shown), "never half of a stop"
            assert request.ended == ("stop" if end < COUNT else "length")
        both = engine.submit(PROMPT, COUNT, stop=[output[5:8], "?"], tokenizer=letters)
        for _ in both:  # a sequence of ids is not shown as text either, nor half of it
            assert text[:5].startswith(both.text)
        assert both.text == text[:5] and both.tokens == output[:5]
        several = engine.submit(PROMPT, COUNT, n=2, stop=text[3:6], tokenizer=letters)
        assert several.result() == several.samples[1].tokens and several.text == several.samples[1].text == text[:3]
        assert several.times.first_token is not None
        kept = engine.submit(PROMPT, COUNT, stop=text[3:6], include_stop=True, tokenizer=letters)
        assert letters.decode(kept.result()) == kept.text == text[: text.index(text[3:6]) + 3]


def test_stops_survive_an_interrupted_call():
    """What was not looked at the first time is the second time."""
    stops = IdStops([(1, 2), (2, 3)])
    assert stops.find([5, 1, 2, 3], 1) == (1, (1, 2)) and stops.find([5, 1, 2, 3], 3) == (2, (2, 3))
    assert stops.count_safe([5, 1]) == 1 and stops.count_safe([5, 1, 4]) == 3 and stops.count_safe([2]) == 0
    text = TextStops(["cd"], Letters(), [])
    assert text.find([1, 2], 0) is None and text.count_safe([1, 2]) == 1
    text._soundness.begin()  # as after an interrupt
    assert text.find([1, 2, 3, 4], 1) == (1, "cd")
    for is_whole, shown in ((False, "b"), (True, "bc")):
        assert TextStops(["cd"], Letters(), []).read_text([1, 2], is_whole=is_whole) == shown


def test_saved_with_their_stops(model, lone, tmp_path):
    output = lone(PROMPT, COUNT)
    with jaxkv.Engine(model, **SIZES) as engine:
        request = engine.submit(PROMPT, COUNT, stop=[output[8:10]])
        for _ in range(9):
            engine.step()
        engine.save(tmp_path / "engine")
        engine.submit(PROMPT, COUNT, tokenizer=Letters())
        with pytest.raises(ValueError, match="submitted with a tokenizer, which no file holds"):
            engine.save(tmp_path / "other")
        request.cancel()
    with jaxkv.Engine(model, **SIZES) as engine:
        (again,) = engine.load(tmp_path / "engine")
        end, begin = first_stop(output, [output[8:10]])
        assert again.result() == output[:begin] and again.ended == "stop" and end <= COUNT


class NoText:
    """A tokenizer whose stream keeps no text."""

    def stream(self, prompt):
        return self

    def add(self, token):
        return ""


REFUSED = {
    "a flat list": ({"stop": [1, 2]}, r"stop must be a list of stop sequences.*write stop=\[\[1\]\]"),
    "a number": ({"stop": 5}, "stop must be a list of stop sequences"),
    "bytes": ({"stop": b"x"}, "stop must be a list"),
    "an empty sequence": ({"stop": [[]]}, "stop has an empty sequence"),
    "an empty string": ({"stop": [""], "tokenizer": Letters()}, "stop has an empty string"),
    "a float": ({"stop": [[1.5]]}, "a token of stop must be an integer"),
    "a negative token": ({"stop": [[-1]]}, "a token of stop"),
    "text without a tokenizer": ({"stop": ["x"]}, "give tokenizer= too"),
    "no tokenizer": ({"tokenizer": 5}, "tokenizer must be a jaxkv.text.Tokenizer"),
    "no stream of text": (
        {"tokenizer": NoText()},
        r"tokenizer.stream\(prompt\) must return the text of tokens to come",
    ),
    "no function": ({"on_token": 5}, "on_token must be a function"),
    "no flag": ({"include_stop": 2}, "include_stop"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_a_sentence(lone, model, name):
    options, message = REFUSED[name]
    with jaxkv.Engine(model, **SIZES) as engine:
        with pytest.raises(ValueError, match=message):
            engine.submit(PROMPT, 3, **options)
        assert engine.is_idle


def test_statistics_have_a_meaning(tmp_path):
    parser = pytest.importorskip("prometheus_client.parser", reason="the extra 'serve' is not installed")
    options = {"prefix_cache": True, "spill_bytes": 1e6, "disk": tmp_path, "disk_bytes": 1e6}
    with jaxkv.Engine(Placed(jnp.zeros(())), **SIZES, **options) as engine:
        assert engine.stats().keys() == MEANINGS.keys()
        requests = [engine.submit(PROMPT, 9) for _ in range(6)]
        for _ in range(3):
            engine.step()
        stats = engine.stats()
        assert stats["running"] + stats["waiting"] == 6 and stats["free_rows"] == 4 - stats["running"]
        assert repr(engine).startswith(f"Engine({stats['running']} of 4 rows running, {stats['waiting']} waiting")
        engine.wait()
        stats = engine.stats()
        assert stats["running"] == stats["waiting"] == 0 and stats["free_rows"] == 4
        first = sorted(r.times.first_token - r.times.submitted for r in requests)
        assert first[0] <= stats["first_token_seconds"]["p50"] <= first[-1]
        assert len(engine._latencies.between) == 6 * 8
        found = {sample.name for family in parser.text_string_to_metric_families(engine.metrics_text())
                 for sample in family.samples}  # fmt: skip
        assert {"jaxkv_running", "jaxkv_tokens_total", "jaxkv_first_token_seconds", "jaxkv_hits_total"} <= found
    assert find_quantiles([]) == {} and find_quantiles([2.0])["p99"] == 2.0
    assert math.isclose(find_quantiles(range(101))["p90"], 90)
