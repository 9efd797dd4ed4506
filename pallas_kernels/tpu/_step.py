"""From a step's arguments to the kernels' and back: sorting rows, cutting tiles, padding heads. All on the device."""

import math

import jax
import jax.numpy as jnp

from pallas_kernels._tokens import default_offsets, locate
from pallas_kernels.tpu.decode import decode
from pallas_kernels.tpu.prefill import TILE_QUERIES, make_tiles, prefill


def attend(
    q, kv, tables, lengths, new, *, offsets=None, kv_scale=None, scale=None, mask=None, return_lse=False, interpret=False,
    **options,
):  # fmt: skip
    """Attention of a step whose keys and values are in the pool. Arguments as for `pallas_kernels.paged_attention`."""
    if q.ndim == 4 and q.shape[1] == 1:
        return decode_step(q, kv, tables, lengths, new, scale=scale, return_lse=return_lse, interpret=interpret, **options)[0]
    *token_axes, num_heads, head_dim = q.shape
    rows, num_kv_heads, stored = tables.shape[0], kv.shape[2], kv.shape[-1]
    group = num_heads // num_kv_heads
    lengths = jnp.clip(lengths, new, tables.shape[1] * kv.shape[3])
    tables = jnp.clip(tables, 0, kv.shape[0] - 1)
    token = locate(tuple(token_axes), lengths, new, offsets)
    options |= {"scale": head_dim**-0.5 if scale is None else scale, "return_lse": return_lse, "interpret": interpret}

    if q.ndim == 4:
        begin, most = jnp.arange(rows, dtype=jnp.int32) * q.shape[1], q.shape[1]
    else:
        begin, most = default_offsets(new) if offsets is None else offsets, q.shape[0]
    flat = q.reshape(-1, num_heads, head_dim)
    single = new == 1
    alone = flat[jnp.clip(begin, 0, flat.shape[0] - 1)]
    alone_out, alone_lse, _ = decode(pad(alone, stored), kv, tables, jnp.where(single, lengths, 0), **options)

    size = tile_tokens(group, most, num_kv_heads * stored * q.dtype.itemsize)
    if q.ndim == 4:
        max_tiles = rows * -(-most // size)
    else:
        max_tiles = most // size + min(rows, most // 2)  # only rows of two tokens or more have a last, partial tile
    tiles = make_tiles(lengths, jnp.where(single, 0, new), size, max(1, max_tiles))
    place = begin[tiles.row, None] + tiles.index[:, None] * size + jnp.arange(size, dtype=jnp.int32)
    tiled = pad(flat[jnp.clip(place, 0, flat.shape[0] - 1)], stored)  # [W, size, H, D']
    tiled = tiled.reshape(-1, size, num_kv_heads, group, stored).transpose(0, 2, 4, 3, 1)
    tiled = tiled.reshape(-1, num_kv_heads, stored, group * size)
    out, lse = prefill(tiled, kv, tables, tiles, tile_tokens=size, **options)

    since = token.position - (lengths - new)[token.row]  # the token's index in its row's part of the step
    tile = tiles.first[token.row] + since // size
    place = jnp.clip(tile * size + since % size, 0, tiles.row.shape[0] * size - 1)

    def untile(tiled, alone, nothing):  # [W, K, width, group * size], [S, H, width] -> [tokens, H, width]
        width = tiled.shape[2]
        tiled = tiled.reshape(-1, num_kv_heads, width, group, size).transpose(0, 4, 1, 3, 2)
        found = tiled.reshape(-1, num_heads, width)[place]
        found = jnp.where(single[token.row][..., None, None], alone[token.row], found)
        return jnp.where(token.valid[..., None, None], found, jnp.asarray(nothing, found.dtype))

    out = untile(out, alone_out, 0)[..., :head_dim]
    if not return_lse:
        return out
    return out, untile(lse, alone_lse[..., None], -jnp.inf)[..., 0]


def decode_step(
    q, kv, tables, lengths, new, *, k=None, v=None, offsets=None, kv_scale=None, scale=None, mask=None, return_lse=False,
    **options,
):  # fmt: skip
    """One padded token per row, `q [S, 1, H, D]`, written first where `k` and `v` are given.

    Returns:
      `(out, kv)` or `((out, lse), kv)`.
    """
    head_dim, stored = q.shape[-1], kv.shape[-1]
    block_size = kv.shape[3]
    position = jnp.clip(lengths - new, 0, tables.shape[1] * block_size - 1)
    if k is not None:
        block = jnp.take_along_axis(tables, position[:, None] // block_size, axis=1)[:, 0]
        options["targets"] = jnp.where((block >= 0) & (block < kv.shape[0]), block, -1)
        options["new_kv"] = pad(jnp.stack([k[:, 0], v[:, 0]], axis=1), stored).astype(kv.dtype)
    out, lse, kv = decode(
        pad(q[:, 0], stored), kv, jnp.clip(tables, 0, kv.shape[0] - 1), jnp.where(new > 0, position + 1, 0),
        scale=head_dim**-0.5 if scale is None else scale, return_lse=return_lse, **options,
    )  # fmt: skip
    out = out[:, None, :, :head_dim]
    return (out, lse[:, None]) if return_lse else out, kv


def tile_tokens(group: int, most: int, head_bytes: int) -> int:
    """Tokens of a tile: a power of two, so that a tile's queries fill whole registers."""
    least = 128 // math.gcd(group, 128)
    tokens = least
    while 2 * tokens * group <= TILE_QUERIES and 2 * tokens * group * head_bytes <= 4 * 2**20 and tokens < most:
        tokens *= 2
    return tokens


def pad(x: jax.Array, head_dim: int) -> jax.Array:
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, head_dim - x.shape[-1])])
