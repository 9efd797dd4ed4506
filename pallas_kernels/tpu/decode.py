"""One new token per row: attention over the row's blocks, with the token's own keys and values written on the way.

Rows are the grid. Each step brings pages for up to 1024 tokens of one row while the step before is worked on, and on
across rows, so that the copies never stop. All heads share one softmax: its logits are `[H, tokens]`, dense registers.
The write changes one register tile of rows in the page that has come anyway, and sends that tile back.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu.pages import LANES, MASKED, VMEM_BYTES, Pages, divide, sublanes

STEP_TOKENS = 1024
_CONTRACT_MINOR = (((1,), (1,)), ((), ()))
_CONTRACT_INNER = (((1,), (0,)), ((), ()))


def decode(
    q, kv, tables, limits, *, new_kv=None, targets=None, scale, soft_cap=None, window=None, sinks=None,
    return_lse=False, interpret=False, step_tokens=STEP_TOKENS,
):  # fmt: skip
    """Attention of one token per row, the last of the row's `limits` tokens.

    Args:
      q: `[S, H, D']`, padded to the pool's head_dim.
      kv: the pool, `[num_blocks + 1, 2, K, block_size, D']`.
      tables: `i32[S, M]`, in range.
      limits: `i32[S]`, tokens of each row; 0 for rows to skip.
      new_kv: `[S, 2, K, D']`, what to write at position `limits - 1` first, in the pool's dtype.
      targets: `i32[S]`, the block to write it to; -1: nowhere.
      scale, soft_cap, window, sinks: as for `pallas_kernels.paged_attention`; `scale` has no default.
      interpret: run on the CPU, `pltpu.InterpretParams()`.

    Returns:
      `(out [S, H, D'], lse f32[S, H] or None, kv)`; the pool in the same memory when it was donated.
    """
    rows, heads, head_dim = q.shape
    num_kv_heads = kv.shape[2]
    fused = new_kv is not None
    pages = Pages.plan(kv, tables, window, step_tokens)
    ids = jnp.where(limits > 0, jnp.arange(rows, dtype=jnp.int32), rows)
    successors = lax.cummin(jnp.append(ids, jnp.int32(rows)), reverse=True)  # at 0 the first row with tokens
    knobs = jnp.stack([jnp.asarray(x, jnp.float32) for x in (scale, 1.0 if soft_cap is None else soft_cap)])
    scalars = (limits, successors, limits if targets is None else targets, tables.reshape(-1), knobs)

    def per_row(*shape):
        return pl.BlockSpec((1, *shape), lambda row, *_: (row, *(0 for _ in shape)))

    pool = pl.BlockSpec(memory_space=pltpu.HBM)
    inputs = [(q, per_row(heads, head_dim))]
    outputs = [(jax.ShapeDtypeStruct(q.shape, q.dtype), per_row(heads, head_dim))]
    scratch = [
        pltpu.VMEM((2, pages.pages_per_step, 2, num_kv_heads, pages.page_size, head_dim), kv.dtype),
        pltpu.SemaphoreType.DMA((2,)),
        pltpu.SMEM((1,), jnp.int32),
        pltpu.VMEM((heads, LANES), jnp.float32),
        pltpu.VMEM((heads, LANES), jnp.float32),
        pltpu.VMEM((heads, head_dim), jnp.float32),
    ]
    if sinks is not None:
        sinks = jnp.broadcast_to(sinks.astype(jnp.float32)[:, None], (heads, LANES))
        inputs.append((sinks, pl.BlockSpec((heads, LANES), lambda row, *_: (0, 0))))
    if return_lse:
        outputs.append((jax.ShapeDtypeStruct((rows, heads, LANES), jnp.float32), per_row(heads, LANES)))
    aliases = {}
    if fused:
        inputs.append((new_kv, per_row(*new_kv.shape[1:])))
        aliases = {len(scalars) + len(inputs): len(outputs)}
        outputs.append((jax.ShapeDtypeStruct(kv.shape, kv.dtype), pool))
        tile = (2, num_kv_heads, sublanes(kv.dtype), head_dim)
        scratch += [pltpu.VMEM(tile, kv.dtype), pltpu.SemaphoreType.DMA(())]
    inputs.append((kv, pool))

    arrays, in_specs = zip(*inputs, strict=True)
    out_shape, out_specs = zip(*outputs, strict=True)
    context = rows * tables.shape[1] * pages.block_size
    results = pl.pallas_call(
        functools.partial(
            _kernel, pages=pages, soft_cap=soft_cap is not None, sinks=sinks is not None, lse=return_lse, fused=fused
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(rows,),
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=scratch,
        ),
        out_shape=out_shape,
        input_output_aliases=aliases,
        cost_estimate=pl.CostEstimate(
            flops=4 * context * heads * head_dim,
            transcendentals=context * heads,
            bytes_accessed=2 * context * num_kv_heads * head_dim * kv.dtype.itemsize,
        ),
        # Every block id was clamped by the caller, and the interpreter's tests have every wait with its start.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            disable_bounds_checks=True,
            disable_semaphore_checks=True,
            vmem_limit_bytes=VMEM_BYTES,
        ),
        interpret=interpret,
        name="paged_decode",
    )(*scalars, *arrays)
    return results[0], results[1][..., 0] if return_lse else None, results[-1] if fused else kv


def _kernel(limits, successors, targets, tables, knobs, q_ref, *refs, pages, soft_cap, sinks, lse, fused):
    given: Any = list(refs)
    sinks_ref: Any = given.pop(0) if sinks else None
    new_ref: Any = given.pop(0) if fused else None
    kv_hbm = given.pop(0)
    out_ref = given.pop(0)
    lse_ref: Any = given.pop(0) if lse else None
    if fused:
        kv_hbm = given.pop(0)  # the output is the input's memory
    buffers, arrived, next_slot, max_ref, sum_ref, out_sum_ref, *write = given

    row, rows = pl.program_id(0), pl.num_programs(0)
    limit = limits[row]
    position = limit - 1

    def copies(do, row, step, slot):
        limit = limits[row]
        pages.copies(do, kv_hbm, buffers.at[slot], arrived.at[slot], tables, row, limit - 1, limit, step)

    def write_back():
        staged, semaphore = write
        return _write_back(staged, semaphore, kv_hbm, targets[row], position, pages)

    @pl.when(row == 0)
    def _():
        next_slot[0] = 0

        @pl.when(successors[0] < rows)
        def _():
            copies("start", successors[0], 0, 0)

    @pl.when(limit == 0)
    def _():
        out_ref[...] = jnp.zeros_like(out_ref)
        if lse:
            lse_ref[...] = jnp.full_like(lse_ref, -jnp.inf)

    @pl.when(limit > 0)
    def _():
        max_ref[...] = sinks_ref[...] if sinks else jnp.full_like(max_ref, MASKED)
        sum_ref[...] = jnp.ones_like(sum_ref) if sinks else jnp.zeros_like(sum_ref)
        out_sum_ref[...] = jnp.zeros_like(out_sum_ref)
        steps = pages.steps(position, limit)

        def step(i, slot):
            last = i + 1 == steps
            next_row = jnp.where(last, successors[row + 1], row)

            @pl.when(next_row < rows)
            def _():
                copies("start", next_row, jnp.where(last, 0, i + 1), 1 - slot)

            copies("wait", row, i, slot)
            writes = last & (targets[row] >= 0)
            start = (pages.first(position) + i * pages.pages_per_step) * pages.page_size
            if fused:

                @pl.when(writes)
                def _():
                    _insert(new_ref, buffers.at[slot], position - start, pages, staged=write[0])
                    write_back().start()

            pages.hide_values(buffers.at[slot], position, limit, i, steps)
            _attend(q_ref, buffers.at[slot], start, limit, knobs, soft_cap, pages, max_ref, sum_ref, out_sum_ref)
            if fused:

                @pl.when(writes)
                def _():
                    write_back().wait()

            return 1 - slot

        next_slot[0] = lax.fori_loop(0, steps, step, next_slot[0])
        out_ref[0] = (out_sum_ref[...] / sum_ref[:, :1]).astype(out_ref.dtype)
        if lse:
            lse_ref[0] = max_ref[...] + jnp.log(sum_ref[...])


def _attend(q_ref, buffer, start, limit, knobs, soft_cap, pages, max_ref, sum_ref, out_sum_ref):
    """One step of the online softmax: the keys at positions `start` to `start + step_tokens`, all heads."""
    q = q_ref[0]
    num_kv_heads, head_dim = buffer.shape[2], buffer.shape[-1]
    group = q.shape[0] // num_kv_heads
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    matmul = functools.partial(lax.dot_general, precision=precision, preferred_element_type=jnp.float32)

    def per_head(x, which, contract):  # the K products, one below the other
        dense = (buffer[:, which, head].reshape(pages.step_tokens, head_dim) for head in range(num_kv_heads))
        mine = (x[head * group : (head + 1) * group] for head in range(num_kv_heads))
        return jnp.concatenate([matmul(a, b, contract) for a, b in zip(mine, dense, strict=True)])

    logits = per_head(q, 0, _CONTRACT_MINOR) * knobs[0]
    if soft_cap:
        logits = knobs[1] * jnp.tanh(logits / knobs[1])
    position = start + lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    seen = position < limit
    if pages.window is not None:
        seen &= position >= limit - pages.window
    logits = jnp.where(seen, logits, MASKED)

    before = max_ref[...]
    now = jnp.maximum(before, jnp.max(logits, axis=1, keepdims=True))
    weights = jnp.exp(logits - now[:, :1])
    shrink = jnp.exp(before - now)
    max_ref[...] = now
    sum_ref[...] = shrink * sum_ref[...] + jnp.sum(weights, axis=1, keepdims=True)
    out_sum_ref[...] = shrink[:, :1] * out_sum_ref[...] + per_head(weights.astype(q.dtype), 1, _CONTRACT_INNER)


def _insert(new_ref, buffer, offset, pages, staged):
    """Put the new token at `offset` of a step's pages, and the register tile it lies in into `staged` as well."""
    tile = staged.shape[2]
    page = divide(offset, pages.page_size)
    inside = offset - page * pages.page_size
    top = pl.multiple_of(divide(inside, tile) * tile, tile)
    there = (page, slice(None), slice(None), pl.ds(top, tile))
    old = buffer[there].astype(jnp.float32)  # selects and broadcasts want 32 bits
    is_new = lax.broadcasted_iota(jnp.int32, old.shape, 2) == inside - top
    merged = jnp.where(is_new, new_ref[0].astype(jnp.float32)[:, :, None, :], old).astype(buffer.dtype)
    staged[...] = merged  # a copy of its own, for the buffer changes again while the write is under way
    buffer[there] = merged


def _write_back(staged, semaphore, kv_hbm, block, position, pages):
    tile = staged.shape[2]
    inside = position - divide(position, pages.block_size) * pages.block_size
    top = pl.multiple_of(divide(inside, tile) * tile, tile)
    return pltpu.make_async_copy(staged, kv_hbm.at[block, :, :, pl.ds(top, tile)], semaphore)
