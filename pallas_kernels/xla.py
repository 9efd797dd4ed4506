"""Paged attention and the cache write in plain XLA, for every platform.

Attention runs over a work list that exists only as index arithmetic: query tile by query tile, context tile by context
tile, only those that some token sees. A loop takes `Tiling.items` of them at a time and merges their softmax online
(https://arxiv.org/abs/2205.14135). So the work grows with the tokens that rows hold, one compile serves all lengths,
and memory holds one step of the loop besides the result, never a row's dense keys and values.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels._tokens import default_offsets, locate


class Tiling(NamedTuple):
    """What one step of the loop computes: `items` tiles of `queries` tokens by `pieces` runs of `run` context tokens.

    A block of up to `context_target` tokens is one run, and a longer one is cut into several.
    """

    items: int
    queries: int
    pieces: int
    run: int
    block_size: int

    @property
    def runs_per_block(self) -> int:
        return -(-self.block_size // self.run)


# Found by experiment on two CPU cores (benchmarks/NOTES.md): bytes of keys and values for one step of the loop, and the
# sides of a tile. A tile of queries reads the context once for all of them; a single token needs no tile of queries.
STEP_BYTES = 4 * 2**20
DECODE_CONTEXT = 64
PREFILL_CONTEXT, PREFILL_QUERIES = 256, 32


def choose_tiling(kv: jax.Array, tables: jax.Array, queries: int) -> Tiling:
    """Tile sizes for a pool: enough bytes for a step that its fixed costs do not show, few enough to stay in cache."""
    num_kv_heads, block_size = kv.shape[2:4]
    context = DECODE_CONTEXT if queries == 1 else PREFILL_CONTEXT
    run = min(block_size, context)
    pieces = min(context // run, tables.shape[1] * -(-block_size // run))
    tile_bytes = 2 * num_kv_heads * pieces * run * kv.shape[4] * kv.dtype.itemsize
    most = -(-tables.size * block_size // (pieces * run))  # more items than this a full pool of rows could not fill
    items = max(1, min(STEP_BYTES // (tile_bytes * queries), most))
    return Tiling(items, queries, pieces, run, block_size)


class WorkList(NamedTuple):
    """The tiles of queries, "lanes", of all rows one after another, and the context tiles that each one sees."""

    row: jax.Array  # i32[lanes]
    first: jax.Array  # i32[lanes]: the lane's first token, as an index into its row's tokens of this step
    first_tile: jax.Array  # i32[lanes]: the first context tile that it sees
    ends: jax.Array  # i32[lanes]: the number of items up to and including the lane's
    row_lane: jax.Array  # i32[rows]: the row's first lane

    @property
    def num_items(self) -> jax.Array:
        """i32[]: the work there is to do; lanes beyond the last one that is used have none."""
        return self.ends[-1]


def plan(
    tiling: Tiling, lanes: int, capacity: int, lengths: jax.Array, new: jax.Array, count: jax.Array, window: int | None
) -> WorkList:
    """The work list of a step in which `count[s]` of row s's `new[s]` tokens attend. `capacity`: tokens a table can hold."""
    row_lanes = -(-count // tiling.queries)
    row_ends = jnp.cumsum(row_lanes)
    lane = jnp.arange(lanes, dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(row_ends, lane, side="right", method="compare_all"), lengths.shape[0] - 1)
    row = row.astype(jnp.int32)
    first = (lane - (row_ends - row_lanes)[row]) * tiling.queries
    last = jnp.minimum(first + tiling.queries, count[row]) - 1
    before = (lengths - new)[row]

    def runs(tokens: jax.Array) -> jax.Array:  # whole and started runs that the first `tokens` tokens of a row fill
        blocks, rest = tokens // tiling.block_size, tokens % tiling.block_size
        return blocks * tiling.runs_per_block - (-rest // tiling.run)

    stop = jnp.clip(before + last + 1, 0, capacity)
    last_tile = -(-runs(stop) // tiling.pieces)
    first_tile = jnp.zeros_like(last_tile)
    if window is not None:
        unseen = jnp.clip(before + first - window + 1, 0, capacity)
        first_tile = jnp.maximum(runs(unseen + 1) - 1, 0) // tiling.pieces
    used = lane < row_ends[-1]
    num_tiles = jnp.where(used, jnp.maximum(last_tile - first_tile, 0), 0)
    return WorkList(row, first, first_tile, jnp.cumsum(num_tiles), row_ends - row_lanes)


class Step(NamedTuple):
    """The arguments of attention that every tile needs. Tokens are flat: row s's are `q[start[s] : start[s] + count[s]]`."""

    q: jax.Array  # [tokens, H, D]
    kv: jax.Array  # [num_blocks + 1, 2, K, block_size, D']
    tables: jax.Array  # i32[S, M]
    lengths: jax.Array  # i32[S]
    new: jax.Array  # i32[S]
    start: jax.Array  # i32[S]
    mask: jax.Array | None  # bool[tokens, C]
    kv_scale: jax.Array | None
    scale: float | jax.Array
    soft_cap: float | jax.Array | None
    window: int | None


def read_tile(
    pool: jax.Array, which: int, block: jax.Array, offset: jax.Array, run: int, head_dim: int | None
) -> jax.Array:
    """Keys (`which` 0) or values (1) of runs of tokens, `[items, K, pieces * run, head_dim]`, as one gather that leaves
    them in the order the products want. `block` and `offset` are `i32[items, pieces]`; out of range, they are clamped."""
    items, pieces = block.shape
    index = jnp.stack([block, jnp.full_like(block, which), offset], axis=-1)
    trailing = () if head_dim is None else (head_dim,)
    dimensions = jax.lax.GatherDimensionNumbers(
        offset_dims=(1, 3, 4)[: 2 + len(trailing)], collapsed_slice_dims=(0, 1), start_index_map=(0, 1, 3)
    )
    tile = jax.lax.gather(pool, index, dimensions, (1, 1, pool.shape[2], run, *trailing), mode="clip")
    return tile.reshape(items, pool.shape[2], pieces * run, *trailing)


def attend_lanes(
    step: Step, tiling: Tiling, lanes: int, count: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, WorkList]:
    """Softmax numerators' maxima and sums, `f32[lanes, K, queries, G]`, and weighted sums of values `[..., D]`."""
    q, kv, tables = step.q, step.kv, step.tables
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv.shape[2:4]
    group = num_heads // num_kv_heads
    capacity = tables.shape[1] * block_size
    work = plan(tiling, lanes, capacity, step.lengths, step.new, count, step.window)
    dtype = jnp.promote_types(q.dtype, kv.dtype) if step.kv_scale is None else q.dtype
    precision = "highest" if dtype == jnp.float32 else None
    q = q.reshape(num_tokens, num_kv_heads, group, head_dim)

    def item_batch(i, carry):
        m, l, o = carry
        item = i * tiling.items + jnp.arange(tiling.items, dtype=jnp.int32)
        lane = jnp.searchsorted(work.ends, item, side="right", method="compare_all").astype(jnp.int32)
        lane = jnp.minimum(lane, lanes - 1)  # beyond the last item: nothing is seen, below
        row = work.row[lane]
        tile = work.first_tile[lane] + item - jnp.where(lane > 0, work.ends[lane - 1], 0)

        # Where the tile's context and queries lie.
        piece = (tile * tiling.pieces)[:, None] + jnp.arange(tiling.pieces, dtype=jnp.int32)[None]
        logical, cut = piece // tiling.runs_per_block, piece % tiling.runs_per_block
        offset = jnp.minimum(
            cut * tiling.run, block_size - tiling.run
        )  # the last run of a block overlaps the one before
        inside = offset[:, :, None] + jnp.arange(tiling.run, dtype=jnp.int32)[None, None]
        position = logical[:, :, None] * block_size + inside
        fresh = (inside >= (cut * tiling.run)[:, :, None]) & (position < capacity)
        fresh &= (item < work.num_items)[:, None, None]
        position, fresh = (x.reshape(tiling.items, 1, -1) for x in (position, fresh))
        physical = tables[row[:, None], jnp.minimum(logical, tables.shape[1] - 1)]
        index = work.first[lane][:, None] + jnp.arange(tiling.queries, dtype=jnp.int32)[None]  # [items, queries]
        token = jnp.minimum(step.start[row][:, None] + index, num_tokens - 1)
        query_position = ((step.lengths - step.new)[row][:, None] + index)[:, :, None]

        seen = (
            fresh & (index < count[row][:, None])[:, :, None] & (position <= query_position)
        )  # [items, queries, context]
        if step.window is not None:
            seen &= position > query_position - step.window
        if step.mask is not None:
            width = step.mask.shape[1]
            column = jnp.minimum(position, width - 1)
            seen &= step.mask[token[:, :, None], column] & (position < width)

        k, v = (read_tile(kv, which, physical, offset, tiling.run, head_dim).astype(dtype) for which in (0, 1))
        # What no query sees may hold NaN, and 0 * NaN is NaN.
        readable = seen.any(axis=1)[:, None, :]
        v = jnp.where(readable[..., None], v, 0)
        queries = q.at[token].get(mode="clip")
        queries = jnp.moveaxis(queries, 1, 2).astype(dtype).reshape(tiling.items, num_kv_heads, -1, head_dim)
        logits = jnp.einsum("bkrd,bkcd->bkrc", queries, k, precision=precision, preferred_element_type=jnp.float32)
        if step.kv_scale is not None:
            logits *= read_tile(step.kv_scale, 0, physical, offset, tiling.run, None)[:, :, None]
        logits *= step.scale
        if step.soft_cap is not None:
            logits = step.soft_cap * jnp.tanh(logits / step.soft_cap)
        seen = jnp.repeat(seen, group, axis=1)[:, None]
        logits = jnp.where(seen, logits, -jnp.inf)

        # Items of one lane are neighbours, perhaps in one batch: its sums so far are rescaled once, at the first of them.
        old = m[lane]
        m = m.at[lane].max(logits.max(axis=-1))
        reference = jnp.where(jnp.isneginf(m[lane]), 0.0, m[lane])
        is_first = jnp.concatenate([jnp.ones(1, bool), lane[1:] != lane[:-1]])
        rescale = jnp.where(is_first[:, None, None], jnp.exp(old - reference), 1.0)
        p = jnp.exp(logits - reference[..., None])
        l = l.at[lane].multiply(rescale).at[lane].add(p.sum(axis=-1))
        if step.kv_scale is not None:
            v_scale = read_tile(step.kv_scale, 1, physical, offset, tiling.run, None)
            p *= jnp.where(readable, v_scale, 0)[:, :, None]
        update = jnp.einsum(
            "bkrc,bkcd->bkrd", p.astype(dtype), v, precision=precision, preferred_element_type=jnp.float32
        )
        o = o.at[lane].multiply(rescale[..., None]).at[lane].add(update)
        return m, l, o

    shape = (lanes, num_kv_heads, tiling.queries * group)
    start = jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros((*shape, head_dim))
    m, l, o = jax.lax.fori_loop(0, -(-work.num_items // tiling.items), item_batch, start)
    split = (lanes, num_kv_heads, tiling.queries, group)
    return m.reshape(split), l.reshape(split), o.reshape(*split, head_dim), work


@functools.partial(jax.jit, static_argnames=("window", "return_lse"))
def paged_attention(
    q, kv, tables, lengths, new, *, offsets=None, kv_scale=None, scale=None, soft_cap=None, window=None, sinks=None,
    mask=None, return_lse=False,
):  # fmt: skip
    """What [`pallas_kernels.paged_attention`][] means. Shapes and arguments as there."""
    token_axes, (num_heads, head_dim) = q.shape[:-2], q.shape[-2:]
    num_rows, num_tokens = tables.shape[0], math.prod(token_axes)
    token = jax.tree.map(jnp.ravel, locate(token_axes, lengths, new, offsets))
    if len(token_axes) == 2:
        start = jnp.arange(num_rows, dtype=jnp.int32) * token_axes[1]
        longest = token_axes[1]
        count = jnp.clip(new, 0, longest)
    else:
        start = default_offsets(new) if offsets is None else offsets
        longest = num_tokens
        count = jnp.clip(new, 0, num_tokens - start)
    step = Step(
        q.reshape(num_tokens, num_heads, head_dim), kv, tables, lengths, new, start,
        None if mask is None else mask.reshape(num_tokens, -1), kv_scale,
        head_dim**-0.5 if scale is None else scale, soft_cap, window,
    )  # fmt: skip

    def run(tiling: Tiling, lanes: int, count: jax.Array):
        m, l, o, work = attend_lanes(step, tiling, lanes, count)
        index = token.position - (lengths - new)[token.row]
        lane = jnp.clip(work.row_lane[token.row] + index // tiling.queries, 0, lanes - 1)
        m, l, o = (x[lane, :, index % tiling.queries].reshape(num_tokens, num_heads, *x.shape[4:]) for x in (m, l, o))
        if sinks is not None:
            sink = sinks.astype(jnp.float32)[None]
            top = jnp.maximum(m, sink)
            ratio = jnp.where(jnp.isneginf(m), 0.0, jnp.exp(m - top))
            l = jnp.where(jnp.isneginf(m), 0.0, l * ratio + jnp.exp(sink - top))
            m, o = top, o * ratio[..., None]
        here = token.valid & (count[token.row] > 0)
        seen = here[:, None] & (l != 0)
        out = jnp.where(seen[..., None], o / jnp.where(seen, l, 1.0)[..., None], 0.0)
        lse = jnp.where(seen, m + jnp.log(jnp.where(seen, l, 1.0)), -jnp.inf)
        return out.astype(q.dtype), lse

    single = choose_tiling(kv, tables, 1)
    if longest == 1:
        out, lse = run(single, num_rows, count)
    else:
        one = jnp.where(count == 1, count, 0)
        out, lse = run(single, num_rows, one)
        tiled = choose_tiling(kv, tables, min(PREFILL_QUERIES, longest))
        lanes = max(1, min(num_tokens // 2, num_rows) + num_tokens // tiled.queries)
        out2, lse2 = run(tiled, lanes, count - one)
        more = (count - one)[token.row] > 0
        out, lse = jnp.where(more[:, None, None], out2, out), jnp.where(more[:, None], lse2, lse)
    out, lse = out.reshape(q.shape), lse.reshape(q.shape[:-1])
    return (out, lse) if return_lse else out


def write_kv(kv, k, v, tables, lengths, new, *, offsets=None):
    """What [`pallas_kernels.write_kv`][] means, as one in-place scatter."""
    token_axes, head_dim = k.shape[:-2], k.shape[-1]
    token = locate(token_axes, lengths, new, offsets)
    block_size = kv.shape[3]
    block = tables[token.row, token.position // block_size].reshape(-1)
    count = block.shape[0]
    # Padding goes to places of its own past the pool's end, where mode="drop" drops it. Not to -1, which would wrap.
    dropped = kv.shape[0] + jnp.arange(count, dtype=jnp.int32)
    block = jnp.where(token.valid.reshape(-1), block, dropped)
    offset = token.position.reshape(-1) % block_size
    tokens = jnp.stack([k, v], axis=-3).reshape(count, 2, k.shape[-2], head_dim).astype(kv.dtype)
    # unique_indices: no two tokens share a place, and without the promise GPUs would write with atomics.
    return kv.at[block, :, :, offset, :head_dim].set(tokens, mode="drop", unique_indices=True)
