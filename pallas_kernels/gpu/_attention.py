"""A step of paged attention: prepare the operands, run the kernels, put their outputs back where the tokens lie."""

import jax
import jax.numpy as jnp

from pallas_kernels.gpu import _decode, _tuning, _work
from pallas_kernels.gpu._support import kernel_head_dim
from pallas_kernels.gpu._tiles import InterpretParams, logit_scalars


def paged_attention(
    q, kv, tables, lengths, new, *, offsets=None, kv_scale=None, scale=None, soft_cap=None, window=None, sinks=None,
    mask=None, return_lse=False, interpret: InterpretParams = None,
):  # fmt: skip
    """[`pallas_kernels.paged_attention`][] on a Hopper GPU, for what `unsupported` does not refuse.

    `interpret` runs the kernels in Pallas's GPU interpreter, on any machine.
    """
    lengths = jnp.clip(lengths, 0, tables.shape[1] * kv.shape[3])  # so that no length reads past its row's table
    scalars = logit_scalars(q.shape[-1] ** -0.5 if scale is None else scale, soft_cap)
    options = dict(window=window, soft_cap=soft_cap is not None, interpret=interpret)
    rows = jnp.where(new > 0, lengths, 0)
    out, lse = decode(q[:, 0], kv, tables, rows, scalars, sinks, **options)
    out, lse = out[:, None], lse[:, None]
    return (out, lse) if return_lse else out


def decode(q, kv, tables, lengths, scalars, sinks, *, window, soft_cap, interpret):
    """Attention of one token a row, `[S, H, D]`, at the row's last position; rows of length 0 are left out.

    Returns:
      `[S, H, D]` and the LSE, `f32[S, H]`.
    """
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = kv.shape[2]
    group = num_heads // num_kv_heads
    columns, padded_dim = -(-group // 8) * 8, kernel_head_dim(head_dim)
    plan = _tuning.decode_plan(padded_dim, columns)
    max_tiles = -(-tables.shape[1] * kv.shape[3] // plan.tile.tokens)
    num_items = num_rows + min(-(-plan.num_blocks // num_kv_heads), num_rows * max_tiles)

    q = q.reshape(num_rows, num_kv_heads, group, head_dim)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, columns - group), (0, padded_dim - head_dim)))
    items, first_item = _work.decode_items(lengths, window, plan.tile.tokens, num_items)
    out, lse = _decode.split(
        q, kv, tables, items, scalars, tile=plan.tile, window=window, soft_cap=soft_cap, interpret=interpret
    )
    out, lse = _decode.merge(
        out, lse, first_item, _sinks(sinks, num_kv_heads, columns), dtype=q.dtype, interpret=interpret
    )
    out = out[:, :, :group, :head_dim].reshape(num_rows, num_heads, head_dim)
    return out, lse[:, :, :group].reshape(num_rows, num_heads)


def _sinks(sinks, num_kv_heads: int, columns: int) -> jax.Array:
    """`f32[K, columns]`: the sinks of each KV head's query heads, -inf where there is none."""
    if sinks is None:
        return jnp.full((num_kv_heads, columns), -jnp.inf)
    sinks = sinks.astype(jnp.float32).reshape(num_kv_heads, -1)
    return jnp.pad(sinks, ((0, 0), (0, columns - sinks.shape[1])), constant_values=-jnp.inf)
