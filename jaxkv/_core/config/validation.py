"""Validation of callers' numbers: any numeric type is read, and must be finite and within bounds."""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

MOST_INDEX = 2**31 - 1  # what an int32 holds: lengths, counts and indices are int32 on the device
MOST_TOKENS = 2**30  # of an endless row: sums with its length must not overflow


def integer(name: str, value: Any, *, least: int | None = None, most: int | None = MOST_INDEX) -> int:
    """Returns `value` as an int: a Python or NumPy integer, or an integer array without axes.

    Raises:
      ValueError: `value` is no integer (bools, floats and strings are none), or out of bounds.

    >>> integer("max_seqs", np.int64(3), least=1)
    3
    """
    number = read_scalar(value)
    if isinstance(number, bool | np.bool) or not isinstance(number, int | np.integer):
        raise ValueError(f"{name} must be an integer, not {show(value)}.")
    return _check_bounds(name, int(number), least, most)


def real(
    name: str, value: Any, *, least: float | None = None, most: float | None = None, above: float | None = None
) -> float:
    """Returns `value` as a finite float: any real Python or NumPy number, or an array without axes.

    Raises:
      ValueError: `value` is no number (bools and strings are none), not finite, or out of bounds.

    >>> real("temperature", 1, least=0)
    1.0
    """
    number = read_scalar(value)
    if isinstance(number, bool | np.bool) or not isinstance(number, int | float | np.integer | np.floating):
        raise ValueError(f"{name} must be a number, not {show(value)}.")
    try:
        number = float(number)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} must be a finite number, not {show(value)}.")
    if above is not None and number <= above:
        raise ValueError(f"{name} must be above {above}, not {show(value)}.")
    return _check_bounds(name, number, least, most)


def flag(name: str, value: Any, or_else: str | None = None) -> bool:
    """Returns `value` if it is True or False. Raises ValueError, which names the alternative `or_else`."""
    if not isinstance(value, bool | np.bool):
        choices = "True or False" if or_else is None else f"True, False or {or_else!r}"
        raise ValueError(f"{name} must be {choices}, not {show(value)}.")
    return bool(value)


def read_list(name: str, several: Any) -> list[Any]:
    """Returns an iterable argument as a list. Raises ValueError for text, mappings and anything not iterable."""
    is_one = isinstance(several, str | bytes | Mapping) or getattr(several, "shape", None) == ()
    if is_one or not isinstance(several, Iterable):
        raise ValueError(f"{name} must be a list, not {show(several)}.")
    return list(several)


def is_tracing() -> bool:
    """Returns whether arrays made now are traced: shapes are computed, nothing is allocated and nobody is asked."""
    return isinstance(jnp.zeros(()), jax.core.Tracer)


def show(value: Any) -> str:
    """Returns `repr` on one line, cut to fit into a sentence. Values that `repr` refuses, such as integers of thousands
    of digits, are named by type."""
    try:
        text = re.sub(r"\s*\n\s*", " ", repr(value))
    except Exception as error:
        return f"something of type {type(value).__name__} that cannot be printed ({type(error).__name__})"
    return text if len(text) <= 80 else f"{text[:60]}… ({len(text)} characters)"


def read_scalar(value: Any) -> Any:
    """Returns the Python number that an array without axes holds; anything else as it is."""
    if isinstance(value, jax.core.Tracer):  # no number yet: errors report that the value is traced
        return value
    is_array = hasattr(value, "dtype") and hasattr(value, "item") and getattr(value, "shape", None) == ()
    return value.item() if is_array else value


def _check_bounds[T: (int, float)](name: str, number: T, least: T | None, most: T | None) -> T:
    if least is not None and number < least:
        raise ValueError(f"{name} must be at least {least}, not {show(number)}.")
    if most is not None and number > most:
        raise ValueError(f"{name} must be at most {most}, not {show(number)}.")
    return number
