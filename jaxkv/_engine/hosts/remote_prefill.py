"""Prompts that are computed in another process: what the engine that decodes has of it."""

import collections
import logging
import queue
import socket
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from jaxkv._core.config.cache_config import CacheConfig
from jaxkv._core.config.validation import show
from jaxkv._core.state.errors import CacheFileError
from jaxkv._engine.hosts.json_connection import PATIENCE, JsonConnection, read_address
from jaxkv._engine.hosts.prefill_server import VERSION, describe_layers
from jaxkv._engine.requests.entries import render_salt
from jaxkv._engine.requests.queue import Queue
from jaxkv._engine.requests.scheduler import Sequence
from jaxkv._engine.runner.cache_manager import CacheManager
from jaxkv._engine.runner.model_runner import ModelRunner
from jaxkv._files.format import parse_saved
from jaxkv._files.load_rows import check_layers
from jaxkv._tiers.remote import Fetched, pull_rows, transfer_address
from jaxkv._tiers.saved_rows import plan_row

logger = logging.getLogger("jaxkv.engine")
LOOK = 0.05  # seconds of a wait for rows, within a step
AGAIN = 1  # seconds until a lost process is looked for again
COMING = 60  # seconds within which a row that was told of must have come


class RemotePrefill:
    """Has all tokens of a sequence but its last computed in another process, whose engine is in `serve_prefill`.

    Has the interface of `Prefill`. What another process computes is nowhere else, and nothing depends on it: when that
    process is lost, sequences that wait for it wait here again, and are computed here until it is back.

    Raises:
      ConnectionError: nobody serves prefill at that address. ValueError: no address, or another model there.
    """

    def __init__(self, address: str, config: CacheConfig, model: str | None):
        self._config, self._link = config, _Link(address, config, model)
        self.sent = self.tokens = 0  # rows that came; tokens computed there are counted there
        self._asked: dict[int, Sequence] = {}  # what is computed there, by the numbers in messages
        self._queued = Queue()  # what is to be: there are not more than two rows under way for each row there
        self._count = 0
        self._session: _Session | None = self._link.session
        self._declined: weakref.WeakSet[Sequence] = weakref.WeakSet()  # those that cannot be computed there
        weakref.finalize(self, self._link.close).atexit = False

    def list_cache_managers(self) -> list[CacheManager]:
        """Returns nothing: its cache is another engine's."""
        return []

    def list_runners(self) -> list[ModelRunner]:
        """Returns nothing: its model is another engine's."""
        return []

    def warm(self) -> list[Callable[[], Any]]:
        """Returns nothing to compile."""
        return []

    def has(self, sequence: Sequence) -> bool:
        """Tells whether a sequence is computed there, or is to be."""
        return sequence in self._asked.values() or sequence in self._queued

    def restart(self) -> None:
        """Forgets what was asked for."""
        for number in list(self._asked):
            self._forget(number)
        self._queued = Queue()

    release = restart

    def restore(self) -> None:
        """Does nothing: there is no memory of its own."""

    def rest(self) -> None:
        """Does nothing: there are no steps of its own."""

    def close(self) -> None:
        """Leaves the other process."""
        self._link.close()
        self._asked, self._queued = {}, Queue()

    def exchange(self, waiting: Queue, *, wait: bool) -> None:
        """Takes sequences with prompts to compute from a queue, and puts computed ones back.

        Args:
          wait: wait a little for the next one, if any is computed there and nothing else is to be done.
        """
        self._ask(waiting)
        if wait and not waiting and self._asked:
            self._link.changed.wait(LOOK)
        self._link.changed.clear()
        self._collect(waiting)
        if self._session is not self._link.session:
            self._take_back(waiting)

    def drop(self, sequence: Sequence) -> None:
        """Forgets a sequence in any state."""
        for other in (*self._asked.values(), *self._queued):
            if sequence in other.followers:
                other.followers.remove(sequence)
        if sequence in self._queued:
            self._queued.remove(sequence)
        for number in [number for number, own in self._asked.items() if own is sequence]:
            self._forget(number)

    def _forget(self, number: int) -> None:
        del self._asked[number]
        if self._session is not None:
            self._session.connection.send({"number": number})

    def _ask(self, waiting: Queue) -> None:
        """Sends prompts to the other process, as many as it is worth."""
        session = self._session
        if session is None or session is not self._link.session:
            return
        for sequence in [s for s in waiting if self._is_for(session, s)]:
            waiting.remove(sequence)
            self._queued.add(sequence)
        room = 2 * session.rows - len(self._asked) - sum(s.host is not None for s in waiting)
        for sequence in self._queued.first(max(room, 0)):
            self._queued.remove(sequence)
            self._asked[self._count] = sequence
            session.connection.send(
                {
                    "number": self._count,
                    "prompt": sequence.tokens[:-1],
                    "salt": render_salt(sequence.salt),
                    "adapter": sequence.adapter,
                    "priority": sequence.priority,
                    "keep": sequence.shareable >= len(sequence.tokens) - 1,
                }
            )
            self._count += 1

    def _is_for(self, session: "_Session", sequence: Sequence) -> bool:
        is_new = sequence.host is None and sequence.pending > 1 and sequence not in self._declined
        return is_new and len(sequence.tokens) <= session.longest

    def _collect(self, waiting: Queue) -> None:
        """Puts sequences back whose rows have come, or whose rows will not come."""
        while self._link.arrived:
            number, fetched = self._link.arrived.popleft()
            sequence = self._asked.pop(number, None)
            if sequence is not None:  # else it was cancelled meanwhile
                if isinstance(fetched, str):
                    logger.info(
                        "a prompt is computed here, for the process at %s said: %s", self._link.address, fetched
                    )
                sequence.host = None if isinstance(fetched, str) else self._read(fetched)
                self.sent += sequence.host is not None
                if sequence.host is None:
                    self._declined.add(sequence)
                waiting.add(sequence)

    def _read(self, fetched: Fetched) -> Callable[[], Any] | None:
        """Returns what reads a row for the cache here, or None if it cannot be."""
        (told, tensors), what = fetched, f"What {self._link.address} has sent"
        try:
            saved = parse_saved(what, told["fields"], tensors)
            check_layers(what, saved.config, self._config)
        except CacheFileError:
            logger.exception("a prompt is computed here")
            return None
        return plan_row(saved, tensors, 0, self._config)

    def _take_back(self, waiting: Queue) -> None:
        """Has everything wait here that was to be computed by a process that was lost."""
        for sequence in (*self._asked.values(), *self._queued):
            waiting.add(sequence)
        self._asked, self._queued = {}, Queue()
        self._session = self._link.session


