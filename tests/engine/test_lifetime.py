"""How long an engine holds memory: no result, no exception and no circle of objects keeps what a run has used."""

import contextlib
import functools
import gc
import io
import logging
import os
import pathlib
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checksum_model import LONGEST, Checksum, Placed, Several, continuation
from compiled import compiled
from flax import nnx
from nightly import NIGHTLY

import jaxkv
from jaxkv._cli.main import main

WINDOWS = (None, 7)
MODEL = Checksum(WINDOWS)
ROOM = {"max_seqs": 2, "max_seq_len": LONGEST, "block_size": 3, "num_blocks": 18, "step_tokens": 7}
PROMPTS = [[1, 2, 3] * 4, [4, 5] * 5, [1, 2, 3] * 3]
REFUSED = r"This engine is closed and has given its memory back: make another Engine"


def live():
    return {id(x): x for x in jax.live_arrays()}


def work(engine, **options):
    requests = [engine.submit(prompt, 5, **options) for prompt in PROMPTS]
    list(engine.run())
    return requests


def run(model=MODEL, *, asked=None, **options):
    return work(jaxkv.Engine(model, **ROOM | options), **asked or {})


def run_apart():
    devices = jax.devices()
    return run(Placed(jax.device_put(0.0, devices[0])), prefill=Placed(jax.device_put(0.0, devices[1])))


def leave_apart():
    devices = jax.devices()
    engine = jaxkv.Engine(
        Placed(jax.device_put(0.0, devices[0])), **ROOM, prefill=Placed(jax.device_put(0.0, devices[1]))
    )
    requests = [engine.submit(prompt, 5) for prompt in PROMPTS]
    for _ in range(4):
        engine.step()
    requests[0].cancel()
    return requests


def run_over_rows():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
    nothing = jax.device_put(0.0, jax.sharding.NamedSharding(mesh, jax.P()))
    return run(Placed(nothing), max_seqs=2, num_blocks=36)


def fail_over_rows():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
    nothing = jax.device_put(0.0, jax.sharding.NamedSharding(mesh, jax.P()))
    engine = jaxkv.Engine(Placed(nothing), **ROOM | {"num_blocks": 36})
    requests = [engine.submit(prompt, 5) for prompt in PROMPTS]
    engine.step()

    def stuck(due):
        raise jaxkv.OutOfBlocks("no room")

    engine._cores[0].end = stuck
    with contextlib.suppress(jaxkv.OutOfBlocks):
        engine.step()
    engine._cores[0].end = None  # which names nothing of this frame
    return requests


def leave(*, cancel=False):
    engine = jaxkv.Engine(MODEL, **ROOM)
    requests = [engine.submit(prompt, 5) for prompt in PROMPTS]
    engine.step()
    engine.step()
    if cancel:
        requests[0].cancel()
    return requests


def leave_stream():
    return next(jaxkv.Engine(MODEL, **ROOM).stream(PROMPTS, 5))


def interrupt():
    engine = jaxkv.Engine(MODEL, **ROOM)
    requests = [engine.submit(prompt, 5) for prompt in PROMPTS]
    engine.step()

    def cut(*_, **__):
        raise KeyboardInterrupt

    engine._runner._program = cut
    with contextlib.suppress(KeyboardInterrupt):
        list(engine.run())
    return requests


def fail_in_a_hook():
    def hook(logits, rows):
        raise ZeroDivisionError

    engine = jaxkv.Engine(MODEL, **ROOM, logits_hook=hook)
    request = engine.submit([1], 2)
    with contextlib.suppress(ZeroDivisionError):
        engine.step()
    return request


def fail_in_a_callback():
    class Lost(Exception):
        def __init__(self, client, why):
            super().__init__(f"{client} {why}")
            self.client = client

    def call(request, token):
        try:
            raise KeyError("address")
        except KeyError:
            raise Lost(5, "is gone")  # noqa: B904

    engine = jaxkv.Engine(MODEL, **ROOM)
    request = engine.submit([1], 2, on_token=call)
    logging.disable()  # pytest keeps what is logged, and its traceback
    try:
        request.result()
    except Lost as error:  # which names this frame, so the engine; what the request keeps must not
        assert error.client == 5 and str(error) == "5 is gone" and repr(error.__cause__) == "KeyError('address')"
    finally:
        logging.disable(logging.NOTSET)
    with contextlib.suppress(Lost):
        list(request)
    assert request.ended == "error"
    return request


def run_a_hook_with_arrays():
    bias = jnp.zeros((1, 97))
    engine = jaxkv.Engine(MODEL, **ROOM, logits_hook=lambda logits, rows: logits + bias)
    return engine.submit([1], 2), list(engine.run())


def run_a_method_with_arrays():
    class Biased:
        def __init__(self):
            self.bias = jnp.zeros((1, 97))

        def hook(self, logits, rows):
            return logits + self.bias

    return run(logits_hook=Biased().hook)


