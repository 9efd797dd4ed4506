"""Compiles programs before they are needed."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any


def call_all(calls: Sequence[Callable[[], Any]], progress: bool) -> None:
    """Calls functions that each compile something; with a progress bar, if wanted and tqdm is installed."""
    bar: Iterable[Callable[[], Any]] = calls
    try:
        from tqdm.auto import tqdm

        bar = tqdm(calls, desc="compiling", unit=" programs", disable=not progress)
    except ImportError:
        pass
    for call in bar:
        call()
