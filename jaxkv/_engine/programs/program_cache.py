"""A cache of compiled programs shared by engines, which keeps no user's function alive."""

import dataclasses
import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

import jax

MOST_PROGRAMS = 16


def share_programs(make: Callable[..., Any]) -> Callable[..., Any]:
    """Caches a function that makes a program from structures of pytrees, flags and users' functions.

    A function may hold arrays in its closure, and a `functools.lru_cache` would keep these. So programs of such a
    function live as long as it does: they refer to it weakly, and their caller keeps it.
    """
    shared = functools.lru_cache(maxsize=MOST_PROGRAMS)(make)

    @functools.wraps(make)
    def find(*arguments: Any) -> Any:
        functions = [x for x in arguments if not _is_plain(x)]
        if not functions:
            return shared(*arguments)
        owner = getattr(functions[0], "__self__", functions[0])  # a method is a new object at each access
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
    """A function that is called through a weak reference."""

    def __init__(self, function: Callable[..., Any]):
        is_method = isinstance(function, types.MethodType)
        self._function = weakref.WeakMethod(function) if is_method else weakref.ref(function)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        function = self._function()
        assert function is not None, "whoever has the program keeps the function"
        return function(*arguments, **options)


_by_owner: dict[int, tuple[weakref.ref, dict[Any, Any]]] = {}  # by identity: equal functions may hold other arrays


def _programs_of(owner: Any) -> dict[Any, Any] | None:
    """Returns the programs that live as long as an object; None if it takes no weak reference."""
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
    """Tells whether an argument certainly holds no array: not by a closure, a default, or a bound object."""
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
