"""Messages between two engines that share no program: lines of JSON over TCP."""

import contextlib
import json
import queue
import socket
import threading
from typing import Any

from jaxkv._core.config.validation import show

PATIENCE = 10  # seconds without a sign until the other side counts as lost
BEAT = 1  # seconds between signs
MOST = 2**26  # bytes of a line


class JsonConnection:
    """A connection by which both sides send messages at any time.

    A thread sends them, so `send` waits for nobody. It gives a sign of life, an empty line, when there is nothing else.
    """

    def __init__(self, connected: socket.socket):
        self._socket, self._rest = connected, bytearray()
        self._socket.settimeout(PATIENCE)
        self._messages: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self.is_closed = False
        threading.Thread(target=self._send_all, name="jaxkv connection", daemon=True).start()

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message, unless the other side is gone: `receive` raises then."""
        self._messages.put(message)

    def receive(self) -> dict[str, Any]:
        """Waits for the next message. Raises ConnectionError if the other side is gone, or sends anything else."""
        searched = 0
        while True:
            end = self._rest.find(b"\n", searched)
            if end < 0:
                searched = len(self._rest)
                self._rest += self._read()
                continue
            line, searched = bytes(self._rest[:end]), 0
            del self._rest[: end + 1]
            if line:
                return _parse(line)

    @property
    def local_host(self) -> str:
        """The number of this host by which the other side is reached."""
        return str(self._socket.getsockname()[0])

    def _read(self) -> bytes:
        if len(self._rest) > MOST:
            raise ConnectionError("The other side sends a line without an end.")
        try:
            text = self._socket.recv(2**16)
        except OSError as error:
            raise ConnectionError(f"The other side has given no sign for {PATIENCE} s, or is gone.") from error
        if not text:
            raise ConnectionError("The other side has closed the connection.")
        return text

    def _send_all(self) -> None:
        message: dict[str, Any] | None = {}
        while message is not None:
            text = json.dumps(message, separators=(",", ":")) if message else ""
            try:
                self._socket.sendall(text.encode() + b"\n")
            except OSError:
                break
            try:
                message = self._messages.get(timeout=BEAT)
            except queue.Empty:
                message = {}
        self.close()

    def close(self) -> None:
        """Ends the connection."""
        self.is_closed = True
        self._messages.put(None)
        with contextlib.suppress(OSError):  # so that a thread in `recv` wakes, too
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def read_address(name: str, address: Any) -> tuple[str, int]:
    """Returns host and port of an address `host:port`. Raises ValueError."""
    host, found, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    if not (host and found and port.isdecimal() and int(port) < 2**16):
        raise ValueError(f"{name} must be an address such as '10.0.0.2:8476', not {show(address)}.")
    return host.strip("[]"), int(port)


def _parse(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except ValueError:
        message = None
    if not isinstance(message, dict):
        raise ConnectionError(f"The other side sends no messages of an engine: {line[:40]!r}.")
    return message
