"""Writes a step's keys and values into the pools: `write` and `append`."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels
from jaxkv._core.attention.layer_call import (
    check_stores,
    check_tokens,
    layer_specs,
    make_call,
    name_values,
    open_layer,
)
from jaxkv._core.attention.layout_adapters import adapt, check_heads, storage_arguments
from jaxkv._core.attention.plan import Step, plan_step
from jaxkv._core.blocks.tables import extend
from jaxkv._core.cache.cache import Cache, check_cache
from jaxkv._core.cache.key_bounds import find_touched_blocks, renew_bounds
from jaxkv._core.state.arguments import is_known, read_numbers, row_counts
from jaxkv._core.state.sharding import NEW, POOL, WHOLE, head_spec, run_on_shards
from jaxkv._core.state.state import Layer, Pool


def write[C: (Cache, Layer)](
    cache: C,
    k: jax.Array,
    v: jax.Array | None,
    *,
    layer: Any = None,
    step: Step | None = None,
    implementation: str | None = None,
) -> C:
    """Stores this step's keys and values of one layer. `extend` must have made room for them.

    Args:
      cache: a cache, or one of its `layers`.
      k, v: `[S, T, K, D]` padded or `[N, K, D]` packed; cast to the pool's dtype. For a latent layer v is None.
      layer, step, implementation: as in `attention`.

    Returns:
      The cache, or the layer.

    Raises:
      ValueError, IndexError: invalid shapes, dtypes or layer.

    A row with more new tokens than `k` has stays unchanged and is marked in `cache.failed`.

    >>> import jax.numpy as jnp, jaxkv
    >>> sizes = dict(num_layers=1, num_kv_heads=2, head_dim=8, max_seqs=2, max_seq_len=64)
    >>> cache = jaxkv.init(jaxkv.CacheConfig.uniform(**sizes, num_blocks=4))
    >>> kv = jnp.ones((2, 3, 2, 8))
    >>> cache = jaxkv.write(jaxkv.extend(cache, [3, 1]), kv, kv, layer=0)
    >>> k, v = jaxkv.gather(cache, 0, layer=0)
    >>> k.shape
    (3, 2, 8)
    """
    opened, put_back = open_layer(cache, layer, step, stores=True, k=k, **name_values(cache, layer, v))
    check_heads(opened, k=k, v=v)
    with jax.named_scope("write"):
        return put_back(store_tokens(opened, step, k, v, implementation=implementation))


def store_tokens(layer: Layer, step: Step | None, k: Any, v: Any, *, implementation: str | None) -> Layer:
    """Returns a layer with this step's keys and values, and so its residual layer."""
    residual, token = layer.residual, head_spec(k.ndim - 2, NEW)
    if residual is not None:
        layer = dataclasses.replace(layer, residual=None)
        residual = store_tokens(residual, step, k, v, implementation=implementation)
    arguments, specs = (layer, step, k, v), (layer_specs(layer), WHOLE, token, token)
    pool = run_on_shards(layer.pool, _store, arguments, specs, POOL, implementation=implementation)
    return dataclasses.replace(layer, pool=pool, residual=residual)


def _store(layer: Layer, step: Step | None, k: jax.Array, v: jax.Array | None, *, implementation: str | None) -> Pool:
    call, _ = adapt(make_call(layer, step, k=k, v=v))
    layer, lengths = call.layer, call.layer.tables.lengths
    written = pallas_kernels.write_kv(
        layer.pool.kv,
        call.k,
        call.v,
        layer.blocks,
        lengths,
        call.query_lens,
        offsets=call.query_starts,
        implementation=implementation,
        **storage_arguments(layer),
        **call.options,
    )
    return make_pool(written, layer, call.tokens)


def append(cache: Cache, k: Any, v: Any, num_tokens: Any = None, *, implementation: str | None = None) -> Cache:
    """Adds tokens to every row in all layers at once: `extend`, then `write` for each layer.

    Args:
      k, v: `[L, S, T, K, D]` padded or `[L, N, K, D]` packed, or a sequence of one such array per layer, with None for
        layers that share another's. For latent layers v has None, or is None if all are latent.
      num_tokens: `i32[S]`, the tokens that each row adds; default: all T of every row (padded only).

    A row whose tokens do not fit stays unchanged and is marked in `cache.failed`: all or nothing.

    >>> import jax.numpy as jnp, jaxkv
    >>> layer = jaxkv.LayerConfig(num_kv_heads=2, head_dim=8)
    >>> cache = jaxkv.init(jaxkv.CacheConfig(layers=(layer,), max_seqs=2, max_seq_len=64, num_blocks=4))
    >>> kv = jnp.ones((1, 2, 5, 2, 8))
    >>> jaxkv.append(cache, kv, kv, [5, 3]).lengths.tolist()
    [5, 3]
    """
    check_cache(cache)
    num_layers = cache.num_layers
    v = [None] * num_layers if v is None else v
    for name, x in {"k": k, "v": v}.items():
        if isinstance(x, Mapping) or not hasattr(x, "__len__") or getattr(x, "shape", None) == ():
            raise ValueError(f"{name} must be [L, ...] or one array for each layer, not {type(x).__name__}.")
    if len(k) != num_layers or len(v) != num_layers:
        raise ValueError(
            f"k and v must have one array for each of the {num_layers} layers, but have {len(k)} and {len(v)}."
        )
    stored = [i for i in range(num_layers) if cache.config.owner(i) == i or k[i] is not None or v[i] is not None]
    for layer in stored:
        check_tokens(cache.layer(layer), {"k": k[layer], **name_values(cache, layer, v[layer])})
        check_stores(cache.layer(layer))
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
    given = read_numbers("num_tokens", num_tokens)
    num_tokens = row_counts("num_tokens", given, cache.lengths.shape[0])
    if is_known(given):
        axis, most = ("T", given.max(initial=0)) if len(token_axes) == 2 else ("N", given.sum())
        if most > token_axes[-1]:
            raise ValueError(f"num_tokens asks for {most} tokens, but k and v have {axis} = {token_axes[-1]} slots.")
    # On the device more tokens than slots are invalid, like a negative number, and are refused like one.
    end = num_tokens if len(token_axes) == 2 else jnp.cumsum(jnp.clip(num_tokens, 0, token_axes[0] + 1))
    cache = extend(cache, jnp.where((num_tokens > 0) & (end > token_axes[-1]), -1, num_tokens))
    step = plan_step(cache, token_axes)
    for layer in stored:
        cache = write(cache, k[layer], v[layer], layer=layer, step=step, implementation=implementation)
    return cache


def make_pool(written: Any, layer: Layer, tokens: jax.Array) -> Pool:
    """Returns a layer's pool from a kernel's results: the numbers, or the numbers and their scales.

    `tokens` has the token axes of what was written.
    """
    kv, scale = written if isinstance(written, tuple) else (written, None)
    pool, tables = dataclasses.replace(layer.pool, kv=kv, scale=scale), layer.tables
    if pool.bounds is None:
        return pool
    size, most = layer.config.block_size, math.prod(tokens.shape[:-2])
    block, filled = find_touched_blocks(
        layer.blocks, tables.lengths, tables.lengths - tables.new, tables.lengths, size, most
    )
    return renew_bounds(pool, block, filled, config=layer.config, layer=layer.number)
