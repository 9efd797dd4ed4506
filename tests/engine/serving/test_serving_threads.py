"""Many threads that submit, iterate and cancel at once: each gets what its request gets by itself."""

import gc
import random
import sys
import threading

import jax
import pytest
from flax import nnx
from nightly import NIGHTLY
from served import COUNT, PROMPT, SIZES, WAYS

import jaxkv


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