class _Session:
    """A connection to a process, and what that has said of itself."""

    def __init__(self, connection: JsonConnection, hello: dict[str, Any]):
        self.connection, self.transfer = connection, hello["transfer"]
        self.longest, self.rows = hello["longest"], hello["rows"]


class _Link:
    """Keeps a session with the process at an address, and gets what it sends. Refers to no engine."""

    def __init__(self, address: str, config: CacheConfig, model: str | None):
        self.address, self._model, self._layers = address, model, describe_layers(config)
        # Numbers of messages, each with what has come for it: a row, or why none will.
        self.arrived: collections.deque[tuple[int, Fetched | str]] = collections.deque()
        self.changed = threading.Event()
        self.is_closed = False
        self.session: _Session | None = self._open()
        threading.Thread(target=self._keep, name="jaxkv prefill", daemon=True).start()

    def close(self) -> None:
        self.is_closed, session = True, self.session
        if session is not None:
            session.connection.close()

    def _open(self) -> _Session:
        """Connects. Raises ConnectionError, and ValueError if another model is there."""
        host, port = read_address("prefill", self.address)
        connection = None
        try:
            connection = JsonConnection(socket.create_connection((host, port), timeout=PATIENCE))
            transfer_address(connection.local_host)  # rows come from there, and not from this machine alone
            connection.send({"version": VERSION})
            hello = connection.receive()
        except OSError as error:
            if connection is not None:
                connection.close()
            raise ConnectionError(
                f"Nobody computes prompts at {self.address} ({error}): start serve_prefill of an Engine there first."
            ) from error
        except ValueError:  # where this process's own rows come and go
            if connection is not None:
                connection.close()
            raise
        if hello.get("version") != VERSION:
            wrong = f"another version of jaxkv, {show(hello.get('version'))}"
        elif not hello.keys() >= {"layers", "model", "transfer", "longest", "rows"}:
            wrong = "something that is no engine"
        elif hello["layers"] != self._layers:
            wrong = f"a model whose {_find_difference(hello['layers'], self._layers)}"
        elif hello["model"] != self._model:
            wrong = "a model of the same layers with other parameters"
        else:
            return _Session(connection, hello)
        connection.close()
        raise ValueError(
            f"prefill must be the same model in another process, but at {self.address} is {wrong}: load both from one "
            "folder, with the same cache_dtype."
        )

    def _keep(self) -> None:
        """Takes what comes, and connects again when the other process was lost, until it is closed."""
        while not self.is_closed:
            if self.session is not None:
                self._listen(self.session)
                self.session = None
                self.changed.set()
                if not self.is_closed:
                    logger.warning("the process at %s is lost: prompts are computed here", self.address)
            time.sleep(0 if self.is_closed else AGAIN)
            try:
                self.session = None if self.is_closed else self._open()
            except ConnectionError:
                continue
            except ValueError as error:  # another model, which may be replaced
                logger.error("%s", error)
        if self.session is not None:
            self.session.connection.close()

    def _listen(self, session: _Session) -> None:
        keys: queue.SimpleQueue[tuple[int, str] | None] = queue.SimpleQueue()
        # A thread of its own: a process that is stopped in the middle of a transfer would be waited for, for ever.
        threading.Thread(target=self._fetch, args=(session, keys), name="jaxkv fetch", daemon=True).start()
        try:
            while True:
                message = session.connection.receive()
                if "key" in message:
                    keys.put((message["number"], message["key"]))
                else:
                    self._note(message["number"], str(message["error"]))
        except (ConnectionError, KeyError) as error:
            logger.info("%s: %s", self.address, error)
        keys.put(None)
        session.connection.close()

    def _fetch(self, session: _Session, keys: "queue.SimpleQueue[tuple[int, str] | None]") -> None:
        while (asked := keys.get()) is not None:
            number, key = asked
            try:
                self._note(number, pull_rows(session.transfer, key, timeout=COMING))
            except Exception as error:  # the process is gone, as the connection will find
                logger.info("a row did not come: %s", error)
                session.connection.close()

    def _note(self, number: int, fetched: Fetched | str) -> None:
        self.arrived.append((number, fetched))
        self.changed.set()


def _find_difference(theirs: list[str], ours: list[str]) -> str:
    if len(theirs) != len(ours):
        return f"layers are {len(theirs)}, and here {len(ours)}"
    layer = next(i for i, pair in enumerate(zip(theirs, ours, strict=True)) if pair[0] != pair[1])
    pairs = [fact.removeprefix("[(").removesuffix(")]").split("), (") for fact in (theirs[layer], ours[layer])]
    first, second = (", ".join(f for f in own if f not in other) for own, other in (pairs, pairs[::-1]))
    return f"layer {layer} has {first or 'less'}, and here {second or 'less'}"
