"""Many new tokens per row: attention by tiles of queries, from a work list that is made on the device.

A tile is some consecutive tokens of one row, for all heads. Tiles are the grid, as many as the step needs and no more.
Each walks its row's keys up to its own last position, with two page buffers, on across tiles. Queries come as the model
has them, tokens by heads, and the output goes back like that: tokens turn into lanes in vector memory, see `words`.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.common.batch import SoftmaxOptions, StoredKV
from pallas_kernels.common.masks import ALL, WindowMask, is_visible
from pallas_kernels.tpu import nibbles
from pallas_kernels.tpu.decode import Softmax, page_buffers
from pallas_kernels.tpu.head_transpose import Words, to_heads, to_tokens
from pallas_kernels.tpu.pages import (
    LANES,
    MASKED,
    SPILL_BYTES,
    Pages,
    await_pages,
    compiler_params,
    keep_in_hbm,
    output,
    sublanes,
    vector_bytes,
)
from pallas_kernels.tpu.quantize import queries_by_scale, read_scales, scales_along_lanes, widen

STEP_TOKENS = 256  # of the products of a head and of one softmax
STEPS_TOGETHER = 2  # come at once, and are worked on without a pause where all is seen
HEADS_TOGETHER = 8  # as many heads are worked on without a loop
AHEAD = 5  # so many products of queries and keys are under way while the weights of one meet the values
_CONTRACT_MINOR = (((1,), (1,)), ((), ()))
_CONTRACT_INNER = (((1,), (0,)), ((), ()))
LOG2_E = math.log2(math.e)  # the kernel's exponentials are powers of two, which the hardware has


class Tiles(NamedTuple):
    """The work list: first what attends, in the order of rows, then the places of no token, whose output is 0."""

    total: jax.Array  # i32[]: how many tiles there are, at least 1
    row: jax.Array  # i32[W]: whose tokens
    token: jax.Array  # i32[W]: the place of the first
    start: jax.Array  # i32[W]: the position of the first; where nobody's are, minus their number
    limit: jax.Array  # i32[W]: one past the position of the last; where nobody's are, 0


class PrefillScalars(NamedTuple):
    """The work of all tiles: arrays, and references to them in scalar memory."""

    rows: Any  # the fields of `Tiles`
    tokens: Any
    starts: Any
    limits: Any
    tables: Any  # i32[S * M]
    knobs: Any  # f32[2]: of the logits, in base 2
    bounds: Any  # with a token mask, of each tile the keys that any query sees, from and until, and those that all do


class PrefillInputs(NamedTuple):
    """What comes from HBM, where queries and the pool stay; None: it is not there."""

    q: Any
    pool: Any  # one or two: the numbers, and their scales
    token_mask: Any  # of a tile, for each query
    sinks: Any


class PrefillOutputs(NamedTuple):
    """What goes: all output in HBM, and a tile's statistics."""

    out: Any
    lse: Any


class PrefillScratch(NamedTuple):
    """What the kernel keeps in vector memory, and its semaphores. Pairs are memory and the semaphore of its copies."""

    buffers: Any  # a pair for each array of the pool: pages of two steps
    next_slot: Any  # i32[1] in scalar memory
    q_buffers: Any  # [2, tokens, H, D']: queries of this tile and the next
    out_buffers: Any  # as many
    moved: Any  # [2, 2]: the semaphores of both
    words: Any  # `Words.by_token`
    by_head: Any  # `Words.by_head`
    softmax: Any  # `Softmax`
    lines: Any  # of four bits the scales of a step's pages, as numbers


