"""What the kernels do with quantised pools: tiles of 8 bits widened in shared memory, and their scales.

A tile comes as it is stored, half the bytes, and becomes the matrix unit's 16-bit operand by way of registers. Beside
keys of 8 bits the matrix unit would want queries of 8 bits, and those would lose as much again as the keys have. Scales
come with the keys. A key's is applied to its logits and a value's to its weights, so that the products are exact.
"""

import itertools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.common.quantization import FLOATS, LARGEST, sound_scales
from pallas_kernels.gpu.tiles import LAYOUT, OPERAND, Tile

KINDS = ("int8", *FLOATS)
SCALES_AT_ONCE = 32  # a bulk copy into shared memory begins on 128 bytes


def slots_and_wide(stored, dtype, kind: str | None, tile: Tile, head_dim: int) -> tuple:
    """Shared memory for a ring of K's tiles, or V's; and for a kind a tile of each to multiply, and the scales."""
    shape = (tile.stages, tile.tokens, head_dim)
    if kind is None:
        return plgpu.SMEM(shape, dtype, transforms=OPERAND), ()
    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(64))  # type: ignore[abstract]
    wide = plgpu.SMEM(shape[1:], dtype, transforms=OPERAND)
    scales = plgpu.SMEM((tile.stages, 2, tile.tokens), jnp.float32)
    return plgpu.SMEM(shape, stored, transforms=transforms), (wide, wide, scales)


def arrivals(kind: str | None, pieces: int) -> tuple[int, int]:
    """Bulk copies that fill a slot of K, with the scales of both, and one of V."""
    return (pieces if kind is None else 3 * pieces), pieces


def load_scales(scales, kind: str) -> tuple:
    """A tile's scales `[2, tokens]`, of keys and of values, as one for each of its tokens as rows of a product."""
    return sound_scales(*(plgpu.load(scales.at[i], layout=LAYOUT.reduce(1)) for i in range(2)), kind)


def settle_scales(scales, kind: str) -> None:
    """The same in place, where tokens are columns: both would take more registers than there are."""
    scales.at[0][...], scales.at[1][...] = load_scales(scales, kind)


def widen(stored, wide, kind: str, *, share=0, shares: int = 1) -> None:
    """A tile as the matrix unit wants it. What no kernel stores, NaN and infinity, becomes 0.

    With `shares` warpgroups at it, each does the part that is its `share`.
    """
    tokens, head_dim = stored.shape
    # One swizzled tile at a time, for the registers' sake.
    for i, (token, column) in enumerate(itertools.product(range(0, tokens, 64), range(0, head_dim, 64))):

        @pl.when(share == i % shares)
        def _(token=token, column=column):
            part = (pl.ds(token, 64), pl.ds(column, 64))
            x = plgpu.load(stored.at[part], layout=plgpu.Layout.WGMMA_UPCAST_2X)
            if kind in FLOATS:
                x = jax.lax.bitcast_convert_type(x, jnp.dtype(kind)).astype(jnp.float32)
                x = jnp.where((x <= LARGEST[kind]) & (x >= -LARGEST[kind]), x, 0.0)
            wide.at[part][...] = plgpu.layout_cast(x.astype(wide.dtype), LAYOUT)
