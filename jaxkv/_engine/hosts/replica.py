"""Requests as every process of an engine computes them."""

from collections.abc import Callable
from typing import Any

from jaxkv._engine.requests.request import Request


class Replica(Request):
    """A request of an engine in several processes, equal in all of them: what it does follows from messages and tokens.

    In the first process it passes on what it gets to its `origin`, the request that was submitted there. That one may
    end earlier, by a stop string or its callback: the other processes hear of it with the next message.
    """

    number_here = -1  # by which messages name it
    _origin: Request | None = None

    def join(self, origin: Request, end: Callable[[Request], Any]) -> None:
        """Passes on everything to `origin` from now on; calls `end(origin)` if that ends before this does."""
        self._origin, self._end_origin = origin, end
        self.times.submitted, origin.scores = origin.times.submitted, self.scores

    @property
    def origin(self) -> Request:
        return self if self._origin is None else self._origin

    def begin(self) -> None:
        super().begin()
        if self._origin is not None:
            self._origin.begin()

    def receive(self, token: int, logprobs: dict[int, float] | None) -> None:
        super().receive(token, logprobs)
        if (origin := self._origin) is not None and origin.stopped is None:
            origin.receive(token, logprobs)
            if origin.stopped is not None and not self.done:
                self._end_origin(origin)

    def restart(self) -> None:
        super().restart()
        if self._origin is not None and not self._origin.done:
            self._origin.restart()

    def refuse(self, why: str) -> None:
        super().refuse(why)
        if self._origin is not None and not self._origin.done:
            self._origin.refuse(why)

    def withdraw(self, error: Exception | None = None) -> bool:
        """Records the cancellation, here and of the origin."""
        if self._origin is not None:
            self._origin.withdraw(error)
        return super().withdraw(error)
