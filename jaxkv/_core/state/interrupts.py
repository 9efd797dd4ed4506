"""What keeps state whole when a call is cut off: by Ctrl-C, or by any exception between two instructions of Python.

Python may raise a KeyboardInterrupt anywhere. So state on the host is a transaction, computed first and assigned last.
Four things cannot be had so, and are here. A donated array is gone before its successor is assigned. State that is
derived from other state is changed in many instructions. A lock could stay closed. Other processes go on with a step.
"""

import collections
import contextlib
import operator
import signal
import threading
from collections.abc import Iterator
from typing import Any

MOST_NUMBERS = 2**62


class HandOver:
    """Calls programs to which arrays are donated. At any instruction the arrays are whole, or the results are here.

    `map` and `extend` run to their end before Python can raise anything, and so does a compiled program that takes and
    returns lists: JAX makes these without running any Python.
    """

    def __init__(self) -> None:
        self.results: collections.deque[Any] = collections.deque()  # of the calls so far, the last one behind

    def call(self, program: Any, *arguments: Any) -> Any:
        """Returns what a program returns, and keeps it in `results`."""
        self.results.extend(map(program, *([argument] for argument in arguments)))
        return self.results[-1]


class Soundness:
    """Whether derived state follows from what it is derived from: not after a change that was cut off.

    A change is made in `with soundness:`, or between `begin` and `end`. Whoever reads the state makes it anew first if
    `is_kept` is False.
    """

    def __init__(self, *, is_kept: bool = True) -> None:
        self.is_kept = is_kept

    def begin(self) -> None:
        """Says that a change begins."""
        self.is_kept = False

    def end(self) -> None:
        """Says that the change was made in full, or everything anew."""
        self.is_kept = True

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.end()


class Numbers:
    """Consecutive numbers, each given once, to any thread, without a lock.

    >>> numbers = Numbers(5)
    >>> numbers.take(), numbers.next, numbers.take()
    (5, 6, 6)
    """

    def __init__(self, first: int = 0) -> None:
        self._end = first + MOST_NUMBERS
        self._left = iter(range(first, self._end))

    def take(self) -> int:
        """Returns the next number, which nobody else gets."""
        return next(self._left)

    @property
    def next(self) -> int:
        """The number that `take` returns next, unless another thread takes it."""
        return self._end - operator.length_hint(self._left)


@contextlib.contextmanager
def hold_back_interrupts() -> Iterator[None]:
    """Has the first Ctrl-C wait until the context ends; a second one is raised at once.

    Python raises it in the main thread alone, so any other thread has nothing to hold back.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pending: list[int] = []

    def hold(number: int, frame: Any) -> None:
        pending.append(number)
        if len(pending) > 1 and callable(before):
            before(number, frame)

    before = signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler if before is None else before)
        if pending:
            signal.raise_signal(signal.SIGINT)
