"""States of some heads, read from a pool's slots and written to them where they lie."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class HeadPlace(NamedTuple):
    """Some heads of a slot in a pool."""

    slot: jax.Array
    head: jax.Array  # the first
    heads: int

    def read(self, states: jax.Array) -> jax.Array:
        """Returns the heads' states, as they are stored."""
        start = (self.slot, self.head, *[jnp.int32(0)] * (states.ndim - 2))
        return jax.lax.dynamic_slice(states, start, (1, self.heads, *states.shape[2:]))[0]

    def write(self, states: jax.Array, new: jax.Array) -> jax.Array:
        """Returns the pool with other states of the heads."""
        start = (self.slot, self.head, *[jnp.int32(0)] * (states.ndim - 2))
        return jax.lax.dynamic_update_slice(states, new[None], start)


def read_state(states: jax.Array, place: HeadPlace, begins: jax.Array) -> jax.Array:
    """Returns states in float32, of rows that begin zeros."""
    # The barrier keeps XLA from reading the pool once more after it was written, which would take a copy of the pool.
    return jax.lax.optimization_barrier(jnp.where(begins, 0.0, place.read(states).astype(jnp.float32)))


def put_state(
    states: jax.Array, state: jax.Array, place: HeadPlace, targets: list[jax.Array], held: jax.Array | None = None
) -> jax.Array:
    """Writes states to the slots of `targets` that there are. Where there is none, writes what the row's slot holds,
    `held` if that was read just now: a scatter, which can skip, copies the pool on a CPU, and so does a read between
    two writes."""
    new, at = state.astype(states.dtype), place.slot
    value = place.read(states) if held is None else held.astype(states.dtype)
    if len(targets) > 1:  # else XLA may compute both once more for the second write
        new, value = jax.lax.optimization_barrier((new, value))
    for target in targets:
        there = target < states.shape[0]
        at, value = jnp.where(there, target, at), jnp.where(there, new, value)
        states = place._replace(slot=at).write(states, value)
    return states
