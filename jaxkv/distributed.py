"""Several processes with one cache: `initialize`, which also watches over the others.

`import jaxkv.distributed` before anything is computed.
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
from jaxkv._core.state.multihost import global_state, store

__all__ = ["initialize"]

BEAT = 0.5  # seconds
ENDED, FAILED = "ended", "failed"


def initialize(
    coordinator_address: str | None = None, num_processes: int | None = None, process_id: int | None = None, *,
    patience: float = 10, **options: Any,
) -> None:  # fmt: skip
    """`jax.distributed.initialize`, and a watch over the other processes: when one is gone, this one ends.

    By itself JAX waits for a process that is gone until some timeout of its transport, and then ends without saying
    why. Here every process says twice a second that it is there; when another has said nothing for `patience` seconds,
    or has ended with an exception, this process prints one sentence and exits with status 1. Process 0 coordinates:
    when it is gone, JAX may end the others first.

    Args:
      patience: seconds without a sign of another process until it counts as gone.
      coordinator_address, num_processes, process_id, **options: as for `jax.distributed.initialize`.

    Raises:
      ValueError: a patience below 2 seconds. What JAX raises.

    >>> import jaxkv
    >>> jaxkv.distributed.initialize("10.0.0.1:8476", num_processes=2, process_id=0, patience=0)
    Traceback (most recent call last):
    ValueError: patience must be at least 2, not 0.0.
    """
    patience = real("patience", patience, least=2, most=3600)
    options.setdefault("heartbeat_timeout_seconds", int(2 * patience) + 10)  # JAX's own watch comes second
    jax.distributed.initialize(coordinator_address, num_processes, process_id, **options)
    if jax.process_count() > 1:
        _say_when_aborted(str(global_state().coordinator_address))
        _Watch(store(), jax.process_index(), jax.process_count(), patience).start()


def _say_when_aborted(address: str) -> None:
    """JAX aborts a process whose coordinator is gone at once, in C++: nothing comes between but a signal's handler."""
    host, _, port = address.rpartition(":")

    @ctypes.CFUNCTYPE(None, ctypes.c_int)
    def handler(_: int) -> None:  # when it returns, the process is aborted as it would have been
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
        except OSError:
            _say("process 0, which coordinates, cannot be reached any more")

    if os.name == "posix":
        _kept.append(handler)
        ctypes.CDLL(None).signal(signal.SIGABRT, handler)


_kept: list[Any] = []  # what C code calls


def _say(why: str) -> None:
    sentence = f"jaxkv: process {jax.process_index()} ends, because {why}."
    os.write(2, f"{sentence} Start all processes again; what was saved last can be loaded.\n".encode())


def _exit(why: str) -> None:
    _say(why)
    os._exit(1)  # its other threads may be waiting for what never comes


class _Watch(threading.Thread):
    """Says that this process is there, and looks for the others."""

    def __init__(self, client: Any, process: int, count: int, patience: float):
        super().__init__(name="jaxkv watch", daemon=True)
        self.client, self.process, self.patience = client, process, patience
        # Of each process what it said last, and when that was heard; it may take long to come.
        self.heard: dict[int, tuple[str, float] | None] = {p: None for p in range(count) if p != process}
        self.is_over = False
        atexit.register(self.end)  # called before JAX's own, in which processes wait for each other
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
                continue  # it has not begun: whoever waits for it in JAX has a timeout there
            if text is not None and text.startswith(FAILED):
                _exit(f"process {process} {text}")
            if text == ENDED:
                del self.heard[process]
            elif last is None or (text is not None and text != last[0]):
                self.heard[process] = (str(text), now)
            elif now - last[1] > self.patience:
                _exit(f"process {process} is gone: it has given no sign for {now - last[1]:.0f} s")

    def failed(self, kind: Any, error: Any, traceback: Any) -> None:
        """An exception ends this process."""
        self._hook(kind, error, traceback)
        self._end(f"{FAILED} with {kind.__name__}: {str(error)[:200]}")

    def end(self) -> None:
        """This process ends as it should."""
        self._end(ENDED)

    def _end(self, how: str) -> None:
        if not self.is_over:
            self.is_over = True
            try:
                self._say(how)
            except Exception:
                return  # whom could it be told

    def _say(self, text: str) -> None:
        self.client.key_value_set(f"jaxkv/beats/{self.process}", text, allow_overwrite=True)
