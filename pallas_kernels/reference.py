"""The definition of paged attention and of the cache write, in plain `jnp` and float32.

Written to be checked by eye, not to be fast: every token gets its own dense copy of its row's keys and values. Every
other backend is tested against this file.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.common.batch import (
    MaskSpec,
    PagedBatch,
    SoftmaxOptions,
    StoredKV,
    bundle_call,
    leave_out_newest,
)
from pallas_kernels.common.ragged_layout import default_offsets, locate


def paged_attention(q, kv, tables, lengths, new, **options: Any) -> Any:
    """Computes what [`pallas_kernels.paged_attention`][] means. Arguments and options as there."""
    call = bundle_call(q=q, kv=kv, tables=tables, lengths=lengths, new=new, **options)
    return attend(q, call.stored, *leave_out_newest(call.batch, call.mask), call.options)


def write_kv(kv, k, v, tables, lengths, new, **options: Any) -> Any:
    """Stores what [`pallas_kernels.write_kv`][] does. Arguments and options as there."""
    call = bundle_call(kv=kv, tables=tables, lengths=lengths, new=new, **options)
    return store(k, v, call.stored, call.batch).pools


def dense(
    kv: jax.Array,
    tables: jax.Array,
    kv_scale: jax.Array | None = None,
    kind: str | None = None,
    head_dim: int | None = None,
    rank: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns keys and values of every row laid out densely, float32 `[S, C, K, D]` with
    `C = max_blocks_per_seq * block_size`. With `rank` the values are the first so many numbers of the keys.

    What lies past a row's length is whatever its blocks hold.
    """
    return read_rows(StoredKV.bundle(kv, kv_scale, kind, rank), tables, head_dim)


def read_rows(stored: StoredKV, tables: jax.Array, head_dim: int | None) -> tuple[jax.Array, jax.Array]:
    """`dense` of a bundled pool."""
    stored = stored.join_scales()
    kv, kv_scale, rank = stored.kv, stored.scale, stored.latent_rank
    blocks = kv[tables]  # [S, M, 2, K, block_size, D]
    if stored.is_packed:  # a scale as keys, and one as values
        blocks = jnp.concatenate([blocks, blocks], axis=2)
    if stored.format.is_quantized:
        assert kv_scale is not None
        blocks = stored.format.decode(blocks, kv_scale[tables], head_dim or blocks.shape[-1], stored.half_rank, axis=2)
    elif kv_scale is not None:
        blocks = blocks.astype(jnp.float32) * kv_scale[tables][..., None]
    blocks = blocks.astype(jnp.float32)
    if blocks.shape[2] == 1:
        blocks = jnp.concatenate([blocks, blocks], axis=2)
    keys, values = jnp.moveaxis(blocks, 2, 0)  # [S, M, K, block_size, D] each
    rows, num_blocks, heads, block_size, head_dim = keys.shape

    def flatten(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x, 2, 3).reshape(rows, num_blocks * block_size, heads, head_dim)

    return flatten(keys), flatten(values)[..., :rank]


