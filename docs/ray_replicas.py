"""Replicas of an engine as Ray actors, and a router before them: requests go where most of their prefix is known.

`python docs/ray_replicas.py` runs two on this machine's CPU. The router's logic, `PrefixRouter` and `Front`, knows
nothing of Ray; `RayReplicas` is all that does.
"""

import collections
import itertools
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import jaxkv

ATTEMPTS = 3  # replicas that may die under one request
MOST_AHEAD = 4  # requests that a replica may have more than the least busy one, for the sake of a prefix


class PrefixRouter:
    """Chooses replicas by what their `PrefixCache`s hold, as their events say, and by how busy they are."""

    def __init__(self):
        self._held: dict[int, collections.Counter[str]] = {}  # of each replica: in how many places each block is
        self._busy: collections.Counter[int] = collections.Counter()  # requests under way

    def join(self, replica: int) -> None:
        """Adds a replica, which holds nothing yet."""
        self._held[replica] = collections.Counter()

    def leave(self, replica: int) -> None:
        """Forgets a replica."""
        self._held.pop(replica, None)
        self._busy.pop(replica, None)

    def note(self, replica: int, events: Iterable[jaxkv.PrefixEvent]) -> None:
        """Takes what a replica's `engine.prefix.events()` has returned."""
        held = self._held.get(replica)
        for event in events if held is not None else ():
            held[event.hash] += 1 if event.stored else -1
            if held[event.hash] <= 0:
                del held[event.hash]

    def count_known(self, replica: int, hashes: list[str]) -> int:
        """Returns how many leading blocks of a prompt a replica holds."""
        return sum(1 for _ in itertools.takewhile(self._held[replica].__contains__, hashes))

    def choose(self, hashes: list[str]) -> int:
        """Returns the replica for a prompt with these hashes of `PrefixCache.hashes`, and counts it as its request."""
        if not self._held:
            raise RuntimeError("There is no replica to choose: join one first.")
        least = min(self._busy[replica] for replica in self._held)
        near = [replica for replica in self._held if self._busy[replica] <= least + MOST_AHEAD]
        chosen = max(near, key=lambda replica: (self.count_known(replica, hashes), -self._busy[replica]))
        self._busy[chosen] += 1
        return chosen

    def end(self, replica: int) -> None:
        """Notes that a request of a replica has ended."""
        if replica in self._held:
            self._busy[replica] -= 1


class Replica:
    """An engine in a process of its own, which takes its steps in a thread."""

    def __init__(self, make_engine: Callable[[], jaxkv.Engine]):
        self.engine = make_engine()
        self._said: queue.SimpleQueue[list[jaxkv.PrefixEvent]] = queue.SimpleQueue()
        self._serving = self.engine.serve()
        self._serving.__enter__()

    def describe_prefix(self) -> tuple[jaxkv.CacheConfig, str | None]:
        """Returns the config of its cache and the name of its model there, from which the router computes hashes."""
        return self.engine.config, self.engine.prefix.model

    def stream(self, prompt: list[int], max_new_tokens: int, options: dict[str, Any]) -> Iterator[Any]:
        """Yields the tokens of a request, and at last a list: what the prefix cache has said, and nobody was told."""
        has_ended = threading.Event()

        def note(_: Any, token: int | None) -> None:  # in the thread that takes the steps, and may read the cache
            if token is None:
                self._said.put(self.engine.prefix.events())
                has_ended.set()

        request = self.engine.submit(prompt, max_new_tokens, on_token=note, **options)
        try:
            yield from request
            has_ended.wait()
            yield self._take_events()
        finally:
            request.cancel()  # who asked may have gone away

    def _take_events(self) -> list[jaxkv.PrefixEvent]:
        found: list[jaxkv.PrefixEvent] = []
        while True:
            try:
                found += self._said.get_nowait()
            except queue.Empty:
                return found


