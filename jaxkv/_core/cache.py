"""A cache: its tables, its pools and its config as one pytree."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv._core.config import CacheConfig
from jaxkv._core.state import NULL_BLOCK, BlockTables, Pool
from jaxkv._core.views import Views, check_head


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Cache(Views):
    """An immutable paged KV cache. Made by `jaxkv.init`; every function of the library returns a new one."""

    tables: tuple[BlockTables, ...]  # one per group of layers
    pools: tuple[Pool | None, ...]  # one per layer; None for a layer that shares another's
    config: CacheConfig = dataclasses.field(metadata={"static": True})

    def replace(self, **changes: Any) -> "Cache":
        """A copy with other fields."""
        return dataclasses.replace(self, **changes)

    def replace_pool(self, layer: int, pool: Pool) -> "Cache":
        """A copy with another pool in one layer."""
        return self.replace(pools=(*self.pools[:layer], pool, *self.pools[layer + 1 :]))

    def store(self, layer: int, row: int, head: int, position: int, k: Any, v: Any) -> "Cache":
        """A cache in which one head of one token is k, v `[D]`. For debugging; shared blocks change for all rows."""
        check_head(self, layer, head)
        self.token(row, position, layer)  # the same errors
        block, offset = self.slots(row, position, layer=layer)
        head_dim = self.layer_config(layer).head_dim
        if jnp.shape(k) != (head_dim,) or jnp.shape(v) != (head_dim,):
            raise ValueError(
                f"k and v must be [{head_dim}] each, one head of one token, not {jnp.shape(k)} and {jnp.shape(v)}."
            )
        pool = self.pool(layer)
        place = jnp.where(block == 0, pool.kv.shape[0], block)  # no such token: dropped, never the null block
        new = jnp.stack([jnp.asarray(k), jnp.asarray(v)]).astype(pool.kv.dtype)
        kv = pool.kv.at[place, :, head, offset, :head_dim].set(new, mode="drop")
        return self.replace_pool(self.config.owner(layer), Pool(kv=kv))


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
        refcounts=jnp.ones(num_blocks + 1, jnp.int32).at[NULL_BLOCK].set(0), kept=jnp.zeros(num_blocks + 1, jnp.int32),
        free_list=jnp.array(blocks), num_free=jnp.array(num_free, jnp.int32),
        peak=jnp.array(num_blocks - num_free, jnp.int32),
        failed=jnp.zeros(rows, bool), wanted=zeros(), needed=zeros(),
    )  # fmt: skip
