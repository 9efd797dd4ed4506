"""The state of a cache: immutable pytrees of arrays. Fields and shapes, no algorithm.

S rows, M blocks per row at the most, K KV heads, D head_dim, N = num_blocks.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv._config import CacheConfig, LayerConfig
from jaxkv._views import Views

# Block 0 is never allocated and never written: unused table entries point at it, so that any fetch is in bounds.
NULL_BLOCK = 0

# In `BlockTables.needed`: no block would help, the tokens that a row was to go back to have been given back.
GONE = -1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class BlockTables:
    """Which blocks each row holds, and which are free. Shared by the layers of a group.

    The free blocks are the last `num_free` entries of `free_list`, the next one to be taken first. Whatever stands
    before them is out of date.
    """

    # Logical block -> physical block. A row's entries stand one after another, with null blocks behind them, and before
    # them for what has fallen out of a window.
    tables: jax.Array  # i32[S, M]
    lengths: jax.Array  # i32[S]: tokens of each row, the current step's included
    new: jax.Array  # i32[S]: how many of them are the current step's
    offsets: jax.Array  # i32[S]: where each row's tokens start in a packed step
    refcounts: jax.Array  # i32[N + 1]: who holds a block, rows and index; a free one keeps the 1 its next owner needs
    kept: jax.Array  # bool[N + 1]: a `PrefixCache` holds the block, whether or not a row does
    free_list: jax.Array  # i32[N]
    num_free: jax.Array  # i32[]
    peak: jax.Array  # i32[]: the most blocks ever in use at once
    failed: jax.Array  # bool[S]: a request of the row could not be met; cleared by `free`
    wanted: jax.Array  # i32[S]: the length that request asked for; -1: the request made no sense
    needed: jax.Array  # i32[S]: the blocks it needed, or GONE

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
    def num_blocks(self) -> int:
        return self.free_list.shape[0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Pool:
    """One layer's blocks."""

    kv: jax.Array  # [N + 1, 2, K, block_size, D]: keys at 0, values at 1

    @property
    def k(self) -> jax.Array:
        return self.kv[:, 0]

    @property
    def v(self) -> jax.Array:
        return self.kv[:, 1]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Layer:
    """One layer as a kernel sees it: its pool, and the tables of its group."""

    pool: Pool
    tables: BlockTables


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Cache(Views):
    """An immutable paged KV cache. Made by `jaxkv.init`; every function of the library returns a new one."""

    tables: tuple[BlockTables, ...]  # one per group of layers
    pools: tuple[Pool | None, ...]  # one per layer; None for a layer that shares another's
    config: CacheConfig = dataclasses.field(metadata={"static": True})

    def layer(self, layer: int) -> Layer:
        """One layer's pool and tables, a pytree of its own."""
        tables = self.tables[self.config.group(layer)]  # raises for an index out of range, negative ones too
        return Layer(pool=self.pool(layer), tables=tables)

    def pool(self, layer: int) -> Pool:
        """The pool that a layer reads: its own, or the one of the layer it shares with."""
        pool = self.pools[self.config.owner(layer)]
        assert pool is not None
        return pool

    def layer_config(self, layer: int) -> LayerConfig:
        """The config of one layer; IndexError for an index out of range."""
        return self.config.layer_config(layer)

    @property
    def is_uniform(self) -> bool:
        """Whether all layers are alike."""
        return self.config.is_uniform

    def replace(self, **changes: Any) -> "Cache":
        """A copy with other fields."""
        return dataclasses.replace(self, **changes)

    def replace_pool(self, layer: int, pool: Pool) -> "Cache":
        """A copy with another pool in one layer."""
        return self.replace(pools=(*self.pools[:layer], pool, *self.pools[layer + 1 :]))

    @staticmethod
    def from_parts(**parts: Any) -> "Cache":
        """A cache around blocks and tables that exist already; see `from_parts` in `jaxkv/_import.py`."""
        from jaxkv._import import from_parts  # it builds on this file

        return from_parts(**parts)


def init(config: CacheConfig) -> Cache:
    """An empty cache: every block free, every pool a zeroed buffer of its own.

    >>> import jaxkv
    >>> layer = jaxkv.LayerConfig(num_kv_heads=2, head_dim=8)
    >>> jaxkv.init(jaxkv.CacheConfig(layers=(layer,), max_seqs=4, max_seq_len=64, num_blocks=10))
    Cache(0 of 10 blocks used, 0 tokens in 0 of 4 rows, 1 layer, 11.0 KiB)
    """
    # One array after another: the same zeros used twice could not be donated.
    pools = tuple(
        Pool(kv=jnp.zeros(config.pool_shape(i), config.kind(i).dtype)) if config.owner(i) == i else None
        for i in range(config.num_layers)
    )
    tables = tuple(_init_tables(config, num_blocks) for num_blocks in config.group_blocks)
    return Cache(tables=tables, pools=pools, config=config)


def _init_tables(config: CacheConfig, num_blocks: int) -> BlockTables:
    rows = config.max_seqs

    def zeros() -> jax.Array:
        return jnp.zeros(rows, jnp.int32)

    blocks = jnp.arange(1, num_blocks + 1, dtype=jnp.int32)
    if config.contiguous:  # every row has its block from the start, and keeps it
        tables, num_free = blocks[:, None], 0
    else:
        tables, num_free = jnp.full((rows, config.max_blocks_per_seq), NULL_BLOCK, jnp.int32), num_blocks
    return BlockTables(
        tables=tables, lengths=zeros(), new=zeros(), offsets=zeros(),
        refcounts=jnp.ones(num_blocks + 1, jnp.int32).at[NULL_BLOCK].set(0), kept=jnp.zeros(num_blocks + 1, bool),
        free_list=jnp.array(blocks), num_free=jnp.array(num_free, jnp.int32),
        peak=jnp.array(num_blocks - num_free, jnp.int32),
        failed=jnp.zeros(rows, bool), wanted=zeros(), needed=zeros(),
    )  # fmt: skip
