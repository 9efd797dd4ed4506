"""The router of docs/ray_replicas.py: over replicas here by day, over Ray's actors where Ray is installed."""

import importlib.util
import os
import pathlib
import signal
import sys
import threading
import time
import types

import pytest
from checksum_model import LONGEST, Checksum, continuation
from nightly import skip_by_day

import jaxkv

DOCS = pathlib.Path(__file__).parents[2] / "docs"
WINDOWS = (None,)
COMMON = [3, 1, 4, 1, 5, 9, 2, 6] * 2  # four blocks


def read_example():
    spec = importlib.util.spec_from_file_location("ray_replicas", DOCS / "ray_replicas.py")
    example = importlib.util.module_from_spec(spec)
    sys.modules["ray_replicas"] = example  # by which actors are sent
    spec.loader.exec_module(example)
    return example


example = read_example()


def make_engine():
    return jaxkv.Engine(
        Checksum(WINDOWS), max_seqs=3, max_seq_len=LONGEST, block_size=4, num_blocks=36, prefix_cache=True
    )


class Gone(Exception):
    """What a replica raises that has died."""


class LocalReplicas:
    """Replicas in this process. `dies` says of which the stream ends with so many tokens."""

    dead = Gone

    def __init__(self):
        self.made, self.dies, self.streams = [], {}, []

    def start(self):
        self.made.append(example.Replica(make_engine))
        return len(self.made) - 1

    def describe_prefix(self, handle):
        return self.made[handle].describe_prefix()

    def stream(self, handle, prompt, *arguments):
        self.streams.append((handle, prompt))
        for i, found in enumerate(self.made[handle].stream(prompt, *arguments)):
            if i == self.dies.get(handle):
                raise Gone
            yield found

    def close(self):
        for replica in self.made:
            replica._serving.__exit__(None, None, None)
            replica.engine.close()


def expect(prompt, count):
    return continuation(WINDOWS, prompt, count, None)


def test_requests_go_where_their_prefix_is_known():
    replicas = LocalReplicas()
    front = example.Front(replicas, 2)
    prompts = [[*COMMON, 7], [5, *COMMON], [*COMMON, 8, 8], [*COMMON, 9], [5, *COMMON, 1]]
    open_ = [front.stream(prompt, 9) for prompt in prompts[:2]]
    firsts = [next(stream) for stream in open_]  # both under way, so one on each replica
    for first, stream, prompt in zip(firsts, open_, prompts, strict=False):
        assert [first, *stream] == expect(prompt, 9)
    for prompt in prompts[2:]:
        assert list(front.stream(prompt, 6)) == expect(prompt, 6)
    assert [handle for handle, _ in replicas.streams] == [0, 1, 0, 0, 1]
    ask_together(front)
    replicas.dies = {0: 3}
    assert list(front.stream([*COMMON, 10], 8)) == expect([*COMMON, 10], 8)
    assert front.replaced == 1 and replicas.streams[-1][0] != 0 and len(replicas.made) == 3
    known = front.router.count_known(2, front.hash_blocks(COMMON))
    assert known == (4 if replicas.streams[-1][0] == 2 else 0)  # the new one knows nothing of the old one's
    sampled = [list(front.stream([5], 8, temperature=1.0, seed=7)) for _ in range(2)]
    assert sampled[0] == sampled[1]
    replicas.close()


def ask_together(front):
    """Many requests that end at the same time."""
    together, found = [[*COMMON, 20 + i] for i in range(6)], {}

    def ask(i):
        found[i] = list(front.stream(together[i], 6))

    threads = [threading.Thread(target=ask, args=(i,), daemon=True) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [found[i] for i in range(6)] == [expect(prompt, 6) for prompt in together]


def test_the_router_follows_events_and_load():
    router, config = example.PrefixRouter(), make_config()
    prefix, cache = jaxkv.PrefixCache(config), jaxkv.init(config)
    with pytest.raises(RuntimeError, match="no replica to choose"):
        router.choose([])
    for replica in (0, 1):
        router.join(replica)
    cache = prefix.insert(jaxkv.extend(cache, [16, 0]), 0, COMMON)
    router.note(1, prefix.events())
    hashes = prefix.hashes([*COMMON, 1, 2, 3, 4])
    assert [router.count_known(replica, hashes) for replica in (0, 1)] == [0, 4]
    assert [router.choose(hashes) for _ in range(6)] == [1] * 5 + [0]  # no more than four ahead of the other
    router.end(1)
    assert router.choose(hashes) == 1
    prefix.reset(cache)
    router.note(1, prefix.events())
    assert router.count_known(1, hashes) == 0
    router.leave(1)
    router.note(1, [])
    router.end(1)
    assert router.choose(hashes) == 0


def test_hashes_are_those_of_the_replicas():
    """Of the salt and the adapter of a request, and of the model by which files are named where there is a disk."""
    replicas = types.SimpleNamespace(start=lambda: 0, describe_prefix=lambda handle: (make_config(), "a model"))
    front, prefix = example.Front(replicas, 1), jaxkv.PrefixCache(make_config(), model="a model")
    found = [
        front.hash_blocks(COMMON, temperature=1.0, **own)
        for own in ({}, {"salt": "me"}, {"adapter": 3}, {"salt": "me", "adapter": 3})
    ]
    ways = [{}, {"salt": "me"}, {"adapter": "3"}, {"salt": "me", "adapter": "3"}]
    assert found == [prefix.hashes(COMMON, **own) for own in ways]
    assert found[0] != jaxkv.PrefixCache(make_config()).hashes(COMMON)


def make_config():
    return jaxkv.CacheConfig.uniform(
        num_layers=1, num_kv_heads=1, head_dim=8, max_seqs=2, max_seq_len=LONGEST, block_size=4, num_blocks=12
    )


class CountedReplica(example.Replica):
    """Tells which process it is."""

    def get_pid(self):
        return os.getpid()


@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # Ray's own processes, which do nothing with JAX
@skip_by_day("an actor is a process that compiles: by day the same router is tried over replicas in this one")
def test_ray_actors_that_die_are_replaced():
    """Two actors, of which one is killed with requests on their way; all have their tokens."""
    ray = pytest.importorskip("ray", reason="Ray is not installed: make .venv/ray.installed")
    path = os.pathsep.join([str(DOCS), *sys.path])
    ray.init(
        num_cpus=2, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}}
    )
    try:
        example.Replica = CountedReplica
        front = example.Front(example.RayReplicas(make_engine, num_cpus=1), 2)
        prompts = [[*COMMON, i] if i % 2 else [i, *COMMON] for i in range(12)]
        found = {}

        def ask(i):
            found[i] = list(front.stream(prompts[i], 12))

        threads = [threading.Thread(target=ask, args=(i,), daemon=True) for i in range(12)]
        ask(0)
        for thread in threads:
            thread.start()
        victim = front._handles[0]
        os.kill(ray.get(victim.get_pid.remote()), signal.SIGKILL)
        for thread in threads:
            thread.join(600)
        assert [found[i] for i in range(12)] == [expect(prompt, 12) for prompt in prompts]
        assert front.replaced == 1
        began = time.monotonic()
        ask(3)
        print("a request after that:", round(time.monotonic() - began, 2), "s")
    finally:
        ray.shutdown()
