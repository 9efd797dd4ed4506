"""Lists of work for thread blocks, built on the device from the rows' true lengths; no host ever reads them.

Their sizes are static, so a list may end in empty items, whose thread blocks return at once.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.gpu.tiles import walk_from
from pallas_kernels.sight import Reach, Sight, cut

WAVES = 4  # full loads of the chip to cut decode into, so that the last one, partly filled, costs little
FEW_TILES = 4  # an item shorter than this spends its time on starting: only what one wave needs is cut finer
MOST_ITEMS = 132  # of one row
FIXED_TILES = (
    8  # of an item that goes by its place in the row alone, at least; and at least that part of what is before
)


# What an item is: none, all of its row, or a part.
UNUSED, WHOLE, PART = 0, 1, 2


def decode_capacity(num_rows: int, wave: int, most_tiles: int) -> tuple[int, int]:
    """Items that `decode_items` has room for in all, and the most of one row: 1 where rows are never cut.

    The kernel that merges a row's items goes through them a few at a time, so a row gets about as many as fill the chip
    twice, and no more than one for each multiprocessor.
    """
    if most_tiles <= FEW_TILES:
        return num_rows, 1
    most = min(max(2 * wave, 64), MOST_ITEMS, most_tiles)
    return min(num_rows + WAVES * wave, num_rows * most), most


def fixed_edges(most_tiles: int) -> tuple[int, ...]:
    """Where the items of a row begin and end that is cut by position alone, in tiles of its walk: longer ones further
    on, so that a row of any length has some tens, and no item is much of it."""
    edges = [0]
    while edges[-1] < most_tiles:
        edges.append(edges[-1] + max(FIXED_TILES, edges[-1] // FIXED_TILES))
    return tuple(edges)


def decode_items(
    lengths: jax.Array, new: jax.Array, place: jax.Array, taken: jax.Array, reach: Reach, tile_tokens: int,
    wave: int, most_tiles: int, deterministic: bool = False,
) -> tuple[jax.Array, int]:  # fmt: skip
    """Cut the rows into items of about the same number of tiles, so that one long row spreads as widely as many short.

    With c tiles an item, rows of t tiles have ceil(t / c) items, in sum at most total / c and one more for each row.
    If `deterministic`, each row is cut at `fixed_edges`, whatever the others hold and the table has room for.

    Args:
      lengths, new: `i32[S]`; `new` is 0 for rows that have no token in the step, but whose places are to be written.
      place: `i32[S]`: the row's first token among the step's.
      taken: `bool[S]`: the rows to make items of.
      wave: the number of items that fill the chip once.
      most_tiles: of a row, as its table allows.

    Returns:
      items: `i32[W, 12]`, W of `decode_capacity`. In line w of item w: row, first tile of the walk (`tiles.walk_from`),
        tile to stop before, the row's length, new and place, and UNUSED, WHOLE or PART. Behind that, of the w-th row in
        parts: first item, item to stop before, row, place; and, in every line, how many such rows there are.
      most_cut: rows in parts, at most.
    """
    num_rows = lengths.shape[0]
    num_items, most = decode_capacity(num_rows, wave, most_tiles)
    edges = fixed_edges(most_tiles)
    if deterministic:
        most = len(edges) - 1
        num_items = num_rows * most
    most_cut = min(num_rows, num_items // 2) if most > 1 else 0
    first = jnp.maximum(reach.first(lengths - new), 0) // tile_tokens if reach.ends else jnp.zeros_like(lengths)
    first = walk_from(first, reach, tile_tokens)
    tiles = jnp.where(taken & (new > 0), jnp.maximum(-(-lengths // tile_tokens) - first, 0), 0)
    if deterministic:
        size = jnp.zeros_like(tiles)  # they have no one size
        count = jnp.sum(tiles[:, None] > jnp.asarray(edges[:-1], jnp.int32)[None], axis=1, dtype=jnp.int32)
    else:
        total = tiles.sum(dtype=jnp.int32)
        size = jnp.maximum(-(-total // (WAVES * wave)), jnp.minimum(-(-total // wave), FEW_TILES))
        count = jnp.minimum(-(-tiles // jnp.maximum(size, 1)), most)
        size = -(-tiles // jnp.maximum(count, 1))  # of each row's items, as even as can be
        count = -(-tiles // jnp.maximum(size, 1))
    count = jnp.where(taken, jnp.maximum(count, 1), 0)

    # [W, 12, S], summed over the rows: two kernels of XLA's in all, where gathers and a concatenation take more.
    shape = num_items, 12, num_rows
    item, column, row = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in range(3))
    first_item, nth_cut = _starts(count), _starts((count > 1).astype(jnp.int32))
    of_row = (first_item[:-1], first_item[1:], nth_cut[:-1], count, first, first + tiles, size, lengths, new, place)
    start, stop, nth_cut, count, first, end, size, lengths, new, place = (
        jax.lax.broadcast_in_dim(x, shape, [2]) for x in of_row
    )
    if deterministic:
        nth = jnp.clip(item - start, 0, most - 1)
        begin, after = (first + jnp.asarray(x, jnp.int32)[nth] for x in (edges[:-1], edges[1:]))
    else:
        begin = first + (item - start) * size
        after = begin + size
    is_cut = count > 1
    of_item = (row, begin, jnp.minimum(after, end), lengths, new, place, jnp.where(is_cut, PART, WHOLE))
    of_cut = (start, stop, row, place)
    its_own, its_cut = (item >= start) & (item < stop), is_cut & (item == nth_cut)
    values = jnp.where((column == 11) & is_cut, 1, 0)
    for i, value in enumerate((*of_item, *of_cut)):
        values = jnp.where((column == i) & (its_own if i < len(of_item) else its_cut), value, values)
    return values.sum(axis=2, dtype=jnp.int32), most_cut


def prefill_items(
    lengths: jax.Array, new: jax.Array, reach: Reach, item_tokens: int, num_items: int, tile_tokens: int,
    chunks: int, sight: Sight | None = None, begin: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array | None]:  # fmt: skip
    """Cut each row's new tokens into items of `item_tokens`, the one that sees the most first.

    Thread blocks start in the order of the list, so that the longest do not end it.

    Args:
      lengths, new: `i32[S]`; `new` is 0 for rows without work.
      num_items: W, at least the number of items.
      chunks: C, into which to cut what each item sees: few queries on a long context.
      sight: of the step's tokens, where what they see does not go by `reach` alone; then `begin`, `i32[S]`, says where
        each row's are.

    Returns:
      items: `i32[W, C, 5]`: row, position of the first token, and position to stop before (the same if empty); first
        tile of the walk (`tiles.walk_from`), and tile to stop before, of the chunk. With `sight` `i32[W, C, 7]`; see
        `prefill.attend`.
      index: `i32[W]`: each item's first token, counted from its row's first new one.
      first_item, place: `i32[S]`, `i32[W]`: token i of row s is in item `place[first_item[s] + i // item_tokens]`.
      sights: `i32[W, 3 + words, item_tokens]`, see `sight.Tiles`; or None.
    """
    first_item = _starts(-(-new // item_tokens))
    item = jnp.arange(num_items, dtype=jnp.int32)
    row = jnp.searchsorted(first_item[1:], item, side="right", method="compare_all").astype(jnp.int32)
    row, used = jnp.minimum(row, len(new) - 1), item < first_item[-1]
    index = jnp.where(used, (item - first_item[row]) * item_tokens, 0)
    start = lengths[row] - new[row] + index
    stop = jnp.where(used, jnp.minimum(start + item_tokens, lengths[row]), start)
    sights, sure = None, ()
    if sight is not None:
        lane = jnp.arange(item_tokens, dtype=jnp.int32)[None]
        tiles = cut(sight, (begin[row] + index)[:, None] + lane, lane < (stop - start)[:, None])
        start, stop, sights, sure = tiles.start, tiles.stop, tiles.tokens, tiles[3:]
        seen, reach = stop - start, Reach(1, None, reach.sink_tokens)  # what is seen begins at `start` itself
    else:
        most = reach.most(item_tokens + 1)
        seen = jnp.where(used, stop if most is None else jnp.minimum(stop, most), 0)
    order = jnp.argsort(-seen).astype(jnp.int32)
    place = jnp.zeros(num_items, jnp.int32).at[order].set(item, unique_indices=True)
    tile = jnp.maximum(reach.first(start), 0) // tile_tokens if reach.ends else jnp.zeros_like(start)
    tile = walk_from(tile, reach, tile_tokens)
    tiles = jnp.where(stop > jnp.maximum(start, 0), -(-stop // tile_tokens) - tile, 0)
    size = -(-tiles // chunks)
    item = jnp.stack([row, start, stop, tile, tiles, size, *sure], axis=1)[order]
    row, start, stop, tile, tiles, size, *sure = (
        jnp.broadcast_to(x, (num_items, chunks)) for x in jnp.split(item, item.shape[1], axis=1)
    )
    chunk = jax.lax.broadcasted_iota(jnp.int32, (num_items, chunks), 1)
    first, last = (jnp.minimum(n * size, tiles) + tile for n in (chunk, chunk + 1))
    sights = None if sights is None else sights[order]
    return jnp.stack([row, start, stop, first, last, *sure], axis=2), index[order], first_item[:-1], place, sights


def _starts(counts: jax.Array) -> jax.Array:
    """`i32[S + 1]`: where each row's items start, and the end of the last. Not a cumsum, which is two kernels."""
    shape = len(counts) + 1, len(counts)
    before = jax.lax.broadcasted_iota(jnp.int32, shape, 0) > jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    return jnp.where(before, jax.lax.broadcast_in_dim(counts, shape, [1]), 0).sum(axis=1, dtype=jnp.int32)
