"""Prefill apart from decode: the tokens of one cache, whatever the devices, and whatever comes in between."""

import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checksum_model import LONGEST, VOCAB, Checksum, Placed, finish
from cutting import cut_anywhere
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from nightly import NIGHTLY

import jaxkv
import jaxkv.models

WINDOWS = (None, 7)
ROOM = {"max_seqs": 3, "max_seq_len": LONGEST, "block_size": 8, "num_blocks": 6, "step_tokens": 7, "swap": "never"}


def on(*numbers):
    """On one device, or on a mesh of several: there, both hold all of a layer's one head."""
    devices = [jax.devices()[n] for n in numbers]
    place = devices[0]
    if len(devices) > 1:
        place = NamedSharding(Mesh(np.array(devices), ("model",)), PartitionSpec())
    return Placed(jax.device_put(jnp.zeros(()), place))


@functools.cache
def engine():
    """Prompts on one device, what follows them on another."""
    return jaxkv.Engine(on(0), prefill=on(1), **ROOM)


def finish_and_check(engine, requests):
    finish(engine, requests, WINDOWS)
    prefill = engine._prefill
    assert not prefill._own and not prefill.scheduler.running and not prefill.scheduler.waiting
    for cache_manager in (engine._cache_manager, prefill.cache_manager):
        cache_manager.settle()
        cache = cache_manager.cache
        jaxkv.check_invariants(cache)
        assert (
            cache.is_empty
            and (cache.config.contiguous or not cache.blocks_in_use)
            and not np.asarray(cache.failed).any()
        )
        assert sorted(cache_manager._free_rows) == list(range(ROOM["max_seqs"]))


def some(draw, count):
    return [([draw.randrange(VOCAB) for _ in range(draw.choice([1, 2, 9, 16]))], draw.randint(1, 14))
            for _ in range(count)]  # fmt: skip


def test_requests_come_and_go():
    draw = random.Random(0)
    for _ in range(12 if NIGHTLY else 4):
        requests = []
        for prompt, count in some(draw, 9):
            requests.append((engine().submit(prompt, count), prompt, count))
            if draw.random() < 0.5:
                engine().step()
            if draw.random() < 0.3:
                draw.choice(requests)[0].cancel()
        several = engine().submit(prompt := some(draw, 1)[0][0], 5, n=4)
        requests += [(sample, prompt, 5) for sample in several.samples]
        if draw.random() < 0.5:
            engine().step()
            draw.choice(several.samples).cancel()
        finish_and_check(engine(), requests)
    stats = engine().stats()
    assert stats["sent"] > 20 and stats["set_back"] > 0
    # Nothing but tokens that others had shared, and those of one token, was computed beside decoding rows.
    devices = [
        {d.id for d in manager.cache.pools[0].kv.devices()}
        for manager in (engine()._cache_manager, engine()._prefill.cache_manager)
    ]
    assert devices == [{0}, {1}]


def test_samples_share_the_prompt_where_they_go_on():
    requests = engine().submit([5, 7, 11] * 6, 3, n=3)
    sent = engine().stats()["sent"]
    shared = 0
    while not requests.done:
        engine().step()
        shared = max(shared, jaxkv.stats(engine().cache)["blocks_shared"])
    assert shared >= 2 and engine().stats()["sent"] == sent + 1
    finish_and_check(engine(), [(sample, [5, 7, 11] * 6, 3) for sample in requests.samples])


def test_a_prompt_that_is_not_ready_delays_no_decoding_row(monkeypatch):
    first = engine().submit([3, 4], 14)
    while not first.tokens:
        engine().step()
    prefill, asked = engine()._prefill, []

    class Never:  # what the device is busy with
        def __init__(self, numbers):
            self.numbers = numbers

        def is_ready(self):
            return first.done

        def __array__(self, *_, **__):
            asked.append(first.done)
            return np.asarray(self.numbers)

        def copy_to_host_async(self):
            pass

    send = prefill.runner.send

    def sent(*arguments):
        work = send(*arguments)
        flight = prefill.runner.flights.pop()
        numbers = Never(flight.result.numbers)
        prefill.runner.flights.append(flight._replace(result=flight.result._replace(numbers=numbers)))
        return work

    monkeypatch.setattr(prefill.runner, "send", sent)
    long = engine().submit([9] * 16, 5)
    finish_and_check(engine(), [(first, [3, 4], 14), (long, [9] * 16, 5)])
    assert asked and all(asked)