def end_without_a_choice():
    with contextlib.suppress(FloatingPointError):
        list(jaxkv.Engine(MODEL, **ROOM, logits_hook=without_choice).stream(PROMPTS, 3))


def without_choice(logits, rows):
    return logits * jnp.nan


def load(path):
    engine = jaxkv.Engine(MODEL, **ROOM)
    requests = [engine.submit(prompt, 5) for prompt in PROMPTS]
    engine.step()
    engine.step()
    engine.save(path)
    engine = jaxkv.Engine(MODEL, **ROOM)
    loaded = engine.load(path)
    list(engine.run())
    return requests, loaded


def search():
    model = jaxkv.models.recaller()
    cache = jaxkv.init(jaxkv.CacheConfig.from_model(model, max_seqs=2, max_seq_len=32))
    cache = jaxkv.extend(cache, [5, 0])
    at = jnp.array([4, 4])
    logits, cache = model(jnp.array([[0, 150, 2, 66, 151]] * 2), cache=cache, logits_at=at)
    return jaxkv.beam_search(model, cache, logits, beams=2, max_new_tokens=2)[0].tokens.tolist()


def command():
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(["generate", "--prompt", "import ", "--max-new-tokens", "3", "--no-check"]) == 0


def update_weights():
    """Of what stays none are old weights, whatever was computed with them."""
    model = jaxkv.models.recaller()
    room = {"max_seqs": 1, "max_seq_len": 64}
    for _ in range(2):
        jaxkv.generate(model, [[0, 150]], 2, **room)
        nnx.update(model, jax.tree.map(lambda x: x + 0, nnx.state(model)))
    assert sum(x.nbytes for x in jax.tree.leaves(nnx.state(model))) < 1 << 24


KINDS = {
    "plain": run,
    "prefix cache": lambda: run(prefix_cache=True),
    "spilled": lambda: run(prefix_cache=True, num_blocks=12, spill_bytes=2**20),
    "draft model": lambda: run(Several(WINDOWS), draft=Several(WINDOWS, wrong=3)),
    "ngram": lambda: run(Several(WINDOWS), draft="ngram"),
    "evict": lambda: run(Checksum((None,)), evict=jaxkv.Eviction("keydiff", keep=0.5)),
    "prefill": run_apart,
    "prefill, left": leave_apart,
    "rows over devices": run_over_rows,
    "rows over devices, failed": fail_over_rows,
    "samples": lambda: run(asked={"n": 3, "temperature": 0.5}),
    "swap": lambda: run(swap="always", num_blocks=9),
    "left": leave,
    "cancelled": lambda: leave(cancel=True),
    "stream left": leave_stream,
    "interrupted": interrupt,
    "hook fails": fail_in_a_hook,
    "callback fails": fail_in_a_callback,
    "hook with arrays": run_a_hook_with_arrays,
    "method with arrays": run_a_method_with_arrays,
    "no choice": end_without_a_choice,
    "generate": lambda: jaxkv.generate(MODEL, PROMPTS, 3, **ROOM),
    "beam search": search,
    "command line": command,
    "weights updated": update_weights,
}


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


BY_NIGHT = {
    "beam search", "command line", "draft model", "evict", "hook with arrays", "method with arrays", "ngram",
    "no choice", "plain", "prefill", "prefix cache", "rows over devices", "rows over devices, failed", "samples",
    "swap", "weights updated",
}  # fmt: skip


@pytest.mark.parametrize("kind", [kind for kind in (*KINDS, "load") if NIGHTLY or kind not in BY_NIGHT])
def test_a_run_leaves_nothing_on_a_device(kind, no_collector, tmp_path):
    call = KINDS[kind] if kind != "load" else functools.partial(load, tmp_path / "engine.safetensors")
    call()  # what is made once
    before, kept = live(), []
    for _ in range(2):
        kept.append(call())
    left = [x for number, x in live().items() if number not in before]
    assert not left, [(x.shape, x.dtype) for x in left]
    assert kept


def test_programs_are_shared_by_what_their_hook_is():
    """Engines with equal hooks share programs as long as it is safe; a closure's are gone with it."""
    bias = jnp.full((1, 97), 0.5)

    def hook(logits, rows):
        return logits + bias

    def serve(hook):
        engine = jaxkv.Engine(MODEL, **ROOM, logits_hook=hook)
        engine.submit([1], 1)
        return list(engine.run())

    first = serve(hook)
    assert compiled(lambda: serve(hook)) == 0 and serve(hook)[0][1] == first[0][1]

    class Holder:
        def hook(self, logits, rows):
            return logits + bias

    holder = Holder()
    serve(holder.hook)
    assert compiled(lambda: serve(holder.hook)) == 0
    serve(Holder.hook.__get__(holder))  # an equal method, another object


