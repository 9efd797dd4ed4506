"""Compiled programs that use up a cache and return the next one."""

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
    """`function(cache, ...) -> (out, cache)`, compiled over the leaves of a cache of this tree structure.

    It takes a list and returns two, the leaves of `out` and of the cache. JAX builds lists without running any Python,
    which it would for the cache's own classes: so no interrupt can come between the device, which uses up the cache
    that it was given, and whoever keeps the one that is returned. It is faster, too.

    Args:
      donate: other arguments that are used up. static: names of those that are compiled in.
    """

    @functools.partial(jax.jit, donate_argnums=(0, *donate), static_argnames=static)
    @functools.wraps(function)
    def program(leaves, *arguments, **options):
        out, cache = function(jax.tree.unflatten(structure, leaves), *arguments, **options)
        return jax.tree.leaves(out), jax.tree.leaves(cache)

    return program
