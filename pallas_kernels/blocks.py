"""For writers of kernels: where the tokens of a row lie in the pool.

A tile is a kernel's unit of work, some consecutive tokens of one row, for one KV head. It is one contiguous run
`[tile, head_dim]` of the pool as long as it does not cross a block.
"""

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl

KEYS, VALUES = 0, 1  # along axis 1 of a pool


def largest_tile(block_size: int, at_most: int) -> int:
    """The most tokens, up to `at_most`, of which a block holds a whole number of tiles: no tile crosses a block.

    >>> largest_tile(64, 128), largest_tile(64, 48), largest_tile(12, 8)
    (64, 32, 6)
    """
    if block_size < 1 or at_most < 1:
        raise ValueError(f"block_size and at_most must be at least 1, not {block_size} and {at_most}.")
    return next(tile for tile in range(min(block_size, at_most), 0, -1) if block_size % tile == 0)


def tile_index(tables: Any, row: Any, position: Any, *, which: int, head: Any, tile: int, block_size: int) -> tuple:
    """The index of one tile in a pool's ref: `kv_ref[index]` reads it, `kv_ref.at[index]` is what a copy takes.

    Args:
      tables: `i32[S, M]`, the ref of the block tables or the array.
      row, head: may be traced.
      position: the tile's first token in the row, a multiple of `tile`; may be traced.
      which: KEYS or VALUES.
      tile: tokens, a divisor of `block_size`: see `largest_tile`.

    Returns:
      An index whose result is `[tile, D]`.
    """
    if block_size % tile:
        raise ValueError(
            f"A tile of {tile} tokens crosses blocks of {block_size}: use {largest_tile(block_size, tile)} or "
            "another divisor."
        )
    return (tables[row, position // block_size], which, head, pl.ds(position % block_size, tile), slice(None))


def tma_transforms(head_dim: int, dtype: Any) -> tuple:
    """Returns how Mosaic GPU's bulk copies lay out a tile `[tile, head_dim]` in shared memory for the matrix unit.

    Raises:
      ValueError: a row of the tile is not a multiple of 32 bytes, which the hardware cannot swizzle.

    >>> tma_transforms(128, "bfloat16")
    (TilingTransform(tiling=(8, 64)), SwizzleTransform(swizzle=128))
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu  # not every machine needs it

    itemsize = jnp.dtype(dtype).itemsize
    swizzle = next((s for s in (128, 64, 32) if head_dim * itemsize % s == 0), None)
    if swizzle is None:
        raise ValueError(
            f"A token's {head_dim} elements of {itemsize} bytes are not a multiple of 32 bytes: pad the stored "
            "head_dim with CacheConfig(head_dim_multiple=...)."
        )
    return plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle)
