"""Many new tokens per row: attention by tiles of queries, from a work list that is made on the device.

A tile is some consecutive tokens of one row, for all heads. Tiles are the grid, as many as the step needs and no more.
Each walks its row's keys up to its own last position, with the same two page buffers as decode, on across tiles.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu.pages import LANES, MASKED, VMEM_BYTES, Pages, sublanes

STEP_TOKENS = 256
HEADS_TOGETHER = 8  # as many heads are worked on without a loop
AHEAD = 5  # so many products of queries and keys are under way while the weights of one meet the values
LOG2_E = math.log2(math.e)  # the kernel's exponentials are powers of two, which the hardware has


class Tiles(NamedTuple):
    """The work list, ordered by window: which row's tokens to work on in which window of the step's tokens."""

    total: jax.Array  # i32[]: how many tiles there are, at least 1
    window: jax.Array  # i32[W]: `window_tokens` consecutive token places, from `window * window_tokens` on
    row: jax.Array  # i32[W]: whose tokens
    start: jax.Array  # i32[W]: the position of the window's first place, were it the row's; may be negative
    oldest: jax.Array  # i32[W]: position of the row's first token in the window
    limit: jax.Array  # i32[W]: one past the position of its last; 0 where there is nothing to do


def make_tiles(begin, lengths, new, *, window_tokens: int, num_windows: int, max_tiles: int) -> Tiles:
    """Cut the tokens of every row, `new` from place `begin` on, at the windows' borders. Rows with `new` 0 have none.

    Arguments are i32[S]; `max_tiles` must be enough: windows that several rows share are cut for each.
    """
    first = jnp.minimum(begin // window_tokens, num_windows - 1)
    last = jnp.minimum((begin + new - 1) // window_tokens, num_windows - 1)
    stop = jnp.cumsum(jnp.where(new > 0, last - first + 1, 0))
    tile = jnp.arange(max_tiles, dtype=jnp.int32)
    row = jnp.searchsorted(stop, tile, side="right", method="compare_all").astype(jnp.int32)
    there = row < new.shape[0]
    row = jnp.where(there, row, 0)
    window = jnp.where(there, last[row] + 1 - (stop[row] - tile), 0)
    before = (lengths - new)[row]
    start = before + window * window_tokens - begin[row]
    oldest = jnp.where(there, jnp.maximum(start, before), 0)  # of nothing to do, no position of some row
    limit = jnp.where(there, jnp.minimum(start + window_tokens, lengths[row]), 0)
    return Tiles(jnp.clip(stop[-1], 1, max_tiles), window, row, start, oldest, limit)


def prefill(
    q, kv, tables, tiles, *, scale, soft_cap=None, window=None, sinks=None, return_lse=False, interpret=False,
    step_tokens=STEP_TOKENS,
):  # fmt: skip
    """Attention of windows of queries.

    Args:
      q: `[windows, K, D', G, window_tokens]`, padded to the pool's head_dim.
      kv: the pool, `[num_blocks + 1, 2, K, block_size, D']`.
      tables: `i32[S, M]`, in range.
      tiles: the work list, positions in range.
      scale, soft_cap, window, sinks: as for `pallas_kernels.paged_attention`; `scale` has no default.
      interpret: run on the CPU, `pltpu.InterpretParams()`.

    Returns:
      `(out in q's shape, lse f32[windows, K, 1, G, window_tokens] or None)`; arbitrary at places without a tile.
    """
    _, num_kv_heads, head_dim, group, window_tokens = q.shape
    queries = group * window_tokens
    shape = q.shape
    q = q.reshape(*shape[:3], queries)
    pages = Pages.plan(kv, tables, window, step_tokens)
    knobs = jnp.stack([jnp.asarray(x, jnp.float32) for x in (scale, 1.0 if soft_cap is None else soft_cap)])
    factor, cap = (LOG2_E * knobs[0], knobs[1]) if soft_cap is None else (knobs[0] / knobs[1], LOG2_E * knobs[1])
    knobs = jnp.stack([factor, cap])
    scalars = (*tiles[1:], tables.reshape(-1), knobs)

    def per_window(*shape):  # stays where it is while tiles share a window
        return pl.BlockSpec((1, *shape), lambda tile, windows, *_: (windows[tile], *(0 for _ in shape)))

    inputs = [(q, per_window(num_kv_heads, head_dim, queries))]
    outputs = [(jax.ShapeDtypeStruct(q.shape, q.dtype), per_window(num_kv_heads, head_dim, queries))]
    if sinks is not None:
        sinks = LOG2_E * jnp.repeat(sinks.astype(jnp.float32).reshape(num_kv_heads, 1, group), window_tokens, axis=2)
        inputs.append((sinks, pl.BlockSpec(sinks.shape, lambda *_: (0, 0, 0))))
    if return_lse:
        statistics = (num_kv_heads, 1, queries)
        outputs.append((jax.ShapeDtypeStruct((q.shape[0], *statistics), jnp.float32), per_window(*statistics)))
    inputs.append((kv, pl.BlockSpec(memory_space=pltpu.HBM)))
    arrays, in_specs = zip(*inputs, strict=True)
    out_shape, out_specs = zip(*outputs, strict=True)
    products = q.shape[0] * num_kv_heads * queries * tables.shape[1] * pages.block_size
    results = pl.pallas_call(
        functools.partial(
            _kernel,
            pages=pages,
            window_tokens=window_tokens,
            soft_cap=soft_cap is not None,
            sinks=sinks is not None,
            lse=return_lse,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(tiles.total,),
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=[
                pltpu.VMEM((2, pages.pages_per_step, 2, num_kv_heads, pages.page_size, head_dim), kv.dtype),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.VMEM((num_kv_heads, 1, queries), jnp.float32),
                pltpu.VMEM((num_kv_heads, 1, queries), jnp.float32),
                pltpu.VMEM((num_kv_heads, head_dim, queries), jnp.float32),
            ],
        ),
        out_shape=out_shape,
        cost_estimate=pl.CostEstimate(
            flops=4 * products * head_dim, transcendentals=products, bytes_accessed=2 * q.size * q.dtype.itemsize
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            disable_bounds_checks=True,
            disable_semaphore_checks=True,
            vmem_limit_bytes=VMEM_BYTES,
        ),
        interpret=interpret,
        name="paged_prefill",
    )(*scalars, *arrays)
    out = results[0].reshape(shape)
    return out, results[1].reshape(*shape[:2], 1, *shape[3:]) if return_lse else None


def _kernel(
    windows, rows, starts, oldests, limits, tables, knobs, q_ref, *refs, pages, window_tokens, soft_cap, sinks, lse
):
    given: Any = list(refs)
    sinks_ref: Any = given.pop(0) if sinks else None
    kv_hbm, out_ref = given.pop(0), given.pop(0)
    lse_ref: Any = given.pop(0) if lse else None
    buffers, arrived, next_slot, max_ref, sum_ref, out_sum_ref = given

    del windows  # which the block specs read
    tile, tiles = pl.program_id(0), pl.num_programs(0)
    oldest, limit = oldests[tile], limits[tile]
    steps = pages.steps(oldest, limit)

    def copies(do, tile, step, slot):
        pages.copies(
            do, kv_hbm, buffers.at[slot], arrived.at[slot], tables, rows[tile], oldests[tile], limits[tile], step
        )

    @pl.when(tile == 0)
    def _():
        next_slot[0] = 0
        copies("start", 0, 0, 0)

    max_ref[...] = sinks_ref[...] if sinks else jnp.full_like(max_ref, MASKED)
    sum_ref[...] = jnp.ones_like(sum_ref) if sinks else jnp.zeros_like(sum_ref)
    out_sum_ref[...] = jnp.zeros_like(out_sum_ref)

    def step(i, slot):
        last = i + 1 == steps
        next_tile = jnp.where(last, tile + 1, tile)

        @pl.when(next_tile < tiles)
        def _():
            copies("start", next_tile, jnp.where(last, 0, i + 1), 1 - slot)

        copies("wait", tile, i, slot)
        pages.hide_values(buffers.at[slot], oldest, limit, i, steps)
        start = (pages.first(oldest) + i * pages.pages_per_step) * pages.page_size
        half = max(1, pages.pages_per_step // 2)

        def seen_by_all(count):
            seen = start + count * pages.page_size <= oldest + 1
            return seen if pages.window is None else seen & (start > limit - 1 - pages.window)

        def attend(count, sure):
            _attend(
                q_ref.at[0], buffers.at[slot, pl.ds(0, count)], start, starts[tile], knobs, soft_cap, window_tokens,
                pages, max_ref, sum_ref, out_sum_ref, sure=sure * pages.page_size, exact=lse,
            )  # fmt: skip

        # Most steps need no mask; a row's last ones have fewer keys, or known ones before those to mask.
        few = (half < pages.pages_per_step) & (limit <= start + half * pages.page_size)
        all_seen, half_seen = seen_by_all(pages.pages_per_step), seen_by_all(half)
        pl.when(all_seen)(lambda: attend(pages.pages_per_step, sure=pages.pages_per_step))
        if half < pages.pages_per_step:
            pl.when(~all_seen & few)(lambda: attend(half, sure=0))
            pl.when(~all_seen & ~few & half_seen)(lambda: attend(pages.pages_per_step, sure=half))
        pl.when(~all_seen & ~few & ~half_seen)(lambda: attend(pages.pages_per_step, sure=0))
        return 1 - slot

    next_slot[0] = lax.fori_loop(0, steps, step, next_slot[0])

    whole = (oldest == starts[tile]) & (limit == starts[tile] + window_tokens)

    @pl.when(whole)
    def _():
        out_ref[0] = (out_sum_ref[...] / sum_ref[...]).astype(out_ref.dtype)
        if lse:
            lse_ref[0] = (max_ref[...] + jnp.log2(sum_ref[...])) / LOG2_E

    @pl.when(~whole)
    def _():  # the window's other tokens are other tiles' or nobody's
        lane = lax.broadcasted_iota(jnp.int32, (1, q_ref.shape[-1]), 1)
        position = starts[tile] + (lane & (window_tokens - 1))
        own = (position >= oldest) & (position < limit)

        @pl.loop(0, q_ref.shape[1])
        def _(head):
            out = out_sum_ref[head] / sum_ref[head]
            out_ref[0, head] = jnp.where(own, out, out_ref[0, head].astype(jnp.float32)).astype(out_ref.dtype)
            if lse:
                lse_ref[0, head] = jnp.where(own, (max_ref[head] + jnp.log2(sum_ref[head])) / LOG2_E, lse_ref[0, head])


def _attend(
    q_ref, buffer, start, query_start, knobs, soft_cap, window_tokens, pages, max_ref, sum_ref, out_sum_ref, sure, exact
):  # fmt: skip
    """One step of the online softmax, transposed: keys along sublanes, queries along lanes, so that maxima and sums
    are lane-dense and cost next to nothing. Every query sees the first `sure` keys; the others are masked. `exact` sums
    the weights before they are rounded for the product with the values, as the LSE wants them; else after."""
    num_kv_heads, head_dim, queries = q_ref.shape
    tokens = buffer.shape[0] * buffer.shape[3]
    width = 2 * LANES if queries % (2 * LANES) == 0 else LANES  # the matrix unit's columns from v6e on
    precision = lax.Precision.HIGHEST if q_ref.dtype == jnp.float32 else None
    matmul = functools.partial(
        lax.dot_general,
        dimension_numbers=(((1,), (0,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    ones = jnp.ones((sublanes(buffer.dtype), tokens), buffer.dtype)
    if sure < tokens:
        shape = (tokens - sure, width)
        key = start + sure + lax.broadcasted_iota(jnp.int32, shape, 0)
        lane = lax.broadcasted_iota(jnp.int32, shape, 1)

    def scores(head, at):
        keys = buffer[:, 0, head].reshape(tokens, head_dim)
        return matmul(keys, q_ref[head, :, pl.ds(at, width)])

    def soften(head, at, logits):
        logits = logits * knobs[0]
        if soft_cap:
            logits = knobs[1] * jnp.tanh(logits)
        if sure < tokens:
            query = query_start + ((at + lane) & (window_tokens - 1))
            seen = key <= query
            if pages.window is not None:
                seen &= key > query - pages.window
            masked = jnp.where(seen, logits[sure:], MASKED)
            logits = jnp.concatenate([logits[:sure], masked]) if sure else masked
        there = (head, slice(None), pl.ds(at, width))
        before = max_ref[there]
        now = jnp.maximum(before, jnp.max(logits, axis=0, keepdims=True))
        weights = jnp.exp2(logits - now)
        shrink = jnp.exp2(before - now)
        max_ref[there] = now
        if exact:
            sum_ref[there] = shrink * sum_ref[there] + jnp.sum(weights, axis=0, keepdims=True)
        return weights.astype(buffer.dtype), shrink

    def accumulate(head, at, weights, shrink):
        there = (head, slice(None), pl.ds(at, width))
        values = buffer[:, 1, head].reshape(tokens, head_dim).T
        if not exact:  # the matrix unit has the time to sum, and the vector unit has not
            values = jnp.concatenate([values, ones])
        sums = matmul(values, weights)
        out_sum_ref[there] = shrink * out_sum_ref[there] + sums[:head_dim]
        if not exact:
            sum_ref[there] = shrink * sum_ref[there] + sums[head_dim : head_dim + 1]

    together = max(n for n in range(1, HEADS_TOGETHER + 1) if num_kv_heads % n == 0)

    @pl.loop(0, num_kv_heads // together)
    def _(some):
        # Several stages in flight, each of a head and `width` queries: the matrix unit works on the items before and
        # after the one whose softmax the vector unit works on.
        items = [(some * together + head, at) for head in range(together) for at in range(0, queries, width)]
        logits = {}
        for i in range(-AHEAD, len(items)):
            if i + AHEAD < len(items):
                logits[i + AHEAD] = scores(*items[i + AHEAD])
            if i >= 0:
                accumulate(*items[i], *soften(*items[i], logits.pop(i)))
