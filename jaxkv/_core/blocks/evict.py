"""Eviction of tokens from rows, in layers made with `LayerConfig(evict=)`: `evict`."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._core.blocks.allocator import count_blocks, grant_rows, mark_taken, pick_free_blocks, replace_entries
from jaxkv._core.blocks.tables import mark_failed
from jaxkv._core.cache.cache import Cache, check_cache
from jaxkv._core.cache.key_bounds import renew_bounds
from jaxkv._core.config.cache_config import CacheConfig
from jaxkv._core.config.validation import integer, show
from jaxkv._core.state.arguments import cast_int32, is_known, read_numbers
from jaxkv._core.state.head_rows import any_head, repeat_for_heads, row_tables, sum_needs, sum_shards
from jaxkv._core.state.shard_local import find_head_shard
from jaxkv._core.state.sharding import POOL, WHOLE, run_on_shards
from jaxkv._core.state.state import NULL_BLOCK, SENSELESS, BlockTables, Pool


def evict(cache: Cache, keep: Any = None, *, layer: int, scores: Any = None, budget: Any = None) -> Cache:
    """Keeps some of the tokens that one layer holds of each row, and frees the blocks of the others.

    The kept tokens move to the front, in order. Later tokens attend to the kept tokens only, and positions continue
    from all tokens seen; `cache.layers[i].held` counts the kept ones. Shared blocks are copied before they change.
    Call this after a step: the tokens that `extend` made room for must have been written in all layers.

    Args:
      keep: `bool[S, C]`, or `bool[S, K, C]` for a layer with `evict="head"`, over the tokens held, in order. Tokens
        from index C on are dropped. Rows are independent, and a row that keeps everything is not touched.
      layer: the layer's index; it must have been made with `LayerConfig(evict=)`.
      scores: instead of `keep`, the scores of the tokens, `f32[S, K, C]` or `f32[S, C]`, as from `jaxkv.scores`. A
        layer with `evict="layer"` uses the mean over the heads.
      budget: with `scores`, the number of tokens to keep: one number, one for each row, `i32[S]`, or one for each row
        and head, `i32[S, K]`. Of equal scores the earlier token is kept.

    Raises:
      ValueError, IndexError: shapes, dtypes or a layer do not fit; a budget of 0 or a NaN score is known on the host.
        On the device such a row stays as it was and is marked in `cache.failed`, as is a row with too few free blocks
        for its copies.

    With "head" every KV head is a row of its own and frees its own blocks, so that methods which compress heads
    differently, such as AdaKV (https://arxiv.org/abs/2407.11550), free memory here.

    >>> import jax.numpy as jnp, jaxkv
    >>> layer = jaxkv.LayerConfig(num_kv_heads=2, head_dim=8, evict="layer")
    >>> cache = jaxkv.init(jaxkv.CacheConfig(layers=(layer,), max_seqs=2, max_seq_len=64, num_blocks=8))
    >>> kv = jnp.ones((1, 2, 40, 2, 8))
    >>> cache = jaxkv.append(cache, kv, kv, [40, 20])
    >>> cache = jaxkv.evict(cache, scores=jnp.ones((2, 40)), budget=[10, 20], layer=0)
    >>> cache.layers[0].held.tolist(), cache.lengths.tolist(), cache.blocks_in_use
    ([10, 20], [40, 20], 3)
    """
    check_cache(cache)
    config, found = cache.config, cache.layer_config(layer)
    if found.evict is None:
        why = "keeps all tokens" if found.shares_with is None else f"reads what layer {found.shares_with} keeps"
        raise ValueError(f'Layer {layer} {why}: evict is for layers made with LayerConfig(evict="layer" or "head").')
    if (keep is None) == (scores is None) or (scores is None) != (budget is None):
        raise ValueError("evict takes either keep, or scores and a budget, and neither takes part in the other way.")
    if keep is not None:
        given: dict[str, Any] = {"keep": _read_places("keep", keep, cache, layer)}
    else:
        given = {"scores": _read_places("scores", scores, cache, layer), "budget": _read_budget(budget, cache, layer)}
    pools = list(cache.pools)
    cache_tables, pools[layer] = _evict(cache.tables, cache.pools[layer], given, config, config.group(layer))
    return cache.replace(tables=cache_tables, pools=tuple(pools))


@functools.partial(jax.jit, static_argnums=(3, 4))
def _evict(
    tables: tuple[BlockTables, ...], pool: Pool, given: dict[str, jax.Array], config: CacheConfig, group: int
) -> tuple[tuple[BlockTables, ...], Pool]:
    group_tables = tables[group]
    given = {name: x if name == "budget" else x[..., : config.row_places(group)] for name, x in given.items()}
    seen, keep, senseless = row_tables(group_tables, config), given.get("keep"), jnp.zeros(config.max_seqs, bool)
    if keep is None:
        keep, senseless = select_best(given["scores"], given["budget"], group_tables, config)
        senseless &= ~seen.failed
    keep = _repeat_for_heads(keep, group_tables) & (
        jnp.arange(keep.shape[-1], dtype=jnp.int32)[None] < group_tables.lengths[:, None]
    )
    move = _plan(
        group_tables, keep, ~group_tables.failed & ~repeat_for_heads(senseless, group_tables), config.block_size
    )
    needed = sum_needs(move.copied.sum(axis=1, dtype=jnp.int32), group_tables, config)
    granted = grant_rows([needed], [group_tables])
    refused, granted = any_head(move.changes, config) & ~granted, repeat_for_heads(granted, group_tables)
    move = move._replace(changes=move.changes & granted, copied=move.copied & granted[:, None])

    changed, pool = _carry_out(group_tables, pool, move, config, group)
    wanted = jnp.where(senseless, SENSELESS, seen.lengths)
    groups = [*tables[:group], changed, *tables[group + 1 :]]
    return tuple(
        mark_failed(other, refused | senseless, wanted, needed if g == group else 0) for g, other in enumerate(groups)
    ), pool


def thin(cache: Cache, keep: jax.Array, *, layer: int) -> Cache:
    """Evicts tokens of rows whose blocks are not shared, like `evict`, so that no row can be refused.

    Args:
      keep: `bool[S, C]`, or `bool[K * S, C]` by head rows for a layer that evicts by heads.
    """
    config, group = cache.config, cache.config.group(layer)
    tables, pools = cache.tables[group], list(cache.pools)
    keep &= jnp.arange(keep.shape[-1], dtype=jnp.int32)[None] < tables.lengths[:, None]
    move = _plan(tables, keep, ~tables.failed, config.block_size)
    move = move._replace(copied=jnp.zeros_like(move.copied))
    changed, pools[layer] = _carry_out(tables, pools[layer], move, config, group)
    return cache.replace(tables=(*cache.tables[:group], changed, *cache.tables[group + 1 :]), pools=tuple(pools))


class _Move(NamedTuple):
    """Planned moves of tokens, by head rows (R)."""

    changes: jax.Array  # bool[R]: head rows that lose tokens
    left: jax.Array  # i32[R]: tokens that they keep
    source: jax.Array  # i32[R, n]: the old slot of the token at each new slot
    first: jax.Array  # i32[R]: the first column whose tokens change
    end: jax.Array  # i32[R]: the column after the last one with a token
    copied: jax.Array  # bool[R, M]: columns whose block is shared, so that a new one is written


def _plan(tables: BlockTables, keep: jax.Array, allowed: jax.Array, block_size: int) -> _Move:
    places = jnp.arange(-(-keep.shape[1] // block_size) * block_size, dtype=jnp.int32)[None]  # no more is kept
    count = jnp.sum(keep, axis=1, dtype=jnp.int32)
    changes = allowed & (count < tables.lengths)
    line, place = (jnp.broadcast_to(x, keep.shape) for x in (_numbers(keep)[:, None], places[:, : keep.shape[1]]))
    to = jnp.where(keep, jnp.cumsum(keep, axis=1, dtype=jnp.int32) - 1, places.size)
    source = jnp.broadcast_to(places, (keep.shape[0], places.size)).at[line, to].set(place, mode="drop")
    kept_so_far = jnp.sum(jnp.cumsum(~keep, axis=1) == 0, axis=1, dtype=jnp.int32)
    first, end = kept_so_far // block_size, count_blocks(count, block_size)
    column = jnp.arange(tables.tables.shape[1], dtype=jnp.int32)[None]
    written = changes[:, None] & (column >= first[:, None]) & (column < end[:, None])
    return _Move(changes, count, source, first, end, written & (tables.refcounts[tables.tables] > 1))


def _carry_out(
    tables: BlockTables, pool: Pool | None, move: _Move, config: CacheConfig, group: int
) -> tuple[BlockTables, Pool]:
    assert pool is not None
    changed = _hold(tables, move, config)
    arrays = (tables.tables, changed.tables, move)
    specs, layer = (POOL, *[WHOLE] * len(arrays)), config.groups[group][0]
    return changed, run_on_shards(pool, _compact, (pool, *arrays), specs, POOL, config=config, layer=layer)


def _hold(tables: BlockTables, move: _Move, config: CacheConfig) -> BlockTables:
    """Returns the tables after the moves. Blocks for copies are taken before any are freed, so that none of them is
    read later."""
    fresh = pick_free_blocks(tables, move.copied)
    tables = mark_taken(tables, sum_shards(move.copied.sum(axis=1, dtype=jnp.int32), tables))
    gone = move.changes[:, None] & (jnp.arange(tables.tables.shape[1], dtype=jnp.int32)[None] >= move.end[:, None])
    tables = replace_entries(tables, jnp.where(gone | move.copied, NULL_BLOCK, tables.tables))
    assert tables.evicted is not None and tables.thinned is not None
    return dataclasses.replace(
        tables,
        tables=jnp.where(move.copied, fresh, tables.tables),
        lengths=jnp.where(move.changes, move.left, tables.lengths),
        new=jnp.where(repeat_for_heads(any_head(move.changes, config), tables), 0, tables.new),
        evicted=jnp.where(move.changes, tables.seen - move.left, tables.evicted),
        thinned=jnp.where(move.changes, move.left, tables.thinned),
    )


def _compact(pool: Pool, old: jax.Array, new: jax.Array, move: _Move, *, config: CacheConfig, layer: int) -> Pool:
    """Moves the tokens of head rows forward, column by column. A token never moves backward, so that no slot is
    overwritten before it is read."""
    if (shard := find_head_shard(pool)) is not None:
        old, new, move = jax.tree.map(shard.lines, (old, new, move))
        old, new = shard.own(old), shard.own(new)
    size = pool.kv.shape[3]
    behind = pool.kv.shape[0] + _numbers(old)  # past the end: dropped

    def column(j: jax.Array, pool: Pool) -> Pool:
        place = jax.lax.dynamic_slice_in_dim(move.source, j * size, size, axis=1)
        block, offset = jnp.take_along_axis(old, place // size, axis=1), place % size
        written = move.changes & (j >= move.first) & (j < move.end)
        target = jnp.where(written, jax.lax.dynamic_index_in_dim(new, j, axis=1, keepdims=False), behind)

        def put(x: jax.Array) -> jax.Array:
            tokens = jnp.moveaxis(x[block, :, :, offset], 1, 3)
            return x.at[target].set(tokens, mode="drop", unique_indices=True)

        pool = dataclasses.replace(jax.tree.map(put, pool.tokens), bounds=pool.bounds)
        if pool.bounds is None:
            return pool
        changed, filled = jnp.where(written, target, NULL_BLOCK), jnp.clip(move.left - j * size, 0, size)
        return renew_bounds(pool, changed, filled, config=config, layer=layer)

    start = jnp.min(jnp.where(move.changes, move.first, old.shape[1]))
    stop = jnp.max(jnp.where(move.changes, move.end, 0))
    return jax.lax.fori_loop(start, stop, column, pool)


def select_best(
    scores: jax.Array, budget: jax.Array, tables: BlockTables, config: CacheConfig
) -> tuple[jax.Array, jax.Array]:
    """Returns the tokens with the `budget` best scores of each head row, and `bool[S]`, the rows with invalid input."""
    if scores.ndim == 3 and tables.lengths.shape[0] == config.max_seqs:
        scores = scores.mean(axis=1)
    scores = _repeat_for_heads(scores, tables)
    budget = jnp.broadcast_to(
        _repeat_for_heads(budget[..., None], tables)[..., 0] if budget.ndim else budget, scores.shape[:1]
    )
    is_held = jnp.arange(scores.shape[1], dtype=jnp.int32)[None] < tables.lengths[:, None]
    wrong = (jnp.isnan(scores) & is_held).any(axis=1) | (budget < 0)
    order = jnp.argsort(jnp.where(is_held, -scores, jnp.inf), axis=1, stable=True)
    rank = jnp.argsort(order, axis=1)
    return rank < budget[:, None], any_head(wrong, config)


def _repeat_for_heads(x: jax.Array, tables: BlockTables) -> jax.Array:
    """Expands `[S, C]` or `[S, K, C]` to the head rows of a table; head rows stay as they are."""
    if x.ndim == 3:
        return jnp.moveaxis(x, 1, 0).reshape(-1, x.shape[-1])
    return repeat_for_heads(x, tables)


def _numbers(x: jax.Array) -> jax.Array:
    return jnp.arange(x.shape[0], dtype=jnp.int32)


def _read_places(name: str, x: Any, cache: Cache, layer: int) -> jax.Array:
    """Reads `keep` or `scores` over the tokens that rows hold. Raises ValueError."""
    x = read_numbers(name, x)
    rows, found = cache.config.max_seqs, cache.layer_config(layer)
    by_head = found.evict == "head" or name == "scores"
    shapes = ((rows,), (rows, found.num_kv_heads)) if by_head else ((rows,),)
    most, right = cache.config.max_seq_len, jnp.bool_ if name == "keep" else jnp.floating
    if x.shape[:-1] not in shapes or not 0 < x.shape[-1] <= most or not jnp.issubdtype(x.dtype, right):
        kind = "bool" if name == "keep" else "floats "
        wanted = f"{kind}[{rows}, C]" + (f" or [{rows}, {found.num_kv_heads}, C]" if by_head else "")
        raise ValueError(
            f"{name} must be {wanted} over the tokens that layer {layer} holds, with C up to {most}, not "
            f"{x.dtype}{list(x.shape)}."
        )
    held = cache.layer(layer).held
    if not isinstance(held, jax.core.Tracer) and (most := int(np.asarray(held).max())) > x.shape[-1]:
        raise ValueError(f"{name} has slots for {x.shape[-1]} tokens, but a row holds {most} in layer {layer}.")
    if is_known(x) and name == "scores" and np.isnan(x).any():
        raise ValueError(f"scores must be numbers, but one of row {np.argwhere(np.isnan(x))[0][0]} is NaN.")
    return jnp.asarray(x) if name == "keep" else jnp.asarray(x, jnp.float32)


def _read_budget(budget: Any, cache: Cache, layer: int) -> jax.Array:
    """Reads the number of tokens to keep, `i32[]`, `i32[S]` or `i32[S, K]`. Raises ValueError."""
    rows, found = cache.config.max_seqs, cache.layer_config(layer)
    budget = read_numbers("budget", budget)
    if is_known(budget) and budget.ndim == 0:
        return jnp.int32(integer("budget, the tokens to keep,", budget, least=1))
    shapes = ((), (rows,), (rows, found.num_kv_heads)) if found.evict == "head" else ((), (rows,))
    if budget.shape not in shapes or not jnp.issubdtype(budget.dtype, jnp.integer):
        raise ValueError(
            f"budget must be a number of tokens, or integers of the shape {' or '.join(map(str, shapes[1:]))}, not "
            f"{show(budget)}."
        )
    if is_known(budget) and (budget.min() < 0 or budget.max() < 1):
        raise ValueError(f"budget must say how many tokens to keep, at least one, not {show(budget.tolist())}.")
    return cast_int32(budget)
