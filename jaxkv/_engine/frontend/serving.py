"""Serving: one thread takes an engine's steps, any thread submits, waits and cancels."""

import atexit
import contextlib
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jaxkv._core.config.validation import integer
from jaxkv._core.state.errors import CacheError
from jaxkv._engine.frontend.engine_lock import EngineBusy
from jaxkv._engine.frontend.lifetime import Closable
from jaxkv._engine.frontend.metrics import Latencies
from jaxkv._engine.hosts.prefill_server import PrefillServer
from jaxkv._engine.programs.step_rows import is_of_hook
from jaxkv._engine.requests.request import Request
from jaxkv._engine.requests.waiting import call_all, collect_tokens, wait_until

logger = logging.getLogger("jaxkv.engine")
BUSY = 1e-3  # seconds until a step is tried again


class EngineFull(RuntimeError):
    """Raised by `Engine.submit` if `max_waiting` samples wait for a row, or the engine is drained: try again later.

    >>> import jaxkv
    >>> engine = jaxkv.Engine(jaxkv.models.small(), max_seqs=1, max_seq_len=64, max_waiting=1)
    >>> requests = [engine.submit(list(b"import "), max_new_tokens=2) for _ in range(2)]  # the first takes the row
    >>> try:
    ...     engine.submit(list(b"import "), max_new_tokens=2)
    ... except jaxkv.EngineFull as error:
    ...     print(error)
    1 requests wait for a row, and max_waiting is 1: submit it again later, or raise max_waiting.
    """


