"""Programs compiled before they are needed."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any


def call_all(calls: Sequence[Callable[[], Any]], progress: bool) -> None:
    """Make calls, each of which compiles something; with a progress bar, if wanted and tqdm is there."""
    bar: Iterable[Callable[[], Any]] = calls
    try:
        from tqdm.auto import tqdm

        bar = tqdm(calls, desc="compiling", unit=" programs", disable=not progress)
    except ImportError:
        pass
    for call in bar:
        call()
