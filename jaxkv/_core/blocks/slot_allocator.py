"""Slots for rows' states: who holds which, copied on write. Index arithmetic only; states are not touched."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv._core.cache.cache import Cache
from jaxkv._core.config.cache_config import CacheConfig
from jaxkv._core.state.multihost import place_like
from jaxkv._core.state.state import BlockTables
from jaxkv._core.state.state_slots import NULL_SLOT, Guesses, StateSlots, join_states, split_states


def begin_step(cache: Cache, new: jax.Array, guesses: jax.Array | None = None) -> StateSlots | None:
    """Returns the slots for a step with `new` i32[S] tokens of each row. Rows under a mask of `guesses` hold what they
    held, and get slots for their tokens when they keep them."""
    refuse_guesses(cache, "the next step")
    if guesses is None:
        return assign_slots(cache, new, cache.lengths)
    slots = assign_slots(cache, jnp.where(guesses, 0, new), cache.lengths)
    return None if slots is None else dataclasses.replace(slots, guesses=Guesses(rows=guesses & (new > 0), inputs={}))


def refuse_guesses(cache: Cache, what: str) -> None:
    """Raises ValueError for a cache whose last step was one of guesses, which await `keep`."""
    if cache.state_slots is not None and cache.state_slots.guesses is not None:
        raise ValueError(
            f"The last step was one of guesses, whose rows have not taken in their tokens yet: call keep before {what}."
        )


def assign_slots(cache: Cache, new: jax.Array, lengths: jax.Array) -> StateSlots | None:
    """Returns slots in which rows of `lengths` i32[S] may write the states of a step with `new` i32[S] tokens of each:
    their own, or free ones in the place of shared ones; and free ones for the snapshots that the step reaches, while
    there are any.

    As many slots as rows suffice: of the rows that share a slot one stays, the last of them, if all go on. It is the
    last so that the others have read the slot before it is written.
    """
    if cache.state_slots is None:
        return None
    source, count = cache.state_slots.slots, cache.config.num_state_slots + 1
    rows, active = jnp.arange(source.shape[0], dtype=jnp.int32), new > 0
    zeros = jnp.zeros(count, jnp.int32)
    holders, going = zeros.at[source].add(1), zeros.at[source].add(active.astype(jnp.int32))
    snapshots = find_snapshots(cache, lengths)
    if snapshots is not None:
        holders = holders.at[snapshots].add(1)
    last = (zeros - 1).at[source].max(jnp.where(active, rows, -1))
    stays = (source != NULL_SLOT) & (holders == going)[source] & (last[source] == rows)
    taken = active & ~stays
    # Free slots first, in order: of these a row takes as many as there are rows before it that take one.
    free = jnp.argsort((holders > 0).at[NULL_SLOT].set(True), stable=True).astype(jnp.int32)
    fresh = free[jnp.maximum(jnp.cumsum(taken, dtype=jnp.int32) - 1, 0)]
    slots = jnp.where(taken, fresh, source)
    if snapshots is not None:
        behind = free[jnp.sum(taken, dtype=jnp.int32) + jnp.arange(cache.config.num_snapshots, dtype=jnp.int32)]
        snapshots = _assign_snapshots(cache, lengths, new, snapshots, behind)
    return StateSlots(slots=slots, source=source, snapshots=snapshots)


def _assign_snapshots(
    cache: Cache, lengths: jax.Array, new: jax.Array, snapshots: jax.Array, free: jax.Array
) -> jax.Array:
    """Returns the rows' `snapshots` i32[S, W] and those that a step reaches in slots of `free`, while there are any."""
    column, (before, after) = _columns(cache), (_count_reached(cache, x) for x in (lengths, lengths + new))
    granted = grant_snapshots(cache, snapshots, ((column >= before) & (column < after)).reshape(-1), free)
    return jnp.where(granted != NULL_SLOT, granted, snapshots.reshape(-1)).reshape(snapshots.shape)


