"""Captures the queries of attention while a model is traced, for eviction scores that use queries."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax

Rotate = Callable[[jax.Array, jax.Array], jax.Array]


class Queries(NamedTuple):
    """The queries of one layer in a step."""

    q: jax.Array  # [S, T, H, D] or [N, H, D], as attention takes them
    scale: float | None  # factor of its logits; None: head_dim ** -0.5
    rotate: Rotate | None  # from (x [n, heads, D], positions i32[n]) to x, the queries' rotation; None: unknown


@dataclasses.dataclass(frozen=True)
class Rotation:
    """The rotation of queries in `f(q, k, positions) -> (q, k)`."""

    both: Callable[..., tuple[jax.Array, jax.Array]]

    def __call__(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        return self.both(x, x, positions)[0]


_found: contextvars.ContextVar[dict[int, Queries] | None] = contextvars.ContextVar("queries", default=None)
_rotate: contextvars.ContextVar[Rotate | None] = contextvars.ContextVar("rotate", default=None)


@contextlib.contextmanager
def capture_queries() -> Iterator[dict[int, Queries]]:
    """Collects the queries of each layer within, by the layer's index: values of the current trace."""
    found: dict[int, Queries] = {}
    before = _found.set(found)
    try:
        yield found
    finally:
        _found.reset(before)


def record_queries(layer: int, q: jax.Array, scale: Any) -> None:
    """Reports a layer's queries to the captures in progress."""
    if (found := _found.get()) is not None:
        found[layer] = Queries(q, scale, _rotate.get())


@contextlib.contextmanager
def capture_rotation(position_fn: Any) -> Iterator[None]:
    """Sets the rotation of the queries captured within: `f(q, k, positions)`, or its `rope`, if it does more than
    rotate."""
    before = _rotate.set(None if position_fn is None else Rotation(getattr(position_fn, "rope", position_fn)))
    try:
        yield
    finally:
        _rotate.reset(before)
