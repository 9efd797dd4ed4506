"""Decode: a few query tokens a row, the row's keys and values spread over as many thread blocks as fill the chip.

Two kernels. `split` runs one thread block per (work item, KV head): a producer warpgroup streams tiles of K and V from
the pool's blocks into a ring of shared-memory slots with bulk copies, and a consumer warpgroup keeps a running softmax
over them, as in https://crfm.stanford.edu/2023/10/12/flashdecoding.html. A row that is one item is done then. `merge`
combines the items of the rows that were cut.

The operands are swapped: S^T[tile, N] = K q^T and O^T[D, N] = V^T P^T, so that the keys fill the matrix unit's 64 rows
and the queries of one KV head are the N of 8, 16, 24 or 32, instead of being padded to 64: column c is head
`c % group` of the row's new token `c // group`. Columns past those hold anything, and window_mask no other.

What a thread block must not see is never left to a product with zero, since 0 * NaN is NaN: logits are selected, and
V's unseen rows are overwritten with zeros in shared memory.
"""

import itertools
import math

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.masks import is_visible
from pallas_kernels.gpu import nibbles, tuning
from pallas_kernels.gpu.dequantize import arrivals, load_scales, slots_and_wide, widen, widened
from pallas_kernels.gpu.products import Transposed, accumulate, join, multiply
from pallas_kernels.gpu.tiles import (
    LAYOUT,
    OPERAND,
    InterpretParams,
    Operands,
    Ring,
    Tile,
    Walk,
    add_sink,
    fetch,
    full,
    load_wide,
    logits_base2,
    safe_maximum,
    select_seen_values,
    store,
    tick,
    tile_at,
    varies,
)
from pallas_kernels.gpu.work_items import UNUSED, WHOLE

VECTOR = LAYOUT.reduce(0)  # how one value for each column lies in registers


