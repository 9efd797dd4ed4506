"""Reads what the items of a work list need: runs of the pool, and queries by KV head."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.common.batch import StoredKV
from pallas_kernels.xla.work_list import Items


def add_slopes(logits: jax.Array, alibi: jax.Array | None, distance: jax.Array) -> jax.Array:
    """Returns logits `[items, K, queries * G, context]` less the slope of each head, `[K, G]`, times the distance."""
    if alibi is None:
        return logits
    queries, group = distance.shape[1], alibi.shape[1]
    slopes = jnp.tile(alibi, (1, queries))[None, :, :, None]
    return logits - slopes * jnp.repeat(distance, group, axis=1)[:, None].astype(jnp.float32)


def read_runs(pool: jax.Array, which: int, items: Items, run: int, head_dim: int | None = None) -> jax.Array:
    """Keys (`which` 0) or values (1) of items' context, `[items, K, pieces * run, head_dim]`; of scales without the
    last axis, where they have none. One gather, which leaves them in the order that products want and clamps blocks
    that are out of range."""
    num_items, pieces = items.block.shape
    num_kv_heads, minor = pool.shape[2], () if head_dim is None else (head_dim,)
    index = jnp.stack([items.block, jnp.full_like(items.block, which), items.offset], axis=-1)
    dimensions = jax.lax.GatherDimensionNumbers(
        offset_dims=(1, 3, 4)[: 2 + len(minor)], collapsed_slice_dims=(0, 1), start_index_map=(0, 1, 3)
    )
    runs = jax.lax.gather(pool, index, dimensions, (1, 1, num_kv_heads, run, *minor), mode="clip")
    return runs.reshape(num_items, num_kv_heads, pieces * run, *minor)


def read_numbers(stored: StoredKV, items: Items, run: int, head_dim: int) -> tuple[jax.Array, ...]:
    """Keys and values of items' context, or rows of both, `[items, K, pieces * run, head_dim]` each, before they are
    multiplied by scales."""
    width = stored.format.stored_dim(head_dim)
    bits = [read_runs(stored.kv, which, items, run, width) for which in range(stored.kv.shape[1])]
    return stored.format.read_pair(*bits) if stored.latent_rank is None else (stored.format.from_bits(*bits),)


def zero_for(*trees: Any) -> jax.Array:
    """A float32 0 that inside `shard_map` varies over the mesh axes that any of the arrays varies over, as what a loop
    begins with must if what it computes from the arrays does."""
    arrays = (x for x in jax.tree.leaves(trees) if hasattr(x, "dtype"))
    return sum((jnp.zeros_like(x, jnp.float32, ()) for x in arrays), jnp.float32(0))


def read_queries(x: jax.Array, items: Items, num_kv_heads: int) -> jax.Array:
    """Reads the items' queries from `x [tokens, H, ...]`, as `[items, K, queries * G, ...]`."""
    return split_by_kv_head(x.at[items.token].get(mode="clip", wrap_negative_indices=False), num_kv_heads)


def split_by_kv_head(x: jax.Array, num_kv_heads: int) -> jax.Array:
    """`[items, queries, H, ...]` as `[items, K, queries * G, ...]`."""
    num_items, queries, num_heads, *minor = x.shape
    x = jnp.moveaxis(x.reshape(num_items, queries, num_kv_heads, num_heads // num_kv_heads, *minor), 2, 1)
    return x.reshape(num_items, num_kv_heads, queries * num_heads // num_kv_heads, *minor)


def read_windows(x: jax.Array, start: jax.Array, like: jax.Array) -> jax.Array:
    """Reads windows of `x [K, places, ...]`, which begin at places `i32[items, 1]`, in the shape of `like`."""
    dimensions = jax.lax.GatherDimensionNumbers(
        offset_dims=tuple(range(1, like.ndim)), collapsed_slice_dims=(), start_index_map=(1,)
    )
    return jax.lax.gather(x, start, dimensions, like.shape[1:], mode="promise_in_bounds")


def update_windows(update: Any, x: jax.Array, start: jax.Array, windows: jax.Array) -> jax.Array:
    """Updates windows of `x [K, places, ...]`, which may overlap, by `windows [items, K, ...]`: sets them with
    `jax.lax.scatter`, adds to them with `scatter_add`."""
    dimensions = jax.lax.ScatterDimensionNumbers(
        update_window_dims=tuple(range(1, windows.ndim)), inserted_window_dims=(), scatter_dims_to_operand_dims=(1,)
    )
    return update(x, start, windows, dimensions, mode="promise_in_bounds")