def test_a_failure_on_the_way_loses_nothing(monkeypatch):
    draw = random.Random(1)

    def failing(function, at):
        calls = iter(range(at))

        def call(*arguments, **options):
            if next(calls, None) is None:
                raise RuntimeError("the way is broken")
            return function(*arguments, **options)

        return call

    prefill = engine()._prefill
    for name, where in [("_hand_over", prefill), ("_read", prefill), ("send", prefill.runner),
                        ("call", prefill.cache_manager), ("call", engine()._cache_manager)]:  # fmt: skip
        requests = [(engine().submit(*one), *one) for one in some(draw, 6)]
        with monkeypatch.context() as patch:
            if name == "_hand_over":  # in a function that is bound before
                patch.setattr("jaxkv._engine.runner.disaggregated_prefill.lift_row", failing(None, 0))
            else:
                patch.setattr(where, name, failing(getattr(where, name), 3))
            with pytest.raises(RuntimeError, match="the way is broken"):
                list(engine().run())
        finish_and_check(engine(), requests)
    requests = [(engine().submit(*one), *one) for one in some(draw, 6)]
    for _ in range(3):
        engine().step()
    engine().reset()
    finish_and_check(engine(), requests)


@pytest.mark.parametrize("event", ["line", "opcode"] if NIGHTLY else ["line"])
def test_an_exception_anywhere_loses_nothing(event):
    def work(requests):
        for prompt, count in [([5, 7, 11] * 5, 9), ([3], 6), ([9, 8] * 7, 12), ([5, 7, 11, 4], 8), ([2, 1] * 5, 14)]:
            requests.append((engine().submit(prompt, count), prompt, count))
            engine().step()
        several = engine().submit([5, 7, 11] * 4, 3, n=2)
        requests += [(sample, [5, 7, 11] * 4, 3) for sample in several.samples]
        requests[3][0].cancel()
        list(engine().run())

    cut_anywhere(work, lambda requests: finish_and_check(engine(), requests), event, 700 if NIGHTLY else 12)


@pytest.mark.parametrize("fields", [{"steps_per_dispatch": 3}, {"layout": "contiguous"}])
@pytest.mark.skipif(not NIGHTLY, reason="each engine has its programs to compile")
def test_with_other_options(fields):
    sizes = {"max_seqs": 3, "max_seq_len": LONGEST, "step_tokens": 16} if "layout" in fields else ROOM
    draw, engine = random.Random(2), jaxkv.Engine(on(0), prefill=on(1), **sizes | fields)
    finish_and_check(engine, [(engine.submit(*one), *one) for one in some(draw, 12)])


@pytest.mark.skipif(not NIGHTLY, reason="each engine has its programs to compile")
@pytest.mark.parametrize("places", [((0, 1), (2, 3)), ((0, 1), (2,)), ((0,), (2, 3))])
def test_from_mesh_to_mesh(places):
    decode, prefill = (on(*numbers) for numbers in places)
    engine = jaxkv.Engine(decode, prefill=prefill, **ROOM)
    finish_and_check(engine, [(engine.submit(*one), *one) for one in some(random.Random(3), 8)])
    for numbers, cache_manager in zip(places, (engine._cache_manager, engine._prefill.cache_manager), strict=True):
        assert {d.id for d in cache_manager.cache.pools[0].kv.devices()} == set(numbers)


@pytest.mark.skipif(not NIGHTLY, reason="each engine has its programs to compile")
def test_a_real_model_with_sampling():
    """Heads are divided on the mesh that decodes, and whole where prompts are computed."""
    one = jaxkv.models.small()
    two = jaxkv.models.small(mesh=Mesh(np.array(jax.devices()[:2]), ("model",)))
    sizes = {"max_seqs": 2, "max_seq_len": 64, "step_tokens": 32, "seed": 7}
    outputs = []
    for engine in (jaxkv.Engine(one, **sizes), jaxkv.Engine(two, prefill=one, **sizes)):
        requests = [engine.submit(list(b"import jax, j"), 6), engine.submit(list(b"def f("), 5, temperature=1.0)]
        list(engine.run())
        outputs.append([r.tokens for r in requests])
    assert outputs[0] == outputs[1] and engine.stats()["sent"] == 2
    assert "model" in engine.cache.pools[0].kv.sharding.spec


def test_what_cannot_prefill_is_refused():
    for prefill, fields, message in [
        (5, {}, "prefill must be the model once more, on other devices, or None, not 5"),
        ("ngram", {}, "not 'ngram'"),
        (Checksum((None,)), {}, "its layers or its config are others: load both from one folder"),
        (Checksum(WINDOWS), {"prefix_cache": True}, "prefix_cache= and prefill= do not go together yet"),
        (Checksum(WINDOWS), {"evict": jaxkv.Eviction("knorm")}, "evict= and prefill= do not go together yet"),
    ]:
        with pytest.raises(ValueError, match=message):
            jaxkv.Engine(Checksum(WINDOWS), prefill=prefill, **ROOM | fields)


def test_the_scores_of_a_prompt_are_asked_elsewhere():
    said = "for an Engine with prefill=, whose .*: leave it out, or submit the prompt to an Engine without prefill=."
    with pytest.raises(ValueError, match=said):
        engine().submit([1, 2], 3, prompt_logprobs=True)
