"""Numbers as callers hand them in, read in one place: of any type that means a number, finite, and within bounds."""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

MOST_INDEX = 2**31 - 1  # what an int32 holds: lengths, counts and indices are int32 on the device
MOST_TOKENS = 2**30  # of a row without end: what is added to its length must not overflow


def integer(name: str, value: Any, *, least: int | None = None, most: int | None = MOST_INDEX) -> int:
    """`value` as an int: Python's, NumPy's, or an integer array without axes.

    Raises:
      ValueError: it is none (a bool, a float and a string are not), or out of bounds.

    >>> integer("max_seqs", np.int64(3), least=1)
    3
    """
    number = as_scalar(value)
    if isinstance(number, bool | np.bool) or not isinstance(number, int | np.integer):
        raise ValueError(f"{name} must be an integer, not {shown(value)}.")
    return _bounded(name, int(number), least, most)


def real(
    name: str, value: Any, *, least: float | None = None, most: float | None = None, above: float | None = None
) -> float:
    """`value` as a finite float: any real number of Python's or NumPy's, or an array without axes.

    Raises:
      ValueError: it is no number (a bool and a string are not), not finite, or out of bounds.

    >>> real("temperature", 1, least=0)
    1.0
    """
    number = as_scalar(value)
    if isinstance(number, bool | np.bool) or not isinstance(number, int | float | np.integer | np.floating):
        raise ValueError(f"{name} must be a number, not {shown(value)}.")
    try:
        number = float(number)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} must be a finite number, not {shown(value)}.")
    if above is not None and number <= above:
        raise ValueError(f"{name} must be above {above}, not {shown(value)}.")
    return _bounded(name, number, least, most)


def flag(name: str, value: Any, or_else: str | None = None) -> bool:
    """`value` if it is True or False. Raises ValueError, which names what else it may be."""
    if not isinstance(value, bool | np.bool):
        choices = "True or False" if or_else is None else f"True, False or {or_else!r}"
        raise ValueError(f"{name} must be {choices}, not {shown(value)}.")
    return bool(value)


def listed(name: str, several: Any) -> list[Any]:
    """What a caller gives several of, one after another. Raises ValueError if it is no list or anything like it."""
    is_one = isinstance(several, str | bytes | Mapping) or getattr(several, "shape", None) == ()
    if is_one or not isinstance(several, Iterable):
        raise ValueError(f"{name} must be a list, not {shown(several)}.")
    return list(several)


def shown(value: Any) -> str:
    """`repr` on one line, cut to what fits into a sentence. Python itself refuses to print an integer of thousands of
    digits."""
    try:
        text = re.sub(r"\s*\n\s*", " ", repr(value))
    except Exception as error:
        return f"something of type {type(value).__name__} that cannot be printed ({type(error).__name__})"
    return text if len(text) <= 80 else f"{text[:60]}… ({len(text)} characters)"


def as_scalar(value: Any) -> Any:
    """Return the Python number that an array without axes holds; anything else as it is."""
    if isinstance(value, jax.core.Tracer):  # no number yet: what is told of it is that it is traced
        return value
    is_array = hasattr(value, "dtype") and hasattr(value, "item") and getattr(value, "shape", None) == ()
    return value.item() if is_array else value


def _bounded[T: (int, float)](name: str, number: T, least: T | None, most: T | None) -> T:
    if least is not None and number < least:
        raise ValueError(f"{name} must be at least {least}, not {shown(number)}.")
    if most is not None and number > most:
        raise ValueError(f"{name} must be at most {most}, not {shown(number)}.")
    return number
