"""From a step's arguments to the kernels' and back: sorting rows, cutting tiles, padding heads. All on the device."""

import math

import jax
import jax.numpy as jnp

from pallas_kernels.common.masks import Reach, Sight, Tiles as SightTiles, cut, find_sight, of_rows_that_hold, see_all
from pallas_kernels.common.ragged_layout import default_offsets, locate
from pallas_kernels.tpu.decode import decode
from pallas_kernels.tpu.pages import LANES, VMEM_BYTES, pad
from pallas_kernels.tpu.prefill import make_tiles, prefill, prefill_bytes
from pallas_kernels.tpu.quantize import encodable

TILE_QUERIES = 512  # tokens x heads of a group: enough to hide the loading of keys
# Tokens x all heads, by how many tokens there may be: as many as make the loop of products long, of which the ends are
# not hidden; but of long tiles more lies above the diagonal, and rows of few tokens pay for all of one.
TILE_PRODUCTS = ((128, 4096), (256, 2048))


def attend(
    q, kv, tables, lengths, new, *, offsets=None, kv_scale=None, kind=None, rank=None, scale=None, mask=None,
    window=None, chunk=None, sink_tokens=None, tree=None, spans=None, causal=True, return_lse=False,
    interpret=False, deterministic=False, **options,
):  # fmt: skip
    """Attention of a step whose keys and values are in the pool. Arguments as for `pallas_kernels.paged_attention`."""
    if not causal:
        new, offsets = of_rows_that_hold(lengths, new, offsets)
    if q.ndim == 4 and q.shape[1] == 1:
        return decode_step(
            q, kv, tables, lengths, new, kv_scale=kv_scale, kind=kind, rank=rank, scale=scale, window=window,
            chunk=chunk, sink_tokens=sink_tokens, return_lse=return_lse, interpret=interpret,
            deterministic=deterministic, **options,
        )[0]  # fmt: skip
    *token_axes, num_heads, head_dim = q.shape
    rows, stored = tables.shape[0], kv.shape[-1]
    width = head_dim if rank is None else rank  # of the values
    if not q.size:
        q = q[..., :width]
        return (q, jnp.zeros(q.shape[:-1], jnp.float32)) if return_lse else q
    lengths = jnp.clip(lengths, new if causal else 0, tables.shape[1] * kv.shape[3])
    tables = jnp.clip(tables, 0, kv.shape[0] - 1)
    options |= {"scale": head_dim**-0.5 if scale is None else scale, "return_lse": return_lse, "interpret": interpret}
    options |= {"kv_scale": kv_scale, "kind": kind, "deterministic": deterministic}
    reach = Reach.within(tables.shape[1] * kv.shape[3], window, chunk, sink_tokens)

    flat = pad(q.reshape(-1, num_heads, head_dim), stored)
    places = flat.shape[0]
    if q.ndim == 4:
        begin, new = jnp.arange(rows, dtype=jnp.int32) * token_axes[1], jnp.minimum(new, token_axes[1])
    else:
        begin = default_offsets(new) if offsets is None else offsets
    decodes = causal or deterministic  # a step of one token a row does, and T must not matter
    single = (new == 1) & decodes
    size = tile_tokens(token_axes[-1], num_heads, kv, tables, q.dtype, deterministic)
    # Queries that are not the row's own have no position: their tiles only number them. They come as many.
    tiles = make_tiles(begin, lengths if causal else new, new, single, places=places, tile_tokens=size)
    sees: dict = {"reach": reach}
    if not causal or any(x is not None for x in (chunk, tree, spans)):
        sight = None
        if causal:
            token = jax.tree.map(jnp.ravel, locate(tuple(token_axes), lengths, new, offsets))
            tree, spans = (None if x is None else x.reshape(-1) for x in (tree, spans))
            sight = find_sight(token, lengths - new, begin, token_axes[-1], reach, tree, spans)
        sees["sight"] = _sight_of_tiles(tiles, size, sight, lengths)
    out, lse = prefill(flat, kv, tables, tiles, tile_tokens=size, rank=rank, **sees, **options)
    if not decodes:
        out = out[..., :width].reshape(*q.shape[:-1], width)
        return (out, by_token(lse, tiles, places).reshape(q.shape[:-1])) if return_lse else out
    at = jnp.clip(begin, 0, places - 1)
    alone, alone_lse, *_ = decode(
        flat[at], kv, tables, jnp.where(single, lengths, 0), rank=rank, reach=reach, **options
    )
    at = jnp.where(single & (begin < places), begin, places)  # the others are dropped
    out = out[..., :width].at[at].set(alone[..., :width], mode="drop").reshape(*q.shape[:-1], width)
    if not return_lse:
        return out
    lse = by_token(lse, tiles, places).at[at].set(alone_lse, mode="drop")
    return out, lse.reshape(q.shape[:-1])


