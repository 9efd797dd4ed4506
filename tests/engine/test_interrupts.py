"""Whatever cuts off a call of an engine, and wherever: it goes on, no token is wrong, no row or block is lost."""

import collections
import functools
import gc
import itertools
import random
import signal
import sys
import threading
import time

import jax
import numpy as np
import pytest
from checksum_model import Checksum, continuation, finish
from cutting import Cut, CutAt, cut_anywhere
from jax._src import core as jax_core
from nightly import NIGHTLY

import jaxkv
from jaxkv._engine.frontend.engine_lock import EngineLock
from jaxkv._tiers.prefix_cache.transaction import Change

WINDOWS = (None, 7)
ROOM = {"max_seqs": 3, "max_seq_len": 48, "block_size": 3, "num_blocks": 18, "step_tokens": 7}
WAYS = {
    "swapped": {"swap": "always"},
    "computed again": {"swap": "never", "steps_per_dispatch": 3},
    "prefix cache": {"prefix_cache": True, "spill_bytes": 2**20},
}
PROMPTS = [[5, 7, 11] * 4, [3], [5, 7, 11, 5, 7, 11, 1, 2], [9, 8] * 6, [5, 7, 11, 5, 7, 11, 4]]
COUNTS = [14, 9, 12, 14, 3]
EXPECTED = [continuation(WINDOWS, *one, None) for one in zip(PROMPTS, COUNTS, strict=True)]


def work(engine, requests):
    """Submit, cancel, sample, stream, and leave a stream early."""
    for prompt, count in zip(PROMPTS, COUNTS, strict=True):
        requests.append((engine.submit(prompt, count), prompt, count))
        engine.step()
    several = engine.submit(PROMPTS[0], 3, n=2)
    requests += [(sample, PROMPTS[0], 3) for sample in several.samples]
    requests[3][0].cancel()
    run = engine.run()
    for _ in zip(range(9), run, strict=False):
        pass
    run.close()  # what is raised in there is heard: Python ignores it where a generator is only dropped
    outputs = [[] for _ in PROMPTS]
    stream = engine.stream(PROMPTS, COUNTS)
    for index, token in stream:
        outputs[index].append(token)
        if len(outputs[4]) == 2:
            break
    stream.close()
    assert all(output == expected[: len(output)] for output, expected in zip(outputs, EXPECTED, strict=True))
    list(engine.run())


def finish_and_check(engine, requests):
    finish(engine, requests, WINDOWS)
    assert [r for r, _, _ in requests if r.stopped] in ([], [requests[3][0]] if len(requests) > 3 else [])
    engine.step()
    cache = engine.cache
    jaxkv.check_invariants(cache)
    assert cache.is_empty and not np.asarray(cache.failed).any()
    if engine.prefix:
        engine.prefix.check_invariants(cache)
    else:
        assert cache.blocks_in_use == 0
    cache_manager = engine._cache_manager
    assert sorted(cache_manager._free_rows) == list(range(ROOM["max_seqs"])) and not cache_manager.has_rows_to_free
    assert not engine._core.open and not engine._core.submitted


class Engines(dict):
    """Of each way one that has compiled all its programs, made when it is asked for."""

    def __missing__(self, name):
        engine = self[name] = jaxkv.Engine(Checksum(WINDOWS, indexed=True), **ROOM, **WAYS[name])
        for _ in range(2):
            requests = []
            work(engine, requests)
            finish_and_check(engine, requests)
        stats = engine.stats()
        assert name != "swapped" or stats["swapped_out"]
        assert name != "prefix cache" or stats["blocks_restored"]
        return engine


@pytest.fixture(scope="module")
def engines():
    return Engines()


ANYWHERE = [(name, event) for name in WAYS for event in ("line", "opcode")]
BY_DAY = [("swapped", "line"), ("prefix cache", "opcode")]


@pytest.mark.parametrize(("name", "event"), ANYWHERE if NIGHTLY else BY_DAY)
def test_an_exception_anywhere_loses_nothing(engines, name, event):
    engine = engines[name]
    bound = [functools.partial(function, engine) for function in (work, finish_and_check)]
    cut_anywhere(*bound, event, 700 if NIGHTLY else 12)


def test_every_line_of_one_step_and_of_leaving_a_stream(engines):
    """The lines that most rarely are met by chance: where a step is sent, and where a stream ends."""
    engine = engines["swapped"]
    for point in itertools.count(1, 1 if NIGHTLY else 9):
        requests = []
        for prompt, count in zip(PROMPTS, COUNTS, strict=True):
            requests.append((engine.submit(prompt, count), prompt, count))
        for _ in range(3):
            engine.step()
        stream = engine.stream(PROMPTS[:1], COUNTS[:1])
        next(stream)
        try:
            with CutAt(point):
                engine.step()
                stream.close()
        except Cut:
            pass
        else:
            break
        del stream
        finish_and_check(engine, requests)
    finish_and_check(engine, requests)
    assert point > 200, "lines"


