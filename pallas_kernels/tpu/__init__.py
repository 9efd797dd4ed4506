"""Paged attention on TPUs, in Pallas Mosaic TPU.

Rows with one new token go to the decode kernel, which can write it as well; rows with more are cut into tiles of
queries for the prefill kernel. A mixed step runs both, and neither pays for the other's rows.
"""

import jax.numpy as jnp

from pallas_kernels.tpu.step import attend, decode_step, pad
from pallas_kernels.tpu.support import unsupported as unsupported
from pallas_kernels.tpu.write import find_runs, page_tokens, scatter, write


def paged_attention(q, kv, tables, lengths, new, *, interpret=False, **options):
    """What [`pallas_kernels.paged_attention`][] means. `interpret`: run on the CPU, `pltpu.InterpretParams()`."""
    return attend(q, kv, tables, lengths, new, interpret=interpret, **options)


def write_kv(kv, k, v, tables, lengths, new, *, offsets=None, interpret=False):
    """What [`pallas_kernels.write_kv`][] means, in place if kv is donated; tokens without a block go nowhere."""
    k, v = (pad(x, kv.shape[-1]).astype(kv.dtype) for x in (k, v))
    page_size = page_tokens(kv)
    if page_size is None or k.size == 0 or kv.dtype not in (jnp.bfloat16, jnp.float32):
        return scatter(kv, k, v, tables, lengths, new, offsets)
    runs = find_runs(kv, k.shape[:-2], tables, lengths, new, offsets, page_size)
    flat = (x.reshape(-1, *x.shape[-2:]) for x in (k, v))
    return write(kv, *flat, runs, page_size=page_size, interpret=interpret)


def write_and_attend(q, k, v, kv, tables, lengths, new, *, interpret=False, **options):
    """What [`pallas_kernels.write_and_attend`][] means: one kernel for a decode step `[S, 1, H, D]`, else two."""
    if q.ndim == 4 and q.shape[1] == 1:
        return decode_step(q, kv, tables, lengths, new, k=k, v=v, interpret=interpret, **options)
    kv = write_kv(kv, k, v, tables, lengths, new, offsets=options.get("offsets"), interpret=interpret)
    return attend(q, kv, tables, lengths, new, interpret=interpret, **options), kv
