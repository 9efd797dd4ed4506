"""The state of a cache: immutable pytrees of arrays. Fields and shapes, no algorithms.

S rows, M columns of a block table, K KV heads, D head_dim, N = num_blocks.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxkv._core.config.cache_config import CacheConfig
from jaxkv._core.config.layer_config import LayerConfig
from jaxkv._core.state.state_repr import check_living, describe_layer, describe_pool, describe_tables
from jaxkv._core.state.static_fields import register_export

# Block 0 is never allocated and never written: unused table entries point at it, so that any fetch is in bounds.
NULL_BLOCK = 0

# In `BlockTables.wanted`, instead of a length: the request was invalid, or the step was planned for other tables.
SENSELESS, STALE = -1, -2

# In `BlockTables.needed`, where no block would help: the tokens that a row should roll back to have been freed, or the
# row would exceed the maximum tokens.
GONE, TOO_LONG = -1, -2


@register_export
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class BlockTables:
    """The blocks that each row holds, and the free ones. Shared by the layers of a group.

    The free blocks are the last `num_free` entries of `free_list`, the next one to be taken first. The entries before
    them are stale.

    If a layer's heads have blocks of their own, divided over P devices, blocks are in P shards. Each shard begins with
    its own null block, but tables use only the first null block. Head rows in the p-th of P equal runs have blocks of
    the p-th shard. `refcounts` and `kept` are then i32[N + P], `free_list` concatenates the shards' lists, and
    `num_free` i32[P] counts the free blocks of each shard.
    """

    # Logical block -> physical block. A row's entries are consecutive; null blocks follow, and precede them where
    # blocks have left a sliding window.
    tables: jax.Array  # i32[S, M]
    lengths: jax.Array  # i32[S]: tokens of each row, the current step's included
    new: jax.Array  # i32[S]: the current step's tokens among them
    offsets: jax.Array  # i32[S]: start of each row's tokens in a packed step
    refcounts: jax.Array  # i32[N + 1]: holders of a block, rows and index; 1 if free, as its next owner needs
    # i32[N + 1]: the label of the prefix that a `PrefixCache` keeps in the block, even if a row holds the block too; 0:
    # none. The labels belong to the cache, so that an index never mistakes a block for its earlier or later content.
    kept: jax.Array
    free_list: jax.Array  # i32[N]
    num_free: jax.Array  # i32[], or i32[P]
    peak: jax.Array  # i32[]: maximum number of blocks ever in use at once
    failed: jax.Array  # bool[S]: a request of the row could not be met; cleared by `free`
    wanted: jax.Array  # i32[S]: the length that the request asked for, or SENSELESS, or STALE
    needed: jax.Array  # i32[S]: the blocks that the request needed, or GONE, or TOO_LONG
    # For layers with a window or chunks whose rows may outgrow their table, i32[S]: number of a row's blocks that left
    # it. After the leading blocks that stay, column c is the row's block c + skipped. See `columns`.
    skipped: jax.Array | None = None
    # For a layer that evicts. If it evicts by heads, S is K * S in all shapes here; see `head_rows`.
    evicted: jax.Array | None = None  # i32[S]: tokens that were evicted; `lengths` counts the tokens held
    thinned: jax.Array | None = None  # i32[S]: number of leading held tokens among which some were evicted

    __repr__ = describe_tables

    @property
    def num_blocks_per_row(self) -> jax.Array:
        """`i32[S]`: blocks in each row's table, reserved ones included."""
        return jnp.sum(self.tables != NULL_BLOCK, axis=1, dtype=jnp.int32)

    @property
    def end(self) -> jax.Array:
        """`i32[S]`: the column after the last block in each row's table."""
        column = jnp.arange(1, self.tables.shape[1] + 1, dtype=jnp.int32)
        return jnp.max(jnp.where(self.tables != NULL_BLOCK, column, 0), axis=1, initial=0)

    @property
    def seen(self) -> jax.Array:
        """`i32[S]`: tokens that each row was given, which is the position of the next one."""
        return self.lengths if self.evicted is None else self.lengths + self.evicted

    @property
    def num_blocks(self) -> int:
        return self.free_list.shape[0]

    @property
    def num_shards(self) -> int:
        """Number of shards of the blocks, P."""
        return self.num_free.shape[0] if self.num_free.ndim else 1

    @property
    def num_used(self) -> jax.Array:
        """`i32[]`: blocks that are not free."""
        return self.num_blocks - (self.num_free if self.num_shards == 1 else self.num_free.sum())


@register_export
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class IndexKeys:
    """The index keys of one layer, by which queries choose tokens: one for each slot of its blocks, of no head."""

    keys: jax.Array  # [N + 1, 1, 1, block_size, E]: axes as in `Pool.kv`
    scale: jax.Array | None = None  # if quantized, f32[N + 1, 1, 1, block_size]