def make_tiles(begin, lengths, new, skip, *, places: int, tile_tokens: int) -> Tiles:
    """Cut the tokens of every row, `new` from place `begin` on, and what lies between, into tiles.

    Arguments are i32[S], and bool[S]: rows to leave out, output and all. `begin` does not decrease.
    """
    rows = new.shape[0]
    begin = jnp.minimum(begin, places)
    end = jnp.minimum(begin + new, places)
    ends = jnp.concatenate([end, begin[:1]])  # of what lies between: after each row, and before the first
    after = jnp.concatenate([begin[1:], jnp.full(1, places, jnp.int32), begin[:1]])
    first = jnp.concatenate([begin, jnp.minimum(ends, after).at[-1].set(0)])
    size = jnp.concatenate([jnp.where(skip, 0, end - begin), jnp.maximum(after - ends, 0).at[-1].set(begin[0])])
    count = -(-size // tile_tokens)
    stop = jnp.cumsum(count)
    # All of a row's numbers by comparing and adding: a few dense operations in place of as many gathers.
    tile = jnp.arange(max_tiles(rows, places, tile_tokens), dtype=jnp.int32)
    mine = (tile[:, None] >= (stop - count)[None]) & (tile[:, None] < stop[None])

    def of_run(x):
        return jnp.sum(jnp.where(mine, x[None], 0), axis=1, dtype=jnp.int32)

    before = (tile - of_run(stop - count)) * tile_tokens  # tokens of the run in tiles before
    width = jnp.minimum(of_run(size) - before, tile_tokens)
    attends = tile < stop[rows - 1]
    nobody = jnp.zeros(rows + 1, jnp.int32)
    start = of_run(jnp.concatenate([lengths - new, nobody])) + before
    there = tile < stop[-1]
    return Tiles(
        jnp.maximum(stop[-1], 1),
        of_run(jnp.concatenate([jnp.arange(rows, dtype=jnp.int32), nobody])),
        jnp.where(there, of_run(first) + before, 0),
        jnp.where(attends, start, jnp.where(there, -width, 0)),
        jnp.where(attends, start + width, 0),
    )


def max_tiles(rows: int, places: int, tile_tokens: int) -> int:
    """As many tiles as `make_tiles` can make: of the runs that are cut, at most one a run is not full."""
    return -(-places // tile_tokens) + min(2 * rows, places)


def prefill(
    q,
    stored: StoredKV,
    tables,
    tiles,
    options: SoftmaxOptions,
    *,
    tile_tokens,
    window_mask=ALL,
    token_mask=None,
    interpret=False,
    step_tokens=None,
):
    """Attention of tiles of queries.

    Args:
      q: `[N, H, D']`, padded to the pool's head_dim.
      stored: the pool; its scales are of float32.
      tables: `i32[S, M]`, in range.
      tiles: the work list, positions in range, of `tile_tokens` tokens.
      options: with a scale. If deterministic, all steps take as many keys at once, those of tables with no room for so
        many too.
      window_mask: how far back tokens see, where only a window says so.
      token_mask: `masks.MaskTiles` of these tiles, where more does; then `window_mask` says only which first tokens are
        seen.
      interpret: run on the CPU, `pltpu.InterpretParams()`.

    Returns:
      `(out in q's shape, lse f32[tiles, H, tile_tokens] or None)`; arbitrary at places without a tile.
    """
    kv, soft_cap, sinks = stored.kv, options.soft_cap, options.sinks
    return_lse, deterministic, step_tokens = options.return_lse, options.deterministic, step_tokens or STEP_TOKENS
    _, num_heads, head_dim = q.shape
    num_kv_heads = kv.shape[2]
    group = num_heads // num_kv_heads
    queries = group * tile_tokens
    kv_scale = scales_along_lanes(stored)
    # With a token mask the walk begins at a key: as that of a query which sees no other.
    window_mask = window_mask if token_mask is None else WindowMask(1, None, window_mask.sink_tokens)
    pages, part_pages = plan_steps(kv, tables, window_mask, step_tokens, deterministic)
    groups = nibbles.count_groups(stored)
    need = prefill_bytes(tile_tokens, num_heads, kv, tables, q.dtype, step_tokens, deterministic, groups)
    knobs = jnp.stack([jnp.asarray(x, jnp.float32) for x in (options.scale, 1.0 if soft_cap is None else soft_cap)])
    factor, cap = (LOG2_E * knobs[0], knobs[1]) if soft_cap is None else (knobs[0] / knobs[1], LOG2_E * knobs[1])
    knobs = jnp.stack([factor, cap])
    bounds = None if token_mask is None else tuple(token_mask[1:])
    scalars = PrefillScalars(*tiles[1:], tables.reshape(-1), knobs, bounds)

    # From vector memory a copy would be a loop, a register a turn.
    q, kv, kv_scale = (x if x is None else keep_in_hbm(x, interpret) for x in (q, kv, kv_scale))
    hbm, pools = pl.BlockSpec(memory_space=pltpu.HBM), [x for x in (kv, kv_scale) if x is not None]
    inputs, in_specs = PrefillInputs(q, pools, None, None), PrefillInputs(hbm, [hbm] * len(pools), None, None)
    outputs, out_specs = PrefillOutputs(output(q.shape, q.dtype, q, kv), None), PrefillOutputs(hbm, None)
    if token_mask is not None:
        lines = jnp.tile(token_mask.tokens, (1, 1, group))
        inputs = inputs._replace(token_mask=lines)
        in_specs = in_specs._replace(token_mask=pl.BlockSpec((1, *lines.shape[1:]), lambda tile, *_: (tile, 0, 0)))
    if sinks is not None:
        sinks = LOG2_E * jnp.repeat(sinks.astype(jnp.float32).reshape(num_kv_heads, 1, group), tile_tokens, axis=2)
        inputs = inputs._replace(sinks=sinks)
        in_specs = in_specs._replace(sinks=pl.BlockSpec(sinks.shape, lambda *_: (0, 0, 0)))
    statistics = (num_kv_heads, 1, queries)
    if return_lse:
        outputs = outputs._replace(lse=output((tiles.row.size, *statistics), jnp.float32, q, kv))
        out_specs = out_specs._replace(lse=pl.BlockSpec((1, *statistics), lambda tile, *_: (tile, 0, 0, 0)))
    products = q.size // head_dim * tables.shape[1] * pages.block_size
    tokens, words = pltpu.VMEM((2, tile_tokens, num_heads, head_dim), q.dtype), Words.of(num_heads, q.dtype)
    sums = pltpu.VMEM(statistics, jnp.float32)
    scratch = PrefillScratch(
        page_buffers(kv, kv_scale, pages.pages_per_step, pages.page_size),
        pltpu.SMEM((1,), jnp.int32),
        tokens,
        tokens,
        pltpu.SemaphoreType.DMA((2, 2)),
        pltpu.VMEM(*words.by_token(tile_tokens, head_dim)),
        pltpu.VMEM(*words.by_head(num_kv_heads, queries, head_dim)),
        Softmax(sums, sums, pltpu.VMEM((num_kv_heads, head_dim, queries), jnp.float32)),
        [],
    )
    if nibbles.has_groups(stored):
        shape = (pages.pages_per_step, *kv_scale.shape[1:3], pages.page_size)
        scratch = scratch._replace(lines=[pltpu.VMEM(shape, jnp.float32)])
    (results,) = pl.pallas_call(
        functools.partial(
            _kernel,
            pages=pages,
            part_pages=part_pages,
            tile_tokens=tile_tokens,
            soft_cap=soft_cap is not None,
            stored=stored.replace(None),
            halves=not deterministic,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(tiles.total,),
            in_specs=(in_specs,),
            out_specs=(out_specs,),
            scratch_shapes=(scratch,),
        ),
        out_shape=(outputs,),
        cost_estimate=pl.CostEstimate(
            flops=4 * products * head_dim, transcendentals=products, bytes_accessed=2 * q.size * q.dtype.itemsize
        ),
        compiler_params=compiler_params(need),
        interpret=interpret,
        name="paged_prefill",
    )(scalars, inputs)
    return results.out, results.lse.reshape(-1, num_heads, tile_tokens) if return_lse else None


def plan_steps(kv, tables, window_mask: WindowMask, step_tokens: int, deterministic: bool) -> tuple[Pages, int]:
    """The walk, and how many of a step's pages are worked on at once."""
    part = Pages.plan(kv, tables, window_mask, step_tokens, deterministic)
    whole = Pages.plan(kv, tables, window_mask, STEPS_TOGETHER * part.step_tokens, deterministic)
    fits = whole.page_size == part.page_size and whole.pages_per_step == STEPS_TOGETHER * part.pages_per_step
    return whole if fits else part, part.pages_per_step


def prefill_bytes(
    tile_tokens: int,
    heads: int,
    kv,
    tables,
    dtype=None,
    step_tokens: int = STEP_TOKENS,
    deterministic: bool = False,
    groups: int = 1,
) -> int:
    """Vector memory that the kernel takes, at most: all that it can be asked for. `dtype`: of queries; `groups`: of a
    head's entries, with a scale each."""
    _, parts, num_kv_heads, _, head_dim = kv.shape
    dtype = dtype or kv.dtype
    queries = heads // num_kv_heads * tile_tokens
    pages, _ = plan_steps(kv, tables, ALL, step_tokens, deterministic)
    statistics = ((num_kv_heads, 1, queries), jnp.float32)
    twice = [
        ((pages.pages_per_step, parts, num_kv_heads, pages.page_size, head_dim), kv.dtype),
        ((tile_tokens, heads, head_dim), dtype),
        ((tile_tokens, heads, head_dim), dtype),
        statistics,  # the LSE
        statistics,  # the sinks
        statistics,  # maxima and sums
        ((8, queries), jnp.int32),  # masks
    ]
    if kv.dtype.itemsize == 1:
        twice.append(((pages.pages_per_step, 2, num_kv_heads * groups, pages.page_size), jnp.float32))
        twice.append(((pages.step_tokens, head_dim), jnp.float32))  # keys and values of a head, widened
    words = Words.of(heads, dtype)
    once: list = [words.by_head(num_kv_heads, queries, head_dim), words.by_token(tile_tokens, head_dim)]
    once.append(((num_kv_heads, head_dim, queries), jnp.float32))
    if dtype == jnp.float32:  # products of which are those of three parts in bfloat16, with keys and with values
        once.append(((2 * 3, pages.step_tokens, head_dim), jnp.bfloat16))
    return SPILL_BYTES + 2 * sum(vector_bytes(*x) for x in twice) + sum(vector_bytes(*x) for x in once)


def _kernel(
    scalars: PrefillScalars,
    inputs: PrefillInputs,
    outputs: PrefillOutputs,
    scratch: PrefillScratch,
    *,
    pages,
    part_pages,
    tile_tokens,
    soft_cap,
    stored,
    halves,
):
    rows, tokens, starts, limits, tables, knobs, bounds = scalars
    q_hbm, hbm, mask_ref, sinks_ref = inputs
    out_hbm, lse_ref = outputs
    buffers, next_slot, q_buffers, out_buffers, moved, words_ref, by_head, softmax, lines = scratch
    max_ref, sum_ref, out_sum_ref = softmax
    has_masks, lse = mask_ref is not None, lse_ref is not None
    froms, untils, *sure = bounds if has_masks else (starts, limits)
    words = Words.of(q_buffers.shape[2], q_buffers.dtype)
    group = q_buffers.shape[2] // by_head.shape[0]

    tile, tiles = pl.program_id(0), pl.num_programs(0)
    start, limit = froms[tile], untils[tile]
    steps = pages.steps(start, limit)
    half = part_pages // 2 if halves and part_pages % 2 == 0 else part_pages
    mine = tile & 1

    def start_pages(tile, step, slot):
        coming = [(source, to.at[slot], arrived.at[slot]) for source, (to, arrived) in zip(hbm, buffers, strict=True)]
        pages.start_held(coming, tables, rows[tile], froms[tile], untils[tile], step)

    def fetch(do, tile):
        @pl.when(limits[tile] > 0)
        def _():
            size = limits[tile] - starts[tile]
            source, target = q_hbm.at[pl.ds(tokens[tile], size)], q_buffers.at[tile & 1, pl.ds(0, size)]
            getattr(pltpu.make_async_copy(source, target, moved.at[0, tile & 1]), do)()

    def send(do, tile):
        size = limits[tile] - starts[tile]

        @pl.when(size > 0)
        def _():
            source, target = out_buffers.at[tile & 1, pl.ds(0, size)], out_hbm.at[pl.ds(tokens[tile], size)]
            getattr(pltpu.make_async_copy(source, target, moved.at[1, tile & 1]), do)()

    def forget():
        max_ref[...] = sinks_ref[...] if sinks_ref is not None else jnp.full_like(max_ref, MASKED)
        sum_ref[...] = jnp.ones_like(sum_ref) if sinks_ref is not None else jnp.zeros_like(sum_ref)

    def turn_queries(tile):
        together = 16 if isinstance(tile, int) else LANES  # the first tile's, once: less code
        to_heads(by_head, q_buffers.at[tile & 1], words_ref.at[0], words, group, tile_tokens, together)

    @pl.when(tile == 0)
    def _():
        next_slot[0] = 0
        fetch("start", 0)
        start_pages(0, 0, 0)
        forget()
        out_sum_ref[...] = jnp.zeros_like(out_sum_ref)
        fetch("wait", 0)
        turn_queries(0)

    pl.when(tile + 1 < tiles)(lambda: fetch("start", tile + 1))

    def step(i, slot):
        last = i + 1 == steps
        next_tile = jnp.where(last, tile + 1, tile)

        @pl.when(next_tile < tiles)
        def _():
            start_pages(next_tile, jnp.where(last, 0, i + 1), 1 - slot)

        coming = jnp.minimum(pages.held(start, limit, i), pages.pages_per_step)
        await_pages(buffers, slot, coming)
        if not stored.format.is_quantized:
            pages.hide_values(buffers[0][0].at[slot], start, limit, i, steps, half)
        for line in lines:  # of four bits, once for all heads
            for page in range(pages.pages_per_step):
                for which, x in enumerate(nibbles.read_page_scales(buffers[1][0].at[slot, page], stored)):
                    line[page, which] = x
        first_key = (pages.first(start) + i * pages.pages_per_step) * pages.page_size
        parts = pages.pages_per_step // part_pages

        def seen_by_all(first_key, count):
            if has_masks:
                return (first_key + count * pages.page_size <= sure[1][tile]) & (first_key >= sure[0][tile])
            seen = first_key + count * pages.page_size <= start + 1
            return seen & (first_key >= pages.window_mask.first(limit - 1)) if pages.window_mask.ends else seen

        def attend(at, count, sure, parts=1):
            _attend(
                _Tile(words, tile_tokens, pages, stored, soft_cap, lse),
                by_head,
                [
                    *(to.at[slot, pl.ds(at, parts * count)] for to, _ in buffers),
                    *(line.at[pl.ds(at, parts * count)] for line in lines),
                ],
                first_key + at * pages.page_size,
                start,
                knobs,
                parts,
                mask_ref,
                softmax,
                sure=sure * pages.page_size,
            )

        def attend_part(at):
            # Most steps need no mask; a row's last ones have fewer keys, or known ones before those to mask.
            begin = first_key + at * pages.page_size
            few = (half < part_pages) & (limit <= begin + half * pages.page_size)
            all_seen, half_seen = seen_by_all(begin, part_pages), seen_by_all(begin, half)
            pl.when(all_seen)(lambda: attend(at, part_pages, sure=part_pages))
            if half < part_pages:
                pl.when(~all_seen & few)(lambda: attend(at, half, sure=0))
                pl.when(~all_seen & ~few & half_seen)(lambda: attend(at, part_pages, sure=half))
            pl.when(~all_seen & ~few & ~half_seen)(lambda: attend(at, part_pages, sure=0))

        if parts == 1:
            attend_part(0)
        else:
            whole = seen_by_all(first_key, pages.pages_per_step)
            pl.when(whole)(lambda: attend(0, part_pages, sure=part_pages, parts=parts))

            @pl.loop(0, jnp.where(whole, 0, parts))
            def _(part):
                at = lax.convert_element_type(part, jnp.int32) * part_pages
                pl.when(first_key + at * pages.page_size < limit)(lambda: attend_part(at))

        return 1 - slot

    next_slot[0] = lax.fori_loop(0, steps, step, next_slot[0])

    pl.when(tile >= 2)(lambda: send("wait", tile - 2))
    pl.when(tile + 1 < tiles)(lambda: fetch("wait", tile + 1))
    if lse:
        lse_ref[0] = jnp.where(limit > 0, (max_ref[...] + jnp.log2(sum_ref[...])) / LOG2_E, -jnp.inf)

    def result(head):
        sums = out_sum_ref[head] * jnp.where(limit > 0, 1 / sum_ref[head], 0.0)  # of a place of no token 0 * 0
        out_sum_ref[head] = jnp.zeros(out_sum_ref.shape[1:], out_sum_ref.dtype)
        return sums

    # Both at once, without branches: the way back waits for transpositions, the other for stores. Behind the last tile
    # the queries that are turned mean nothing.
    to_tokens(out_buffers.at[mine], result, words_ref.at[1], words, group, tile_tokens)
    turn_queries(tile + 1)
    forget()
    send("start", tile)

    @pl.when(tile == tiles - 1)
    def _():
        pl.when(tile >= 1)(lambda: send("wait", tile - 1))
        send("wait", tile)


class _Tile(NamedTuple):
    """What all steps of a tile have in common."""

    words: Words
    tile_tokens: int
    pages: Pages
    stored: StoredKV
    soft_cap: bool
    exact: bool


def _attend(tile: _Tile, q_ref, buffers, start, query_start, knobs, parts, mask_ref, softmax: Softmax, sure):
    """One step of the online softmax, transposed: keys along sublanes, queries along lanes, so that maxima and sums
    are lane-dense and cost next to nothing. Every query sees the first `sure` keys of a part; the others are masked.
    `exact` sums the weights before they are rounded for the product with the values, as the LSE wants them; else after.
    """
    words, tile_tokens, pages, stored, soft_cap, exact = tile
    max_ref, sum_ref, out_sum_ref = softmax
    num_kv_heads, head_dim, queries = out_sum_ref.shape
    dtype = words.dtype
    part_pages = buffers[0].shape[0] // parts
    tokens = part_pages * buffers[0].shape[3]
    wide = min(2 * LANES, queries)  # the matrix unit's columns from v6e on
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None
    matmul = functools.partial(lax.dot_general, precision=precision, preferred_element_type=jnp.float32)
    ones = jnp.ones((sublanes(dtype), tokens), dtype)
    by_group = nibbles.has_groups(stored)
    if sure < tokens:
        shape = (tokens - sure, wide)
        place = lax.broadcasted_iota(jnp.int32, shape, 0)
        place = nibbles.place_tokens(place) if by_group else place
        key = pages.position(start + sure + place, query_start)
        lane = lax.broadcasted_iota(jnp.int32, shape, 1)

    def pages_of(part, which=0):
        return buffers[which].at[pl.ds(part * part_pages, part_pages)]

    def scale_numbers(numbers, part, head, which):
        scales = nibbles.spread_scales(pages_of(part, 2), which, head, stored, head_dim)
        return numbers.astype(jnp.float32) * scales

    def keys_of(part, head):
        keys = widen(pages_of(part)[:, 0, head].reshape(tokens, head_dim), stored.format, dtype, 0)
        return scale_numbers(keys, part, head, 0).astype(dtype) if by_group else keys

    def scores(part, head, at, width):
        if by_group and at > 0:  # the same for all queries, and much to compute
            keys = held[part, id(head)]
        else:
            keys = held[part, id(head)] = keys_of(part, head)
        lines = pl.ds(at // words.numbers, width // words.numbers)
        parts = queries_by_scale(words.unpack(q_ref[head, lines]), stored)
        return [matmul(keys[:, lanes], q, _CONTRACT_MINOR) for q, lanes in parts]

    def scaled(logits, scales):
        column = jnp.broadcast_to(scales * knobs[0], (LANES, tokens)).T  # from lanes to sublanes
        width = logits.shape[1]
        return logits * jnp.concatenate([column] * -(-width // LANES), axis=1)[:, :width]

    def soften(part, head, at, width, products):
        if stored.format.is_quantized and not by_group:
            scales = read_scales(pages_of(part, 1), head, stored)[0]
            logits = sum(scaled(*x) for x in zip(products, scales, strict=True))
        else:
            logits = products[0] * knobs[0]
        if soft_cap:
            logits = knobs[1] * jnp.tanh(logits)
        if sure < tokens:
            if mask_ref is None:
                query = query_start + ((at + lane[:, :width]) & (tile_tokens - 1))
                seen = key[:, :width] <= query
                if pages.window_mask.ends:
                    seen &= pages.window_mask.covers(key[:, :width], pages.window_mask.first(query))
            else:
                first, last, before, *bits = (
                    mask_ref[0, pl.ds(i, 1), pl.ds(at, width)] for i in range(mask_ref.shape[1])
                )
                seen = is_visible(key[:, :width], first, last, before, bits, pages.window_mask)
            masked = jnp.where(seen, logits[sure:], MASKED)
            logits = jnp.concatenate([logits[:sure], masked]) if sure else masked
        there = (head, slice(None), pl.ds(at, width))
        before = max_ref[there]
        now = jnp.maximum(before, jnp.max(logits, axis=0, keepdims=True))
        weights = jnp.exp2(logits - now)
        shrink = jnp.exp2(before - now)
        max_ref[there] = now
        if exact:
            sum_ref[there] = shrink * sum_ref[there] + jnp.sum(weights, axis=0, keepdims=True)
        return weights.astype(dtype), shrink

    def values_of(part, head):
        buffer = pages_of(part)
        values = buffer[:, buffer.shape[1] - 1, head].reshape(tokens, head_dim)  # of latent rows the keys
        if by_group:
            values = widen(values, stored.format, dtype, 1)
            values = scale_numbers(values, part, head, 1).T.astype(dtype)
        elif stored.format.is_quantized:
            scales = read_scales(pages_of(part, 1), head, stored)[1]
            values = (widen(values, stored.format, jnp.float32, 1).T * scales).astype(dtype)
        else:
            values = values.T
        # The matrix unit has the time to sum, and the vector unit has not.
        return values if exact else jnp.concatenate([values, ones])

    def accumulate(_, head, at, width, values, weights, shrink):
        there = (head, slice(None), pl.ds(at, width))
        sums = matmul(values, weights, _CONTRACT_INNER)
        out_sum_ref[there] = shrink * out_sum_ref[there] + sums[:head_dim]
        if not exact:
            sum_ref[there] = shrink * sum_ref[there] + sums[head_dim : head_dim + 1]

    held: dict = {}
    together = max(n for n in range(1, HEADS_TOGETHER + 1) if num_kv_heads % n == 0)

    @pl.loop(0, num_kv_heads // together)
    def _(some):
        # Several stages in flight, each of a head and some queries: the matrix unit works on the items before and
        # after the one whose softmax the vector unit works on.
        held.clear()
        heads = [some * together + head for head in range(together)]
        items = [
            (part, head, at, min(wide, queries - at))
            for part in range(parts) for head in heads for at in range(0, queries, wide)
        ]  # fmt: skip
        logits: dict = {}
        for i in range(-AHEAD, len(items)):
            if i + AHEAD < len(items):
                logits[i + AHEAD] = scores(*items[i + AHEAD])
            if i >= 0:
                part, head, at, _ = items[i]
                if at == 0:
                    values = values_of(part, head)
                accumulate(*items[i], values, *soften(*items[i], logits.pop(i)))
