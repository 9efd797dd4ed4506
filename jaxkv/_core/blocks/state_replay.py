"""What `keep` does with states: computes those after the kept tokens of a step of guesses, from the mixers' inputs."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels
from jaxkv._core.blocks.mixer_shards import run_on_mesh
from jaxkv._core.blocks.slot_allocator import assign_slots, snapshot_arguments
from jaxkv._core.cache.cache import Cache
from jaxkv._core.state.head_rows import row_tables
from jaxkv._core.state.state import BlockTables
from jaxkv._core.state.state_slots import NULL_SLOT, MixerInputs, StateLayer, StateSlots, name_inputs
from pallas_kernels.common.state_batch import MIXERS


def take_in(cache: Cache, before: jax.Array, kept: jax.Array, longest: int) -> Cache:
    """Ends a step of guesses: its rows take the first `kept` i32[S] of their tokens into their states.

    Args:
      cache: with the lengths after the step.
      before: `i32[S]`, the lengths before the step. longest: the most tokens of a row that are kept.
    """
    slots = cache.state_slots
    assert slots is not None and slots.guesses is not None
    guesses, tables = slots.guesses, row_tables(cache.tables[0], cache.config)
    kept = jnp.where(guesses.rows, kept, 0)
    lengths = jnp.where(guesses.rows, before, tables.lengths)
    taken = assign_slots(cache, kept, lengths)
    assert taken is not None
    tables = dataclasses.replace(tables, lengths=lengths + kept, new=kept)
    states = list(cache.states)
    for layer in cache.config.recurrent_layers:
        first, found = cache.config.state_stack(layer)[0], cache.replace(states=tuple(states)).state_layer(layer)
        apart, find = found.apart()
        for name in apart:
            inputs = guesses.inputs.get(name_inputs(layer, name))
            if inputs is not None:
                apart = apart | {name: _replay(inputs, apart[name], taken, tables, found, longest, find)}
        states[first] = found.with_apart(apart)
    return cache.replace(state_slots=taken, states=tuple(states))


def _replay(
    inputs: MixerInputs,
    states: jax.Array,
    slots: StateSlots,
    tables: BlockTables,
    layer: StateLayer,
    longest: int,
    find: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """Returns a layer's states after the tokens that rows keep."""
    if inputs.mixer == "write_states":
        raise ValueError(
            "keep cannot roll back states that write_states wrote in a step of guesses: it knows only those after all "
            "tokens. Use the mixers, or compute the kept tokens again from a fork."
        )
    padded = {name: _pad(x, tables, inputs, longest) for name, x in inputs.tokens.items()}
    arrays: dict[str, Any] = padded | inputs.fixed
    if inputs.mixer == "causal_conv":
        arrays["weight"] = jnp.zeros((padded["x"].shape[-1], states.shape[2] + 1), padded["x"].dtype)
    # No state depends on what stands in for these; the output is dropped.
    form = MIXERS[inputs.mixer]
    arrays |= {name: arrays[other] for name in form.unread if (other := form.find_stand_in(name)) is not None}
    door = getattr(pallas_kernels, inputs.mixer)
    _, changed = run_on_mesh(door, states, layer.heads)(
        **arrays,
        states=states,
        slots=find(slots.source),
        to_slots=find(jnp.where(slots.slots == NULL_SLOT, -1, slots.slots)),
        **snapshot_arguments(slots, tables, layer.config, longest, find),
        lengths=tables.lengths,
        new=tables.new,
    )
    return changed


def _pad(x: jax.Array, tables: BlockTables, inputs: MixerInputs, longest: int) -> jax.Array:
    """Returns the first `longest` tokens of each row, `[S, n, ...]`; what stands behind a row's tokens is undefined."""
    if _is_packed(inputs):
        place = tables.offsets[:, None] + jnp.arange(longest, dtype=jnp.int32)[None]
        return x.at[place].get(mode="clip")
    return x[:, :longest]


def _is_packed(inputs: MixerInputs) -> bool:
    form = MIXERS[inputs.mixer]
    return inputs.tokens[form.shown].ndim == form.inner + 1
