"""Compiles programs before they are needed."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any


def call_all(calls: Sequence[Callable[[], Any]], progress: bool) -> None:
    """Calls functions that each compile something; with a progress bar, if wanted and tqdm is installed."""
    bar: Iterable[Callable[[], Any]] = calls
    if progress:
        try:
            from tqdm.auto import tqdm  # in a notebook it warns where there are no widgets

            bar = tqdm(calls, desc="compiling", unit=" programs")
        except ImportError:
            pass
    for call in bar:
        call()
