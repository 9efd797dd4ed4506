"""The states of recurrent layers on the host: `snapshots`, and what `check`, `check_invariants` and `stats` say."""

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from jaxkv._core.cache.cache import Cache, check_cache
from jaxkv._core.state.state_slots import NULL_SLOT


def snapshots(cache: Cache) -> list[list[int]]:
    """Returns, for each row, the lengths that `truncate` can go back to besides 0: those with a snapshot of the states
    after so many tokens. See `CacheConfig.snapshot_every`.

    A model that writes states itself has the snapshots at which a step of the row ended. Rows that come from another
    cache, a file or host memory bring theirs, as far as slots are free. Reads the device: not for use inside `jit`.

    >>> import jaxkv
    >>> layers = jaxkv.LayerConfig(num_kv_heads=2, head_dim=8), jaxkv.LayerConfig.recurrent(state=((2,), "float32"))
    >>> sizes = dict(max_seqs=2, max_seq_len=64, num_blocks=8, block_size=4)
    >>> cache = jaxkv.init(jaxkv.CacheConfig(layers=layers, snapshot_every=8, **sizes))
    >>> jaxkv.snapshots(jaxkv.extend(jaxkv.extend(cache, [9, 3]), [8, 3]))
    [[8, 16], []]
    """
    check_cache(cache)
    every, slots = cache.config.snapshot_every, _read_snapshots(cache)
    return [((np.flatnonzero(own) + 1) * (every or 0)).tolist() for own in slots]


def _read_snapshots(cache: Cache) -> np.ndarray:
    """Returns `i32[S, W]`: the slots of the rows' snapshots; the null slot where there is none."""
    every, slots = cache.config.snapshot_every, cache.state_slots
    if every is None or slots is None or slots.snapshots is None:
        return np.full((cache.config.max_seqs, 0), NULL_SLOT, np.int32)
    found, lengths = jax.device_get((slots.snapshots, cache.lengths))
    return np.where(np.arange(found.shape[1]) < lengths[:, None] // every, found, NULL_SLOT)


def describe_snapshots(cache: Cache, rows: Iterable[int]) -> str:
    """Says which snapshots rows have, behind a sentence; nothing if the cache makes none."""
    if cache.config.snapshot_every is None:
        return ""
    found = snapshots(cache)
    phrases = {r: f"snapshots of {', '.join(map(str, found[r]))} tokens" if found[r] else "no snapshots" for r in rows}
    return f"; {' and '.join(f'row {r} has {words}' for r, words in phrases.items())}"


def check_states(cache: Cache) -> None:
    """Asserts that rows with tokens hold states, that snapshots have slots, and that the null slots are 0."""
    config = cache.config
    assert (cache.state_slots is not None) == bool(config.recurrent_layers), "slots where layers keep states"
    if cache.state_slots is None:
        return
    assert len(cache.states) == len(config.layers), "states, or None, for each layer"
    for i, (layer, states) in enumerate(zip(config.layers, cache.states, strict=True)):
        stack = config.state_stack(i)
        assert (states is not None) == (stack[:1] == (i,)), f"layer {i} keeps a state, or is stacked behind another"
        front = (config.num_state_slots + 1, *[len(stack)] * config.stacked)
        for array in layer.states or () if states is not None else ():
            found = states[array.name]  # type: ignore[index]
            assert found.shape == (*front, *array.shape), f"layer {i}: the shape of {array.name}"
            assert str(found.dtype) == array.dtype, f"layer {i}: the dtype of {array.name}"
            assert not np.asarray(found[NULL_SLOT]).any(), f"layer {i}: the null slot of {array.name} was written"
    slots, lengths, failed = jax.device_get((cache.state_slots, cache.lengths, cache.failed))
    for named in slots.named:
        assert ((named >= 0) & (named <= config.num_state_slots)).all(), f"slots within the pool: {named}"
    settled = ~failed if slots.guesses is None else ~failed & ~slots.guesses.rows
    assert ((slots.slots != NULL_SLOT) == (lengths > 0))[settled].all(), f"rows with tokens hold states: {slots.slots}"
    assert (slots.snapshots is not None) == bool(config.num_snapshots), "snapshots where there are slots for them"
    if slots.snapshots is None:
        return
    snapshots = _read_snapshots(cache)
    assert slots.snapshots.shape == (config.max_seqs, config.row_snapshots), f"the shape: {slots.snapshots.shape}"
    own = {(int(slot), column) for (_, column), slot in np.ndenumerate(snapshots) if slot != NULL_SLOT}
    assert len({slot for slot, _ in own}) == len(own), f"a slot has the state after one number of tokens: {snapshots}"
    assert len(own) <= config.num_snapshots, f"rows have slots left beside snapshots: {snapshots}"


def count_states(cache: Cache) -> dict[str, Any]:
    """Returns the usage of the slots for states; nothing without recurrent layers."""
    if cache.state_slots is None:
        return {}
    snapshots = _read_snapshots(cache).ravel()
    named = np.concatenate([np.asarray(cache.state_slots.slots), snapshots])
    holders = np.bincount(named, minlength=cache.config.num_state_slots + 1)[1:]
    used, size = int((holders > 0).sum()), cache.config.bytes_per_state
    found = {"num_slots": len(holders), "slots_used": used, "slots_free": len(holders) - used}
    found |= {"slots_shared": int((holders > 1).sum()), "bytes_per_state": size, "bytes_used": used * size}
    if cache.config.snapshot_every is not None:
        found |= {"snapshots": len(set(snapshots[snapshots != NULL_SLOT].tolist()))}
    return {"states": {"layers": cache.config.recurrent_layers} | found}
