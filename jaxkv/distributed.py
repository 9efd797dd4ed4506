"""Several processes with one cache: `initialize` also monitors the other processes.

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
from typing import Any

import jax

from jaxkv._core.config.validation import real
from jaxkv._core.state.multihost import coordinator_store, global_state

__all__ = ["initialize"]

BEAT = 0.5  # seconds
ENDED, FAILED = "ended", "failed"


def initialize(
    coordinator_address: str | None = None, num_processes: int | None = None, process_id: int | None = None, *,
    patience: float = 10, **options: Any,
) -> None:  # fmt: skip
    """Calls `jax.distributed.initialize`, and monitors the other processes: when one is lost, this process ends.

    By itself JAX waits for a lost process until a timeout of its transport, and then ends without a reason. Here every
    process sends a heartbeat twice a second. When another process has sent none for `patience` seconds, or has ended
    with an exception, this process prints one sentence and exits with status 1. Process 0 coordinates: when it is lost,
    JAX may end the others first.

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
        _say_when_aborted(str(global_state().coordinator_address))
        _Watch(coordinator_store(), jax.process_index(), jax.process_count(), patience).start()


def _say_when_aborted(address: str) -> None:
    """Prints a sentence when JAX, in C++, aborts a process without coordinator: only a signal handler runs then."""
    host, _, port = address.rpartition(":")

    @ctypes.CFUNCTYPE(None, ctypes.c_int)
    def handler(_: int) -> None:  # when the handler returns, the process aborts as before
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
        except OSError:
            _say("process 0, which coordinates, cannot be reached any more")

    if os.name == "posix":
        _kept.append(handler)
        ctypes.CDLL(None).signal(signal.SIGABRT, handler)


_kept: list[Any] = []  # keeps alive the callbacks that C code calls


def _say(why: str) -> None:
    sentence = f"jaxkv: process {jax.process_index()} ends, because {why}."
    os.write(2, f"{sentence} Start all processes again; what was saved last can be loaded.\n".encode())


def _exit(why: str) -> None:
    _say(why)
    os._exit(1)  # other threads may wait forever


class _Watch(threading.Thread):
    """Sends this process's heartbeat, and checks those of the others."""

    def __init__(self, client: Any, process: int, count: int, patience: float):
        super().__init__(name="jaxkv watch", daemon=True)
        self.client, self.process, self.patience = client, process, patience
        # Last message of each process, and the time of its arrival, which may be late.
        self.heard: dict[int, tuple[str, float] | None] = {p: None for p in range(count) if p != process}
        self.is_over = False
        atexit.register(self.end)  # runs before JAX's own handler, in which processes wait for each other
        self._hook, sys.excepthook = sys.excepthook, self.failed

    def run(self) -> None:
        beat, heard = 0, time.monotonic()
        while not self.is_over:
            beat += 1
            try:
                self._say(str(beat))
                said = dict(self.client.key_value_dir_get("jaxkv/beats"))
            except Exception as error:
                if time.monotonic() - heard > self.patience and not self.is_over:
                    _exit(f"process 0, which coordinates, cannot be reached any more ({type(error).__name__})")
            else:
                heard = time.monotonic()
                self._look(said)
            time.sleep(BEAT)

    def _look(self, said: dict[str, str]) -> None:
        now = time.monotonic()
        for process in list(self.heard):
            text = next((v for k, v in said.items() if k.rsplit("/", 1)[-1] == str(process)), None)
            last = self.heard[process]
            if text is None and last is None:
                continue  # not started yet: JAX has its own timeout for that
            if text is not None and text.startswith(FAILED):
                _exit(f"process {process} {text}")
            if text == ENDED:
                del self.heard[process]
            elif last is None or (text is not None and text != last[0]):
                self.heard[process] = (str(text), now)
            elif now - last[1] > self.patience:
                _exit(f"process {process} is gone: it has given no sign for {now - last[1]:.0f} s")

    def failed(self, kind: Any, error: Any, traceback: Any) -> None:
        """Reports that an exception ends this process."""
        self._hook(kind, error, traceback)
        self._end(f"{FAILED} with {kind.__name__}: {str(error)[:200]}")

    def end(self) -> None:
        """Reports that this process ends normally."""
        self._end(ENDED)

    def _end(self, how: str) -> None:
        if not self.is_over:
            self.is_over = True
            try:
                self._say(how)
            except Exception:
                return  # nobody is left to tell

    def _say(self, text: str) -> None:
        self.client.key_value_set(f"jaxkv/beats/{self.process}", text, allow_overwrite=True)
