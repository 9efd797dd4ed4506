"""The lock of an engine: one thread at a time uses it, until it is closed."""

import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator

from jaxkv._engine.hosts.channel import CLOSED

MANY_WAITS = 10_000


class EngineBusy(RuntimeError):
    """Raised if another thread is using the engine."""


class LockHold:
    """A thread's hold on the lock. It ends with `EngineLock.hold`, or when nothing refers to it any more."""

    def __init__(self, thread: threading.Thread, is_brief: bool):
        self.thread, self.is_brief = thread, is_brief
        self.calls = 0  # calls that share it: a thread's generators may end in any order


class EngineLock:
    """The lock. An interrupted call drops its hold with its frame, so the lock is never left taken."""

    def __init__(self) -> None:
        self._holder: dict[str, weakref.ref[LockHold]] = {}
        self._stale = threading.Lock()
        self.is_closed = False
        self.refuse: Callable[[], None] | None = None  # raises for another reason
        self._waiting: weakref.WeakSet[LockHold] = weakref.WeakSet()  # who waits
        self._computing: weakref.ref[LockHold] | None = None  # within a hold, the call that uses the engine's memory

    def take(self, *, is_brief: bool = False) -> LockHold:
        """Takes the lock until the returned hold ends. A thread that has the lock gets its own hold again.

        Args:
          is_brief: other threads wait meanwhile. For calls that any thread may make, so that the thread that runs the
            engine is not refused because of them.

        Raises:
          RuntimeError: another thread has the lock.
        """
        mine = LockHold(threading.current_thread(), is_brief)
        try:
            return self._take(mine)
        finally:  # not with its frame: whoever keeps the error that ended the wait would be waited for
            self._waiting.discard(mine)

    def _take(self, mine: LockHold) -> LockHold:
        waits, has_looked = 0, False
        while True:
            holder = self._holder.setdefault("turn", weakref.ref(mine))  # atomic: only one thread succeeds
            current = holder()
            if current is not None and current.thread is mine.thread:
                return current
            if current is not None and current.is_brief and current.thread.is_alive():
                del current  # the hold ends when nothing refers to it
                self._waiting.add(mine)
                time.sleep(1e-4)
                waits += 1
                if waits % MANY_WAITS == 0:
                    gc.collect()
                continue
            if current is not None and current.thread.is_alive():
                if has_looked:
                    raise EngineBusy(
                        f"This engine is at work in the thread {current.thread.name!r}, and is one thread's at a time: "
                        "let its stream or run end or close it first. submit and cancel can be called from any thread."
                    )
                # The interrupt and the frame of the call that it ended may refer to each other: then only the garbage
                # collector frees them.
                del current
                gc.collect()
                has_looked = True
                continue
            with self._stale:
                if self._holder.get("turn") is holder:
                    del self._holder["turn"]

    @contextlib.contextmanager
    def hold(self, *, is_brief: bool = False) -> Iterator[None]:
        """Holds the lock, as `take` does, until the context ends. A thread's contexts may end in any order."""
        mine = self.take(is_brief=is_brief)
        mine.calls += 1
        try:
            yield
        finally:
            mine.calls -= 1
            if not mine.calls:
                self._holder.pop("turn", None)

    def let_others(self) -> None:
        """Waits until those who waited for the lock have had it. For a thread that takes it again and again."""
        while self._waiting:
            time.sleep(1e-4)

    # A generator keeps its hold while its caller does something else; it uses the memory only now and then.

    def refuse_closed(self) -> None:
        """Raises RuntimeError if the engine is closed, or is used from another process."""
        if self.is_closed:
            raise RuntimeError(CLOSED)
        if self.refuse is not None:
            self.refuse()

    @contextlib.contextmanager
    def compute(self) -> Iterator[None]:
        """Protects the engine's memory from `close` while in use. Raises RuntimeError if it is closed."""
        outer = self._computing() if self._computing is not None else None
        if outer is not None and outer.thread is threading.current_thread():
            yield
            return
        mine = LockHold(threading.current_thread(), True)
        self._computing = weakref.ref(mine)
        try:
            self.refuse_closed()  # checked after the line above: `close` does the two in the opposite order
            yield
        finally:
            self._computing = None

    def close(self) -> bool:
        """Refuses new computation and waits for the current one. Returns False if that is this thread's, which must
        end first."""
        self.is_closed = True
        while True:
            computing = self._computing() if self._computing is not None else None
            if computing is None or not computing.thread.is_alive():
                return True
            if computing.thread is threading.current_thread():
                return False
            del computing
            time.sleep(1e-4)
