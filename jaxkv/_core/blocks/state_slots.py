"""Slots for rows' states: who holds which, copied on write. Index arithmetic only; states are not touched."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxkv._core.cache.cache import Cache
from jaxkv._core.state.state_slots import NULL_SLOT, StateSlots


def assign_slots(cache: Cache, active: jax.Array) -> StateSlots | None:
    """Returns slots in which rows under `active` may write: their own, or a free one in the place of a shared one.

    As many slots as rows suffice: of the rows that share a slot one stays, the last of them, if all go on. It is the
    last so that the others have read the slot before it is written.
    """
    if cache.state_slots is None:
        return None
    held, count = cache.state_slots.slots, cache.config.num_state_slots + 1
    rows = jnp.arange(held.shape[0], dtype=jnp.int32)
    zeros = jnp.zeros(count, jnp.int32)
    holders, going = zeros.at[held].add(1), zeros.at[held].add(active.astype(jnp.int32))
    last = (zeros - 1).at[held].max(jnp.where(active, rows, -1))
    stays = (held != NULL_SLOT) & (holders == going)[held] & (last[held] == rows)
    taken = active & ~stays
    # Free slots first, in order: of these a row takes as many as there are rows before it that take one.
    free = jnp.argsort((holders > 0).at[NULL_SLOT].set(True), stable=True).astype(jnp.int32)
    fresh = free[jnp.maximum(jnp.cumsum(taken, dtype=jnp.int32) - 1, 0)]
    return StateSlots(slots=jnp.where(taken, fresh, held), source=held)


def withhold_states(before: Cache, cache: Cache, rows: jax.Array) -> Cache:
    """Returns the extended cache in which rows under a mask read their states in this step and do not write them.

    Their slots stay as they were `before`, and no other row writes them. `return_slots` ends this.
    """
    slots = assign_slots(before, (cache.new > 0) & ~rows)
    assert slots is not None
    return cache.replace(state_slots=StateSlots(slots=jnp.where(rows, NULL_SLOT, slots.slots), source=slots.source))


def return_slots(cache: Cache, rows: jax.Array) -> Cache:
    """Returns a cache in which rows under a mask hold the states again that `withhold_states` kept."""
    assert cache.state_slots is not None
    slots, source = cache.state_slots.slots, cache.state_slots.source
    return cache.replace(state_slots=StateSlots(slots=jnp.where(rows, source, slots), source=source))


def release_slots(cache: Cache, rows: jax.Array) -> StateSlots | None:
    """Returns slots in which rows under a mask hold none."""
    if cache.state_slots is None:
        return None
    return jax.tree.map(lambda held: jnp.where(rows, NULL_SLOT, held), cache.state_slots)


def adopt_slots(cache: Cache, source: jax.Array, rows: jax.Array) -> StateSlots | None:
    """Returns slots in which rows under a mask share those of rows `source`."""
    if cache.state_slots is None:
        return None
    slots = jnp.where(rows, cache.state_slots.slots[source], cache.state_slots.slots)
    return StateSlots(slots=slots, source=jnp.where(rows, slots, cache.state_slots.source))


def read_row_states(cache: Cache, rows: Any) -> tuple[dict[str, jax.Array] | None, ...]:
    """Returns the present states of rows `i32[n]`, `[n, ...]` of each array: what stands in a row without tokens is
    undefined. Nothing without recurrent layers."""
    if cache.state_slots is None:
        return ()
    slots = cache.state_slots.slots[rows]
    return jax.tree.map(lambda x: x[slots], cache.states)


def put_row_states(cache: Cache, rows: Any, states: Any) -> Cache:
    """Returns a cache in which those of `rows` i32[n] that hold tokens have these states `[n, ...]`, each in a slot of
    its own. The rows must hold no slot."""
    if cache.state_slots is None:
        return cache
    named = jnp.zeros(cache.lengths.shape, bool).at[rows].set(True, mode="drop") & (cache.lengths > 0)
    slots = assign_slots(cache, named)
    assert slots is not None
    slots = StateSlots(slots=slots.slots, source=slots.slots)
    taken = named.at[rows].get(mode="fill", fill_value=False)
    place = jnp.where(taken, slots.slots.at[rows].get(mode="clip"), cache.config.num_state_slots + 1)

    def put(x: jax.Array, new: Any) -> jax.Array:
        return x.at[place].set(jnp.asarray(new), mode="drop")

    return cache.replace(state_slots=slots, states=jax.tree.map(put, cache.states, states))
