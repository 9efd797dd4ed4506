"""A step's new keys and values into the blocks of their rows, by DMA.

The work is cut into pages: a block, or a part of a large one. What a page gets is a run of consecutive tokens; a run
that does not fill it fetches the page as well and keeps its other places. Pages go through a ring of slots, several in
flight: a copy of this size takes far longer to arrive than to move.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import xla
from pallas_kernels.common.batch import PagedBatch, StoredKV
from pallas_kernels.common.ragged_layout import default_offsets, find_slots, locate
from pallas_kernels.tpu import nibbles
from pallas_kernels.tpu.pages import (
    SMEM_ENTRIES,
    SPILL_BYTES,
    compiler_params,
    keep_in_hbm,
    output,
    pad,
    page_tile,
    vector_bytes,
)
from pallas_kernels.tpu.quantize import encodable, quantize, scales_along_lanes, scales_as_given

FEW_TOKENS = 8  # a register's
PAGE_TOKENS = 32  # at most, for a page is fetched and sent whole even if one token of it is new
RING_BYTES = 24 * 2**20  # of vector memory
SLOTS = 8  # pages in flight


class Runs(NamedTuple):
    """The work list, a page an entry, in the order of the rows' tokens."""

    block: jax.Array  # i32[W]: the page's block; 0 where nothing is to be written
    part: jax.Array  # i32[W]: which of the block's pages
    token: jax.Array  # i32[W]: the step's token that belongs at the page's first place; may be negative
    begin: jax.Array  # i32[W]: the first place of the page to write
    end: jax.Array  # i32[W]: one past the last
    total: jax.Array  # i32[1]: how many entries there are


def write_kv(k, v, stored: StoredKV, batch: PagedBatch, *, interpret=False) -> StoredKV:
    """Stores what [`pallas_kernels.write_kv`][] does, in place if kv is donated; tokens without a block go nowhere."""
    kv, quantized = stored.kv, stored.format.is_quantized
    page_size = page_tokens(kv, stored.format.group_size)
    token_axes, rows = k.shape[:-2], batch.block_tables.shape[0]
    fits = page_size is not None and 0 < 5 * max_runs(token_axes, rows, page_size) <= SMEM_ENTRIES
    if quantized and (not fits or (nibbles.has_groups(stored) and not stored.is_packed)):
        return xla.write_kv(k, v, stored, batch)
    dtype = encodable(k.dtype) if quantized else kv.dtype
    if nibbles.has_groups(stored):
        halves = list(nibbles.split_tokens(k, stored, kv.shape[-1], axis=0))
    else:
        halves = [k, v] if stored.latent_rank is None else [k]
    halves = [pad(x, kv.shape[-1]).astype(dtype) for x in halves]
    if not fits:
        return stored.replace(scatter(kv, halves, batch), stored.scale)
    runs = find_runs(kv, token_axes, batch, page_size)
    flat = [x.reshape(-1, *x.shape[-2:]) for x in halves]
    return write(stored, flat, runs, page_size=page_size, interpret=interpret)


def page_tokens(kv, group_size: int | None = None) -> int | None:
    """Returns the tokens of a page of this pool, or None if no page fits the ring: then `scatter` writes.

    Args:
      group_size: of the pool's format, entries that share a scale: keys and values then come apart, and share bytes.
    """
    if kv.dtype not in (jnp.bfloat16, jnp.float32, jnp.int8, jnp.uint8):
        return None
    block_size, tile = kv.shape[3], page_tile(kv.dtype)
    pages = [n for n in range(tile, max(PAGE_TOKENS, tile) + 1, tile) if block_size % n == 0] or [block_size]
    return next((n for n in reversed(pages) if slots(kv, n, group_size) >= 2), None)


def slots(kv, page_size: int, group_size: int | None = None) -> int:
    """Returns how many pages the ring holds: a power of two."""
    count = RING_BYTES // _slot_bytes(kv, page_size, group_size)
    return min(SLOTS, 1 << (count.bit_length() - 1)) if count else 0


