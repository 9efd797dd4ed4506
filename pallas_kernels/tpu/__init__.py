"""Paged attention on TPUs, in Pallas Mosaic TPU.

Rows with one new token go to the decode kernel, which can write it as well; rows with more are cut into tiles of
queries for the prefill kernel. A mixed step runs both, and neither pays for the other's rows.
"""

import functools

from pallas_kernels.common.batch import MaskSpec, PagedBatch, SoftmaxOptions, StoredKV
from pallas_kernels.tpu.quantize import FORMATS as FORMATS
from pallas_kernels.tpu.step import attend, attend_to_new
from pallas_kernels.tpu.support import CHOSEN_ROWS, unsupported as unsupported
from pallas_kernels.tpu.write import write_kv as write_kv
from pallas_kernels.xla.chosen.chosen_rows import attend_tokens
from pallas_kernels.xla.spans import attend_spans

# See `api.backend`.
OPTIONS = ("causal", "chunk", "deterministic", "residual_length", "sink_tokens", "spans", "tokens", "tree")
READS_LATENT_ROWS = True
READS_SHARED_ONCE = False


def paged_attention(
    q,
    stored: StoredKV,
    batch: PagedBatch,
    mask: MaskSpec,
    options: SoftmaxOptions,
    *,
    interpret=False,
    step_tokens=None,
):
    """Computes what [`pallas_kernels.paged_attention`][] does. `interpret`: on the CPU, `pltpu.InterpretParams()`."""
    own = dict(interpret=interpret, step_tokens=step_tokens)
    if mask.tokens is not None:
        return attend_tokens(functools.partial(attend, **own), q, stored, batch, mask, options, CHOSEN_ROWS)
    return attend_spans(attend, q, stored, batch, mask, options, **own)


def write_and_attend(
    q,
    k,
    v,
    stored: StoredKV,
    batch: PagedBatch,
    mask: MaskSpec,
    options: SoftmaxOptions,
    *,
    interpret=False,
    step_tokens=None,
):
    """Writes and attends; in one kernel for rows of one new token, where `attend_to_new` says so."""
    own = dict(interpret=interpret, step_tokens=step_tokens)
    if mask.tokens is None and (mask.spans is None or q.shape[-3] == 1):
        return attend_to_new(q, (k, v), stored, batch, mask, options, **own)
    stored = write_kv(k, v, stored, batch, interpret=interpret)
    return paged_attention(q, stored, batch, mask, options, **own), stored
