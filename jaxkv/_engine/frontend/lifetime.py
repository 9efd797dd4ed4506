"""How long an engine holds memory of its devices: until it is closed, or nobody names it any more."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, Self

from jaxkv._engine.frontend.data_parallel import Shards
from jaxkv._engine.frontend.engine_lock import Turn
from jaxkv._engine.requests.request import Request
from jaxkv._engine.runner.engine_core import Loop


class Closable:
    """An engine's `close`, and who may use what it holds until then.

    Nothing that outlives an engine names it, its requests among it: so what it holds is free when its last name is
    gone, without the garbage collector.
    """

    _loop: Loop | Shards
    _loops: list[Loop]
    _turn: Turn

    def close(self) -> None:
        """Give back the memory of the cache, and of all else that the engine holds on devices and the host, at once.

        Requests that are not done are cancelled; tokens that came stay with their requests. Later calls but `close` are
        refused. May be called from any thread: a step that is under way there ends first. What `engine.cache` gave is
        deleted, too; the model is not. `with Engine(...) as engine:` closes it at the end.

        >>> import jaxkv
        >>> with jaxkv.Engine(jaxkv.models.small(), max_seqs=2, max_seq_len=64) as engine:
        ...     request = engine.submit(list(b"import "), max_new_tokens=4)
        ...     pairs = list(engine.run())
        >>> len(request.tokens), request.ended, engine.is_idle
        (4, 'length', True)
        """
        if self._turn.close():
            self._release()

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._turn.is_closed

    def __enter__(self) -> Self:
        self._turn.refuse_closed()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "An Engine and its requests cannot be copied or pickled: save(path) writes them, and load(path) of another "
            "engine goes on with them."
        )

    def _release(self) -> None:
        """Give everything back; a second call ends what a first one was cut off from."""
        self._loop.close()

    def _withdraw(self, requests: Iterable[Request]) -> None:
        self._loop.cancel(requests)
        if self._loop.is_at_work:  # it will be seen to there
            return
        try:
            with self._at_work(is_brief=True):
                self._loop.tidy()
        except Exception:  # the next step meets it again; what may be on its way now must not be replaced by it
            return

    @contextlib.contextmanager
    def _at_work(self, *, is_brief: bool = False) -> Iterator[None]:
        """Take the turn, and use what the engine holds."""
        with self._in_turn(is_brief=is_brief), self._compute():
            yield

    @contextlib.contextmanager
    def _in_turn(self, *, is_brief: bool = False) -> Iterator[None]:
        """Let no other thread work. Of a generator, whose turn goes on while others could close the engine."""
        turn = self._turn.take(is_brief=is_brief)
        turn.calls += 1
        try:
            yield
        finally:
            turn.calls -= 1
            if not turn.calls:
                self._turn.give()
            del turn

    @contextlib.contextmanager
    def _compute(self) -> Iterator[None]:
        """Use what the engine holds, within a turn. If it was closed from in here, that is done at the end."""
        try:
            with self._turn.compute():
                yield
        finally:
            if self._turn.is_closed and self._turn.close():
                self._release()
