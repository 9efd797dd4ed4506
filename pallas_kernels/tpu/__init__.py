"""Paged attention on TPUs, in Pallas Mosaic TPU.

Rows with one new token go to the decode kernel, which can write it as well; rows with more are cut into tiles of
queries for the prefill kernel. A mixed step runs both, and neither pays for the other's rows.
"""

from pallas_kernels.common.masks import with_spans
from pallas_kernels.tpu.quantize import KINDS as KINDS
from pallas_kernels.tpu.step import attend, decode_step
from pallas_kernels.tpu.support import unsupported as unsupported
from pallas_kernels.tpu.write import write_kv as write_kv

LATENT = True  # it reads latent rows
VARIANTS = frozenset({"causal", "chunk", "deterministic", "sink_tokens", "spans", "tree"})


def paged_attention(q, kv, tables, lengths, new, *, interpret=False, **options):
    """What [`pallas_kernels.paged_attention`][] means. `interpret`: run on the CPU, `pltpu.InterpretParams()`."""
    return with_spans(attend, q, kv, tables, lengths, new, interpret=interpret, **options)


def write_and_attend(q, k, v, kv, tables, lengths, new, *, interpret=False, **options):
    """What [`pallas_kernels.write_and_attend`][] means: one kernel for a decode step `[S, 1, H, D]`, else two."""
    if q.ndim == 4 and q.shape[1] == 1:
        return decode_step(q, kv, tables, lengths, new, k=k, v=v, interpret=interpret, **options)
    quantised = {"kv_scale": options.pop("kv_scale", None), "kind": options.pop("kind", None)}
    offsets, rank = options.get("offsets"), options.get("rank")
    written = write_kv(kv, k, v, tables, lengths, new, offsets=offsets, rank=rank, interpret=interpret, **quantised)
    if quantised["kind"] is None:
        return with_spans(attend, q, written, tables, lengths, new, interpret=interpret, **options), written
    kv, quantised["kv_scale"] = written
    return with_spans(attend, q, kv, tables, lengths, new, interpret=interpret, **quantised, **options), written