@jax.jit
def attend(q, stored: StoredKV, batch: PagedBatch, spec: MaskSpec, options: SoftmaxOptions) -> Any:
    """`paged_attention` of bundled arguments."""
    *token_axes, num_heads, head_dim = q.shape
    tables, lengths, new, offsets, _ = batch
    window, chunk, sink_tokens, _, compress_ratio, causal, mask, spans, tree, blocks, tokens = (
        getattr(spec, field.name) for field in dataclasses.fields(spec)
    )
    soft_cap, sinks, alibi, return_lse = options.soft_cap, options.sinks, options.alibi, options.return_lse
    scale = options.logit_scale(head_dim)
    token = locate(tuple(token_axes), lengths, new, offsets)
    keys, values = (x[..., :head_dim] for x in read_rows(stored, tables, head_dim))
    context = jnp.arange(keys.shape[1]).reshape(*[1] * len(token_axes), -1)

    # Where each token and each place of its row stand, [tokens, 1] and [tokens, C].
    position, place = token.position[..., None], jnp.broadcast_to(context, (*token_axes, context.shape[-1]))
    before = (lengths - new)[token.row][..., None]
    is_new = (place >= before) & (place < lengths[token.row][..., None])
    index = _places_of(token, before, place, offsets, new)  # of the token at each place, where it is new
    if compress_ratio is not None:  # a place holds an entry, which stands where the last of its tokens does
        place = place * compress_ratio + compress_ratio - 1
    # Of a row with more queries than tokens the first sit at negative positions, before all places: they see nothing.
    seen = place <= position if causal else place < lengths[token.row][..., None]
    if tree is not None:
        depth, ancestors = _climb(tree, token, before[..., 0], index)
        seen = (place < before) | ancestors
        position, place = before + depth[..., None], jnp.where(is_new, before + depth.reshape(-1)[index], place)
    if window is not None:
        seen &= (place > position - window) | (place < (sink_tokens or 0))
    if chunk is not None:
        seen &= place >= position // chunk * chunk
    if spans is not None:
        seen |= is_new & (spans[..., None] != 0) & (spans[..., None] == spans.reshape(-1)[index])
    if blocks is not None:  # what does not increase is not there
        highest = jax.lax.cummax(jnp.pad(blocks, ((0, 0), (1, 0)), constant_values=-1)[:, :-1], axis=1)
        listed = jnp.where(blocks > highest, blocks, -1)
        seen &= (context[..., None] // stored.kv.shape[3] == listed[token.row][..., None, :]).any(axis=-1)
    if tokens is not None:
        seen &= (context[..., None] == tokens[..., None, :]).any(axis=-1)
    seen &= token.valid[..., None]
    if mask is not None:
        in_mask = jnp.zeros(seen.shape, bool).at[..., : mask.shape[-1]].set(mask[..., : seen.shape[-1]])
        seen &= in_mask

    distance = jnp.abs(position - place).astype(jnp.float32)

    def one_token(q, row, seen, distance):  # [H, D], [], [C], [C]
        # What is not seen may hold anything, NaN included, and 0 * NaN is NaN: select it away on both sides.
        k, v = (jnp.where(seen[:, None, None], x[row], 0.0) for x in (keys, values))
        group = num_heads // k.shape[1]
        k, v = (jnp.repeat(x, group, axis=1) for x in (k, v))  # [C, H, D]
        logits = jnp.einsum("hd,chd->hc", q.astype(jnp.float32), k, precision="highest") * scale
        if soft_cap is not None:
            logits = soft_cap * jnp.tanh(logits / soft_cap)
        if alibi is not None:
            logits -= alibi.astype(jnp.float32)[:, None] * distance[None]
        logits = jnp.where(seen[None], logits, -jnp.inf)
        if sinks is not None:  # one more place to attend to, which has no value
            sink = jnp.where(seen.any(), sinks.astype(jnp.float32), -jnp.inf)
            logits = jnp.concatenate([logits, sink[:, None]], axis=1)
        lse = jax.nn.logsumexp(logits, axis=1)
        weights = jnp.where(jnp.isneginf(lse)[:, None], 0.0, jnp.exp(logits - lse[:, None]))
        return jnp.einsum("hc,chd->hd", weights[:, : k.shape[0]], v, precision="highest"), lse

    for _ in token_axes:
        one_token = jax.vmap(one_token)
    out, lse = one_token(q, token.row, seen, distance)
    out = out.astype(q.dtype)
    return (out, lse) if return_lse else out


def _places_of(token, before, place, offsets, new):
    """`i32[tokens, C]`: which of the step's tokens, counted through, stands at each place of a token's row."""
    if token.row.ndim == 2:
        start = token.row[..., None] * token.row.shape[1]
    else:
        start = (default_offsets(new) if offsets is None else offsets)[token.row][..., None]
    return jnp.clip(start + place - before, 0, token.row.size - 1)


def _climb(tree, token, before, index):
    """Depths `[tokens]`, and `bool[tokens, C]`: the token itself and its ancestors. One by one: parents come first."""
    axes, (_, position, valid, before, parents) = tree.shape, map(jnp.ravel, (*token, before, tree))
    index = index.reshape(parents.shape[0], -1)
    context = jnp.arange(index.shape[1], dtype=jnp.int32)
    first = jnp.arange(parents.shape[0], dtype=jnp.int32) - (position - before)  # of the row, among all tokens

    def visit(i, found):
        depth, ancestors = found
        itself = (context == position[i]) & valid[i]
        has_parent = valid[i] & (parents[i] >= 0) & (before[i] + parents[i] < position[i])
        parent = jnp.clip(first[i] + parents[i], 0, parents.shape[0] - 1)
        depth = depth.at[i].set(jnp.where(has_parent, depth[parent] + 1, 0))
        return depth, ancestors.at[i].set(itself | (has_parent & ancestors[parent]))

    start = jnp.zeros_like(parents), jnp.zeros(index.shape, bool)
    depth, ancestors = jax.lax.fori_loop(0, parents.shape[0], visit, start)
    return depth.reshape(axes), ancestors.reshape(*axes, -1)


@jax.jit
def store(k: Any, v: Any, stored: StoredKV, batch: PagedBatch) -> StoredKV:
    """`write_kv` of bundled arguments: token by token, in a loop."""
    kv, kv_scale, format = stored.kv, stored.scale, stored.format
    tables, lengths, new, offsets, _ = batch
    token_axes = k.shape[:-2]
    token = locate(token_axes, lengths, new, offsets)
    if format.is_quantized:  # each token and head by itself: the same write, once for the numbers, once for the scales
        assert kv_scale is not None
        k_scale: Any
        v_scale: Any = None
        if stored.packed_rank is not None:
            k, k_scale, v_scale = format.encode_packed(k, kv_scale.dtype, stored.packed_rank)
        elif v is None:
            k, k_scale = format.encode(k, kv_scale.dtype, stored.latent_rank)
        else:
            (k, v), (k_scale, v_scale) = format.encode(jnp.stack([k, v]), kv_scale.dtype, axis=0)
        minor = kv_scale.shape[4:] or (1,)
        k_scale, v_scale = (None if x is None else x.reshape(*k.shape[:-1], *minor) for x in (k_scale, v_scale))
        scales = store(k_scale, v_scale, StoredKV(kv_scale.reshape(*kv_scale.shape[:4], *minor)), batch).kv
        return stored.replace(store(k, v, StoredKV(kv), batch).kv, scales.reshape(kv_scale.shape))
    block_size, head_dim = kv.shape[3], k.shape[-1]
    tokens = jnp.stack([k] if v is None else [k, v], axis=-3)  # [..., 2, K, D]; a latent row is stored once
    tokens, row, position, valid = (
        x.reshape(-1, *x.shape[len(token_axes) :]) for x in (tokens, token.row, token.position, token.valid)
    )

    def write(i, kv):
        column = position[i] // block_size
        block = tables[row[i], column]
        place = (block, slice(None), slice(None), position[i] % block_size, slice(0, head_dim))
        is_reserved = (column >= 0) & (column < tables.shape[1]) & (block > 0) & (block < kv.shape[0])
        return kv.at[place].set(jnp.where(valid[i] & is_reserved, tokens[i].astype(kv.dtype), kv[place]))

    return stored.replace(jax.lax.fori_loop(0, row.shape[0], write, kv), stored.scale)
