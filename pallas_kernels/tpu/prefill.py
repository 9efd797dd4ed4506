"""Many new tokens per row: attention by tiles of queries, from a work list that is made on the device.

A tile is some consecutive tokens of one row, for all heads. Tiles are the grid, as many as the step needs and no more.
Each walks its row's keys up to its own last position, with the same two page buffers as decode, on across tiles.
"""

import functools
import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu._pages import LANES, MASKED, VMEM_BYTES, Pages

STEP_TOKENS = 256
TILE_QUERIES = 512  # tokens x heads of a group: enough to hide the loading of keys
HEADS_TOGETHER = 8  # as many heads are worked on without a loop
LOG2_E = math.log2(math.e)  # the kernel's exponentials are powers of two, which the hardware has


class Tiles(NamedTuple):
    """The work list. Tiles past `count` hold nothing."""

    count: jax.Array  # i32[]: how many tiles there are, at least 1
    row: jax.Array  # i32[W]: the row it belongs to
    index: jax.Array  # i32[W]: which of the row's tiles it is
    oldest: jax.Array  # i32[W]: position of its first query
    limit: jax.Array  # i32[W]: keys that its last query sees; 0: nothing to do
    first: jax.Array  # i32[S]: each row's first tile


def make_tiles(lengths: jax.Array, new: jax.Array, tile_tokens: int, max_tiles: int) -> Tiles:
    """Cut each row's `new` last tokens into tiles of `tile_tokens`. Rows with `new` 0 have none."""
    per_row = (new + tile_tokens - 1) // tile_tokens
    stop = jnp.cumsum(per_row)
    tile = jnp.arange(max_tiles, dtype=jnp.int32)
    row = jnp.searchsorted(stop, tile, side="right", method="compare_all").astype(jnp.int32)
    there = row < new.shape[0]
    row = jnp.where(there, row, 0)
    first = stop - per_row
    index = jnp.where(there, tile - first[row], 0)
    oldest = lengths[row] - new[row] + index * tile_tokens
    limit = jnp.where(there, jnp.minimum(oldest + tile_tokens, lengths[row]), 0)
    return Tiles(jnp.maximum(stop[-1], 1), row, index, jnp.where(there, oldest, 0), limit, first)


