"""Scores by index keys and the best tokens of each query: a row's keys pass once, and scores never leave vector memory.

A tile has eight queries, of one row or of a row each. Blocks of keys come by copies that run ahead, and become scores,
one register line a query. Then the tile's threshold is found bit by bit, by counting, and what is above it moves to the
front: each number by as many places as numbers before it stay behind, one bit of that distance at a time. So nothing is
as large as tokens times context but in vector memory, eight queries at a time, and no number goes by itself.
"""

import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.common.index_keys import NOTHING, Best, IndexQueries, Lanes
from pallas_kernels.common.masks import WindowMask
from pallas_kernels.common.quantization import StorageFormat
from pallas_kernels.tpu.pages import (
    LANES,
    SMEM_ENTRIES,
    SPILL_BYTES,
    VMEM_BYTES,
    compiler_params,
    divide,
    keep_in_hbm,
    output,
    pad,
    page_tile,
    vector_bytes,
)
from pallas_kernels.tpu.recurrence.state_decode import split
from pallas_kernels.xla.chosen.index import select_tokens as stream_tokens

QUERIES = 8  # of a tile, the rows of a register
STEP_TOKENS = 2048  # of a row, that come and are scored at once
MOST_PAGES = 64  # of a step
SCORED = 256  # of them in one product: as wide as a matrix unit
SLOTS = 4  # steps whose keys have room, a power of two
UNROLLED = 8  # registers of numbers in one turn of a loop
LOWEST = np.int32(np.iinfo(np.int32).min)  # of tokens that are not seen


class StepList(NamedTuple):
    """The steps of the tiles' rows, flat: arrays, and references to them in scalar memory."""

    rows: Any  # i32[tiles * rows]: each row's place in the tables
    firsts: Any  # i32[tiles * rows]: its first step
    lasts: Any  # i32[tiles * rows]: the one behind its last
    limits: Any  # i32[tiles * rows]: its tokens
    successors: Any  # i32[tiles * (rows + 1)]: before the first row and behind each, the next that has any steps
    totals: Any  # i32[tiles]: how many steps a tile has


class QueryTiles(NamedTuple):
    """The queries of all tiles, or references to those of one, and what the kernel counts by."""

    q: Any  # [tiles, QUERIES, heads, E]; of three parts, the heads of each behind the other
    weights: Any  # f32[tiles, QUERIES, heads, LANES]
    positions: Any  # i32[tiles, QUERIES, LANES]
    sums: Any  # bf16[LANES, 2 LANES], see `_make_sums`


class IndexScratch(NamedTuple):
    """What the kernel keeps in vector memory, and the semaphores of the copies to it."""

    keys: Any  # [SLOTS, pages, page, E]
    arriving: Any  # [SLOTS]
    scores: Any  # f32[lines, QUERIES, LANES]
    numbers: Any  # i32[lines + UNROLLED, QUERIES, LANES]: integers in the scores' order, of which the best move
    moves: Any  # as many: how far


def select_tokens(q, weights, stored, batch, mask, top_k: int, *, interpret: Any = False) -> Best:
    """Computes what `xla.chosen.index.select_tokens` does."""
    own = functools.partial(select_best, interpret=interpret)
    return stream_tokens(q, weights, stored, batch, mask, top_k, select=own, queries=QUERIES)


