"""Requests that are iterated, awaited, called back and cancelled from any thread."""

import asyncio
import gc
import math
import threading
import time

import jax.numpy as jnp
import pytest
from checksum_model import Placed
from served import COUNT, PROMPT, SIZES

import jaxkv
from jaxkv._engine.frontend.metrics import MEANINGS, find_quantiles


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
            monkeypatch.setattr(engine._core, name, fail)
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


def test_free_rows_are_no_places_to_wait(model):
    """A burst takes the free rows first: only what none of them can take waits."""
    with jaxkv.Engine(model, max_waiting=1, **SIZES) as engine:
        requests = [engine.submit(PROMPT, 3) for _ in range(SIZES["max_seqs"] + 1)]
        for _ in range(2):  # no step has looked at them, and one has
            with pytest.raises(jaxkv.EngineFull, match="1 requests wait for a row, and max_waiting is 1"):
                engine.submit(PROMPT, 3)
            engine.step()
        engine._core.cancel([requests[0]])  # as from another thread, while a step is under way
        requests.append(engine.submit(PROMPT, 3))  # in the row that is free at the next step
        with pytest.raises(jaxkv.EngineFull):
            engine.submit(PROMPT, 3)
        engine.wait()
        several = engine.submit(PROMPT, 3, n=3)
        engine.step()  # they compute their prompt in a row that is theirs together
        more = [engine.submit(PROMPT, 3) for _ in range(2)]
        with pytest.raises(jaxkv.EngineFull):
            engine.submit(PROMPT, 3)
        engine.wait()
        assert {request.ended for request in (several, *more, *requests[1:])} == {"length"}


def test_places_to_wait(model):
    with jaxkv.Engine(model, max_waiting=2, **SIZES) as engine:
        rows = [engine.submit(PROMPT, 30) for _ in range(SIZES["max_seqs"])]
        engine.step()
        requests = [engine.submit(PROMPT, 3) for _ in range(2)]
        with pytest.raises(jaxkv.EngineFull, match="2 requests wait for a row, and max_waiting is 2"):
            engine.submit(PROMPT, 3)
        requests[1].cancel()
        assert engine.num_waiting == 1, "who is cancelled leaves its place at once"
        requests[1] = engine.submit(PROMPT, 3)
        for row in rows[:2]:
            row.cancel()
        engine.step()
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
