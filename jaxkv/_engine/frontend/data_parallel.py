"""Data-parallel rows over the devices of a mesh axis: a core and a cache for each, and the placement of requests.

Each device runs its own steps, without communication: its results equal to the bit those of a lone device, and a long
prompt on one device delays no row of another. A request stays where it was placed: where a prefix cache has most of it,
else where most blocks would be left.
"""

import collections
import concurrent.futures
import functools
import heapq
from collections.abc import Callable, Iterable
from typing import Any

from jaxkv._core.cache.data_parallel import RowShards, divide_evenly, join_caches
from jaxkv._core.cache.init import partition_specs
from jaxkv._core.config.cache_config import CacheConfig
from jaxkv._core.config.mesh_shape import context_axis, find_mesh
from jaxkv._core.config.validation import integer, read_list, real
from jaxkv._core.state.device_arrays import AXIS
from jaxkv._engine.requests.queue import LOOK_AHEAD, MOST_OVERTAKEN
from jaxkv._engine.requests.request import Request
from jaxkv._engine.requests.sampling import Kind
from jaxkv._engine.requests.scheduler import Sequence
from jaxkv._engine.runner.engine_core import EngineCore, make_sequence
from jaxkv._files.save_rows import save


class DataParallelCores:
    """Several cores with the interface of one, for an `Engine`."""

    def __init__(self, cores: list[EngineCore], model: Any, config: CacheConfig):
        self.cores, self.config = cores, config
        self.mesh = find_mesh(model, AXIS)
        self.submitted: collections.deque[Request] = collections.deque()  # requests not placed yet
        self._sequences: dict[Request, Sequence] = {}  # the sequences of requests considered so far
        self.is_at_work = False

    @property
    def is_busy(self) -> bool:
        """Tells whether there is work left."""
        return bool(self.submitted) or any(core.is_busy for core in self.cores)

    @property
    def cache(self) -> RowShards:
        """The caches of all devices as one."""
        assert self.mesh is not None
        specs = partition_specs(self.config, self.mesh, context=context_axis(self.mesh), rows=AXIS)
        return join_caches([core.cache for core in self.cores], specs, self.mesh)

    def advance(self) -> None:
        """Sends a step to each device that has work, then reads the steps before."""
        self.is_at_work = True
        failed: Exception | None = None
        try:
            self.refuse_step()
            self._place()
            begun = []
            for core in [core for core in self.cores if core.is_busy]:
                try:
                    begun.append((core, core.begin()))
                except Exception as error:  # the others go on
                    failed = error
            for core, due in begun:
                try:
                    core.end(due)
                except Exception as error:
                    failed = error
            if failed is not None:
                raise failed
        finally:
            failed = None  # or the error and this frame would refer to each other
            self.is_at_work = False

    def cancel(self, requests: Iterable[Request], error: Exception | None = None) -> None:
        """Marks requests for removal by the next thread that runs the engine; with an error, as failed."""
        for request in requests:
            if request.withdraw(error):
                for core in self.cores:
                    core.cancelled.append(request)

    def tidy(self) -> None:
        """Removes cancelled requests."""
        for core in self.cores:
            core.tidy()

    def settle(self) -> None:
        """Reads all in-flight steps and places all submitted requests."""
        self._place(must=True)
        for core in self.cores:
            core.settle()

    def adopt(self, sequences: list[Sequence]) -> None:
        """Adopts sequences of another process, balanced by their tokens."""
        followers = {id(follower) for sequence in sequences for follower in sequence.followers}
        shares: list[list[Sequence]] = [[] for _ in self.cores]
        for sequence in sequences:
            if id(sequence) not in followers:
                least = min(shares, key=lambda share: sum(s.limit for s in share))
                least += [sequence, *sequence.followers]
        for core, share in zip(self.cores, shares, strict=True):
            core.adopt(share)

    def save(self, path: Any, rows: list[int], model: str | None, metadata: dict[str, Any]) -> None:
        """Writes rows of the caches, numbered one cache after another, to a file, as `jaxkv.save`."""
        save(path, self.cache, rows, model=model, metadata=metadata)

    def name_model(self) -> str | None:
        """Returns a fingerprint of the model. Raises RuntimeError if its parameters are gone."""
        return self.cores[0].name_model()

    def refuse_step(self) -> None:
        """Raises RuntimeError if no step can be taken now."""
        for core in self.cores:
            core.refuse_step()

    def reset(self) -> None:
        """Starts again with empty caches."""
        for core in self.cores:
            core.reset()

    def close(self) -> None:
        """Frees the memory on all devices."""
        for sample in (sample for request in self.submitted for sample in request.samples):
            sample.withdraw()
        self.submitted.clear()
        for core in self.cores:
            core.close()

    def warm(self, kinds: tuple[Kind, ...], counts: tuple[int, ...]) -> list[Callable[[], Any]]:
        """Returns functions that compile all programs when called in order, for all devices together."""
        each = [core.warm(kinds, counts) for core in self.cores]
        return [functools.partial(_call_together, calls) for calls in zip(*each, strict=True)]

    def _place(self, must: bool = False) -> None:
        """Gives requests to cores, in order, while there is room; with `must`, all of them."""
        for core in self.cores:
            core.make_sound()
        while self._place_first(must):
            pass

    def _place_first(self, must: bool) -> bool:
        """Places those of the first requests that have room; tells whether there were any."""
        passed: list[Request] = []
        was_one_placed = False
        count = len(self.submitted) if must else LOOK_AHEAD
        for request in heapq.nsmallest(count, list(self.submitted), key=lambda r: r.params.priority):  # the earliest
            # An interrupted call may have left a request that is placed already.
            if request.done or any(core.has(request) for core in self.cores):
                self._forget(request)
            elif (best := self._best(request, must)) is not None:
                best.receive(request)
                self._forget(request)
                was_one_placed = True
                for other in passed:
                    other.overtaken += 1
            elif request.overtaken >= MOST_OVERTAKEN:
                break
            else:
                passed.append(request)
        return was_one_placed

    def _best(self, request: Request, must: bool) -> EngineCore | None:
        """Returns the core for a request: of those with room, the one that has most of it, else most room."""
        if request not in self._sequences:
            self._sequences[request] = make_sequence(request)
        sequence = self._sequences[request]
        spare = {core: core.spare(sequence) for core in self.cores}
        found = [core for core, (has_room, _) in spare.items() if has_room]
        if not found:
            is_anywhere_alike = must or not any(core.open for core in self.cores)  # no room will be freed
            found = [core for core in self.cores if is_anywhere_alike or core.may_have_room(sequence)]
        return max(found, key=lambda core: (core.known(sequence), spare[core]), default=None)

    def _forget(self, request: Request) -> None:
        self.submitted.remove(request)
        self._sequences.pop(request, None)


