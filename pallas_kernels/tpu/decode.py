"""One new token per row: attention over the row's blocks, with the token's own keys and values written on the way.

A row's keys are cut into segments of 128 tokens. A step of the work takes eight of them, one row's or several rows', in
order; the next steps' pages come meanwhile, so that the copies never stop. Short rows therefore cost what their
pages do. All heads share one softmax: its logits are `[H, tokens]`, dense registers. The write changes one register
tile of rows in the page that has come anyway, and sends that tile back.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.common.batch import SoftmaxOptions, StoredKV
from pallas_kernels.common.masks import ALL
from pallas_kernels.tpu import nibbles
from pallas_kernels.tpu.pages import (
    LANES,
    MASKED,
    SPILL_BYTES,
    Pages,
    await_pages,
    compiler_params,
    divide,
    keep_in_hbm,
    output,
    sublanes,
    vector_bytes,
)
from pallas_kernels.tpu.quantize import (
    quantize,
    queries_by_scale,
    read_scales,
    scales_along_lanes,
    scales_as_given,
    widen,
)

SEGMENT_TOKENS = 128
ONE_HEAD_TOKENS = 256  # a segment of one KV head is little work beside what every segment costs
SEGMENTS = 8
SLOTS = 4  # steps whose pages have room: a step's copies start while one is worked on and two more still come
SLOT_BYTES = 24 * 2**20 // SLOTS  # of vector memory
# Of latent rows, which all heads share: a segment's sums are wide and many, so they are put together less often.
LATENT_TOKENS, LATENT_SEGMENTS = 1024, 4
AHEAD = 6  # so many segments' products with their keys are under way before the first's with its values
BLOCK_ROWS = 64  # at most, a power of two: rows whose queries and output are in vector memory together
BLOCK_BYTES = 4 * 2**20  # of them; they are buffered twice
STATE = 3 * SLOTS + 1  # scalars that go from one grid step to the next
_CONTRACT_MINOR = (((1,), (1,)), ((), ()))
_CONTRACT_INNER = (((1,), (0,)), ((), ()))


class DecodeScalars(NamedTuple):
    """The work of all blocks of rows: arrays, and references to them in scalar memory."""

    limits: Any  # i32[rows]: tokens of each row
    successors: Any  # i32[rows + 1]: before the first row and behind each, the next that has any tokens
    targets: Any  # i32[rows]: the block that the new token is written to, or 0
    counts: Any  # i32[blocks]: steps
    tables: Any  # i32[S * M]
    knobs: Any  # f32[2]: the scale, and the soft cap


class DecodeInputs(NamedTuple):
    """What comes for a block of rows, and the pool, which stays in HBM; None: it is not there."""

    q: Any
    sinks: Any  # [H, LANES]
    new_kv: Any
    pool: Any  # one or two: the numbers, and their scales


class DecodeOutputs(NamedTuple):
    """What goes for a block of rows, and the pool if it is written to, in the memory that it came in."""

    out: Any
    lse: Any  # [rows, H, LANES]
    pool: Any


class DecodeScratch(NamedTuple):
    """What the kernel keeps in vector memory, and its semaphores. Pairs are memory and the semaphore of its copies."""

    buffers: Any  # a pair for each array of the pool: pages of `SLOTS` steps
    state: Any  # i32[STATE] in scalar memory
    softmax: Any  # `Softmax`
    writes: Any  # a pair for each array of the pool: the register tiles that go back
    encoded: Any  # of a quantized pool the new tokens' numbers and scales, as they are stored


def decode(
    q,
    stored: StoredKV,
    tables,
    limits,
    options: SoftmaxOptions,
    *,
    window_mask=ALL,
    new_kv=None,
    targets=None,
    residual_length=0,
    interpret=False,
    step_tokens=None,
):
    """Attention of one token per row, the last of the row's `limits` tokens.

    Args:
      q: `[S, H, D']`, padded to the pool's head_dim; for four bits `[S, H G, D']`, see `nibbles.spread_queries`.
      stored: the pool; its scales are of float32.
      tables: `i32[S, M]`, in range.
      limits: `i32[S]`, tokens of each row; 0 for rows to skip.
      options: with a scale. If deterministic, tables of all widths are cut into the same segments, and those of a row
        are put together in order in any case.
      window_mask: how far back the token sees.
      new_kv: `[S, 2, K, D']`, what to write at position `limits - 1` first, in the pool's dtype; for a quantized pool
        as it came. For four bits keys and values are apart.
      targets: `i32[S]`, the block to write it to; 0: nowhere.
      residual_length: how many of the row's newest tokens the token does not see, as if it stood before them.
      interpret: run on the CPU, `pltpu.InterpretParams()`.

    Returns:
      `(out [S, H, D'], lse f32[S, H] or None, the pool)`; the pool in the same memory when it was donated. Of latent
      rows out is no wider than their rank needs.
    """
    kv, rank, deterministic, return_lse = stored.kv, stored.latent_rank, options.deterministic, options.return_lse
    soft_cap, sinks = options.soft_cap, options.sinks
    rows, heads, head_dim = q.shape
    _, stored_parts, num_kv_heads, *_ = kv.shape
    value_dim = head_dim if rank is None else -(-rank // LANES) * LANES
    kv_scale = scales_along_lanes(stored)
    fused, scaled = new_kv is not None, kv_scale is not None
    groups = nibbles.count_groups(stored)
    query_rows, heads = heads, heads // groups
    pages = Pages.plan(kv, tables, window_mask, step_tokens or segment_tokens(kv), deterministic)
    segments = segments_per_step(kv, rows, pages)
    block = block_rows(rows, query_rows, num_kv_heads, head_dim, q.dtype.itemsize)
    need = decode_bytes(rows, heads, kv, tables, q.dtype, step_tokens, deterministic, groups)
    blocks = -(-rows // block)
    limits = jnp.pad(limits, (0, blocks * block - rows))
    targets = limits if targets is None else jnp.pad(targets, (0, blocks * block - rows))
    parts = pages.steps(limits - 1 - residual_length, limits).reshape(blocks, block)
    steps = -(-jnp.sum(parts, axis=1, dtype=jnp.int32) // segments)
    ids = jnp.where(limits > 0, jnp.arange(limits.size, dtype=jnp.int32), limits.size)
    successors = lax.cummin(jnp.append(ids, jnp.int32(limits.size)), reverse=True)  # at 0 the first row with tokens
    knobs = jnp.stack([jnp.asarray(x, jnp.float32) for x in (options.scale, 1.0 if soft_cap is None else soft_cap)])
    scalars = DecodeScalars(limits, successors, targets, steps, tables.reshape(-1), knobs)

    def per_block(*shape):
        return pl.BlockSpec((block, *shape), lambda block, *_: (block, *(0 for _ in shape)))

    pools = [kv, kv_scale] if scaled else [kv]
    pool_specs = [pl.BlockSpec(memory_space=pltpu.HBM)] * len(pools)
    inputs = DecodeInputs(q, None, new_kv, [keep_in_hbm(x, interpret) for x in pools])
    in_specs = DecodeInputs(per_block(query_rows, head_dim), None, None, pool_specs)
    outputs = DecodeOutputs(output((rows, heads, value_dim), q.dtype, q, kv), None, None)
    out_specs = DecodeOutputs(per_block(heads, value_dim), None, None)
    statistics = pltpu.VMEM((heads, LANES), jnp.float32)
    scratch = DecodeScratch(
        page_buffers(kv, kv_scale, segments * pages.pages_per_step, pages.page_size, SLOTS),
        pltpu.SMEM((STATE,), jnp.int32),
        Softmax(statistics, statistics, pltpu.VMEM((heads, value_dim), jnp.float32)),
        None,
        None,
    )
    aliases = {}
    if sinks is not None:
        sinks = jnp.broadcast_to(sinks.astype(jnp.float32)[:, None], (heads, LANES))
        inputs = inputs._replace(sinks=sinks)
        in_specs = in_specs._replace(sinks=pl.BlockSpec((heads, LANES), lambda row, *_: (0, 0)))
    if return_lse:
        outputs = outputs._replace(lse=output((rows, heads, LANES), jnp.float32, q, kv))
        out_specs = out_specs._replace(lse=per_block(heads, LANES))
    if fused:
        in_specs = in_specs._replace(new_kv=per_block(*new_kv.shape[1:]))
        outputs = outputs._replace(pool=[output(x.shape, x.dtype, x, new_kv) for x in pools])
        out_specs = out_specs._replace(pool=pool_specs)
        # The pool is last of what comes and of what goes.
        ends = [len(jax.tree.leaves(x)) - len(pools) for x in ((scalars, inputs), outputs)]
        aliases = {ends[0] + i: ends[1] + i for i in range(len(pools))}
        tiles = ((sublanes(kv.dtype), head_dim), (LANES,))
        scratch = scratch._replace(
            writes=[
                (pltpu.VMEM((segments, *x.shape[1:3], *tile), x.dtype), pltpu.SemaphoreType.DMA(()))
                for x, tile in zip(pools, tiles, strict=False)
            ]
        )
        if scaled:
            scratch = scratch._replace(
                encoded=(
                    pltpu.VMEM((block, *kv.shape[1:3], head_dim), jnp.int32),  # of four bits both in one
                    pltpu.VMEM((block, *kv_scale.shape[1:3], LANES), jnp.float32),
                )
            )

    context = rows * tables.shape[1] * pages.block_size
    (results,) = pl.pallas_call(
        functools.partial(
            _kernel,
            pages=pages,
            segments=segments,
            soft_cap=soft_cap is not None,
            stored=stored.replace(None),
            residual_length=residual_length,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(blocks,),
            in_specs=(in_specs,),
            out_specs=(out_specs,),
            scratch_shapes=(scratch,),
        ),
        out_shape=(outputs,),
        input_output_aliases=aliases,
        cost_estimate=pl.CostEstimate(
            flops=4 * context * heads * head_dim,
            transcendentals=context * heads,
            bytes_accessed=stored_parts * context * num_kv_heads * head_dim * kv.dtype.itemsize,
        ),
        compiler_params=compiler_params(need),
        interpret=interpret,
        name="paged_decode",
    )(scalars, inputs)
    lse = results.lse[..., 0] if return_lse else None
    if fused:
        kv, kv_scale = results.pool if scaled else (*results.pool, None)
    return results.out, lse, stored.replace(kv, scales_as_given(kv_scale, stored))


def page_buffers(kv, kv_scale, count: int, page_size: int, slots: int = 2) -> list:
    """Pairs of scratch for `slots` times `count` pages and their semaphores, and the same for their scales."""
    _, parts, num_kv_heads, _, head_dim = kv.shape
    shape = (slots, count, parts, num_kv_heads, page_size, head_dim)
    scratch = [(pltpu.VMEM(shape, kv.dtype), pltpu.SemaphoreType.DMA((slots,)))]
    if kv_scale is not None:
        page = (slots, count, *kv_scale.shape[1:3], page_size)
        scratch.append((pltpu.VMEM(page, kv_scale.dtype), pltpu.SemaphoreType.DMA((slots,))))
    return scratch


def segment_tokens(kv) -> int:
    """Tokens of a segment of this pool: no more than a slot has room for."""
    _, parts, num_kv_heads, _, head_dim = kv.shape
    most = SLOT_BYTES // (parts * num_kv_heads * head_dim * kv.dtype.itemsize)
    if _is_wide(kv):
        return min(LATENT_TOKENS, most)
    return min(ONE_HEAD_TOKENS if num_kv_heads == 1 else SEGMENT_TOKENS, most)


def segments_per_step(kv, rows: int, pages: Pages) -> int:
    """As many as each slot has room for, and no more than there can be."""
    _, parts, num_kv_heads, _, head_dim = kv.shape
    segment_bytes = parts * num_kv_heads * head_dim * kv.dtype.itemsize * pages.step_tokens
    most = rows * -(-pages.blocks_per_row * pages.block_size // pages.step_tokens)
    return max(1, min(LATENT_SEGMENTS if _is_wide(kv) else SEGMENTS, SLOT_BYTES // segment_bytes, most))


def _is_wide(kv) -> bool:
    """Whether all heads read one row a token, more than a register wide: keys and values of heads may be rows too."""
    _, parts, num_kv_heads, _, head_dim = kv.shape
    return parts == 1 and num_kv_heads == 1 and head_dim > LANES


def decode_bytes(
    rows: int,
    heads: int,
    kv,
    tables,
    dtype=None,
    step_tokens: int | None = None,
    deterministic: bool = False,
    groups: int = 1,
) -> int:
    """Vector memory that the kernel takes, at most: all that it can be asked for. `dtype`: of queries; `groups`: of a
    head's entries, with a scale each."""
    _, parts, num_kv_heads, _, head_dim = kv.shape
    dtype = dtype or kv.dtype
    pages = Pages.plan(kv, tables, ALL, step_tokens or segment_tokens(kv), deterministic)
    segments = segments_per_step(kv, rows, pages)
    block = block_rows(rows, heads * groups, num_kv_heads, head_dim, dtype.itemsize)
    ahead = [((segments * pages.pages_per_step, parts, num_kv_heads, pages.page_size, head_dim), kv.dtype)]
    twice = [
        ((block, heads * groups, head_dim), dtype),
        ((block, heads, head_dim), dtype),
        ((block, parts, num_kv_heads, head_dim), kv.dtype),
        ((block, heads, LANES), jnp.float32),
        ((heads, LANES), jnp.float32),
    ]
    once = [
        ((2, heads, LANES), jnp.float32),
        ((heads, head_dim), jnp.float32),
        ((segments, parts, num_kv_heads, sublanes(kv.dtype), head_dim), kv.dtype),
    ]
    if dtype == jnp.float32:  # products of which are those of three parts in bfloat16, of a head at a time
        once.append(((3, parts, pages.step_tokens, head_dim), jnp.bfloat16))
    if kv.dtype.itemsize == 1:  # scales: of pages, of the new tokens, and on their way back
        scales = (2, num_kv_heads * groups)
        ahead.append(((segments * pages.pages_per_step, *scales, pages.page_size), jnp.float32))
        new = ((block, 2, num_kv_heads, head_dim), jnp.float32)  # as they come, and as they are stored
        twice.append(new)
        once += [new, ((block, *scales, LANES), jnp.float32), ((segments, *scales, LANES), jnp.float32)]
    slots = SLOTS * sum(vector_bytes(*x) for x in ahead)
    return SPILL_BYTES + slots + 2 * sum(vector_bytes(*x) for x in twice) + sum(vector_bytes(*x) for x in once)


def block_rows(rows: int, heads: int, num_kv_heads: int, head_dim: int, itemsize: int) -> int:
    """Rows of a grid step: all, or a power of two."""
    row_bytes = 2 * (heads + num_kv_heads) * head_dim * itemsize + heads * LANES * 4
    most = max(1, min(BLOCK_ROWS, BLOCK_BYTES // row_bytes))
    return rows if rows <= most else 1 << (most.bit_length() - 1)


def _kernel(
    scalars: DecodeScalars,
    inputs: DecodeInputs,
    outputs: DecodeOutputs,
    scratch: DecodeScratch,
    *,
    pages,
    segments,
    soft_cap,
    stored,
    residual_length,
):
    limits, successors, targets, counts, tables, knobs = scalars
    q_ref, sinks_ref, new_ref, hbm = inputs
    out_ref, lse_ref, written_pool = outputs
    buffers, state, softmax, write, encoded = scratch
    quantized, fused = stored.format.is_quantized, new_ref is not None
    new_refs = [new_ref]
    if fused:
        hbm = written_pool  # it is the input's memory
    if encoded is not None:  # as they are stored, all at once, for each would wait for its own maximum
        _encode(new_ref, *encoded, stored)
        new_refs = encoded

    block, blocks = pl.program_id(0), pl.num_programs(0)
    block_rows = q_ref.shape[0]
    rows = blocks * block_rows

    def end_of_block(row):
        """One past the last row of a row's block: a step holds segments of one block only."""
        if block_rows & (block_rows - 1):  # then there is but one
            return rows
        return jnp.minimum((divide(row, block_rows) + 1) * block_rows, rows)

    def stand(limit):
        """Returns the position from which a row's token sees what is before it."""
        return limit - 1 - residual_length

    def parts(row):
        return pages.steps(stand(limits[row]), limits[row])

    def after(row, part):
        last = part + 1 == parts(row)
        return jnp.where(last, successors[row + 1], row), jnp.where(last, 0, part + 1)

    def buffer(slot, segment):
        these = pl.ds(segment * pages.pages_per_step, pages.pages_per_step)
        return [pages_of.at[slot, these] for pages_of, _ in buffers]

    def segment_after(row, part, end):
        """Where the next segment of the step that ends before row `end` begins: here, once there is none."""
        there = row < end
        moved = after(jnp.where(there, row, 0), part)
        return tuple(jnp.where(there, new, old) for new, old in zip(moved, (row, part), strict=True))

    def advance(at):
        """Where the work is once a step is done: where it and those after it begin whose pages have room, how many
        pages are coming for all but the last, and the first's slot. With it, what starts the copies of each segment of
        the last."""
        marks, counts, slot = at[: 2 * SLOTS], at[2 * SLOTS : -1], at[-1]
        row, part = marks[-2:]
        end, free = end_of_block(row), jnp.where(slot == 0, SLOTS - 1, slot - 1)
        segments_to_come, coming = [], jnp.int32(0)
        for _ in range(segments):
            there = row < end
            safe = jnp.where(there, row, 0)
            limit = limits[safe]
            held = jnp.where(there, jnp.minimum(pages.held(stand(limit), limit, part), pages.pages_per_step), 0)
            segments_to_come.append((safe, stand(limit), limit, part, held))
            coming += held
            row, part = segment_after(row, part, end)

        def fetch(segment):
            arrived = [semaphore.at[free] for _, semaphore in buffers]
            pages.start(list(zip(hbm, buffer(free, segment), arrived, strict=True)), tables, *segments_to_come[segment])

        return (*marks[2:], row, part, *counts[1:], coming, jnp.where(slot == SLOTS - 1, 0, slot + 1)), fetch

    def prepare(row, part, slot):
        """Write the new tokens that a step's segments end with, and hide what no query sees. Returns how many."""
        end = end_of_block(row)

        def begins(at):
            segment, row, *_ = at
            return (segment < segments) & (row < end)

        def body(at):
            segment, row, part, written = at
            limit, count = limits[row], parts(row)
            if not pages.window_mask.ends:  # nothing is to be done before the row's last segment
                segment, part = segment + count - 1 - part, count - 1
            here = buffer(slot, segment)
            inside = segment < segments
            writes = inside & (part + 1 == count) & (targets[row] > 0)
            if fused:

                @pl.when(writes)
                def _():
                    begin = (pages.first(stand(limit)) + part * pages.pages_per_step) * pages.page_size
                    for i, (staged, semaphore) in enumerate(write):
                        tile, new = staged.at[written], new_refs[i][row - block * block_rows]
                        _insert(new, here[i], limit - 1 - begin, pages, tile)
                        _write_back(tile, semaphore, hbm[i], targets[row], limit - 1, pages).start()

            if not quantized:
                pl.when(inside)(lambda: pages.hide_values(here[0], stand(limit), limit, part, count))
            return segment + 1, *after(row, part), written + jnp.where(writes, 1, 0)

        return lax.while_loop(begins, body, (jnp.int32(0), row, part, jnp.int32(0)))[-1]

    def await_writes(count):
        if fused:
            for staged, semaphore in write:
                these = staged.at[pl.ds(0, count)]
                pl.when(count > 0)(pltpu.make_async_copy(these, these, semaphore).wait)

    @pl.when(block == 0)
    def _():
        def start(_, at):
            at, fetch = advance(at)
            for segment in range(segments):
                fetch(segment)
            return at

        nothing = jnp.int32(0)
        at = (*[successors[0], nothing] * SLOTS, *[nothing] * (SLOTS - 1), jnp.int32(1))
        at = lax.fori_loop(0, jnp.where(successors[0] < rows, SLOTS - 1, 0), start, at)
        for i, x in enumerate((*at, 0)):
            state[i] = x

    out_ref[...] = jnp.zeros_like(out_ref)
    if lse_ref is not None:
        lse_ref[...] = jnp.full_like(lse_ref, -jnp.inf)

    def step(_, at):
        *at, written = at
        row, part, count, slot = *at[:2], at[2 * SLOTS], at[-1]
        following, fetch = advance(at)
        await_pages(buffers, slot, count)
        await_writes(written)  # of the step before; they have left by now
        written = prepare(row, part, slot)
        end, shown = end_of_block(row), row
        work, at = [], (row, part)
        for segment in range(segments):
            there = at[0] < end
            shown = jnp.where(there, at[0], shown)  # a step's row, again where there is none
            work.append((there, shown, at[1], limits[shown], buffer(slot, segment)))
            at = segment_after(*at, end)

        _attend(
            fetch,
            work,
            q_ref,
            block * block_rows,
            (knobs, soft_cap),
            (pages, stand, residual_length > 0),
            stored,
            sinks_ref,
            (out_ref, lse_ref),
            softmax,
        )
        return *following, written

    at = lax.fori_loop(0, counts[block], step, tuple(state[i] for i in range(STATE)))
    for i in range(STATE):
        state[i] = at[i]
    pl.when(block == blocks - 1)(lambda: await_writes(at[-1]))


class Softmax(NamedTuple):
    """References to a softmax in the making."""

    max: Any
    sum: Any
    out_sum: Any


def _attend(fetch, work, q_ref, first_row, logit_numbers, walk, stored: StoredKV, sinks_ref, results, softmax):
    """One step: each segment's softmax by itself, all heads at once, so that one's products run beside another's
    exponentials; then they are put together, row by row. There is no branch in it, for none may part them. Meanwhile
    `fetch` starts the copies of a later step's segment, each by its number."""
    (knobs, soft_cap), (out_ref, lse_ref), (max_ref, sum_ref, out_sum_ref) = logit_numbers, results, softmax
    pages, stand, may_see_nothing = walk
    precision = lax.Precision.HIGHEST if q_ref.dtype == jnp.float32 else None
    matmul = functools.partial(lax.dot_general, precision=precision, preferred_element_type=jnp.float32)
    nothing = (
        jnp.full_like(max_ref, MASKED) if sinks_ref is None else sinks_ref[...],
        jnp.zeros_like(sum_ref) if sinks_ref is None else jnp.ones_like(sum_ref),
        jnp.zeros_like(out_sum_ref),
    )

    def scores(_, row, part, limit, buffer):
        parts = queries_by_scale(q_ref[row - first_row], stored)
        return [_per_head(q, group, buffer[0], 0, stored, matmul, lanes) for q, lanes in parts]

    value_dim = out_sum_ref.shape[1]
    by_group, groups, num_kv_heads = nibbles.has_groups(stored), nibbles.count_groups(stored), work[0][-1][0].shape[2]
    group = max_ref.shape[0] // num_kv_heads

    def soften(parts, _, row, part, limit, buffer):
        logits, value_scales = parts[0], None
        if by_group:
            lines = nibbles.read_group_scales(buffer[1], stored)
            key_scales, value_scales = (nibbles.spread_lines(x, group, num_kv_heads) for x in lines)
            logits = nibbles.sum_groups(logits * key_scales, num_kv_heads, groups)
        elif stored.format.is_quantized:
            key_scales, value_scales = _read_all_scales(buffer[1], stored, logits.shape[0])
            logits = sum(x * scales for x, scales in zip(parts, key_scales, strict=True))
        logits = logits * knobs[0]
        if soft_cap:
            logits = knobs[1] * jnp.tanh(logits / knobs[1])
        at = stand(limit)
        start = (pages.first(at) + part * pages.pages_per_step) * pages.page_size
        place = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
        position = pages.position(start + (nibbles.place_tokens(place) if by_group else place), at)
        seen = position <= at
        if pages.window_mask.ends:
            seen &= pages.window_mask.covers(position, pages.window_mask.first(at))
        logits = jnp.where(seen, logits, MASKED)
        highest = jnp.broadcast_to(jnp.max(logits, axis=1, keepdims=True), max_ref.shape)
        weights = jnp.exp(logits - _as_wide(highest, logits))
        total = jnp.broadcast_to(jnp.sum(weights, axis=1, keepdims=True), sum_ref.shape)
        if by_group:
            weights = nibbles.repeat_heads(weights, num_kv_heads, groups)
        return highest, total, weights if value_scales is None else weights * value_scales

    def accumulate(so_far, highest, weights_sum, weights, there, row, part, limit, buffer):
        out = _per_head(weights.astype(q_ref.dtype), group, buffer[0], 1, stored, matmul, slice(0, value_dim))
        begins = there & (part == 0)
        high, total, out_sum = (lax.select(begins, new, old) for new, old in zip(nothing, so_far, strict=True))
        now = jnp.maximum(high, highest)
        shrink, mine = jnp.exp(high - now), jnp.exp(highest - now)
        total = shrink * total + mine * weights_sum
        out_sum = _as_wide(shrink, out) * out_sum + _as_wide(mine, out) * out
        so_far = tuple(lax.select(there, new, old) for new, old in zip((now, total, out_sum), so_far, strict=True))
        # Every segment gives its row's output, and the row's last one stays.
        results = so_far[2] / _as_wide(so_far[1], out), so_far[0] + jnp.log(so_far[1])
        if may_see_nothing:  # no token of the row lies before its newest
            seen = so_far[0] > MASKED
            results = (
                jnp.where(_as_wide(so_far[0], out) > MASKED, results[0], 0.0),
                jnp.where(seen, results[1], -jnp.inf),
            )
        out_ref[row - first_row] = results[0].astype(out_ref.dtype)
        if lse_ref is not None:
            lse_ref[row - first_row] = results[1]
        return so_far

    # The matrix unit keeps its order: unless the products with the keys run ahead of those with the values, each
    # segment waits for the one before.
    so_far, logits, softmaxes = (max_ref[...], sum_ref[...], out_sum_ref[...]), {}, {}
    for i in range(-AHEAD, len(work) + 1):
        if i + AHEAD < len(work):
            logits[i + AHEAD] = scores(*work[i + AHEAD])
        if 0 <= i < len(work):
            fetch(i)  # among them the scalar unit's work costs nothing
            softmaxes[i] = soften(logits.pop(i), *work[i])
        if i >= 1:
            so_far = accumulate(so_far, *softmaxes.pop(i - 1), *work[i - 1])
    max_ref[...], sum_ref[...], out_sum_ref[...] = so_far


def _as_wide(x, like):
    """`x [H, LANES]`, the same in all lanes, as wide as `like`: no lane needs to be moved for it."""
    lanes = like.shape[1]
    return jnp.concatenate([x] * -(-lanes // LANES), axis=1)[:, :lanes]


def _read_all_scales(buffer, stored: StoredKV, num_heads):
    """Returns what each part of a segment's logits is multiplied by, and what its weights are: `[H, tokens]`."""
    if stored.half_rank is not None:
        return read_scales(buffer, 0, stored)  # the same for all heads
    num_kv_heads = buffer.shape[2]
    of_heads = [read_scales(buffer, head, stored) for head in range(num_kv_heads)]

    def spread(lines):
        return jnp.concatenate([jnp.broadcast_to(x, (num_heads // num_kv_heads, x.shape[1])) for x in lines])

    return [spread([keys for (keys,), _ in of_heads])], spread([values for _, values in of_heads])


def _per_head(x, group, buffer, which, stored: StoredKV, matmul, lanes):
    """The products of each head's rows of `x` and these lanes of its keys (0) or values (1), one below the other.

    Two heads meet in one product, side by side, where that fills the matrix unit's columns; of the four parts of its
    result two are kept. What comes of one head's NaN stays in its own columns. Rows of `x` are `group` of each head; of
    four bits those of two heads together for each group of entries.
    """
    num_pages, parts, num_kv_heads, page_size, head_dim = buffer.shape
    tokens = num_pages * page_size
    width = tokens if which == 0 else lanes.stop
    contract = _CONTRACT_MINOR if which == 0 else _CONTRACT_INNER
    fills = num_kv_heads % 2 == 0 and width == LANES
    pair = nibbles.heads_together(num_kv_heads) if fills or nibbles.has_groups(stored) else 1
    rows = x.shape[0] // num_kv_heads * pair
    results = []
    for head in range(0, num_kv_heads, pair):
        heads = [buffer[:, min(which, parts - 1), head + i].reshape(tokens, head_dim) for i in range(pair)]
        theirs = [widen(numbers[:, lanes], stored.format, x.dtype, which) for numbers in heads]
        own = x[head // pair * rows : (head // pair + 1) * rows]
        if pair == 1 or fills:
            result = matmul(own, jnp.concatenate(theirs, axis=which), contract)
            each = [result[:, i * width : (i + 1) * width] for i in range(pair)]
        else:
            each = [matmul(own, numbers, contract) for numbers in theirs]
        if which == 1 and nibbles.has_groups(stored):
            groups = nibbles.count_groups(stored)
            each = [nibbles.pick_lanes(products, groups, stored.format.group_size) for products in each]
        if pair == 2:
            row = lax.broadcasted_iota(jnp.int32, each[0].shape, 0)
            each = [jnp.where(lax.rem(row, jnp.int32(2 * group)) < group, *each)]
        results += each
    return jnp.concatenate(results)


def _encode(new_ref, numbers_ref, scales_ref, stored: StoredKV):
    """New tokens `[rows, 2, K, D]` as what they are stored as, in 32 bits still, and their scales in all lanes."""
    rows = new_ref.shape[0]
    some = max(n for n in range(1, 9) if rows % n == 0)

    @pl.loop(0, rows // some)
    def _(i):
        these = pl.ds(i * some, some)
        new = new_ref[these]
        if nibbles.has_groups(stored):
            numbers_ref[these], each = nibbles.encode_pair(new[:, :1], new[:, 1:], stored)
            lines = [
                jnp.concatenate(
                    [_fill_lanes(x[:, :, head : head + 1]) for head in range(new.shape[2]) for x in scales], 2
                )
                for scales in each
            ]
            scales_ref[these] = jnp.concatenate(lines, axis=1)
            return
        numbers_ref[these], scales = quantize(new, stored)
        wide = [_fill_lanes(x) for x in scales]
        scales_ref[these] = jnp.concatenate(wide, axis=1 if stored.is_packed else 2)


def _fill_lanes(x):
    return jnp.broadcast_to(x[..., None], (*x.shape, LANES))


def _insert(new, buffer, offset, pages, staged):
    """Put the new token at `offset` of a step's pages, and the register tile it lies in into `staged` as well.

    Tokens are rows of a tile; of scales, of which the new ones come in all lanes, they are lanes.
    """
    tile = staged.shape[2]
    page = divide(offset, pages.page_size)
    inside = offset - page * pages.page_size
    top = pl.multiple_of(divide(inside, tile) * tile, tile)
    there = (page, slice(None), slice(None), pl.ds(top, tile))
    wide = jnp.int32 if jnp.issubdtype(buffer.dtype, jnp.integer) else jnp.float32
    old = buffer[there].astype(wide)  # selects and broadcasts want 32 bits
    is_new = lax.broadcasted_iota(jnp.int32, old.shape, 2) == inside - top
    new = new.astype(wide)
    merged = jnp.where(is_new, new if new.ndim == old.ndim else new[:, :, None], old).astype(buffer.dtype)
    staged[...] = merged  # a copy of its own, for the buffer changes again while the write is under way
    buffer[there] = merged


def _write_back(staged, semaphore, kv_hbm, block, position, pages):
    tile = staged.shape[2]
    inside = position - divide(position, pages.block_size) * pages.block_size
    top = pl.multiple_of(divide(inside, tile) * tile, tile)
    return pltpu.make_async_copy(staged, kv_hbm.at[block, :, :, pl.ds(top, tile)], semaphore)
