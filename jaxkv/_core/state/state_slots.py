"""The slots of rows' states, and a recurrent layer: fields and shapes, no algorithms. S rows."""

import dataclasses
from typing import ClassVar

import jax

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
class StateSlots:
    """The slot that holds each row's states, in all recurrent layers alike. Rows that were forked share one, until
    `extend` gives each that goes on a slot of its own. A slot is free if no row points at it."""

    slots: jax.Array  # i32[S]: where the state is, or after this step will be; the null slot: there is none
    source: jax.Array  # i32[S]: where the state was before this step: not in `slots` if the row shared it
    # With snapshots, i32[S, W]: in column c the slot with the row's state after (c + 1) * snapshot_every tokens; the
    # null slot: there is none. Columns behind a row's length mean nothing. Snapshots may share slots with each other
    # and with rows.
    snapshots: jax.Array | None = None

    __repr__ = describe_slots


@register_export
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StateLayer:
    """One recurrent layer, as `read_states`, `write_states` and the mixers take it. Made by `cache.layers`.

    Layers share their tables, so donate the cache, not its layers.
    """

    NO_CACHE: ClassVar[str] = Layer.NO_CACHE

    states: dict[str, jax.Array]  # [slots + 1, ...] of each array
    slots: StateSlots
    tables: BlockTables  # of the first group, which counts the rows' tokens
    number: int = dataclasses.field(metadata={"static": True})
    config: CacheConfig = dataclasses.field(metadata={"static": True})

    __repr__ = describe_state_layer

    @property
    def layer_config(self) -> LayerConfig:
        """The config of the layer."""
        return self.config.layers[self.number]

    @property
    def rows(self) -> int:
        """Rows of the cache, S in shapes."""
        return self.config.max_seqs