def unsupported(q: Any, stored: Any, batch: Any, top_k: int) -> str | None:
    """Returns why index keys cannot be scored by the kernel, and the way out; None: they can. Reads no values."""
    keys, tables, format = stored.keys, batch.block_tables, stored.format
    assert isinstance(format, StorageFormat)
    if format.is_quantized:
        return f"The TPU kernel of the indexer reads no {format.name} keys: keep them in bfloat16, or leave it to XLA."
    if keys.dtype not in (jnp.bfloat16, jnp.float32):
        return f"The TPU kernel of the indexer reads keys of bfloat16 or float32, not {keys.dtype}: choose one of them."
    if keys.shape[-1] % LANES:
        return (
            f"Index keys of {keys.shape[-1]} numbers fill no whole lines of {LANES}, and a TPU would copy the whole "
            f"pool: store them padded, with CacheConfig(head_dim_multiple={LANES})."
        )
    block_size = keys.shape[3]
    if block_size % page_tile(keys.dtype) or _step_tokens(_page_size(block_size)) > 2 * STEP_TOKENS:
        return (
            f"The TPU kernel of the indexer cannot read blocks of {block_size} tokens in steps of about {STEP_TOKENS}: "
            f"choose a block_size that is a power of 2 from {page_tile(keys.dtype)} on, or a multiple of {SCORED}."
        )
    if batch.context_shard is not None:
        return "The TPU kernel of the indexer reads whole blocks, not runs of them; XLA reads these."
    context = tables.shape[1] * keys.shape[3]
    need = index_bytes(q.shape[-2], keys, tables, min(top_k, context))
    if need > VMEM_BYTES:
        return (
            f"The scores of {context} tokens, {q.shape[-2]} heads and the best {top_k} take {need >> 20} MiB, which do "
            "not fit a TPU's vector memory: XLA takes them piece by piece."
        )
    entries = tables.size + 6 * (tables.shape[0] + QUERIES + math.prod(q.shape[:-2]))
    if entries > SMEM_ENTRIES:
        return (
            f"Block tables of {tables.shape[0]} x {tables.shape[1]} entries do not fit a TPU's scalar memory beside "
            f"{math.prod(q.shape[:-2])} tokens: larger blocks need fewer."
        )
    return None


