"""Reads and writes of slots: functions of one pool, which `run_on_shards` runs on each device's shard."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv._core.config.cache_config import CacheConfig
from jaxkv._core.state.shard_local import find_block_runs, find_head_shard, localize_slots, read_slots
from jaxkv._core.state.state import Pool
from pallas_kernels.common.rotation import rotate


def read_tokens(
    pool: Pool, block: jax.Array, offset: jax.Array, *, config: CacheConfig, layer: int
) -> tuple[jax.Array, jax.Array]:
    """Reads keys and values `[..., K, D]` of slots `i32[...]`; 0 for the null block."""
    kv = decode_kv(read_slots(pool, block, offset), config, layer, axis=-3)  # [..., 2, K, D]
    kv = jnp.where((block != 0)[..., None, None, None], kv, jnp.zeros((), kv.dtype))
    return _keys_and_values(kv, config, layer, axis=-3)


def read_raw(
    pool: Pool, block: jax.Array, offset: jax.Array, *, config: CacheConfig, layer: int
) -> tuple[jax.Array | None, ...]:
    """Reads `(k, v, k_scale, v_scale)` of slots `i32[...]` of a quantized pool as stored, without padding; 0 for the
    null block."""
    found, is_held = jax.tree.leaves(read_slots(pool.heads_alone, block, offset)), block != 0
    kv, scale = (
        jnp.where(jnp.expand_dims(is_held, range(is_held.ndim, x.ndim)), x, jnp.zeros((), x.dtype)) for x in found
    )
    layer_config, kind = config.layer_config(layer), config.kind(layer)
    if layer_config.v_head_dim is not None:
        row, row_scale = (jnp.squeeze(x, block.ndim) for x in (kv, scale))
        (v, v_scale), (k, k_scale) = kind.split_row(row, row_scale, layer_config.v_head_dim, layer_config.row_dim)
        return k, v, k_scale, v_scale
    width = kind.stored_dim(layer_config.head_dim)
    kv = config.form(layer).unpack(kv, axis=block.ndim)[..., :width]
    arrays = [[jnp.take(x, i, axis=block.ndim) for x in (kv, scale)] for i in range(kv.shape[block.ndim])]
    keys, values = arrays if len(arrays) == 2 else (*arrays, (None, None))
    return keys[0], values[0], keys[1], values[1]


def dense(pool: Pool, tables: jax.Array, lengths: jax.Array, *, config: CacheConfig, layer: int) -> jax.Array:
    """Reads the rows of a table, or the device's head rows, as one array `[S, 2, K, max_seq_len, D]`; 0 past each row's
    length and before its window."""
    runs, shard = find_block_runs(pool), find_head_shard(pool)
    if shard is not None:
        tables, lengths = shard.own(shard.lines(tables)), shard.lines(lengths)

    def read(at: Any) -> jax.Array:
        found = decode_kv(jax.tree.map(lambda x: x[at], pool.tokens), config, layer)
        return found if runs is None else runs.gather(found, found.ndim - 2)

    if config.contiguous:  # row s owns block s + 1: a slice, which moves no data inside jit
        kv = read(slice(1, None))
    else:
        blocks = read(tables)
        blocks = jnp.moveaxis(blocks, 1, 3)  # [S, 2, K, M, block_size, D]
        kv = blocks.reshape(*blocks.shape[:3], tables.shape[1] * blocks.shape[4], blocks.shape[-1])
        kv = kv[..., : config.layer_config(layer).count_entries(config.max_seq_len), :]
    is_held = jnp.arange(kv.shape[3], dtype=jnp.int32)[None] < lengths[:, None]
    return jnp.where(is_held[:, None, None, :, None], kv, jnp.zeros((), kv.dtype))


def dense_pair(pool: Pool, tables: jax.Array, lengths: jax.Array, *, config: CacheConfig, layer: int) -> Any:
    """Reads the same as keys and values, `[S, K, max_seq_len, D]` each."""
    return _keys_and_values(dense(pool, tables, lengths, config=config, layer=layer), config, layer, axis=1)


def put_token(
    pool: Pool, block: jax.Array, offset: jax.Array, head: jax.Array, new: Pool, number: jax.Array, *, start: int
) -> Pool:
    """Replaces one head of one token by `new`, its numbers and scales; does nothing at the null block.

    Args:
      head: index among all the pool's heads; number: `i32[K]`, the indices of this device's heads.
      start: where the head's numbers begin in a row of the pool.
    """
    block, offset = localize_slots(pool, block, offset)
    at = jnp.argmax(number == head)
    there = (block != 0) & (number[at] == head)
    place = jnp.where(there, block, pool.kv.shape[0])  # past the end: dropped, never the null block

    def put(x: jax.Array, new: jax.Array) -> jax.Array:
        minor = tuple(slice(start, start + size) for size in new.shape[1:])  # may be less than a pool's row
        return jnp.asarray(x).at[place, :, at, offset, *minor].set(new, mode="drop")

    return dataclasses.replace(jax.tree.map(put, pool.heads_alone, new), bounds=pool.bounds, index=pool.index)


def update_slice(pool: Pool, blocks: Pool, *, start: int) -> Pool:
    """Replaces the blocks of a pool from `start` on by `blocks`."""
    return jax.tree.map(lambda x, new: x.at[start : start + new.shape[0]].set(new), pool, blocks)


def _keys_and_values(kv: jax.Array, config: CacheConfig, layer: int, axis: int) -> tuple[jax.Array, jax.Array]:
    found, keys = config.layer_config(layer), jnp.take(kv, 0, axis=axis)
    if (rank := found.row_rank) is None:
        return keys, jnp.take(kv, 1, axis=axis)
    return keys[..., found.v_head_dim or 0 :], keys[..., :rank]


def decode_keys(blocks: Pool, config: CacheConfig, layer: int) -> jax.Array:
    """Decodes the keys of blocks of a layer's pool, `[n, K, block_size, D]`."""
    return _keys_and_values(decode_kv(blocks, config, layer), config, layer, axis=-4)[0]


def decode_kv(blocks: Pool, config: CacheConfig, layer: int, axis: int = -4) -> jax.Array:
    """Decodes blocks or slots of a layer's pool to `[..., 2, ..., D]`: as stored, or float32 if quantized. Keys and
    values are at `axis`, one row for both if they have different widths."""
    found, kind = config.layer_config(layer), config.kind(layer)
    kv = config.form(layer).unpack(blocks.kv, axis)
    if not kind.is_quantized:
        return kv[..., : found.row_dim]
    decoded = kind.decode(kv, blocks.scale, found.row_dim, found.row_rank, axis=axis)  # type: ignore[arg-type]
    return rotate(decoded) if config.rotates(layer) else decoded
