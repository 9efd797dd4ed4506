"""Validation of callers' numbers: any numeric type is read, and must be finite and within bounds."""

import difflib
import functools
import inspect
import math
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.api.show import show as show

PACKAGE_FOLDER = str(pathlib.Path(__file__).parents[2])  # whose lines a warning skips: it is about those of the caller
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


def refuse_unknown[**P, R](
    what: str, meant: Mapping[str, str] | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Returns a decorator of a function by which a keyword that it does not take is told in a sentence.

    Args:
      what: what the sentence calls the function. meant: others' names of its arguments.

    >>> @refuse_unknown("wait")
    ... def wait(*, seconds): ...
    >>> wait(second=1)
    Traceback (most recent call last):
    TypeError: wait takes no second: did you mean seconds?
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        taken = [name for name in inspect.signature(function).parameters if name != "self"]
        names = {name: name for name in taken} | {x: own for x, own in (meant or {}).items() if own in taken}

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if unknown := [name for name in kwargs if name not in taken]:
                close = difflib.get_close_matches(unknown[0], names, n=1, cutoff=0.75)
                said = f"did you mean {names[close[0]]}?" if close else f"it takes {', '.join(taken)}."
                raise TypeError(f"{what} takes no {unknown[0]}: {said}")
            return function(*args, **kwargs)

        return call

    return decorate


def refuse_unknown_fields[T](made: type[T]) -> type[T]:
    """Decorates a dataclass by `refuse_unknown`."""
    initialize: Any = refuse_unknown(made.__name__)(made.__init__)
    made.__init__ = initialize  # type: ignore[method-assign]
    return made


def is_tracing() -> bool:
    """Returns whether arrays made now are traced: shapes are computed, nothing is allocated and nobody is asked."""
    return isinstance(jnp.zeros(()), jax.core.Tracer)


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
