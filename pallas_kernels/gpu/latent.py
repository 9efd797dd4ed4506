"""Latent rows (MLA): all query heads attend to one row a token, whose first `rank` numbers are its values.

With many heads on one row this is a product of matrices, of decode as of prefill: 64 queries, heads of one token or of
several, against tiles of 64 rows. A tile is in shared memory once, and is the keys of one product and, its first
columns, the values of the other. The output of 64 queries is more than a warpgroup's registers hold, so a thread block
has four: one copies tiles, one multiplies queries with them and keeps the running softmax, and two multiply its weights
with half of the values each, while it is at the next tile.

As in `decode`, what is not seen is selected away, never multiplied by zero.
"""

import functools
import itertools
import math

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.masks import is_visible
from pallas_kernels.gpu import tuning
from pallas_kernels.gpu.products import Transposed, accumulate, multiply
from pallas_kernels.gpu.tiles import (
    LAYOUT,
    OPERAND,
    Operands,
    Ring,
    Tile,
    Walk,
    add_sink,
    anew,
    fetch,
    full,
    load_wide,
    logits_base2,
    safe_maximum,
    select_seen_values,
    store,
    tile_at,
)
from pallas_kernels.gpu.work_items import UNUSED, WHOLE

QUERY_ROWS = 64  # of a thread block: the matrix unit's width
HALVES = 2  # of the values, a warpgroup's each
PIECE = 128  # columns of the values in one product: wider ones want more registers than threads begin with
WEIGHER, PRODUCER = 0, 1 + HALVES  # the warpgroups around those
# Registers of a thread: the accumulator of half of the values is 128 of them.
REGISTERS = {"weigh": 112, "sum": 176, "produce": 40}
ROW = LAYOUT.reduce(1)  # how one value for each query lies in registers


