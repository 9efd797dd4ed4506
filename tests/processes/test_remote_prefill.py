"""Prompts computed in another process, which is killed and comes back: no token differs, and no request is lost."""

import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import time

import jax.numpy as jnp
import prefill_worker
import pytest
from checksum_model import LONGEST, VOCAB, Checksum, Divided, Placed, finish
from nightly import NIGHTLY
from started import QUICK

import jaxkv
from jaxkv._engine.hosts import remote_prefill

WINDOWS = (None, 7) if NIGHTLY else (None,)  # by day there is one program to compile for what comes: of 4 blocks
LENGTHS = (1, 2, 9, 16, 30) if NIGHTLY else (1, 18, 24, 30)
ROOM = {"max_seqs": 3, "max_seq_len": LONGEST, "block_size": 8, "num_blocks": 18, "step_tokens": 16, "swap": "never"}
if NIGHTLY:
    ROOM |= {"num_blocks": 8, "step_tokens": 7}
pytestmark = pytest.mark.timeout(3600 if NIGHTLY else 600)


class Worker:
    """The process that computes prompts, at a port of its own for as long as the test runs."""

    def __init__(self):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = str(free.getsockname()[1])
        self.process = None

    def start(self):
        flags = f"--xla_force_host_platform_device_count=2 {QUICK}"
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, pathlib.Path(prefill_worker.__file__), "0", self.port, json.dumps(WINDOWS)]
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        return self.process.stdout.readline().split()[1]

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture
def worker():
    worker = Worker()
    yield worker
    if worker.process is not None:
        worker.kill()


def make_engine(address, **options):
    return jaxkv.Engine(Placed(jnp.zeros(()), Divided(WINDOWS)), prefill=address, **ROOM | options)


def some(draw, count):
    return [([draw.randrange(VOCAB) for _ in range(draw.choice(LENGTHS))], draw.randint(1, 14))
            for _ in range(count)]  # fmt: skip


def submit(engine, draw, count):
    return [(engine.submit(*one), *one) for one in some(draw, count)]


def await_(condition, seconds=60):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def finish_and_check(engine, requests):
    finish(engine, requests, WINDOWS)
    assert not engine._prefill._asked and not engine._prefill._queued
    engine._cache_manager.settle()
    jaxkv.check_invariants(engine.cache)
    assert engine.cache.is_empty and not engine.cache.blocks_in_use


def test_tokens_are_those_of_one_process(worker):
    """Requests come and go; then the process is killed with prompts on their way to it and back."""
    draw, engine = random.Random(0), make_engine(worker.start())
    requests = submit(engine, draw, 9)
    group = engine.submit(prompt := [5, 7, 11] * 6, 5, n=3)
    requests += [(sample, prompt, 5) for sample in group.samples]
    engine.step()
    for request, *_ in (requests[2], requests[8]):
        request.cancel()
    finish_and_check(engine, requests)
    sent = engine.stats()["sent"]
    assert 4 < sent < 12  # of a group one, of one token none
    requests = submit(engine, draw, 12)
    engine.step()
    assert engine._prefill._asked and engine._prefill._queued
    worker.kill()
    finish_and_check(engine, requests)
    assert engine.stats()["sent"] < sent + 12
    engine.close()


def refuse_others(address, engine):
    """Engines of another model, and calls that would part the two."""
    for model, why in [
        (Divided((8, *WINDOWS[1:])), "a model whose layer 0 has 'window', None, and here 'window', 8: load"),
        (Divided((*WINDOWS, 8)), f"a model whose layers are {len(WINDOWS)}, and here {len(WINDOWS) + 1}"),
        (Checksum(WINDOWS), "a model whose layer 0 has .*'num_kv_heads', 4"),
    ]:
        with pytest.raises(ValueError, match=f"same model in another process, but at .* is {why}"):
            jaxkv.Engine(Placed(jnp.zeros(()), model), prefill=address, **ROOM)
    with pytest.raises(ValueError, match="a model of the same layers with other parameters"):
        jaxkv.Engine(Placed(jnp.ones(()), Divided(WINDOWS)), prefill=address, **ROOM)
    with pytest.raises(ValueError, match="other weights than the one in another process that computes its prompts"):
        engine.update(Placed(jnp.zeros(()), Divided(WINDOWS)))
    with pytest.raises(ValueError, match="other weights than the one in another process"):
        engine.release(parameters=True)
    assert not engine.is_released


