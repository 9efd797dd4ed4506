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
from pallas_kernels.tpu.write import write_kv

TILE_QUERIES = 512  # tokens x heads of a group: enough to hide the loading of keys
# Tokens x all heads, by how many tokens there may be: as many as make the loop of products long, of which the ends are
# not hidden; but of long tiles more lies above the diagonal, and rows of few tokens pay for all of one.
TILE_PRODUCTS = ((128, 4096), (256, 2048))


def attend(q, *step, **own):
    """Attention of a step whose keys and values are in the pool; arguments as of `attend_to_new`."""
    return attend_to_new(q, None, *step, **own)[0]


def attend_to_new(
    q,
    new,
    stored: StoredKV,
    batch: PagedBatch,
    mask: MaskSpec,
    options: SoftmaxOptions,
    *,
    interpret=False,
    step_tokens=None,
):
    """Attention of a step whose `new` keys and values are written first; None: they are in the pool.

    Rows of one token have them written by the kernel that reads them, which fetches their last page anyway; in a step
    of other rows beside them, those of heads that are quantized alone.

    Returns:
      `(out, the pool)` or `((out, lse), the pool)`.
    """
    own = dict(interpret=interpret, step_tokens=step_tokens)
    if not mask.causal:
        batch = drop_empty_rows(batch)
    if q.ndim == 4 and q.shape[1] == 1:
        return decode_step(q, stored, batch, mask, options, new=new, **own)
    residual_length = mask.residual_length or 0
    kv, (tables, kv_lens, query_lens, query_starts, _) = stored.kv, batch
    *token_axes, num_heads, head_dim = q.shape
    rows, width, deterministic = tables.shape[0], stored.value_dim(head_dim), options.deterministic
    if not q.size:
        q = q[..., :width]
        return ((q, jnp.zeros(q.shape[:-1], jnp.float32)) if options.return_lse else q), stored
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
    if decodes:
        at = jnp.clip(begin, 0, places - 1)
        new_kv = targets = None
        if new is not None:
            # To encode a token of several heads takes the write kernel longer than XLA to bring it here. What is plain
            # it just copies, and a latent row is one head.
            fuses = stored.format.is_quantized and stored.half_rank is None
            left = jnp.where(single & fuses, 0, batch.query_lens)
            others = batch._replace(query_lens=left, query_starts=begin)
            stored = write_kv(*new, stored, others, interpret=interpret)
            if fuses:
                tokens = [x if x is None else x.reshape(-1, *x.shape[-2:])[at] for x in new]
                new_kv, targets = _place_tokens(tokens, stored, batch.block_tables, batch.kv_lens - 1)
                targets = jnp.where(begin < places, targets, 0)
        alone = flat[at]
        if nibbles.has_groups(stored):
            alone = nibbles.spread_queries(alone, stored, kv.shape[-1])
        limits = jnp.where(single, kv_lens, 0)
        store = dict(new_kv=new_kv, targets=targets, residual_length=residual_length)
        alone, alone_lse, stored = decode(
            alone, stored, tables, limits, options, window_mask=window_mask, **store, **own
        )
    kv_lens = jnp.maximum(kv_lens - residual_length, 0)  # queries of more than a token stand as far ahead
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
    if options.return_lse:
        lse = gather_lse(lse, tiles, places)
    out = out[..., :width]
    if decodes:
        at = jnp.where(single & (begin < places), begin, places)  # the others are dropped
        out = out.at[at].set(alone[..., :width], mode="drop")
        lse = lse.at[at].set(alone_lse, mode="drop") if options.return_lse else None
    out = out.reshape(*q.shape[:-1], width)
    return (out, lse.reshape(q.shape[:-1])) if options.return_lse else out, stored


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
    new_kv = targets = None
    if nibbles.has_groups(stored):
        q = nibbles.spread_queries(nibbles.own_queries(q, stored), stored, kv.shape[-1])
    if new is not None:
        tokens = [x if x is None else x[:, 0] for x in new]
        new_kv, targets = _place_tokens(tokens, stored, tables, kv_lens - query_lens)
    out, lse, stored = decode(
        pad(q[:, 0], kv.shape[-1]),
        stored,
        jnp.clip(tables, 0, kv.shape[0] - 1),
        jnp.where(query_lens > 0, jnp.clip(kv_lens - query_lens + 1, 0, capacity), 0),
        dataclasses.replace(options, scale=options.logit_scale(head_dim)),
        window_mask=WindowMask.from_spec(mask, capacity),
        new_kv=new_kv,
        targets=targets,
        residual_length=mask.residual_length or 0,
        interpret=interpret,
        step_tokens=step_tokens,
    )
    out = out[:, None, :, : stored.value_dim(head_dim)]
    return (out, lse[:, None]) if options.return_lse else out, stored


def _place_tokens(new, stored: StoredKV, tables, position):
    """Returns what `decode` takes of a new token of each row, `[S, K, D]` and for joined rows None, and the blocks of
    their positions, 0 where there is none."""
    kv = stored.kv
    block_size, blocks_per_row = kv.shape[3], tables.shape[1]
    column = position // block_size
    block = jnp.take_along_axis(tables, jnp.clip(column, 0, blocks_per_row - 1)[:, None], axis=1)[:, 0]
    is_place = (position >= 0) & (column < blocks_per_row) & (block > 0) & (block < kv.shape[0])
    dtype = encodable(new[0].dtype) if stored.format.is_quantized else kv.dtype
    if nibbles.has_groups(stored):
        tokens = nibbles.split_tokens(new[0], stored, kv.shape[-1], axis=1)
    else:
        tokens = jnp.stack([x for x in new if x is not None], axis=1)
    return pad(tokens, kv.shape[-1]).astype(dtype), jnp.where(is_place, block, 0)


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
