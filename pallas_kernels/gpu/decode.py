"""Decode: one query token a row, the row's keys and values spread over as many thread blocks as fill the chip.

Two kernels. `split` runs one thread block per (work item, KV head): a producer warpgroup streams tiles of K and V from
the pool's blocks into a ring of shared-memory slots with bulk copies, and a consumer warpgroup keeps a running softmax
over them, as in https://crfm.stanford.edu/2023/10/12/flashdecoding.html. `merge` combines the items of a row.

The operands are swapped: S^T[tile, N] = K q^T and O^T[D, N] = V^T P^T, so that the keys fill the matrix unit's 64 rows
and the query heads of one KV head are the N of 8, 16, 24 or 32, instead of being padded to 64.

What a thread block must not see is never left to a product with zero, since 0 * NaN is NaN: logits are selected, and
V's unseen rows are overwritten with zeros in shared memory.
"""

import math

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gpu.tiles import (
    LAYOUT,
    OPERAND,
    InterpretParams,
    Tile,
    accumulate,
    fetch,
    full,
    logits_base2,
    probe,
    safe_maximum,
    select_seen_values,
)


def split(q, kv, tables, items, scalars, *, tile: Tile, window, soft_cap: bool, interpret: InterpretParams = None):
    """Attention of each work item: a range of one row's tiles.

    Args:
      q: `[S, K, N, D]`, the query heads of a KV head padded to a multiple of 8.
      kv: the pool, `[num_blocks + 1, 2, K, block_size, D']` with `D' >= D`, D a multiple of 64.
      tables: `i32[S, M]`.
      items: `i32[W, 4]`, see `decode_items`.
      scalars: `f32[2]`, see `logits_base2`.

    Returns:
      `f32[W, K, D, N]` and `f32[W, K, N]`: each item's output, normalised, and the base-2 logarithm of its softmax's
      denominator. Those of an empty item are not written.
    """
    _, num_kv_heads, columns, head_dim = q.shape
    num_items = items.shape[0]
    tokens, stages = tile.tokens, tile.stages
    pieces = tile.pieces(kv.shape[3])

    def kernel(q_ref, kv_ref, tables_ref, items_ref, scalars_ref, out_ref, lse_ref, *, scratch):
        (q_s, k_s, v_s, p_s, out_s, lse_s), (q_ready, k_ready, v_ready, k_free, v_free) = scratch
        item, head = lax.axis_index("item"), lax.axis_index("head")
        warpgroup = lax.axis_index("warpgroup")
        row, start, stop, length = (items_ref[item, i] for i in range(4))
        first_seen = jnp.int32(0) if window is None else jnp.maximum(length - window, 0)
        num_tiles = stop - start

        @pl.when((warpgroup == 0) & (num_tiles > 0))
        def consume():
            plgpu.copy_gmem_to_smem(q_ref.at[row, head], q_s, q_ready)
            scale, cap = scalars_ref[0], scalars_ref[1]
            plgpu.barrier_wait(q_ready)

            def step(i, carry):
                acc, m, total = carry
                slot = lax.rem(i, jnp.int32(stages))
                first = (start + i) * tokens  # the position of the tile's first token
                plgpu.barrier_wait(k_ready.at[slot])

                def keys_times_queries(acc_ref):
                    plgpu.wgmma(acc_ref, k_s.at[slot], q_s.T)
                    return acc_ref[...]

                probe(interpret, k_s.at[slot], q_s)
                s = pl.run_scoped(keys_times_queries, plgpu.ACC((tokens, columns), jnp.float32))
                plgpu.barrier_arrive(k_free.at[slot])
                s = logits_base2(s, scale, cap if soft_cap else None)
                position = plgpu.broadcasted_iota(jnp.int32, s.shape, 0, layout=LAYOUT) + first
                seen = position < length
                if window is not None:
                    seen &= position >= first_seen
                s = jnp.where(seen, s, -jnp.inf)
                m, old = jnp.maximum(m, s.max(axis=0)), m
                safe = safe_maximum(m)
                alpha = jnp.exp2(old - safe)
                p = jnp.exp2(s - lax.broadcast_in_dim(safe, s.shape, [1]))
                # Summed over the tile's tokens only at the end: a sum across warps in every step costs more.
                total = total * lax.broadcast_in_dim(alpha, total.shape, [1]) + p
                p_s.T[...] = p.astype(q.dtype)

                plgpu.barrier_wait(v_ready.at[slot])

                @pl.when((first < first_seen) | (first + tokens > length))
                def _():
                    select_seen_values(v_s.at[slot], first_seen - first, length - first)

                plgpu.commit_smem()
                probe(interpret, v_s.at[slot], p_s)
                acc = acc * lax.broadcast_in_dim(alpha, acc.shape, [1])
                acc = accumulate(interpret, acc, v_s.at[slot].T, p_s.T)
                plgpu.barrier_arrive(v_free.at[slot])
                return acc, m, total

            acc = full((head_dim, columns), 0.0, LAYOUT)
            m = full((columns,), -jnp.inf, LAYOUT.reduce(0))
            total = full((tokens, columns), 0.0, LAYOUT)
            acc, m, total = lax.fori_loop(0, num_tiles, step, (acc, m, total))
            total = total.sum(axis=0)
            total = jnp.where(total == 0.0, 1.0, total)
            out_s[...] = acc * lax.broadcast_in_dim(1.0 / total, acc.shape, [1])
            lse_s[...] = m + jnp.log2(total)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out_s, out_ref.at[item, head])
            plgpu.copy_smem_to_gmem(lse_s, lse_ref.at[item, head])
            plgpu.wait_smem_to_gmem(0)

        @pl.when((warpgroup == 1) & (num_tiles > 0))
        def produce():
            fetch(
                kv_ref, tables_ref, row, head, start, num_tiles, first_seen, length, tile,
                (k_s, v_s), (k_ready, v_ready), (k_free, v_free),
            )  # fmt: skip

    def paged_decode_split(*refs):  # the name that profiles and dumps show
        slots = plgpu.SMEM((stages, tokens, head_dim), q.dtype, transforms=OPERAND)
        buffers = (
            plgpu.SMEM((columns, head_dim), q.dtype, transforms=OPERAND), slots, slots,
            plgpu.SMEM((columns, tokens), q.dtype, transforms=OPERAND),
            plgpu.SMEM((head_dim, columns), jnp.float32), plgpu.SMEM((columns,), jnp.float32),
        )  # fmt: skip
        ready = plgpu.Barrier(num_arrivals=pieces, num_barriers=stages)
        free = plgpu.Barrier(num_barriers=stages)
        barriers = (plgpu.Barrier(), ready, ready, free, free)
        pl.run_scoped(lambda *scratch: kernel(*refs, scratch=scratch), buffers, barriers, collective_axes="warpgroup")

    return plgpu.kernel(
        paged_decode_split,
        out_type=(
            jax.ShapeDtypeStruct((num_items, num_kv_heads, head_dim, columns), jnp.float32),
            jax.ShapeDtypeStruct((num_items, num_kv_heads, columns), jnp.float32),
        ),
        grid=(num_items, num_kv_heads), grid_names=("item", "head"), num_threads=2, thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True), interpret=interpret,
    )(q, kv, tables, items, scalars)  # fmt: skip


