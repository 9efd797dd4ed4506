"""Bounds of blocks' keys as a leaf of their pool, in layers made with `LayerConfig(bounds=True)`.

Every write of tokens into a block recomputes the block's bounds from its tokens, so that they are right in any storage
format. Moves of blocks move the bounds along. Where tokens are dropped (`truncate`, `keep`), the bounds stay too wide
until the block is written again.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._core.cache.pool_access import decode_keys
from jaxkv._core.config.cache_config import CacheConfig
from jaxkv._core.state.sharding import POOL, WHOLE, run_on_shards
from jaxkv._core.state.state import NULL_BLOCK, Pool


def renew_bounds(pool: Pool, block: jax.Array, filled: jax.Array, *, config: CacheConfig, layer: int) -> Pool:
    """Recomputes the bounds of blocks `i32[n]` from the tokens in their first `filled` i32[n] slots. The null block is
    left out."""
    arguments, specs = (pool, block, filled), (POOL, WHOLE, WHOLE)
    return run_on_shards(pool, _renew, arguments, specs, POOL, config=config, layer=layer)


def _renew(pool: Pool, block: jax.Array, filled: jax.Array, *, config: CacheConfig, layer: int) -> Pool:
    assert pool.bounds is not None
    keys = jax.tree.map(lambda x: x[block, 0][:, None], pool.tokens)
    place = jnp.where(block == NULL_BLOCK, pool.kv.shape[0] + jnp.arange(block.shape[0], dtype=jnp.int32), block)
    new = _compute_bounds(keys, filled, config, layer)
    return dataclasses.replace(
        pool, bounds=jnp.asarray(pool.bounds).at[place].set(new, mode="drop", unique_indices=True)
    )


def read_bounds(pool: Pool, blocks: jax.Array, used: jax.Array) -> jax.Array:
    """Reads the bounds of blocks `i32[...]`, `f32[..., 2, K, D]`; 0 for those that are not `used`."""
    assert pool.bounds is not None
    return jnp.where(used[..., None, None, None], pool.bounds[blocks].astype(jnp.float32), jnp.float32(0))


def find_touched_blocks(
    blocks: jax.Array, lengths: jax.Array, begin: jax.Array, end: jax.Array, size: int, most: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the blocks that contain positions `begin` to `end` of each row, and the tokens that each block holds.

    Args:
      blocks: `i32[S, M]`; lengths: `i32[S]`, tokens of each row.
      most: maximum number of such positions in all rows.

    Returns:
      `i32[n]` each, padded with null blocks: they stand for positions beyond a row's table too, which have no slots.
    """
    rows, width = blocks.shape
    first = jax.lax.div(begin, jnp.int32(size))
    count = jnp.where(end > begin, jax.lax.div(end - 1, jnp.int32(size)) - first + 1, 0)
    until = jnp.cumsum(count)
    i = jnp.arange(min(most, most // size + 2 * rows), dtype=jnp.int32)
    row = jnp.searchsorted(until, i, side="right", method="compare_all")
    own = jnp.minimum(row, rows - 1)
    column = (first - (until - count))[own] + i
    block = jnp.where((row < rows) & (column < width), blocks[own, column], NULL_BLOCK)
    return block, jnp.clip(lengths[own] - column * size, 0, size)


def add_bounds(blocks: Pool, tables: np.ndarray, lengths: np.ndarray, config: CacheConfig, layer: int) -> Pool:
    """Adds bounds, if the layer stores them, to blocks that will be put into the layer. The first block is block 1 of
    tables `i32[n, M]`, whose rows hold `lengths` i32[n] tokens. NumPy stays NumPy."""
    if not config.keeps_bounds(layer):
        return blocks.tokens
    filled = count_filled(tables, lengths, config.block_size, blocks.kv.shape[0])
    bounds: Any = _compiled(blocks.tokens, filled, config, layer)
    return dataclasses.replace(blocks, bounds=np.asarray(bounds) if isinstance(blocks.kv, np.ndarray) else bounds)


def count_filled(tables: np.ndarray, lengths: np.ndarray, size: int, count: int) -> np.ndarray:
    """Returns `i32[count]`, tokens in blocks 1, 2 .. of tables `i32[n, M]` whose rows hold `lengths` i32[n] tokens."""
    tokens = np.clip(lengths[:, None] - size * np.arange(tables.shape[1]), 0, size)
    filled = np.zeros(max(count, int(tables.max(initial=0))) + 1, np.int32)
    np.maximum.at(filled, tables, np.where(tables == NULL_BLOCK, 0, tokens))
    return filled[1 : count + 1]


def _compute_bounds(blocks: Pool, filled: jax.Array, config: CacheConfig, layer: int) -> jax.Array:
    """Computes the minimum and maximum of keys in the filled slots of blocks, `[n, 2, K, D]`; 0 for empty blocks."""
    keys = decode_keys(blocks, config, layer)  # [n, K, block_size, D]
    place = jnp.arange(keys.shape[2], dtype=jnp.int32)
    is_filled = (place[None] < filled[:, None])[:, None, :, None]
    low, high = (
        reduce(jnp.where(is_filled, keys, jnp.asarray(other, keys.dtype)), axis=2)
        for reduce, other in ((jnp.min, jnp.inf), (jnp.max, -jnp.inf))
    )
    both = jnp.where((filled > 0)[:, None, None, None], jnp.stack([low, high], axis=1), jnp.zeros((), keys.dtype))
    return both.astype(config.bounds_dtype(layer))


_compiled = functools.partial(jax.jit, static_argnums=(2, 3))(_compute_bounds)