class Servable(Closable):
    """What an engine has for threads that wait: `serve`, `wait` and `drain`."""

    submit: Callable[..., Request]

    def _prepare_serving(self, max_waiting: int | None) -> None:
        self.max_waiting = None if max_waiting is None else integer("max_waiting", max_waiting, least=1)
        self._latencies = Latencies()
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()  # something to do, for the thread that serves
        self._idle_listeners: dict[Callable[[], Any], None] = {}
        self._server: threading.Thread | None = None
        self._is_draining = False

    # Who takes the steps.

    @property
    def is_served(self) -> bool:
        """Tells whether a thread of `serve` takes the steps."""
        return self._server is not None and self._server.is_alive()

    @contextlib.contextmanager
    def serve(self) -> Iterator[None]:
        """Takes steps in a thread of its own until the context ends: a context manager.

        The thread sleeps while there is nothing to do. Meanwhile any thread may submit, cancel, wait for requests and
        iterate over them; `step`, `run` and `stream` are refused. At the end of the context the step that is under way
        ends, and requests that have not ended stay: wait for them before with `wait` or `drain`. If a step raises, say
        because of a hook, the requests that were computed end with that error, and the others go on.

        >>> import jaxkv
        >>> engine = jaxkv.Engine(jaxkv.models.small(), max_seqs=2, max_seq_len=64)
        >>> with engine.serve():
        ...     requests = [engine.submit(list(b"import "), max_new_tokens=n) for n in (3, 4, 5)]
        ...     [len(list(request)) for request in requests]
        [3, 4, 5]

        Raises:
          RuntimeError: the engine is closed, or served already.
        """
        self._turn.refuse_closed()
        if self.is_served:
            raise RuntimeError("This engine is served already: one thread takes its steps, any number of them submits.")
        stop = threading.Event()
        end = _Ending(stop, self._wakes)
        self._server = threading.Thread(
            target=_serve, args=(weakref.ref(self), self._wakes, stop), name="jaxkv-engine", daemon=True
        )
        end.thread = self._server
        atexit.register(end)  # a daemon's thread would be cut off within JAX
        self._server.start()
        try:
            yield
        finally:
            if end():  # else Python ends, and has ended the thread before
                self._server = None
                self._wake_all()

    @contextlib.contextmanager
    def serve_prefill(self, address: str = "127.0.0.1:0") -> Iterator[str]:
        """Computes prompts for engines in other processes, made with `prefill=address`, until the context ends.

        Includes `serve`. Prompts are computed as requests here, with this engine's prefix cache; block sizes and meshes
        may differ from theirs. Rows are copied by JAX's transfer server, as by `jaxkv.send`. If this process is lost,
        those engines compute their prompts themselves until it is back at the address: nothing but time is lost. Who
        reaches the address can submit prompts: let it be in a network of your own.

        Args:
          address: `host:port`, by which the others reach this process; with port 0 a free one.

        Yields:
          the address.

        Raises:
          ValueError: no address; the model's devices are those of several processes; rows that evict, or that keep
            first tokens before a window. ImportError: this JAX has no transfer server. OSError: the port is taken.

        >>> import jaxkv
        >>> sizes = dict(max_seqs=2, max_seq_len=64)
        >>> with jaxkv.Engine(jaxkv.models.small(), **sizes).serve_prefill() as address:  # in another process
        ...     engine = jaxkv.Engine(jaxkv.models.small(), **sizes, prefill=address)
        ...     request = engine.submit(list(b"import "), max_new_tokens=4)
        ...     len(request.result()), engine.stats()["sent"]
        (4, 1)
        """
        self._refuse_lockstep("serve_prefill")
        layers, evicts = self.config.layers, any(core.cache_manager.eviction for core in self._cores)
        if evicts or any(layer.evict or layer.sink_tokens for layer in layers):
            raise ValueError(
                "serve_prefill sends rows that hold all tokens or a window of them, and rows of this engine evict, or "
                "keep sink tokens before a window: compute their prompts where they are decoded."
            )
        model = self._core.name_model()
        with contextlib.nullcontext() if self.is_served else self.serve():
            server = PrefillServer(self.submit, self._cores, self.config, model, address)
            try:
                yield server.address
            finally:
                server.close()

    def lend_step(self) -> bool:
        """Takes a step for a thread that waits, unless another thread has the engine. Tells whether it did."""
        if self.is_served:
            return False
        try:
            with self._exclusive(is_brief=True):
                if not self._core.is_busy:
                    return False
                self._advance()
        except EngineBusy:
            return False
        except Exception as error:
            if not is_of_hook(error):  # else the requests that it ends say so
                raise
        return True

    def wait(self, timeout: float | None = None) -> None:
        """Waits until no request is left. Raises TimeoutError after `timeout` seconds."""

        def is_idle() -> bool:
            return self.is_idle if self.is_served else self.is_closed or not self._core.is_busy

        wait_until(is_idle, [self._idle_listeners], weakref.ref(self), timeout, "Some requests have not ended")

    def drain(self, timeout: float | None = None) -> bool:
        """Refuses new requests until those that there are have ended. Returns False if some have not after `timeout`
        seconds: they go on, `close` would cancel them."""
        self._is_draining = True
        try:
            self.wait(timeout)
        except TimeoutError:
            return False
        finally:
            self._is_draining = False
        return True

    @property
    def num_waiting(self) -> int:
        """Samples that have no row yet, or none any more; not those that are cancelled."""
        first = [sequence for core in self._cores for sequence in list(core.scheduler.waiting)]
        taken_in = [sequence.request.origin for leader in first for sequence in (leader, *leader.followers)]
        return sum(not sample.done for sample in self._list_submitted() + taken_in)

    def _list_submitted(self) -> list[Request]:
        """Returns the samples that no step has taken in yet."""
        return [sample for request in list(self._core.submitted) for sample in request.samples]

    def _refuse_served(self, method: str) -> None:
        """Raises RuntimeError if a thread of `serve` takes the steps."""
        if self.is_served and threading.current_thread() is not self._server:
            raise RuntimeError(
                f"This engine is served by a thread of its own, which takes its steps, so {method} is refused: wait for"
                " requests by iterating over them or result(), or leave serve() first."
            )

    def _refuse_full(self, count: int) -> None:
        """Raises EngineFull if there is no place for `count` more samples to wait."""
        if self._is_draining:
            raise EngineFull("This engine takes no more requests, for it is drained: submit it elsewhere, or later.")
        if self.max_waiting is None:
            return
        free = self._count_free_rows()  # before those that wait: who gets a row in between counts as neither
        if (waiting := self.num_waiting - free) > 0 and waiting + count > self.max_waiting:
            raise EngineFull(
                f"{waiting} requests wait for a row, and max_waiting is {self.max_waiting}: submit it again later, or "
                "raise max_waiting."
            )

    def _count_free_rows(self) -> int:
        """Returns the rows that no sample has, nor will have once the prompt that it shares is computed."""
        leaders = [sequence for core in self._cores for sequence in list(core.scheduler.running)]
        taken = [sequence.request.origin for leader in leaders for sequence in (leader, *leader.followers)]
        return self.config.max_seqs - sum(not sample.done for sample in taken)

    # Within a step.

    def _advance(self) -> None:
        """Takes a step, and tells those who wait."""
        try:
            with jax.profiler.StepTraceAnnotation(
                "jaxkv.step", step_num=sum(core.runner.steps for core in self._cores)
            ):
                self._advance_cores()
        finally:
            self._deliver()

    def _advance_cores(self) -> None:
        """Sends a step, and reads the one before. An error of a hook ends the requests of its step."""
        try:
            self._core.advance()
        except Exception as error:
            if is_of_hook(error) and threading.current_thread() is not self._server:  # which ends them itself
                self._core.cancel(self._list_running(), error)
                with contextlib.suppress(CacheError):  # the next step says so
                    self._core.tidy()
            raise

    def _list_running(self) -> list[Request]:
        """Returns the samples that have a row."""
        return [sequence.request.origin for core in self._cores for sequence in core.scheduler.running]

    def _deliver(self) -> None:
        for request in list(self._reader.news):
            self._latencies.observe(request)
            try:
                request.deliver()
            except BaseException as error:
                failure = error if isinstance(error, Exception) else RuntimeError(f"on_token raised {error!r}")
                # No Ctrl-C comes in the thread of `serve`, and its end would be that of all other requests.
                if failure is not error and threading.current_thread() is not self._server:
                    raise
                logger.error("on_token of request %d", request.number, exc_info=error)
                self._core.cancel([request], failure)
                request.fail(failure)  # also if that was its last token
                call_all(request.listeners)

    def _forget_server(self) -> None:
        """Leaves the steps to those who wait, as without `serve`, for the thread that serves has ended by an error."""
        self._server = None
        self._wake_all()

    def _wake(self) -> None:
        """Tells the thread that serves that there is something to do."""
        self._wakes.put(None)

    def _wake_all(self) -> None:
        """Has all who wait look again: who takes the steps has changed, or what they wait for."""
        taken_in = [request.origin for core in self._cores for request in list(core.open)]
        for request in self._list_submitted() + taken_in:
            call_all(request.listeners)
        call_all(self._idle_listeners)

    def _end_failed(self, error: Exception) -> None:
        """Ends the requests in whose step an error was raised; the others go on, in an empty cache if it was lost."""
        logger.error("a step has failed", exc_info=error)
        is_lost = isinstance(error, CacheError)
        # If it is nobody's, it is everybody's: no step may fail for ever.
        failed = self._list_running() or [request.origin for core in self._cores for request in core.open]
        self._core.cancel([] if is_lost else failed, error)
        with self._exclusive(is_brief=True):
            try:
                self._core.tidy()
            except Exception:
                self._core.reset()
            self._deliver()


