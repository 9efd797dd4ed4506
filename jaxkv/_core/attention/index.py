"""Index keys of layers that choose their tokens: `write_index`, and the choice by them, for `jaxkv.scores.indexer`."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels
from jaxkv._core.attention.layer_call import (
    check_stores,
    find_layer,
    layer_specs,
    make_call,
    settle_layer,
)
from jaxkv._core.attention.layout_adapters import DecodePacking, Output, TableColumns, adapt
from jaxkv._core.attention.plan import Step, check_plan
from jaxkv._core.cache.cache import Cache
from jaxkv._core.state.columns import blocks_of
from jaxkv._core.state.shard_local import find_block_runs
from jaxkv._core.state.sharding import POOL, WHOLE, run_on_shards
from jaxkv._core.state.state import IndexKeys, Layer, Pool
from jaxkv._core.state.state_repr import describe_array
from pallas_kernels.api.backends import find_backend
from pallas_kernels.api.selection import select_tokens
from pallas_kernels.common.batch import MaskSpec, PagedBatch
from pallas_kernels.common.context_parallel import select_local_tokens
from pallas_kernels.common.index_keys import Best, StoredIndex
from pallas_kernels.common.ragged_layout import locate
from pallas_kernels.xla.chosen.index import write_index as scatter

INDEX_ADAPTERS = (TableColumns, DecodePacking)


def write_index[C: (Cache, Layer)](
    cache: C, index_k: jax.Array, *, layer: Any = None, step: Step | None = None, implementation: str | None = None
) -> C:
    """Stores this step's index keys of one layer, by which later queries choose tokens. `extend` must have made room.

    Before or after the step's `write` or `attention`: neither touches what the other stores.

    Args:
      cache: a cache, or one of its `layers`.
      index_k: `[S, T, index_dim]` padded or `[N, index_dim]` packed; one key a token, rotated as the queries are.
      layer, step, implementation: as in `attention`. Quantized index keys are written by XLA alone.

    Returns:
      The cache, or the layer.

    Raises:
      ValueError, IndexError: the layer keeps no index keys; invalid shapes, dtypes or layer.
      NotImplementedError: `implementation` names a backend that cannot write them.

    >>> import jax.numpy as jnp, jaxkv
    >>> layer = jaxkv.LayerConfig(num_kv_heads=2, head_dim=8, index_dim=4)
    >>> cache = jaxkv.init(jaxkv.CacheConfig(layers=(layer,), max_seqs=2, max_seq_len=64, num_blocks=4))
    >>> cache = jaxkv.write_index(jaxkv.extend(cache, [3, 1]), jnp.ones((2, 3, 4)), layer=0)
    >>> cache.pools[0].index.keys[1, 0, 0, :4, 0].tolist()
    [1.0, 1.0, 1.0, 0.0]
    """
    found = find_layer(cache, layer)
    token_axes = _check_index(found, "index_k", index_k, ())
    check_stores(found)
    check_plan(step, found.config, "index_k", token_axes)
    _check_writer(found, implementation)
    opened, put_back = settle_layer(cache, layer, found, token_axes, step)
    with jax.named_scope("write_index"):
        return put_back(store_index(opened, step, index_k, implementation=implementation))


def store_index(layer: Layer, step: Step | None, index_k: jax.Array, *, implementation: str | None) -> Layer:
    """Returns a layer with this step's index keys."""
    arguments, specs = (layer, step, index_k), (layer_specs(layer), WHOLE, WHOLE)
    pool = run_on_shards(layer.pool, _store, arguments, specs, POOL, implementation=implementation)
    return dataclasses.replace(layer, pool=pool)


def _check_writer(layer: Layer, implementation: str | None) -> None:
    """Raises NotImplementedError if a backend is asked to write quantized index keys that has no kernel for them."""
    form = layer.config.index_kind(layer.number)
    if implementation in (None, "xla") or not form.is_quantized:
        return
    find_backend(str(implementation))
    raise NotImplementedError(
        f"The {implementation} backend has no kernel that writes index keys in {form.name}; leave implementation=None "
        "to use XLA's."
    )


def _store(layer: Layer, step: Step | None, index_k: jax.Array, *, implementation: str | None) -> Pool:
    call, _ = adapt(make_call(layer, step, k=index_k[..., None, :]), INDEX_ADAPTERS)
    assert call.k is not None
    layer, stored = call.layer, _find_index(call.layer)
    runs, lengths = find_block_runs(layer.pool), layer.tables.lengths
    stripe = None if runs is None else runs.stripe
    if not stored.format.is_quantized:
        keys = pallas_kernels.write_kv(
            stored.keys,
            call.k,
            None,
            layer.blocks,
            lengths,
            call.query_lens,
            offsets=call.query_starts,
            rank=call.k.shape[-1],
            stripe=stripe,
            implementation=implementation,
        )
        return dataclasses.replace(layer.pool, index=IndexKeys(keys))
    batch, new = PagedBatch(layer.blocks, lengths, call.query_lens, call.query_starts, stripe), call.k
    if stripe is not None:
        new, _, batch = select_local_tokens(new, None, batch, stored.keys.shape[3])
    keys, scale = scatter(new[..., 0, :], stored, batch)
    return dataclasses.replace(layer.pool, index=IndexKeys(keys, scale))


