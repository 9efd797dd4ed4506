"""Lists of work for thread blocks, built on the device from the rows' true lengths; no host ever reads them.

Their sizes are static, so a list may end in empty items, whose thread blocks return at once.
"""

import jax
import jax.numpy as jnp


def decode_items(
    lengths: jax.Array, window: int | None, tile_tokens: int, num_items: int
) -> tuple[jax.Array, jax.Array]:
    """Cut the rows into items of about the same number of tiles, as fine as `num_items` allows.

    With c tiles an item, rows of t tiles need the sum of ceil(t / c) <= total / c + S items: so c is the least with
    total / c <= num_items - S, and one long row is spread as widely as many short ones.

    Args:
      lengths: `i32[S]`, 0 for rows without work.
      num_items: W, more than S.

    Returns:
      items: `i32[W, 4]`: row, first tile, tile to stop before, and the row's length.
      first_item: `i32[S + 1]`: where each row's items start.
    """
    num_rows = lengths.shape[0]
    first = jnp.zeros_like(lengths) if window is None else jnp.maximum(lengths - window, 0) // tile_tokens
    stop = -(-lengths // tile_tokens)
    tiles = stop - first
    spare = num_items - num_rows
    size = jnp.maximum(-(-tiles.sum(dtype=jnp.int32) // spare), 1)
    first_item = _starts(-(-tiles // size))
    item = jnp.arange(num_items, dtype=jnp.int32)
    row = jnp.searchsorted(first_item[1:], item, side="right", method="compare_all").astype(jnp.int32)
    used = row < num_rows
    row = jnp.minimum(row, num_rows - 1)
    start = first[row] + (item - first_item[row]) * size
    end = jnp.where(used, jnp.minimum(start + size, stop[row]), start)
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
