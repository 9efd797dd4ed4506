"""One new token per row: attention over the row's blocks, with the token's own keys and values written on the way.

A row's keys are cut into segments of 128 tokens. A step of the work takes eight of them, one row's or several rows', in
order; the next step's pages come meanwhile, so that the copies never stop. Short rows therefore cost what their
pages do. All heads share one softmax: its logits are `[H, tokens]`, dense registers. The write changes one register
tile of rows in the page that has come anyway, and sends that tile back.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu.pages import LANES, MASKED, PAGE_BUFFER_BYTES, VMEM_BYTES, Pages, divide, sublanes

SEGMENT_TOKENS = 128
SEGMENTS = 8
BLOCK_ROWS = 64  # at most, a power of two: rows whose queries and output are in vector memory together
BLOCK_BYTES = 2 * 2**20  # of them; they are buffered twice
_CONTRACT_MINOR = (((1,), (1,)), ((), ()))
_CONTRACT_INNER = (((1,), (0,)), ((), ()))


def decode(
    q, kv, tables, limits, *, new_kv=None, targets=None, scale, soft_cap=None, window=None, sinks=None,
    return_lse=False, interpret=False, step_tokens=SEGMENT_TOKENS,
):  # fmt: skip
    """Attention of one token per row, the last of the row's `limits` tokens.

    Args:
      q: `[S, H, D']`, padded to the pool's head_dim.
      kv: the pool, `[num_blocks + 1, 2, K, block_size, D']`.
      tables: `i32[S, M]`, in range.
      limits: `i32[S]`, tokens of each row; 0 for rows to skip.
      new_kv: `[S, 2, K, D']`, what to write at position `limits - 1` first, in the pool's dtype.
      targets: `i32[S]`, the block to write it to; 0: nowhere.
      scale, soft_cap, window, sinks: as for `pallas_kernels.paged_attention`; `scale` has no default.
      interpret: run on the CPU, `pltpu.InterpretParams()`.

    Returns:
      `(out [S, H, D'], lse f32[S, H] or None, kv)`; the pool in the same memory when it was donated.
    """
    rows, heads, head_dim = q.shape
    num_kv_heads = kv.shape[2]
    fused = new_kv is not None
    pages = Pages.plan(kv, tables, window, step_tokens)
    segments = segments_per_step(kv, rows, pages)
    block = block_rows(rows, heads, num_kv_heads, head_dim, q.dtype.itemsize)
    blocks = -(-rows // block)
    limits = jnp.pad(limits, (0, blocks * block - rows))
    targets = limits if targets is None else jnp.pad(targets, (0, blocks * block - rows))
    parts = pages.steps(limits - 1, limits).reshape(blocks, block)
    steps = -(-jnp.sum(parts, axis=1, dtype=jnp.int32) // segments)
    ids = jnp.where(limits > 0, jnp.arange(limits.size, dtype=jnp.int32), limits.size)
    successors = lax.cummin(jnp.append(ids, jnp.int32(limits.size)), reverse=True)  # at 0 the first row with tokens
    knobs = jnp.stack([jnp.asarray(x, jnp.float32) for x in (scale, 1.0 if soft_cap is None else soft_cap)])
    scalars = (limits, successors, targets, steps, tables.reshape(-1), knobs)

    def per_block(*shape):
        return pl.BlockSpec((block, *shape), lambda block, *_: (block, *(0 for _ in shape)))

    pool = pl.BlockSpec(memory_space=pltpu.HBM)
    inputs = [(q, per_block(heads, head_dim))]
    outputs = [(jax.ShapeDtypeStruct(q.shape, q.dtype), per_block(heads, head_dim))]
    scratch = [
        pltpu.VMEM((2, segments * pages.pages_per_step, 2, num_kv_heads, pages.page_size, head_dim), kv.dtype),
        pltpu.SemaphoreType.DMA((2,)),
        pltpu.SMEM((6,), jnp.int32),
        pltpu.VMEM((heads, LANES), jnp.float32),
        pltpu.VMEM((heads, LANES), jnp.float32),
        pltpu.VMEM((heads, head_dim), jnp.float32),
    ]
    if sinks is not None:
        sinks = jnp.broadcast_to(sinks.astype(jnp.float32)[:, None], (heads, LANES))
        inputs.append((sinks, pl.BlockSpec((heads, LANES), lambda row, *_: (0, 0))))
    if return_lse:
        outputs.append((jax.ShapeDtypeStruct((rows, heads, LANES), jnp.float32), per_block(heads, LANES)))
    aliases = {}
    if fused:
        inputs.append((new_kv, per_block(*new_kv.shape[1:])))
        aliases = {len(scalars) + len(inputs): len(outputs)}
        outputs.append((jax.ShapeDtypeStruct(kv.shape, kv.dtype), pool))
        tile = (segments, 2, num_kv_heads, sublanes(kv.dtype), head_dim)
        scratch += [pltpu.VMEM(tile, kv.dtype), pltpu.SemaphoreType.DMA((segments,))]
    inputs.append((kv, pool))

    arrays, in_specs = zip(*inputs, strict=True)
    out_shape, out_specs = zip(*outputs, strict=True)
    context = rows * tables.shape[1] * pages.block_size
    results = pl.pallas_call(
        functools.partial(
            _kernel, pages=pages, segments=segments, soft_cap=soft_cap is not None, sinks=sinks is not None,
            lse=return_lse, fused=fused,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(blocks,),
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
    )(*scalars, *arrays)  # fmt: skip
    return results[0], results[1][..., 0] if return_lse else None, results[-1] if fused else kv


def segments_per_step(kv, rows: int, pages: Pages) -> int:
    """As many as vector memory has room for twice, and no more than there can be."""
    _, _, num_kv_heads, _, head_dim = kv.shape
    segment_bytes = 2 * num_kv_heads * head_dim * kv.dtype.itemsize * pages.step_tokens
    most = rows * -(-pages.blocks_per_row * pages.block_size // pages.step_tokens)
    return max(1, min(SEGMENTS, PAGE_BUFFER_BYTES // (2 * segment_bytes), most))


def block_rows(rows: int, heads: int, num_kv_heads: int, head_dim: int, itemsize: int) -> int:
    """Rows of a grid step: all, or a power of two."""
    row_bytes = 2 * (heads + num_kv_heads) * head_dim * itemsize + heads * LANES * 4
    most = max(1, min(BLOCK_ROWS, BLOCK_BYTES // row_bytes))
    return rows if rows <= most else 1 << (most.bit_length() - 1)


def _kernel(
    limits, successors, targets, counts, tables, knobs, q_ref, *refs, pages, segments, soft_cap, sinks, lse, fused
):  # fmt: skip
    given: Any = list(refs)
    sinks_ref: Any = given.pop(0) if sinks else None
    new_ref: Any = given.pop(0) if fused else None
    kv_hbm = given.pop(0)
    out_ref = given.pop(0)
    lse_ref: Any = given.pop(0) if lse else None
    if fused:
        kv_hbm = given.pop(0)  # the output is the input's memory
    buffers, arrived, state, max_ref, sum_ref, out_sum_ref, *write = given

    block, blocks = pl.program_id(0), pl.num_programs(0)
    block_rows = q_ref.shape[0]
    rows = blocks * block_rows

    def end_of_block(row):
        """One past the last row of a row's block: a step holds segments of one block only."""
        if block_rows & (block_rows - 1):  # then there is but one
            return rows
        return jnp.minimum((divide(row, block_rows) + 1) * block_rows, rows)

    def parts(row):
        return pages.steps(limits[row] - 1, limits[row])

    def after(row, part):
        last = part + 1 == parts(row)
        return jnp.where(last, successors[row + 1], row), jnp.where(last, 0, part + 1)

    def buffer(slot, segment):
        return buffers.at[slot, pl.ds(segment * pages.pages_per_step, pages.pages_per_step)]

    def segment_after(row, part, end):
        """Where the next segment of the step that ends before row `end` begins: here, once there is none."""
        there = row < end
        moved = after(jnp.where(there, row, 0), part)
        return tuple(jnp.where(there, new, old) for new, old in zip(moved, (row, part), strict=True))

    def each_segment(row, part, do):
        end = end_of_block(row)

        def body(segment, at):
            pl.when(at[0] < end)(lambda: do(segment, *at))
            return segment_after(*at, end)

        lax.fori_loop(0, segments, body, (row, part))

    def start(row, part, slot):
        """Start the copies of the step that begins there. Returns where the next begins, and how many pages come."""
        end = end_of_block(row)

        def body(segment, at):
            row, part, count = at
            safe = jnp.where(row < end, row, 0)
            limit = limits[safe]

            @pl.when(row < end)
            def _():
                pages.copies(
                    "start", kv_hbm, buffer(slot, segment), arrived.at[slot], tables, row, limit - 1, limit, part
                )

            held = jnp.minimum(pages.held(limit - 1, limit, part), pages.pages_per_step)
            return *segment_after(row, part, end), count + jnp.where(row < end, held, 0)

        return lax.fori_loop(0, segments, body, (row, part, jnp.int32(0)))

    def await_pages(slot, count):
        these = buffers.at[slot, pl.ds(0, count)]  # as many as are coming, wherever they lie
        pl.when(count > 0)(lambda: pltpu.make_async_copy(these, these, arrived.at[slot]).wait())

    def write_back(segment, row):
        staged, semaphore = write
        return _write_back(staged.at[segment], semaphore.at[segment], kv_hbm, targets[row], limits[row] - 1, pages)

    def writes(row, part):
        return (part + 1 == parts(row)) & (targets[row] > 0)

    @pl.when(block == 0)
    def _():
        first = successors[0], jnp.int32(0)
        for i, x in enumerate((*first, *start(*first, 0), 0)):
            state[i] = x

    out_ref[...] = jnp.zeros_like(out_ref)
    if lse:
        lse_ref[...] = jnp.full_like(lse_ref, -jnp.inf)

    def step(_, at):
        row, part, next_row, next_part, count, slot = at
        beyond = start(next_row, next_part, 1 - slot)
        await_pages(slot, count)

        def prepare(segment, row, part):
            limit, here = limits[row], buffer(slot, segment)
            if fused:

                @pl.when(writes(row, part))
                def _():
                    begin = (pages.first(limit - 1) + part * pages.pages_per_step) * pages.page_size
                    _insert(new_ref.at[row - block * block_rows], here, limit - 1 - begin, pages, write[0].at[segment])
                    write_back(segment, row).start()

            pages.hide_values(here, limit - 1, limit, part, parts(row))

        each_segment(row, part, prepare)
        end, shown = end_of_block(row), row
        work, at = [], (row, part)
        for segment in range(segments):
            there = at[0] < end
            shown = jnp.where(there, at[0], shown)  # a step's row, again where there is none
            work.append((there, shown, at[1], limits[shown], buffer(slot, segment)))
            at = segment_after(*at, end)
        _attend(
            work, q_ref, block * block_rows, knobs, soft_cap, pages, sinks_ref, out_ref, lse_ref, max_ref, sum_ref,
            out_sum_ref,
        )  # fmt: skip
        if fused:
            each_segment(
                row,
                part,
                lambda segment, row, part: pl.when(writes(row, part))(lambda: write_back(segment, row).wait()),
            )
        return next_row, next_part, *beyond, 1 - slot

    at = lax.fori_loop(0, counts[block], step, tuple(state[i] for i in range(6)))
    for i in range(6):
        state[i] = at[i]


