"""The state of a cache: immutable pytrees of arrays. Fields and shapes, no algorithm.

S rows, M columns of a block table, K KV heads, D head_dim, N = num_blocks.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from jaxkv._core.config.cache_config import CacheConfig
from jaxkv._core.config.layer_config import LayerConfig
from jaxkv._core.state.static_fields import register_export

# Block 0 is never allocated and never written: unused table entries point at it, so that any fetch is in bounds.
NULL_BLOCK = 0

# In `BlockTables.wanted`: no length, for the request made no sense; or the step was planned for other tables.
SENSELESS, STALE = -1, -2

# In `BlockTables.needed`: no block would help. The tokens that a row was to go back to have been given back; or it was
# to hold more tokens than a row may.
GONE, TOO_LONG = -1, -2


@register_export
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class BlockTables:
    """Which blocks each row holds, and which are free. Shared by the layers of a group.

    The free blocks are the last `num_free` entries of `free_list`, the next one to be taken first. Whatever stands
    before them is out of date.

    Of a layer whose heads have blocks of their own, divided over P devices, blocks are in P parts, each with a null
    block of its own before it, though tables name the first one alone: lines in the p-th of P equal runs have blocks of
    the p-th part. Then `refcounts` and `kept` are i32[N + P], `free_list` is one such list behind the other, and
    `num_free` says i32[P] how many are free of each.
    """

    # Logical block -> physical block. A row's entries stand one after another, with null blocks behind them, and before
    # them for what has fallen out of a window.
    tables: jax.Array  # i32[S, M]
    lengths: jax.Array  # i32[S]: tokens of each row, the current step's included
    new: jax.Array  # i32[S]: how many of them are the current step's
    offsets: jax.Array  # i32[S]: where each row's tokens start in a packed step
    refcounts: jax.Array  # i32[N + 1]: who holds a block, rows and index; a free one keeps the 1 its next owner needs
    # i32[N + 1]: the label of what a `PrefixCache` keeps in the block, whether or not a row holds it too; 0: nothing.
    # So a cache says itself what its kept blocks hold, and an index never takes one for what it was or will be.
    kept: jax.Array
    free_list: jax.Array  # i32[N]
    num_free: jax.Array  # i32[], or i32[P]
    peak: jax.Array  # i32[]: the most blocks ever in use at once
    failed: jax.Array  # bool[S]: a request of the row could not be met; cleared by `free`
    wanted: jax.Array  # i32[S]: the length that request asked for, or SENSELESS, or STALE
    needed: jax.Array  # i32[S]: the blocks it needed, or GONE, or TOO_LONG
    # Of layers with a window or chunks whose rows may outgrow their table, i32[S]: how many blocks of a row have left
    # it. Behind the first ones that stay, column c stands for the row's block c + skipped. See `columns`.
    skipped: jax.Array | None = None
    # Of a layer that evicts. Where it does so by heads, S is K * S in all shapes here; see `lines`.
    evicted: jax.Array | None = None  # i32[S]: tokens that were given back; `lengths` are those that are held
    thinned: jax.Array | None = None  # i32[S]: of the tokens held the first so many, some of those before which went

    @property
    def held(self) -> jax.Array:
        """`i32[S]`: blocks in each row's table, reserved ones included."""
        return jnp.sum(self.tables != NULL_BLOCK, axis=1, dtype=jnp.int32)

    @property
    def end(self) -> jax.Array:
        """`i32[S]`: the column after the last block in each row's table."""
        column = jnp.arange(1, self.tables.shape[1] + 1, dtype=jnp.int32)
        return jnp.max(jnp.where(self.tables != NULL_BLOCK, column, 0), axis=1, initial=0)

    @property
    def seen(self) -> jax.Array:
        """`i32[S]`: tokens that each row was given, where the next one's position goes on."""
        return self.lengths if self.evicted is None else self.lengths + self.evicted

    @property
    def num_blocks(self) -> int:
        return self.free_list.shape[0]

    @property
    def parts(self) -> int:
        """How many parts blocks are in, P."""
        return self.num_free.shape[0] if self.num_free.ndim else 1

    @property
    def num_used(self) -> jax.Array:
        """`i32[]`: blocks that are not free."""
        return self.num_blocks - (self.num_free if self.parts == 1 else self.num_free.sum())


