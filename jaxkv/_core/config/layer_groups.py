"""Groups of layers that share a block table, what they keep of a row, and how many blocks they need."""

import functools
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from jaxkv._core.config.layer_config import LayerConfig
from jaxkv._core.config.retention import Chunk, Full, OneBlock, Window
from jaxkv._core.config.validation import show


def find_period(kinds: Sequence[Any]) -> int:
    """Returns the number of entries after which a sequence repeats; the last period may be incomplete.

    >>> find_period("aabaaba")
    3
    """
    return next((n for n in range(1, len(kinds)) if kinds[n:] == kinds[:-n]), len(kinds))


# Columns that every table may have, needed or not: 64 cost nothing, and rows of short caches then never slide. A table
# whose rows do not slide may have FEW_ENTRIES entries in all.
FEW_COLUMNS, FEW_ENTRIES = 64, 2**15


class Groups:
    """The layer groups of a `CacheConfig`: layers with the same window or chunk, which share a block table.

    A layer that evicts is a group of its own.
    """

    # Fields of `CacheConfig`, which inherits this class.
    layers: tuple[LayerConfig, ...]
    dtype: Any
    max_seqs: int
    max_seq_len: int
    block_size: int
    group_blocks: Sequence[int]
    layout: Literal["paged", "contiguous"]
    stacked: bool
    snapshot_every: int | None
    residual_length: int | None
    # The argument by which the caller said how many blocks there are: errors ask for more of it. It is no field: equal
    # configs may differ in it.
    size_argument: str

    @property
    def contiguous(self) -> bool:
        """Whether every row has one block of its own for all its tokens."""
        return self.layout == "contiguous"

    @property
    def num_layers(self) -> int:
        """Layers of the model, recurrent ones included; L in shapes. Residual layers follow them in `layers`."""
        return sum(not layer.is_residual for layer in self.layers)

    @property
    def is_uniform(self) -> bool:
        """Whether all layers of the model are equal."""
        return len(set(self.layers[: self.num_layers])) == 1

    @property
    def max_blocks_per_seq(self) -> int:
        """Maximum blocks of a row in layers that keep all tokens."""
        return -(-self.max_seq_len // self.block_size)

    @functools.cached_property
    def is_endless(self) -> bool:
        """Whether rows may grow beyond `max_seq_len`, since no layer keeps all of their tokens."""
        pairs = zip(self.group_visible_tokens, self.group_evicts, strict=True)
        return not self.contiguous and all(reach is not None or evict is not None for reach, evict in pairs)

    @functools.cached_property
    def table_widths(self) -> tuple[int, ...]:
        """Columns of each group's block tables, M in shapes: the blocks that a row can hold at once.

        They cover at most `max_seq_len` tokens, and at most all blocks. A row that outgrows its table slides along the
        table: see `columns`.
        """
        return tuple(map(self._table_width, range(len(self.groups))))

    def _table_width(self, group: int) -> int:
        most, columns = self.max_blocks_per_seq, max(FEW_COLUMNS, self.group_blocks[group])
        if self.group_evicts[group] is not None:
            return min(most, columns)
        if self.group_visible_tokens[group] is None:
            return min(most, max(columns, FEW_ENTRIES // self.max_seqs))
        apart = self.retentions[group].slide_columns(self.block_size)
        # The first token of an endless row may be anywhere in its block.
        return min(most + 1 + apart if self.is_endless else most, columns + apart)

    def row_places(self, group: int) -> int:
        """Returns the maximum tokens of a row that a group's layers hold at once, if rows do not slide."""
        return min(self.max_seq_len, self.table_widths[group] * self.block_size)

    @functools.cached_property
    def group_units(self) -> tuple[int, ...]:
        """Number of blocks that a row of each group slides by."""
        return tuple(kept.slide_blocks(self.block_size) for kept in self.retentions)

    @functools.cached_property
    def group_slides(self) -> tuple[bool, ...]:
        """Whether the rows of each group may outgrow their table, and then slide along it."""
        pairs = zip(self.group_visible_tokens, self.table_widths, strict=True)
        return tuple(reach is not None and (self.is_endless or w < self.max_blocks_per_seq) for reach, w in pairs)

    @functools.cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The layers of each group: those that store keys and values and have the same window or chunk."""
        stored = [i for i, layer in enumerate(self.layers) if layer.shares_with is None and not layer.is_recurrent]
        if self.contiguous:  # no blocks are ever freed
            return (tuple(stored),)

        def retention_key(i: int) -> tuple[Full, int | None]:  # a layer that evicts forms its own group
            retention = self.layers[i].retention
            return retention, None if retention.evict is None else i

        return tuple(
            tuple(i for i in stored if retention_key(i) == kind) for kind in dict.fromkeys(map(retention_key, stored))
        )

    @functools.cached_property
    def retentions(self) -> tuple[Full, ...]:
        """What each group's layers keep of a row."""
        return tuple(OneBlock() if self.contiguous else self.layers[i].retention for i, *_ in self.groups)

    @functools.cached_property
    def group_windows(self) -> tuple[int | None, ...]:
        """The sliding window of each group's layers; None: they have none."""
        return tuple(kept.window if isinstance(kept, Window) else None for kept in self.retentions)

    @functools.cached_property
    def group_chunks(self) -> tuple[int | None, ...]:
        """The chunk of each group's layers; None: they have none."""
        return tuple(kept.chunk if isinstance(kept, Chunk) else None for kept in self.retentions)

    @functools.cached_property
    def group_visible_tokens(self) -> tuple[int | None, ...]:
        """Maximum number of positions that a token of each group attends to, by window or chunk; None: all."""
        return tuple(kept.visible_tokens for kept in self.retentions)

    @functools.cached_property
    def group_sink_blocks(self) -> tuple[int, ...]:
        """Number of leading blocks that each group keeps of a row, besides its sliding window."""
        return tuple(kept.sink_blocks(self.block_size) for kept in self.retentions)

    @functools.cached_property
    def group_evicts(self) -> tuple[str | None, ...]:
        """How each group's layer evicts: "layer", "head", or None."""
        return tuple(kept.evict for kept in self.retentions)

    @functools.cached_property
    def group_heads(self) -> tuple[int, ...]:
        """Number of tables of a row in each group: 1, or one for each KV head if the layer evicts by heads."""
        pairs = zip(self.retentions, self.groups, strict=True)
        return tuple(kept.num_tables(self.layers[i].num_kv_heads) for kept, (i, *_) in pairs)

    def name_kept(self, group: int) -> str:
        """Returns what a group's layers keep, as a sentence says it of layers "that keep" it."""
        if self._is_residual(group):
            return f"the newest {self.residual_length} tokens (residual_length)"
        return self.retentions[group].kept

    def describe_group(self, group: int) -> str:
        """Returns which layers those of a group are, as a sentence says it after the word "layers"."""
        return f"that keep {self.name_kept(group)}" if self._is_residual(group) else str(self.retentions[group])

    def _is_residual(self, group: int) -> bool:
        return all(self.layers[i].is_residual for i in self.groups[group])

    @property
    def has_windows(self) -> bool:
        """Whether some layers free blocks that no later token attends to."""
        return any(reach is not None for reach in self.group_visible_tokens)

    @functools.cached_property
    def stacks(self) -> tuple[tuple[int, ...], ...]:
        """The layers that each pool stores: all equal layers if `stacked`, else one."""
        stored = [i for i, layer in enumerate(self.layers) if layer.shares_with is None and not layer.is_recurrent]
        if not self.stacked:
            return tuple((i,) for i in stored)
        kinds = dict.fromkeys(self.layers[i] for i in stored)
        return tuple(tuple(i for i in stored if self.layers[i] == kind) for kind in kinds)

    def stack(self, layer: int) -> tuple[int, ...]:
        """Returns the layers in the pool that a layer reads. The first of them owns the pool. A recurrent layer has
        none."""
        owner = self.owner(layer)
        return next((layers for layers in self.stacks if owner in layers), ())

    @functools.cached_property
    def recurrent_layers(self) -> tuple[int, ...]:
        """The layers that keep a state instead of keys and values."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.is_recurrent)

    @functools.cached_property
    def state_stacks(self) -> tuple[tuple[int, ...], ...]:
        """The recurrent layers whose states stand in one array each: all equal ones if `stacked`, else one."""
        if not self.stacked:
            return tuple((i,) for i in self.recurrent_layers)
        kinds = dict.fromkeys(self.layers[i] for i in self.recurrent_layers)
        return tuple(tuple(i for i in self.recurrent_layers if self.layers[i] == kind) for kind in kinds)

    def state_stack(self, layer: int) -> tuple[int, ...]:
        """Returns the layers whose states stand in one array with those of a recurrent layer. The first of them has
        it."""
        return next((layers for layers in self.state_stacks if layer in layers), ())

    @property
    def num_state_slots(self) -> int:
        """Slots for states, without the null slot: one for each row, and those of snapshots."""
        return self.max_seqs + self.num_snapshots if self.recurrent_layers else 0

    @property
    def num_snapshots(self) -> int:
        """Slots for snapshots: enough for all that rows have, as those that share blocks share these too."""
        return 0 if self.snapshot_every is None else min(self.max_seqs * self.row_snapshots, self._most_snapshots)

    @property
    def row_snapshots(self) -> int:
        """Maximum snapshots of a row."""
        return 0 if self.snapshot_every is None else self.max_seq_len // self.snapshot_every

    @property
    def _most_snapshots(self) -> int:
        assert self.snapshot_every is not None
        return max(self.group_blocks) * self.block_size // self.snapshot_every

    def group_stacks(self, group: int) -> tuple[tuple[int, ...], ...]:
        """Returns the stacks of a group's layers."""
        return tuple(layers for layers in self.stacks if layers[0] in self.groups[group])

    @functools.cached_property
    def period(self) -> int:
        """Number of the model's layers after which their sequence repeats; the last period may be incomplete."""
        return find_period(self.layers[: self.num_layers])

    @functools.cached_property
    def residual_layers(self) -> dict[int, int]:
        """Of each layer that has a residual layer, the index of that: the layer that holds its newest tokens."""
        given = self.layers[: self.num_layers]
        quantized = (i for i, layer in enumerate(given) if layer.keeps_quantized(self.dtype))
        return dict(zip(quantized, range(self.num_layers, len(self.layers)), strict=False))

    def residual_layer(self, layer: int) -> int | None:
        """Returns the layer that holds the newest tokens of what a layer reads; None: there is none."""
        return self.residual_layers.get(self.owner(layer))

    def name_layer(self, layer: int) -> str:
        """Returns the name of a layer in a sentence: a residual layer goes by the one whose newest tokens it holds."""
        named = next((i for i, residual in self.residual_layers.items() if residual == layer), None)
        return f"layer {layer}" if named is None else f"the residual layer of layer {named}"

    def owner(self, layer: int) -> int:
        """Returns the layer whose keys and values a layer reads: itself, or `shares_with`."""
        shared = self.layer_config(layer).shares_with
        return layer if shared is None else shared

    def group(self, layer: int) -> int:
        """Returns the group of a layer. Raises ValueError for a recurrent layer, which has no blocks."""
        owner = self.owner(layer)
        if self.layers[owner].is_recurrent:
            raise ValueError(
                f"Layer {layer} is one {self.layers[owner].retention}, without keys and values: take it to "
                "read_states, write_states, causal_conv, gated_delta_rule or state_space."
            )
        return next(g for g, layers in enumerate(self.groups) if owner in layers)

    def layer_config(self, layer: int) -> LayerConfig:
        """Returns the config of one layer. Raises IndexError, also for a negative index."""
        if isinstance(layer, bool) or not isinstance(layer, int | np.integer) or not 0 <= layer < len(self.layers):
            raise IndexError(f"layer must be an integer from 0 to {self.num_layers - 1}, not {show(layer)}.")
        return self.layers[layer]

    def first_retained_block(self, group: int, length: Any) -> Any:
        """Returns the first block that a group keeps, behind its leading ones, for the next token of a row of `length`
        tokens (int or array)."""
        return self.retentions[group].first_retained_block(length, self.block_size)

    def retained_blocks(self, group: int, length: Any) -> tuple[Any, Any]:
        """Returns the number of leading blocks that a group keeps for the next token of a row, and the first block
        behind them that it keeps."""
        first = self.first_retained_block(group, length)
        return np.minimum(self.group_sink_blocks[group], first), first

    def first_position(self, group: int, length: Any) -> Any:
        """Returns the first position that a row's next token attends to; at most the row's last position."""
        return self.retentions[group].first_visible_position(length)

    def row_blocks(self, group: int, length: int) -> int:
        """Returns the maximum blocks of a group that a row holds while it grows to `length` tokens one by one."""
        blocks = -(-length // self.block_size) * self.group_heads[group]
        slots = self.retentions[group].row_slots(self.block_size)
        return blocks if slots is None else min(blocks, (slots + 1) // self.block_size + self.group_sink_blocks[group])

    def window_blocks(self, kept: Full, step_tokens: int | None = None) -> int:
        """Returns an upper bound on the blocks held by all rows of a group whose layers keep a window or a chunk, for a
        step that adds `step_tokens` tokens."""
        most = self.max_seqs * self.max_blocks_per_seq
        if step_tokens is None:
            return most
        slots, sink_blocks = kept.row_slots(self.block_size), kept.sink_blocks(self.block_size)
        assert slots is not None
        return min(most, (self.max_seqs * slots + step_tokens) // self.block_size + self.max_seqs * sink_blocks)

    @property
    def _widest(self) -> int:
        """The group with the longest context."""
        return max(range(len(self.groups)), key=lambda g: self.group_visible_tokens[g] or float("inf"))