def merge(out, lse, first_item, sinks, *, dtype, interpret: InterpretParams = None):
    """Combine the items of each row, and the sinks.

    Args:
      out, lse: what `split` returns.
      first_item: `i32[S + 1]`: row s has the items from `first_item[s]` up to `first_item[s + 1]`.
      sinks: `f32[K, N]`, one more logit in each softmax's denominator; -inf for none.

    Returns:
      `[S, K, N, D]` of `dtype`, and the natural logarithm of the denominators, `f32[S, K, N]`; 0 and -inf for a row
      without items, whatever its sinks.
    """
    _, num_kv_heads, head_dim, columns = out.shape
    num_rows = first_item.shape[0] - 1
    vector = LAYOUT.reduce(0)
    part = 64  # of the head_dim, in one thread block
    # Items loaded at once: one by one, each would cost the memory's whole latency. More where rows are few, and so cut
    # into many, while thread blocks that each need many registers still fit on the chip all at once.
    ahead = (128 if num_rows * num_kv_heads <= 64 else 64) // columns

    def paged_decode_merge(out_ref, lse_ref, first_ref, sinks_ref, merged_ref, merged_lse_ref, merged_s, merged_lse_s):
        row, head, d = (lax.axis_index(name) for name in ("row", "head", "part"))
        first, stop = first_ref[row], first_ref[row + 1]

        def combine(carry, x, x_lse):
            acc, m, total = carry
            m, old = jnp.maximum(m, x_lse), m
            safe = safe_maximum(m)
            alpha, weight = jnp.exp2(old - safe), jnp.exp2(x_lse - safe)
            acc = acc * lax.broadcast_in_dim(alpha, acc.shape, [1])
            return acc + x * lax.broadcast_in_dim(weight, acc.shape, [1]), m, total * alpha + weight

        def step(i, carry):
            items = [first + i * ahead + j for j in range(ahead)]
            loaded = []
            for item in items:
                at = jnp.minimum(item, stop - 1)
                x = plgpu.load(out_ref.at[at, head, pl.ds(d * part, part)], layout=LAYOUT, optimized=False)
                x_lse = plgpu.load(lse_ref.at[at, head], layout=vector, optimized=False)
                # Past the row's last item, it is loaded again, and weighs nothing.
                loaded.append((x, x_lse + jnp.where(item < stop, 0.0, -jnp.inf)))
            for x, x_lse in loaded:
                carry = combine(carry, x, x_lse)
            return carry

        carry = full((part, columns), 0.0, LAYOUT), full((columns,), -jnp.inf, vector), full((columns,), 0.0, vector)
        acc, m, total = lax.fori_loop(0, lax.div(stop - first + (ahead - 1), jnp.int32(ahead)), step, carry)
        sink = plgpu.load(sinks_ref.at[head], layout=vector, optimized=False) * math.log2(math.e)
        sink += jnp.where(stop > first, 0.0, -jnp.inf)  # a row that sees nothing has no sink either
        acc, m, total = combine((acc, m, total), jnp.zeros_like(acc), sink)
        total = jnp.where(total == 0.0, 1.0, total)
        merged_s.T[...] = (acc * lax.broadcast_in_dim(1.0 / total, acc.shape, [1])).astype(dtype)
        merged_lse_s[...] = (m + jnp.log2(total)) * math.log(2)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(merged_s, merged_ref.at[row, head, :, pl.ds(d * part, part)])

        @pl.when(d == 0)
        def _():
            plgpu.copy_smem_to_gmem(merged_lse_s, merged_lse_ref.at[row, head])

        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        paged_decode_merge,
        out_type=(
            jax.ShapeDtypeStruct((num_rows, num_kv_heads, columns, head_dim), dtype),
            jax.ShapeDtypeStruct((num_rows, num_kv_heads, columns), jnp.float32),
        ),
        grid=(num_rows, num_kv_heads, head_dim // part), grid_names=("row", "head", "part"),
        scratch_types=[plgpu.SMEM((columns, part), dtype, transforms=OPERAND), plgpu.SMEM((columns,), jnp.float32)],
        compiler_params=plgpu.CompilerParams(approx_math=True), interpret=interpret,
    )(out, lse, first_item, sinks)  # fmt: skip