def refuse_while_it_serves(engine):
    with pytest.raises(ValueError, match="other weights than those that it computes prompts for: end serve_prefill"):
        engine.update(Placed(jnp.zeros(()), Divided(WINDOWS)))
    with pytest.raises(RuntimeError, match="computes prompts for others already"), engine.serve_prefill():
        pass


def test_what_does_not_fit_there_is_computed_here(monkeypatch):
    """What the other engine refuses or that is too long for it; a prompt whose row cannot be read; everything, until
    the other process is back."""
    model, draw = Placed(jnp.zeros(()), Divided(WINDOWS)), random.Random(1)
    there = jaxkv.Engine(model, **ROOM, max_waiting=2)
    with there.serve_prefill() as address:
        engine = make_engine(address)
        engine._prefill._session.longest = 24
        finish_and_check(engine, submit(engine, draw, 16))
        sent = engine.stats()["sent"]
        assert 0 < sent < 16
        monkeypatch.setattr(remote_prefill, "plan_row", lambda *_: None)
        finish_and_check(engine, submit(engine, draw, 4))
        assert engine.stats()["sent"] == sent
        refuse_others(address, engine)
        refuse_while_it_serves(there)
        monkeypatch.setattr(there._runner, "send", lambda *_: 1 / 0)  # steps fail there
        finish_and_check(engine, submit(engine, draw, 3))
    await_(lambda: engine._prefill._link.session is None)
    finish_and_check(engine, submit(engine, draw, 4))
    assert engine.stats()["sent"] == sent and there.is_idle and not there.is_served
    monkeypatch.undo()
    with there.serve_prefill(address):
        await_(lambda: engine._prefill._link.session is not None)
        finish_and_check(engine, submit(engine, draw, 8))
        assert engine.stats()["sent"] > sent


def test_bad_calls():
    with pytest.raises(ValueError, match=r"prefill must be an address such as '10\.0\.0\.2:8476', not 'host:http'"):
        make_engine("host:http")
    with pytest.raises(ConnectionError, match=r"Nobody computes prompts at 127\.0\.0\.1:1 \(.*start serve_prefill"):
        make_engine("127.0.0.1:1")
    with pytest.raises(ValueError, match="prefix_cache= and prefill= do not go together yet"):
        make_engine("127.0.0.1:1", prefix_cache=True)
    engine = jaxkv.Engine(Placed(jnp.zeros(()), Checksum(((7, 2),))), **ROOM)
    with pytest.raises(ValueError, match="keep sink tokens before a window"), engine.serve_prefill():
        pass
    anywhere = "address must name this host as the others reach it"
    with pytest.raises(ValueError, match=anywhere), make_engine(None).serve_prefill("0.0.0.0:0"):
        pass
    with pytest.raises(ValueError, match="address must be an address such as"), make_engine(None).serve_prefill("x"):
        pass


@pytest.mark.skipif(not NIGHTLY, reason="a process is started again and again; by day it is killed once")
def test_kills_at_random_moments_lose_nothing(worker):
    draw, engine = random.Random(2), make_engine(worker.start())
    for _ in range(20):
        requests, sent = submit(engine, draw, 3), engine.stats()["sent"]
        while engine.stats()["sent"] == sent:  # it has its programs now: rows are on their way from here on
            requests += submit(engine, draw, engine.num_waiting < 9)
            engine.step()
        until = time.monotonic() + draw.uniform(0, 0.5)
        while time.monotonic() < until:
            requests += submit(engine, draw, 1)
            engine.step()
        worker.kill()
        finish_and_check(engine, requests)
        worker.start()
        await_(lambda: engine._prefill._link.session is not None)
    print("rows that came:", engine.stats()["sent"])
    engine.close()
