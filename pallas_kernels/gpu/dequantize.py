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

from pallas_kernels.common.quantization import StorageFormat
from pallas_kernels.gpu.tiles import LAYOUT, OPERAND, Tile

FORMATS = ("int8", "float8_e4m3fn", "float8_e5m2")
SCALES_AT_ONCE = 32  # a bulk copy into shared memory begins on 128 bytes


def slots_and_wide(storage_dtype, dtype, format: StorageFormat, tile: Tile, head_dim: int) -> tuple:
    """Shared memory for a ring of K's tiles, or V's; and if quantized a tile of each to multiply, and the scales."""
    shape = (tile.stages, tile.tokens, head_dim)
    if not format.is_quantized:
        return plgpu.SMEM(shape, dtype, transforms=OPERAND), ()
    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(64))  # type: ignore[abstract]
    wide = plgpu.SMEM(shape[1:], dtype, transforms=OPERAND)
    scales = plgpu.SMEM((tile.stages, 2, tile.tokens), jnp.float32)
    return plgpu.SMEM(shape, storage_dtype, transforms=transforms), (wide, wide, scales)


def arrivals(format: StorageFormat, pieces: int) -> tuple[int, int]:
    """Bulk copies that fill a slot of K, with the scales of both, and one of V."""
    return (3 * pieces if format.is_quantized else pieces), pieces


def load_scales(scales, format: StorageFormat) -> tuple:
    """A tile's scales `[2, tokens]`, of keys and of values, as one for each of its tokens as rows of a product."""
    return format.hide_bad_scales(*(plgpu.load(scales.at[i], layout=LAYOUT.reduce(1)) for i in range(2)))


def settle_scales(scales, format: StorageFormat) -> None:
    """The same in place, where tokens are columns: both would take more registers than there are."""
    scales.at[0][...], scales.at[1][...] = load_scales(scales, format)


def widen(stored, wide, format: StorageFormat, *, share=0, shares: int = 1) -> None:
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
            if format.float8 is not None:
                x = jax.lax.bitcast_convert_type(x, format.declared_dtype).astype(jnp.float32)
                x = jnp.where((x <= format.largest) & (x >= -format.largest), x, 0.0)
            wide.at[part][...] = plgpu.layout_cast(x.astype(wide.dtype), LAYOUT)
