"""An engine is one thread's at a time."""

import threading


class Turn:
    """Who is at work. Taking it is one operation of a dict, so no lock can be left closed by an interrupt."""

    def __init__(self) -> None:
        self._holder: dict[str, threading.Thread] = {}

    def take(self) -> bool:
        """Begin to work; whether this thread was not at work already, so that it must `give` the turn back.

        Raises:
          RuntimeError: another thread is at work.
        """
        me = threading.current_thread()
        was_mine = self._holder.get("turn") is me
        holder = self._holder.setdefault("turn", me)
        if holder is not me and not holder.is_alive():
            self._holder.pop("turn", None)
            return self.take()
        if holder is not me:
            raise RuntimeError(
                f"This engine is at work in the thread {holder.name!r}, and is one thread's at a time: let its stream "
                "or run end or close it first. submit and cancel can be called from any thread."
            )
        return not was_mine

    def give(self) -> None:
        """End it."""
        self._holder.pop("turn", None)