def test_close_gives_everything_back_while_names_are_around(tmp_path, no_collector):
    def make(model=MODEL, **options):
        engine = jaxkv.Engine(model, **ROOM | options)
        requests = [engine.submit(prompt, 5) for prompt in PROMPTS]
        for _ in range(5):
            engine.step()
        return engine, requests, engine.run(), engine.cache, engine.prefix

    options = [
        {},
        {"prefix_cache": True, "spill_bytes": 2**20, "num_blocks": 12},
        {"model": Several(WINDOWS), "draft": Several(WINDOWS, wrong=3)},
    ]
    for one in options:
        make(**one)
        before = live()
        engine, requests, run, cache, prefix = made = make(**one)
        tokens = [list(request.tokens) for request in requests]
        engine.close()
        assert not [x for number, x in live().items() if number not in before]
        assert made[1:] == (requests, run, cache, prefix) and engine.is_closed and engine.is_idle
        assert [request.tokens for request in requests] == tokens
        assert {request.ended for request in requests} <= {"length", "cancelled"} and all(r.done for r in requests)
        requests[0].cancel()
        engine.close()


def test_a_closed_engine_refuses_every_call(tmp_path):
    with jaxkv.Engine(MODEL, **ROOM) as engine:
        request = engine.submit([1, 2], 3)
        list(engine.run())
        run = engine.run()  # which has not begun
    assert request.tokens == continuation(WINDOWS, [1, 2], 3, None) and engine.steps and request.ended == "length"
    calls = [
        engine.step, lambda: list(engine.run()), lambda: engine.submit([1], 1), lambda: list(engine.stream([[1]], 1)),
        lambda: engine.cache, engine.reset, engine.stats, engine.warmup, lambda: engine.problem([1], 1),
        lambda: engine.recompute([1], [2]), lambda: engine.save(tmp_path / "x"), lambda: engine.load(tmp_path / "x"),
        engine.__enter__, lambda: engine.blocks_peak, lambda: next(run),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(RuntimeError, match=REFUSED):
            call()
    with pytest.raises(ZeroDivisionError), jaxkv.Engine(MODEL, **ROOM) as engine:
        raise ZeroDivisionError
    assert engine.is_closed


def keep_stepping(engine, way, errors, stepped):
    try:
        while True:
            for _ in engine.run() if way == "run" else engine.step():
                stepped.set()
            if way == "run":
                return
    except RuntimeError as error:
        errors.append(str(error))


def test_close_waits_for_a_step_of_another_thread(monkeypatch):
    for way in ("step", "run"):
        engine = jaxkv.Engine(MODEL, **ROOM)
        requests = [engine.submit(prompt, 30) for prompt in PROMPTS]
        errors, stepped = [], threading.Event()

        thread = threading.Thread(target=keep_stepping, args=(engine, way, errors, stepped))
        thread.start()
        assert stepped.wait(60)
        engine.close()
        thread.join(60)
        assert not thread.is_alive() and all("is closed" in error for error in errors)
        assert way == "run" or errors
        assert all(request.done for request in requests)
        assert all(x.is_deleted() for core in engine._cores for x in core.cache_manager.device.leaves)


def test_close_from_within_a_step_and_from_a_loop():
    engine = jaxkv.Engine(MODEL, **ROOM)
    engine.submit(PROMPTS[0], 9)
    begin = engine._core.begin

    def close_first():
        engine.close()
        return begin()

    engine._core.begin = close_first
    engine.step()  # it ends, then all is given back
    assert engine.is_closed and not engine._cache_manager.device.leaves
    engine = jaxkv.Engine(MODEL, **ROOM)
    request = engine.submit(PROMPTS[0], 9)
    for _ in engine.run():
        engine.close()
    assert request.ended == "cancelled" and 1 <= len(request.tokens) < 9


LEFT_OPEN = """
import jaxkv
from checksum_model import Checksum
engines = [jaxkv.Engine(Checksum((None,)), max_seqs=2, max_seq_len=32, block_size=4, step_tokens=8) for _ in range(2)]
stream = engines[0].stream([[1, 2, 3]], 9)
served = engines[1].serve()
served.__enter__()
request = engines[1].submit([1, 2, 3], 9)
print(next(stream)[1], next(iter(request)))
"""


def test_what_is_left_open_ends_with_python_without_a_word():
    support = pathlib.Path(__file__).parents[1] / "support"
    paths = os.pathsep.join(map(str, [pathlib.Path(jaxkv.__file__).parents[1], support, support.parent]))
    done = subprocess.run(
        [sys.executable, "-c", LEFT_OPEN], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": paths}
    )
    (first,) = continuation((None,), [1, 2, 3], 1, None)
    assert (done.stdout.split(), done.stderr) == ([str(first)] * 2, "")
