"""The cores of an engine in several processes, which take the same steps."""

import collections
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from jaxkv._core.state.interrupts import hold_back_interrupts
from jaxkv._core.state.multihost import PATIENCE, check_agreement
from jaxkv._engine.hosts.calls import CALLS, TURNS, adopt, take_turn
from jaxkv._engine.hosts.channel import Channel
from jaxkv._engine.hosts.replica import Replica
from jaxkv._engine.requests.entries import lengthen, read_request, render_request, render_salt, shorten
from jaxkv._engine.requests.hook_args import HookArgs
from jaxkv._engine.requests.request import Request
from jaxkv._engine.requests.sampling import Kind
from jaxkv._engine.requests.scheduler import Sequence
from jaxkv._engine.runner.engine_core import EngineCore
from jaxkv._files.paths import read_file_path
from jaxkv._tiers.saved_rows import SavedRow


class LockstepCores:
    """Cores in each of several processes, with the interface of one for an `Engine`.

    A call in the first process is a message to the others, which make the same call in `follow`. It carries the
    requests submitted and cancelled since the call before, and nothing else is decided by what only one process knows:
    no clock, no thread, no callback. So every schedule is a function of the messages, and all processes send the same
    programs to their devices, in the same order. Requests here are replicas, which pass on their tokens to those that
    were submitted.

    Args:
      core: that of this process; `cores` are its parts.
      said: the options that processes must agree on.
      hook_args: of the replicas; read in the order of the messages.
      outer: the same of the requests that are submitted here.
    """

    def __init__(
        self,
        core: Any,
        cores: list[EngineCore],
        processes: list[int],
        said: str,
        hook_args: HookArgs,
        outer: HookArgs,
    ):
        check_agreement("Engine", said, processes)
        self.core, self.cores, self.channel = core, cores, Channel(processes)
        self.hook_args, self._outer_args = hook_args, outer
        # Any thread puts requests in; the thread that runs the engine takes them out.
        self.submitted: collections.deque[Request] = collections.deque()
        self.cancelled: collections.deque[Request] = collections.deque()
        self.is_at_work = self._is_torn = False
        self._turn = threading.Lock()  # two threads' messages must be run in the order in which they are sent
        self._replicas: dict[int, Replica] = {}  # those that are not done, by their number in messages
        self._by_origin: dict[Request, Replica] = {}
        self._count = 0  # replicas so far
        self.made: list[Request] | None = None  # the replicas, if those are kept
        self._news: dict[Request, None] = {}  # replicas with news in this call
        self._speeds: list[float | None] = []  # what was sent last
        self.change: Callable[[], None] | None = None  # gives this process's cores other weights
        for core in cores:
            core.cache_manager.swapping.is_told = True
        weakref.finalize(self, self.channel.close).atexit = False

    # What is asked from any thread.

    @property
    def is_busy(self) -> bool:
        """Tells whether there is work left."""
        return bool(self.submitted or self.cancelled) or self.core.is_busy

    def cancel(self, requests: Iterable[Request], error: Exception | None = None) -> None:
        """Ends requests here; the other processes hear of it with the next message."""
        for request in requests:
            if request.withdraw(error):
                self.cancelled.append(request)

    def refuse_follower(self) -> None:
        """Raises RuntimeError unless this is the process from which the engine is used."""
        if not self.channel.is_first:
            raise RuntimeError(
                f"This engine is used from process {self.channel.processes[0]}, and this is process {self.channel.me}: "
                "call engine.follow() here, which takes the same steps until the engine is closed there."
            )

    # Calls, which all processes make.

    @property
    def cache(self) -> Any:
        """The cache, of which this process sees its tables and its shards of the pools."""
        return self._call("show")

    def advance(self) -> None:
        """Sends a step, and reads the one before."""
        self._call("advance")

    def tidy(self) -> None:
        """Removes cancelled requests."""
        self._call("tidy")

    def settle(self) -> None:
        """Accepts all submitted requests and reads all in-flight steps."""
        self._call("settle")

    def reset(self) -> None:
        """Starts again with an empty cache."""
        self._call("reset")

    def release(self, *, keep: bool, parameters: bool) -> None:
        """Frees the device memory of all processes until `restore`, as `EngineCore.release`."""
        self._call("release", keep, parameters)

    def restore(self) -> None:
        """Takes the memory again that `release` gave back."""
        self._call("restore")

    def update(self, change: Callable[[], None]) -> None:
        """Has `change` give the cores other weights, in each process the one that it has called this with."""
        self.change = change
        try:
            if self.channel.is_first:
                self._call("update")
            elif self._follow("update") == "close":
                raise RuntimeError(
                    f"update is a call of all processes, but process {self.channel.processes[0]} has closed the engine."
                )
        finally:
            self.change = None  # it knows the engine

    def recompute(self, tokens: list[int], column: list[int], kind: Kind) -> list[int]:
        """Computes the token that the model chooses after each of `tokens`, without a cache."""
        return self._call("recompute", tokens, column, kind)

    def save(self, path: Any, rows: list[int], model: str | None, metadata: dict[str, Any]) -> None:
        """Writes rows of the cache to a file, as `jaxkv.save`."""
        self._call("save", str(read_file_path("path", path)), rows, model, metadata)

    def name_model(self) -> str | None:
        """Returns a fingerprint of the model. Raises RuntimeError if its parameters are gone."""
        return self._call("name_model")

    def warm(self, kinds: tuple[Kind, ...], counts: tuple[int, ...]) -> list[Callable[[], Any]]:
        """Returns a function that compiles all programs, in all processes."""
        return [lambda: self._call("warm", kinds, counts)]

    def adopt(self, sequences: list[Sequence]) -> None:
        """Adopts sequences of another process: each process reads their rows from the file by itself."""
        places = {id(sequence): i for i, sequence in enumerate(sequences)}
        entries, path = [], None
        for sequence in sequences:
            entry = shorten(render_request(sequence.request, self._outer_args))
            entry["followers"] = [places[id(follower)] for follower in sequence.followers]
            if isinstance(sequence.host, SavedRow):
                path, entry["row"] = str(sequence.host.path), sequence.host.row
            entries.append(entry)
        self._call("adopt", path, entries, origins=[sequence.request for sequence in sequences])

    def change_pins(self, method: str, tokens: list[int], salt: str | bytes | None, adapter: str | None) -> Any:
        """Calls `pin` or `unpin` of the prefix cache, of which there is one."""
        return self._call("change_pins", method, list(tokens), render_salt(salt), adapter)

    def close(self) -> None:
        """Frees device memory, in all processes; cancels requests that are not done."""
        for sample in [*self._by_origin, *(sample for request in self.submitted for sample in request.samples)]:
            sample.withdraw()
        self.submitted.clear()
        self.channel.close()  # the other processes hear of it if this is the first
        self.core.close()

    def follow(self, *, keep: bool = False, until_release: bool = False) -> bool:
        """Makes the calls of the first process, until it closes the engine, or has called `release`; tells whether it
        was that. The requests that it submits are in `made` if they are to be kept.

        Raises:
          RuntimeError: this is the first process; it is gone; a call has failed here and not there; it calls `update`.
        """
        if self.channel.is_first:
            raise RuntimeError("follow is for the other processes: this one submits requests and takes the steps.")
        self.made = [] if keep else None
        return self._follow("release" if until_release else "close") == "release"

    def _follow(self, end: str) -> str:
        """Makes the calls of the first process, until it has made a call of this name, or closes the engine; returns
        which."""
        failed: Exception | None = None
        call = None
        while True:
            message = self._receive_after(failed)
            before, call = call, message["call"]
            if call == "fail":
                if failed is not None and before == end == "update":  # so did that of the first process
                    raise failed
                failed = None
            elif call == "close":
                return call
            elif call == "update" and self.change is None:
                raise RuntimeError(
                    f"Process {self.channel.processes[0]} calls update, as all processes must: there call release "
                    "before; here follow(until_release=True) ends then, and update(model) can be called."
                )
            else:
                try:
                    self._run(message)
                except Exception as error:  # the first process has the same error, or this one must end
                    failed = error
                else:
                    if call == end:
                        return call

    # The parts.

    def _receive_after(self, failed: Exception | None) -> dict[str, Any]:
        """Receives the next message. If a call has failed, it says that the call failed in the first process too."""
        try:
            message = self.channel.receive(None if failed is None else PATIENCE)
        except TimeoutError:
            message = {"call": "nothing"}
        told, own = message.get("error"), None if failed is None else type(failed).__name__
        if told != own:
            raise RuntimeError(
                f"Processes of one engine have parted: in process {self.channel.processes[0]} a step "
                f"{_describe(told)}, and in process {self.channel.me} it {_describe(own)}. Start all again; what was "
                "saved last can be loaded."
            ) from failed
        return message

    def _call(self, name: str, *arguments: Any, origins: list[Request] | None = None) -> Any:
        """Makes a call in all processes, and returns this one's result."""
        self.refuse_follower()
        self.channel.refuse_closed()
        if self._is_torn:
            raise RuntimeError(
                "A step of this engine was cut off here, and other processes went on with it: start all processes "
                "again; what was saved last can be loaded."
            )
        with hold_back_interrupts(), self._turn:
            self.is_at_work = True
            try:
                message, submitted = self._compose(name, arguments)
                self.channel.send(message)
                return self._run(message, origins or submitted)
            except Exception as error:
                self.channel.send({"call": "fail", "error": type(error).__name__})
                raise
            except BaseException:
                self._is_torn = True
                raise
            finally:
                self.is_at_work = False

    def _compose(self, name: str, arguments: tuple[Any, ...]) -> tuple[dict[str, Any], list[Request]]:
        """Returns the message of a call, and the requests that are submitted by it."""
        message: dict[str, Any] = {"call": name}
        if arguments:
            message["arguments"] = arguments
        groups: list[list[dict[str, Any]]] = []
        submitted: list[Request] = []
        while self.submitted:
            samples = [sample for sample in self.submitted.popleft().samples if not sample.done]
            try:
                entries = [shorten(render_request(sample, self._outer_args)) for sample in samples]
            except ValueError as error:  # hook arguments that are no JSON
                self.cancel(samples, error)
                continue
            if entries:
                for entry in entries[1:]:
                    del entry["prompt"]
                groups.append(entries)
                submitted += samples
        cancelled = []
        while self.cancelled:
            replica = self._by_origin.get(self.cancelled.popleft())
            if replica is not None:
                cancelled.append(replica.number_here)
        speeds = [core.cache_manager.swapping.measured for core in self.cores]
        if speeds != self._speeds:
            self._speeds = message["speeds"] = speeds
        message |= {"requests": groups} if groups else {}
        return message | ({"cancelled": cancelled} if cancelled else {}), submitted

    def _run(self, message: dict[str, Any], origins: list[Request] | None = None) -> Any:
        """Makes the call of a message in this process."""
        waiting = collections.deque(origins or [])
        for entries in message.get("requests", ()):
            prompt = entries[0]["prompt"]
            samples = [self.read_entry({"prompt": prompt} | entry, waiting) for entry in entries]
            self.core.submitted.append(Request.several(samples))
        self.core.cancel([self._replicas[n] for n in message.get("cancelled", ()) if n in self._replicas])
        for core, speed in zip(self.cores, message.get("speeds", ()), strict=False):
            core.cache_manager.swapping.seconds_per_token = speed
        name = message["call"]
        try:
            if name in TURNS:
                return take_turn(self, name)
            arguments = message.get("arguments", ())
            if name == "adopt":
                path, entries = arguments
                return adopt(self, path, entries, waiting)
            return CALLS[name](self, *arguments)
        finally:
            for replica in [replica for replica in self._news if replica.done]:
                self._replicas.pop(replica.number_here, None)  # type: ignore[attr-defined]
                self._by_origin.pop(replica.origin, None)
            self._news.clear()

    def read_entry(self, entry: dict[str, Any], origins: "collections.deque[Request]") -> Replica:
        """Makes the replica of an entry, and joins it to the next of `origins`, if there are any."""
        replica: Any = read_request(
            lengthen(entry), self.hook_args, read_adapter=int, make=Replica, news=self._news, engine=lambda: None
        )
        replica.number_here = self._count
        self._count += 1
        self._replicas[replica.number_here] = replica
        if self.made is not None:
            self.made.append(replica)
        if origins:
            origin = origins.popleft()
            replica.join(origin, self.cancelled.append)
            self._by_origin[origin] = replica
        return replica


def _describe(error: str | None) -> str:
    return "ended well" if error is None else f"raised {error}"
