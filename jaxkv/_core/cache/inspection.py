"""Ways to read a cache: dense copies, single tokens, sizes, and its `repr`.

Sizes are Python numbers outside `jit` and traced arrays inside.
"""

import dataclasses
import functools
import html
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxkv._core.cache.block_map_html import block_map
from jaxkv._core.cache.pool_access import dense, dense_pair, read_tokens
from jaxkv._core.cache.row_checks import check_head, check_row, read_period
from jaxkv._core.config.cache_config import CacheConfig
from jaxkv._core.config.layer_config import LayerConfig
from jaxkv._core.config.validation import integer, show
from jaxkv._core.state.arguments import cast_int32, read_numbers
from jaxkv._core.state.columns import columns_of, logical_entries
from jaxkv._core.state.head_rows import row_tables
from jaxkv._core.state.sharding import BLOCK_AXIS, KV, POOL, WHOLE, head_spec, replicate, run_on_shards
from jaxkv._core.state.state import BlockTables, Layer, Pool
from jaxkv._core.state.state_repr import DONATED, check_living, is_donated
from jaxkv._core.state.state_slots import StateLayer, StateSlots


class Views:
    """The reading methods of a `Cache`."""

    # Fields of `Cache`, which inherits this class.
    tables: tuple[BlockTables, ...]
    pools: tuple[Pool | None, ...]
    state_slots: StateSlots | None
    states: tuple[dict[str, jax.Array] | None, ...]
    config: CacheConfig

    def layer(self, layer: Any) -> Layer:
        """Returns one layer's pool and tables as a pytree of their own. See `layers`."""
        number, place = self._place(layer)
        found = self._find_layer(number, place)
        if (residual := self.config.residual_layer(number)) is None:
            return found
        own = self._find_layer(residual, self._place(layer, self.config.residual_layers)[1])
        return dataclasses.replace(found, residual=own)

    def _find_layer(self, number: int, place: Any) -> Layer:
        tables = self.tables[self.config.group(number)]
        pool = self.pools[self.config.stack(number)[0]]
        assert pool is not None
        return Layer(pool=pool, tables=tables, place=place, number=number, config=self.config)

    def state_layer(self, layer: Any) -> StateLayer:
        """Returns a recurrent layer's states and slots as a pytree of their own. Raises ValueError for other layers."""
        number, place = self._place(layer)
        found = self.config.layers[number]
        if not found.is_recurrent:
            raise ValueError(
                f"Layer {layer} is an attention layer, {found.retention}, and keeps no state: take it to attention, "
                "write or attend."
            )
        states, slots = self.states[self.config.state_stack(number)[0]], self.state_slots
        assert states is not None and slots is not None
        return StateLayer(
            states=states,
            slots=slots,
            tables=self.tables[0],
            place=place,
            number=number,
            config=self.config,
            heads=next((pool.heads for pool in self.pools if pool is not None), None),
        )

    def pool(self, layer: int) -> Pool:
        """Returns the pool that a layer reads: its own, or that of the layer it shares with; its slice of a stack."""
        found, stack = self.layer(layer), self.config.stack(layer)
        if found.place is None:
            return found.pool
        size = found.pool.kv.shape[0] // len(stack)
        start = stack.index(self.config.owner(layer)) * size
        return jax.tree.map(lambda x: x[start : start + size], found.pool)

    def _place(self, layer: Any, held_by: Mapping[int, int] | None = None) -> tuple[int, Any]:
        """Returns the index of an equal layer, and the layer's index in its stack; None: its pool has one layer.
        With `held_by`, the index is that of the layer which it names."""
        config, held_by = self.config, held_by or {}
        if not isinstance(layer, tuple | jax.Array):
            owner = config.owner(layer)  # raises for an index out of range, negative ones too
            holder = held_by.get(owner, owner)
            return int(layer), jnp.int32(self._stack(holder).index(holder)) if config.stacked else None
        if not config.stacked:
            raise ValueError(
                f"layer must be an integer for this cache, not {show(layer)}. To scan over layers, make the cache "
                "with CacheConfig(stacked=True), which stores equal layers in one pool. An engine does so for a model "
                "with scan = True, or jaxkv.linen.model(..., scan=True)."
            )
        if not isinstance(layer, tuple):
            if config.period != 1:
                raise ValueError(
                    f"layer cannot be one traced number, for the layers of this cache are not all equal: they repeat "
                    f"with a period of {config.period}. Scan over the repeats, and give layer=(index in the pattern, "
                    "number of the repeat), such as layer=(1, i) in a scan over i; the first must be a Python int."
                )
            layer = (0, layer)
        number = integer("layer[0], the index in the pattern,", layer[0], least=0, most=config.period - 1)
        if config.owner(number) != number:
            raise ValueError(f"Layer {number} shares another's keys and values: its index must be a number.")
        stack, holders = self._stack(held_by.get(number, number)), [held_by.get(i, i) for i in range(config.num_layers)]
        index = read_period(layer[1], -(-(config.num_layers - number) // config.period)) * config.period + number
        places = np.array([stack.index(i) if i in stack else 0 for i in holders], np.int32)
        return number, jnp.asarray(places).at[index].get(mode="clip", wrap_negative_indices=False)

    def _stack(self, layer: int) -> tuple[int, ...]:
        """Returns the layers whose numbers stand in one array with a layer's."""
        return self.config.state_stack(layer) or self.config.stack(layer)

    def layer_config(self, layer: int) -> LayerConfig:
        """Returns the config of one layer. Raises IndexError for an index out of range."""
        return self.config.layer_config(layer)

    @property
    def is_uniform(self) -> bool:
        """Whether all layers are equal."""
        return self.config.is_uniform

    @property
    def _living_tables(self) -> tuple[BlockTables, ...]:
        """The tables, to read from. Raises ValueError if the cache was donated."""
        check_living("cache", self.tables[0].lengths)
        return self.tables

    # The values of rows are equal in every group.

    @property
    def lengths(self) -> jax.Array:
        """`i32[S]`: tokens of each row, this step's included; `lengths - new` before the step.

        Evicted tokens count; `layers[i].held` counts the tokens that a layer holds.
        """
        return row_tables(self._living_tables[0], self.config).lengths

    @property
    def new(self) -> jax.Array:
        """`i32[S]`: this step's tokens among `lengths`; 0 after `evict` has dropped tokens of the row in any layer."""
        first, *others = self._living_tables
        new = row_tables(first, self.config).new
        for tables in (tables for tables in others if tables.evicted is not None):
            new = jnp.minimum(new, row_tables(tables, self.config).new)
        return new

    @property
    def failed(self) -> jax.Array:
        """`bool[S]`: rows with a request that could not be met; `jaxkv.check` says why."""
        return row_tables(self._living_tables[0], self.config).failed

    @property
    def num_layers(self) -> int:
        """Layers, recurrent ones included."""
        return self.config.num_layers

    # Sizes, by the names of the systems whose contracts the cache meets. Layers of a group count as one.

    @property
    def num_blocks(self) -> int:
        """Blocks of all groups together, without null blocks."""
        return sum(tables.num_blocks for tables in self.tables)

    @property
    def blocks_in_use(self) -> Any:
        """Blocks of all groups that a row or a `PrefixCache` holds, partly used and reserved ones included."""
        return _number(sum(tables.num_used for tables in self._living_tables))

    @property
    def capacity(self) -> int:
        """Slots of the group that has most. One row takes at most `max_seq_length`."""
        heads = self.config.group_heads
        return (
            max(tables.num_blocks // n for tables, n in zip(self.tables, heads, strict=True)) * self.config.block_size
        )

    @property
    def max_tokens(self) -> int:
        """Maximum tokens of all rows, as given by the config, not rounded up to whole blocks."""
        return self.config.max_tokens

    @property
    def num_tokens(self) -> Any:
        """Tokens of all rows together; a token in a shared block counts in every row."""
        return _number(jnp.sum(self.lengths))

    @property
    def is_empty(self) -> Any:
        """Whether no row holds a token."""
        return _number(jnp.all(self.lengths == 0))

    @property
    def max_seq_length(self) -> int:
        """Maximum tokens of one row."""
        return self.config.max_seq_len

    @property
    def max_prompt_length(self) -> Any:
        """Maximum tokens that this step adds to one row."""
        return _number(jnp.max(self.new))

    @property
    def max_context_length(self) -> Any:
        """Maximum tokens that any row holds."""
        return _number(jnp.max(self.lengths))

    def cache_length(self, row: int) -> Any:
        """Returns the tokens that a row held before this step."""
        check_row(self, row)
        return _number(self.lengths[row] - self.new[row])

    @property
    def empty_cache(self) -> Any:
        """Whether every row was empty before this step."""
        return _number(jnp.all(self.lengths == self.new))

    @property
    def bytes(self) -> int:
        """Bytes of all pools, those of states too."""
        leaves = (
            leaf
            for leaf in jax.tree.leaves((self.pools, self.states))
            if hasattr(leaf, "dtype") and hasattr(leaf, "shape")
        )
        return sum(math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize for leaf in leaves)

    # Contents.

    def slots(self, row: Any, position: Any, *, layer: int = 0) -> tuple[jax.Array, jax.Array]:
        """Returns the physical block and offset of tokens; the null block where there is none. `row` and `position`
        broadcast. In a layer with `compress_ratio` positions count entries.

        In a layer that evicts, positions count the tokens held. If it evicts by heads, the result has one more axis at
        the end, with each head's own slot.
        """
        check_living("cache", self.tables[0].lengths)
        found = self.layer(layer)
        evict = self.config.group_evicts[found.group]
        row, position = (cast_int32(read_numbers(name, x)) for name, x in {"row": row, "position": position}.items())
        if evict == "head":
            row, position = (
                jnp.stack([x] * found.layer_config.num_kv_heads, -1) for x in jnp.broadcast_arrays(row, position)
            )
            head = jax.lax.broadcasted_iota(jnp.int32, row.shape, row.ndim - 1)
            row = jnp.where((row >= 0) & (row < found.rows), row + head * found.rows, -1)
        return find_slots(found, row, position)

    def read(self, layer: int, row: Any, position: Any) -> tuple[jax.Array, jax.Array]:
        """Returns keys and values `[..., K, D]` of tokens; 0 where there is none. `row` and `position` broadcast.

        The result has only tokens that the row holds, never those of a block's earlier owner.
        """
        block, offset = self.slots(row, position, layer=layer)
        out = head_spec(block.ndim)
        k, v = self._read(read_tokens, layer, (block, offset), (out, out))
        if self._evicts_by_heads(layer):  # blocks of one head
            k, v = k[..., 0, :], v[..., 0, :]
        return k, v

    def _read(self, function: Any, layer: int, arrays: tuple, out_specs: Any) -> Any:
        """Runs a function of `pool_access` on a layer's pool."""
        pool = self.pool(layer)
        specs = (POOL, *[WHOLE] * len(arrays))
        return run_on_shards(pool, function, (pool, *arrays), specs, out_specs, config=self.config, layer=layer)

    def token(self, row: int, position: int, layer: int = 0) -> tuple[jax.Array, jax.Array]:
        """Returns keys and values `[K, D]` of one token. A missing one raises IndexError; inside `jit` it is zeros."""
        check_row(self, row)
        length = self.layer(layer).held[row].max()
        known = not any(isinstance(x, jax.core.Tracer) for x in (length, position))
        if known and not 0 <= integer("position", position, least=None, most=None) < int(length):
            raise IndexError(f"Row {row} holds {int(length)} tokens, so it has no token at position {position}.")
        block, _ = self.slots(row, position, layer=layer)
        if not isinstance(block, jax.core.Tracer) and not block.any():
            kept = self.layer_config(self.config.owner(layer)).retention
            raise IndexError(f"Layer {layer}, {kept}, has freed the token of row {row} at position {position}.")
        return self.read(layer, row, position)

    def load(self, layer: int, row: int, head: int, position: int) -> tuple[jax.Array, jax.Array]:
        """Returns the key and the value `[D]` of one head of one token."""
        check_head(self, layer, head)
        k, v = self.token(row, position, layer)
        return replicate(k)[head], replicate(v)[head]

    def combined(self, layer: int) -> jax.Array:
        """Returns a layer as a dense array `[S, 2, K, max_seq_len, D]`; 0 past each row's length and before its window.
        For a latent layer `[S, 1, 1, max_seq_len, D]`; with `v_head_dim` `[S, 1, K, max_seq_len,
        v_head_dim + D]`, values first. A row longer than `max_seq_len` is cut to its first tokens."""
        found = self._read(dense, layer, self._logical(layer), PartitionSpec(BLOCK_AXIS, None, KV))
        return self._join(layer, found[:, :, 0], 2) if self._evicts_by_heads(layer) else found

    def separate(self, layer: int) -> tuple[jax.Array, jax.Array]:
        """Returns a layer's keys and values as two dense arrays `[S, K, max_seq_len, D]`; 0 past row lengths."""
        specs = (PartitionSpec(BLOCK_AXIS, KV), PartitionSpec(BLOCK_AXIS, KV))
        k, v = self._read(dense_pair, layer, self._logical(layer), specs)
        return (
            (self._join(layer, k[:, 0], 1), self._join(layer, v[:, 0], 1)) if self._evicts_by_heads(layer) else (k, v)
        )

    def _logical(self, layer: int) -> tuple[jax.Array, jax.Array]:
        """Returns the blocks of a layer's rows in order from the first on, and the rows' lengths."""
        check_living("cache", self.tables[0].lengths)
        found = self.layer(layer)
        tables, group = found.tables, found.group
        width, sink_blocks = self.config.max_blocks_per_seq, self.config.group_sink_blocks[group]
        entries = logical_entries(tables.tables, tables.skipped, width, sink_blocks)
        return entries, found.layer_config.count_entries(tables.lengths)

    def _evicts_by_heads(self, layer: int) -> bool:
        return self.config.group_evicts[self.config.group(layer)] == "head"

    def _join(self, layer: int, x: jax.Array, axis: int) -> jax.Array:
        """Returns `[K * S, ...]` of head rows as rows, with heads at `axis`."""
        return jnp.moveaxis(x.reshape(self.layer_config(layer).num_kv_heads, -1, *x.shape[1:]), 0, axis)

    def _repr_html_(self) -> str:
        if self._without_numbers is not None:
            return html.escape(repr(self))
        return block_map(repr(self), self.tables, self.config)

    @property
    def _without_numbers(self) -> str | None:
        """What the object is, in a word, if it is not one cache with known numbers."""
        if is_donated((self.tables, self.pools)):
            return DONATED
        numbers = (self.tables[0].num_free, self.lengths)
        if any(isinstance(x, jax.core.Tracer) or not hasattr(x, "__array__") for x in numbers):
            return "traced"
        if not all(jnp.issubdtype(x.dtype, jnp.integer) for x in numbers):
            return "a gradient"
        return None if self.lengths.ndim == 1 else f"a stack of {list(self.lengths.shape[:-1])} caches"

    def __repr__(self) -> str:
        if is_donated((self.tables, self.pools)):
            return f"Cache({DONATED})"
        size = f"{self.num_layers} layer{'s' * (self.num_layers != 1)}, {format_bytes(self.bytes)}"
        if (what := self._without_numbers) is not None:
            return f"Cache({what}, {size})"
        rows = int(jnp.sum(self.lengths > 0))
        failed = int(jnp.sum(self.failed))
        return (
            f"Cache({self.blocks_in_use} of {self.num_blocks} blocks used, {self.num_tokens} tokens in {rows} of "
            f"{self.lengths.size} rows, {f'{failed} failed, ' if failed else ''}{size})"
        )


def find_slots(layer: Layer, row: jax.Array, position: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the physical block, in one layer's pool, and the offset of what a layer's rows, or head rows, hold at
    positions; the null block where that is nothing."""
    lengths = layer.layer_config.count_entries(layer.tables.lengths)
    tables, sink_blocks = (
        dataclasses.replace(layer.tables, lengths=lengths),
        layer.config.group_sink_blocks[layer.group],
    )
    return _slots(tables, row, position, layer.config.block_slots(layer.number), sink_blocks)


@functools.partial(jax.jit, static_argnames=("block_size", "sink_blocks"))
def _slots(tables: BlockTables, row: jax.Array, position: jax.Array, block_size: int, sink_blocks: int) -> Any:
    rows, width = tables.tables.shape
    own = jnp.clip(row, 0, rows - 1)
    inside = (row >= 0) & (row < rows) & (position >= 0)
    inside &= position < tables.lengths[own]
    column = columns_of(position // block_size, None if tables.skipped is None else tables.skipped[own], sink_blocks)
    inside &= column >= 0
    block = tables.tables[own, jnp.clip(column, 0, width - 1)]
    return jnp.where(inside, block, 0), jnp.where(inside, position % block_size, 0)


def format_bytes(count: float) -> str:
    """Returns a byte count as text, such as `12.3 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.1f} {unit}" if unit != "B" else f"{count} B"
        count /= 1024
    return f"{count:.1f} TiB"


def _number(x: Any) -> Any:
    return x if isinstance(x, jax.core.Tracer) else np.asarray(x).item()
