"""Reads one row of a cache as dense arrays."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxkv._core.cache.cache import Cache, check_cache
from jaxkv._core.cache.pool_access import read_raw
from jaxkv._core.cache.row_checks import check_row
from jaxkv._core.config.validation import integer
from jaxkv._core.state.sharding import POOL, WHOLE, head_spec, run_on_shards


def gather(cache: Cache, row: Any, *, layer: int, max_len: int | None = None, raw: bool = False) -> tuple[Any, ...]:
    """Returns the stored keys and values of one row, dense; float32 for a quantized layer.

    Args:
      row: a row index; it may be traced when `max_len` is given.
      layer: the layer's index.
      max_len: number of tokens of the result, 0 past the row's length; required inside `jit`.
      raw: whether to return a quantized layer's `(k, v, k_scale, v_scale)` as stored, rotated if the layer rotates.
        For a latent layer v and v_scale are None. With `v_head_dim` groups of four bits count from the first value on,
        so that the last scale of v may be the first of k.

    Returns:
      k, v: `[length, K, D]` each, or `[max_len, K, D]`; 0 for tokens that a layer with a window has freed. For a latent
      layer v is the first `rank` entries of k. A layer that evicts returns the tokens it holds; if by heads, as many as
      the head that holds most, and 0 after those of the others.

    Raises:
      IndexError: no such row or layer. ValueError: the length is traced and there is no `max_len`; `max_len` is not a
      non-negative integer; `raw` is given for a layer that is not quantized.

    >>> import jax.numpy as jnp, jaxkv
    >>> config = jaxkv.LayerConfig(num_kv_heads=2, head_dim=8)
    >>> cache = jaxkv.init(jaxkv.CacheConfig(layers=(config,), max_seqs=2, max_seq_len=64, num_blocks=4))
    >>> kv = jnp.ones((1, 2, 5, 2, 8))
    >>> k, v = jaxkv.gather(jaxkv.append(cache, kv, kv, [5, 3]), 1, layer=0)
    >>> k.shape
    (3, 2, 8)
    """
    check_cache(cache)
    check_row(cache, row)
    if max_len is None:
        length = cache.layer(layer).held[row]
        if isinstance(length, jax.core.Tracer):
            raise ValueError("gather inside jit needs max_len=, since the row's length is not known there.")
        max_len = int(length.max())
    max_len = integer("max_len", max_len, least=0)
    if not max_len:  # one token is read: an empty array cannot be placed on a mesh
        return tuple(None if x is None else x[:0] for x in gather(cache, row, layer=layer, max_len=1, raw=raw))
    position = jnp.arange(max_len, dtype=jnp.int32)
    if not raw:
        return cache.read(layer, row, position)
    kind = cache.config.kind(layer)
    if not kind.is_quantized:
        raise ValueError(f"raw=True is for quantized layers, and layer {layer} is stored in {kind.name}.")
    block, offset = cache.slots(row, position, layer=layer)
    pool, out = cache.pool(layer), head_spec(block.ndim)
    values = None if cache.config.layer_config(layer).rank is not None else out
    specs = (out, values, out, values)
    arguments, read = (pool, block, offset), (POOL, WHOLE, WHOLE)
    found = run_on_shards(pool, read_raw, arguments, read, specs, config=cache.config, layer=layer)
    return found if block.ndim == 1 else tuple(None if x is None else jnp.squeeze(x, 2) for x in found)
