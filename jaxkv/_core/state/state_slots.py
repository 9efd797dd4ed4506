"""The slots of rows' states, and a recurrent layer: fields and shapes, no algorithms. S rows."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._core.config.cache_config import CacheConfig
from jaxkv._core.config.layer_config import LayerConfig
from jaxkv._core.state.state import BlockTables, Layer
from jaxkv._core.state.state_repr import describe_slots, describe_state_layer
from jaxkv._core.state.static_fields import register_export

# Slot 0 is never taken and never written: rows without a state point at it.
NULL_SLOT = 0


@register_export
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class MixerInputs:
    """What a mixer took in a step of guesses: from it `keep` computes the state after the tokens that it keeps."""

    tokens: dict[str, jax.Array]  # [S, T, ...] padded or [N, ...] packed
    fixed: dict[str, jax.Array]  # arrays that are alike for all tokens
    mixer: str = dataclasses.field(metadata={"static": True})  # "write_states": the model's own, which has no inputs


@register_export
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Guesses:
    """A step of guesses: `rows` have not written their states yet."""

    rows: jax.Array  # bool[S]
    inputs: dict[str, MixerInputs]  # by layer and array, as `name_inputs` says

    @property
    def written_by_hand(self) -> bool:
        """Whether a model wrote states itself, so that only the model can compute others."""
        return any(inputs.mixer == "write_states" for inputs in self.inputs.values())


def name_inputs(layer: int, array: str) -> str:
    """Returns the key of the inputs of a layer's mixer in `Guesses.inputs`."""
    return f"{layer} {array}"


@register_export
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StateSlots:
    """The slot that holds each row's states, in all recurrent layers alike. Rows that were forked share one, until
    `extend` gives each that goes on a slot of its own. A slot is free if no row points at it."""

    slots: jax.Array  # i32[S]: where the state is, or after this step will be; the null slot: there is none
    source: jax.Array  # i32[S]: where the state was before this step: not in `slots` if the row shared it
    # With snapshots, i32[S, W]: in column c the slot with the row's state after (c + 1) * snapshot_every tokens; the
    # null slot: there is none. Columns behind a row's length mean nothing. Snapshots may share slots with each other
    # and with rows.
    snapshots: jax.Array | None = None
    guesses: Guesses | None = None  # of the present step, until `keep`

    __repr__ = describe_slots

    @property
    def named(self) -> tuple[jax.Array, ...]:
        """The arrays of slots."""
        return tuple(x for x in (self.slots, self.source, self.snapshots) if x is not None)

    def record(self, layer: int, array: str, mixer: str, tokens: dict[str, Any], **fixed: Any) -> "StateSlots":
        """Returns slots that know what a mixer took, in a step of guesses."""
        if self.guesses is None:
            return self
        inputs = MixerInputs(tokens=tokens, fixed=fixed, mixer=mixer)
        known = self.guesses.inputs | {name_inputs(layer, array): inputs}
        return dataclasses.replace(self, guesses=dataclasses.replace(self.guesses, inputs=known))


@register_export
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StateLayer:
    """One recurrent layer, as `read_states`, `write_states` and the mixers take it. Made by `cache.layers`.

    Layers share their tables, so donate the cache, not its layers.
    """

    NO_CACHE: ClassVar[str] = Layer.NO_CACHE

    states: dict[str, jax.Array]  # [slots + 1, ...] of each array; [slots + 1, n, ...] of n stacked layers
    slots: StateSlots
    tables: BlockTables  # of the first group, which counts the rows' tokens
    place: jax.Array | None = None  # i32[]: the layer's index among stacked layers
    number: int = dataclasses.field(metadata={"static": True})
    config: CacheConfig = dataclasses.field(metadata={"static": True})
    # The mesh axis that heads or channels are divided over, as those of pools; None: one device.
    heads: str | None = dataclasses.field(default=None, metadata={"static": True})

    __repr__ = describe_state_layer

    @property
    def layer_config(self) -> LayerConfig:
        """The config of the layer."""
        return self.config.layers[self.number]

    def apart(self) -> tuple[dict[str, jax.Array], Callable[[jax.Array], jax.Array]]:
        """Returns the states with one axis of slots, and a function of slots that finds the layer's own among these;
        negative ones, which are nowhere, stay."""
        if self.place is None:
            return self.states, lambda slots: slots
        count, place = next(iter(self.states.values())).shape[1], self.place
        flat = {name: x.reshape(-1, *x.shape[2:]) for name, x in self.states.items()}
        return flat, lambda slots: jnp.where(slots < 0, slots, slots * count + place)

    def with_apart(self, states: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Returns states as `apart` gave them, as the layer has them."""
        return {name: x.reshape(self.states[name].shape) for name, x in states.items()}

    @property
    def rows(self) -> int:
        """Rows of the cache, S in shapes."""
        return self.config.max_seqs


def split_states(config: CacheConfig, states: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns states `[n, ...]` of each recurrent layer, of those that a cache's arrays hold."""
    if not config.stacked:
        return states
    found: list[Any] = [None] * len(states)
    for layers in config.state_stacks if states else ():
        for place, layer in enumerate(layers):
            found[layer] = {name: x[:, place] for name, x in states[layers[0]].items()}
    return tuple(found)


def join_states(config: CacheConfig, states: tuple[Any, ...]) -> tuple[Any, ...]:
    """Undoes `split_states`."""
    if not config.stacked:
        return states
    found: list[Any] = [None] * len(states)
    for layers in config.state_stacks if states else ():
        each = [states[layer] for layer in layers]
        found[layers[0]] = {name: _stack([x[name] for x in each]) for name in each[0]}
    return tuple(found)


def _stack(arrays: list[Any]) -> Any:
    return (np if all(isinstance(x, np.ndarray) for x in arrays) else jnp).stack(arrays, axis=1)