def split_fields(count: int, max_seqs: int, fields: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Returns the share of each of `count` devices in rows, blocks and bytes. Raises ValueError."""
    fields = dict(fields)
    for name in ("num_blocks", "max_tokens"):
        if fields.get(name) is not None:
            fields[name] = divide_evenly(name, integer(name, fields[name]), count, AXIS)
    if fields.get("group_blocks") is not None:
        numbers = [integer("group_blocks", n, least=1) for n in read_list("group_blocks", fields["group_blocks"])]
        fields["group_blocks"] = tuple(divide_evenly("group_blocks", n, count, AXIS) for n in numbers)
    if fields.get("memory_bytes") is not None:
        fields["memory_bytes"] = real("memory_bytes", fields["memory_bytes"], least=0) / count
    return divide_evenly("max_seqs", max_seqs, count, AXIS), fields


def join_config(config: CacheConfig, count: int) -> CacheConfig:
    """Returns the config of `count` caches together."""
    if count == 1:
        return config
    max_seqs = config.max_seqs * count
    if config.contiguous:
        return config.replace(max_seqs=max_seqs)
    return config.resize((n * count for n in config.group_blocks), max_seqs=max_seqs)


def _call_together(calls: Iterable[Callable[[], Any]]) -> None:
    """Calls functions that each compile something, in threads."""
    calls = list(calls)
    with concurrent.futures.ThreadPoolExecutor(len(calls)) as threads:
        for _ in threads.map(_call, calls):  # no frame here refers to the error: that would be a cycle
            pass


def _call(function: Callable[[], Any]) -> Any:
    return function()