@register_export
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Pool:
    """One layer's blocks."""

    # [N + 1, 2, K, block_size, D]: keys at 0, values at 1; of a latent layer [N + 1, 1, 1, block_size, D]; where a row
    # holds more, [N + 1, 2, K / 2, block_size, 2 D] or [N + 1, 1, K, block_size, 2 D]: see `forms`.
    kv: jax.Array
    # Of quantised kinds [N + 1, 2, K, block_size]; in int4 with an axis of ceil(D / 32), of latent layers of 2.
    scale: jax.Array | None = None
    # Of a layer that keeps bounds [N + 1, 2, K, D]: the least and the largest entries of each block's keys, and what is
    # wider than that where tokens have gone; see `kept_bounds`.
    bounds: jax.Array | None = None
    # The mesh axis that heads lie on; the mesh itself is part of the arrays' types. None: they lie on one device.
    heads: str | None = dataclasses.field(default=None, metadata={"static": True})
    # The mesh axis that the tokens of every block are divided over, in equal runs; None: they lie on one device.
    context: str | None = dataclasses.field(default=None, metadata={"static": True})
    # How many devices of the heads' axis the blocks are divided among, each with a null block of its own and those of
    # its heads: see `BlockTables`. 1: a block holds all heads, or all blocks lie on each device.
    parts: int = dataclasses.field(default=1, metadata={"static": True})

    @property
    def k(self) -> jax.Array:
        """As they are stored: where rows hold more, the whole rows."""
        return self.kv[:, 0]

    @property
    def v(self) -> jax.Array:
        """The same of values; of a latent layer the whole rows, too, of which values are the first numbers."""
        return self.kv[:, -1]

    @property
    def tokens(self) -> "Pool":
        """What the blocks hold of each token: all but what is said of blocks."""
        return dataclasses.replace(self, bounds=None)

    def like(self, other: "Pool") -> "Pool":
        """These blocks, on the axes of another pool."""
        return dataclasses.replace(self, heads=other.heads, context=other.context, parts=other.parts)


@register_export
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Layer:
    """One layer as attention sees it: its pool, and the tables of its group. Made by `cache.layers`.

    A model's blocks take theirs and give it back; `cache.with_layers` puts them together again. Layers share their
    tables, so donate the cache, not its layers: no buffer can be donated twice.
    """

    NO_CACHE: ClassVar[str] = (
        "cache must be the whole cache, not one of its layers: cache.with_layer and cache.with_layers put layers back."
    )

    pool: Pool  # None in a list of layers, if it reads another's: what that one writes would not reach it
    tables: BlockTables
    place: jax.Array | None = None  # i32[]: which of the layers stacked in the pool it is; None: it has the pool alone
    number: int = dataclasses.field(metadata={"static": True})  # its index; in a stack, the index of one that is alike
    config: CacheConfig = dataclasses.field(metadata={"static": True})

    @property
    def layer_config(self) -> LayerConfig:
        """What the layer is made for."""
        return self.config.layers[self.number]

    @property
    def group(self) -> int:
        """The group of layers whose tables these are."""
        return self.config.group(self.number)

    @property
    def rows(self) -> int:
        """Rows of the cache, S in shapes."""
        return self.config.max_seqs

    @property
    def held(self) -> jax.Array:
        """`i32[S]`: tokens that the layer holds of each row; `i32[S, K]` where it evicts by heads."""
        heads = self.config.group_heads[self.group]
        lengths = self.tables.lengths
        return lengths if self.config.group_evicts[self.group] != "head" else lengths.reshape(heads, -1).T

    @property
    def blocks(self) -> jax.Array:
        """`i32[S, M]`: where the layer's blocks lie in its pool."""
        if self.place is None:
            return self.tables.tables
        return self.tables.tables + self.place * (self.tables.num_blocks + 1)