def test_a_request_that_is_taken_in_is_not_taken_in_again(engines, monkeypatch):
    engine, cuts = engines["swapped"], []

    class CutOnce(collections.deque):
        def popleft(self):
            if not cuts:
                cuts.append(True)
                raise Cut
            return super().popleft()

    monkeypatch.setattr(engine._core, "submitted", CutOnce())
    requests = [(engine.submit(p, n), p, n) for p, n in zip(PROMPTS[:2], COUNTS, strict=False)]
    with pytest.raises(Cut):
        engine.step()
    assert len(engine._core.submitted) == 2
    finish_and_check(engine, requests)


def mend_jax():
    """An eager operation of JAX sets its trace aside, and then says `try`: cut off between the two, JAX computes
    nothing more in this thread, whoever asks. That is its own."""
    if jax_core.trace_ctx.trace is None:
        jax_core.trace_ctx.set_trace(jax_core.eval_trace)


def test_real_signals(engines, monkeypatch):
    """Ctrl-C ends a call as KeyboardInterrupt, and is swallowed by no one but Python itself."""
    engine, draw, dropped, interrupted = engines["prefix cache"], random.Random(0), [], 0
    seconds = 0.1  # about how long the work takes, which changes as the machine has more or less to do beside it

    def fire(*_):
        raise KeyboardInterrupt

    # Python drops what is raised while it frees an object, for one in a callback of a weak reference, and tells this.
    monkeypatch.setattr(sys, "unraisablehook", lambda what: dropped.append(what.exc_type))
    before = signal.signal(signal.SIGALRM, fire)
    try:
        for _ in range(2000):
            requests, began = [], time.perf_counter()
            try:
                try:
                    signal.setitimer(signal.ITIMER_REAL, draw.uniform(0.05, 0.95) * seconds)
                    work(engine, requests)
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                seconds = time.perf_counter() - began
            except (KeyboardInterrupt, ValueError) as error:  # JAX's caches make a ValueError of what they meet
                assert isinstance(error, KeyboardInterrupt) or "KeyboardInterrupt" in str(error)
                interrupted += 1
                mend_jax()
            finish_and_check(engine, requests)
            if interrupted == (100 if NIGHTLY else 4):
                break
    finally:
        signal.signal(signal.SIGALRM, before)
    assert interrupted >= 4 and set(dropped) <= {KeyboardInterrupt}


def test_a_cache_used_up_while_blocks_come_back_from_the_host_is_not_lost(engines, monkeypatch):
    engine, attach, requests, cuts = engines["prefix cache"], Change.attach, [], []

    def cut_once(change, *arguments):
        if change.restored and not cuts:
            cuts.append(engine._cache_manager.is_lost)
            raise Cut
        attach(change, *arguments)

    monkeypatch.setattr(Change, "attach", cut_once)
    with pytest.raises(Cut):
        while True:  # until something that was spilled is asked for again
            work(engine, requests)
            finish_and_check(engine, requests)
            requests.clear()
    assert cuts == [True]
    finish_and_check(engine, requests)


def test_a_lost_cache_is_said_and_reset_loses_no_request(engines):
    for name in WAYS if NIGHTLY else ("swapped", "prefix cache"):
        engine = engines[name]
        requests = [(engine.submit(p, n), p, n) for p, n in zip(PROMPTS[:3], COUNTS, strict=False)]
        for _ in range(4):
            engine.step()
        program = engine._runner._program

        def failing(*arguments, program=program, **options):
            jax.block_until_ready(program(*arguments, **options))
            raise RuntimeError("the device failed")

        engine._runner._program = failing
        with pytest.raises(RuntimeError, match="the device failed"):
            list(engine.run())
        engine._runner._program = program
        for _ in range(2):
            with pytest.raises(jaxkv.CacheError, match=r"cache was lost .* engine\.reset\(\) starts anew"):
                engine.step()
        engine.reset()
        finish_and_check(engine, requests)
        assert engine.steps, name


def test_one_thread_at_a_time(engines):
    engine, errors = engines["swapped"], []

    def use():
        for call in (
            engine.step, lambda: list(engine.run()), lambda: list(engine.stream([[1]], 1)), engine.reset, engine.stats,
            lambda: engine.cache,
        ):  # fmt: skip
            try:
                call()
            except RuntimeError as error:
                errors.append(str(error))

    def in_a_thread():
        thread = threading.Thread(target=use, name="other")
        thread.start()
        thread.join()

    stream = engine.stream(PROMPTS[:2], COUNTS[:2])
    next(stream)
    in_a_thread()
    assert len(errors) == 6 and all("at work in the thread 'MainThread'" in error for error in errors)
    rest = list(stream)
    assert len(rest) == sum(COUNTS[:2]) - 1
    in_a_thread()  # now it may
    assert len(errors) == 6
    finish_and_check(engine, [])