def grant_snapshots(cache: Cache, snapshots: jax.Array, wanted: jax.Array, free: jax.Array) -> jax.Array:
    """Returns slots of `free` i32[m] for the snapshots under a mask `wanted` bool[n], in order, while there are places
    beside the rows' `snapshots` i32[S, W]; the null slot for the others."""
    used = jnp.zeros(cache.config.num_state_slots + 1, bool).at[snapshots].set(True).at[NULL_SLOT].set(False)
    number = jnp.cumsum(wanted, dtype=jnp.int32) - 1
    granted = wanted & (number < cache.config.num_snapshots - jnp.sum(used, dtype=jnp.int32))
    return jnp.where(granted, free[jnp.clip(number, 0, free.shape[0] - 1)], NULL_SLOT).astype(jnp.int32)


def find_snapshots(cache: Cache, lengths: jax.Array | None = None) -> jax.Array | None:
    """Returns `i32[S, W]`: the snapshots of rows, without what stands behind `lengths`, by default their own; None
    without snapshots."""
    if cache.state_slots is None or cache.state_slots.snapshots is None:
        return None
    lengths = cache.lengths if lengths is None else lengths
    return jnp.where(_columns(cache) < _count_reached(cache, lengths), cache.state_slots.snapshots, NULL_SLOT)


def has_snapshot(cache: Cache, lengths: jax.Array) -> jax.Array:
    """Tells of each row whether it can go back to a length i32[S] above 0: to all without recurrent layers."""
    if cache.state_slots is None:
        return jnp.ones(lengths.shape, bool)
    return _find_snapshot_slots(cache, lengths) != NULL_SLOT


def roll_slots_back(cache: Cache, lengths: jax.Array, rows: jax.Array) -> StateSlots | None:
    """Returns slots in which rows under a mask go back to 0 tokens, or to the snapshot of a length i32[S]."""
    if cache.state_slots is None:
        return None
    slots = jnp.where(rows, _find_snapshot_slots(cache, lengths), cache.state_slots.slots)
    source, snapshots = cache.state_slots.source, find_snapshots(cache)
    if snapshots is not None:
        behind = rows[:, None] & (_columns(cache) >= _count_reached(cache, lengths))
        snapshots = jnp.where(behind, NULL_SLOT, snapshots)
    source = jnp.where(rows, slots, source)
    return dataclasses.replace(cache.state_slots, slots=slots, source=source, snapshots=snapshots)


