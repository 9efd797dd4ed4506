"""Which layers share a block table, what of a row they keep, and how many blocks that takes."""

import functools
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._core.config.layer_config import LayerConfig


def period_of(kinds: Sequence[Any]) -> int:
    """After how many entries a sequence repeats itself; the last time may end early.

    >>> period_of("aabaaba")
    3
    """
    return next((n for n in range(1, len(kinds)) if kinds[n:] == kinds[:-n]), len(kinds))


# Columns that every table may have, needed or not: so few cost nothing, and rows of short caches never slide. Tables
# whose rows do not slide may have so many entries in all.
FEW_COLUMNS, FEW_ENTRIES = 64, 2**15


class Groups:
    """The part of `CacheConfig` that knows groups: layers with the same window or chunk, which share a table.

    A layer that evicts is a group of its own.
    """

    # Of `CacheConfig`, which is built on this class.
    layers: tuple[LayerConfig, ...]
    max_seqs: int
    max_seq_len: int
    block_size: int
    group_blocks: Sequence[int]
    layout: Literal["paged", "contiguous"]
    stacked: bool

    @property
    def contiguous(self) -> bool:
        """Whether every row has one block of its own for all its tokens."""
        return self.layout == "contiguous"

    @property
    def num_layers(self) -> int:
        """Attention layers; L in shapes."""
        return len(self.layers)

    @property
    def is_uniform(self) -> bool:
        """Whether all layers are alike."""
        return len(set(self.layers)) == 1

    @property
    def max_blocks_per_seq(self) -> int:
        """The most blocks of a row, of layers that keep everything."""
        return -(-self.max_seq_len // self.block_size)

    @functools.cached_property
    def is_endless(self) -> bool:
        """Whether rows may go on beyond `max_seq_len`, for no layer keeps all of their tokens."""
        pairs = zip(self.group_reaches, self.group_evicts, strict=True)
        return not self.contiguous and all(reach is not None or evict is not None for reach, evict in pairs)

    @functools.cached_property
    def table_widths(self) -> tuple[int, ...]:
        """For each group the columns of its block tables, M in shapes: what a row can hold at once.

        That is no more than `max_seq_len` tokens, and no more blocks than there are. A row that outgrows its table
        slides along it: see `columns`.
        """
        return tuple(map(self._table_width, range(len(self.groups))))

    def _table_width(self, group: int) -> int:
        most, held = self.max_blocks_per_seq, max(FEW_COLUMNS, self.group_blocks[group])
        if self.group_evicts[group] is not None:
            return min(most, held)
        if self.group_reaches[group] is None:
            return min(most, max(held, FEW_ENTRIES // self.max_seqs))
        apart = self.group_sinks[group] + self.group_units[group] - 1
        # Tokens of an endless row may begin anywhere in a block.
        return min(most + 1 + apart if self.is_endless else most, held + apart)

    def row_places(self, group: int) -> int:
        """The most tokens of a row that a group's layers hold at once, in layers whose rows do not slide."""
        return min(self.max_seq_len, self.table_widths[group] * self.block_size)

    @functools.cached_property
    def group_units(self) -> tuple[int, ...]:
        """For each group how many blocks at a time a row slides by: whole chunks, so that they begin where they did."""
        chunks = (1 if chunk is None else chunk for chunk in self.group_chunks)
        return tuple(math.lcm(chunk, self.block_size) // self.block_size for chunk in chunks)

    @functools.cached_property
    def group_slides(self) -> tuple[bool, ...]:
        """For each group whether its rows may outgrow their table's columns, and slide along it."""
        pairs = zip(self.group_reaches, self.table_widths, strict=True)
        return tuple(reach is not None and (self.is_endless or w < self.max_blocks_per_seq) for reach, w in pairs)

    @functools.cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The layers that share a block table, group by group: those that store, and have the same window
        or chunk."""
        stored = [i for i, layer in enumerate(self.layers) if layer.shares_with is None]
        if self.contiguous:  # nothing is ever given back
            return (tuple(stored),)

        def kept(i: int) -> tuple[int | None, ...]:  # a layer that evicts keeps what no other one does
            layer = self.layers[i]
            return layer.window, layer.chunk, layer.sink_tokens, None if layer.evict is None else i

        return tuple(tuple(i for i in stored if kept(i) == kind) for kind in dict.fromkeys(map(kept, stored)))

    @functools.cached_property
    def group_windows(self) -> tuple[int | None, ...]:
        """For each group the window of its layers; None: they keep everything."""
        return tuple(None if self.contiguous else self.layers[layers[0]].window for layers in self.groups)

    @functools.cached_property
    def group_sights(self) -> tuple[str, ...]:
        """For each group what its layers keep, in words."""
        return tuple("whole" if self.contiguous else self.layers[layers[0]].sight for layers in self.groups)

    @functools.cached_property
    def group_reaches(self) -> tuple[int | None, ...]:
        """For each group how many last positions a token sees at the most, by window or chunk; None: all."""
        return tuple(None if self.contiguous else self.layers[layers[0]].reach for layers in self.groups)

    @functools.cached_property
    def group_chunks(self) -> tuple[int | None, ...]:
        """For each group the chunk of its layers; None: they have none, or keep everything all the same."""
        return tuple(None if self.contiguous else self.layers[layers[0]].chunk for layers in self.groups)

    @functools.cached_property
    def group_sinks(self) -> tuple[int, ...]:
        """For each group how many first blocks of a row stay, whatever falls out of its window."""
        first = (0 if self.contiguous else self.layers[layers[0]].sink_tokens or 0 for layers in self.groups)
        return tuple(-(-tokens // self.block_size) for tokens in first)

    @functools.cached_property
    def group_evicts(self) -> tuple[str | None, ...]:
        """For each group whether its layer gives tokens back: "layer", "head", or None."""
        return tuple(self.layers[layers[0]].evict for layers in self.groups)

    @functools.cached_property
    def group_heads(self) -> tuple[int, ...]:
        """For each group how many tables a row has: one, or one for each KV head of a layer that evicts by heads."""
        heads = (self.layers[layers[0]].num_kv_heads for layers in self.groups)
        return tuple(n if evict == "head" else 1 for n, evict in zip(heads, self.group_evicts, strict=True))

    @property
    def has_windows(self) -> bool:
        """Whether some layers give back what no next token sees."""
        return any(reach is not None for reach in self.group_reaches)

    @functools.cached_property
    def stacks(self) -> tuple[tuple[int, ...], ...]:
        """The layers that lie in one pool, pool by pool: all that are alike if `stacked`, else each by itself."""
        stored = [i for i, layer in enumerate(self.layers) if layer.shares_with is None]
        if not self.stacked:
            return tuple((i,) for i in stored)
        kinds = dict.fromkeys(self.layers[i] for i in stored)
        return tuple(tuple(i for i in stored if self.layers[i] == kind) for kind in kinds)

    def stack(self, layer: int) -> tuple[int, ...]:
        """The layers that lie in one pool with the one that a layer reads. The first one's pool is that pool."""
        owner = self.owner(layer)
        return next(layers for layers in self.stacks if owner in layers)

    def group_stacks(self, group: int) -> tuple[tuple[int, ...], ...]:
        """The stacks of a group's layers."""
        return tuple(layers for layers in self.stacks if layers[0] in self.groups[group])

    @functools.cached_property
    def period(self) -> int:
        """After how many layers their sequence repeats itself; the last time it may end early."""
        return period_of(self.layers)

    def owner(self, layer: int) -> int:
        """The layer whose keys and values a layer reads: itself, but for `shares_with`."""
        shared = self.layer_config(layer).shares_with
        return layer if shared is None else shared

    def group(self, layer: int) -> int:
        """The group of a layer."""
        owner = self.owner(layer)
        return next(g for g, layers in enumerate(self.groups) if owner in layers)

    def layer_config(self, layer: int) -> LayerConfig:
        """The config of one layer. Raises IndexError, also for a negative index."""
        if isinstance(layer, bool) or not isinstance(layer, int | np.integer) or not 0 <= layer < self.num_layers:
            raise IndexError(f"layer must be an integer from 0 to {self.num_layers - 1}, not {layer!r}.")
        return self.layers[layer]

    def first_seen(self, group: int, length: Any) -> Any:
        """The first block that a row's next token sees in a group's layers, for `length` tokens: an int or an array.

        The row's last block counts as seen even where it is not: it tells where the next one goes.
        """
        return self.first_position(group, length) // self.block_size

    def first_position(self, group: int, length: Any) -> Any:
        """The same position by position: the first that the next token sees, or the row's last."""
        window, chunk = self.group_windows[group], self.group_chunks[group]
        maths = jnp if isinstance(length, jax.Array) else np  # the host's stay on the host
        if chunk is not None:
            unseen = maths.minimum(length // chunk * chunk, length - 1)
        else:
            unseen = length * 0 if window is None else length - max(window, 2) + 1
        return maths.maximum(unseen, 0)

    def row_blocks(self, group: int, length: int) -> int:
        """The most blocks that a row of up to `length` tokens holds in a group's layers, growing one by one."""
        reach, blocks = self.group_reaches[group], -(-length // self.block_size) * self.group_heads[group]
        if reach is None:
            return blocks
        return min(blocks, (self._places_of(reach) + 1) // self.block_size + self.group_sinks[group])

    def window_blocks(self, window: int, step_tokens: int | None = None, sinks: int = 0) -> int:
        """The most blocks that all rows together hold of a window behind so many `sinks`, first blocks that stay,
        `step_tokens` being added to them at once."""
        most = self.max_seqs * self.max_blocks_per_seq
        if step_tokens is None:
            return most
        places = self.max_seqs * self._places_of(window) + step_tokens
        return min(most, places // self.block_size + self.max_seqs * sinks)

    def _places_of(self, window: int) -> int:
        """The most places in the blocks of a window: `window - 1` tokens that the next one sees, `block_size - 1` more
        in the first of their blocks, and as many left in the last."""
        return max(window, 2) + 2 * self.block_size - 3

    @property
    def _widest(self) -> int:
        """The group that sees furthest."""
        return max(range(len(self.groups)), key=lambda g: self.group_reaches[g] or float("inf"))
