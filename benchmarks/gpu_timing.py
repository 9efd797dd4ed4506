"""How long something takes on a GPU: by the host's clock, and by what the profiler saw of the device's kernels."""

import collections
import contextlib
import dataclasses
import itertools
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax

PROFILED = 2  # runs, so that it is seen how long the device waits between them


@dataclasses.dataclass(frozen=True)
class Contender:
    """What can be timed: `run` makes `calls` calls. `once` makes one, by which it is compared with another's."""

    run: Callable[[], Any]
    calls: int
    expected: float  # seconds of a call
    once: Callable[[], Any] | None = None
    wait: Callable[[Any], Any] = jax.block_until_ready

    def seconds(self) -> float:
        """Of a call."""
        return seconds_of(self.run, self.expected * self.calls, self.wait) / self.calls


def seconds_of(run: Callable[[], Any], expected: float, wait: Callable[[Any], Any] = jax.block_until_ready) -> float:
    """Median of five differences between many runs one behind the other, about 60 ms of them, and a third of them.

    So that is not counted which passes once, however many runs there are: on an H200 about 1 ms until the first kernel
    of a program starts and the host sees the end of the last one.
    """
    repeats = max(1, min(200, int(0.02 / expected)))

    def take(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            out = run()  # and no more than one is kept: a hundred outputs may be more than there is memory
        wait(out)
        return time.perf_counter() - start

    take(1)
    times = [(take(3 * repeats) - take(repeats)) / (2 * repeats) for _ in range(5)]
    return max(statistics.median(times), 1e-9)  # of a tiny run elsewhere noise may be more


class KernelEvent(NamedTuple):
    """A kernel that the device ran, and when: seconds."""

    name: str
    began: float
    ended: float


@contextlib.contextmanager
def record_kernels() -> Iterator[list[KernelEvent]]:
    """Gives, when the block has ended, what the device ran meanwhile; without a GPU, what XLA ran on the host."""
    events: list[KernelEvent] = []
    options = jax.profiler.ProfileOptions()
    on_gpu = jax.default_backend() == "gpu"
    options.python_tracer_level, options.host_tracer_level = 0, 0 if on_gpu else 2
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            yield events
        for file in pathlib.Path(folder).rglob("*.xplane.pb"):
            for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
                for line in plane.lines if ("/device:GPU" if on_gpu else "/host:CPU") in plane.name else ():
                    for event in line.events if ("Stream" if on_gpu else "XLA") in line.name else ():
                        began = event.start_ns / 1e9
                        events.append(KernelEvent(event.name, began, began + event.duration_ns / 1e9))


def seconds_by_name(events: list[KernelEvent]) -> dict[str, list[float]]:
    """Returns the seconds of each kernel's runs."""
    spent = collections.defaultdict(list)
    for event in events:
        spent[event.name].append(event.ended - event.began)
    return spent


def kernel_seconds(contender: Contender) -> dict[str, Any]:
    """Of each kernel that a run starts, by name: how often, and the mean of its seconds on the device; the seconds of
    all of them for a call; and for how long the device waited between them, within a run and between two."""
    with record_kernels() as events:
        for _ in range(PROFILED):
            out = contender.run()
        contender.wait(out)
    spent = seconds_by_name(events)
    spans = sorted((event.began, event.ended) for event in events)
    waits = sorted((later[0] - before[1] for before, later in itertools.pairwise(spans)), reverse=True)
    return {
        "device_seconds": sum(map(sum, spent.values())) / contender.calls / PROFILED,
        "longest_waits": waits[:3], "waits": sum(waits[1:]) / max(len(waits) - 1, 1),
        "kernels": {name: [len(took) / PROFILED, statistics.mean(took)] for name, took in spent.items()},
    }  # fmt: skip