@register_export
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Pool:
    """The blocks of one layer."""

    # [N + 1, 2, K, block_size, D]: keys at 0, values at 1; for a latent layer [N + 1, 1, 1, block_size, D]; if packed
    # [N + 1, 2, K / 2, block_size, 2 D] or [N + 1, 1, K, block_size, 2 D]: see `kv_packing`.
    kv: jax.Array
    # If quantized, [N + 1, 2, K, block_size]; one more axis of ceil(D / group) in four bits, of 2 for latent layers.
    scale: jax.Array | None = None
    # For a layer with bounds, [N + 1, 2, K, D]: minimum and maximum entries of each block's keys; wider where tokens
    # were dropped. See `key_bounds`.
    bounds: jax.Array | None = None
    # For a layer with `index_dim`: whole on every device of the heads' axis.
    index: IndexKeys | None = None
    # The mesh axis that heads are divided over; the mesh itself is part of the arrays' types. None: one device.
    heads: str | None = dataclasses.field(default=None, metadata={"static": True})
    # The mesh axis that the tokens of every block are divided over, in equal runs. None: one device.
    context: str | None = dataclasses.field(default=None, metadata={"static": True})
    # Number of devices of the heads' axis that the blocks are divided among, each with its own null block and blocks
    # of its own heads: see `BlockTables`. 1: a block holds all heads, or each device has all blocks.
    num_shards: int = dataclasses.field(default=1, metadata={"static": True})

    __repr__ = describe_pool

    @property
    def k(self) -> jax.Array:
        """Keys as stored; whole pool rows where keys and values are packed."""
        return self.kv[:, 0]

    @property
    def v(self) -> jax.Array:
        """Values as stored; whole pool rows where packed, or latent, whose first entries are the values."""
        return self.kv[:, -1]

    @classmethod
    def bundle(
        cls, kv: Any, scale: Any = None, bounds: Any = None, index: Any = None, index_scale: Any = None, **axes: Any
    ) -> "Pool":
        """Makes a pool of its arrays, those that it has, in the order of `arrays`."""
        return cls(kv, scale, bounds, None if index is None else IndexKeys(index, index_scale), **axes)

    @property
    def arrays(self) -> tuple[Any, ...]:
        """The arrays that a pool may have: numbers, scales, bounds, index keys and their scales. None: it has none."""
        index = (None, None) if self.index is None else (self.index.keys, self.index.scale)
        return (self.kv, self.scale, self.bounds, *index)

    @property
    def tokens(self) -> "Pool":
        """The per-token arrays of the pool: all but the bounds of blocks."""
        return dataclasses.replace(self, bounds=None)

    @property
    def heads_alone(self) -> "Pool":
        """The arrays of keys and values alone, without bounds and index keys."""
        return dataclasses.replace(self, bounds=None, index=None)

    def like(self, other: "Pool") -> "Pool":
        """Returns these blocks with the mesh axes of another pool."""
        return dataclasses.replace(self, heads=other.heads, context=other.context, num_shards=other.num_shards)


@register_export
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Layer:
    """One layer as attention takes it: its pool, and the tables of its group. Made by `cache.layers`.

    Each block of a model takes its layer and returns the layer updated; `cache.with_layers` puts the layers back.
    Layers share their tables, so donate the cache, not its layers: no buffer can be donated twice.
    """

    NO_CACHE: ClassVar[str] = (
        "cache must be the whole cache, not one of its layers: cache.with_layer and cache.with_layers put layers back."
    )

    pool: Pool  # None in a list of layers if the layer reads another's pool, whose writes it would miss
    tables: BlockTables
    place: jax.Array | None = None  # i32[]: index of the layer in its stack's pool; None: the pool has one layer
    residual: "Layer | None" = None  # the layer that holds the newest tokens of this one, which is quantized
    number: int = dataclasses.field(metadata={"static": True})  # its index; in a stack, that of an equal layer
    config: CacheConfig = dataclasses.field(metadata={"static": True})

    __repr__ = describe_layer

    @property
    def layer_config(self) -> LayerConfig:
        """The config of the layer."""
        return self.config.layers[self.number]

    @property
    def group(self) -> int:
        """The layer's group, whose tables these are."""
        return self.config.group(self.number)

    @property
    def rows(self) -> int:
        """Rows of the cache, S in shapes."""
        return self.config.max_seqs

    @property
    def held(self) -> jax.Array:
        """`i32[S]`: tokens that the layer holds of each row, with `compress_ratio` entries; `i32[S, K]` if the layer
        evicts by heads."""
        check_living("layer", self.tables.lengths)
        heads = self.config.group_heads[self.group]
        lengths = self.layer_config.count_entries(self.tables.lengths)
        return lengths if self.config.group_evicts[self.group] != "head" else lengths.reshape(heads, -1).T

    @property
    def blocks(self) -> jax.Array:
        """`i32[S, M]`: indices of the layer's blocks in its pool."""
        if self.place is None:
            return self.tables.tables
        return self.tables.tables + self.place * (self.tables.num_blocks + 1)