def prefill(
    q, kv, tables, tiles, *, scale, soft_cap=None, window=None, sinks=None, return_lse=False, interpret=False, tile_tokens,
    step_tokens=STEP_TOKENS,
):  # fmt: skip
    """Attention of tiles of queries.

    Args:
      q: `[W, K, G, tile_tokens, D']`, padded to the pool's head_dim.
      kv: the pool, `[num_blocks + 1, 2, K, block_size, D']`.
      tables: `i32[S, M]`, in range.
      tiles: the work list, positions in range.

    Returns:
      `(out in q's shape, lse f32[W, K, G, tile_tokens] or None)`; arbitrary in tiles that are not there.
    """
    num_tiles, num_kv_heads, head_dim, queries = q.shape
    pages = Pages.plan(kv, tables, window, step_tokens)
    knobs = jnp.stack([jnp.asarray(x, jnp.float32) for x in (scale, 1.0 if soft_cap is None else soft_cap)])
    factor, cap = (LOG2_E * knobs[0], knobs[1]) if soft_cap is None else (knobs[0] / knobs[1], LOG2_E * knobs[1])
    knobs = jnp.stack([factor, cap])
    scalars = (tiles.row, tiles.oldest, tiles.limit, tables.reshape(-1), knobs)

    def per_tile(*shape):
        return pl.BlockSpec((1, *shape), lambda tile, *_: (tile, *(0 for _ in shape)))

    inputs = [(q, per_tile(num_kv_heads, head_dim, queries))]
    outputs = [(jax.ShapeDtypeStruct(q.shape, q.dtype), per_tile(num_kv_heads, head_dim, queries))]
    if sinks is not None:
        sinks = LOG2_E * jnp.repeat(sinks.astype(jnp.float32).reshape(num_kv_heads, 1, -1), tile_tokens, axis=2)
        inputs.append((sinks, pl.BlockSpec(sinks.shape, lambda tile, *_: (0, 0, 0))))
    if return_lse:
        shape = (num_kv_heads, 1, queries)
        outputs.append((jax.ShapeDtypeStruct((num_tiles, *shape), jnp.float32), per_tile(*shape)))
    inputs.append((kv, pl.BlockSpec(memory_space=pltpu.HBM)))
    arrays, in_specs = zip(*inputs, strict=True)
    out_shape, out_specs = zip(*outputs, strict=True)
    products = num_tiles * num_kv_heads * queries * tables.shape[1] * pages.block_size
    results = pl.pallas_call(
        functools.partial(_kernel, pages=pages, tile_tokens=tile_tokens, soft_cap=soft_cap is not None, sinks=sinks is not None, lse=return_lse),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(tiles.count,),
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
    return results[0], results[1] if return_lse else None


def _kernel(rows, oldests, limits, tables, knobs, q_ref, *refs, pages, tile_tokens, soft_cap, sinks, lse):
    refs = list(refs)
    sinks_ref = refs.pop(0) if sinks else None
    kv_hbm, out_ref = refs.pop(0), refs.pop(0)
    lse_ref = refs.pop(0) if lse else None
    buffers, arrived, next_slot, max_ref, sum_ref, out_sum_ref = refs

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
        all_seen = start + pages.step_tokens <= oldest + 1
        if pages.window is not None:
            all_seen &= start > limit - 1 - pages.window
        attend = functools.partial(
            _attend, q_ref.at[0], buffers.at[slot], start, oldest, knobs, soft_cap, tile_tokens, pages, max_ref, sum_ref, out_sum_ref
        )
        pl.when(all_seen)(functools.partial(attend, masked=False))
        pl.when(~all_seen)(functools.partial(attend, masked=True))
        return 1 - slot

    next_slot[0] = lax.fori_loop(0, steps, step, next_slot[0])
    out_ref[0] = (out_sum_ref[...] / sum_ref[...]).astype(out_ref.dtype)
    if lse:
        lse_ref[0] = (max_ref[...] + jnp.log2(sum_ref[...])) / LOG2_E


def _attend(q_ref, buffer, start, oldest, knobs, soft_cap, tile_tokens, pages, max_ref, sum_ref, out_sum_ref, masked):
    num_kv_heads, head_dim, queries = q_ref.shape
    tokens = pages.step_tokens
    precision = lax.Precision.HIGHEST if q_ref.dtype == jnp.float32 else None
    matmul = functools.partial(lax.dot_general, precision=precision, preferred_element_type=jnp.float32)
    if masked:
        shape = (tokens, LANES)
        key = start + lax.broadcasted_iota(jnp.int32, shape, 0)
        lane = lax.broadcasted_iota(jnp.int32, shape, 1)

    def scores(head, at):
        keys = buffer[:, 0, head].reshape(tokens, head_dim)
        return matmul(keys, q_ref[head, :, pl.ds(at, LANES)], (((1,), (0,)), ((), ())))

    def accumulate(head, at, logits):
        logits = logits * knobs[0]
        if soft_cap:
            logits = knobs[1] * jnp.tanh(logits)
        if masked:
            query = oldest + ((at + lane) & (tile_tokens - 1))
            seen = key <= query
            if pages.window is not None:
                seen &= key > query - pages.window
            logits = jnp.where(seen, logits, MASKED)
        there = (head, slice(None), pl.ds(at, LANES))
        before = max_ref[there]
        now = jnp.maximum(before, jnp.max(logits, axis=0, keepdims=True))
        weights = jnp.exp2(logits - now)
        shrink = jnp.exp2(before - now)
        max_ref[there] = now
        sum_ref[there] = shrink * sum_ref[there] + jnp.sum(weights, axis=0, keepdims=True)
        values = buffer[:, 1, head].reshape(tokens, head_dim)
        out = matmul(values, weights.astype(values.dtype), (((0,), (0,)), ((), ())))
        out_sum_ref[there] = shrink * out_sum_ref[there] + out

    together = max(n for n in range(1, HEADS_TOGETHER + 1) if num_kv_heads % n == 0)

    @pl.loop(0, num_kv_heads // together)
    def _(some):
        items = [(some * together + head, at) for head in range(together) for at in range(0, queries, LANES)]
        logits = scores(*items[0])
        for item, following in itertools.zip_longest(items, items[1:]):
            # The next product is issued before this one's softmax, so that the matrix unit works meanwhile.
            ahead = scores(*following) if following else None
            accumulate(*item, logits)
            logits = ahead