def split(operands: Operands, items, into=None, *, num_items, new_tokens, columns, tile: Tile, token_mask=None):
    """Attention of each work item: a range of one row's tiles.

    Args:
      operands: sinks as `f32[K, columns]`.
      items: `i32[W, 12]` or more lines, see `decode_items`.
      into: references to `[N, H, D]` and `f32[S, K, columns]`, of which only the items' own are written; None makes new
        arrays, the rest of which holds anything.
      num_items: W.
      new_tokens: tokens of each row, at most: `new_tokens * H // K <= columns`, a multiple of 8.
      token_mask: `i32[S, 3 + W, columns]`, what each of a row's queries sees where that does not go by
        `window_mask` alone; see `masks.MaskTiles`.

    Returns:
      `f32[W, K, E, columns]` and `f32[W, K, columns]`: of each item of a row that was cut the normalised output, and
      the base-2 logarithm of its softmax's denominator; then, if `into` is None, the output and its natural logarithm
      for the rows that were not.
    """
    q, stored, tables, scalars, window_mask, soft_cap, interpret, sinks, *_ = operands
    kv, kv_scale, format, quantized = stored.kv, stored.scale, stored.format, stored.format.is_quantized
    groups = nibbles.find_groups(operands, tile)
    by_token = quantized and groups is None  # a scale for all of a token's entries
    _, num_heads, head_dim = q.shape
    num_rows, num_kv_heads = tables.shape[0], operands.head_parts
    group = num_heads // num_kv_heads
    tokens, stages = tile.tokens, tile.stages
    pieces, spans = tile.pieces(kv.shape[3]), copied_spans(head_dim)
    # Keys of 8 bits are widened into an operand in registers, where those are enough; the interpreter refuses that.
    from_registers = quantized and interpret is None and head_dim <= 256

    def kernel(q_ref, kv_ref, tables_ref, items_ref, scalars_ref, *others, scratch):
        scale_ref, *others = others if quantized else (None, *others)
        (q_s, k_s, v_s, p_s, rows_s, *wide), (q_ready, k_ready, v_ready, k_free, v_free) = scratch
        wide_s, scales_s = wide or (None, None)
        sinks_ref, *others = (None, *others) if sinks is None else others
        mask_ref, *others = (None, *others) if token_mask is None else others
        part_ref, part_lse_ref, out_ref, lse_ref = others if into is None else (*others[2:], *others[:2])
        item, head = lax.axis_index("item"), lax.axis_index("head")
        warpgroup = lax.axis_index("warpgroup")
        row, start, stop, length, new, place, role = (items_ref[item, i] for i in range(7))
        first_seen = jnp.maximum(window_mask.first(length - new), 0) if window_mask.ends else jnp.int32(0)
        num_tiles = stop - start
        heads = pl.ds(head * group, group)

        def seen_by_column(shape, first):
            """Which places of a tile each column sees."""
            position = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=LAYOUT) + first
            if new_tokens == 1:  # all see the same: fewer registers
                seen = position < length
                return seen & window_mask.covers(position, first_seen) if window_mask.ends else seen
            if token_mask is not None:
                lines = [load_wide(mask_ref.at[row, i], shape, 1) for i in range(token_mask.shape[1])]
                return is_visible(position, *lines[:3], lines[3:], window_mask)
            token = lax.div(plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=LAYOUT), jnp.int32(group))
            last = length - new + token
            seen = (position <= last) & (token < new)
            return seen & window_mask.covers(position, window_mask.first(last)) if window_mask.ends else seen

        @pl.when((warpgroup == 0) & (role != UNUSED))
        def consume():
            for t, (nth, span) in itertools.product(range(new_tokens), enumerate(spans)):
                source = q_ref.at[place + t, heads, span]
                plgpu.copy_gmem_to_smem(source, rows_s.at[nth, pl.ds(t * group, group)], q_ready)
            if interpret is None and tuning.EARLY_LAUNCH:
                plgpu.griddepcontrol_launch_dependents()
            scale, cap = scalars_ref[0], scalars_ref[1]
            plgpu.barrier_wait(q_ready)
            # From the caller's layout, with any number of heads, into the matrix unit's.
            for nth, span in enumerate(spans):
                q_s.at[:, span].T[...] = plgpu.load(rows_s.at[nth].T, layout=LAYOUT, optimized=False)
            plgpu.commit_smem()

            def scaled(slot, which):
                if groups is None:
                    return None
                values = v_s.at[slot] if which == 0 and format.mixes_pairs else None
                return nibbles.Scaled(groups, scales_s.at[slot], which, values)

            def multiply_from_registers(slot):
                """Products of keys of 8 bits with the queries, 64 tokens at a time, so that two thread blocks fit."""
                parts = []
                for token in range(0, tokens, 64):
                    keys = k_s.at[slot, pl.ds(token, 64)]
                    wide_keys = widened(keys, q.dtype, format, in_pairs=True, scaled=scaled(slot, 0), token=token)
                    parts.append(multiply(interpret, (64, columns), (wide_keys, Transposed(q_s))))
                return join(parts, axis=0)

            def step(i, carry):
                acc, m, total = carry
                slot = lax.rem(i, jnp.int32(stages))
                first = (
                    tile_at(start + i, first_seen, window_mask, tokens) * tokens
                )  # the position of the tile's first token
                plgpu.barrier_wait(k_ready.at[slot])
                if format.mixes_pairs:  # values have bits of the keys
                    plgpu.barrier_wait(v_ready.at[slot])
                keys, values = k_s.at[slot], v_s.at[slot]
                if quantized and not from_registers:
                    keys = wide_s
                    widen(k_s.at[slot], keys, format, in_pairs=interpret is None, scaled=scaled(slot, 0))
                    plgpu.commit_smem()

                if from_registers:
                    s = multiply_from_registers(slot)
                else:
                    s = multiply(interpret, (tokens, columns), (keys, Transposed(q_s)))
                if by_token:  # the scales only now: the operand takes the registers
                    key_scales, value_scales = load_scales(scales_s.at[slot], format)
                    s = s * lax.broadcast_in_dim(key_scales, s.shape, [0])
                    tick(interpret)
                if groups is None:
                    plgpu.barrier_arrive(k_free.at[slot])
                s = logits_base2(s, scale, cap if soft_cap else None)
                s = jnp.where(seen_by_column(s.shape, first), s, -jnp.inf)
                m, old = jnp.maximum(m, s.max(axis=0)), m
                safe = safe_maximum(m)
                alpha = jnp.exp2(old - safe)
                p = jnp.exp2(s - lax.broadcast_in_dim(safe, s.shape, [1]))
                # Summed over the tile's tokens only at the end: a sum across warps in every step costs more.
                total = total * lax.broadcast_in_dim(alpha, total.shape, [1]) + p
                if by_token:
                    p = p * lax.broadcast_in_dim(value_scales, p.shape, [0])
                p_s.T[...] = p.astype(q.dtype)

                if not format.mixes_pairs:
                    plgpu.barrier_wait(v_ready.at[slot])
                if quantized:
                    values = wide_s
                    widen(v_s.at[slot], values, format, in_pairs=interpret is None, scaled=scaled(slot, 1))
                else:

                    @pl.when((first < first_seen) | (first + tokens > length))
                    def _():
                        sinks = window_mask.sink_tokens - first if window_mask.sink_tokens else None
                        select_seen_values(values, first_seen - first, length - first, sinks)

                plgpu.commit_smem()
                if quantized:
                    plgpu.barrier_arrive(v_free.at[slot])
                if groups is not None:
                    plgpu.barrier_arrive(k_free.at[slot])  # and with it the scales
                acc = acc * lax.broadcast_in_dim(alpha, acc.shape, [1])
                acc = accumulate(interpret, acc, (values.T, Transposed(p_s)))
                if not quantized:
                    plgpu.barrier_arrive(v_free.at[slot])
                return acc, m, total

            acc = full((head_dim, columns), 0.0, LAYOUT)
            m = full((columns,), -jnp.inf, VECTOR)
            total = full((tokens, columns), 0.0, LAYOUT)
            acc, m, total = lax.fori_loop(0, num_tiles, step, (acc, m, total))
            total = total.sum(axis=0)

            @pl.when(role == WHOLE)
            def write():
                finish(
                    (acc, m, total),
                    None if sinks_ref is None else sinks_ref.at[head],
                    rows_s,
                    [out_ref.at[place + t, heads] for t in range(new_tokens)],
                    lse_ref.at[row, head],
                )

            @pl.when(role != WHOLE)
            def leave_to_merge():
                safe_total = jnp.where(total == 0.0, 1.0, total)
                out = acc * lax.broadcast_in_dim(1.0 / safe_total, acc.shape, [1])
                store(part_ref.at[item, head], out)
                store(part_lse_ref.at[item, head], m + jnp.log2(safe_total))

        @pl.when((warpgroup == 1) & (num_tiles > 0))
        def produce():
            fetch(
                kv_ref,
                tables_ref,
                Walk(row, operands.kv_head(head), start, num_tiles, first_seen, length),
                tile,
                window_mask,
                (Ring(k_s, k_ready, k_free), Ring(v_s, v_ready, v_free, values=1)),
                in_warps=not varies(kv),
                scales=(scale_ref, scales_s) if quantized else None,
                groups=groups,
            )

    def paged_decode_split(*refs):  # the name that profiles and dumps show
        slots, wide = slots_and_wide(kv.dtype, q.dtype, format, tile, head_dim, groups)
        buffers = (
            plgpu.SMEM((columns, head_dim), q.dtype, transforms=OPERAND),
            slots,
            slots,
            plgpu.SMEM((columns, tokens), q.dtype, transforms=OPERAND),
            # The queries as they come, and in the end the output.
            plgpu.SMEM((len(spans), columns, spans[0].size), q.dtype),
            *wide[1:],  # K and V have one in turn
        )
        counts = arrivals(format, pieces, groups)
        k_ready, v_ready = (plgpu.Barrier(num_arrivals=n, num_barriers=stages) for n in counts)
        free = plgpu.Barrier(num_barriers=stages)
        barriers = (plgpu.Barrier(num_arrivals=new_tokens * len(spans)), k_ready, v_ready, free, free)
        pl.run_scoped(lambda *scratch: kernel(*refs, scratch=scratch), buffers, barriers, collective_axes="warpgroup")

    shape = jax.ShapeDtypeStruct
    outputs = (
        shape((num_items, num_kv_heads, head_dim, columns), jnp.float32),
        shape((num_items, num_kv_heads, columns), jnp.float32),
    )
    if into is None:
        outputs = (*outputs, shape(q.shape, q.dtype), shape((num_rows, num_kv_heads, columns), jnp.float32))
    optional = (x for x in (kv_scale, sinks, token_mask) if x is not None)
    return plgpu.kernel(
        paged_decode_split,
        out_type=outputs,
        grid=(num_items, num_kv_heads),
        grid_names=("item", "head"),
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(q, kv, tables, items, scalars, *optional, *(into or ()))


def merge(
    parts,
    items,
    sinks,
    into,
    *,
    new_tokens,
    most_cut,
    num_blocks,
    deterministic: bool = False,
    interpret: InterpretParams = None,
):
    """Combine the items of each row that was cut.

    Args:
      parts, items, sinks, new_tokens: as of `split`, or of `latent.split`; the parts' output and its logarithm.
      most_cut: see `decode_items`.
      into: `split`'s output and its logarithm: references where the rows' are written, or else arrays.
      num_blocks: thread blocks to start, at most; each takes several rows if those are more.
      deterministic: as many steps for a row however many others there are.

    Returns:
      New arrays like `into`, with the rows' in them and anything else; nothing if those are references.
    """
    (part, part_lse), (out, lse) = parts, into
    _, num_kv_heads, head_dim, _ = part.shape
    group, dtype = out.shape[1] // num_kv_heads, out.dtype
    columns = -(-new_tokens * group // 8) * 8  # of those of `part`, which may be more
    width = 64  # of the head_dim, in one thread block
    pieces = head_dim // width
    at_once = min(max(num_blocks // (num_kv_heads * pieces), 1), most_cut)  # rows
    # Items loaded at once: one by one, each would cost the memory's whole latency. More where rows are few, and so cut
    # into many, while thread blocks that each need many registers still fit on the chip all at once.
    ahead = (128 if most_cut * num_kv_heads <= 64 and not deterministic else 64) // columns or 1
    used = pl.ds(0, columns)

    def paged_decode_merge(part_ref, part_lse_ref, items_ref, *others):
        sinks_ref, out_ref, lse_ref, rows_s = (None, *others) if sinks is None else others
        nth, head, d = (lax.axis_index(name) for name in ("row", "head", "part"))
        num_cut = items_ref[nth, 11]
        if interpret is None and tuning.EARLY_LAUNCH:
            plgpu.griddepcontrol_wait()

        def combine(carry, x, x_lse):
            acc, m, total = carry
            m, old = jnp.maximum(m, x_lse), m
            safe = safe_maximum(m)
            alpha, weight = jnp.exp2(old - safe), jnp.exp2(x_lse - safe)
            acc = acc * lax.broadcast_in_dim(alpha, acc.shape, [1])
            return acc + x * lax.broadcast_in_dim(weight, acc.shape, [1]), m, total * alpha + weight

        @pl.loop(0, lax.div(num_cut - nth + (at_once - 1), jnp.int32(at_once)))
        def merge_row(i):
            first, stop, row, place = (items_ref[nth + i * at_once, j] for j in range(7, 11))

            def step(i, carry):
                items = [first + i * ahead + j for j in range(ahead)]
                loaded = []
                for item in items:
                    at = jnp.minimum(item, stop - 1)
                    x = plgpu.load(part_ref.at[at, head, pl.ds(d * width, width), used], layout=LAYOUT, optimized=False)
                    x_lse = plgpu.load(part_lse_ref.at[at, head, used], layout=VECTOR, optimized=False)
                    # Past the row's last item, it is loaded again, and weighs nothing.
                    loaded.append((x, x_lse + jnp.where(item < stop, 0.0, -jnp.inf)))
                for x, x_lse in loaded:
                    carry = combine(carry, x, x_lse)
                return carry

            zero = (
                full((width, columns), 0.0, LAYOUT),
                full((columns,), -jnp.inf, VECTOR),
                full((columns,), 0.0, VECTOR),
            )
            merged = lax.fori_loop(0, lax.div(stop - first + (ahead - 1), jnp.int32(ahead)), step, zero)
            at = pl.ds(head * group, group), pl.ds(d * width, width)
            finish(
                merged,
                None if sinks is None else sinks_ref.at[head, used],
                rows_s,
                [out_ref.at[place + t, *at] for t in range(new_tokens)],
                lse_ref.at[row, head, used],
                with_lse=d == 0,
            )

    in_place = isinstance(out, jax.Ref)
    return plgpu.kernel(
        paged_decode_merge,
        out_type=() if in_place else tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (out, lse)),
        grid=(at_once, num_kv_heads, pieces),
        grid_names=("row", "head", "part"),
        scratch_types=[plgpu.SMEM((1, columns, width), dtype)],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(part, part_lse, items, *(() if sinks is None else (sinks,)), *((out, lse) if in_place else ()))


def copied_spans(head_dim: int) -> list[pl.Slice]:
    """Returns the columns of each bulk copy of a token's heads, which takes no more than 256 numbers of one line."""
    width = max(width for width in (64, 128, 192, 256) if head_dim % width == 0)
    return [pl.ds(first, width) for first in range(0, head_dim, width)]


def finish(softmax, sinks_ref, rows_s, tokens, lse_ref, *, with_lse=True) -> None:
    """Write a row's output where its tokens lie, by way of `rows_s`, and its logarithm.

    Args:
      softmax: the products with the values, their maximum and their sum, the queries as columns.
      sinks_ref: `f32[columns]`, one more logit for each query that sees anything; or None.
      tokens: for each of the row's tokens, where its heads' output goes.
      with_lse: whether this thread block writes the logarithm, which those that do other columns have too.
    """
    acc, m, total = softmax
    if sinks_ref is not None:
        m, total, alpha = add_sink(m, total, plgpu.load(sinks_ref, layout=VECTOR, optimized=False))
        acc = acc * lax.broadcast_in_dim(alpha, acc.shape, [1])
    total = jnp.where(total == 0.0, 1.0, total)
    out = (acc * lax.broadcast_in_dim(1.0 / total, acc.shape, [1])).astype(rows_s.dtype)
    spans = copied_spans(out.shape[0])
    for nth, span in enumerate(spans):
        store(rows_s.at[nth].T, out[span.start : span.start + span.size])
    pl.when(with_lse)(lambda: store(lse_ref, (m + jnp.log2(total)) * math.log(2)))
    plgpu.commit_smem()
    for (t, token), (nth, span) in itertools.product(enumerate(tokens), enumerate(spans)):
        count = token.shape[0]
        plgpu.copy_smem_to_gmem(rows_s.at[nth, pl.ds(t * count, count)], token.at[:, span])
    plgpu.wait_smem_to_gmem(0)
