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

The output of 64 queries and a head of more than 256 is more than a warpgroup's registers hold. There an item has 64
query rows, and each consumer half of the columns: both multiply all queries with the keys, and their weights with the
values of their own columns, which come in a ring of their own.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.masks import is_visible
from pallas_kernels.gpu import nibbles
from pallas_kernels.gpu.dequantize import arrivals, settle_scales, slots_and_wide, widen
from pallas_kernels.gpu.products import Transposed, accumulate, multiply_and_accumulate, multiply_while
from pallas_kernels.gpu.tiles import (
    LAYOUT,
    OPERAND,
    SINGLE_ROWS,
    Operands,
    Ring,
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
    varies,
)
from pallas_kernels.gpu.tuning import CONSUMERS, HALF, PrefillPlan, divide


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


def attend(operands: Operands, items, holes, plan: PrefillPlan, *, token_mask=None):
    """Causal attention of each work item: consecutive tokens of one row of the table, at most `tokens_of(group)` for
    each of the `halves` of `divide`: n.

    Args:
      operands: sinks as `f32[K, 64]`, for each of a consumer's query rows if C is 1.
      items: `i32[W, C, 7]`, of C chunks of the context each; see `work_items.prefill_items`. With `token_mask`
        `i32[W, C, 9]`: in the place of the tokens' positions the first that any of them sees and the one to stop
        before, and at the end the same of what all of them see.
      holes: `i32[W, n, 2]`, see `work.bits`: which of the step's tokens belong to no row, `tokens_of(group)` to a
        half, in the step's order. If C is 1: their output is 0.
      plan: which ways of `tuning.PrefillPlan` to go. `in_turns` and `ahead` not for a quantized pool, whose tiles both
        consumers widen together, nor where consumers have columns of their own.
      token_mask: `i32[W, 3 + words, n * 64]`, what each query row sees, where more does; see `MaskTiles`. Then
        `window_mask` says only which first tokens are seen.

    Returns:
      If C is 1, `[N, H, D]` in q's dtype, where tokens of rows without an item hold anything; else of each chunk
      `[W * C, K, n, 64, E]`, not written without tiles. And the natural logarithm of the softmax's denominator,
      `f32[W * C, K, n * 64]`.
    """
    q, stored, tables, scalars, window_mask, soft_cap, interpret, sinks, *_ = operands
    kv, kv_scale, format, quantized = stored.kv, stored.scale, stored.format, stored.format.is_quantized
    groups = nibbles.find_groups(operands, plan.tile)
    by_token = quantized and groups is None  # a scale for all of a token's entries
    tile, weights_in_registers, in_turns, ahead = (plan.tile, plan.weights_in_registers, plan.in_turns, plan.ahead)
    (_, num_heads, head_dim), (_, chunks, _), num_kv_heads = q.shape, items.shape, operands.head_parts
    items = items.reshape(-1, items.shape[2])
    group, num_items = num_heads // num_kv_heads, len(items)
    own, (halves, width), splits_columns = tokens_of(group), (division := divide(head_dim)), division.splits_columns
    tokens, stages = tile.tokens, tile.stages
    assert not (splits_columns and (in_turns or ahead))
    # Those of queries and keys that are each consumer's; of the last there may be fewer than of the output.
    spans = [pl.ds(first, min(width, head_dim - first)) for first in range(0, head_dim, width)]
    pieces = tile.pieces(kv.shape[3])

    def kernel(q_ref, kv_ref, tables_ref, items_ref, scalars_ref, *others, scratch):
        scale_ref, *others = others if quantized else (None, *others)
        mask_ref, *others = (None, *others) if token_mask is None else others
        sinks_ref, holes_ref, out_ref, lse_ref = (None, *others) if sinks is None else others
        ((rows_s, q_s), k_s, v_s, p_s, lse_s, *wide), (q_ready, *barriers) = scratch
        k_ready, v_ready, k_free, v_free, v_selected, turn, together, *widened = barriers
        item, head = lax.axis_index("item"), lax.axis_index("head")
        warpgroup = lax.axis_index("warpgroup")

        def work():
            """The item, for each role by itself: what both derive from one reading would be spilled between them."""
            row, first_token, stop, start, end = (items_ref[anew(item), i] for i in range(5))
            if token_mask is not None:
                first_seen = first_token
            else:
                first_seen = jnp.maximum(window_mask.first(first_token), 0) if window_mask.ends else jnp.int32(0)
            num_tiles = end - start
            return row, first_token, stop, first_seen, start, num_tiles

        def widen_together(stored, tile_s, slot, which):
            """Each consumer does a share, and waits for the other's."""
            scaled = None
            if groups is not None:
                values = v_s.at[slot] if which == 0 and format.mixes_pairs else None
                scaled = nibbles.Scaled(groups, wide[2].at[slot], which, values)
            share = {"share": anew(warpgroup), "shares": CONSUMERS}
            widen(stored, tile_s, format, in_pairs=interpret is None, scaled=scaled, **share)
            plgpu.commit_smem()
            plgpu.barrier_arrive(widened[which])
            plgpu.barrier_wait(widened[which])

        def half():
            """Which of the item's query rows are the consumer's."""
            return jnp.int32(0) if splits_columns else anew(warpgroup)

        def meet():
            plgpu.barrier_arrive(together)
            plgpu.barrier_wait(together)

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

        def nothing():
            """0, such that addresses are derived where they are used; ahead of the loop they would be spilled."""
            return anew(item) - item

        def slot_of(i):
            return nothing() if stages == 1 else lax.rem(i, jnp.int32(stages))

        def own_slot(slot):
            """A slot of V: of the consumer's own ring, or of the only one."""
            return slot + anew(warpgroup) * stages if splits_columns else slot

        def first_of(part, i):
            """The position of a tile's first token."""
            return tile_at(part.start + i, part.first_seen, window_mask, tokens) * tokens

        def ready_keys(i):
            slot = slot_of(i)
            plgpu.barrier_wait(k_ready.at[slot])
            if format.mixes_pairs:  # values have bits of the keys
                plgpu.barrier_wait(v_ready.at[own_slot(slot)])
            if not quantized:
                return k_s.at[slot]
            if splits_columns:
                return widen_own_keys(slot)
            # Once all of K is widened, both have multiplied by the V before, and once V is by this K: each may be
            # overwritten then.
            if by_token:
                pl.when(anew(warpgroup) == 0)(lambda: settle_scales(wide[2].at[slot], format))
            widen_together(k_s.at[slot], wide[0], slot, 0)
            return wide[0]

        def widen_own_keys(slot):
            """Each consumer does its columns, where it has its columns of V in turn."""
            pl.when(anew(warpgroup) == 0)(lambda: settle_scales(wide[2].at[slot], format))
            for nth, span in enumerate(spans):
                target = wide[0].at[nth, :, pl.ds(0, span.size)]
                share = functools.partial(widen, k_s.at[slot, :, span], target, format, in_pairs=interpret is None)
                pl.when(anew(warpgroup) == nth)(share)
            plgpu.commit_smem()
            meet()
            return wide[0]

        def ready_values(part, i):
            slot, first = slot_of(i), first_of(part, i)
            if not format.mixes_pairs:
                plgpu.barrier_wait(v_ready.at[own_slot(slot)])
            if quantized:
                if splits_columns:
                    meet()  # both have multiplied by the keys, which these overwrite
                    values = wide[0].at[anew(warpgroup)]
                    widen(v_s.at[own_slot(slot)], values, format, in_pairs=interpret is None)
                    plgpu.commit_smem()
                else:
                    values = wide[1]
                    widen_together(v_s.at[slot], values, slot, 1)
                plgpu.barrier_arrive(k_free.at[slot])  # and with it the scales
                plgpu.barrier_arrive(v_free.at[own_slot(slot)])
                return values
            values = v_s.at[own_slot(slot)]

            @pl.when((first < part.first_seen) | (first + tokens > part.stop))
            def _():
                sinks = window_mask.sink_tokens - first if window_mask.sink_tokens else None
                seen = part.first_seen - first, part.stop - first, sinks
                if splits_columns:
                    select_seen_values(values, *seen)
                    plgpu.commit_smem()
                else:  # both consumers read all of V: each cleans a share, and waits for the other's
                    select_seen_values(values, *seen, share=warpgroup, shares=CONSUMERS)
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(v_selected.at[slot])
                    plgpu.barrier_wait(v_selected.at[slot])

            return values

        def select_seen(part, first, s):
            if token_mask is not None:
                key = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=LAYOUT) + first
                here = lax.div(anew(item), jnp.int32(chunks)), pl.ds(half() * HALF, HALF)
                lines = [load_wide(mask_ref.at[here[0], i, here[1]], s.shape, 0) for i in range(token_mask.shape[1])]
                return jnp.where(is_visible(key, *lines[:3], lines[3:], window_mask), s, -jnp.inf)
            # Which of the tile's columns each row sees, for keys counted from the row's first would be spilled.
            query = lax.rem(plgpu.broadcasted_iota(jnp.int32, (HALF,), 0, layout=LAYOUT.reduce(1)), jnp.int32(own))
            query = jnp.minimum(query + (half() * own + part.first_token), part.stop - 1)
            column = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=LAYOUT)
            seen = column <= lax.broadcast_in_dim(query - first, s.shape, [0])
            if window_mask.ends:
                near = column >= lax.broadcast_in_dim(window_mask.first(query) - first, s.shape, [0])
                seen &= near | (column < window_mask.sink_tokens - first) if window_mask.sink_tokens else near
            return jnp.where(seen, s, -jnp.inf)

        def softmax(part, i, s, m, total):
            """Of a tile's products with its keys: the weights, what all before is multiplied by, maximum and sum."""
            slot, first = slot_of(i), first_of(part, i)
            if not quantized:
                plgpu.barrier_arrive(k_free.at[slot])
            elif by_token:
                s = s * lax.broadcast_in_dim(scales(slot, 0), s.shape, [1])
            s = logits_base2(s, part.scale, part.cap if soft_cap else None)
            # Does some token of the item not see all of the tile?
            if token_mask is not None:
                partly_seen = (first < items_ref[anew(item), 7]) | (first + tokens > items_ref[anew(item), 8])
            else:
                partly_seen = first + (tokens - 1) > part.first_token
                if window_mask.ends:
                    partly_seen |= first < window_mask.first(part.stop - 1)
            s = lax.cond(partly_seen, functools.partial(select_seen, part, first), lambda s: s, s)
            m, old = jnp.maximum(m, s.max(axis=1)), m
            safe = safe_maximum(m)
            alpha = jnp.exp2(old - safe)
            p = jnp.exp2(s - lax.broadcast_in_dim(safe, s.shape, [0]))
            total = total * alpha + p.sum(axis=1)
            if by_token:
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

        def keys_in(keys, nth, span):
            """Some columns of a tile, those of consumer `nth`."""
            return keys.at[nothing() + nth, :, pl.ds(0, span.size)] if quantized else keys.at[:, span]

        def weigh(part, i, m, total):
            """A tile's products with the keys, and their softmax."""
            keys = ready_keys(i)
            pairs = [(q_s.at[anew(warpgroup)], Transposed(keys))]
            if splits_columns:
                pairs = [
                    (q_s.at[nothing() + nth, :, pl.ds(0, x.size)], Transposed(keys_in(keys, nth, x)))
                    for nth, x in enumerate(spans)
                ]

            s, _ = multiply_while(pass_turn, interpret, (HALF, tokens), *pairs)
            return softmax(part, i, s, m, total)

        def add_values(part, i, acc, weights):
            weights = operand(weights)
            end_turn()
            values, slot = ready_values(part, i), slot_of(i)
            plgpu.commit_smem()
            await_turn()
            acc = accumulate(interpret, acc, (weights, values))
            if not quantized:
                plgpu.barrier_arrive(v_free.at[own_slot(slot)])
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
            await_turn()
            acc, (weights, alpha, m, total) = multiply_and_accumulate(
                lambda s: softmax(part, i, s, m, total),
                interpret,
                (HALF, tokens),
                (queries, Transposed(keys)),
                acc,
                (weights, values),
                pass_turn,
            )
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
            """A consumer's."""
            return pl.ds(anew(warpgroup) * width if splits_columns else 0, width)

        def at(token, count, nth):
            """Where so many tokens of one of the KV head's query heads are."""
            return pl.ds(token, count), anew(head) * group + nth, columns()

        def read_queries():
            mine = anew(warpgroup)
            first = items_ref[anew(item), 5] + half() * own
            for nth in range(group):  # beyond an item's own tokens, which reach no other query row
                here = rows_s.at[mine, pl.ds(nth * own, own)]
                plgpu.copy_gmem_to_smem(q_ref.at[at(first, own, nth)], here, q_ready.at[mine])
            plgpu.barrier_wait(q_ready.at[mine])
            queries = plgpu.load(rows_s.at[mine], layout=LAYOUT, optimized=False)
            plgpu.commit_smem()  # all of them are read: they may be overwritten
            q_s.at[mine][...] = queries
            plgpu.commit_smem()
            if splits_columns:
                meet()  # both read all of them

        def write(acc, m, total):
            mine = anew(warpgroup)
            if sinks is None:
                alpha = jnp.ones_like(total)
            else:
                sink = plgpu.load(sinks_ref.at[anew(head)], layout=LAYOUT.reduce(1), optimized=False)
                m, total, alpha = add_sink(m, total, sink)
            total = jnp.where(total == 0.0, 1.0, total)
            out = acc * lax.broadcast_in_dim(alpha / total, acc.shape, [0])
            if splits_columns:
                meet()  # both have multiplied the queries, in whose place the output is laid out
            store(rows_s.at[mine], out.astype(q.dtype))
            if splits_columns and interpret is not None:  # which has them in two places, and would see no race
                q_s.at[mine][...] = out.astype(q.dtype)
            lse_mine = lse_s.at[mine]
            lse_mine[...] = (m + jnp.log2(total)) * math.log(2)
            plgpu.commit_smem()

            def write_lse():
                plgpu.copy_smem_to_gmem(lse_mine, lse_ref.at[anew(item), anew(head), pl.ds(half() * HALF, HALF)])

            pl.when(mine == 0)(write_lse) if splits_columns else write_lse()
            if chunks > 1:
                target = out_ref.at[anew(item), anew(head), half(), :, columns() if splits_columns else slice(None)]
                plgpu.copy_smem_to_gmem(rows_s.at[mine], target)
            else:
                write_tokens(items_ref[anew(item), 5] + half() * own, items_ref[anew(item), 6] - half() * own)
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
            mine = anew(warpgroup)
            words = [holes_ref[anew(item), half(), i] for i in range(2)]

            @pl.when((words[0] | words[1]) != 0)
            def _():
                store(rows_s.at[mine], full((HALF, width), 0.0, LAYOUT).astype(q.dtype))
                plgpu.commit_smem()

                @pl.loop(jnp.int32(0), jnp.int32(own))
                def _(i):
                    word = jnp.where(i < 32, words[0], words[1])

                    @pl.when((lax.shift_right_logical(word, i & 31) & 1) > 0)
                    def _():
                        token = (anew(item) * halves + half()) * own + i
                        heads = pl.ds(anew(head) * group, group)
                        plgpu.copy_smem_to_gmem(rows_s.at[mine, pl.ds(0, group)], out_ref.at[token, heads, columns()])

                plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup < CONSUMERS)
        def consume():
            plgpu.set_max_registers(224 if quantized else 232, action="increase")
            _, first_token, stop, first_seen, start, num_tiles = work()

            @pl.when(items_ref[item, 6] > 0 if chunks == 1 else num_tiles > 0)
            def _():
                read_queries()
                part = Part(first_token, stop, first_seen, start, scalars_ref[0], scalars_ref[1])
                acc = full((HALF, width), 0.0, LAYOUT)
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
            values = Ring(v_s, v_ready, v_free, values=1)
            rings = [Ring(k_s, k_ready, k_free), values]
            if splits_columns:
                rings.append(values._replace(first_slot=stages, first_column=width))
            fetch(
                kv_ref,
                tables_ref,
                Walk(row, operands.kv_head(head), start, num_tiles, first_seen, stop),
                tile,
                window_mask,
                rings,
                in_warps=not varies(kv),
                scales=(scale_ref, wide[2]) if quantized else None,
                groups=groups,
            )

    def paged_prefill(*refs):  # the name that profiles and dumps show
        keys, wide = slots_and_wide(kv.dtype, q.dtype, format, tile, head_dim, groups)
        values = keys
        if splits_columns:  # a ring for each consumer; and a tile of K and one of V are multiplied in one place
            own_tile = dataclasses.replace(tile, stages=CONSUMERS * stages)
            values, _ = slots_and_wide(kv.dtype, q.dtype, format, own_tile, width)
            shared = plgpu.SMEM((CONSUMERS, tokens, width), q.dtype, transforms=OPERAND)
            wide = (shared, None, wide[2]) if quantized else ()
        rows = SINGLE_ROWS if width < 256 else ()  # of 256 JAX 0.11 finds no layout, and banks would gain little
        queries = [plgpu.SMEM((CONSUMERS, HALF, width), q.dtype, transforms=x) for x in (rows, OPERAND)]
        buffers = (
            # In one place; which the interpreter takes for one buffer of both consumers, that race.
            plgpu.RefUnion(*queries) if interpret is None else queries,
            keys,
            values,
            None if weights_in_registers else plgpu.SMEM((CONSUMERS, HALF, tokens), q.dtype, transforms=OPERAND),
            plgpu.SMEM((CONSUMERS, HALF), jnp.float32),
            *wide,
        )
        readers = 1 if splits_columns else CONSUMERS  # of a slot of V
        sizes = stages, stages * CONSUMERS // readers
        k_ready, v_ready, k_free, v_free = (
            plgpu.Barrier(num_arrivals=n, num_barriers=size)
            for n, size in zip((*arrivals(format, pieces, groups), CONSUMERS, readers), 2 * sizes, strict=True)
        )
        q_ready = plgpu.Barrier(num_arrivals=group, num_barriers=CONSUMERS)
        of_both = plgpu.Barrier(num_arrivals=CONSUMERS)
        v_selected, together = (None, of_both) if splits_columns else (k_free, None)
        widened = (of_both,) * (2 if quantized and not splits_columns else 0)
        barriers = (
            q_ready,
            k_ready,
            v_ready,
            k_free,
            v_free,
            v_selected,
            of_both if in_turns else None,
            together,
            *widened,
        )
        pl.run_scoped(lambda *scratch: kernel(*refs, scratch=scratch), buffers, barriers, collective_axes="warpgroup")

    out = q.shape if chunks == 1 else (num_items, num_kv_heads, halves, HALF, CONSUMERS * width // halves)
    optional = (x for x in (kv_scale, token_mask, sinks) if x is not None)
    return plgpu.kernel(
        paged_prefill,
        out_type=(
            jax.ShapeDtypeStruct(out, q.dtype),
            jax.ShapeDtypeStruct((num_items, num_kv_heads, halves * HALF), jnp.float32),
        ),
        grid=(num_items, num_kv_heads),
        grid_names=("item", "head"),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(q, kv, tables, items, scalars, *optional, holes)
