"""Snapshots of rows on their way from one cache to another, to host memory or a file."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._core.blocks.block_copy import pad_size
from jaxkv._core.blocks.slot_allocator import find_snapshots, grant_snapshots
from jaxkv._core.cache.cache import Cache
from jaxkv._core.state.state_slots import NULL_SLOT, split_states
from jaxkv._core.state.static_fields import register_export


@register_export
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RowSnapshots:
    """The snapshots of n rows. States that several rows share are there once."""

    table: Any  # i32[n, W]: 1 + the index in `states` of a row's state after (c + 1) * every tokens; 0: there is none
    states: Any  # [m, ...] of each array of each layer; those that no row names are undefined
    every: int = dataclasses.field(metadata={"static": True})

    def select(self, i: int) -> "RowSnapshots | None":
        """Returns the snapshots of one row, on the host; None if it has none."""
        return compact_snapshots(np.asarray(self.table)[i : i + 1], self.every, self.states, first=1)


def compact_snapshots(slots: np.ndarray, every: int, states: Any, *, first: int = 0) -> RowSnapshots | None:
    """Returns the snapshots in `slots` i32[n, W] of the pools `states`, of which slot `first` is the first; 0: none.
    None if there are no snapshots at all."""
    named, index = np.unique(slots[slots != NULL_SLOT], return_inverse=True)
    if not len(named):
        return None
    table, places = np.zeros(slots.shape, np.int32), np.zeros(pad_size(len(named)), np.int32)
    table[slots != NULL_SLOT], places[: len(named)] = index + 1, named - first
    return RowSnapshots(table=table, states=jax.tree.map(lambda x: _take(x, places), states), every=every)


def _take(x: Any, places: np.ndarray) -> Any:
    taken = x[places]
    return (
        jax.device_put(taken, x.sharding) if isinstance(x, jax.Array) and x.sharding.memory_kind != "device" else taken
    )


def read_row_snapshots(cache: Cache, rows: np.ndarray) -> RowSnapshots | None:
    """Returns the snapshots of rows `i32[n]`; None if they have none. Reads the device."""
    snapshots = find_snapshots(cache)
    if snapshots is None or cache.config.snapshot_every is None:
        return None
    found = compact_snapshots(np.asarray(snapshots)[rows], cache.config.snapshot_every, cache.states)
    return found and dataclasses.replace(found, states=split_states(cache.config, found.states))


def put_row_snapshots(cache: Cache, rows: Any, given: RowSnapshots | None) -> Cache:
    """Returns a cache whose rows `i32[n]` have the given snapshots, as far as they hold so many tokens, lengths are
    multiples of the cache's own `snapshot_every`, and slots are free. The rows must have none yet; the states are
    joined as the cache's."""
    if given is None or cache.config.snapshot_every is None or cache.state_slots is None:
        return cache
    return _put_row_snapshots(cache.replace(pools=()), rows, given).replace(pools=cache.pools)


@jax.jit
def _put_row_snapshots(cache: Cache, rows: jax.Array, given: RowSnapshots) -> Cache:
    every, slots = cache.config.snapshot_every, find_snapshots(cache)
    assert every is not None and slots is not None and cache.state_slots is not None
    lengths = (np.arange(given.table.shape[1]) + 1) * given.every
    taken = np.flatnonzero((lengths % every == 0) & (lengths <= cache.config.max_seq_len))
    lengths = lengths[taken].astype(np.int32)
    num_tokens = cache.lengths.at[rows].get(mode="fill", fill_value=0)
    table = jnp.where(num_tokens[:, None] >= lengths[None], jnp.asarray(given.table)[:, taken], 0)
    count, none = jax.tree.leaves(given.states)[0].shape[0], cache.config.num_state_slots + 1
    wanted = jnp.zeros(count + 1, bool).at[table].set(True)[1:]
    used = jnp.zeros(none, bool).at[slots].set(True).at[cache.state_slots.slots].set(True).at[NULL_SLOT].set(True)
    granted = grant_snapshots(cache, slots, wanted, jnp.argsort(used, stable=True))
    named = jnp.concatenate([jnp.full(1, NULL_SLOT, jnp.int32), granted])[table]
    snapshots = slots.at[rows[:, None], (lengths // every - 1)[None]].set(named, mode="drop")
    place = jnp.where(granted != NULL_SLOT, granted, none)

    def put(x: jax.Array, states: Any) -> jax.Array:
        return x.at[place].set(jnp.asarray(states), mode="drop")

    changed = dataclasses.replace(cache.state_slots, snapshots=snapshots)
    return cache.replace(state_slots=changed, states=jax.tree.map(put, cache.states, given.states))
