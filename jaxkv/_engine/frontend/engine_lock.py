"""An engine is one thread's at a time, until it is closed."""

import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Iterator

MANY_WAITS = 10_000


class Held:
    """A turn that a thread has taken. It is over when no one refers to this any more, or at `Turn.give`."""

    def __init__(self, thread: threading.Thread, is_brief: bool):
        self.thread, self.is_brief = thread, is_brief
        self.calls = 0  # that share it: a thread's generators need not end in the order in which they began


class Turn:
    """Who is at work. A call that is cut off takes its turn with it, so none can be left behind."""

    def __init__(self) -> None:
        self._holder: dict[str, weakref.ref[Held]] = {}
        self._stale = threading.Lock()
        self.is_closed = False
        self._computing: weakref.ref[Held] | None = None  # within a turn, who uses what the engine holds

    def take(self, *, is_brief: bool = False) -> Held:
        """Begin to work: keep what is returned until the end. A thread that is at work already gets what it has.

        Args:
          is_brief: whoever else comes meanwhile waits. For what may be called from any thread, so that the one that
            works is not refused because of it.

        Raises:
          RuntimeError: another thread is at work.
        """
        waits, has_looked = 0, False
        while True:
            mine = Held(threading.current_thread(), is_brief)
            holder = self._holder.setdefault("turn", weakref.ref(mine))  # one operation: only one thread succeeds
            held = holder()
            if held is not None and held.thread is mine.thread:
                return held
            if held is not None and held.is_brief and held.thread.is_alive():
                del held  # the turn is over when no one refers to it
                time.sleep(1e-4)
                waits += 1
                if waits % MANY_WAITS == 0:
                    gc.collect()
                continue
            if held is not None and held.thread.is_alive():
                if has_looked:
                    raise RuntimeError(
                        f"This engine is at work in the thread {held.thread.name!r}, and is one thread's at a time: "
                        "let its stream or run end or close it first. submit and cancel can be called from any thread."
                    )
                # What cut a call off and the call's own frame may refer to each other, and be gone but for Python to
                # find out.
                del held
                gc.collect()
                has_looked = True
                continue
            with self._stale:
                if self._holder.get("turn") is holder:
                    del self._holder["turn"]

    def give(self) -> None:
        """End it."""
        self._holder.pop("turn", None)

    # A generator keeps its turn while its caller does something else; what is held is in use only now and then.

    def refuse_closed(self) -> None:
        """Raise RuntimeError if the engine is closed."""
        if self.is_closed:
            raise RuntimeError(
                "This engine is closed and has given its memory back: make another Engine, which can load what this "
                "one saved before."
            )

    @contextlib.contextmanager
    def compute(self) -> Iterator[None]:
        """Use what the engine holds: nobody gives it back meanwhile. Raises RuntimeError if it is closed."""
        outer = self._computing() if self._computing is not None else None
        if outer is not None and outer.thread is threading.current_thread():
            yield
            return
        mine = Held(threading.current_thread(), True)
        self._computing = weakref.ref(mine)
        try:
            self.refuse_closed()  # asked after the line above: whoever closes it does the two the other way round
            yield
        finally:
            self._computing = None
            del mine  # as a turn it is over when no one refers to it: a call that is cut off leaves none behind

    def close(self) -> bool:
        """Let no one begin to compute any more, and wait for who does. False: it is this thread, which must go on
        first."""
        self.is_closed = True
        while True:
            computing = self._computing() if self._computing is not None else None
            if computing is None or not computing.thread.is_alive():
                return True
            if computing.thread is threading.current_thread():
                return False
            del computing
            time.sleep(1e-4)
