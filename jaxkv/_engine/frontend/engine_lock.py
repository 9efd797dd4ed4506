"""An engine is one thread's at a time."""

import gc
import threading
import time
import weakref

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
