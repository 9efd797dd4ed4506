"""A step's keys and values into the pools: `write` and `append`."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels
from jaxkv._core.attention.plan import Step, check_plan, plan_step, settle, settled
from jaxkv._core.blocks.tables import extend
from jaxkv._core.cache.cache import Cache, check_cache
from jaxkv._core.cache.key_bounds import renewed, touched
from jaxkv._core.config.rotation import rotate
from jaxkv._core.state.arguments import is_known, read_numbers, row_counts
from jaxkv._core.state.head_rows import own_lines, seen_by_rows, split_heads, split_offsets
from jaxkv._core.state.shard_local import runs_of
from jaxkv._core.state.sharding import NEW, POOL, WHOLE, heads_at, on_shards, shards_of
from jaxkv._core.state.state import Layer, Pool
from pallas_kernels.api.arguments import check_attention, check_new, check_query_heads, check_variants


def write(
    cache: Any, k: jax.Array, v: jax.Array | None, *, layer: Any = None, step: Step | None = None,
    implementation: str | None = None,
) -> Any:  # fmt: skip
    """Store this step's keys and values of one layer. `extend` must have made room for them.

    Args:
      cache: a cache, or one of its `layers`.
      k, v: `[S, T, K, D]` padded or `[N, K, D]` packed; cast to the pool's dtype. Of a latent layer v is None.
      layer, step, implementation: as in `attention`.

    Returns:
      The cache, or the layer.

    Raises:
      ValueError, IndexError: shapes, dtypes or a layer that do not fit the cache.

    A row with more new tokens than `k` has places for is left as it was and marked in `cache.failed`.

    >>> import jax.numpy as jnp, jaxkv
    >>> sizes = dict(num_layers=1, num_kv_heads=2, head_dim=8, max_seqs=2, max_seq_len=64)
    >>> cache = jaxkv.init(jaxkv.CacheConfig.uniform(**sizes, num_blocks=4))
    >>> kv = jnp.ones((2, 3, 2, 8))
    >>> cache = jaxkv.write(jaxkv.extend(cache, [3, 1]), kv, kv, layer=0)
    >>> k, v = jaxkv.gather(cache, 0, layer=0)
    >>> k.shape
    (3, 2, 8)
    """
    one, put_back = open_layer(cache, layer, step, stores=True, k=k, **values_of(cache, layer, v))
    check_heads(one, k=k, v=v)
    with jax.named_scope("write"):
        token = heads_at(k.ndim - 2, NEW)
        arguments, specs = (one, step, k, v), (layer_specs(one), WHOLE, token, token)
        return put_back(on_shards(one.pool, _store, arguments, specs, POOL, implementation=implementation))


def _store(one: Layer, step: Step | None, k: jax.Array, v: jax.Array | None, *, implementation: str | None) -> Pool:
    one = own_lines(one)
    t = one.tables
    k, v = (spread(step, one, turned(one, x)) for x in (k, v))
    offsets, (k, v) = offsets_of(k, one), new_rows(one, split_heads(one, k), split_heads(one, v))
    written = pallas_kernels.write_kv(
        one.pool.kv, k, v, one.blocks, t.lengths, t.new, offsets=offsets, implementation=implementation,
        **storage(one), **stripe_of(one.pool),
    )  # fmt: skip
    return as_pool(written, one, k)


def append(cache: Cache, k: Any, v: Any, num_tokens: Any = None, *, implementation: str | None = None) -> Cache:
    """Add tokens to every row in all layers at once: `extend`, then `write` for each layer.

    Args:
      k, v: `[L, S, T, K, D]` padded or `[L, N, K, D]` packed, or a sequence of one such array per layer, with None for
        layers that share another's. Of latent layers v has None, or is None if all are.
      num_tokens: `i32[S]`, how many each row adds; default: all T places of every row (padded only).

    A row whose tokens do not fit stays as it was and is marked in `cache.failed`: all or nothing.

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
        if not hasattr(x, "__len__"):
            raise ValueError(f"{name} must be [L, ...] or one array for each layer, not {type(x).__name__}.")
    if len(k) != num_layers or len(v) != num_layers:
        raise ValueError(
            f"k and v must have one array for each of the {num_layers} layers, but have {len(k)} and {len(v)}."
        )
    stored = [i for i in range(num_layers) if cache.config.owner(i) == i or k[i] is not None or v[i] is not None]
    for layer in stored:
        check_tokens(cache.layer(layer), {"k": k[layer], **values_of(cache, layer, v[layer])})
        _check_stores(cache.layer(layer))
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
        places, most = ("T", given.max(initial=0)) if len(token_axes) == 2 else ("N", given.sum())
        if most > token_axes[-1]:
            raise ValueError(f"num_tokens asks for {most} tokens, but k and v have {places} = {token_axes[-1]} places.")
    # On the device more tokens than places make no sense, like a negative number, and are refused like one.
    end = num_tokens if len(token_axes) == 2 else jnp.cumsum(jnp.clip(num_tokens, 0, token_axes[0] + 1))
    cache = extend(cache, jnp.where((num_tokens > 0) & (end > token_axes[-1]), -1, num_tokens))
    step = plan_step(cache, token_axes)
    for layer in stored:
        cache = write(cache, k[layer], v[layer], layer=layer, step=step, implementation=implementation)
    return cache