def _find_snapshot_slots(cache: Cache, lengths: jax.Array) -> jax.Array:
    """Returns `i32[S]`: the slot of each row's snapshot of a length; the null slot if there is none."""
    snapshots, every = find_snapshots(cache), cache.config.snapshot_every
    if snapshots is None or every is None:
        return jnp.full_like(lengths, NULL_SLOT)
    column = jnp.clip(lengths // every - 1, 0, snapshots.shape[1] - 1)
    found = jnp.take_along_axis(snapshots, column[:, None], axis=1)[:, 0]
    return jnp.where((lengths >= every) & (lengths % every == 0), found, NULL_SLOT)


def _columns(cache: Cache) -> jax.Array:
    return jnp.arange(cache.config.row_snapshots, dtype=jnp.int32)[None]


def _count_reached(cache: Cache, lengths: jax.Array) -> jax.Array:
    """Returns `i32[S, 1]`: how many snapshots stand within rows of these lengths."""
    assert cache.config.snapshot_every is not None
    return (lengths // cache.config.snapshot_every)[:, None]


def snapshot_arguments(
    slots: StateSlots,
    tables: BlockTables,
    config: CacheConfig,
    longest: int,
    find: Callable[[jax.Array], jax.Array] = lambda slots: slots,
) -> dict[str, Any]:
    """Returns the arguments by which a mixer stores the snapshots of a step with at most `longest` tokens of a row.

    Args:
      find: finds a layer's own slots, as `StateLayer.apart` does.
    """
    every, snapshots = config.snapshot_every, slots.snapshots
    if snapshots is None or every is None:
        return {}
    number = jnp.arange(min(-(-longest // every), snapshots.shape[1]), dtype=jnp.int32)[None]
    column = ((tables.lengths - tables.new) // every)[:, None] + number
    found = jnp.take_along_axis(snapshots, jnp.minimum(column, snapshots.shape[1] - 1), axis=1)
    there = (column < (tables.lengths // every)[:, None]) & (found != NULL_SLOT)
    return {"every": every, "snapshot_slots": find(jnp.where(there, found, -1))}


def end_snapshots(
    slots: StateSlots, tables: BlockTables, config: CacheConfig
) -> tuple[StateSlots, tuple[jax.Array, ...]]:
    """Returns the slots without the snapshots within a step, for states known at its end alone, and the slots i32[S] of
    the snapshots that rows end at; the null slot for others. No such slots without snapshots."""
    every, snapshots = config.snapshot_every, slots.snapshots
    if snapshots is None or every is None:
        return slots, ()
    position = (jnp.arange(snapshots.shape[1], dtype=jnp.int32)[None] + 1) * every
    length = tables.lengths[:, None]
    is_within = (position > length - tables.new[:, None]) & (position < length)
    at_end = jnp.max(jnp.where(position == length, snapshots, NULL_SLOT), axis=1)
    return dataclasses.replace(slots, snapshots=jnp.where(is_within, NULL_SLOT, snapshots)), (at_end,)


def drop_guesses(cache: Cache) -> Cache:
    """Returns a cache whose rows hold the states of before a step of guesses, for a model that computes them again."""
    assert cache.state_slots is not None
    return cache.replace(state_slots=dataclasses.replace(cache.state_slots, guesses=None))


def release_slots(cache: Cache, rows: jax.Array) -> StateSlots | None:
    """Returns slots in which rows under a mask hold none."""
    return roll_slots_back(cache, jnp.zeros_like(cache.lengths), rows)


def adopt_slots(cache: Cache, source: jax.Array, rows: jax.Array) -> StateSlots | None:
    """Returns slots in which rows under a mask share those of rows `source`."""
    if cache.state_slots is None:
        return None
    refuse_guesses(cache, "rows become others")
    slots = jnp.where(rows, cache.state_slots.slots[source], cache.state_slots.slots)
    snapshots = find_snapshots(cache)
    if snapshots is not None:
        snapshots = jnp.where(rows[:, None], snapshots[source], snapshots)
    return StateSlots(slots=slots, source=jnp.where(rows, slots, cache.state_slots.source), snapshots=snapshots)


def read_row_states(cache: Cache, rows: Any) -> tuple[dict[str, jax.Array] | None, ...]:
    """Returns the present states of rows `i32[n]`, `[n, ...]` of each array: what stands in a row without tokens is
    undefined. Nothing without recurrent layers."""
    if cache.state_slots is None:
        return ()
    refuse_guesses(cache, "rows are copied")
    slots = cache.state_slots.slots[rows]
    return jax.tree.map(lambda x: x[slots], cache.states)


def put_row_states(cache: Cache, rows: Any, states: Any) -> Cache:
    """Returns a cache in which those of `rows` i32[n] that hold tokens have these states `[n, ...]`, each in a slot of
    its own. The rows must hold no slot."""
    if cache.state_slots is None:
        return cache
    return _put_row_states(cache.replace(pools=()), rows, states).replace(pools=cache.pools)


@jax.jit
def _put_row_states(cache: Cache, rows: jax.Array, states: Any) -> Cache:
    named = jnp.zeros(cache.lengths.shape, bool).at[rows].set(True, mode="drop") & (cache.lengths > 0)
    cache = cache.replace(state_slots=release_slots(cache, named))
    slots = begin_step(cache, jnp.where(named, 1, 0))
    assert slots is not None
    slots = dataclasses.replace(slots, source=slots.slots)
    taken = named.at[rows].get(mode="fill", fill_value=False)
    place = jnp.where(taken, slots.slots.at[rows].get(mode="clip"), cache.config.num_state_slots + 1)

    def put(x: jax.Array, new: Any) -> jax.Array:
        return x.at[place].set(jnp.asarray(new), mode="drop")

    return cache.replace(state_slots=slots, states=jax.tree.map(put, cache.states, states))


def take_states(cache: Cache, rows: Any) -> tuple[dict[str, jax.Array] | None, ...]:
    """Returns the present states of rows `i32[n]`, each layer's by itself, for another cache, host memory or a file."""
    return split_states(cache.config, read_row_states(cache, rows))


def place_states(states: Any, cache: Cache) -> Any:
    """Returns what `take_states` took, joined as a cache's own, for `put_row_states`, and on their devices."""
    return jax.tree.map(place_like, join_states(cache.config, states), cache.states)
