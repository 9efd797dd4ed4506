"""Queries as attention meets them, for whoever asks while a model is traced: what scores by queries choose by."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax

Rotate = Callable[[jax.Array, jax.Array], jax.Array]


class Queries(NamedTuple):
    """What one layer asks in a step."""

    q: jax.Array  # [S, T, H, D] or [N, H, D], as attention takes them
    scale: float | None  # that its logits are multiplied by; None: head_dim ** -0.5
    rotate: Rotate | None  # from (x [n, heads, D], positions i32[n]) to x, as these were; None: nobody said


@dataclasses.dataclass(frozen=True)
class Rotation:
    """The half that queries see of `f(q, k, positions) -> (q, k)`."""

    both: Callable[..., tuple[jax.Array, jax.Array]]

    def __call__(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        return self.both(x, x, positions)[0]


_found: contextvars.ContextVar[dict[int, Queries] | None] = contextvars.ContextVar("queries", default=None)
_rotate: contextvars.ContextVar[Rotate | None] = contextvars.ContextVar("rotate", default=None)


@contextlib.contextmanager
def queries_noted() -> Iterator[dict[int, Queries]]:
    """What each layer asks of a cache within, by the layer's number: values of the trace that is at work."""
    found: dict[int, Queries] = {}
    before = _found.set(found)
    try:
        yield found
    finally:
        _found.reset(before)


def note_queries(layer: int, q: jax.Array, scale: Any) -> None:
    """Tell who asks of a layer's queries."""
    if (found := _found.get()) is not None:
        found[layer] = Queries(q, scale, _rotate.get())


@contextlib.contextmanager
def rotated_by(position_fn: Any) -> Iterator[None]:
    """Say how the queries that are noted within were rotated: by `f(q, k, positions)`, or its `rope`, if more than that
    becomes of them."""
    before = _rotate.set(None if position_fn is None else Rotation(getattr(position_fn, "rope", position_fn)))
    try:
        yield
    finally:
        _rotate.reset(before)