def open_layer(
    cache: Any, layer: Any, step: Step | None, *, stores: bool = False, **arrays: Any
) -> tuple[Layer, Callable[[Pool], Any]]:  # fmt: skip
    """One layer with its tables settled for a step, and what puts another pool back into where it came from.

    Args:
      cache: a cache, or one of its layers, which needs no `layer`.
      stores: raise if the layer has no keys and values of its own.
      **arrays: the step's arrays, `[S, T, heads, head_dim]` or `[N, heads, head_dim]`.
    """
    one = layer_of(cache, layer)
    token_axes = check_tokens(one, arrays)
    if stores:
        _check_stores(one)
    check_plan(step, one.config, next(iter(arrays)), token_axes)
    if isinstance(cache, Layer):
        one = dataclasses.replace(one, tables=settle(one.tables, one.group, token_axes, step))
        return one, lambda pool: dataclasses.replace(one, pool=pool)
    cache = settled(cache, token_axes, step)
    one = cache.layer(layer)
    return one, lambda pool: cache.with_layer(layer, dataclasses.replace(one, pool=pool))


def storage(one: Layer) -> dict[str, Any]:
    """What the kernels have to know of how a pool stores its tokens."""
    kind = one.config.kind(one.number).quantised
    rank = one.layer_config.rank or one.config.form(one.number).rank
    known = {} if kind is None else {"kv_scale": one.pool.scale, "kind": kind}
    return known if rank is None else known | {"rank": rank}


def stripe_of(pool: Pool) -> dict[str, Any]:
    """What the kernels have to know where a device holds a run of every block's tokens."""
    runs = runs_of(pool)
    return {} if runs is None else {"stripe": runs.stripe}


def values_of(cache: Any, layer: Any, v: Any) -> dict[str, Any]:
    """A layer's values as one of the arrays of a step, by name; a latent layer must be given none."""
    one = layer_of(cache, layer)
    rank = one.layer_config.rank
    if rank is None:
        return {"v": v}
    if v is not None:
        raise ValueError(
            f"Layer {one.number} is latent, its values are the first {rank} numbers of its keys: give it None for v."
        )
    return {}


def turned(one: Layer, x: Any) -> Any:
    """Queries, keys, values or outputs `[..., D]`, rotated if the layer stores them so, or rotated back."""
    return rotate(x) if x is not None and one.config.rotates(one.number) else x


def new_rows(one: Layer, k: Any, v: Any) -> tuple[Any, Any]:
    """A step's keys and values `[.., K, D]` as the kernels take them, which see the rows of a pool."""
    form = one.config.form(one.number)
    if form.joins:  # what the kernels would say is of rows
        blocks, _, heads, block_size, _ = one.pool.kv.shape
        apart = (blocks, 2, form.heads(heads), block_size, form.head_dim)
        check_new(k, v, jax.ShapeDtypeStruct(apart, one.pool.kv.dtype), None, one.tables.tables, None)
    return form.new(k, v)


def queries(one: Layer, q: jax.Array) -> jax.Array:
    """A step's queries `[.., H, D]` as the kernels take them."""
    form = one.config.form(one.number)
    if form.joins:
        check_query_heads(q.shape[-2], form.heads(one.pool.kv.shape[2]))
    return form.queries(q, one.pool.kv.shape[2])


def outputs(one: Layer, out: Any) -> Any:
    """What the kernels return for `queries`, alone or with the LSE, as `[.., H, D]`."""
    if isinstance(out, tuple):
        return outputs(one, out[0]), out[1]
    return one.config.form(one.number).outputs(out, one.pool.kv.shape[2])


def as_pool(written: Any, one: Layer, k: jax.Array) -> Pool:
    """A layer's pool of what the kernels have made of it with new keys: its numbers, or them and their scales."""
    kv, scale = written if isinstance(written, tuple) else (written, None)
    pool, t = dataclasses.replace(one.pool, kv=kv, scale=scale), one.tables
    if pool.bounds is None:
        return pool
    size, most = one.config.block_size, math.prod(k.shape[:-2])
    block, filled = touched(one.blocks, t.lengths, t.lengths - t.new, t.lengths, size, most)
    return renewed(pool, block, filled, config=one.config, layer=one.number)


