"""Paged attention and the cache write in plain XLA, for every platform.

A loop takes the tiles of a work list a few at a time, reads their blocks, and merges their softmax online
(https://arxiv.org/abs/2205.14135). The list has only what some token sees: work grows with the tokens that rows hold,
one compile serves all lengths, and besides the result memory holds one step of the loop, never a row's dense keys and
values. Where all that the tables could hold is no more than that, there is no loop: rows are read whole, in a third of
the kernels. Only how much a step does depends on the platform.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.common.batch import MaskSpec, PagedBatch, SoftmaxOptions, StoredKV
from pallas_kernels.common.quantization import widen_int8
from pallas_kernels.common.ragged_layout import locate
from pallas_kernels.common.shared_prefix import TOGETHER, WORTH_ROWS, Shared, queries_together
from pallas_kernels.common.xla_cpu import compute_once
from pallas_kernels.xla import int8_product, tile_reads, tile_sizes, work_list
from pallas_kernels.xla.chosen.tokens import attend_tokens
from pallas_kernels.xla.softmax import (
    MASKED,
    PartialSoftmax,
    RunningSoftmax,
    finite_top,
    merge_in_order,
    merge_softmaxes,
)


@jax.jit
def paged_attention(q, stored: StoredKV, batch: PagedBatch, mask: MaskSpec, options: SoftmaxOptions):
    """Computes what [`pallas_kernels.paged_attention`][] means."""
    *token_axes, num_heads, head_dim = q.shape
    stored = stored.join_scales()
    kv, tables, deterministic, sinks = stored.kv, batch.block_tables, options.deterministic, options.sinks
    num_tokens, width = math.prod(token_axes), stored.value_dim(head_dim)
    if num_tokens == 0:
        q = q[..., :width]
        return (q, jnp.zeros(q.shape[:-1], jnp.float32)) if options.return_lse else q
    if mask.tokens is not None:
        return attend_tokens(q, stored, batch, mask, options)
    rows = work_list.find_rows(tuple(token_axes), batch)
    token = jax.tree.map(jnp.ravel, locate(tuple(token_axes), *batch[1:4]))
    scale = jnp.asarray(options.logit_scale(head_dim), jnp.float32)
    soft_cap = None if options.soft_cap is None else jnp.asarray(options.soft_cap, jnp.float32)
    tile_mask = work_list.find_tile_mask(tuple(token_axes), rows, batch, mask)
    alibi = None if options.alibi is None else options.alibi.astype(jnp.float32).reshape(kv.shape[2], -1)
    flat_q = q.reshape(num_tokens, num_heads, head_dim)
    inputs = _Inputs(flat_q, stored, scale, soft_cap, alibi, tile_mask)

    together = None
    if options.shared is not None:
        together, rows = _attend_together(inputs, rows, Shared.unpack(options.shared), token)

    listed = tables if tile_mask.blocks is None else tile_mask.blocks

    def whole_tiles(most: int) -> tile_sizes.Tiling | None:
        """The tiles of rows of at most so many tokens of this step, if they are read whole."""
        return None if together is not None or deterministic else tile_sizes.tile_rows(inputs.q, kv, listed, most)

    def attend_at_once(count: jax.Array, tiling: tile_sizes.Tiling) -> PartialSoftmax:
        """Attends for rows with at least one token and at most the tiling's queries."""
        return _attend_at_once(inputs, rows._replace(query_lens=count), token, tiling, tuple(token_axes))

    def attend(running: RunningSoftmax, count: jax.Array, most: int) -> RunningSoftmax:
        """Attends for rows with at least one and at most `most` tokens."""
        queries = most if most == 1 else tile_queries if deterministic else min(tile_queries, most)
        lanes = tables.shape[0] if most == 1 else min(tables.shape[0], num_tokens // 2) + num_tokens // queries
        tiling = tile_sizes.choose_tiling(inputs.q, kv, listed, queries, lanes, deterministic)
        return _attend_tiles(inputs, rows._replace(query_lens=count), tiling, lanes, deterministic, running)

    longest, tile_queries = token_axes[-1], tile_sizes.find_sizes().queries
    if (tiling := whole_tiles(longest)) is not None:
        softmax = attend_at_once(rows.query_lens, tiling)
    elif longest == 1:
        softmax = attend(_begin(inputs, rows, num_tokens), rows.query_lens, 1).select(num_tokens, num_heads)
    else:  # rows with one token of this step gain nothing from tiles of queries
        lone = rows.query_lens == 1
        lone_count, count = jnp.where(lone, rows.query_lens, 0), jnp.where(lone, 0, rows.query_lens)
        # Behind the last token there is room for a tile that begins with it.
        running = _begin(inputs, rows, num_tokens + tile_queries)
        if (tiling := whole_tiles(1)) is None:  # loops go on with what the one before them has
            running = attend(running, lone_count, 1)
        softmax = attend(running, count, longest).select(num_tokens, num_heads)
        if tiling is not None:
            is_lone = work_list.take(lone, token.row)
            softmax = jax.tree.map(
                lambda a, b: jnp.where(jnp.expand_dims(is_lone, range(1, a.ndim)), a, b),
                attend_at_once(lone_count, tiling),
                softmax,
            )

    softmax = softmax if together is None else merge_softmaxes(together, softmax)
    top, values, total = softmax
    nothing = ~token.valid[:, None] | (total == 0)
    if sinks is not None:  # one more place to attend to, which has no value
        sink = sinks.astype(jnp.float32)[None]
        higher = jnp.maximum(top, sink)
        shrink = jnp.exp(top - higher)
        total = jnp.where(top <= MASKED, 0.0, total * shrink + jnp.exp(sink - higher))
        top, values = higher, values * shrink[..., None]
    out = jnp.where(nothing[..., None], 0.0, values / jnp.where(nothing, 1.0, total)[..., None])
    out = out.astype(q.dtype).reshape(*q.shape[:-1], width)
    if not options.return_lse:
        return out
    lse = jnp.where(nothing, -jnp.inf, top + jnp.log(jnp.where(nothing, 1.0, total)))
    return out, lse.reshape(q.shape[:-1])


class _Inputs(NamedTuple):
    """What the tiles of a step share; tokens are flat."""

    q: jax.Array  # [tokens, H, D]
    stored: StoredKV
    scale: jax.Array
    soft_cap: jax.Array | None
    alibi: jax.Array | None  # f32[K, G]
    tile_mask: work_list.TileMask


def _begin(inputs: _Inputs, rows: work_list.WorkRows, room: int) -> RunningSoftmax:
    """Returns the softmaxes of tokens that have seen nothing yet."""
    num_heads, head_dim = inputs.q.shape[1:]
    num_kv_heads = inputs.stored.kv.shape[2]
    zero, size = tile_reads.zero_for(inputs, rows), room * (num_heads // num_kv_heads)
    both = jnp.where(jnp.arange(2 * size) < size, zero + MASKED, zero)
    return RunningSoftmax(
        jnp.broadcast_to(both, (num_kv_heads, 2 * size)),
        jnp.broadcast_to(zero, (num_kv_heads, size, inputs.stored.value_dim(head_dim))),
    )


def _attend_tiles(
    inputs: _Inputs,
    rows: work_list.WorkRows,
    tiling: tile_sizes.Tiling,
    lanes: int,
    deterministic: bool,
    running: RunningSoftmax,
) -> RunningSoftmax:
    """Adds to the softmaxes of the tokens of rows whose `query_lens` is not 0. A tile's tokens lie side by side: with
    `rows.order` at places of their own."""
    num_heads, num_kv_heads = inputs.q.shape[1], inputs.stored.kv.shape[2]
    group, size = num_heads // num_kv_heads, running.size
    work = work_list.plan(tiling, lanes, rows, inputs.tile_mask)

    def step(i, running: RunningSoftmax) -> RunningSoftmax:
        both, values = running
        items = work_list.find_items(tiling, work, rows, i, inputs.tile_mask)
        seen = _read(inputs, items, tiling, tile_reads.read_queries(inputs.q, items, num_kv_heads))
        at, item_top = items.place[:, None] * group, seen.logits.max(axis=-1)
        if deterministic:
            item = PartialSoftmax(item_top, *_weigh(seen, finite_top(item_top), inputs.q.dtype))
            is_token = jnp.repeat(items.is_token, group, axis=1)[:, None]
            return merge_in_order(running, at[:, 0], item, is_token)
        # Windows overlap: where items of a lane share a step, and where one reaches into the next row. So each token is
        # rescaled to its top after the step, to the same number in all its windows, before sums are added. That makes
        # the bits depend on which items share a step; to be deterministic, each has a softmax of its own.
        read, update = tile_reads.read_windows, tile_reads.update_windows
        top_at, total_at = compute_once((at, at + size))  # else each that reads or writes computes them
        # Read before it is written: else XLA copies all that the loop carries.
        before, both = compute_once((read(both, top_at, item_top), both))
        both = update(jax.lax.scatter_max, both, top_at, item_top)
        reference = compute_once(finite_top(read(both, top_at, item_top)))
        sums, total = _weigh(seen, reference, inputs.q.dtype)
        shrink = jnp.exp(before - reference)
        both = update(jax.lax.scatter, both, total_at, read(both, total_at, total) * shrink)
        values = update(jax.lax.scatter, values, top_at, read(values, top_at, sums) * shrink[..., None])
        return RunningSoftmax(
            update(jax.lax.scatter_add, both, total_at, total), update(jax.lax.scatter_add, values, top_at, sums)
        )

    return jax.lax.fori_loop(0, tile_sizes.cover(work.num_items, tiling.items), step, running)


def _attend_at_once(
    inputs: _Inputs,
    rows: work_list.WorkRows,
    token: work_list.Tokens,
    tiling: tile_sizes.Tiling,
    token_axes: tuple[int, ...],
) -> PartialSoftmax:
    """The softmax of every token, `[tokens, H]`, if rows are read whole: the loop of one step, without what only a loop
    needs."""
    items = work_list.whole_rows(tiling, rows, inputs.tile_mask)
    num_kv_heads = inputs.stored.kv.shape[2]
    if token_axes[1:] == (tiling.queries,):  # a tile's tokens lie together, and need no looking up
        row = place = None
        queries = tile_reads.split_by_kv_head(inputs.q.reshape(*token_axes, *inputs.q.shape[1:]), num_kv_heads)
    else:
        row, place = token.row, None
        if tiling.queries > 1:
            place = jnp.clip(token.position - work_list.take(rows.first_position, row), 0, tiling.queries - 1)
        queries = tile_reads.read_queries(inputs.q, items, num_kv_heads)
    seen = _read(inputs, items, tiling, queries)
    top = seen.logits.max(axis=-1)
    weighted = _weigh(seen, finite_top(top), inputs.q.dtype)
    return _select_tokens(PartialSoftmax(top, *weighted), tiling.queries, row, place)


class _Seen(NamedTuple):
    """What the items' queries, `K` times `queries * G` of them, see of their context."""

    logits: jax.Array  # f32[items, K, queries * G, context], MASKED where it is not seen
    values: jax.Array  # [items, K, context, D], 0 where no query sees it
    value_scales: jax.Array | None  # f32[items, K, context], yet to be applied
    not_finite: jax.Array | None  # bool, as the logits: a value that is seen, and 0 in `values`


def _read(inputs: _Inputs, items: work_list.Items, tiling: tile_sizes.Tiling, queries: jax.Array) -> _Seen:
    """Returns the logits and values of what queries `[items, K, queries * G, D]` see."""
    q, stored, scale, soft_cap, alibi, _ = inputs
    kv, format, rank, halves = stored.kv, stored.format, stored.latent_rank, stored.half_rank
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = kv.shape[2]
    # A quantized value is exact in q's dtype: scales are applied to logits and weights, not to keys and values; but for
    # scales that the entries of a head do not share.
    by_entry = stored.scale is not None and format.has_entry_scales(head_dim, halves)
    exact = (kv.dtype.itemsize == 1 and not by_entry) or kv.dtype == q.dtype
    dtype = q.dtype if exact else jnp.dtype("float32")
    # As they are stored, for `_product`; by many queries of float32, which are three digits, it would take longer.
    as_bytes = format.storage_dtype == jnp.int8 and not by_entry and dtype.itemsize <= (4 if tiling.queries == 1 else 2)
    are_finite = format.is_quantized and not by_entry  # a NaN is in the scales then
    stored_numbers = tile_reads.read_numbers(stored, items, tiling.run, head_dim)

    def read_scales(which: int) -> jax.Array:
        assert stored.scale is not None
        scales = tile_reads.read_runs(stored.scale, which, items, tiling.run, *stored.scale.shape[4:]).astype(
            jnp.float32
        )
        return jax.lax.optimization_barrier(scales)  # else XLA puts them in order in each fusion that reads them

    def read(which: int) -> tuple[jax.Array, jax.Array | None]:
        """Keys or values, and the scales that are yet to be applied."""
        numbers = stored_numbers[which]
        if not as_bytes:
            numbers = (widen_int8(numbers) if numbers.dtype == jnp.int8 else numbers).astype(dtype)
        if stored.scale is None:
            return numbers, None
        scales = read_scales(which)
        return (numbers * format.spread_scales(scales, head_dim, halves), None) if by_entry else (numbers, scales)

    keys, key_scales = read(0)
    if rank is None:
        values, value_scales = read(1)
    else:
        values, value_scales = keys[..., :rank], read_scales(1) if stored.is_packed else None
    seen = jnp.repeat(items.seen, num_heads // num_kv_heads, axis=1)[:, None]
    # What is not seen may hold NaN, and 0 * NaN is NaN. For keys it is the logits that are selected, below.
    visible = items.seen.any(axis=1)[:, None]
    if not are_finite:
        values = jnp.where(visible[..., None], values, 0)
    if value_scales is not None:
        value_scales = jnp.where(visible, value_scales, 0)
    logits = _product("ikqd,ikcd->ikqc", queries, keys, q.dtype)
    if key_scales is not None:
        logits *= key_scales[:, :, None]
    logits *= scale
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    logits = jnp.where(seen, tile_reads.add_slopes(logits, alibi, items.distance), MASKED)
    if tiling.queries == 1:
        return _Seen(logits, values, value_scales, None)
    # One query may see a NaN that another one must not.
    finite = jnp.full_like(visible, True) if are_finite else jnp.isfinite(values).all(axis=-1)
    if value_scales is not None:
        finite &= jnp.isfinite(value_scales)
        value_scales = jnp.where(finite, value_scales, 0)
    if not are_finite:
        values = jnp.where(finite[..., None], values, 0)
    return _Seen(logits, values, value_scales, seen & ~finite[:, :, None])


def _weigh(seen: _Seen, reference: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """The sums of weight * value, `[items, K, queries * G, D]`, and of weights exp(logit - reference). Where bytes are
    widened, they become `dtype`."""
    weights = jnp.exp(seen.logits - reference[..., None])
    total = weights.sum(axis=-1)
    if seen.not_finite is not None:
        weights = jnp.where(seen.not_finite, jnp.nan, weights)
    if seen.value_scales is not None:
        weights *= seen.value_scales[:, :, None]
    return _product("ikqc,ikcd->ikqd", weights, seen.values, dtype), total


def _product(subscripts: str, a: jax.Array, b: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Multiplies in float32 sums, with `a` cast to b's dtype. Bytes are multiplied as they are on a CPU, elsewhere as
    `dtype`."""

    def multiply(a: jax.Array, b: jax.Array) -> jax.Array:
        precision = "highest" if b.dtype == jnp.float32 else None
        a = a.astype(b.dtype)
        return jnp.einsum(subscripts, a, b, precision=precision, preferred_element_type=jnp.float32)

    if b.dtype != jnp.int8:
        return multiply(a, b)
    return jax.lax.platform_dependent(
        a,
        b,
        cpu=functools.partial(int8_product.product, subscripts, num_digits=2 if dtype.itemsize == 2 else 3),
        default=lambda a, b: multiply(a, widen_int8(b).astype(dtype)),
    )


def _select_tokens[T](softmax: T, queries: int, lane: jax.Array | None, place: jax.Array | None) -> T:
    """Selects tokens from lanes' tiles of `queries` tokens each, by lane and place. Without lanes: of all lanes in
    order. Without places: all tokens of the lane."""

    def pick(x: jax.Array) -> jax.Array:  # [lanes, K, queries * G, ...]
        lanes, num_kv_heads, all_queries, *minor = x.shape
        x = x.reshape(lanes, num_kv_heads, queries, all_queries // queries, *minor)
        x = jnp.moveaxis(x, 2, 1) if place is None else x[lane, :, place]
        x = x if lane is None or place is not None else work_list.take(x, lane)
        return x.reshape(-1, num_kv_heads * all_queries // queries, *minor)

    return jax.tree.map(pick, softmax)


def _attend_together(
    inputs: _Inputs, rows: work_list.WorkRows, shared: Shared, token: work_list.Tokens
) -> tuple[PartialSoftmax, work_list.WorkRows]:
    """The softmax of every token over what its row reads together with others, and the rows without that."""
    tile_mask, position = inputs.tile_mask, token.position
    if tile_mask.tree is not None:
        position = jnp.where(token.valid, work_list.take(rows.first_position, token.row) + tile_mask.tree.depth, 0)
    groups, place = work_list.find_groups(rows, shared, token._replace(position=position))
    most, queries = (
        max(1, rows.block_tables.shape[0] // WORTH_ROWS),
        queries_together(inputs.q.shape[1], inputs.stored.kv.shape[2]),
    )
    lanes = most * -(-TOGETHER // queries)
    tiling = tile_sizes.choose_tiling(inputs.q, inputs.stored.kv, rows.block_tables, queries, lanes)
    # All of it lies before the step's tokens, of which spans and trees speak.
    inputs = inputs._replace(tile_mask=tile_mask._replace(causal=False, spans=None, tree=None))
    num_tokens, num_heads = inputs.q.shape[:2]
    running = _begin(inputs, rows, num_tokens + queries)
    softmax = _attend_tiles(inputs, groups, tiling, lanes, False, running).select(num_tokens, num_heads)
    softmax = jax.tree.map(lambda x: work_list.take(x, jnp.minimum(place, num_tokens - 1)), softmax)
    is_in = place < num_tokens
    nothing = PartialSoftmax(jnp.float32(MASKED), jnp.float32(0), jnp.float32(0))
    softmax = jax.tree.map(
        lambda x, none: jnp.where(jnp.expand_dims(is_in, range(1, x.ndim)), x, none), softmax, nothing
    )
    return softmax, rows._replace(first=shared.tokens)
