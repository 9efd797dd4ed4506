"""Compiled programs that take a donated cache and return the next one."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from jaxkv._core.cache.cache import Cache


def cache_program(
    structure: Any,
    function: Callable[..., tuple[Any, Cache]],
    donate: tuple[int, ...] = (),
    static: tuple[str, ...] = (),
) -> Any:
    """Compiles `function(cache, ...) -> (out, cache)` over the leaves of a cache of this tree structure.

    The program takes a list and returns two, the leaves of `out` and of the cache. JAX builds lists without running any
    Python, which it would for the cache's own classes: so no interrupt can come between the donation of the cache and
    the storing of the returned one. It is faster, too.

    Args:
      donate: other donated arguments. static: names of those that are compiled in.
    """

    @functools.partial(jax.jit, donate_argnums=(0, *donate), static_argnames=static)
    @functools.wraps(function)
    def program(leaves, *arguments, **options):
        out, cache = function(jax.tree.unflatten(structure, leaves), *arguments, **options)
        return jax.tree.leaves(out), jax.tree.leaves(cache)

    return program
