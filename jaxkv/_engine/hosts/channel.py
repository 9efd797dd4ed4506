"""Messages from the first process of an engine to its other processes."""

import atexit
import json
import queue
import secrets
import threading
import time
from typing import Any

import jax

from jaxkv._core.config.mesh_shape import model_mesh
from jaxkv._core.state.multihost import PATIENCE, coordinator_store, exchange, list_processes

CHUNK = 64  # pieces that are deleted together, once every process has read them; messages that may wait in a queue
PIECE = 2**20  # characters of a piece of a message
BUSY = 0.001  # seconds until a queue that is full is looked at again
LOOK = 1  # seconds of a wait in the store: in between, a thread sees whether the channel is closed
_encode = json.JSONEncoder(separators=(",", ":")).encode
CLOSE = _encode({"call": "close"})
CLOSED = (
    "This engine is closed and has given its memory back: make another Engine, which can load what this one saved "
    "before."
)


def list_engine_processes(model: Any) -> list[int]:
    """Returns the processes whose devices a model lies on, where these are several; else nothing."""
    mesh = model_mesh(model)
    found = [] if mesh is None else list_processes(mesh)
    return found if len(found) > 1 else []


def refuse_options(**options: Any) -> None:
    """Raises ValueError for options that an engine over several processes does not take, unless they are None."""
    for name, value in options.items():
        if value is not None:
            raise ValueError(
                f"{name}= is for an Engine in one process, and this one's model lies on devices of several: leave it "
                "out, or load the model on a mesh of jax.local_devices()."
            )


class Channel:
    """Messages in order, each read by every process, through the key-value store of JAX's coordinator.

    The store serves while devices are at work, so a message neither waits for a step nor delays it.

    Args:
      processes: all that take part. All of them must make this channel at the same time; the first one sends.

    Raises:
      RuntimeError: a process did not come, or this one knows no others.
    """

    def __init__(self, processes: list[int]):
        self.processes, self.me = processes, jax.process_index()
        self._name = f"jaxkv/engine/{exchange('Engine', secrets.token_hex(8), processes)[0]}"
        self._store = coordinator_store()
        self._number = 0  # of the next piece
        self.num_messages = self.num_bytes = 0  # sent so far
        self.is_closed = False
        self._heard: queue.SimpleQueue[str | Exception] = queue.SimpleQueue()  # received, and not read yet
        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._error: Exception | None = None  # why a message could not be sent
        run, done = (self._send_all, "sent") if self.is_first else (self._receive_all, "received")
        self._thread = threading.Thread(target=run, name=f"jaxkv messages {done}", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # at the end of the program, before JAX has the processes wait for each other

    @property
    def is_first(self) -> bool:
        """Tells whether this process sends."""
        return self.me == self.processes[0]

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message, in a thread of its own. Does not wait for those who read it, unless they are far behind.

        Raises RuntimeError or TimeoutError if an earlier message could not be sent, RuntimeError if this is closed.
        """
        text = _encode(message)
        while self._queue.qsize() > CHUNK and self._error is None and not self.is_closed:
            time.sleep(BUSY)
        if self._error is not None:
            raise self._error
        self.refuse_closed()
        self._queue.put(text)
        self.num_messages, self.num_bytes = self.num_messages + 1, self.num_bytes + len(text)

    def refuse_closed(self) -> None:
        """Raises RuntimeError if the channel is closed."""
        if self.is_closed:
            raise RuntimeError(CLOSED)

    def _send_all(self) -> None:
        """Sends what is in the queue, until None is. Messages that came while others were sent go together: to put a
        value costs the host as much as a small step."""
        is_open = True
        while is_open and self._error is None:
            texts = [self._queue.get()]
            while texts[-1] is not None and not self._queue.empty():
                texts.append(self._queue.get())
            is_open = texts[-1] is not None
            try:
                self._put("\n".join(text for text in texts if text is not None))
            except Exception as error:  # whoever sends next hears of it
                self._error = error

    def _put(self, text: str) -> None:
        """Puts messages into the store."""
        pieces = [text[i : i + PIECE] for i in range(0, len(text), PIECE)]
        for piece in pieces:
            self._forget_read()
            self._store.key_value_set(self._key(), ("." if piece is pieces[-1] else "+") + piece)
            self._number += 1

    def receive(self, timeout: float | None = None) -> dict[str, Any]:
        """Waits for the next message. Once the channel is closed, here or by the last message, that one comes again.

        Raises:
          TimeoutError: none came for `timeout` seconds. RuntimeError: the coordinator is gone.
        """
        try:
            heard = self._heard.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError(f"A process of this engine gave no sign for {timeout:g} s.") from None
        if heard == CLOSE or isinstance(heard, Exception):
            self._heard.put(heard)  # for the next call
        if isinstance(heard, Exception):
            raise heard
        return json.loads(heard)

    def _receive_all(self) -> None:
        """Receives messages while steps are taken: to get a value takes as long as a small step."""
        text = ""
        try:
            while not self.is_closed:
                if self._heard.qsize() > CHUNK:
                    time.sleep(BUSY)
                    continue
                try:
                    piece = self._wait(self._key(), LOOK)
                except TimeoutError:
                    continue
                self._number += 1
                if self._number % CHUNK == 0:
                    self._store.key_value_set(self._receipt(self._number // CHUNK, self.me), ".")
                text += piece[1:]
                if piece[0] == ".":
                    for message in text.split("\n"):
                        self._heard.put(message)
                    if text.endswith(CLOSE):
                        self.is_closed = True
                    text = ""
            self._heard.put(CLOSE)  # else `receive` would wait for ever once this process has closed it
        except Exception as error:
            self._heard.put(error)

    def close(self) -> None:
        """Sends the last message, from the first process, and waits for the thread: for `LOOK` s where it receives."""
        is_last, self.is_closed = self.is_first and not self.is_closed, True
        atexit.unregister(self.close)
        if is_last:
            self._queue.put(CLOSE)
            self._queue.put(None)
        if threading.current_thread() is not self._thread:  # in which an engine may be found to be gone
            self._thread.join()

    def _key(self) -> str:
        return f"{self._name}/{self._number // CHUNK}/{self._number}"

    def _receipt(self, chunk: int, process: int) -> str:
        return f"{self._name}/read/{chunk}/{process}"

    def _forget_read(self) -> None:
        """Deletes the chunk before the last, once every process has read it."""
        chunk, place = divmod(self._number, CHUNK)
        if place or chunk < 2:
            return
        for process in self.processes[1:]:
            self._wait(self._receipt(chunk - 1, process), PATIENCE)
        self._store.key_value_delete(f"{self._name}/{chunk - 2}")
        self._store.key_value_delete(f"{self._name}/read/{chunk - 1}")

    def _wait(self, key: str, timeout: float) -> str:
        waited = 0
        while True:
            try:
                return self._store.blocking_key_value_get(key, LOOK * 1000)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise RuntimeError(
                        f"Process {self.processes[0]}, from which this engine is used, cannot be reached any more: "
                        "start all processes again; what was saved last can be loaded."
                    ) from error
            waited += LOOK
            if waited >= timeout:
                raise TimeoutError(f"A process of this engine gave no sign for {waited} s.")