def _attend(work, q_ref, first_row, knobs, soft_cap, pages, sinks_ref, out_ref, lse_ref, max_ref, sum_ref, out_sum_ref):
    """One step: each segment's softmax by itself, all heads at once, so that one's products run beside another's
    exponentials; then they are put together, row by row. There is no branch in it, for none may part them."""
    _, heads, head_dim = q_ref.shape
    precision = lax.Precision.HIGHEST if q_ref.dtype == jnp.float32 else None
    matmul = functools.partial(lax.dot_general, precision=precision, preferred_element_type=jnp.float32)
    before = max_ref[...], sum_ref[...], out_sum_ref[...]
    nothing = (
        jnp.full_like(max_ref, MASKED) if sinks_ref is None else sinks_ref[...],
        jnp.zeros_like(sum_ref) if sinks_ref is None else jnp.ones_like(sum_ref),
        jnp.zeros_like(out_sum_ref),
    )
    for there, row, part, limit, buffer in work:
        _, _, num_kv_heads, _, _ = buffer.shape
        group = heads // num_kv_heads
        q = q_ref[row - first_row]

        def per_head(x, which, contract, buffer=buffer, num_kv_heads=num_kv_heads, group=group):
            dense = (buffer[:, which, head].reshape(pages.step_tokens, head_dim) for head in range(num_kv_heads))
            mine = (x[head * group : (head + 1) * group] for head in range(num_kv_heads))
            return jnp.concatenate([matmul(a, b, contract) for a, b in zip(mine, dense, strict=True)])

        logits = per_head(q, 0, _CONTRACT_MINOR) * knobs[0]
        if soft_cap:
            logits = knobs[1] * jnp.tanh(logits / knobs[1])
        start = (pages.first(limit - 1) + part * pages.pages_per_step) * pages.page_size
        position = start + lax.broadcasted_iota(jnp.int32, logits.shape, 1)
        seen = position < limit
        if pages.window is not None:
            seen &= position >= limit - pages.window
        logits = jnp.where(seen, logits, MASKED)
        its_max = jnp.broadcast_to(jnp.max(logits, axis=1, keepdims=True), max_ref.shape)
        weights = jnp.exp(logits - its_max[:, :1])
        its_sum = jnp.sum(weights, axis=1, keepdims=True)
        its_out = per_head(weights.astype(q.dtype), 1, _CONTRACT_INNER)

        begins = there & (part == 0)
        so_far = [lax.select(begins, new, old) for new, old in zip(nothing, before, strict=True)]
        now = jnp.maximum(so_far[0], its_max)
        shrink, mine = jnp.exp(so_far[0] - now), jnp.exp(its_max - now)
        after = (
            now,
            shrink * so_far[1] + mine * its_sum,
            shrink[:, :1] * so_far[2] + mine[:, :1] * its_out,
        )
        before = tuple(lax.select(there, new, old) for new, old in zip(after, before, strict=True))
        out_ref[row - first_row] = (before[2] / before[1][:, :1]).astype(out_ref.dtype)  # the row's last one stays
        if lse_ref is not None:
            lse_ref[row - first_row] = before[0] + jnp.log(before[1])
    max_ref[...], sum_ref[...], out_sum_ref[...] = before


def _insert(new_ref, buffer, offset, pages, staged):
    """Put the new token at `offset` of a step's pages, and the register tile it lies in into `staged` as well."""
    tile = staged.shape[2]
    page = divide(offset, pages.page_size)
    inside = offset - page * pages.page_size
    top = pl.multiple_of(divide(inside, tile) * tile, tile)
    there = (page, slice(None), slice(None), pl.ds(top, tile))
    old = buffer[there].astype(jnp.float32)  # selects and broadcasts want 32 bits
    is_new = lax.broadcasted_iota(jnp.int32, old.shape, 2) == inside - top
    merged = jnp.where(is_new, new_ref[...].astype(jnp.float32)[:, :, None, :], old).astype(buffer.dtype)
    staged[...] = merged  # a copy of its own, for the buffer changes again while the write is under way
    buffer[there] = merged


def _write_back(staged, semaphore, kv_hbm, block, position, pages):
    tile = staged.shape[2]
    inside = position - divide(position, pages.block_size) * pages.block_size
    top = pl.multiple_of(divide(inside, tile) * tile, tile)
    return pltpu.make_async_copy(staged, kv_hbm.at[block, :, :, pl.ds(top, tile)], semaphore)
