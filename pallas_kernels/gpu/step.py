"""A step of paged attention: prepare the operands, run the kernels, put their outputs back where the tokens lie."""

import jax.numpy as jnp

from pallas_kernels.gpu import decode, prefill, tuning, work
from pallas_kernels.gpu.support import kernel_head_dim
from pallas_kernels.gpu.tiles import InterpretParams, logit_scalars
from pallas_kernels.tokens import Tokens, default_offsets, locate


def paged_attention(
    q, kv, tables, lengths, new, *, offsets=None, kv_scale=None, scale=None, soft_cap=None, window=None, sinks=None,
    mask=None, return_lse=False, interpret: InterpretParams = None,
):  # fmt: skip
    """[`pallas_kernels.paged_attention`][] on a Hopper GPU, for what `unsupported` does not refuse.

    Rows with one new token take the decode kernels, which spread a row over the chip; rows with more take the prefill
    kernel, which shares keys and values among tokens. A step that can hold both runs both.

    `interpret` runs the kernels in Pallas's GPU interpreter, on any machine.
    """
    assert kv_scale is None and mask is None, "`unsupported` refuses them"
    if q.size == 0:
        return (q, jnp.zeros(q.shape[:-1], jnp.float32)) if return_lse else q
    token_axes, head_dim = q.shape[:-2], q.shape[-1]
    lengths = jnp.clip(lengths, 0, tables.shape[1] * kv.shape[3])  # so that no length reads past its row's table
    token = locate(token_axes, lengths, new, offsets)
    if q.ndim == 3:
        start = default_offsets(new) if offsets is None else offsets
    else:
        start = jnp.arange(q.shape[0], dtype=jnp.int32) * q.shape[1]
    q = q.reshape(-1, *q.shape[-2:])
    token = Tokens(*(x.reshape(-1) for x in token))

    scalars = logit_scalars(head_dim**-0.5 if scale is None else scale, soft_cap)
    options = dict(window=window, soft_cap=soft_cap is not None, interpret=interpret)
    at = jnp.clip(start, 0, q.shape[0] - 1)
    out, lse = _decode_rows(q[at], kv, tables, jnp.where(new == 1, lengths, 0), scalars, sinks, **options)
    if token_axes != (new.shape[0], 1):
        out, lse = out[token.row], lse[token.row]
        if token_axes[-1] > 1:
            many, many_lse = _prefill_rows(q, kv, tables, lengths, new, start, token, scalars, sinks, **options)
            alone = new[token.row] == 1
            out, lse = jnp.where(alone[:, None, None], out, many), jnp.where(alone[:, None], lse, many_lse)
        seen = token.valid & (token.position >= 0)
        out, lse = jnp.where(seen[:, None, None], out, jnp.zeros_like(out)), jnp.where(seen[:, None], lse, -jnp.inf)
    out, lse = out.reshape(*token_axes, *out.shape[1:]), lse.reshape(*token_axes, -1)
    return (out, lse) if return_lse else out


def _decode_rows(q, kv, tables, lengths, scalars, sinks, *, window, soft_cap, interpret):
    """Attention of one token a row, `[S, H, D]`, at the row's last position; rows of length 0 are left out.

    Returns:
      `[S, H, D]` and the LSE, `f32[S, H]`; 0 and -inf for rows that are left out.
    """
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = kv.shape[2]
    group = num_heads // num_kv_heads
    columns, padded_dim = -(-group // 8) * 8, kernel_head_dim(head_dim)
    plan = tuning.decode_plan(padded_dim, columns)

    q = q.reshape(num_rows, num_kv_heads, group, head_dim)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, columns - group), (0, padded_dim - head_dim)))
    items, first_item = work.decode_items(lengths, window, plan.tile.tokens, -(-plan.num_blocks // num_kv_heads))
    out, lse = decode.split(
        q, kv, tables, items, scalars, tile=plan.tile, window=window, soft_cap=soft_cap, interpret=interpret
    )
    if sinks is None:
        sinks = jnp.full((num_heads,), -jnp.inf)
    sinks = jnp.pad(sinks.astype(jnp.float32).reshape(num_kv_heads, group), ((0, 0), (0, columns - group)))
    out, lse = decode.merge(out, lse, first_item, sinks, dtype=q.dtype, interpret=interpret)
    out = out[:, :, :group, :head_dim].reshape(num_rows, num_heads, head_dim)
    return out, lse[:, :, :group].reshape(num_rows, num_heads)


def _prefill_rows(q, kv, tables, lengths, new, start, token, scalars, sinks, *, window, soft_cap, interpret):
    """Attention of the rows that have more than one new token.

    Args:
      q: `[N, H, D]`, where row s's tokens lie from `start[s]` on; token: where each of the N belongs.

    Returns:
      `[N, H, D]` and the LSE, `f32[N, H]`; anything for tokens of other rows, and for padding.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = kv.shape[2]
    group = num_heads // num_kv_heads
    plan = tuning.prefill_plan(kernel_head_dim(head_dim), kv.shape[3])
    item_tokens = prefill.QUERY_ROWS // group
    rows = min(new.shape[0], num_tokens // 2)  # that can have more than one token
    num_items = (num_tokens - rows) // item_tokens + rows
    new = jnp.where(new > 1, new, 0)
    items, index, first_item, place = work.prefill_items(lengths, new, window, item_tokens, num_items)

    # Gather each item's tokens, [W, tokens, K, group, D], into query rows, [W, K, tokens * group, D].
    at = (start[items[:, 0]] + index)[:, None] + jnp.arange(item_tokens, dtype=jnp.int32)[None]
    tiles = q.reshape(num_tokens, num_kv_heads, group, head_dim)[jnp.clip(at, 0, num_tokens - 1)]
    tiles = jnp.swapaxes(tiles, 1, 2).reshape(num_items, num_kv_heads, item_tokens * group, head_dim)
    used, padded_dim = item_tokens * group, kernel_head_dim(head_dim)
    tiles = jnp.pad(tiles, ((0, 0), (0, 0), (0, prefill.QUERY_ROWS - used), (0, padded_dim - head_dim)))
    out, lse = prefill.attend(
        tiles, kv, tables, items, scalars, group=group, tile=plan.tile, window=window, soft_cap=soft_cap,
        interpret=interpret,
    )  # fmt: skip

    # And back: each token from its item.
    nth = jnp.where(token.valid, token.position - (lengths - new)[token.row], 0)
    item = place[jnp.clip(first_item[token.row] + nth // item_tokens, 0, num_items - 1)]
    out = out[:, :, :used, :head_dim].reshape(num_items, num_kv_heads, item_tokens, group, head_dim)
    out = out[item, :, nth % item_tokens].reshape(num_tokens, num_heads, head_dim)
    lse = lse[:, :, :used].reshape(num_items, num_kv_heads, item_tokens, group)
    lse = lse[item, :, nth % item_tokens].reshape(num_tokens, num_heads)
    if sinks is not None:
        with_sink = jnp.logaddexp(lse, sinks.astype(jnp.float32)[None])
        out = (out.astype(jnp.float32) * jnp.exp(lse - with_sink)[..., None]).astype(out.dtype)
        lse = with_sink
    return out, lse
