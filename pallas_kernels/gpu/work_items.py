"""Lists of work for thread blocks, built on the device from the rows' true lengths; no host ever reads them.

Their sizes are static, so a list may end in empty items, whose thread blocks return at once.
"""

import itertools
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.masks import TokenMask, WindowMask, tile_masks
from pallas_kernels.gpu.tiles import LAYOUT, InterpretParams, store, walk_from

FEW_TILES = 4  # a row shorter than this would spend its time on parts' starting
MOST_ITEMS = 132  # of one row
WAVES = 2  # how often items fill the chip, about, at most: the last load, partly filled, must cost little
# Of an item that goes by its place in its row alone, at least; and at least such a part of what is before.
FIXED_TILES = 8
LINES = 64  # of the list of work that a thread block writes, rows that it sums over together, and sizes it tries
ROWS_AT_ONCE = 32  # that it makes items of, for the registers' sake
MOST_COST = (1 << 25) - 1  # that is told from more
MOST_ROWS = 16_384  # of a step: three numbers of each in a multiprocessor's shared memory


# What an item is: none, all of its row, or a part.
UNUSED, WHOLE, PART = 0, 1, 2


def most_wanted(num_rows: int, wave: int) -> int:
    """Returns how many items rows are cut into at most, if they divided into them evenly. Those of one row are all as
    long: more than begin at once would only wait."""
    return wave if num_rows == 1 else WAVES * wave


def decode_capacity(num_rows: int, wave: int, most_tiles: int) -> tuple[int, int]:
    """Items that `decode_items` has room for in all, and the most of one row: 1 where rows are never cut.

    The kernel that merges a row's items goes through them a few at a time, so a row gets about as many as fill the chip
    twice, and no more than one for each multiprocessor.
    """
    if most_tiles <= FEW_TILES:
        return num_rows, 1
    most = min(max(2 * wave, 64), MOST_ITEMS, most_tiles)
    return min(num_rows + most_wanted(num_rows, wave), num_rows * most), most


