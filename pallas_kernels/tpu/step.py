"""From a step's arguments to the kernels' and back: sorting rows, cutting tiles, padding heads. All on the device."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from pallas_kernels.common.batch import MaskSpec, PagedBatch, SoftmaxOptions, StoredKV
from pallas_kernels.common.masks import (
    MaskTiles,
    TokenMask,
    WindowMask,
    drop_empty_rows,
    find_token_mask,
    full_masks,
    tile_masks,
)
from pallas_kernels.common.ragged_layout import default_offsets, locate
from pallas_kernels.tpu import nibbles
from pallas_kernels.tpu.decode import decode
from pallas_kernels.tpu.pages import LANES, VMEM_BYTES, pad
from pallas_kernels.tpu.prefill import make_tiles, prefill, prefill_bytes
from pallas_kernels.tpu.quantize import encodable

TILE_QUERIES = 512  # tokens x heads of a group: enough to hide the loading of keys
# Tokens x all heads, by how many tokens there may be: as many as make the loop of products long, of which the ends are
# not hidden; but of long tiles more lies above the diagonal, and rows of few tokens pay for all of one.
TILE_PRODUCTS = ((128, 4096), (256, 2048))


def attend(
    q,
    stored: StoredKV,
    batch: PagedBatch,
    mask: MaskSpec,
    options: SoftmaxOptions,
    *,
    interpret=False,
    step_tokens=None,
):
    """Attention of a step whose keys and values are in the pool."""
    own = dict(interpret=interpret, step_tokens=step_tokens)
    if not mask.causal:
        batch = drop_empty_rows(batch)
    if q.ndim == 4 and q.shape[1] == 1:
        return decode_step(q, stored, batch, mask, options, **own)[0]
    kv, (tables, kv_lens, query_lens, query_starts, _) = stored.kv, batch
    *token_axes, num_heads, head_dim = q.shape
    rows, width, deterministic = tables.shape[0], stored.value_dim(head_dim), options.deterministic
    if not q.size:
        q = q[..., :width]
        return (q, jnp.zeros(q.shape[:-1], jnp.float32)) if options.return_lse else q
    kv_lens = jnp.clip(kv_lens, 0, tables.shape[1] * kv.shape[3])
    tables = jnp.clip(tables, 0, kv.shape[0] - 1)
    options = dataclasses.replace(options, scale=options.logit_scale(head_dim))
    window_mask = WindowMask.from_spec(mask, tables.shape[1] * kv.shape[3])

    q = nibbles.own_queries(q, stored)
    flat = pad(q.reshape(-1, num_heads, q.shape[-1]), kv.shape[-1])
    places = flat.shape[0]
    if q.ndim == 4:
        begin, query_lens = jnp.arange(rows, dtype=jnp.int32) * token_axes[1], jnp.minimum(query_lens, token_axes[1])
    else:
        begin = default_offsets(query_lens) if query_starts is None else query_starts
    decodes = mask.causal or deterministic  # a step of one token a row does, and T must not matter
    single = (query_lens == 1) & decodes
    groups = nibbles.count_groups(stored)
    size = tile_tokens(token_axes[-1], num_heads, kv, tables, q.dtype, deterministic, groups)
    # Queries that are not the row's own have no position: their tiles only number them. They come as many.
    lengths = kv_lens if mask.causal else query_lens
    seeing = jnp.minimum(query_lens, lengths)  # those before them, at negative positions, are as places of no token
    tiles = make_tiles(begin + query_lens - seeing, lengths, seeing, single, places=places, tile_tokens=size)
    mask_tiles = None
    if mask.by_token or not mask.causal:
        token_mask = None
        if mask.causal:
            token = jax.tree.map(jnp.ravel, locate(tuple(token_axes), kv_lens, query_lens, query_starts))
            tree, spans = (None if x is None else x.reshape(-1) for x in (mask.tree, mask.spans))
            token_mask = find_token_mask(token, kv_lens - query_lens, begin, token_axes[-1], window_mask, tree, spans)
        mask_tiles = _tile_masks(tiles, size, token_mask, kv_lens)
    out, lse = prefill(
        flat, stored, tables, tiles, options, tile_tokens=size, window_mask=window_mask, token_mask=mask_tiles, **own
    )
    if not decodes:
        out = out[..., :width].reshape(*q.shape[:-1], width)
        return (out, gather_lse(lse, tiles, places).reshape(q.shape[:-1])) if options.return_lse else out
    at = jnp.clip(begin, 0, places - 1)
    alone = flat[at]
    if nibbles.has_groups(stored):
        alone = nibbles.spread_queries(alone, stored, kv.shape[-1])
    alone, alone_lse, _ = decode(
        alone, stored, tables, jnp.where(single, kv_lens, 0), options, window_mask=window_mask, **own
    )
    at = jnp.where(single & (begin < places), begin, places)  # the others are dropped
    out = out[..., :width].at[at].set(alone[..., :width], mode="drop").reshape(*q.shape[:-1], width)
    if not options.return_lse:
        return out
    lse = gather_lse(lse, tiles, places).at[at].set(alone_lse, mode="drop")
    return out, lse.reshape(q.shape[:-1])


def _tile_masks(tiles, size: int, token_mask: TokenMask | None, lengths) -> MaskTiles:
    """What the tokens of each tile see; None: all of their row."""
    lane = jnp.arange(size, dtype=jnp.int32)[None]
    there = (lane < (tiles.limit - tiles.start)[:, None]) & (tiles.limit > 0)[:, None]
    if token_mask is None:
        return full_masks(lengths[tiles.row], there)
    return tile_masks(token_mask, tiles.token[:, None] + lane, there)


def gather_lse(lse, tiles, places: int):
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
    q,
    stored: StoredKV,
    batch: PagedBatch,
    mask: MaskSpec,
    options: SoftmaxOptions,
    *,
    new=None,
    interpret=False,
    step_tokens=None,
):
    """Attention of one padded token per row, `q [S, 1, H, D]`, whose `new` keys and values are written first.

    Returns:
      `(out, the pool)` or `((out, lse), the pool)`.
    """
    kv, (tables, kv_lens, query_lens, _, _), head_dim = stored.kv, batch, q.shape[-1]
    block_size = kv.shape[3]
    capacity = tables.shape[1] * block_size
    position = jnp.clip(kv_lens - query_lens, 0, capacity - 1)
    new_kv = targets = None
    if nibbles.has_groups(stored):
        q = nibbles.spread_queries(nibbles.own_queries(q, stored), stored, kv.shape[-1])
    if new is not None:
        block = jnp.take_along_axis(tables, position[:, None] // block_size, axis=1)[:, 0]
        targets = jnp.where((block > 0) & (block < kv.shape[0]), block, 0)
        tokens = jnp.stack([x[:, 0] for x in new if x is not None], axis=1)
        dtype = encodable(tokens.dtype) if stored.format.is_quantized else kv.dtype
        if nibbles.has_groups(stored):
            tokens = nibbles.split_tokens(new[0][:, 0], stored, kv.shape[-1], axis=1)
        new_kv = pad(tokens, kv.shape[-1]).astype(dtype)
    out, lse, stored = decode(
        pad(q[:, 0], kv.shape[-1]),
        stored,
        jnp.clip(tables, 0, kv.shape[0] - 1),
        jnp.where(query_lens > 0, jnp.clip(kv_lens - query_lens + 1, 0, capacity), 0),
        dataclasses.replace(options, scale=options.logit_scale(head_dim)),
        window_mask=WindowMask.from_spec(mask, capacity),
        new_kv=new_kv,
        targets=targets,
        interpret=interpret,
        step_tokens=step_tokens,
    )
    out = out[:, None, :, : stored.value_dim(head_dim)]
    return (out, lse[:, None]) if options.return_lse else out, stored


def tile_tokens(most: int, num_heads: int, kv, tables, dtype=None, deterministic: bool = False, groups: int = 1) -> int:
    """Tokens of a tile: a power of two, so that its queries fill whole registers; no more than `most` needs. If
    `deterministic`, they do not go by `most`, and are the fewer for it. `groups`: as of `decode_bytes`."""
    group = num_heads // kv.shape[2]
    tokens = max(LANES // math.gcd(group, LANES), 16)

    def fits(tokens: int) -> bool:
        need = prefill_bytes(tokens, num_heads, kv, tables, dtype, deterministic=deterministic, groups=groups)
        return need <= VMEM_BYTES

    limits = TILE_PRODUCTS[:1] if deterministic else TILE_PRODUCTS

    def is_small(tokens: int) -> bool:
        of_heads = any(tokens <= longest and tokens * num_heads <= products for longest, products in limits)
        return tokens * group <= TILE_QUERIES or of_heads

    while is_small(2 * tokens) and (deterministic or tokens < most) and fits(2 * tokens):
        tokens *= 2
    while tokens > 16 and not fits(tokens):
        tokens //= 2  # not all of a register's lanes are used then
    return tokens
