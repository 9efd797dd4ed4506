"""Whole blocks of keys and values, in and out of pools: in a stack, the same blocks of every layer at once."""

import jax
import jax.numpy as jnp

from jaxkv._core.state import NULL_BLOCK, Pool


def copy_blocks(pool: Pool, source: jax.Array, target: jax.Array) -> Pool:
    """Copy block `source[i]` over block `target[i]`, but nothing over the null block. All are read before any is
    written."""
    return put_blocks(pool, pool.kv[jnp.where(target == NULL_BLOCK, NULL_BLOCK, source)], target)


def put_blocks(pool: Pool, blocks: jax.Array, target: jax.Array) -> Pool:
    """`blocks[i]` in the place of block `target[i]`; where that is the null block, nothing happens."""
    past_the_end = pool.kv.shape[0] + jnp.arange(target.shape[0], dtype=jnp.int32)
    place = jnp.where(target == NULL_BLOCK, past_the_end, target)
    return Pool(kv=pool.kv.at[place].set(blocks, mode="drop", unique_indices=True))


def in_stack(blocks: jax.Array, count: int, size: int) -> jax.Array:
    """`i32[count * n]`: where blocks `i32[n]` lie in a pool of `count` layers of `size` blocks. The null block stays 0,
    which says that nothing is meant."""
    if count == 1:
        return blocks
    start = size * jnp.arange(count, dtype=jnp.int32)[:, None]
    return jnp.where(blocks[None] == NULL_BLOCK, NULL_BLOCK, blocks[None] + start).reshape(-1)
