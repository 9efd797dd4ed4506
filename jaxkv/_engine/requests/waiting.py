"""Handing out requests' tokens, and waiting for them in any thread or event loop.

A waiter registers a listener with the request, and looks again whenever it is called: so nothing is lost between a look
and the wait. While nobody runs the engine, whoever waits takes its steps.
"""

import asyncio
import contextlib
import copy
import functools
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any

from jaxkv._core.config.validation import real
from jaxkv._core.state.errors import OutOfBlocks

# Without `serve` another thread may stop to take steps at any time: this often, in seconds, a waiter tries to.
PATIENCE = 0.05


@contextlib.contextmanager
def listening(listeners: Iterable[dict[Callable[[], Any], None]], listener: Callable[[], Any]) -> Iterator[None]:
    """Registers a listener for a while."""
    listeners = list(listeners)
    for each in listeners:
        each[listener] = None
    try:
        yield
    finally:
        for each in listeners:
            each.pop(listener, None)


def call_all(listeners: dict[Callable[[], Any], None]) -> None:
    """Calls all listeners. One whose event loop has ended is forgotten."""
    for listener in list(listeners):
        try:
            listener()
        except RuntimeError:
            listeners.pop(listener, None)


def copy_error(error: Exception) -> Exception:
    """Returns an error with the same words and cause, without frames: those would keep whatever they name."""
    try:
        copied = copy.copy(error)
    except Exception:  # its class wants other arguments than it keeps
        copied = type(error).__new__(type(error), *error.args)
        copied.__dict__.update(error.__dict__)
    copied.__traceback__ = None
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    copied.__cause__ = copy_error(cause) if isinstance(cause, Exception) else None
    return copied


def wait_until(
    is_true: Callable[[], bool],
    listeners: Iterable[dict[Callable[[], Any], None]],
    engine: Callable[[], Any],
    timeout: float | None,
    what: str,
) -> None:
    """Waits until something holds, and takes the engine's steps while nobody else does.

    Raises:
      ValueError: a timeout that is no number. TimeoutError: it does not hold after `timeout` seconds.
      RuntimeError: the engine is gone.
    """
    if timeout is not None:
        timeout = real("timeout", timeout, most=threading.TIMEOUT_MAX)
    end = None if timeout is None else time.monotonic() + timeout
    news: queue.SimpleQueue[None] = queue.SimpleQueue()  # its put() takes no lock that an interrupt could leave closed
    with listening(listeners, functools.partial(news.put, None)):
        while not is_true():
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError(f"{what} after {timeout:g} s.")
            if (owner := engine()) is None:
                raise RuntimeError(f"{what}, and its engine is gone: keep a reference to the Engine while it works.")
            if owner.is_served:
                wait = left
            elif owner.lend_step():
                continue
            else:
                wait = PATIENCE if left is None else min(left, PATIENCE)
            del owner
            with contextlib.suppress(queue.Empty):
                news.get(timeout=wait)


def refuse_restarted(request: Any, times: int) -> None:
    """Raises RuntimeError if a request has been begun anew since it had been `times` times."""
    if request.num_restarts > times:
        raise RuntimeError(
            f"Request {request.number} has begun anew with other weights (Engine.update), and its tokens come again: "
            "iterate over it once more."
        )


def iterate(request: Any) -> Iterator[int]:
    """Yields a request's tokens as they come. Raises the error that it ends with."""
    first, given, times = request.samples[0], 0, request.samples[0].num_restarts

    def has_news() -> bool:
        return first.done or given < first.num_visible or times < first.num_restarts

    while True:
        refuse_restarted(first, times)
        while given < first.num_visible:
            given += 1
            yield first.output[given - 1]
            refuse_restarted(first, times)
        if first.done and given >= first.num_visible:
            break
        wait_until(
            has_news,
            [first.listeners],
            first.engine,
            None,
            f"Request {request.number} has not ended",
        )
    first.raise_error()


async def iterate_async(request: Any) -> AsyncIterator[int]:
    """Yields a request's tokens as they come, in an event loop, which goes on meanwhile."""
    loop, changed = asyncio.get_running_loop(), asyncio.Event()
    first, given, times = request.samples[0], 0, request.samples[0].num_restarts
    with listening([first.listeners], functools.partial(loop.call_soon_threadsafe, changed.set)):
        while True:
            changed.clear()
            refuse_restarted(first, times)
            while given < first.num_visible:
                given += 1
                yield first.output[given - 1]
                refuse_restarted(first, times)
            if first.done and given >= first.num_visible:
                break
            if (owner := first.engine()) is None:
                raise RuntimeError(f"Request {request.number} has not ended, and its engine is gone.")
            if owner.is_served:
                del owner
                await changed.wait()
            elif not await asyncio.to_thread(owner.lend_step):
                del owner
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), PATIENCE)
    first.raise_error()


def collect_tokens(news: dict[Any, None]) -> Iterator[tuple[Any, int | None]]:
    """Yields the tokens of requests not handed out yet, and None after those of a request that has ended."""
    for request in list(news):
        while request.has_news:
            while request.given < request.num_visible:
                request.given += 1
                yield request, request.output[request.given - 1]
            if request.done and not request.is_end_told:
                request.is_end_told = True
                yield request, None
            news.pop(request, None)  # another thread may cancel it now: so it is asked again
        news.pop(request, None)


def raise_refusal(news: Iterable[Any]) -> None:
    """Raises OutOfBlocks once for each request that has no room."""
    for request in news:
        if request.refusal is not None and not request.is_refusal_raised:
            request.is_refusal_raised = True
            error = OutOfBlocks(request.refusal)
            error.request = request  # the request that failed
            try:
                raise error
            finally:
                del error  # its traceback names this frame: a circle, which would keep the engine