def split(
    operands: Operands,
    items,
    into=None,
    *,
    num_items,
    new_tokens,
    tile: Tile,
    some_cut: bool,
    by_item: bool = False,
    token_mask=None,
):
    """Attention of each work item: a range of one row's tiles, for some of its new tokens.

    Query c of tile j of the heads is head `j * h + c % h` of token `c // h`, where h is `heads_at_once(H)`.

    Args:
      operands: H such as `heads_at_once` takes; sinks as `f32[H // h, 64]`.
      items: `i32[W, 7]` or wider, see `work_items.decode_items`. If `by_item` `i32[W, 8]`: at the end how many
        tokens there are.
      into: references to the output and its logarithm, as below, of which only the items' own are written; None makes
        new arrays, the rest of which holds anything.
      num_items: W.
      new_tokens: tokens of an item, at most: `new_tokens * h <= 64`.
      some_cut: whether items may be parts.
      by_item: each item has tokens of its own, of which only those there are are written.
      token_mask: `i32[S, 3 + W, 64]`, what each query sees, where that does not go by `window_mask` alone; see
        `MaskTiles`. If `by_item` `i32[W // C, ..]`, of C items each, one after another.

    Returns:
      `f32[W, H // h, rank, 64]` and `f32[W, H // h, 64]`: of each item that is a part the normalised output, and the
      base-2 logarithm of its softmax's denominator; None and None if there are none. Then, if `into` is None, of the
      others the output, `[N, H, rank]`, and its natural logarithm, `f32[S, H // h, 64]`, or `[W, ..]` if `by_item`.
    """
    q, stored, tables, scalars, window_mask, soft_cap, interpret, sinks, *_ = operands
    kv, rank = stored.kv, stored.latent_rank
    assert rank is not None
    num_tokens, num_heads, width = q.shape
    at_once = heads_at_once(num_heads)
    head_tiles, tokens, stages = num_heads // at_once, tile.tokens, tile.stages
    half_rank = rank // HALVES

    def kernel(q_ref, kv_ref, tables_ref, items_ref, scalars_ref, *others, scratch):
        sinks_ref, *others = (None, *others) if sinks is None else others
        mask_ref, *others = (None, *others) if token_mask is None else others
        if into is not None:  # references come before what is new
            others = [*others[2:], *others[:2]]
        part_ref, part_lse_ref, out_ref, lse_ref = others if some_cut else (None, None, *others)
        (q_s, rows_s, p_s, factor_s), (q_ready, ready, free, p_ready, p_free) = scratch
        item, head = lax.axis_index("item"), lax.axis_index("head")
        warpgroup = lax.axis_index("warpgroup")
        used = items_ref[item, 6] != UNUSED

        def q_parts(q_s):
            """The parts of the queries, by their columns: those of either half of the values, and the others."""
            nothing = anew(warpgroup) - WEIGHER  # or the addresses would be derived ahead of the loop, and spilled
            parts = [q_s[0].at[nothing + half] for half in range(HALVES)] + [x.at[nothing] for x in q_s[1:]]
            edges = (*range(0, rank + 1, half_rank), width)
            return [(pl.ds(a, b - a), part) for (a, b), part in zip(itertools.pairwise(edges), parts, strict=False)]

        def work():
            """The item, for each role by itself: what they derive from one reading would be spilled between them."""
            row, start, stop, length, new, place, role = (items_ref[anew(item), i] for i in range(7))
            first_seen = jnp.maximum(window_mask.first(length - new), 0) if window_mask.ends else jnp.int32(0)
            return row, start, stop - start, length, new, place, role, first_seen

        def at(start, i, first_seen):
            """The slot of a tile, and the position of its first token."""
            return lax.rem(i, jnp.int32(stages)), tile_at(start + i, first_seen, window_mask, tokens) * tokens

        def seen_by_query(shape, row, first, length, new):
            position = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=LAYOUT) + first
            if token_mask is not None:
                of = lax.div(anew(item), jnp.int32(num_items // token_mask.shape[0])) if by_item else row
                lines = [load_wide(mask_ref.at[of, i], shape, 0) for i in range(token_mask.shape[1])]
                lines = [plgpu.layout_cast(line, LAYOUT) for line in lines]  # or the search for layouts takes minutes
                return is_visible(position, *lines[:3], lines[3:], window_mask)
            token = lax.div(plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=LAYOUT), jnp.int32(at_once))
            last = length - new + token
            seen = (position <= last) & (token < new)
            return seen & window_mask.covers(position, window_mask.first(last)) if window_mask.ends else seen

        def partly_seen(first, length, new):
            """Does some token not see all of a tile?"""
            partly = first + (tokens - 1) > length - new
            if window_mask.ends:
                partly |= first < window_mask.first(length - 1)
            if new_tokens > 1 and not by_item:  # those that are none see nothing, and are written
                partly |= new < new_tokens
            return partly

        @pl.when((warpgroup == WEIGHER) & used)
        def weigh():
            plgpu.set_max_registers(REGISTERS["weigh"], action="decrease")
            row, start, num_tiles, length, new, place, role, first_seen = work()
            queries = pl.ds(place * num_heads + head * at_once, QUERY_ROWS)
            for columns, part_s in q_parts(q_s):
                plgpu.copy_gmem_to_smem(q_ref.at[queries, columns], part_s, q_ready)  # zeros beyond the last token
            if interpret is None and tuning.EARLY_LAUNCH and some_cut:
                plgpu.griddepcontrol_launch_dependents()
            scale, cap = scalars_ref[0], scalars_ref[1]
            plgpu.barrier_wait(q_ready)

            def step(i, carry):
                m, total = carry
                slot, first = at(start, i, first_seen)
                plgpu.barrier_wait(ready.at[slot])
                keys = rows_s.at[slot]

                pairs = [(part_s, Transposed(keys.at[:, columns])) for columns, part_s in q_parts(q_s)]
                s = multiply(interpret, (QUERY_ROWS, tokens), *pairs)
                s = logits_base2(s, scale, cap if soft_cap else None)

                def select_seen(s, first=first):
                    return jnp.where(seen_by_query(s.shape, row, first, length, new), s, -jnp.inf)

                if token_mask is not None:
                    s = select_seen(s)
                else:
                    s = lax.cond(partly_seen(first, length, new), select_seen, lambda s: s, s)
                m, old = jnp.maximum(m, s.max(axis=1)), m
                safe = safe_maximum(m)
                alpha = jnp.exp2(old - safe)
                p = jnp.exp2(s - lax.broadcast_in_dim(safe, s.shape, [0]))
                total = total * alpha + p.sum(axis=1)
                pl.when(i > 0)(lambda: plgpu.barrier_wait(p_free))
                p_s[...] = p.astype(q.dtype)
                factor_s[...] = alpha
                plgpu.commit_smem()
                plgpu.barrier_arrive(p_ready)
                return m, total

            m, total = full((QUERY_ROWS,), -jnp.inf, ROW), full((QUERY_ROWS,), 0.0, ROW)
            m, total = lax.fori_loop(0, num_tiles, step, (m, total))
            pl.when(num_tiles > 0)(lambda: plgpu.barrier_wait(p_free))

            def leave(m, total, factor, lse_ref, base: float):
                total = jnp.where(total == 0.0, 1.0, total)
                factor_s[...] = factor / total
                store(lse_ref, (m + jnp.log2(total)) * base)

            @pl.when(role == WHOLE)
            def _():
                most, sum_of_all, factor = m, total, full((QUERY_ROWS,), 1.0, ROW)
                if sinks_ref is not None:
                    sink = plgpu.load(sinks_ref.at[head], layout=ROW, optimized=False)
                    most, sum_of_all, factor = add_sink(m, total, sink)
                leave(most, sum_of_all, factor, lse_ref.at[item if by_item else row, head], math.log(2))

            if some_cut:
                pl.when(role != WHOLE)(lambda: leave(m, total, 1.0, part_lse_ref.at[item, head], 1.0))
            plgpu.commit_smem()
            plgpu.barrier_arrive(p_ready)

        def sum_values(half: int):
            """Half of the values' columns: what the weights make of them."""
            plgpu.set_max_registers(REGISTERS["sum"], action="increase")
            _, start, num_tiles, length, _, place, role, first_seen = work()
            spans = [pl.ds(first, min(PIECE, half_rank - first)) for first in range(0, half_rank, PIECE)]

            def scaled(parts):
                factor = plgpu.load(factor_s, layout=ROW)
                return [x * lax.broadcast_in_dim(factor, x.shape, [0]) for x in parts]

            def step(i, parts):
                slot, first = at(start, i, first_seen)
                plgpu.barrier_wait(ready.at[slot])
                values = rows_s.at[slot, :, pl.ds(half * half_rank, half_rank)]
                plgpu.barrier_wait(p_ready)

                @pl.when((first < first_seen) | (first + tokens > length))
                def _():  # the product with the keys is done
                    first_tokens = window_mask.sink_tokens - first if window_mask.sink_tokens else None
                    select_seen_values(values, first_seen - first, length - first, first_tokens)
                    plgpu.commit_smem()

                parts = [
                    accumulate(interpret, x, (p_s, values.at[:, span]))
                    for x, span in zip(scaled(parts), spans, strict=True)
                ]
                plgpu.barrier_arrive(p_free)
                plgpu.barrier_arrive(free.at[slot])
                return parts

            parts = [full((QUERY_ROWS, span.size), 0.0, LAYOUT) for span in spans]
            parts = lax.fori_loop(0, num_tiles, step, parts)
            plgpu.barrier_wait(p_ready)
            parts = list(zip(scaled(parts), spans, strict=True))

            @pl.when(role == WHOLE)
            def write():
                for x, span in parts:  # in the place of the queries, which are done with
                    q_s[0].at[half, :, span][...] = x.astype(q.dtype)
                plgpu.commit_smem()
                for t in range(new_tokens):

                    def copy(t=t):
                        columns = pl.ds(half * half_rank, half_rank)
                        target = out_ref.at[place + t, pl.ds(head * at_once, at_once), columns]
                        plgpu.copy_smem_to_gmem(q_s[0].at[half, pl.ds(t * at_once, at_once)], target)

                    pl.when(items_ref[anew(item), 7] > t)(copy) if by_item else copy()
                plgpu.wait_smem_to_gmem(0)

            def leave_to_merge():
                for x, span in parts:  # turned in registers, for global memory does not take them else
                    columns = pl.ds(half * half_rank + span.start, span.size)
                    turned = plgpu.layout_cast(x, plgpu.Layout.WGMMA_TRANSPOSED)
                    store(part_ref.at[item, head, columns].T, turned)

            if some_cut:
                pl.when(role != WHOLE)(leave_to_merge)

        for half in range(HALVES):
            pl.when((warpgroup == 1 + half) & used)(functools.partial(sum_values, half))

        @pl.when((warpgroup == PRODUCER) & used)
        def produce():
            plgpu.set_max_registers(REGISTERS["produce"], action="decrease")
            row, start, num_tiles, length, *_, first_seen = work()
            fetch(
                kv_ref,
                tables_ref,
                Walk(row, 0, start, num_tiles, first_seen, length),
                tile,
                window_mask,
                (Ring(rows_s, ready, free),),
                in_warps=operands.is_uniform,
            )

    def run(*refs):
        q_shapes = [(HALVES, QUERY_ROWS, half_rank)] + [(1, QUERY_ROWS, width - rank)] * (width > rank)
        buffers = (
            tuple(plgpu.SMEM(shape, q.dtype, transforms=OPERAND) for shape in q_shapes),
            plgpu.SMEM((stages, tokens, width), q.dtype, transforms=OPERAND),
            plgpu.SMEM((QUERY_ROWS, tokens), q.dtype, transforms=OPERAND),
            plgpu.SMEM((QUERY_ROWS,), jnp.float32),
        )
        barriers = (
            plgpu.Barrier(num_arrivals=HALVES + (width > rank)),
            plgpu.Barrier(num_arrivals=tile.pieces(kv.shape[3]), num_barriers=stages),
            plgpu.Barrier(num_arrivals=HALVES, num_barriers=stages),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=HALVES),
        )
        pl.run_scoped(lambda *scratch: kernel(*refs, scratch=scratch), buffers, barriers, collective_axes="warpgroup")

    run.__name__ = f"paged_latent_{'prefill' if by_item else 'decode'}"  # what profiles and dumps show
    shape = jax.ShapeDtypeStruct
    outputs: tuple = ()
    if some_cut:
        outputs += (shape((num_items, head_tiles, rank, QUERY_ROWS), jnp.float32),)
        outputs += (shape((num_items, head_tiles, QUERY_ROWS), jnp.float32),)
    if into is None:
        lines = num_items if by_item else tables.shape[0]
        outputs += (shape((num_tokens, num_heads, rank), q.dtype),)
        outputs += (shape((lines, head_tiles, QUERY_ROWS), jnp.float32),)
    rows = q.reshape(-1, q.shape[2])
    optional = (x for x in (sinks, token_mask) if x is not None)
    made = plgpu.kernel(
        run,
        out_type=outputs,
        grid=(num_items, head_tiles),
        grid_names=("item", "head"),
        num_threads=PRODUCER + 1,
        thread_name="warpgroup",
        # Sums and maxima along a query's row need no memory, which there is not more of.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=1024),
        interpret=interpret,
    )(rows, kv, tables, items, scalars, *optional, *(into or ()))
    return made if some_cut else (None, None, *(made or ()))


def heads_at_once(num_heads: int) -> int:
    """Heads in one tile of queries: a multiple of 8 up to 64, or 64 of a multiple of them."""
    return min(num_heads, QUERY_ROWS)
