"""Paged attention on TPUs, in Pallas Mosaic TPU."""

import jax
import jax.numpy as jnp

from pallas_kernels import xla
from pallas_kernels.tpu._support import unsupported as unsupported
from pallas_kernels.tpu.decode import decode


def paged_attention(q, kv, tables, lengths, new, *, interpret=False, **options):
    """What [`pallas_kernels.paged_attention`][] means. `interpret`: run on the CPU, `pltpu.InterpretParams()`."""
    out, lse, _ = _attend(q, None, kv, tables, lengths, new, interpret=interpret, **options)
    return out if lse is None else (out, lse)


def write_kv(kv, k, v, tables, lengths, new, *, offsets=None):
    """What [`pallas_kernels.write_kv`][] means."""
    return xla.write_kv(kv, k, v, tables, lengths, new, offsets=offsets)


def write_and_attend(q, k, v, kv, tables, lengths, new, *, interpret=False, **options):
    """What [`pallas_kernels.write_and_attend`][] means, the pool updated in place where it was donated."""
    out, lse, kv = _attend(q, (k, v), kv, tables, lengths, new, interpret=interpret, **options)
    return (out if lse is None else (out, lse)), kv


def _attend(
    q, new_kv, kv, tables, lengths, new, *, offsets=None, kv_scale=None, scale=None, soft_cap=None, window=None,
    sinks=None, mask=None, return_lse=False, interpret=False,
):  # fmt: skip
    del offsets, kv_scale, mask  # not for one padded token per row; refused; refused
    head_dim, stored = q.shape[-1], kv.shape[-1]
    block_size = kv.shape[3]
    position = jnp.minimum(lengths - new, tables.shape[1] * block_size - 1)
    limits = jnp.where(new > 0, jnp.maximum(position + 1, 0), 0)
    if new_kv is not None:
        target = jnp.take_along_axis(tables, jnp.maximum(position, 0)[:, None] // block_size, axis=1)[:, 0]
        target = jnp.where((target >= 0) & (target < kv.shape[0]) & (limits > 0), target, -1)
        new_kv = _pad(jnp.concatenate(new_kv, axis=1), stored).reshape(q.shape[0], 2, -1, stored).astype(kv.dtype)
        write = {"new_kv": new_kv, "targets": target}
    else:
        write = {}
    out, lse, kv = decode(
        _pad(q[:, 0], stored), kv, jnp.clip(tables, 0, kv.shape[0] - 1), limits, **write,
        scale=head_dim**-0.5 if scale is None else scale, soft_cap=soft_cap, window=window, sinks=sinks,
        return_lse=return_lse, interpret=interpret,
    )  # fmt: skip
    return out[:, None, :, :head_dim], None if lse is None else lse[:, None], kv


def _pad(x: jax.Array, head_dim: int) -> jax.Array:
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, head_dim - x.shape[-1])])