def fixed_edges(most_tiles: int) -> tuple[int, ...]:
    """Returns the edges of a row's items, in tiles of its walk, where they depend on positions alone. Later items are
    longer: a row of any length has some tens of items, and none is a large share of it."""
    edges = [0]
    while edges[-1] < most_tiles:
        edges.append(edges[-1] + max(FIXED_TILES, edges[-1] // FIXED_TILES))
    return tuple(edges)


class Cutting(NamedTuple):
    """How `decode_items` cuts rows."""

    capacity: int  # tokens that a row's table has room for: no more of its length counts
    window_mask: WindowMask
    tile_tokens: int
    wave: int  # the number of items that fill the chip once
    most_tiles: int  # of a row, as its table allows; less than a million
    part_tiles: int = 1  # what an item costs beside its tiles, in tiles
    deterministic: bool = False


def decode_items(
    lengths: jax.Array,
    new: jax.Array,
    start: jax.Array | int,
    cutting: Cutting,
    *,
    alone_of: int | None,
    interpret: InterpretParams = None,
) -> tuple[jax.Array, int, int]:
    """Cut the rows into items of about the same number of tiles, so that one long row spreads as widely as many short.

    With c tiles an item, rows of t tiles have ceil(t / c) items, each row's as even as possible: in sum at most
    total / c and one more for each row. Of 64 sizes c that one is taken with which the chip is done first, on paper.
    An item costs its tiles and `part_tiles` more, and each multiprocessor takes the next as soon as it is free. So n
    items are done after ceil(n / wave) of the longest one; and also after an even share of all costs, and the longest
    one. The first is nearer where rows are equal, and wants few parts that fill the chip; the second where they differ.

    If `deterministic`, each row is cut at `fixed_edges`, whatever the others hold and the table has room for.

    One kernel, for sums that depend on one another are a launch each in XLA: five for 32 rows. Each thread block sums
    over all rows for `LINES` items, the rows along one axis of the matrix unit's tile or the other.

    Args:
      lengths, new: `i32[S]`; `new` is 0 for rows that have no token in the step, but whose places are to be written.
      start: `i32[S]`: the row's first token among the step's; or for how many tokens each row has room.
      alone_of: None makes items of all rows; a number, of those with one new token that is among so many.

    Returns:
      items: `i32[W, 12]`, and lines behind those that are for no use. In line w of item w: row, first tile of the walk
        (`tiles.walk_from`), tile to stop before, the row's length, new and start, and UNUSED, WHOLE or PART. Behind
        that, of the w-th row in parts: first item, item to stop before, row, start; and, in every line, how many such
        rows there are.
      num_items, most_cut: W, of `decode_capacity`; and rows in parts, at most.
    """
    capacity, window_mask, tile_tokens, wave, most_tiles, part_tiles, deterministic = cutting
    num_rows = lengths.shape[0]
    num_items, most = decode_capacity(num_rows, wave, most_tiles)
    edges = fixed_edges(most_tiles) if deterministic else ()
    if deterministic:
        most = len(edges) - 1
        num_items = num_rows * most
    most_cut = min(num_rows, num_items // 2) if most > 1 else 0
    chunks, blocks = -(-num_rows // LINES), -(-num_items // LINES)
    batches = -(-num_rows // ROWS_AT_ONCE)
    given = (lengths, new) if isinstance(start, int) else (lengths, new, start)
    sizes = LINES, ROWS_AT_ONCE  # along the axes

    def paged_decode_plan(*refs):
        *sources, items_ref, rows_s, ready = refs
        none, all_chunks = jnp.int32(0), jnp.int32(chunks)

        @pl.loop(none, all_chunks)
        def load(i):  # beyond the last row come zeros
            span = pl.ds(i * LINES, LINES)
            for nth, source in enumerate(sources):
                plgpu.copy_gmem_to_smem(source.at[span], rows_s.at[nth, span], ready)

        plgpu.barrier_wait(ready)

        def rows(begin, axis):
            """Returns rows along an axis: their numbers, whether they are taken, and their fields."""
            layout = LAYOUT.reduce(1 - axis)
            span = pl.ds(begin, sizes[axis])
            row = plgpu.broadcasted_iota(jnp.int32, (sizes[axis],), 0, layout=layout) + begin
            length, count, *begin = (plgpu.load(rows_s.at[nth, span], layout=layout) for nth in range(len(given)))
            length, begin = jnp.clip(length, 0, capacity), begin[0] if begin else row * start
            taken = row < num_rows
            if alone_of is not None:
                taken = taken & (count == 1) & (begin >= 0) & (begin < alone_of)
            zero = jnp.zeros_like(length)
            first = (
                lax.div(jnp.maximum(window_mask.first(length - count), 0), jnp.int32(tile_tokens))
                if window_mask.ends
                else zero
            )
            first = walk_from(first, window_mask, tile_tokens)
            tiles = jnp.maximum(lax.div(length + (tile_tokens - 1), jnp.int32(tile_tokens)) - first, 0)
            return row, taken, length, count, begin, first, jnp.where(taken & (count > 0), tiles, zero)

        def wide(x, axis):
            return lax.broadcast_in_dim(x, sizes, [axis])

        def along(x, axis):
            return x.sum(axis=axis, dtype=jnp.int32)

        def where(seen, x, otherwise=0):
            return jnp.where(seen, jnp.int32(x), jnp.int32(otherwise))

        def nothing(axis):
            return plgpu.layout_cast(jnp.zeros((sizes[axis],), jnp.int32), LAYOUT.reduce(1 - axis))

        def divide_up(x, divisor: int):
            return lax.div(x + (divisor - 1), jnp.int32(divisor))

        def up(x, divisor):
            """Returns x / divisor, rounded up, of whole floats below 2^20, which take fewer instructions: half of one
            less is as far from where it would be rounded to another number as a float of it must be."""
            return lax.round((x - 0.5) / divisor + 0.5, lax.RoundingMethod.TO_NEAREST_EVEN)

        def even(tiles, size):
            """Returns, in floats, how many items rows are cut into if none is longer than that, and how long they are
            if as even as possible."""
            tiles = tiles.astype(jnp.float32)
            count = jnp.clip(up(tiles, size), 1.0, most)
            return count, jnp.maximum(up(tiles, count), 1.0)

        def find_size():
            """Returns the size of items, the same for each line and each row. Each line tries one."""

            def add(i, total):
                return total + along(wide(rows(i * ROWS_AT_ONCE, 1)[-1], 1), 1)

            def cut_so(i, carry):
                num, longest = carry
                _, taken, *_, tiles = rows(i * ROWS_AT_ONCE, 1)
                count, size = even(wide(tiles, 1), wide(tried_size, 0))
                num += jnp.where(wide(taken, 1), count, 0.0).sum(axis=1)
                return num, jnp.maximum(longest, size.max(axis=1))

            total = lax.fori_loop(none, jnp.int32(batches), add, nothing(0))
            tried = plgpu.broadcasted_iota(jnp.int32, (LINES,), 0, layout=LAYOUT.reduce(1))
            wanted = jnp.maximum(lax.div((tried + 1) * most_wanted(num_rows, wave), jnp.int32(LINES)), 1)
            tried_size = jnp.clip(lax.div(total + (wanted - 1), wanted), 1, most_tiles).astype(jnp.float32)
            num, longest = (nothing(0).astype(jnp.float32) for _ in range(2))
            num, longest = lax.fori_loop(none, jnp.int32(batches), cut_so, (num, longest))
            num, longest = num.astype(jnp.int32), longest.astype(jnp.int32) + part_tiles
            in_turns = divide_up(num, wave) * longest
            cost = jnp.minimum(in_turns, divide_up(total + num * part_tiles, wave) + longest)
            # Of sizes that cost the same the largest, which is tried first.
            best = wide(jnp.minimum(cost, MOST_COST) * LINES + tried, 0).min(axis=0)
            best = wide(best & (LINES - 1), 1) == wide(tried, 0)
            size = jnp.where(best, wide(tried_size, 0), 0.0).max(axis=0)
            return wide(size, 1).max(axis=1), size

        item_sizes = (None, None) if deterministic else find_size()

        def cut(tiles, taken, item_size):
            """Returns tiles per item, the number of items, and whether there is more than one."""
            if deterministic:  # they have no one size
                size, count = tiles, sum(where(tiles > edge, 1) for edge in edges[:-1])
            else:
                _, size = even(tiles, item_size)
                count = up(tiles.astype(jnp.float32), size).astype(jnp.int32)
                size = size.astype(jnp.int32)
            count = jnp.where(taken, jnp.maximum(count, 1), 0)
            return size, count, where(count > 1, 1)

        def part(nth, size):
            """Returns the first tile and the end of the nth item of a row, counted from the row's first tile."""
            if not deterministic:
                return nth * size, (nth + 1) * size
            steps = [after - before for before, after in itertools.pairwise(edges)]
            begin = sum(where(nth > i, step) for i, step in enumerate(steps))
            return begin, begin + sum(where(nth == i, step) for i, step in enumerate(steps))

        line, nth = (plgpu.broadcasted_iota(jnp.int32, sizes, axis, layout=LAYOUT) for axis in range(2))
        own_line = line + lax.axis_index("block") * LINES

        def fill(i, carry):
            values, before = carry
            _, taken, *_, tiles = rows(i * LINES, 0)
            above = [wide(x, 0) for x in cut(tiles, taken, item_sizes[0])[1:]]

            def fill_some(j, values):
                row, taken, length, new, begin, first, tiles = rows(i * LINES + j * ROWS_AT_ONCE, 1)
                size, count, is_cut = cut(tiles, taken, item_sizes[1])
                earlier = line < nth + j * ROWS_AT_ONCE
                start, nth_cut = (b + along(jnp.where(earlier, x, 0), 0) for b, x in zip(before, above, strict=True))
                stop, kind = start + count, where(is_cut > 0, PART, WHOLE)
                its_own = (own_line >= wide(start, 1)) & (own_line < wide(stop, 1))
                its_cut = (wide(is_cut, 1) > 0) & (own_line == wide(nth_cut, 1))
                of_item = row, start, size, first, first + tiles, length, new, begin, kind
                found = [jnp.where(its_own, wide(x, 1), 0) for x in of_item]
                found += [jnp.where(its_cut, wide(x, 1), 0) for x in (start, stop, row, begin)]
                return [x + along(y, 1) for x, y in zip(values, [*found, wide(is_cut, 1)], strict=True)]

            values = lax.fori_loop(none, jnp.int32(min(batches, LINES // ROWS_AT_ONCE)), fill_some, values)
            return values, [b + along(x, 0) for b, x in zip(before, above, strict=True)]

        values, _ = lax.fori_loop(none, all_chunks, fill, ([nothing(0)] * 14, [nothing(1)] * 2))
        of_row, its_first, size, tile, end, *others = values
        its_line = plgpu.broadcasted_iota(jnp.int32, (LINES,), 0, layout=LAYOUT.reduce(1))
        spans = part(its_line + lax.axis_index("block") * LINES - its_first, size)
        values = of_row, *(jnp.minimum(tile + edge, end) for edge in spans), *others
        for column, value in enumerate(values):
            store(items_ref.at[pl.ds(lax.axis_index("block") * LINES, LINES), column], value)

    call = plgpu.kernel(
        paged_decode_plan,
        out_type=jax.ShapeDtypeStruct((blocks * LINES, 12), jnp.int32),
        grid=(blocks,),
        grid_names=("block",),
        scratch_types=[
            plgpu.SMEM((len(given), chunks * LINES), jnp.int32),
            plgpu.Barrier(num_arrivals=len(given) * chunks),
        ],
        interpret=interpret,
    )
    plan = jax.custom_batching.custom_vmap(call)

    @plan.def_vmap
    def plan_of_many(size, batched, *given):  # bulk copies want each to begin at a multiple of 16 bytes
        given = (
            x if its_own else jnp.broadcast_to(x, (size, num_rows)) for x, its_own in zip(given, batched, strict=True)
        )
        return jax.vmap(call)(*(jnp.pad(x, ((0, 0), (0, -num_rows % 4))) for x in given)), True

    return plan(*given), num_items, most_cut


def prefill_items(
    lengths: jax.Array,
    new: jax.Array,
    begin: jax.Array,
    window_mask: WindowMask,
    item_tokens: int,
    num_items: int,
    tile_tokens: int,
    chunks: int,
    token_mask: TokenMask | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Cut each row's new tokens into items of `item_tokens`, the one that sees the most first.

    Thread blocks start in the order of the list, so that the longest do not end it.

    Args:
      lengths, new: `i32[S]`; `new` is 0 for rows without work.
      begin: `i32[S]`: where each row's tokens are among the step's.
      num_items: W, at least the number of items.
      chunks: C, into which to cut what each item sees: few queries on a long context.
      token_mask: of the step's tokens, where what they see does not go by `window_mask` alone.

    Returns:
      items: `i32[W, C, 7]`: row, position of the first token, and position to stop before (the same if empty); first
        tile of the walk (`tiles.walk_from`), and tile to stop before, of the chunk; where the first token is among the
        step's, and how many there are. With `token_mask` `i32[W, C, 9]`; see `prefill.attend`.
      first_item, place: `i32[S]`, `i32[W]`: token i of row s is in item `place[first_item[s] + i // item_tokens]`.
      token_masks: `i32[W, 3 + words, item_tokens]`, see `masks.MaskTiles`; or None.
    """
    first_item = _starts(-(-new // item_tokens))
    item = jnp.arange(num_items, dtype=jnp.int32)
    row = jnp.searchsorted(first_item[1:], item, side="right", method="compare_all").astype(jnp.int32)
    row, used = jnp.minimum(row, len(new) - 1), item < first_item[-1]
    index = jnp.where(used, (item - first_item[row]) * item_tokens, 0)
    start = lengths[row] - new[row] + index
    stop = jnp.where(used, jnp.minimum(start + item_tokens, lengths[row]), start)
    at, count = begin[row] + index, stop - start
    token_masks, sure = None, ()
    if token_mask is not None:
        lane = jnp.arange(item_tokens, dtype=jnp.int32)[None]
        tiles = tile_masks(token_mask, at[:, None] + lane, lane < count[:, None])
        start, stop, token_masks, sure = tiles.start, tiles.stop, tiles.tokens, tiles[3:]
        stop = jnp.minimum(stop, lengths[row])  # a row of queries alone has no first key
        seen, window_mask = (
            stop - start,
            WindowMask(1, None, window_mask.sink_tokens),
        )  # what is seen begins at `start` itself
    else:
        most = window_mask.most(item_tokens + 1)
        seen = jnp.where(used, stop if most is None else jnp.minimum(stop, most), 0)
    order = jnp.argsort(-seen).astype(jnp.int32)
    place = jnp.zeros(num_items, jnp.int32).at[order].set(item, unique_indices=True)
    tile = jnp.maximum(window_mask.first(start), 0) // tile_tokens if window_mask.ends else jnp.zeros_like(start)
    tile = walk_from(tile, window_mask, tile_tokens)
    tiles = jnp.where(stop > jnp.maximum(start, 0), -(-stop // tile_tokens) - tile, 0)
    size = -(-tiles // chunks)
    item = jnp.stack([row, start, stop, tile, tiles, size, at, count, *sure], axis=1)[order]
    row, start, stop, tile, tiles, size, *others = (
        jnp.broadcast_to(x, (num_items, chunks)) for x in jnp.split(item, item.shape[1], axis=1)
    )
    chunk = jax.lax.broadcasted_iota(jnp.int32, (num_items, chunks), 1)
    first, last = (jnp.minimum(n * size, tiles) + tile for n in (chunk, chunk + 1))
    token_masks = None if token_masks is None else token_masks[order]
    return jnp.stack([row, start, stop, first, last, *others], axis=2), first_item[:-1], place, token_masks


def bits(flags: jax.Array) -> jax.Array:
    """`i32[..., 2]`: up to 64 flags in the last axis, the first in the lowest bit of the first word."""
    flags = jnp.pad(flags.astype(jnp.int32), [(0, 0)] * (flags.ndim - 1) + [(0, 64 - flags.shape[-1])])
    flags = flags.reshape(*flags.shape[:-1], 2, 32)
    return (flags << jax.lax.broadcasted_iota(jnp.int32, flags.shape, flags.ndim - 1)).sum(axis=-1, dtype=jnp.int32)


def _starts(counts: jax.Array) -> jax.Array:
    """`i32[S + 1]`: where each row's items start, and the end of the last. Not a cumsum, which is two kernels."""
    shape = len(counts) + 1, len(counts)
    before = jax.lax.broadcasted_iota(jnp.int32, shape, 0) > jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    return jnp.where(before, jax.lax.broadcast_in_dim(counts, shape, [1]), 0).sum(axis=1, dtype=jnp.int32)