def _slot_bytes(kv, page_size: int, group_size: int | None) -> int:
    """Returns the vector memory of new tokens, and of the page before and after."""
    _, parts, num_kv_heads, _, head_dim = kv.shape
    quantized = kv.dtype.itemsize == 1
    lines = num_kv_heads * (1 if group_size is None else max(1, head_dim // group_size))
    sources = (parts if group_size is None else 2, page_size, num_kv_heads, head_dim)
    fresh = vector_bytes(sources, jnp.float32 if quantized else kv.dtype)
    scales = 2 * vector_bytes((2, lines, page_size), jnp.float32) if quantized else 0
    return fresh + 2 * vector_bytes((parts, num_kv_heads, page_size, head_dim), kv.dtype) + scales


def write_bytes(kv, group_size: int | None = None) -> int:
    """Returns the vector memory that the kernel takes, at most."""
    page_size = page_tokens(kv, group_size)
    if not page_size:
        return 0
    return SPILL_BYTES + slots(kv, page_size, group_size) * _slot_bytes(kv, page_size, group_size)


def max_runs(token_axes: tuple[int, ...], rows: int, page_size: int) -> int:
    """As many entries as a step's work list can have."""
    places = token_axes[-1]
    if len(token_axes) == 2:
        return rows * min(places, (places - 1) // page_size + 2)
    return min(places, places // page_size + 2 * rows)


def find_runs(kv, token_axes: tuple[int, ...], batch: PagedBatch, page_size: int) -> Runs:
    """The pages that a step writes. Whatever the arguments hold, nothing outside the tables and the tokens is named."""
    tables, kv_lens, query_lens, query_starts, _ = batch
    rows, blocks_per_row = tables.shape
    parts = kv.shape[3] // page_size
    places = token_axes[-1]
    if len(token_axes) == 2:
        query_starts = jnp.arange(rows, dtype=jnp.int32) * places
    elif query_starts is None:
        query_starts = default_offsets(query_lens)
    before = kv_lens - query_lens
    there = jnp.clip(query_lens, 0, places if len(token_axes) == 2 else places - query_starts)
    begin = jnp.maximum(before, 0)
    end = jnp.minimum(before + there, blocks_per_row * kv.shape[3])
    first = begin // page_size
    count = jnp.where(begin < end, -(-end // page_size) - first, 0)
    stop = jnp.cumsum(count)

    # Each entry picks its row's numbers by comparing and adding: a few dense operations in place of as many gathers.
    entry = jnp.arange(max_runs(token_axes, rows, page_size), dtype=jnp.int32)
    mine = (entry[:, None] >= (stop - count)[None]) & (entry[:, None] < stop[None])

    def of_row(x):
        return jnp.sum(jnp.where(mine, x[None], 0), axis=1, dtype=jnp.int32)

    page = of_row(first - (stop - count)) + entry
    start = page * page_size
    cell = of_row(jnp.arange(rows, dtype=jnp.int32) * blocks_per_row) + page // parts
    block = tables.reshape(-1)[jnp.clip(cell, 0, tables.size - 1)]
    writes = (entry < stop[-1]) & (block > 0) & (block < kv.shape[0])
    return Runs(
        jnp.where(writes, block, 0),
        page % parts,
        of_row(query_starts - before) + start,
        jnp.clip(of_row(begin) - start, 0, page_size),
        jnp.clip(of_row(end) - start, 0, page_size),
        jnp.minimum(stop[-1:], entry.size),
    )


def write(stored: StoredKV, new, runs: Runs, *, page_size: int, interpret=False) -> StoredKV:
    """Write keys and values (or latent rows alone), `[N, K, D']` in the pool's dtype, where `runs` says. The pool stays
    where it is if donated.

    For a quantized pool they are numbers as they came.
    """
    kv = stored.kv
    _, parts, num_kv_heads, _, head_dim = kv.shape
    depth = slots(kv, page_size, stored.format.group_size)
    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    page = pltpu.VMEM((depth, parts, num_kv_heads, page_size, head_dim), kv.dtype)
    pools, buffers = [kv], [page, page]
    if stored.format.is_quantized:
        pools.append(scales_along_lanes(stored))
        buffers += [pltpu.VMEM((depth, *pools[1].shape[1:3], page_size), pools[1].dtype)] * 2
    # From vector memory a copy would be a loop, a register a turn.
    new, pools = ([keep_in_hbm(x, interpret) for x in some] for some in (new, pools))
    written = pl.pallas_call(
        functools.partial(_kernel, page_size=page_size, block_size=kv.shape[3], stored=stored.replace(None)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(runs),
            grid=(1,),
            in_specs=[hbm] * (len(new) + len(pools)),
            out_specs=[hbm] * len(pools),
            scratch_shapes=[
                pltpu.VMEM((depth, len(new), page_size, num_kv_heads, head_dim), new[0].dtype),
                *buffers,
                pltpu.SemaphoreType.DMA((3, depth)),
            ],
        ),
        out_shape=[output(x.shape, x.dtype, x, *new) for x in pools],
        input_output_aliases={len(runs) + len(new) + i: i for i in range(len(pools))},
        cost_estimate=pl.CostEstimate(
            flops=0, transcendentals=0, bytes_accessed=2 * len(new) * new[0].size * new[0].dtype.itemsize
        ),
        compiler_params=compiler_params(write_bytes(kv, stored.format.group_size)),
        interpret=interpret,
        name="paged_write",
    )(*runs, *new, *pools)
    return stored.replace(written[0], scales_as_given(written[1], stored) if len(written) == 2 else stored.scale)


def _kernel(blocks, parts, tokens, begins, ends, total, *refs, page_size, block_size, stored):
    quantized = stored.format.is_quantized
    pools = 2 if quantized else 1  # keys and values, and their scales
    count = len(refs) - 2 * pools - 2 - 2 * pools  # keys and values: two, or of latent rows one
    sources, refs = refs[:count], refs[count:]
    targets, fresh, *buffers, semaphores = refs[pools : 2 * pools], *refs[2 * pools :]
    pages = list(zip(targets, buffers[::2], buffers[1::2], strict=True))  # where it goes, the old one, the one to be
    depth, count = fresh.shape[0], total[0]
    fetching, patching, sending = (semaphores.at[i] for i in range(3))

    def page(target, entry):
        whole = target.at[blocks[entry]]
        if page_size == block_size:
            return whole
        return whole.at[:, :, pl.ds(pl.multiple_of(parts[entry] * page_size, page_size), page_size)]

    def ragged(entry):
        return ends[entry] - begins[entry] < page_size

    def fetch(do, entry):
        slot, begin = entry & (depth - 1), begins[entry]
        size = ends[entry] - begin
        for which, source in enumerate(sources):
            run = source.at[pl.ds(tokens[entry] + begin, size)]
            target = fresh.at[slot, which, pl.ds(begin, size)]
            getattr(pltpu.make_async_copy(run, target, fetching.at[slot]), do)()

        @pl.when(ragged(entry))
        def _():
            for target, old, _ in pages:
                getattr(pltpu.make_async_copy(page(target, entry), old.at[slot], patching.at[slot]), do)()

    def send(do, entry):
        slot = entry & (depth - 1)
        for target, _, merged in pages:
            getattr(pltpu.make_async_copy(merged.at[slot], page(target, entry), sending.at[slot]), do)()

    def if_written(entry, do):
        pl.when((entry >= 0) & (entry < count))(lambda: pl.when(blocks[entry] > 0)(lambda: do(entry)))

    def store(entry, slot):
        if not nibbles.has_groups(stored):
            return store_pieces(entry, slot, PAGE_TOKENS)
        # Codes of four bits are searched for: of a few tokens in pieces of a register, of many where none waits.
        few = ends[entry] - begins[entry] <= FEW_TOKENS
        pl.when(few)(lambda: store_pieces(entry, slot, FEW_TOKENS))
        pl.when(~few)(lambda: store_pieces(entry, slot, PAGE_TOKENS))

    def store_pieces(entry, slot, some):
        for first in range(0, page_size, some):  # of a long page what is new, no more

            @pl.when((begins[entry] < first + some) & (ends[entry] > first))
            def _(first=first):
                these = pl.ds(first, some)
                of_numbers, of_scales = (merged for _, _, merged in pages)
                # What is packed cannot be turned and then unpacked.
                turned = [
                    jnp.swapaxes(fresh[slot, which, these].astype(jnp.float32), 0, 1) for which in range(len(sources))
                ]
                if nibbles.has_groups(stored):
                    numbers, each = nibbles.encode_pair(*turned, stored)
                    of_numbers[slot, 0, :, these] = numbers.astype(of_numbers.dtype)
                    for which, scales in enumerate(each):
                        lines = [x[head : head + 1] for head in range(numbers.shape[0]) for x in scales]
                        of_scales[slot, which, :, these] = jnp.concatenate(lines).astype(of_scales.dtype)
                    return
                # Both in one block of code: while sums over lanes are under way for the one, the other is divided.
                for which, x in enumerate(turned):
                    numbers, scales = quantize(x, stored)
                    of_numbers[slot, which, :, these] = numbers.astype(of_numbers.dtype)
                    lines = enumerate(scales) if stored.is_packed else [(which, jnp.concatenate(scales))]
                    for part, x in lines:
                        of_scales[slot, part, :, these] = x.astype(of_scales.dtype)

    def step(entry, _):
        slot = entry & (depth - 1)
        if_written(entry + depth - 1, functools.partial(fetch, "start"))  # the slot that the last step has emptied
        if_written(entry - depth, functools.partial(send, "wait"))

        @pl.when(blocks[entry] > 0)
        def _():
            fetch("wait", entry)
            if quantized:
                store(entry, slot)
            else:
                for which in range(len(sources)):
                    pages[0][2][slot, which] = jnp.swapaxes(fresh[slot, which], 0, 1)

            @pl.when(ragged(entry))
            def _():
                for _, old, merged in pages:
                    place = lax.broadcasted_iota(jnp.int32, merged.shape[1:], 2)
                    is_new = (place >= begins[entry]) & (place < ends[entry])
                    merged[slot] = jnp.where(is_new, merged[slot], old[slot])

            send("start", entry)

    pl.loop(0, depth - 1)(lambda entry: if_written(entry, functools.partial(fetch, "start")))
    lax.fori_loop(0, count, step, None)
    pl.loop(count - depth, count)(lambda entry: if_written(entry, functools.partial(send, "wait")))


def scatter(kv, parts, batch: PagedBatch):
    """The write in XLA, for pools that the kernel does not take: rows of the minor dimension to their places.

    A scatter of whole tokens, or of a part of the minor dimension, is less work on paper, but for many tokens XLA then
    turns the whole pool into another layout and back.
    """
    token_axes, num_heads, block_size = parts[0].shape[:-2], kv.shape[1] * kv.shape[2], kv.shape[3]
    token = jax.tree.map(jnp.ravel, locate(token_axes, *batch[1:4]))
    slots = find_slots(token, batch.block_tables, kv.shape[0], block_size)
    head = jnp.arange(num_heads, dtype=jnp.int32)[None]  # of the keys, then of the values
    place = (slots.block[:, None] * num_heads + head) * block_size + slots.offset[:, None]
    rows = kv.reshape(-1, kv.shape[-1])
    # What has no slot goes to places of its own past the pool's end, where it is dropped.
    dropped = rows.shape[0] + jnp.arange(place.size, dtype=jnp.int32).reshape(place.shape)
    place = jnp.where(slots.exists[:, None], place, dropped)
    values = jnp.stack(parts, axis=-3).reshape(place.size, kv.shape[-1])
    rows = rows.at[place.reshape(-1)].set(values, mode="drop", unique_indices=True)
    return rows.reshape(kv.shape)
