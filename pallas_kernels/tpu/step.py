"""From a step's arguments to the kernels' and back: sorting rows, cutting tiles, padding heads. All on the device."""

import math

import jax.numpy as jnp

from pallas_kernels.tokens import default_offsets, locate
from pallas_kernels.tpu.decode import decode
from pallas_kernels.tpu.pages import LANES, pad
from pallas_kernels.tpu.prefill import make_tiles, prefill

WINDOW_QUERIES = 512  # tokens x heads of a group: enough to hide the loading of keys
WINDOW_BYTES = 4 * 2**20  # of a window's queries: they are buffered twice, and so is their output


def attend(
    q, kv, tables, lengths, new, *, offsets=None, kv_scale=None, scale=None, mask=None, return_lse=False,
    interpret=False, **options,
):  # fmt: skip
    """Attention of a step whose keys and values are in the pool. Arguments as for `pallas_kernels.paged_attention`."""
    if q.ndim == 4 and q.shape[1] == 1:
        return decode_step(
            q, kv, tables, lengths, new, scale=scale, return_lse=return_lse, interpret=interpret, **options
        )[0]
    *token_axes, num_heads, head_dim = q.shape
    rows, num_kv_heads, stored = tables.shape[0], kv.shape[2], kv.shape[-1]
    group = num_heads // num_kv_heads
    lengths = jnp.clip(lengths, new, tables.shape[1] * kv.shape[3])
    tables = jnp.clip(tables, 0, kv.shape[0] - 1)
    token = locate(tuple(token_axes), lengths, new, offsets)
    options |= {"scale": head_dim**-0.5 if scale is None else scale, "return_lse": return_lse, "interpret": interpret}

    places = token_axes[-1]
    size = window_tokens(group, places, num_kv_heads * stored * q.dtype.itemsize)
    q = pad(pad(q, stored), -(-places // size) * size, axis=-3)
    flat = q.reshape(-1, num_heads, stored)
    if q.ndim == 4:  # every row has windows of its own
        begin, shared = jnp.arange(rows, dtype=jnp.int32) * q.shape[1], 0
    else:  # a row of two tokens or more may share the window that it starts in
        begin, shared = default_offsets(new) if offsets is None else offsets, min(rows, places // 2)
    num_windows = flat.shape[0] // size

    single = new == 1
    alone = flat[jnp.clip(begin, 0, flat.shape[0] - 1)]
    alone_out, alone_lse, _ = decode(alone, kv, tables, jnp.where(single, lengths, 0), **options)
    tiles = make_tiles(
        begin, lengths, jnp.where(single, 0, new),
        window_tokens=size, num_windows=num_windows, max_tiles=num_windows + shared,
    )  # fmt: skip
    windows = flat.reshape(num_windows, size, num_kv_heads, group, stored).transpose(0, 2, 4, 3, 1)
    out, lse = prefill(windows, kv, tables, tiles, **options)

    def unite(windows, alone, nothing):  # [windows, K, width, G, size] and [S, H, width] -> [tokens, H, width]
        together = windows.transpose(0, 4, 1, 3, 2).reshape(*q.shape[:-1], -1)[..., :places, :, :]
        together = jnp.where(single[token.row][..., None, None], alone[token.row], together)
        return jnp.where(token.valid[..., None, None], together, jnp.asarray(nothing, together.dtype))

    out = unite(out, alone_out, 0)[..., :head_dim]
    if not return_lse:
        return out
    return out, unite(lse, alone_lse[..., None], -jnp.inf)[..., 0]


def decode_step(
    q, kv, tables, lengths, new, *, k=None, v=None, offsets=None, kv_scale=None, scale=None, mask=None,
    return_lse=False, **options,
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


def window_tokens(group: int, most: int, head_bytes: int) -> int:
    """Tokens of a window: a power of two, so that its queries fill whole registers; no more than `most` needs."""
    tokens = LANES // math.gcd(group, LANES)
    while 2 * tokens * group <= WINDOW_QUERIES and 2 * tokens * group * head_bytes <= WINDOW_BYTES and tokens < most:
        tokens *= 2
    return tokens
