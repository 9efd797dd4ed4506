"""Compiled programs that engines share, without keeping what a user's function names."""

import dataclasses
import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

import jax

MOST_PROGRAMS = 16


def share_programs(make: Callable[..., Any]) -> Callable[..., Any]:
    """`functools.lru_cache` of a function that makes a program from structures of pytrees, flags and users' functions.

    A function may name arrays in its closure, and these would live as long as the cache. So programs with such a one
    live as long as it does: they name it weakly, and whoever calls them keeps it.
    """
    shared = functools.lru_cache(maxsize=MOST_PROGRAMS)(make)

    @functools.wraps(make)
    def find(*arguments: Any) -> Any:
        functions = [x for x in arguments if not _is_plain(x)]
        if not functions:
            return shared(*arguments)
        owner = getattr(functions[0], "__self__", functions[0])  # a method is another object each time it is asked for
        if len(functions) > 1 or not callable(functions[0]) or (programs := _programs_of(owner)) is None:
            return make(*arguments)
        named = tuple(None if x is functions[0] else x for x in arguments)
        key = (make, getattr(functions[0], "__func__", None), named)
        if key not in programs:
            weak = Borrowed(functions[0])
            programs[key] = make(*(weak if x is functions[0] else x for x in arguments))
        return programs[key]

    return find


class Borrowed:
    """A function that is called as long as somebody else keeps it."""

    def __init__(self, function: Callable[..., Any]):
        is_method = isinstance(function, types.MethodType)
        self._function = weakref.WeakMethod(function) if is_method else weakref.ref(function)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        function = self._function()
        assert function is not None, "whoever has the program keeps the function"
        return function(*arguments, **options)


_by_owner: dict[int, tuple[weakref.ref, dict[Any, Any]]] = {}  # by identity: what is equal may name other arrays


def _programs_of(owner: Any) -> dict[Any, Any] | None:
    """The programs that live as long as an object; None if that cannot be told."""
    number = id(owner)
    found = _by_owner.get(number)
    if found is not None and found[0]() is owner:
        return found[1]
    try:
        reference = weakref.ref(owner, lambda gone: _forget(number, gone))
    except TypeError:
        return None
    programs: dict[Any, Any] = {}
    _by_owner[number] = (reference, programs)
    return programs


def _forget(number: int, gone: weakref.ref) -> None:
    if (found := _by_owner.get(number)) is not None and found[0] is gone:
        del _by_owner[number]


def _is_plain(x: Any) -> bool:
    """Whether an argument certainly names no array: not by a closure, a default, or what it is bound to."""
    if isinstance(x, types.FunctionType):
        defaults = (*(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values())
        return not (x.__closure__ or x.__dict__) and _is_plain(defaults)
    if isinstance(x, tuple | frozenset):
        return all(map(_is_plain, x))
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return all(_is_plain(getattr(x, field.name)) for field in dataclasses.fields(x))
    if isinstance(x, functools.partial):
        return _is_plain((x.func, *x.args, *x.keywords.values()))
    return not (callable(x) or isinstance(x, jax.Array))