def test_generators_of_one_thread_end_in_any_order(engines):
    engine, refused = engines["swapped"], []

    def look():
        try:
            engine.step()
        except RuntimeError:
            refused.append(True)
        else:
            refused.append(False)

    def in_a_thread():
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()

    engine.submit(PROMPTS[0], 3)
    outer = engine.run()
    next(outer)
    inner = engine.stream(PROMPTS[1:2], COUNTS[1:2])
    next(inner)
    outer.close()
    in_a_thread()
    inner.close()
    in_a_thread()
    assert refused == [True, False]
    finish_and_check(engine, [])


def test_a_cache_of_which_a_step_failed_on_the_device_is_lost(engines, monkeypatch):
    """Its arrays are there, and raise where they are waited for: as behind an accelerator's step that was sent."""
    for name in ("swapped", "prefix cache"):
        engine = engines[name]
        requests = [(engine.submit(p, n), p, n) for p, n in zip(PROMPTS[:2], COUNTS, strict=False)]
        engine.step()

        def failing(*_, **__):
            raise RuntimeError("the device failed")

        with monkeypatch.context() as patch:
            patch.setattr(engine._runner, "_program", failing)
            with pytest.raises(RuntimeError, match="the device failed"):
                engine.step()
            patch.setattr(jax, "block_until_ready", failing)
            with pytest.raises(jaxkv.CacheError, match="cache was lost"):
                engine.step()
        with pytest.raises(jaxkv.CacheError, match="cache was lost"):
            engine.step()
        engine.reset()
        finish_and_check(engine, requests)


def test_nobody_waits_for_who_has_given_up():
    """A thread that waited, was refused and keeps the error, which keeps its frame."""
    turn, errors = EngineLock(), []

    def take():
        try:
            turn.take()
        except RuntimeError as error:
            errors.append(error)

    brief = turn.take(is_brief=True)
    thread = threading.Thread(target=take)
    thread.start()
    while not turn._waiting:
        time.sleep(1e-4)
    brief.is_brief = False  # as if a run had begun
    thread.join(60)
    assert len(errors) == 1 and not turn._waiting


@pytest.mark.parametrize("is_brief", [False, True])
def test_a_turn_that_only_its_own_garbage_refers_to_is_over(is_brief, monkeypatch):
    """What cut a call off and the call's frame refer to each other; Python finds that out when it looks."""
    monkeypatch.setattr("jaxkv._engine.frontend.engine_lock.MANY_WAITS", 2)
    turn, errors = EngineLock(), []

    def in_a_thread():
        def take():
            try:
                turn.take()
            except RuntimeError as error:
                errors.append(str(error))

        thread = threading.Thread(target=take)
        thread.start()
        thread.join(60)
        assert not thread.is_alive()

    gc.disable()
    try:
        circle = [turn.take(is_brief=is_brief)]
        if not is_brief:
            in_a_thread()  # it is referred to
            assert len(errors) == 1
        circle.append(circle)
        del circle
        in_a_thread()
    finally:
        gc.enable()
    assert len(errors) == (not is_brief)


def test_whoever_works_waits_for_a_cancel_of_another_thread(engines, monkeypatch):
    engine, tidy, is_in = engines["swapped"], engines["swapped"]._core.tidy, threading.Event()

    def slowly():
        is_in.set()
        time.sleep(1)  # longer than whoever refuses looks again
        tidy()

    monkeypatch.setattr(engine._core, "tidy", slowly)
    requests = [(engine.submit(p, n), p, n) for p, n in zip(PROMPTS, COUNTS, strict=True)]
    for _ in range(5):
        engine.step()
    thread = threading.Thread(target=requests[3][0].cancel)
    thread.start()
    assert is_in.wait(60)
    engine.step()
    thread.join()
    finish_and_check(engine, requests)
    assert requests[3][0].stopped


def test_submit_and_cancel_from_any_thread(engines):
    engine, requests, stop = engines["computed again" if NIGHTLY else "swapped"], [], threading.Event()

    def submit(seed):
        draw = random.Random(seed)
        for _ in range(25):
            i = draw.randrange(len(PROMPTS))
            request = engine.submit(PROMPTS[i], COUNTS[i])
            requests.append((request, i))
            if draw.random() < 0.2:
                time.sleep(draw.uniform(0, 0.02))
                request.cancel()

    threads = [threading.Thread(target=submit, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    told = {}
    while any(thread.is_alive() for thread in threads) or engine._core.is_busy:
        for request, token in engine.step():
            told.setdefault(request, []).append(token)
    stop.set()
    assert len(requests) == 100 and len({request.number for request, _ in requests}) == 100
    for request, i in requests:
        assert request.done and [*request.tokens, None] == told[request]
        assert request.tokens == (EXPECTED[i][: len(request.tokens)] if request.stopped else EXPECTED[i])
    finish_and_check(engine, [])
