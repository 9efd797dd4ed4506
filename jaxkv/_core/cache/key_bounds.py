"""Bounds of blocks' keys as a leaf of their pool, in layers made with `LayerConfig(bounds=True)`.

Whatever puts tokens into a block makes its bounds anew from what it then holds, so that they are right whoever wrote
it, in whatever kind; what moves blocks moves them along. Only where tokens go (`truncate`, `keep`) they stay as they
were, too wide, until the block is written again.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._core.cache.pool_access import numbers
from jaxkv._core.config.cache_config import CacheConfig
from jaxkv._core.state.sharding import POOL, WHOLE, on_shards
from jaxkv._core.state.state import NULL_BLOCK, Pool


def renewed(pool: Pool, block: jax.Array, filled: jax.Array, *, config: CacheConfig, layer: int) -> Pool:
    """A pool in which the bounds of blocks `i32[n]` are those of the tokens in their first `filled` i32[n] places. The
    null block is left out."""
    arguments, specs = (pool, block, filled), (POOL, WHOLE, WHOLE)
    return on_shards(pool, _renew, arguments, specs, POOL, config=config, layer=layer)


def _renew(pool: Pool, block: jax.Array, filled: jax.Array, *, config: CacheConfig, layer: int) -> Pool:
    assert pool.bounds is not None
    keys = jax.tree.map(lambda x: x[block, 0][:, None], pool.tokens)
    place = jnp.where(block == NULL_BLOCK, pool.kv.shape[0] + jnp.arange(block.shape[0], dtype=jnp.int32), block)
    new = _bounds_of(keys, filled, config, layer)
    return dataclasses.replace(
        pool, bounds=jnp.asarray(pool.bounds).at[place].set(new, mode="drop", unique_indices=True)
    )


def bounds_at(pool: Pool, blocks: jax.Array, held: jax.Array) -> jax.Array:
    """`f32[..., 2, K, D]`: the bounds of blocks `i32[...]`; 0 for those that are not `held`."""
    assert pool.bounds is not None
    return jnp.where(held[..., None, None, None], pool.bounds[blocks].astype(jnp.float32), jnp.float32(0))


def touched(
    blocks: jax.Array, lengths: jax.Array, begin: jax.Array, end: jax.Array, size: int, most: int
) -> tuple[jax.Array, jax.Array]:
    """The blocks, and how many tokens each holds, in which the places from `begin` to `end` of each row are.

    Args:
      blocks: `i32[S, M]`; lengths: `i32[S]`, tokens of each row.
      most: places of all rows together, at the most.

    Returns:
      `i32[n]` each; null blocks behind them.
    """
    rows, width = blocks.shape
    first = jax.lax.div(begin, jnp.int32(size))
    count = jnp.where(end > begin, jax.lax.div(end - 1, jnp.int32(size)) - first + 1, 0)
    until = jnp.cumsum(count)
    i = jnp.arange(min(most, most // size + 2 * rows), dtype=jnp.int32)
    row = jnp.searchsorted(until, i, side="right", method="compare_all")
    own = jnp.minimum(row, rows - 1)
    column = (first - (until - count))[own] + i
    block = jnp.where(row < rows, blocks[own, jnp.clip(column, 0, width - 1)], NULL_BLOCK)
    return block, jnp.clip(lengths[own] - column * size, 0, size)


def with_bounds(part: Pool, tables: np.ndarray, lengths: np.ndarray, config: CacheConfig, layer: int) -> Pool:
    """Blocks that are to be put into a layer, the first of them block 1 of tables `i32[n, M]` whose rows hold `lengths`
    i32[n] tokens, with the bounds of those, if the layer keeps them. NumPy stays NumPy."""
    if not config.keeps_bounds(layer):
        return part.tokens
    filled = filled_of(tables, lengths, config.block_size, part.kv.shape[0])
    bounds: Any = _compiled(part.tokens, filled, config, layer)
    return dataclasses.replace(part, bounds=np.asarray(bounds) if isinstance(part.kv, np.ndarray) else bounds)


def filled_of(tables: np.ndarray, lengths: np.ndarray, size: int, count: int) -> np.ndarray:
    """`i32[count]`: tokens in blocks 1, 2 .. of tables `i32[n, M]`, whose rows hold `lengths` i32[n] of them."""
    held = np.clip(lengths[:, None] - size * np.arange(tables.shape[1]), 0, size)
    filled = np.zeros(max(count, int(tables.max(initial=0))) + 1, np.int32)
    np.maximum.at(filled, tables, np.where(tables == NULL_BLOCK, 0, held))
    return filled[1 : count + 1]


def _bounds_of(part: Pool, filled: jax.Array, config: CacheConfig, layer: int) -> jax.Array:
    """`[n, 2, K, D]`: the least and the largest of keys in the first places of blocks; 0 where there are none."""
    keys = numbers(part, config, layer)[:, 0]  # [n, K, block_size, D]
    place = jnp.arange(keys.shape[2], dtype=jnp.int32)
    held = (place[None] < filled[:, None])[:, None, :, None]
    low, high = (
        reduce(jnp.where(held, keys, jnp.asarray(other, keys.dtype)), axis=2)
        for reduce, other in ((jnp.min, jnp.inf), (jnp.max, -jnp.inf))
    )
    both = jnp.where((filled > 0)[:, None, None, None], jnp.stack([low, high], axis=1), jnp.zeros((), keys.dtype))
    return both.astype(config.bounds_dtype(layer))


_compiled = functools.partial(jax.jit, static_argnums=(2, 3))(_bounds_of)
