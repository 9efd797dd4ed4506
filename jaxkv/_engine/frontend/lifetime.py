"""The lifetime of an engine's device memory: until it is closed, or nothing refers to it any more."""

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

from jaxkv._core.config.cache_config import CacheConfig
from jaxkv._core.config.validation import flag
from jaxkv._engine.frontend.data_parallel import DataParallelCores
from jaxkv._engine.frontend.engine_lock import EngineLock
from jaxkv._engine.frontend.request_reader import RequestReader
from jaxkv._engine.hosts.lockstep import LockstepCores
from jaxkv._engine.requests.request import Request
from jaxkv._engine.runner.engine_core import EngineCore


class Closable:
    """An engine's `close`, and the locks around its memory until then.

    Nothing that outlives an engine refers to it, not even its requests. So its memory is freed with its last reference,
    without the garbage collector.
    """

    # What `Engine` makes, and other classes that it inherits have.
    config: CacheConfig
    _core: EngineCore | DataParallelCores | LockstepCores
    _cores: list[EngineCore]  # its parts; one if rows are not divided
    _turn: EngineLock
    _reader: RequestReader
    _wake: Callable[[], None]
    _wake_all: Callable[[], None]

    @property
    def is_idle(self) -> bool: ...  # type: ignore[empty-body]
    @property
    def is_served(self) -> bool: ...  # type: ignore[empty-body]

    def close(self) -> None:
        """Frees at once the memory of the cache, and all else that the engine holds on devices and the host.

        Requests that are not done are cancelled; requests keep their tokens. Later calls except `close` are refused.
        May be called from any thread: a step running there ends first. Caches from `engine.cache` are deleted too; the
        model is not. `with Engine(...) as engine:` closes it at the end.

        >>> import jaxkv
        >>> with jaxkv.Engine(jaxkv.models.small(), max_seqs=2, max_seq_len=64) as engine:
        ...     request = engine.submit(list(b"import "), max_new_tokens=4)
        ...     pairs = list(engine.run())
        >>> len(request.tokens), request.ended, engine.is_idle
        (4, 'length', True)
        """
        if self._turn.close():
            self._release()

    def follow(self, *, until_release: bool = False) -> bool:
        """Takes the steps of an engine over several processes, until it is closed in the first of them.

        Every process makes the engine, of a model on a mesh of all their devices and with the same arguments. Requests
        are submitted to and streamed from the first process alone; the others are in `follow` meanwhile.

        Args:
          until_release: end as soon as the first process has called `release`, too: so that all can train, and call
            `update` with what they have trained, before they follow again.

        Returns:
          True after a `release`; False if the engine is closed.

        Raises:
          RuntimeError: this is the first process, or the engine lies on devices of this one alone; the first one is
            gone; a step has failed here and not there; the first one has called `update`, and before it no `release`.

        >>> import jaxkv
        >>> engine = jaxkv.Engine(jaxkv.models.small(), max_seqs=2, max_seq_len=64)
        >>> engine.follow()
        Traceback (most recent call last):
        RuntimeError: follow is for a model on a mesh of several processes, but this one is all here: submit and step.
        """
        return self._follow(until_release=flag("until_release", until_release))

    def _follow_to_end(self) -> list[Request]:
        """Does `follow`, and returns the samples of all requests of the first process, as they ended."""
        self._follow(keep=True)
        return self._core.made or []  # type: ignore[union-attr]

    def _follow(self, *, keep: bool = False, until_release: bool = False) -> bool:
        if not isinstance(self._core, LockstepCores):
            raise RuntimeError(
                "follow is for a model on a mesh of several processes, but this one is all here: submit and step."
            )
        if self.is_closed:
            return False
        if self._core.follow(keep=keep, until_release=until_release):
            return True
        self.close()
        return False

    @property
    def is_following(self) -> bool:
        """Tells whether the engine is used from another process, and this one is to be in `follow`."""
        return isinstance(self._core, LockstepCores) and not self._core.channel.is_first

    @property
    def is_closed(self) -> bool:
        """Tells whether `close` was called."""
        return self._turn.is_closed

    def __enter__(self) -> Self:
        if not self.is_following:
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
        """Frees everything; a second call completes an interrupted first one."""
        self._core.close()
        self._wake()
        self._wake_all()

    def _withdraw(self, requests: Iterable[Request], is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if is_finalizing():  # a stream that was left open: Python ends, and has taken our modules' names away
            return
        self._core.cancel(requests)
        self._wake()
        if self._core.is_at_work or self.is_served:  # that call, or the thread that serves, will release it
            return
        try:
            with self._exclusive(is_brief=True):
                self._core.tidy()
        except Exception:  # the next step raises it again; it must not replace an error that may be raised now
            return

    def _refuse_lockstep(self, method: str) -> None:
        """Raises ValueError if the engine is over several processes, which do not make this call together."""
        if isinstance(self._core, LockstepCores):
            raise ValueError(
                f"{method} is for an engine in one process, and this one's model lies on devices of several: make an "
                "Engine of a model on jax.local_devices() for it."
            )

    @contextlib.contextmanager
    def _exclusive(self, *, is_brief: bool = False) -> Iterator[None]:
        """Takes the lock and uses the engine's memory."""
        with self._turn.hold(is_brief=is_brief), self._compute():
            yield

    @contextlib.contextmanager
    def _compute(self) -> Iterator[None]:
        """Uses the engine's memory, within a hold. A `close` from within takes effect at the end."""
        try:
            with self._turn.compute():
                yield
        finally:
            if self._turn.is_closed and self._turn.close():
                self._release()
