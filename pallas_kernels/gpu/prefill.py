"""Prefill: tiles of 128 query rows, a row being one head of one token, against the keys and values of their sequence.

One thread block per (work item, KV head): a producer warpgroup streams tiles of K and V (see `tiles.fetch`), and each
of two consumer warpgroups keeps a running softmax for 64 of the rows, as in FlashAttention-2
(https://arxiv.org/abs/2307.08691). The query heads of a KV head lie below one another in the rows, each with the same
tokens, so that every tile of K and V is used for all of them, and any group size fills the matrix unit. A head's
queries are one bulk copy from where they lie, and its output is one to where it belongs, both at any token; the matrix
unit's own tiles would begin at multiples of 8. So they come and go by way of registers and shared memory laid out in
single rows, which is the queries' own: all are read before they are laid out, and done with when there is an output.

Only tiles that some token of the item sees are fetched. As in `decode`, what is not seen is selected away, never
multiplied by zero.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.masks import sees
from pallas_kernels.gpu.dequantize import arrivals, settle_scales, slots_and_wide, widen
from pallas_kernels.gpu.support import kernel_head_dim
from pallas_kernels.gpu.tiles import (
    LAYOUT,
    OPERAND,
    SINGLE_ROWS,
    Operands,
    Walk,
    accumulate,
    add_sink,
    anew,
    fetch,
    full,
    load_wide,
    logits_base2,
    probe,
    safe_maximum,
    select_seen_values,
    store,
    tile_at,
    varies,
)
from pallas_kernels.gpu.tuning import PrefillPlan

CONSUMERS = 2
HALF = 64  # query rows of one consumer: the matrix unit's width
QUERY_ROWS = CONSUMERS * HALF


class Part(NamedTuple):
    """What a consumer's loop is over, and what turns products into logits; see `work_items.prefill_items`."""

    first_token: jax.Array
    stop: jax.Array
    first_seen: jax.Array
    start: jax.Array
    scale: jax.Array
    cap: jax.Array


def tokens_of(group: int) -> int:
    """New tokens in one consumer's query rows: row r is head `r // tokens` of token `r % tokens`; there may be rows of
    no head at the end."""
    return HALF // group


