"""Scores of tokens by index keys in plain XLA, and the best of each query: streamed over the context.

A query's score of a token is the sum over heads of `weight * relu(q . key)`, in float32. Tiles of queries of one row
read the row's keys piece by piece, and keep the best so far: nothing is as large as tokens times context.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.common.batch import MaskSpec, PagedBatch
from pallas_kernels.common.context_parallel import count_local_tokens, position_of
from pallas_kernels.common.index_keys import NOTHING, Best, IndexQueries, Lanes, StoredIndex
from pallas_kernels.common.masks import WindowMask, find_last_key
from pallas_kernels.common.ragged_layout import locate
from pallas_kernels.xla import tile_reads, tile_sizes, work_list
from pallas_kernels.xla.write import find_places

QUERIES = 16  # of a tile, of rows with more than one token
# Tokens of the context that are scored at a time. The fewer the pieces, the less it costs to merge the best of them;
# but a row that ends within a piece pays for all of it.
LEAST_PIECE, MOST_PIECE = 512, 8192


def select_tokens(
    q,
    weights,
    stored: StoredIndex,
    batch: PagedBatch,
    mask: MaskSpec,
    top_k: int,
    *,
    select: Callable[[IndexQueries, Lanes, int], Best] | None = None,
    queries: int | None = None,
) -> Best:
    """Returns the best `top_k` tokens of each query, of those that it sees.

    Args:
      q: `[S, T, heads, E]` padded or `[N, heads, E]` packed; weights: the same without the last axis.
      batch: as for attention; with a context shard the best of the tokens at hand, by their positions in whole rows.
      mask: of which window, chunk, sink tokens and `compress_ratio` are read.
      select: returns the best of the queries of lanes, `[lanes * queries, n]`, for a backend's kernel; default: XLA's.
      queries: of a lane of a row with several tokens, then.
    """
    *token_axes, num_heads, width = q.shape
    num_tokens, most = math.prod(token_axes), batch.block_tables.shape[1] * stored.keys.shape[3]
    kept = max(1, min(top_k, most))
    if num_tokens == 0:
        empty = jnp.zeros((*token_axes, top_k))
        return Best(empty.astype(jnp.float32), empty.astype(jnp.int32))
    inputs = IndexQueries(
        q.reshape(num_tokens, num_heads, width),
        weights.reshape(num_tokens, -1),
        stored,
        batch,
        mask,
    )
    choose, queries = select or _select, queries or min(QUERIES, num_tokens)

    def select_best(lanes: Lanes) -> Best:
        return choose(inputs, lanes._replace(position=find_last_key(lanes.position, mask.compress_ratio)), kept)

    token = jax.tree.map(jnp.ravel, locate(tuple(token_axes), *batch[1:4]))
    rows = work_list.find_rows(tuple(token_axes), batch)
    if token_axes[-1] == 1:
        best = jax.tree.map(lambda x: x[token.row], select_best(_lone_lanes(rows, rows.query_lens)))
    else:
        lone = rows.query_lens == 1
        of_lone = select_best(_lone_lanes(rows, jnp.where(lone, rows.query_lens, 0)))
        lanes, lane, place = _tile_lanes(rows, jnp.where(lone, 0, rows.query_lens), num_tokens, token, queries)
        many, is_lone = select_best(lanes), lone[token.row][:, None]
        best = jax.tree.map(lambda a, b: jnp.where(is_lone, a[token.row], b[lane * queries + place]), of_lone, many)
    best = Best(best.score, jnp.where(token.valid[:, None] & (best.score > NOTHING), best.position, -1))
    pad = ((0, 0), (0, top_k - kept))
    score, position = jnp.pad(best.score, pad, constant_values=NOTHING), jnp.pad(best.position, pad, constant_values=-1)
    score = jnp.where(position < 0, NOTHING, score)
    return Best(*(x.reshape(*token_axes, top_k) for x in (score, position)))


def _lone_lanes(rows: work_list.WorkRows, count: jax.Array) -> Lanes:
    """A lane for each row, of its only token."""
    position = jnp.where(count > 0, rows.first_position, -1)
    return Lanes(jnp.arange(count.shape[0], dtype=jnp.int32), rows.query_starts[:, None], position[:, None])


def _tile_lanes(
    rows: work_list.WorkRows, count: jax.Array, num_tokens: int, token, queries: int
) -> tuple[Lanes, jax.Array, jax.Array]:
    """Lanes for the tokens of all rows, and each token's lane and place in it."""
    most = min(count.shape[0], num_tokens // 2) + num_tokens // queries
    each = tile_sizes.cover(count, queries)
    ends = jnp.cumsum(each)
    lane = jnp.arange(most, dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(ends, lane, side="right", method="compare_all"), count.shape[0] - 1)
    row = row.astype(jnp.int32)
    nth = ((lane - (ends - each)[row]) * queries)[:, None] + jnp.arange(queries, dtype=jnp.int32)[None]
    is_there = (nth < count[row][:, None]) & (lane < ends[-1])[:, None]
    position = jnp.where(is_there, rows.first_position[row][:, None] + nth, -1)
    index = jnp.clip(rows.query_starts[row][:, None] + nth, 0, num_tokens - 1)
    tile, place = tile_sizes.parts(jnp.maximum(token.position - rows.first_position[token.row], 0), queries)
    own = jnp.clip((ends - each)[token.row] + tile, 0, most - 1)
    return Lanes(row, index, position), own, place


def _select(inputs: IndexQueries, lanes: Lanes, kept: int) -> Best:
    """The best of the queries of lanes, `[lanes * queries, kept]`."""
    num_lanes, queries = lanes.position.shape
    num_heads, capacity = inputs.q.shape[1], inputs.batch.block_tables.shape[1] * inputs.stored.keys.shape[3]
    at_once = tile_sizes.find_sizes().selection_bytes // (4 * queries * num_heads)  # products of keys with all heads
    piece = min(max(LEAST_PIECE, min(4 * kept, MOST_PIECE, at_once)), capacity)
    piece = -(-piece // 16) * 16  # so that all keys are multiplied alike, whatever their place
    count = min(num_lanes, max(1, at_once // piece))
    groups = -(-num_lanes // count)
    more = groups * count - num_lanes
    padded = Lanes(
        jnp.pad(lanes.row, (0, more)),
        jnp.pad(lanes.token, ((0, more), (0, 0))),
        jnp.pad(lanes.position, ((0, more), (0, 0)), constant_values=-1),
    )
    padded = jax.tree.map(lambda x: x.reshape(groups, count, *x.shape[1:]), padded)
    found = jax.lax.map(lambda some: _stream(inputs, some, kept, piece), padded)
    return jax.tree.map(lambda x: x.reshape(groups * count * queries, kept)[: num_lanes * queries], found)


def _stream(inputs: IndexQueries, lanes: Lanes, kept: int, piece: int) -> Best:
    """The best of the queries of a few lanes: reads the context of their rows piece by piece."""
    size, shard = inputs.stored.keys.shape[3], inputs.batch.context_shard
    window_mask = WindowMask.from_spec(inputs.mask, np.iinfo(np.int32).max)
    begin, end = jnp.zeros((), jnp.int32), jnp.max(lanes.position) + 1
    if window_mask.ends and not window_mask.sink_tokens:
        there = jnp.where(
            lanes.position < 0, jnp.iinfo(jnp.int32).max, jnp.maximum(window_mask.first(lanes.position), 0)
        )
        begin = jnp.min(there)
    if shard is not None:
        begin, end = (count_local_tokens(jnp.maximum(x, 0), shard, size) for x in (jnp.minimum(begin, end), end))
    zero = tile_reads.zero_for(inputs, lanes)
    shape = (*lanes.position.shape, kept)
    nothing = Best(
        jnp.full(shape, NOTHING, jnp.float32) + zero, jnp.full(shape, -1, jnp.int32) + zero.astype(jnp.int32)
    )

    def step(i: jax.Array, best: Best) -> Best:
        new = _score(inputs, lanes, i * piece + jnp.arange(piece, dtype=jnp.int32), window_mask)
        score, position = (jnp.concatenate(pair, axis=-1) for pair in zip(best, new, strict=True))
        score, place = jax.lax.top_k(score, kept)  # of equal ones the first, whose position is the earlier
        return Best(score, jnp.take_along_axis(position, place, axis=-1))

    return jax.lax.fori_loop(jnp.minimum(begin, end) // piece, -(-end // piece), step, nothing)


def _score(inputs: IndexQueries, lanes: Lanes, place: jax.Array, window_mask: WindowMask) -> Best:
    """The scores of the tokens at some places of each lane's row, `[lanes, queries, places]`."""
    keys, scale, format = inputs.stored
    tables, shard, size = inputs.batch.block_tables, inputs.batch.context_shard, keys.shape[3]
    column, offset = tile_sizes.parts(place, size)
    key = place if shard is None else position_of(column, offset, shard, size)
    block = tables[lanes.row[:, None], jnp.minimum(column, tables.shape[1] - 1)[None]]
    its_keys = format.from_bits(keys[block, 0, 0, offset[None], : inputs.q.shape[-1]]).astype(jnp.float32)
    queries, weights = (x[lanes.token].astype(jnp.float32) for x in (inputs.q, inputs.weights))
    products = jnp.einsum("lce,lqhe->lcqh", its_keys, queries, precision="highest")  # many rows first: faster on CPUs
    score = jnp.sum(weights[:, None] * jnp.maximum(products, 0.0), axis=-1).swapaxes(1, 2)
    if scale is not None:
        score *= scale[block, 0, 0, offset[None]].astype(jnp.float32)[:, None]
    key = key[None, None]
    seen = (key <= lanes.position[..., None]) & (column < tables.shape[1])[None, None]
    if window_mask.ends:
        seen &= window_mask.covers(key, window_mask.first(lanes.position)[..., None])
    return Best(jnp.where(seen, score, NOTHING), jnp.broadcast_to(key, score.shape))


def write_index(x: jax.Array, stored: StoredIndex, batch: PagedBatch) -> tuple[jax.Array, jax.Array | None]:
    """Returns index keys and scales with those of a step's tokens, `[S, T, E]` or `[N, E]`, by an in-place scatter."""
    keys, scale, format = stored
    block, offset = find_places(x.shape[:-1], batch, keys)
    new = x.reshape(-1, x.shape[-1])

    def put(pool: jax.Array, values: jax.Array, *minor: slice) -> jax.Array:
        place = pool.at[block, 0, 0, offset, *minor]
        return place.set(values.astype(pool.dtype), mode="drop", unique_indices=True)

    if scale is None:
        return put(keys, new, slice(0, x.shape[-1])), None
    numbers, scales = format.encode(new, scale.dtype)
    return put(keys, numbers, slice(0, x.shape[-1])), put(scale, scales)