def layer_specs(one: Layer) -> Any:
    """What `on_shards` has to know of a layer."""
    return dataclasses.replace(one, pool=POOL, tables=WHOLE, place=None if one.place is None else WHOLE)  # type: ignore[arg-type]


def check_heads(one: Layer, *, k: Any = None, v: Any = None, q: Any = None, **options: Any) -> None:
    """Raise where the heads of a step's arrays do not fit a layer's, before they are divided among devices."""
    if shards_of(one.pool) is None:  # whoever computes with them checks it
        return
    kv, tables, stored = one.pool.kv, one.tables.tables, storage(one)
    kind, rank = stored.get("kind"), stored.get("rank")
    q, k, v = jax.eval_shape(lambda: [split_heads(one, x) for x in (q, k, v)])
    if k is not None:
        k, v = jax.eval_shape(functools.partial(new_rows, one), k, v)
        check_new(k, v, kv, kind, tables, rank)
    if q is not None:
        q = jax.eval_shape(functools.partial(queries, one), q)
        scale, sinks, alibi = (options.get(name) for name in ("scale", "sinks", "alibi"))
        check_attention(q, kv, tables, None, kind, scale, None, None, sinks, None, rank, None)
        check_variants(q, tables, alibi, None, None, True, None, False)


def layer_of(cache: Any, layer: Any) -> Layer:
    """The layer that is meant by a cache and an index, or by a layer alone."""
    if isinstance(cache, Layer):
        if layer is not None:
            raise ValueError(f"layer={layer} is for a cache, but this is one of its layers: leave it out.")
        if cache.pool is None:
            i, owner = cache.number, cache.config.owner(cache.number)
            raise ValueError(
                f"Layer {i} reads what layer {owner} keeps, and in a list of layers does not see what that one writes: "
                f"take cache.with_layer({owner}, layers[{owner}]).layers[{i}] once layer {owner} is written."
            )
        return cache
    if not isinstance(cache, Cache):
        raise ValueError(f"cache must be a jaxkv.Cache or one of its layers, not {type(cache).__name__}.")
    if layer is None:
        raise ValueError("layer must say which of the cache's layers is meant, unless one of cache.layers is given.")
    return cache.layer(layer)


def check_tokens(one: Layer, arrays: dict[str, Any]) -> tuple[int, ...]:
    """The token axes of a step's arrays; each must be `[S, T, heads, head_dim]` or `[N, heads, head_dim]`."""
    head_dim, rows = one.layer_config.head_dim, one.rows
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
        if x.shape[-1] != head_dim and (rank := one.layer_config.rank) is not None:
            raise ValueError(
                f"{name} has {x.shape[-1]} numbers a head, but layer {one.number} is latent, with {rank} + "
                f"{head_dim - rank}: queries come absorbed, and behind them and the keys their rotated part."
            )
        if x.shape[-1] != head_dim:
            raise ValueError(f"{name} has head_dim {x.shape[-1]}, but layer {one.number} of the cache has {head_dim}.")
        token_axes = token_axes or (name, x.shape[:-2])
        if x.shape[:-2] != token_axes[1]:
            raise ValueError(
                f"{name} has the token axes {x.shape[:-2]}, but {token_axes[0]} has {token_axes[1]}: they must agree."
            )
    assert token_axes is not None
    return token_axes[1]


def _check_stores(one: Layer) -> None:
    owner = one.config.owner(one.number)
    if owner != one.number:
        raise ValueError(
            f"Layer {one.number} reads the keys and values of layer {owner} and stores none: give it None in "
            "their place."
        )


# A packed step of which no row has more than one token is a decode step: its tokens are spread over the rows, which is
# what kernels for decoding read, and what comes out is put back.


def spread(step: Step | None, one: Layer, x: Any) -> Any:
    """`[N, ...]` packed to `[S, 1, ...]` in a decode step; anything else as it is."""
    if not is_spread(step) or x is None:
        return x
    start = seen_by_rows(one.tables, one.config).offsets
    return x[jnp.clip(start, 0, x.shape[0] - 1)][:, None]


def gathered(step: Step | None, out: jax.Array, padding: float) -> jax.Array:
    """The opposite of `spread`: `[S, 1, ...]` to `[N, ...]`."""
    if not is_spread(step):
        return out
    assert step is not None
    valid = jnp.expand_dims(step.token.valid, range(1, out.ndim - 1))
    return jnp.where(valid, out[step.token.row, 0], jnp.asarray(padding, out.dtype))


def is_spread(step: Step | None) -> bool:
    return step is not None and step.decode and len(step.token_axes) == 1 and step.token_axes[0] > 0


def offsets_of(x: jax.Array, one: Layer) -> jax.Array | None:
    """Where packed tokens start; padded ones have no offsets."""
    return split_offsets(one, one.tables.offsets, x.shape[0]) if x.ndim == 3 else None
