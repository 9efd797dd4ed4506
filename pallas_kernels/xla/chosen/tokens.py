"""Attention over chosen tokens in plain XLA: each query reads the rows of its own tokens, and nothing else.

A few queries at a time, so that memory beside the result holds what these have chosen. Work grows with the number of
chosen tokens, not with the context.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.common.batch import MaskSpec, PagedBatch, SoftmaxOptions, StoredKV
from pallas_kernels.common.masks import WindowMask, find_last_key
from pallas_kernels.common.ragged_layout import Tokens, locate
from pallas_kernels.xla import tile_reads, tile_sizes
from pallas_kernels.xla.softmax import MASKED


class TokenQueries(NamedTuple):
    """Some queries, one after another."""

    q: jax.Array  # [n, H, D]
    token: Tokens
    chosen: jax.Array  # i32[n, top_k]


class Slots(NamedTuple):
    """Where the chosen tokens of queries lie."""

    block: jax.Array  # i32[n, top_k]: the null block where `seen` is False
    offset: jax.Array
    position: jax.Array
    seen: jax.Array  # bool[n, top_k]


def attend_tokens(q, stored: StoredKV, batch: PagedBatch, mask: MaskSpec, options: SoftmaxOptions):
    """Computes what [`pallas_kernels.paged_attention`][] means with `tokens`."""
    *token_axes, num_heads, head_dim = q.shape
    num_tokens, chosen = math.prod(token_axes), mask.tokens
    assert chosen is not None
    chosen = chosen.reshape(num_tokens, -1) if chosen.shape[-1] else jnp.full((num_tokens, 1), -1, jnp.int32)
    token = jax.tree.map(jnp.ravel, locate(tuple(token_axes), *batch[1:4]))
    queries = TokenQueries(q.reshape(num_tokens, num_heads, head_dim), token, chosen)
    run = functools.partial(_attend, stored=stored, batch=batch, mask=mask, options=options)
    count = 1 if options.deterministic else _count_at_once(q, stored, chosen.shape[-1])
    width = stored.value_dim(head_dim)
    out, lse = map_some(jax.checkpoint(run), queries, count, (stored, batch))
    out = out.reshape(*token_axes, num_heads, width)
    return (out, lse.reshape(*token_axes, num_heads)) if options.return_lse else out


def map_some(run, queries: TokenQueries, count: int, others) -> tuple[jax.Array, jax.Array]:
    """Runs a function on `count` queries at a time. Those that are padding alone are 0, with an LSE of -inf."""
    num_tokens = queries.token.row.shape[0]
    count = min(count, num_tokens)
    pieces = -(-num_tokens // count)
    padded = jax.tree.map(lambda x: jnp.pad(x, [(0, pieces * count - num_tokens), *[(0, 0)] * (x.ndim - 1)]), queries)
    padded = jax.tree.map(lambda x: x.reshape(pieces, count, *x.shape[1:]), padded)
    zero = tile_reads.zero_for(queries, others)

    def some(piece: TokenQueries) -> tuple[jax.Array, jax.Array]:
        shapes = jax.eval_shape(run, piece)

        def skip(_: TokenQueries) -> tuple[jax.Array, jax.Array]:
            out, lse = (jnp.zeros(x.shape, x.dtype) + zero.astype(x.dtype) for x in shapes)
            return out, lse - jnp.float32(jnp.inf)

        def work(piece: TokenQueries) -> tuple[jax.Array, jax.Array]:
            out, lse = run(piece)
            return out + zero.astype(out.dtype), lse + zero

        return jax.lax.cond(jnp.any(piece.token.valid), work, skip, piece)

    found = jax.lax.map(some, padded)
    return jax.tree.map(lambda x: x.reshape(pieces * count, *x.shape[2:])[:num_tokens], found)


def find_slots(
    queries: TokenQueries, batch: PagedBatch, mask: MaskSpec, block_size: int, *, seen_first: bool = False
) -> Slots:
    """Finds the tokens that queries have chosen, in order of their positions, each once.

    Those that are not seen, and all but one of the same, are between the others, or behind them if `seen_first`.
    """
    row, position, valid = queries.token
    kv_lens, (tables, shard) = batch.kv_lens[row], (batch.block_tables, batch.context_shard)
    # Not stable: equal numbers need no order, and XLA would sort each with its place.
    chosen = jax.lax.sort(queries.chosen, dimension=1, is_stable=False)
    last = find_last_key(position if mask.causal else kv_lens - 1, mask.compress_ratio)
    seen = (chosen >= 0) & (chosen <= last[:, None]) & valid[:, None]
    seen &= chosen != jnp.pad(chosen[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    window_mask = WindowMask.from_spec(mask, np.iinfo(np.int32).max)
    if window_mask.ends:
        seen &= window_mask.covers(chosen, window_mask.first(position)[:, None])
    if shard is not None:
        seen &= chosen // block_size % shard[1] == shard[0]
    if seen_first:  # numbers alone again, for a sort is slower by what goes with them
        last_of_all = jnp.int32(np.iinfo(np.int32).max)
        chosen = jax.lax.sort(jnp.where(seen, chosen, last_of_all), dimension=1, is_stable=False)
        seen = chosen != last_of_all
    column, offset = tile_sizes.parts(jnp.where(seen, chosen, 0), block_size)
    if shard is not None:
        column //= shard[1]
    column = jnp.minimum(column, tables.shape[1] - 1)
    block = jnp.where(seen, tables[row[:, None], column], 0)
    return Slots(block, offset, chosen, seen)


def _attend(
    queries: TokenQueries, *, stored: StoredKV, batch: PagedBatch, mask: MaskSpec, options: SoftmaxOptions
) -> tuple[jax.Array, jax.Array]:
    q, num_kv_heads = queries.q, stored.kv.shape[2]
    count, num_heads, head_dim = q.shape
    slots = find_slots(queries, batch, mask, stored.kv.shape[3])
    keys, values = _read(slots, stored, q.dtype, head_dim)
    grouped = q.reshape(count, num_kv_heads, num_heads // num_kv_heads, head_dim)
    logits = _product("nkgd,nckd->nkgc", grouped, keys) * jnp.asarray(options.logit_scale(head_dim), jnp.float32)
    if options.soft_cap is not None:
        soft_cap = jnp.asarray(options.soft_cap, jnp.float32)
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    if options.alibi is not None:
        slopes = options.alibi.astype(jnp.float32).reshape(num_kv_heads, -1)
        distance = jnp.abs(queries.token.position[:, None] - slots.position).astype(jnp.float32)
        logits -= slopes[None, :, :, None] * distance[:, None, None]
    logits = jnp.where(slots.seen[:, None, None], logits, MASKED)
    top = logits.max(axis=-1)
    if options.sinks is not None:  # one more place to attend to, which has no value
        sinks = options.sinks.astype(jnp.float32).reshape(num_kv_heads, -1)[None]
        top = jnp.maximum(top, sinks)
    nothing = ~slots.seen.any(axis=1)[:, None, None]
    top = jnp.where(nothing, 0.0, top)
    weights = jnp.where(slots.seen[:, None, None], jnp.exp(logits - top[..., None]), 0.0)
    total = weights.sum(axis=-1)
    if options.sinks is not None:
        total += jnp.exp(sinks - top)
    total = jnp.where(nothing, 1.0, total)
    out = _product("nkgc,nckd->nkgd", weights, values) / total[..., None]
    lse = jnp.where(nothing, -jnp.inf, top + jnp.log(total))
    return out.reshape(count, num_heads, -1).astype(q.dtype), lse.reshape(count, num_heads)


def _read(slots: Slots, stored: StoredKV, dtype, head_dim: int) -> tuple[jax.Array, jax.Array]:
    """Keys and values of slots, `[n, top_k, K, D]`; values that are not seen are 0."""
    format, rank = stored.format, stored.latent_rank
    both = stored.kv[slots.block, :, :, slots.offset, : format.stored_dim(head_dim)]  # [n, top_k, 2, K, ..]
    if stored.scale is not None:
        both = format.decode(both, stored.scale[slots.block, :, :, slots.offset], head_dim, stored.half_rank, axis=2)
    elif both.dtype != dtype:
        both = both.astype(jnp.float32)
    keys, values = both[:, :, 0], both[:, :, -1]
    values = values if rank is None else values[..., :rank]
    return keys, jnp.where(slots.seen[:, :, None, None], values, jnp.zeros((), values.dtype))


def _product(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    precision = "highest" if b.dtype == jnp.float32 else None
    return jnp.einsum(subscripts, a.astype(b.dtype), b, precision=precision, preferred_element_type=jnp.float32)


def _count_at_once(q, stored: StoredKV, top_k: int) -> int:
    """Returns how many queries are computed at a time."""
    _, parts, heads, _, width = stored.kv.shape
    entries = parts * heads * width * stored.format.numbers_per_entry
    size = stored.kv.dtype.itemsize if stored.kv.dtype == q.dtype else stored.kv.dtype.itemsize + 4
    return max(1, tile_sizes.find_sizes().selection_bytes // (top_k * (entries * size + q.shape[-2] * 8)))