class Replicas(Protocol):
    """What starts replicas, somewhere."""

    dead: type[Exception]  # what calls raise if the replica is gone

    def start(self) -> Any:
        """Starts a replica, and returns a handle of it."""

    def describe_prefix(self, handle: Any) -> tuple[jaxkv.CacheConfig, str | None]:
        """Returns what `Replica.describe_prefix` does."""

    def stream(self, handle: Any, *arguments: Any) -> Iterator[Any]:
        """Yields what `Replica.stream` does."""


class Front:
    """Has requests computed by replicas. One that dies is replaced, and its requests go on elsewhere.

    A request's tokens follow from its prompt, its options and its seed, so another replica computes those that were
    given out once more, and the stream goes on behind them. May be used from many threads.
    """

    def __init__(self, replicas: Replicas, count: int):
        self._replicas, self._handles, self._numbers = replicas, {}, itertools.count()
        self._lock, self._seeds = threading.Lock(), itertools.count()
        self.router = PrefixRouter()
        for _ in range(count):
            self._start()
        config, model = replicas.describe_prefix(next(iter(self._handles.values())))
        self._prefix = jaxkv.PrefixCache(config, model=model)  # of names alone: it holds nothing
        self.replaced = 0

    def stream(self, prompt: list[int], max_new_tokens: int, **options: Any) -> Iterator[int]:
        """Yields the tokens that `Engine.submit` of the same arguments gives."""
        options = {"seed": next(self._seeds)} | options
        given = 0
        for attempt in itertools.count(1):
            with self._lock:
                replica = self.router.choose(self.hash_blocks(prompt, **options))
                handle = self._handles[replica]
            try:
                for place, found in enumerate(self._replicas.stream(handle, prompt, max_new_tokens, options)):
                    if isinstance(found, list):
                        with self._lock:
                            self.router.note(replica, found)
                        return
                    if place == given:
                        yield found
                        given += 1
            except self._replicas.dead:
                self._replace(replica)
                if attempt == ATTEMPTS:  # it may be what ends them
                    raise
            finally:
                with self._lock:
                    self.router.end(replica)

    def hash_blocks(self, prompt: list[int], *, salt: Any = None, adapter: int = 0, **_: Any) -> list[str]:
        """Returns the hashes of a prompt's blocks, as the events of replicas name them, by the options of `submit`."""
        return self._prefix.hashes(prompt, salt=salt, adapter=str(adapter) if adapter else None)

    def _start(self) -> None:
        number = next(self._numbers)
        self._handles[number] = self._replicas.start()
        self.router.join(number)

    def _replace(self, replica: int) -> None:
        """Starts another replica in place of one that is gone, unless another thread has done so."""
        with self._lock:
            if self._handles.pop(replica, None) is not None:
                self.router.leave(replica)
                self._start()
                self.replaced += 1


class RayReplicas:
    """Replicas that are Ray actors, each with `resources` of its own, say `num_gpus=1` or `resources={"TPU": 4}`."""

    def __init__(self, make_engine: Callable[[], jaxkv.Engine], **resources: Any):
        import ray

        self._ray, self._make_engine, self.dead = ray, make_engine, ray.exceptions.RayActorError
        self._actor = ray.remote(Replica).options(max_concurrency=256, **resources)

    def start(self) -> Any:
        return self._actor.remote(self._make_engine)

    def describe_prefix(self, handle: Any) -> tuple[jaxkv.CacheConfig, str | None]:
        return self._ray.get(handle.describe_prefix.remote())

    def stream(self, handle: Any, *arguments: Any) -> Iterator[Any]:
        return map(self._ray.get, handle.stream.options(num_returns="streaming").remote(*arguments))


def make_engine() -> jaxkv.Engine:
    """Makes the engine of a replica: here of the small model that comes with jaxkv."""
    return jaxkv.Engine(jaxkv.models.small(), max_seqs=4, max_seq_len=128, block_size=8, prefix_cache=True)


def main() -> None:
    import ray

    ray.init(num_cpus=2)
    front = Front(RayReplicas(make_engine, num_cpus=1), count=2)
    common = list(b"import jax\nimport numpy as np\n\n")
    for end in (b"def f(", b"class A", b"x = "):
        print(bytes(front.stream([*common, *end], 16)))
    ray.shutdown()


if __name__ == "__main__":
    main()