def attend(operands: Operands, items, holes, plan: PrefillPlan, *, sight=None):
    """Causal attention of each work item: consecutive tokens of one row of the table, `2 * tokens_of(group)` at most.

    Args:
      operands: sinks as `f32[K, 64]`, for each of a consumer's query rows if C is 1.
      items: `i32[W, C, 7]`, of C chunks of the context each; see `work_items.prefill_items`. With `sight`
        `i32[W, C, 9]`: in the place of the tokens' positions the first that any of them sees and the one to stop
        before, and at the end the same of what all of them see.
      holes: `i32[W, 2, 2]`, see `work.bits`: which of the step's tokens belong to no row, `tokens_of(group)` to a
        consumer, in the step's order. If C is 1: their output is 0.
      plan: which ways of `tuning.PrefillPlan` to go. `in_turns` and `ahead` not for a quantized pool, whose tiles both
        consumers widen together.
      sight: `i32[W, 3 + words, 128]`, what each query row sees, where more does; see `MaskTiles`. Then `reach` says
        only which first tokens are seen.

    Returns:
      If C is 1, `[N, H, D]` in q's dtype, where tokens of rows without an item hold anything; else of each chunk
      `[W * C, K, 2, 64, E]`, not written without tiles. And the natural logarithm of the softmax's denominator,
      `f32[W * C, K, 128]`.
    """
    q, stored, tables, scalars, reach, soft_cap, interpret, sinks, _ = operands
    kv, kv_scale, format, quantized = stored.kv, stored.scale, stored.format, stored.format.is_quantized
    tile, weights_in_registers, in_turns, ahead = (
        plan.tile, plan.weights_in_registers, plan.in_turns, plan.ahead
    )  # fmt: skip
    (_, num_heads, stored_dim), (_, chunks, _), num_kv_heads = q.shape, items.shape, operands.head_parts
    items = items.reshape(-1, items.shape[2])
    head_dim, group, num_items = kernel_head_dim(stored_dim), num_heads // num_kv_heads, len(items)
    own = tokens_of(group)
    tokens, stages = tile.tokens, tile.stages
    pieces = tile.pieces(kv.shape[3])

    def kernel(q_ref, kv_ref, tables_ref, items_ref, scalars_ref, *others, scratch):
        scale_ref, *others = others if quantized else (None, *others)
        sight_ref, *others = (None, *others) if sight is None else others
        sinks_ref, holes_ref, out_ref, lse_ref = (None, *others) if sinks is None else others
        ((rows_s, q_s), k_s, v_s, p_s, lse_s, *wide), (q_ready, *barriers) = scratch
        k_ready, v_ready, k_free, v_free, v_selected, turn, *widened = barriers
        item, head = lax.axis_index("item"), lax.axis_index("head")
        warpgroup = lax.axis_index("warpgroup")

        def work():
            """The item, for each role by itself: what both derive from one reading would be spilled between them."""
            row, first_token, stop, start, end = (items_ref[anew(item), i] for i in range(5))
            if sight is not None:
                first_seen = first_token
            else:
                first_seen = jnp.maximum(reach.first(first_token), 0) if reach.ends else jnp.int32(0)
            num_tiles = end - start
            return row, first_token, stop, first_seen, start, num_tiles

        def widen_together(stored, tile_s, which):
            """Each consumer does a share, and waits for the other's."""
            widen(stored, tile_s, format, share=anew(warpgroup), shares=CONSUMERS)
            plgpu.commit_smem()
            plgpu.barrier_arrive(widened[which])
            plgpu.barrier_wait(widened[which])

        def end_turn():
            if in_turns:
                plgpu.barrier_arrive(turn)

        def await_turn():
            if in_turns:
                plgpu.barrier_wait(turn)

        def pass_turn():
            """Twice a tile the consumers meet: one has issued its products, and the other has its weights. So that they
            are half a tile apart, the second meets the first before its loop, and the first the second behind it.

            Both have as many tiles, and so meet as often. Where one waits for the other otherwise, for its share of V,
            it has ended its turn and not begun the next: the other gets as far without it.
            """
            end_turn()
            await_turn()

        def scales(slot, which):
            return plgpu.load(wide[2].at[anew(slot), which], layout=LAYOUT.reduce(0))

        def slot_of(i):
            return lax.rem(i, jnp.int32(stages))

        def first_of(part, i):
            """The position of a tile's first token."""
            return tile_at(part.start + i, part.first_seen, reach, tokens) * tokens

        def ready_keys(i):
            slot = slot_of(i)
            plgpu.barrier_wait(k_ready.at[slot])
            if not quantized:
                return k_s.at[slot]
            # Once all of K is widened, both have multiplied by the V before, and once V is by this K: each may be
            # overwritten then.
            pl.when(anew(warpgroup) == 0)(lambda: settle_scales(wide[2].at[slot], format))
            widen_together(k_s.at[slot], wide[0], 0)
            return wide[0]

        def ready_values(part, i):
            slot, first = slot_of(i), first_of(part, i)
            plgpu.barrier_wait(v_ready.at[slot])
            if quantized:
                widen_together(v_s.at[slot], wide[1], 1)
                plgpu.barrier_arrive(k_free.at[slot])  # and with it the scales
                plgpu.barrier_arrive(v_free.at[slot])
                return wide[1]
            values = v_s.at[slot]

            @pl.when((first < part.first_seen) | (first + tokens > part.stop))
            def _():  # both consumers read all of V: each cleans a share, and waits for the other's
                sinks = reach.sink_tokens - first if reach.sink_tokens else None
                select_seen_values(
                    values, part.first_seen - first, part.stop - first, sinks, share=warpgroup, shares=CONSUMERS
                )
                plgpu.commit_smem()
                plgpu.barrier_arrive(v_selected.at[slot])
                plgpu.barrier_wait(v_selected.at[slot])

            return values

        def select_seen(part, first, s):
            half = anew(warpgroup)
            if sight is not None:
                key = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=LAYOUT) + first
                here = lax.div(anew(item), jnp.int32(chunks)), pl.ds(half * HALF, HALF)
                lines = [load_wide(sight_ref.at[here[0], i, here[1]], s.shape, 0) for i in range(sight.shape[1])]
                return jnp.where(sees(key, *lines[:3], lines[3:], reach), s, -jnp.inf)
            # Which of the tile's columns each row sees, for keys counted from the row's first would be spilled.
            query = lax.rem(plgpu.broadcasted_iota(jnp.int32, (HALF,), 0, layout=LAYOUT.reduce(1)), jnp.int32(own))
            query = jnp.minimum(query + (half * own + part.first_token), part.stop - 1)
            column = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=LAYOUT)
            seen = column <= lax.broadcast_in_dim(query - first, s.shape, [0])
            if reach.ends:
                near = column >= lax.broadcast_in_dim(reach.first(query) - first, s.shape, [0])
                seen &= near | (column < reach.sink_tokens - first) if reach.sink_tokens else near
            return jnp.where(seen, s, -jnp.inf)

        def softmax(part, i, s, m, total):
            """Of a tile's products with its keys: the weights, what all before is multiplied by, maximum and sum."""
            slot, first = slot_of(i), first_of(part, i)
            if not quantized:
                plgpu.barrier_arrive(k_free.at[slot])
            else:
                s = s * lax.broadcast_in_dim(scales(slot, 0), s.shape, [1])
            s = logits_base2(s, part.scale, part.cap if soft_cap else None)
            # Does some token of the item not see all of the tile?
            if sight is not None:
                partly_seen = (first < items_ref[anew(item), 7]) | (first + tokens > items_ref[anew(item), 8])
            else:
                partly_seen = first + (tokens - 1) > part.first_token
                if reach.ends:
                    partly_seen |= first < reach.first(part.stop - 1)
            s = lax.cond(partly_seen, functools.partial(select_seen, part, first), lambda s: s, s)
            m, old = jnp.maximum(m, s.max(axis=1)), m
            safe = safe_maximum(m)
            alpha = jnp.exp2(old - safe)
            p = jnp.exp2(s - lax.broadcast_in_dim(safe, s.shape, [0]))
            total = total * alpha + p.sum(axis=1)
            if quantized:
                p = p * lax.broadcast_in_dim(scales(slot, 1), p.shape, [1])
            if ahead or (in_turns and weights_in_registers):
                # All weights are in the sum, and a store has its place: else the compiler puts their exponentials off,
                # until the products that they should hide behind are done, or until it is the other's turn.
                lse_s.at[anew(warpgroup)][...] = total
            return p, alpha, m, total

        def rescaled(acc, alpha):
            return acc * lax.broadcast_in_dim(alpha, acc.shape, [0])

        def operand(weights):
            """Where the matrix unit reads them."""
            if weights_in_registers:
                return weights.astype(q.dtype)
            here = p_s.at[anew(warpgroup)]
            here[...] = weights.astype(q.dtype)
            return here

        def weigh(part, i, m, total):
            """A tile's products with the keys, and their softmax."""
            queries, keys = q_s.at[anew(warpgroup)], ready_keys(i)

            def product(s_ref):
                plgpu.wgmma(s_ref, queries, keys.T)
                pass_turn()
                return s_ref[...]

            probe(interpret, queries, keys)
            s = pl.run_scoped(product, plgpu.ACC((HALF, tokens), jnp.float32))
            return softmax(part, i, s, m, total)

        def add_values(part, i, acc, weights):
            weights = operand(weights)
            end_turn()
            values, slot = ready_values(part, i), slot_of(i)
            plgpu.commit_smem()
            probe(interpret, weights, values)
            await_turn()
            acc = accumulate(interpret, acc, weights, values)
            if not quantized:
                plgpu.barrier_arrive(v_free.at[slot])
            return acc

        def one_by_one(part, i, carry):
            acc, m, total = carry
            weights, alpha, m, total = weigh(part, i, m, total)
            return add_values(part, i, rescaled(acc, alpha), weights), m, total

        def overlapped(part, i, carry):
            """A tile's products with its keys and, of the tile before, those with its values, which go on while the
            softmax is done. Its weights are converted behind them, who still read those registers."""
            acc, m, total, weights = carry
            weights = operand(weights)
            end_turn()
            queries, keys, values = q_s.at[anew(warpgroup)], ready_keys(i), ready_values(part, i - 1)
            plgpu.commit_smem()
            probe(interpret, queries, keys, weights, values)
            await_turn()

            def products(s_ref, acc_ref):
                if interpret is None:  # which cannot begin with a sum
                    acc_ref[...] = acc
                plgpu.wgmma(s_ref, queries, keys.T)
                plgpu.wgmma(acc_ref, weights, values)
                pass_turn()
                weighed = softmax(part, i, plgpu.wgmma_accumulator_load(s_ref, wait_n=1), m, total)
                return acc_ref[...] if interpret is None else acc + acc_ref[...], *weighed

            sums = ((HALF, n) for n in (tokens, head_dim))
            acc, weights, alpha, m, total = pl.run_scoped(products, *(plgpu.ACC(x, jnp.float32) for x in sums))
            plgpu.barrier_arrive(v_free.at[slot_of(i - 1)])
            return rescaled(acc, alpha), m, total, weights.astype(q.dtype)

        def attend_to(part, num_tiles, acc, m, total):
            """All tiles of an item."""
            if not ahead:
                return lax.fori_loop(0, num_tiles, functools.partial(one_by_one, part), (acc, m, total))

            def some(acc, m, total):
                weights, _, m, total = weigh(part, jnp.int32(0), m, total)
                weights = weights.astype(q.dtype)
                step = functools.partial(overlapped, part)
                acc, m, total, weights = lax.fori_loop(1, num_tiles, step, (acc, m, total, weights))
                return add_values(part, num_tiles - 1, acc, weights), m, total

            return lax.cond(num_tiles > 0, some, lambda *x: x, acc, m, total)

        def columns():
            """All of them. Copies reach beyond a D that fills no tile, as in `decode`: an offset not known to be 0."""
            return pl.ds(0 if stored_dim == head_dim else jnp.minimum(anew(head), 0), head_dim)

        def at(token, count, nth):
            """Where so many tokens of one of the KV head's query heads are."""
            return pl.ds(token, count), anew(head) * group + nth, columns()

        def read_queries():
            half = anew(warpgroup)
            first = items_ref[anew(item), 5] + half * own
            for nth in range(group):  # beyond an item's own tokens, which reach no other query row
                here = rows_s.at[half, pl.ds(nth * own, own)]
                plgpu.copy_gmem_to_smem(q_ref.at[at(first, own, nth)], here, q_ready.at[half])
            plgpu.barrier_wait(q_ready.at[half])
            queries = plgpu.load(rows_s.at[half], layout=LAYOUT, optimized=False)
            plgpu.commit_smem()  # all of them are read: they may be overwritten
            q_s.at[half][...] = queries
            plgpu.commit_smem()

        def write(acc, m, total):
            half = anew(warpgroup)
            if sinks is None:
                alpha = jnp.ones_like(total)
            else:
                sink = plgpu.load(sinks_ref.at[anew(head)], layout=LAYOUT.reduce(1), optimized=False)
                m, total, alpha = add_sink(m, total, sink)
            total = jnp.where(total == 0.0, 1.0, total)
            out = acc * lax.broadcast_in_dim(alpha / total, acc.shape, [0])
            lse_mine = lse_s.at[half]
            store(rows_s.at[half], out.astype(q.dtype))
            lse_mine[...] = (m + jnp.log2(total)) * math.log(2)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(lse_mine, lse_ref.at[anew(item), anew(head), pl.ds(half * HALF, HALF)])
            if chunks > 1:
                plgpu.copy_smem_to_gmem(rows_s.at[half], out_ref.at[anew(item), anew(head), half])
            else:
                write_tokens(items_ref[anew(item), 5] + half * own, items_ref[anew(item), 6] - half * own)
            plgpu.wait_smem_to_gmem(0)

        def write_tokens(first, count):
            """The first `count` of a consumer's tokens: at once if those are all it can have, else in powers of two."""

            def copy(begin, size):
                @pl.loop(0, group)
                def _(nth):
                    here = rows_s.at[anew(warpgroup), pl.ds(nth * own + begin, size)]
                    plgpu.copy_smem_to_gmem(here, out_ref.at[at(first + begin, size, nth)])

            pl.when(count >= own)(lambda: copy(0, own))

            @pl.when((count > 0) & (count < own))
            def _():
                for size in (32, 16, 8, 4, 2, 1):
                    if size < own:
                        pl.when((count & size) > 0)(lambda size=size: copy(count & (-2 * size), size))

        def fill_holes():
            half = anew(warpgroup)
            words = [holes_ref[anew(item), half, i] for i in range(2)]

            @pl.when((words[0] | words[1]) != 0)
            def _():
                store(rows_s.at[half], full((HALF, head_dim), 0.0, LAYOUT).astype(q.dtype))
                plgpu.commit_smem()

                @pl.loop(jnp.int32(0), jnp.int32(own))
                def _(i):
                    word = jnp.where(i < 32, words[0], words[1])

                    @pl.when((lax.shift_right_logical(word, i & 31) & 1) > 0)
                    def _():
                        token = (anew(item) * CONSUMERS + half) * own + i
                        heads = pl.ds(anew(head) * group, group)
                        plgpu.copy_smem_to_gmem(rows_s.at[half, pl.ds(0, group)], out_ref.at[token, heads, columns()])

                plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup < CONSUMERS)
        def consume():
            plgpu.set_max_registers(224 if quantized else 232, action="increase")
            _, first_token, stop, first_seen, start, num_tiles = work()

            @pl.when(items_ref[item, 6] > 0 if chunks == 1 else num_tiles > 0)
            def _():
                read_queries()
                part = Part(first_token, stop, first_seen, start, scalars_ref[0], scalars_ref[1])
                acc = full((HALF, head_dim), 0.0, LAYOUT)
                m = full((HALF,), -jnp.inf, LAYOUT.reduce(1))
                total = full((HALF,), 0.0, LAYOUT.reduce(1))
                pl.when(anew(warpgroup) == 1)(pass_turn)
                acc, m, total = attend_to(part, num_tiles, acc, m, total)
                pl.when(anew(warpgroup) == 0)(end_turn)
                write(acc, m, total)
                pl.when(anew(warpgroup) == 0)(await_turn)  # JAX 0.11's interpreter insists that every arrival is seen

            if chunks == 1:
                fill_holes()

        @pl.when(warpgroup == CONSUMERS)
        def produce():
            plgpu.set_max_registers(56 if quantized else 40, action="decrease")  # it copies scales as well
            row, _, stop, first_seen, start, num_tiles = work()
            fetch(
                kv_ref, tables_ref, Walk(row, operands.kv_head(head), start, num_tiles, first_seen, stop), tile, reach,
                ((k_s, v_s), (k_ready, v_ready), (k_free, v_free)), in_warps=not varies(kv),
                scales=(scale_ref, wide[2]) if quantized else None,
            )  # fmt: skip

    def paged_prefill(*refs):  # the name that profiles and dumps show
        slots, wide = slots_and_wide(kv.dtype, q.dtype, format, tile, head_dim)
        rows = SINGLE_ROWS if stored_dim == head_dim else ()
        queries = [plgpu.SMEM((CONSUMERS, HALF, head_dim), q.dtype, transforms=x) for x in (rows, OPERAND)]
        buffers = (
            # In one place; which the interpreter takes for one buffer of both consumers, that race.
            plgpu.RefUnion(*queries) if interpret is None else queries, slots, slots,
            None if weights_in_registers else plgpu.SMEM((CONSUMERS, HALF, tokens), q.dtype, transforms=OPERAND),
            plgpu.SMEM((CONSUMERS, HALF), jnp.float32), *wide,
        )  # fmt: skip
        k_ready, v_ready = (plgpu.Barrier(num_arrivals=n, num_barriers=stages) for n in arrivals(format, pieces))
        free = plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages)
        widened = (plgpu.Barrier(num_arrivals=CONSUMERS),) * (2 if quantized else 0)
        q_ready = plgpu.Barrier(num_arrivals=group, num_barriers=CONSUMERS)
        turn = plgpu.Barrier(num_arrivals=CONSUMERS) if in_turns else None
        barriers = (q_ready, k_ready, v_ready, free, free, free, turn, *widened)
        pl.run_scoped(lambda *scratch: kernel(*refs, scratch=scratch), buffers, barriers, collective_axes="warpgroup")

    out = q.shape if chunks == 1 else (num_items, num_kv_heads, CONSUMERS, HALF, head_dim)
    optional = (x for x in (kv_scale, sight, sinks) if x is not None)
    return plgpu.kernel(
        paged_prefill,
        out_type=(
            jax.ShapeDtypeStruct(out, q.dtype),
            jax.ShapeDtypeStruct((num_items, num_kv_heads, QUERY_ROWS), jnp.float32),
        ),
        grid=(num_items, num_kv_heads), grid_names=("item", "head"),
        num_threads=CONSUMERS + 1, thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True), interpret=interpret,
    )(q, kv, tables, items, scalars, *optional, holes)  # fmt: skip
