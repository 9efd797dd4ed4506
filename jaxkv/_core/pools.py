"""Keys and values into the pools: `write`, `append`, and copies of whole blocks."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from jaxkv._core.arguments import row_counts
from jaxkv._core.cache import Cache
from jaxkv._core.state import Pool
from jaxkv._core.tables import drop_unfit, extend


def write(cache: Cache, k: jax.Array, v: jax.Array, *, layer: int, implementation: str | None = None) -> Cache:
    """Store this step's keys and values of one layer. `extend` must have made room for them.

    Args:
      k, v: `[S, T, K, D]` padded or `[N, K, D]` packed; cast to the pool's dtype.
      layer: the layer's index.
      implementation: as in `attention`.

    Raises:
      ValueError, IndexError: shapes, dtypes or a layer that do not fit the cache.

    A row with more new tokens than `k` has places for is left as it was and marked in `cache.failed`.
    """
    check_step(cache, layer, k=k, v=v)
    check_stores(cache, layer)
    cache = drop_unfit(cache, k.shape[:-2])
    tables = cache.layer(layer).tables
    kv = pallas_kernels.write_kv(
        cache.pool(layer).kv, k, v, tables.tables, tables.lengths, tables.new, offsets=tables.offsets,
        implementation=implementation,
    )  # fmt: skip
    return cache.replace_pool(layer, Pool(kv=kv))


def append(cache: Cache, k: Any, v: Any, num_tokens: Any = None, *, implementation: str | None = None) -> Cache:
    """Add tokens to every row in all layers at once: `extend`, then `write` for each layer.

    Args:
      k, v: `[L, S, T, K, D]` padded or `[L, N, K, D]` packed, or a sequence of one such array per layer, with None for
        layers that share another's.
      num_tokens: `i32[S]`, how many each row adds; default: all T places of every row (padded only).

    A row whose tokens do not fit stays as it was and is marked in `cache.failed`: all or nothing.

    >>> import jax.numpy as jnp, jaxkv
    >>> layer = jaxkv.LayerConfig(num_kv_heads=2, head_dim=8)
    >>> cache = jaxkv.init(jaxkv.CacheConfig(layers=(layer,), max_seqs=2, max_seq_len=64, num_blocks=4))
    >>> kv = jnp.ones((1, 2, 5, 2, 8))
    >>> jaxkv.append(cache, kv, kv, [5, 3]).lengths.tolist()
    [5, 3]
    """
    num_layers = cache.num_layers
    if len(k) != num_layers or len(v) != num_layers:
        raise ValueError(
            f"k and v must have one array for each of the {num_layers} layers, but have {len(k)} and {len(v)}."
        )
    stored = [i for i in range(num_layers) if cache.config.owner(i) == i or k[i] is not None or v[i] is not None]
    for layer in stored:
        check_step(cache, layer, k=k[layer], v=v[layer])
        check_stores(cache, layer)
    token_axes = k[0].shape[:-2]
    for layer in stored:
        if k[layer].shape[:-2] != token_axes:
            raise ValueError(
                f"All layers must add the same tokens, but layer 0 has {token_axes} and layer {layer} has "
                f"{k[layer].shape[:-2]}."
            )
    if num_tokens is None:
        if len(token_axes) == 1:
            raise ValueError("Packed tokens need num_tokens, how many of them belong to each row.")
        num_tokens = jnp.full(token_axes[0], token_axes[1], jnp.int32)
    elif not isinstance(num_tokens, jax.Array):
        counts = np.asarray(num_tokens)
        places, most = ("T", counts.max(initial=0)) if len(token_axes) == 2 else ("N", counts.sum())
        if most > token_axes[-1]:
            raise ValueError(f"num_tokens asks for {most} tokens, but k and v have {places} = {token_axes[-1]} places.")
    # On the device more tokens than places make no sense, like a negative number, and are refused like one.
    num_tokens = row_counts("num_tokens", num_tokens, cache.lengths.shape[0])
    end = num_tokens if len(token_axes) == 2 else jnp.cumsum(jnp.clip(num_tokens, 0, token_axes[0] + 1))
    cache = extend(cache, jnp.where((num_tokens > 0) & (end > token_axes[-1]), -1, num_tokens))
    for layer in stored:
        cache = write(cache, k[layer], v[layer], layer=layer, implementation=implementation)
    return cache


def check_step(cache: Cache, layer: int, **arrays: Any) -> None:
    """Raise unless every array is `[S, T, heads, head_dim]` or `[N, heads, head_dim]` for this layer."""
    head_dim = cache.layer_config(layer).head_dim
    rows = cache.lengths.shape[0]
    token_axes = None
    for name, x in arrays.items():
        if not hasattr(x, "ndim"):
            raise ValueError(f"{name} must be an array, not {type(x).__name__}: convert it with jnp.asarray.")
        if x.ndim not in (3, 4):
            raise ValueError(
                f"{name} must be [S, T, heads, {head_dim}] or packed [N, heads, {head_dim}], but its shape is "
                f"{x.shape}."
            )
        if x.ndim == 4 and x.shape[0] != rows:
            raise ValueError(
                f"{name} has {x.shape[0]} rows, but the cache has {rows}: give every row a place, used or not."
            )
        if x.shape[-1] != head_dim:
            raise ValueError(f"{name} has head_dim {x.shape[-1]}, but layer {layer} of the cache has {head_dim}.")
        token_axes = token_axes or (name, x.shape[:-2])
        if x.shape[:-2] != token_axes[1]:
            raise ValueError(
                f"{name} has the token axes {x.shape[:-2]}, but {token_axes[0]} has {token_axes[1]}: they must agree."
            )


def check_stores(cache: Cache, layer: int) -> None:
    """Raise if a layer has no keys and values of its own."""
    if cache.config.owner(layer) != layer:
        raise ValueError(
            f"Layer {layer} reads the keys and values of layer {cache.config.owner(layer)} and stores none: give it "
            "None in their place."
        )


def copy_blocks(pool: Pool, source: jax.Array, target: jax.Array, copied: jax.Array) -> Pool:
    """Copy block `source[i]` over block `target[i]` wherever `copied[i]`. All are read before any is written."""
    return put_blocks(pool, pool.kv[jnp.where(copied, source, 0)], jnp.where(copied, target, 0))


def put_blocks(pool: Pool, blocks: jax.Array, target: jax.Array) -> Pool:
    """`blocks[i]` in the place of block `target[i]`; where that is the null block, nothing happens."""
    past_the_end = pool.kv.shape[0] + jnp.arange(target.shape[0], dtype=jnp.int32)
    place = jnp.where(target == 0, past_the_end, target)
    return Pool(kv=pool.kv.at[place].set(blocks, mode="drop", unique_indices=True))
