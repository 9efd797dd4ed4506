"""Lists of work for thread blocks, built on the device from the rows' true lengths; no host ever reads them.

Their sizes are static, so a list may end in empty items, whose thread blocks return at once.
"""

import jax
import jax.numpy as jnp

WAVES = 4  # full loads of the chip to cut decode into, so that the last one, partly filled, costs little
FEW_TILES = 4  # an item shorter than this spends its time on starting: only what one wave needs is cut finer
MOST_ITEMS = 132  # of one row


def decode_capacity(num_rows: int, wave: int) -> tuple[int, int]:
    """Items that `decode_items` has room for in all, and the most of one row.

    The kernel that merges a row's items goes through them a few at a time, so a row gets about as many as fill the chip
    twice, and no more than one for each multiprocessor.
    """
    most = min(max(2 * wave, 64), MOST_ITEMS)
    return min(num_rows + WAVES * wave, num_rows * most), most


def decode_items(lengths: jax.Array, window: int | None, tile_tokens: int, wave: int) -> tuple[jax.Array, jax.Array]:
    """Cut the rows into items of about the same number of tiles, so that one long row spreads as widely as many short.

    With c tiles an item, rows of t tiles have ceil(t / c) items, in sum at most total / c and one more for each row.

    Args:
      lengths: `i32[S]`, 0 for rows without work.
      wave: the number of items that fill the chip once.

    Returns:
      items: `i32[W, 4]`: row, first tile, tile to stop before, and the row's length. W is of `decode_capacity`.
      first_item: `i32[S + 1]`: where each row's items start.
    """
    num_rows = lengths.shape[0]
    num_items, most = decode_capacity(num_rows, wave)
    first = jnp.zeros_like(lengths) if window is None else jnp.maximum(lengths - window, 0) // tile_tokens
    stop = -(-lengths // tile_tokens)
    tiles = stop - first
    total = tiles.sum(dtype=jnp.int32)
    size = jnp.maximum(-(-total // (WAVES * wave)), jnp.minimum(-(-total // wave), FEW_TILES))
    count = jnp.minimum(-(-tiles // jnp.maximum(size, 1)), most)
    size = -(-tiles // jnp.maximum(count, 1))  # of each row's items, as even as can be
    first_item = _starts(-(-tiles // jnp.maximum(size, 1)))
    item = jnp.arange(num_items, dtype=jnp.int32)
    row = jnp.searchsorted(first_item[1:], item, side="right", method="compare_all").astype(jnp.int32)
    used = row < num_rows
    row = jnp.minimum(row, num_rows - 1)
    start = first[row] + (item - first_item[row]) * size[row]
    end = jnp.where(used, jnp.minimum(start + size[row], stop[row]), start)
    return jnp.stack([row, start, end, lengths[row]], axis=1), first_item


def prefill_items(
    lengths: jax.Array, new: jax.Array, window: int | None, item_tokens: int, num_items: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Cut each row's new tokens into items of `item_tokens`, the one that sees the most first.

    Thread blocks start in the order of the list, so that the longest do not end it.

    Args:
      lengths, new: `i32[S]`; `new` is 0 for rows without work.
      num_items: W, at least the number of items.

    Returns:
      items: `i32[W, 3]`: row, position of the first token, and position to stop before (the same if empty).
      index: `i32[W]`: each item's first token, counted from its row's first new one.
      first_item, place: `i32[S]`, `i32[W]`: token i of row s is in item `place[first_item[s] + i // item_tokens]`.
    """
    num_rows = lengths.shape[0]
    first_item = _starts(-(-new // item_tokens))
    item = jnp.arange(num_items, dtype=jnp.int32)
    row = jnp.searchsorted(first_item[1:], item, side="right", method="compare_all").astype(jnp.int32)
    used = row < num_rows
    row = jnp.minimum(row, num_rows - 1)
    index = jnp.where(used, (item - first_item[row]) * item_tokens, 0)
    start = lengths[row] - new[row] + index
    stop = jnp.where(used, jnp.minimum(start + item_tokens, lengths[row]), start)
    seen = jnp.where(used, stop if window is None else jnp.minimum(stop, window + item_tokens), 0)
    order = jnp.argsort(-seen).astype(jnp.int32)
    place = jnp.zeros(num_items, jnp.int32).at[order].set(item, unique_indices=True)
    return jnp.stack([row, start, stop], axis=1)[order], index[order], first_item[:-1], place


def _starts(counts: jax.Array) -> jax.Array:
    """`i32[S + 1]`: where each row's items start, and the end of the last."""
    return jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])