class _Ending:
    """Ends a thread that serves, once; tells whether it did."""

    thread: threading.Thread

    def __init__(self, stop: threading.Event, wakes: "queue.SimpleQueue[None]"):
        self.stop, self.wakes = stop, wakes

    def __call__(self) -> bool:
        if self.stop.is_set():
            return False
        atexit.unregister(self)
        self.stop.set()
        self.wakes.put(None)
        if self.thread is not threading.current_thread():
            self.thread.join()
        return True


def _serve(reference: "weakref.ref[Any]", wakes: "queue.SimpleQueue[None]", stop: threading.Event) -> None:
    """Takes steps until it is told to stop, or the engine is closed or gone. While it sleeps it does not keep it."""
    while not stop.is_set():
        engine = reference()
        if engine is None or engine.is_closed:
            return
        try:
            is_busy = _serve_step(engine)
        except EngineBusy:  # another thread saves it, say, and will be done
            del engine
            time.sleep(BUSY)
            continue
        except BaseException as error:  # a hook or a model asks the thread to end, or there is no going on
            logger.error("the thread that serves has ended: who waits takes the steps", exc_info=error)
            engine._forget_server()
            return
        if not is_busy:
            call_all(engine._idle_listeners)
            del engine
            wakes.get()
            with contextlib.suppress(queue.Empty):
                while True:
                    wakes.get_nowait()


def _serve_step(engine: Any) -> bool:
    """Takes a step if there is something to do, and tells whether there was. An error ends the requests of its step."""
    try:
        return _take_step(engine)
    except EngineBusy:
        raise
    except Exception as error:
        if not engine.is_closed:
            engine._end_failed(error)
        return True


def _take_step(engine: Any) -> bool:
    if not (engine._core.is_busy or engine._reader.news):
        return False
    engine._turn.let_others()
    with engine._exclusive(is_brief=True):
        can_step = engine._can_step
        if engine._core.is_busy and can_step:
            engine._advance()
        for _ in collect_tokens(engine._reader.news):  # nobody calls `step`: they are told by their requests
            pass
    if engine._core.is_busy and not can_step and not engine.is_released:
        logger.warning("the model's parameters were donated to another program: steps wait for engine.update")
    return can_step
