"""Selects the blocks to read: those most relevant to a query."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._core.attention.attention_options import read_scale
from jaxkv._core.cache.block_selection import (
    BlockBounds,
    block_bounds,
    blocks_of_bounds,
    check_bounds,
    find_tables,
    number_blocks,
    take_entries,
)
from jaxkv._core.cache.cache import Cache
from jaxkv._core.config.validation import integer
from jaxkv._core.state.sharding import find_pool_mesh
from jaxkv._core.state.state import Layer
from pallas_kernels.common.ragged_layout import locate

LARGEST = float(np.finfo(np.float32).max)
TOGETHER = 1 << 20  # bytes of bounds that are gathered at a time


def quest(
    cache: Cache,
    *,
    layer: int,
    q: Any,
    num_blocks: int,
    bounds: BlockBounds | None = None,
    scale: float | None = None,
) -> jax.Array:
    """Selects the blocks of each row most relevant to the step's queries, for `attend(blocks=)`. Pure and jittable.

    A block's `block_bounds` limit the logits of its keys. Each head applies a softmax to these upper bounds, as if they
    were the logits of all tokens of the block. A block's score is the sum over all heads and all of the step's tokens.
    The blocks that hold the step's tokens are always selected, as many as fit.

    Args:
      q: `[S, T, H, D]` or packed `[N, H, D]`, as `attend` takes it; H query heads, rotated as the keys are.
      num_blocks: number of blocks a row, n; a Python integer, since it sets a shape.
      bounds: current bounds of this layer. Default: those that a layer made with `LayerConfig(bounds=True)` keeps; for
        any other layer they are computed, which reads all keys. With bounds that `block_bounds(..., bounds=, last=)`
        keeps up to date, little more than the selected blocks is read.
      scale: factor of the logits; default `D ** -0.5`.

    Returns:
      `i32[S, n]`: logical blocks in increasing order, then -1.

    Raises:
      ValueError: `q` does not match the step's tokens or the layer's heads, or `num_blocks` is below 1.

    After Quest (Tang et al. 2024), which selects for each head separately; here blocks hold all heads.

    >>> import jax, jaxkv, jaxkv.scores
    >>> sizes = dict(num_layers=1, num_kv_heads=2, head_dim=8, max_seqs=1, max_seq_len=64)
    >>> cache = jaxkv.init(jaxkv.CacheConfig.uniform(**sizes, num_blocks=16, block_size=4))
    >>> kv = jax.random.normal(jax.random.key(0), (1, 1, 50, 2, 8))
    >>> cache = jaxkv.extend(jaxkv.append(cache, kv, kv, [50]), [1])
    >>> q, k = jax.random.normal(jax.random.key(1), (1, 1, 4, 8)), kv[0, :, :1]
    >>> cache = jaxkv.write(cache, k, k, layer=0)
    >>> blocks = jaxkv.scores.quest(cache, layer=0, q=q, num_blocks=3)
    >>> blocks.shape, int(blocks[0, -1]), jaxkv.attend(q, cache, layer=0, blocks=blocks).shape
    ((1, 3), 12, (1, 1, 4, 8))
    """
    num_blocks = integer("num_blocks", num_blocks, least=1)
    tables, size = find_tables(cache, layer), cache.config.block_size
    if bounds is not None:
        check_bounds(cache, layer, bounds)
    found = cache.layer(layer)
    looks_up = bounds is None and found.pool.bounds is not None and find_pool_mesh(found.pool) is None
    if bounds is None and not looks_up:
        bounds = block_bounds(cache, layer=layer)
    of_layer, rows, width = found.layer_config, cache.config.max_seqs, blocks_of_bounds(cache, layer)
    column = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (rows, width))
    block = number_blocks(cache, layer, column)
    if tables.skipped is not None:
        tables = dataclasses.replace(tables, tables=take_entries(cache, layer, block), skipped=None)
        found = dataclasses.replace(found, tables=tables)
    num_kv_heads, head_dim = of_layer.num_kv_heads, of_layer.head_dim
    shape = tuple(getattr(q, "shape", ()))
    padded = len(shape) == 4
    if len(shape) not in (3, 4) or (padded and shape[0] != rows):
        raise ValueError(f"q must be [{rows}, T, H, {head_dim}], or packed [N, H, {head_dim}], not {list(shape)}.")
    if shape[-1] != head_dim or shape[-2] % num_kv_heads:
        raise ValueError(
            f"q has {shape[-2]} heads of {shape[-1]}, but the layer {num_kv_heads} of {head_dim}: their number must be "
            "a multiple of the layer's, and their size the same."
        )
    scale = read_scale(scale, head_dim)
    with jax.named_scope("quest"):
        token = jax.tree.map(jnp.ravel, locate(shape[:-2], tables.lengths, tables.new, tables.offsets))
        queries = q.reshape(-1, num_kv_heads, shape[-2] // num_kv_heads, head_dim).astype(jnp.float32)

        def select_tokens(x: jax.Array) -> jax.Array:
            # The bounds of padded tokens are in the order of the rows: indexing would copy them.
            return _repeat(x, shape[1]) if padded else x[token.row]

        if looks_up:
            logits = _look_up(queries, found, select_tokens)
        else:
            assert bounds is not None
            logits = _largest(queries, *map(select_tokens, bounds))
        logits = jnp.nan_to_num(scale * logits, nan=LARGEST, posinf=LARGEST, neginf=-LARGEST)
        filled = jnp.clip(tables.lengths[:, None] - block * size, 0, size)
        held = jnp.where(tables.tables != 0, filled, 0)  # i32[S, M]: tokens of each block
        logits = jnp.where((held > 0)[token.row][:, None, None], logits, -jnp.inf)
        largest = jnp.maximum(jnp.max(logits, axis=-1, keepdims=True), -LARGEST)
        weights = jnp.exp(logits - largest) * held[token.row][:, None, None].astype(jnp.float32)
        shares = weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), jnp.float32(1e-30))
        shares = jnp.where(token.valid[:, None], jnp.sum(shares, axis=(1, 2)), jnp.float32(0))
        total = jnp.zeros((rows, width), jnp.float32).at[token.row].add(shares)
        first_new = (tables.lengths - tables.new) // size
        total = jnp.where((block >= first_new[:, None]) & (tables.new > 0)[:, None], jnp.float32(jnp.inf), total)
        total = jnp.where(held > 0, total, -jnp.float32(1))
        best, chosen = jax.lax.top_k(total, min(num_blocks, width))
        chosen = jnp.sort(jnp.where(best < 0, width, chosen), axis=1)
        chosen = jnp.where(chosen == width, -1, number_blocks(cache, layer, chosen)).astype(jnp.int32)
        return jnp.pad(chosen, ((0, 0), (0, max(num_blocks - width, 0))), constant_values=-1)


def _largest(queries: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
    """Computes upper bounds `[n, K, G, M]` of the products of queries `[n, K, G, D]` with keys within bounds
    `[n, M, K, D]`: each entry takes the larger of its two products.

    Sums of products read the bounds in place: a CPU would transpose them for dots with few queries.
    """
    entries = queries[:, None]
    better = jnp.maximum(entries, 0) * high[:, :, :, None] + jnp.minimum(entries, 0) * low[:, :, :, None]
    return jnp.moveaxis(jnp.sum(better, axis=-1), 1, 3)


def _look_up(queries: jax.Array, layer: Layer, select_tokens: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Computes the same from the bounds stored beside the blocks, a few at a time: a copy of all would not fit a CPU's
    caches. Stops at the longest row; entries of blocks that are not held are meaningless."""
    pool, width, lengths = jnp.asarray(layer.pool.bounds), layer.blocks.shape[1], layer.tables.lengths
    size = min(width, max(1, TOGETHER // (layer.blocks.shape[0] * math.prod(pool.shape[1:]) * pool.dtype.itemsize)))
    count = -(-width // size)
    blocks = jnp.pad(layer.blocks, ((0, 0), (0, count * size - width)))

    def some(i: jax.Array, logits: jax.Array) -> jax.Array:
        both = pool[jax.lax.dynamic_slice_in_dim(blocks, i * size, size, axis=1)].astype(jnp.float32)
        bounded = _largest(queries, select_tokens(both[:, :, 0]), select_tokens(both[:, :, 1]))
        return jax.lax.dynamic_update_slice_in_dim(logits, bounded, i * size, axis=3)

    stop = jnp.minimum(-(-jnp.max(lengths, initial=0) // (size * layer.config.block_size)), count)
    logits = jnp.zeros((*queries.shape[:-1], count * size), jnp.float32)
    return jax.lax.fori_loop(0, stop, some, logits)[..., :width]


def _repeat(x: jax.Array, count: int) -> jax.Array:
    """Repeats each row `count` times: `[S, ...]` to `[S * count, ...]`."""
    return jnp.broadcast_to(x[:, None], (x.shape[0], count, *x.shape[1:])).reshape(-1, *x.shape[1:])
