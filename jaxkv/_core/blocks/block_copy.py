"""Copies of whole blocks, in and out of pools; in a stack, of the same blocks of every layer at once."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._core.cache.cache import Cache
from jaxkv._core.state.shard_local import find_head_shard, localize_blocks
from jaxkv._core.state.sharding import BLOCKS, POOL, WHOLE, run_on_shards
from jaxkv._core.state.state import NULL_BLOCK, Pool


def copy_blocks(pool: Pool, source: jax.Array, target: jax.Array) -> Pool:
    """Copies block `source[i]` over block `target[i]`, except over the null block. All blocks are read before any is
    written."""
    source = jnp.where(target == NULL_BLOCK, NULL_BLOCK, source)
    return run_on_shards(pool, _copy, (pool, source, target), (POOL, WHOLE, WHOLE), POOL)


def put_blocks(pool: Pool, blocks: Pool, target: jax.Array) -> Pool:
    """Writes `blocks[i]` over block `target[i]`, except over the null block."""
    return run_on_shards(pool, _put, (pool, blocks.like(pool), target), (POOL, BLOCKS, WHOLE), POOL)


def _copy(pool: Pool, source: jax.Array, target: jax.Array) -> Pool:
    source = localize_blocks(pool, source)
    return _put(pool, jax.tree.map(lambda x: x[source], pool), target)


def _put(pool: Pool, blocks: Pool, target: jax.Array) -> Pool:
    target = localize_blocks(pool, target)
    past_the_end = pool.kv.shape[0] + jnp.arange(target.shape[0], dtype=jnp.int32)
    place = jnp.where(target == NULL_BLOCK, past_the_end, target)

    def put_into(x: jax.Array, new: Any) -> jax.Array:
        minor = tuple(slice(0, size) for size in new.shape[4:])  # D may be padded in the pool
        return jnp.asarray(x).at[place, :, :, :, *minor].set(new, mode="drop", unique_indices=True)

    return jax.tree.map(put_into, pool, blocks)


def _read(pool: Pool, blocks: Any) -> Pool:
    if (shard := find_head_shard(pool)) is None:
        return jax.tree.map(lambda x: x[blocks], pool)
    blocks = shard.own(jnp.asarray(blocks))
    return jax.tree.map(lambda x: shard.together(x[blocks]), pool)  # of null blocks, which are 0


put = jax.jit(put_blocks)
put_in_place = jax.jit(put_blocks, donate_argnums=0)


@functools.partial(jax.jit, static_argnames="count")
def read_blocks(pool: Pool, blocks: jax.Array, count: int = 1) -> tuple[Pool, ...]:
    """Reads blocks of a pool, `[n, ...]`, split into `count` equal runs."""
    found = run_on_shards(pool, _read, (pool, blocks), (POOL, WHOLE), BLOCKS)
    each = blocks.shape[0] // count
    return tuple(jax.tree.map(lambda x, i=i: x[i * each : (i + 1) * each], found) for i in range(count))


def read_group(cache: Cache, group: int, blocks: Any) -> dict[int, Pool]:
    """Reads the blocks `i32[n]` of each layer of a group as a pool of n blocks; null blocks hold any numbers."""
    found: dict[int, Pool] = {}
    for stack in cache.config.group_stacks(group):
        pool = cache.layer(stack[0]).pool
        places = stack_blocks(blocks, len(stack), pool.kv.shape[0] // len(stack))
        found |= zip(stack, read_blocks(pool, places, count=len(stack)), strict=True)
    return found


def put_group(cache: Cache, group: int, read: Callable[[int], Pool], target: Any, put: Callable[..., Pool]) -> Cache:
    """Writes new blocks into the layers of a group, and returns the cache.

    Args:
      read: returns a layer's new blocks, as a pool of n blocks; D may be less than the stored one.
      target: `i32[m]`, the targets of the first m blocks. Blocks for the null block are skipped, as are the others.
      put: `put_blocks`, or a compiled version of it.
    """
    pools = list(cache.pools)
    for stack in cache.config.group_stacks(group):
        pool, blocks = cache.layer(stack[0]).pool, [read(layer) for layer in stack]
        joined = blocks[0] if len(stack) == 1 else jax.tree.map(lambda *x: jnp.concatenate(x), *blocks)
        places = jnp.pad(target, (0, joined.kv.shape[0] // len(stack) - target.shape[0]), constant_values=NULL_BLOCK)
        pools[stack[0]] = put(pool, joined, stack_blocks(places, len(stack), pool.kv.shape[0] // len(stack)))
    return cache.replace(pools=tuple(pools))


def stack_blocks(blocks: Any, count: int, size: int) -> Any:
    """Returns the indices `i32[count * n]` of blocks `i32[n]` in a pool of `count` stacked layers of `size` blocks. The
    null block stays 0 in every layer."""
    if count == 1:
        return blocks
    start = size * np.arange(count, dtype=np.int32)[:, None]  # on the host, where the blocks may be too
    return ((blocks[None] + start) * (blocks[None] != NULL_BLOCK).astype(np.int32)).reshape(-1)


def pad_size(count: int) -> int:
    """Rounds `count` up to a power of two, so that programs compile for few sizes."""
    return 1 << max(count - 1, 0).bit_length()