def select_best(inputs: IndexQueries, lanes: Lanes, kept: int, *, interpret: Any = False) -> Best:
    """Returns the best of the queries of lanes, `[lanes * queries, kept]`; queries of a lane are 1 or `QUERIES`."""
    num_lanes, queries = lanes.position.shape
    rows = QUERIES // queries  # of a tile
    tiles = -(-num_lanes // rows)
    more = tiles * rows - num_lanes
    row = jnp.pad(lanes.row, (0, more)).reshape(tiles, rows)
    position = jnp.pad(lanes.position, ((0, more), (0, 0)), constant_values=-1).reshape(tiles, rows, queries)
    token = jnp.pad(lanes.token, ((0, more), (0, 0))).reshape(tiles, rows, queries)
    keys, tables = inputs.stored.keys, jnp.clip(inputs.batch.block_tables, 0, inputs.stored.keys.shape[0] - 1)
    capacity = tables.shape[1] * keys.shape[3]
    window_mask = WindowMask.from_spec(inputs.mask, capacity)
    limit = jnp.clip(position.max(axis=2) + 1, 0, capacity)
    begin = jnp.zeros_like(limit)
    if window_mask.ends and not window_mask.sink_tokens:
        first = jnp.where(position < 0, capacity, jnp.maximum(window_mask.first(position), 0))
        begin = jnp.minimum(first.min(axis=2), limit)
    heads = -(-inputs.q.shape[1] // 8) * 8
    q = pad(pad(inputs.q[token], heads, axis=3), keys.shape[-1])  # [tiles, rows, queries, heads, E]
    if keys.dtype == jnp.bfloat16 != q.dtype:  # three parts, the smallest first, whose products with keys are exact
        q = jnp.stack(split(q.astype(jnp.float32))[::-1], axis=3)
    q = q.astype(keys.dtype)
    weights = pad(inputs.weights[token].astype(jnp.float32), heads)
    weights = jnp.broadcast_to(weights[..., None], (*weights.shape, LANES))
    q, weights = (x.reshape(tiles, QUERIES, -1, x.shape[-1]) for x in (q, weights))
    places = jnp.broadcast_to(position.reshape(tiles, QUERIES, 1), (tiles, QUERIES, LANES))
    score, found = _run(
        _list_steps(row, begin, limit, _step_tokens(_page_size(keys.shape[3]))),
        tables.reshape(-1),
        QueryTiles(q, weights, places, _make_sums()),
        keys,
        columns=tables.shape[1],
        kept=kept,
        window_mask=window_mask,
        interpret=interpret,
    )
    # Best first; of equal ones the earlier, as they came.
    score, found = (jnp.swapaxes(x, 1, 2).reshape(tiles * QUERIES, -1)[:, :kept] for x in (score, found))
    lowest, found = lax.sort((-score, found), dimension=1, num_keys=1, is_stable=True)
    return Best(-lowest[: num_lanes * queries], found[: num_lanes * queries])


def _list_steps(row: jax.Array, begin: jax.Array, limit: jax.Array, step_tokens: int) -> StepList:
    """Returns the steps of the tiles' rows, which see tokens from `begin` on up to `limit`."""
    rows = row.shape[1]
    first, last = begin // step_tokens, -(-limit // step_tokens)
    has_steps = last > first
    place = jnp.where(has_steps, jnp.arange(rows, dtype=jnp.int32)[None], rows)
    successors = lax.cummin(jnp.pad(place, ((0, 0), (0, 1)), constant_values=rows), axis=1, reverse=True)
    total = jnp.sum(last - first, axis=1, dtype=jnp.int32)
    return StepList(*(x.reshape(-1) for x in (row, first, last, limit, successors)), total)


def _run(steps, tables, queries, keys, *, columns: int, kept: int, window_mask: WindowMask, interpret: Any) -> Best:
    """Returns scores and positions of tiles' best tokens, by position, `[tiles, lines, QUERIES, LANES]` each."""
    q, weights, positions, sums = queries
    tiles, lines = q.shape[0], -(-kept // LANES)
    page_size = _page_size(keys.shape[3])
    step_tokens = _step_tokens(page_size)
    numbers = _count_lines(columns * keys.shape[3], step_tokens)

    def per_tile(x: Any) -> pl.BlockSpec:
        return pl.BlockSpec((1, *x.shape[1:]), lambda tile, *_: (tile, *(0 for _ in x.shape[1:])))

    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    one_for_all = pl.BlockSpec(sums.shape, lambda tile, *_: (0, 0))
    best = Best(*(output((tiles, lines, QUERIES, LANES), dtype, q, keys) for dtype in (jnp.float32, jnp.int32)))
    context = columns * keys.shape[3]
    kernel = pl.pallas_call(
        functools.partial(
            _kernel, rows=steps.rows.size // tiles, columns=columns, kept=kept, window_mask=window_mask
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(tiles,),
            in_specs=(QueryTiles(per_tile(q), per_tile(weights), per_tile(positions), one_for_all), hbm),
            out_specs=(Best(*map(per_tile, best)),),
            scratch_shapes=(IndexScratch(
                pltpu.VMEM((SLOTS, step_tokens // page_size, page_size, keys.shape[-1]), keys.dtype),
                pltpu.SemaphoreType.DMA((SLOTS,)),
                pltpu.VMEM((numbers, QUERIES, LANES), jnp.float32),
                pltpu.VMEM((numbers + UNROLLED, QUERIES, LANES), jnp.int32),
                pltpu.VMEM((numbers + UNROLLED, QUERIES, LANES), jnp.int32),
            ),),
        ),
        out_shape=(best,),
        cost_estimate=pl.CostEstimate(
            flops=2 * tiles * context * q.shape[1] * q.shape[2] * keys.shape[-1],
            transcendentals=0,
            bytes_accessed=steps.rows.size * context * keys.shape[-1] * keys.dtype.itemsize,
        ),
        compiler_params=compiler_params(_bytes(q.shape, weights.shape, keys, columns, kept)),
        interpret=interpret,
        name="index_tokens",
    )  # fmt: skip

    @jax.custom_batching.sequential_vmap
    def run(steps, tables, queries, keys):
        (best,) = kernel(steps, tables, queries, keep_in_hbm(keys, interpret))
        return best

    return run(steps, tables, queries, keys)


def _page_size(block_size: int) -> int:
    """Returns the tokens of a copy: a block, or a part of it if one of at most `STEP_TOKENS` divides it."""
    parts = (n for n in range(32, STEP_TOKENS + 1, 32) if block_size % n == 0)
    return block_size if block_size <= STEP_TOKENS else max(parts, default=block_size)


def _step_tokens(page_size: int) -> int:
    """Tokens of a step: whole pages, and whole products; no more pages than code should have copies."""
    unit = math.lcm(page_size, SCORED)
    return unit * max(1, min(STEP_TOKENS, MOST_PAGES * page_size) // unit)


def _count_lines(context: int, step_tokens: int) -> int:
    """Registers that the scores of a context take, whole steps of it."""
    lines = -(-context // step_tokens) * step_tokens // LANES
    return -(-lines // UNROLLED) * UNROLLED


def index_bytes(num_heads: int, keys: Any, tables: Any, kept: int) -> int:
    """Returns the vector memory that the kernel takes, at most."""
    heads, parts = -(-num_heads // 8) * 8, 3 if keys.dtype == jnp.bfloat16 else 1
    q, weights = (1, QUERIES, parts * heads, keys.shape[-1]), (1, QUERIES, heads, LANES)
    return _bytes(q, weights, keys, tables.shape[1], kept)


def _bytes(q_shape, weights_shape, keys, columns: int, kept: int) -> int:
    step_tokens = _step_tokens(_page_size(keys.shape[3]))
    lines = _count_lines(columns * keys.shape[3], step_tokens)
    line = vector_bytes((QUERIES, LANES), jnp.float32)
    blocks = vector_bytes(q_shape[1:], keys.dtype) + vector_bytes(weights_shape[1:], jnp.float32)
    blocks += line * (1 + 2 * -(-kept // LANES)) + vector_bytes((LANES, 2 * LANES), jnp.bfloat16)
    products = vector_bytes((q_shape[2], SCORED), jnp.float32)
    steps = SLOTS * vector_bytes((step_tokens, keys.shape[-1]), keys.dtype)
    return SPILL_BYTES + 2 * blocks + 2 * products + steps + line * (3 * lines + 2 * UNROLLED)


def _make_sums() -> jax.Array:
    """Returns what a line of ones and zeros is multiplied by: the ones before each, and all of them, are counted."""
    lane = jnp.arange(LANES, dtype=jnp.int32)
    before = lane[:, None] < lane[None]
    return jnp.concatenate([before, jnp.ones_like(before)], axis=1).astype(jnp.bfloat16)


def _kernel(
    steps: StepList, tables, queries: QueryTiles, pool, best: Best, scratch: IndexScratch, *, rows, columns, kept,
    window_mask,
):  # fmt: skip
    row_ref, firsts, lasts, limits, successors, totals = steps
    q_ref, weights_ref, positions_ref, sums_ref = queries
    buffer, arriving, scores, *_ = scratch
    tile = pl.program_id(0)
    (_, pages, page_size, _), block_size = buffer.shape, pool.shape[3]
    step_tokens = pages * page_size

    def advance(row, step):
        """What comes behind a step: the next one, or the first of the next row that has any; row `rows`: nothing."""
        safe = jnp.minimum(row, rows - 1)
        ends = step + 1 >= lasts[tile * rows + safe]
        following = successors[tile * (rows + 1) + safe + 1]
        begin = firsts[tile * rows + jnp.minimum(following, rows - 1)]
        return jnp.where(ends, jnp.where(row < rows, following, rows), row), jnp.where(ends, begin, step + 1)

    def held(row, step):
        """How many pages of a step there are."""
        left = limits[tile * rows + row] - step * step_tokens
        return jnp.clip(divide(jnp.maximum(left, 0) + (page_size - 1), page_size), 0, pages)

    def fetch(row, step, slot):
        """Starts the copies of a step without a branch, those of no page of none: among products they cost nothing."""
        safe = jnp.minimum(row, rows - 1)
        count = jnp.where(row < rows, held(safe, step), 0)
        of_row, last = row_ref[tile * rows + safe] * columns, jnp.maximum(limits[tile * rows + safe] - 1, 0)
        for i in range(pages):
            size, at = jnp.where(i < count, 1, 0), jnp.minimum(step * step_tokens + i * page_size, last)
            block = divide(at, block_size)
            source = pool.at[pl.ds(size * tables[of_row + block], size), 0, 0]
            if page_size < block_size:
                inside = divide(at - block * block_size, page_size) * page_size
                source = source.at[:, pl.ds(pl.multiple_of(inside, page_size), page_size)]
            pltpu.make_async_copy(source, buffer.at[slot, pl.ds(i, size)], arriving.at[slot]).start()

    def score(row, step, slot):
        line, each = step * (step_tokens // LANES), QUERIES // rows
        keys = buffer[slot].reshape(step_tokens, -1)
        for begin in range(0, step_tokens, SCORED):
            some = keys[begin : begin + SCORED]
            found = [_score(q_ref[0, row * each + i], weights_ref[0, row * each + i], some) for i in range(each)]
            for i in range(SCORED // LANES):
                part = jnp.concatenate([x[:, i * LANES : (i + 1) * LANES] for x in found], axis=0)
                at = line + begin // LANES + i
                if rows == 1:
                    scores[at] = part
                else:
                    scores[at, pl.ds(row, 1)] = part

    def body(number, carry):
        row, step, *ahead = carry
        slot = number & (SLOTS - 1)
        these = buffer.at[slot, pl.ds(0, held(row, step))]
        pltpu.make_async_copy(these, these, arriving.at[slot]).wait()
        fetch(*ahead, (number + SLOTS - 1) & (SLOTS - 1))
        score(row, step, slot)
        return *advance(row, step), *advance(*ahead)

    row = successors[tile * (rows + 1)]
    start = ahead = row, firsts[tile * rows + jnp.minimum(row, rows - 1)]
    for slot in range(SLOTS - 1):
        fetch(*ahead, slot)
        ahead = advance(*ahead)
    lax.fori_loop(0, totals[tile], body, (*start, *ahead))

    def drain(slot):
        """Waits for copies of no page: the next tile's go where they went."""
        these = buffer.at[slot, pl.ds(0, totals[tile] & 0)]
        pltpu.make_async_copy(these, these, arriving.at[slot]).wait()

    for slot in range(SLOTS - 1):
        drain(slot)
    pl.when(totals[tile] > 0)(lambda: drain(SLOTS - 1))
    low = high = jnp.int32(0)
    for row in range(rows):
        first, last = firsts[tile * rows + row], lasts[tile * rows + row]
        some = last > first
        low = jnp.where(some, jnp.where(high == 0, first, jnp.minimum(low, first)), low)
        high = jnp.where(some, jnp.maximum(high, last), high)
    unit = step_tokens // LANES
    _select((low * unit, high * unit), positions_ref[0], sums_ref[...], scratch, best, kept, window_mask)


def _score(q, weights, keys):
    """Returns `[1, tokens]`, the scores of tokens by one query, `q [heads, E]`, or its three parts."""
    precision = lax.Precision.HIGHEST if keys.dtype == jnp.float32 else None
    found = lax.dot_general(
        q, keys, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )  # fmt: skip
    heads = weights.shape[0]
    if found.shape[0] > heads:
        found = found[:heads] + found[heads : 2 * heads] + found[2 * heads :]
    wide = jnp.concatenate([weights] * (keys.shape[0] // LANES), axis=1)
    return jnp.sum(jnp.maximum(found, 0.0) * wide, axis=0, keepdims=True)


def _select(lines, position, sums, scratch: IndexScratch, best: Best, kept, window_mask):
    """Writes the best tokens of a tile, of those whose scores stand in some lines, to the output."""
    (_, _, scores, numbers, moves), (score_ref, found_ref) = scratch, best
    begin, count = lines[0], lines[1] - lines[0]
    turns = divide(count + (UNROLLED - 1), UNROLLED)
    lane = lax.broadcasted_iota(jnp.int32, (QUERIES, LANES), 1)

    def fold_lines(function, carry=None):
        """Runs a function of a line's number, counted from the first, and of what it returned for the one before."""

        def turn(i, carry):
            for j in range(UNROLLED):
                carry = function(i * UNROLLED + j, carry)
            return carry

        return lax.fori_loop(0, turns, turn, carry)

    def order(i, _):
        """Makes integers of the scores, in the same order."""
        at = (begin + i) * LANES + lane
        seen = (at <= position) & (i < count)
        if window_mask.ends:
            seen &= window_mask.covers(at, window_mask.first(position))
        bits = lax.bitcast_convert_type(scores[jnp.minimum(begin + i, scores.shape[0] - 1)] + 0.0, jnp.int32)
        numbers[i] = jnp.where(seen, bits ^ ((bits >> 31) & 0x7FFFFFFF), LOWEST)

    fold_lines(order)

    def count_numbers(is_counted):
        """Returns how many numbers of each query are counted, in all lanes."""
        nothing = jnp.zeros((QUERIES, LANES), jnp.int32)
        return _sum_lines(fold_lines(lambda i, sum: sum + jnp.where(is_counted(numbers[i]), 1, 0), nothing))

    def narrow(bit, threshold):
        """Takes one more bit into the threshold, if as many numbers as are kept are at least as large."""
        bit = lax.convert_element_type(bit, jnp.int32)
        more = threshold | lax.shift_left(jnp.int32(1), 31 - bit)
        least = more ^ LOWEST
        return jnp.where(count_numbers(lambda number: number >= least) >= kept, more, threshold)

    threshold = lax.fori_loop(0, 32, narrow, jnp.zeros((QUERIES, LANES), jnp.int32)) ^ LOWEST
    wanted = kept - count_numbers(lambda number: number > threshold)  # of those that are equal

    def measure(i, before):
        """Notes how far each number moves: twice that and 1 of those that do, 0 of the others."""
        number = numbers[i]
        larger = number > threshold
        equal = (number == threshold) & (number != LOWEST)
        flags = jnp.concatenate([jnp.where(x, 1.0, 0.0) for x in (larger, equal)], axis=0).astype(jnp.bfloat16)
        found = lax.dot_general(flags, sums, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        found = found.astype(jnp.int32)
        larger_before, equal_before = (
            x + found[part, :LANES] for x, part in zip(before, (slice(0, QUERIES), slice(QUERIES, None)), strict=True)
        )
        moved = i * LANES + lane - larger_before - jnp.minimum(equal_before, wanted)
        moves[i] = jnp.where(larger | (equal & (equal_before < wanted)), 2 * moved + 1, 0)
        return before[0] + found[:QUERIES, LANES:], before[1] + found[QUERIES:, LANES:]

    nothing = jnp.zeros((QUERIES, LANES), jnp.int32)
    fold_lines(measure, (nothing, nothing))
    for i in range(UNROLLED):  # behind the last line nothing comes
        moves[turns * UNROLLED + i] = nothing
    for bit in range(7):
        _move_lanes(bit, turns, numbers, moves, lane)
    lax.fori_loop(0, _bits(numbers.shape[0]), lambda bit, _: _move_lines(bit, turns, numbers, moves), None)
    for i in range(score_ref.shape[1]):
        move, number = moves[i], numbers[i]
        there = ((move & 1) == 1) & (i * LANES + lane < kept) & (i < turns * UNROLLED)
        bits = number ^ ((number >> 31) & 0x7FFFFFFF)
        score_ref[0, i] = jnp.where(there, lax.bitcast_convert_type(bits, jnp.float32), NOTHING)
        at = (begin + i) * LANES + lane + lax.shift_right_logical(move, jnp.int32(1))
        found_ref[0, i] = jnp.where(there, at, -1)


def _sum_lines(x):
    """Returns the sum of each line of counts in all lanes."""
    total = jnp.sum(x.astype(jnp.float32), axis=1, keepdims=True).astype(jnp.int32)
    return jnp.broadcast_to(total, x.shape)


def _bits(lines: int) -> int:
    return max(1, (lines - 1).bit_length())


def _move_lanes(bit, turns, numbers, moves, lane):
    """Moves what has this bit in its distance that many lanes to the front; it may come from the next line."""
    distance = 1 << bit
    inside = lane < LANES - distance

    def roll(line):
        return tuple(pltpu.roll(x, LANES - distance, 1) for x in (numbers[line], moves[line]))

    def turn(i, rolled):
        lines = [i * UNROLLED + j for j in range(UNROLLED)]
        rolls = [rolled, *(roll(line + 1) for line in lines)]
        came = [
            tuple(jnp.where(inside, a, b) for a, b in zip(*pair, strict=True)) for pair in itertools.pairwise(rolls)
        ]
        _move(bit, lines, came, numbers, moves)
        return rolls[-1]

    lax.fori_loop(0, turns, turn, roll(0))


def _move_lines(bit, turns, numbers, moves):
    """Moves what has a bit in its distance that many lines to the front."""
    bit = lax.convert_element_type(bit, jnp.int32)
    distance = lax.shift_left(jnp.int32(1), bit)

    def turn(i, _):
        lines = [i * UNROLLED + j for j in range(UNROLLED)]
        sources = [jnp.minimum(line + distance, turns * UNROLLED) for line in lines]  # behind the last nothing comes
        _move(bit + 7, lines, [(numbers[line], moves[line]) for line in sources], numbers, moves)

    lax.fori_loop(0, turns, turn, None)


def _move(bit, lines, came, numbers, moves):
    """Puts into lines what comes to them, and takes away what leaves them. All are read before one is written, or each
    would wait for the one before."""
    mask = lax.shift_left(jnp.int32(2), jnp.int32(bit))
    own = [(numbers[line], moves[line]) for line in lines]
    for line, (number, far), (came_number, came_far) in zip(lines, own, came, strict=True):
        comes, goes = (came_far & mask) != 0, (far & mask) != 0
        numbers[line] = jnp.where(comes, came_number, number)
        moves[line] = jnp.where(comes, came_far, jnp.where(goes, 0, far))
