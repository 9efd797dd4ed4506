"""Several processes with one cache: `initialize` also monitors the other processes, and `transfer_address` is where
others send rows of a cache to.

`import jaxkv.distributed` before any computation.
"""

import atexit
import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jaxkv._core.config.validation import real
from jaxkv._core.state.jax_internals import find_process_state
from jaxkv._core.state.multihost import coordinator_store
from jaxkv._tiers.remote import transfer_address as transfer_address

__all__ = ["initialize", "transfer_address"]

BEAT = 0.5  # seconds
ENDED, FAILED, LOST = "ended", "failed", "lost"  # a process's last words; of LOST, why the others end, too


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    patience: float = 10,
    **options: Any,
) -> None:
    """Calls `jax.distributed.initialize`, and monitors the other processes: when one is lost, this process ends.

    By itself JAX waits for a lost process until a timeout of its transport, and then ends without a reason. Here every
    process sends a heartbeat twice a second. When another process has sent none for `patience` seconds, or has ended
    with an exception, this process prints one sentence, its last line, and exits with status 1. Also if the transport
    notices first, and a step raises its error: then that is printed before. Process 0 coordinates: when it is lost, JAX
    may end the others at once, with the same sentence.

    A process that ends with an exception does not wait for the others.

    Args:
      patience: seconds without a heartbeat until another process counts as lost.
      coordinator_address, num_processes, process_id, **options: as for `jax.distributed.initialize`.

    Raises:
      ValueError: a patience below 2 seconds. Errors of JAX pass through.

    >>> import jaxkv
    >>> jaxkv.distributed.initialize("10.0.0.1:8476", num_processes=2, process_id=0, patience=0)
    Traceback (most recent call last):
    ValueError: patience must be at least 2, not 0.0.
    """
    patience = real("patience", patience, least=2, most=3600)
    options.setdefault("heartbeat_timeout_seconds", int(2 * patience) + 10)  # later than our own heartbeat timeout
    jax.distributed.initialize(coordinator_address, num_processes, process_id, **options)
    if jax.process_count() > 1:
        watch = _Watch(coordinator_store(), jax.process_index(), jax.process_count(), patience)
        _call_when_aborted(watch, str(find_process_state().coordinator_address))
        watch.start()


def _call_when_aborted(watch: "_Watch", address: str) -> None:
    """Says why if JAX, in C++, aborts this process for another one: only a signal handler runs then."""
    host, _, port = address.rpartition(":")

    @ctypes.CFUNCTYPE(None, ctypes.c_int)
    def handler(_: int) -> None:  # when the handler returns, the process aborts as before
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
        except OSError:
            _exit(watch.explain_unreachable())
        if silent := watch.find_silent(3 * BEAT):
            _exit(silent)

    if os.name == "posix":
        _kept.append(handler)
        ctypes.CDLL(None).signal(signal.SIGABRT, handler)


_kept: list[Any] = []  # keeps alive the callbacks that C code calls

UNREACHABLE = "process 0, which coordinates, cannot be reached any more"


def _exit(why: str) -> None:
    sentence = f"jaxkv: process {jax.process_index()} ends, because {why.rstrip('.')}."
    # On a line of its own: another thread may be in the middle of a traceback.
    os.write(2, f"\n{sentence} Start all processes again; what was saved last can be loaded.\n".encode())
    os._exit(1)  # other threads may wait forever