def _sight_of_tiles(tiles, size: int, sight: Sight | None, lengths) -> SightTiles:
    """What the tokens of each tile see; None: all of their row."""
    lane = jnp.arange(size, dtype=jnp.int32)[None]
    there = (lane < (tiles.limit - tiles.start)[:, None]) & (tiles.limit > 0)[:, None]
    if sight is None:
        return see_all(lengths[tiles.row], there)
    return cut(sight, tiles.token[:, None] + lane, there)


def by_token(lse, tiles, places: int):
    """From `[tiles, H, tile_tokens]` to `[places, H]`; each token is in one tile, or in none."""
    count, num_heads, size = lse.shape
    # Each token looks for its tile by comparing: to scatter whole tiles costs a TPU more.
    tile = jnp.arange(count, dtype=jnp.int32)[None]
    lane = jnp.arange(places, dtype=jnp.int32)[:, None] - tiles.token[None]
    mine = (lane >= 0) & (lane < (tiles.limit - tiles.start)[None]) & (tile < tiles.total)
    at = jnp.sum(jnp.where(mine, tile * size + lane, 0), axis=1)
    found = lse.swapaxes(1, 2).reshape(-1, num_heads)[at]
    return jnp.where(mine.any(axis=1)[:, None], found, 0)


def decode_step(
    q, kv, tables, lengths, new, *, k=None, v=None, offsets=None, kv_scale=None, kind=None, rank=None, scale=None,
    mask=None, window=None, chunk=None, sink_tokens=None, tree=None, spans=None, causal=True, return_lse=False,
    **options,
):  # fmt: skip
    """One padded token per row, `q [S, 1, H, D]`, written first where `k` and `v` are given.

    Returns:
      `(out, kv)` or `((out, lse), kv)`; of a quantised pool `(kv, kv_scale)` in kv's place.
    """
    head_dim, stored = q.shape[-1], kv.shape[-1]
    block_size = kv.shape[3]
    capacity = tables.shape[1] * block_size
    position = jnp.clip(lengths - new, 0, capacity - 1)
    if k is not None:
        block = jnp.take_along_axis(tables, position[:, None] // block_size, axis=1)[:, 0]
        options["targets"] = jnp.where((block > 0) & (block < kv.shape[0]), block, 0)
        tokens = jnp.stack([x[:, 0] for x in (k, v) if x is not None], axis=1)
        options["new_kv"] = pad(tokens, stored).astype(kv.dtype if kind is None else encodable(tokens.dtype))
    out, lse, kv, kv_scale = decode(
        pad(q[:, 0], stored), kv, jnp.clip(tables, 0, kv.shape[0] - 1), jnp.where(new > 0, position + 1, 0),
        kv_scale=kv_scale, kind=kind, rank=rank, scale=head_dim**-0.5 if scale is None else scale,
        reach=Reach.within(capacity, window, chunk, sink_tokens), return_lse=return_lse, **options,
    )  # fmt: skip
    out = out[:, None, :, : head_dim if rank is None else rank]
    return (out, lse[:, None]) if return_lse else out, kv if kind is None else (kv, kv_scale)


def tile_tokens(most: int, num_heads: int, kv, tables, dtype=None, deterministic: bool = False) -> int:
    """Tokens of a tile: a power of two, so that its queries fill whole registers; no more than `most` needs. If
    `deterministic`, they do not go by `most`, and are the fewer for it."""
    group = num_heads // kv.shape[2]
    tokens = max(LANES // math.gcd(group, LANES), 16)

    def fits(tokens: int) -> bool:
        return prefill_bytes(tokens, num_heads, kv, tables, dtype, deterministic=deterministic) <= VMEM_BYTES

    limits = TILE_PRODUCTS[:1] if deterministic else TILE_PRODUCTS

    def is_small(tokens: int) -> bool:
        of_heads = any(tokens <= longest and tokens * num_heads <= products for longest, products in limits)
        return tokens * group <= TILE_QUERIES or of_heads

    while is_small(2 * tokens) and (deterministic or tokens < most) and fits(2 * tokens):
        tokens *= 2
    while tokens > 16 and not fits(tokens):
        tokens //= 2  # not all of a register's lanes are used then
    return tokens