def choose_tokens(
    cache: Any, *, layer: Any, q: Any, weights: Any, top_k: int, step: Step | None
) -> tuple[jax.Array, jax.Array]:
    """Returns the positions of the best `top_k` tokens of each query, and their scores; see `jaxkv.scores.indexer`."""
    found = find_layer(cache, layer)
    if not hasattr(q, "ndim") or q.ndim not in (3, 4):
        raise ValueError(f"q must be [S, T, heads, E] or packed [N, heads, E], not {describe_array(q)}.")
    token_axes = _check_index(found, "q", q, q.shape[-2:-1])
    if getattr(weights, "shape", None) != q.shape[:-1] or not jnp.issubdtype(weights.dtype, jnp.floating):
        raise ValueError(
            f"weights must be floats{list(q.shape[:-1])}, one of each head of q, not {describe_array(weights)}."
        )
    if (evict := found.config.retentions[found.group].evict) is not None:
        raise ValueError(
            f'Layer {found.number} has evict="{evict}", where a token\'s slot is not its position, so that no '
            "positions can be chosen: make the layer without evict."
        )
    check_plan(step, found.config, "q", token_axes)
    opened, _ = settle_layer(cache, layer, found, token_axes, step)
    with jax.named_scope("indexer"):
        arguments = (opened, step, *jax.lax.stop_gradient((jnp.asarray(q), jnp.asarray(weights)[..., None])))
        specs = (layer_specs(opened), WHOLE, WHOLE, WHOLE)
        position, score = run_on_shards(opened.pool, _choose, arguments, specs, (WHOLE, WHOLE), top_k=top_k)
        if (skipped := opened.tables.skipped) is not None:
            tables, size = opened.tables, opened.config.block_size
            row = locate(token_axes, tables.lengths, tables.new, tables.offsets).row[..., None]
            block = blocks_of(position // size, skipped[row], opened.config.group_sink_blocks[opened.group])
            position = jnp.where(position < 0, -1, block * size + position % size)
        return position, score


def _choose(
    layer: Layer, step: Step | None, q: jax.Array, weights: jax.Array, *, top_k: int
) -> tuple[jax.Array, jax.Array]:
    of_heads = adapt(make_call(layer, step, q=weights), INDEX_ADAPTERS)[0].q
    call, undo = adapt(make_call(layer, step, q=q), INDEX_ADAPTERS)
    layer = call.layer
    assert call.q is not None and of_heads is not None
    runs, stored = find_block_runs(layer.pool), _find_index(layer)
    stored = stored._replace(keys=jax.lax.stop_gradient(stored.keys))
    stripe = None if runs is None else runs.stripe
    batch = PagedBatch(layer.blocks, layer.tables.lengths, call.query_lens, call.query_starts, stripe)
    mask = MaskSpec(**layer.layer_config.mask_options(layer.number, {}))
    best = select_tokens(call.q, of_heads[..., 0], stored, batch, mask, top_k)
    if runs is not None:
        score, position = (runs.gather(x, x.ndim - 1) for x in best)
        best = _best_of_all(score, position, top_k)
    position, score = undo(Output(best.position + 1, best.score))  # padding becomes 0 and -inf
    return position - 1, score


def _best_of_all(score: jax.Array, position: jax.Array, top_k: int) -> Best:
    """Returns the best of what several devices have found."""
    lowest, position = jax.lax.sort((-score, position), num_keys=2)
    return Best(-lowest[..., :top_k], position[..., :top_k])


def _find_index(layer: Layer) -> StoredIndex:
    index = layer.pool.index
    assert index is not None
    return StoredIndex(index.keys, index.scale, layer.config.index_kind(layer.number))


def _check_index(layer: Layer, name: str, x: Any, heads: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the token axes of an array of index keys or queries. Raises ValueError."""
    width = layer.config.index_dim(layer.number)
    if width is None:
        raise ValueError(
            f"Layer {layer.number} keeps no index keys: make it with LayerConfig(..., index_dim=), as wide as they are."
        )
    inner = ", ".join(map(str, (*heads, width)))
    ranks = (2 + len(heads), 3 + len(heads))
    if not hasattr(x, "ndim") or x.ndim not in ranks or x.shape[-1] != width:
        raise ValueError(f"{name} must be [S, T, {inner}] or packed [N, {inner}], not {describe_array(x)}.")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"{name} must be floating point, not {x.dtype}.")
    token_axes = x.shape[: x.ndim - 1 - len(heads)]
    if len(token_axes) == 2 and token_axes[0] != layer.rows:
        raise ValueError(
            f"{name} has {token_axes[0]} rows, but the cache has max_seqs = {layer.rows}: pad it to all rows."
        )
    return token_axes