class _Watch(threading.Thread):
    """Sends this process's heartbeat, and checks those of the others."""

    def __init__(self, client: Any, process: int, count: int, patience: float):
        super().__init__(name="jaxkv watch", daemon=True)
        self.client, self.process, self.patience = client, process, patience
        self.limit = max(patience - 3 * BEAT, patience / 2)  # so that this process has ended when patience has
        # Last message of each process that has not ended, and the time of its arrival, which may be late. They have
        # all begun: JAX waits for that.
        began = time.monotonic()
        self.heard: dict[int, tuple[str, float]] = {p: ("", began) for p in range(count) if p != process}
        self.is_over = self.has_failed = False
        atexit.register(self.end)  # runs before JAX's own handler, in which processes wait for each other
        self._hook, sys.excepthook = sys.excepthook, self.failed

    def run(self) -> None:
        beat, heard = 0, time.monotonic()
        while self.heard:  # also while this process has ended, and waits for the others
            beat += 1
            try:
                if not self.is_over:
                    self._say(str(beat))
                said = dict(self.client.key_value_dir_get("jaxkv/beats"))
            except Exception:
                if time.monotonic() - heard > self.limit and (not self.is_over or 0 in self.heard):
                    _exit(self.explain_unreachable())
            else:
                heard = time.monotonic()
                self._look(said)
            time.sleep(BEAT)

    def _look(self, said: dict[str, str]) -> None:
        now, texts = time.monotonic(), {int(key.rsplit("/", 1)[-1]): text for key, text in said.items()}
        for process, last in list(self.heard.items()):
            text = texts.get(process, "")
            if text.startswith(FAILED):
                self._leave(f"process {process} {text}")
            elif text.startswith(LOST):
                self._leave(text.removeprefix(f"{LOST} "))
            elif text == ENDED:
                del self.heard[process]
            elif text != last[0]:
                self.heard[process] = (text, now)
        if silent := self.find_silent(self.limit):
            self._leave(silent)

    def find_silent(self, seconds: float) -> str | None:
        """Returns a sentence about a process that has given no sign for some seconds, if there is one."""
        now = time.monotonic()
        for process, (_, at) in list(self.heard.items()):
            if now - at > seconds:
                return f"process {process} is gone: it has given no sign for {now - at:.0f} s"
        return None

    def explain_unreachable(self) -> str:
        """Returns a sentence about why process 0 cannot be reached: another process, if that was silent long before it.
        Then process 0 ended for that one, and this process has not read so."""
        signs = {process: at for process, (_, at) in list(self.heard.items())}
        first = min(signs, key=signs.__getitem__, default=0)
        silence = signs[0] - signs[first] if 0 in signs else 0
        if silence > self.limit / 2:
            return f"process {first} is gone: it had given no sign for {silence:.0f} s when process 0 ended"
        return UNREACHABLE

    def _leave(self, why: str) -> None:
        """Ends this process, and tells the others why: with process 0 goes the coordinator, so it stays a little."""
        self.is_over = True
        try:
            self._say(f"{LOST} {why}")
        except Exception:
            _exit(why)
        time.sleep(2 * BEAT if self.process == 0 else 0)
        _exit(why)

    def failed(self, kind: Any, error: Any, traceback: Any) -> None:
        """Reports that an exception ends this process, once it is known that it is no other process's end."""
        self._hook(kind, error, traceback)
        if any(isinstance(e, jax.errors.JaxRuntimeError) for e in _list_causes(error)):
            self._await_signs()
        self.has_failed = True
        self._end(f"{FAILED} with {kind.__name__}: {str(error)[:200]}")

    def _await_signs(self) -> None:
        """Waits until every other process has given two signs: one may have been given before, and is read only now. If
        one is lost, this does not return."""
        until = time.monotonic() + self.patience + 4 * BEAT
        for _ in range(2):
            began = time.monotonic()
            while time.monotonic() < until and any(at <= began for _, at in list(self.heard.values())):
                time.sleep(BEAT / 4)

    def end(self) -> None:
        """Reports that this process ends. After an exception it waits for nobody, as JAX would."""
        if self.has_failed:
            for stream in (sys.stdout, sys.stderr):
                _attempt(stream.flush)
            os._exit(1)
        self._end(ENDED)

    def _end(self, how: str) -> None:
        if not self.is_over:
            self.is_over = True
            _attempt(lambda: self._say(how))

    def _say(self, text: str) -> None:
        self.client.key_value_set(f"jaxkv/beats/{self.process}", text, allow_overwrite=True)


def _attempt(call: Callable[[], Any]) -> None:
    try:
        call()
    except Exception:
        return  # nobody is left to tell


def _list_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an exception and those that it was raised from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
