"""Paged attention, and layers that keep a state, on NVIDIA Hopper and Blackwell GPUs, in Pallas Mosaic GPU.

`step` prepares a step and calls the kernels: `decode` for rows with one new token, `prefill` for the others, `latent`
for both over latent rows. They take their work from lists built on the device (`work_items`) and their tile sizes from
`tuning`, and share `tiles` and `products`, which multiplies as the chip can (`chips`). `dequantize` reads quantized
pools for them, with `nibbles` those of four bits; `support` refuses what they cannot do. The write of the cache is
XLA's in-place scatter. Rows that were chosen one by one XLA brings together for them. `mixers` has the layers that keep
a state, whose kernels are in `recurrence`.
"""

import functools

from pallas_kernels.common.batch import MaskSpec, PagedBatch, SoftmaxOptions, StoredKV
from pallas_kernels.gpu import mixers as mixers
from pallas_kernels.gpu.dequantize import FORMATS as FORMATS
from pallas_kernels.gpu.interpreter import check_interpreter_threads
from pallas_kernels.gpu.step import attend
from pallas_kernels.gpu.support import unsupported as unsupported
from pallas_kernels.xla.chosen.chosen_rows import attend_tokens
from pallas_kernels.xla.spans import attend_spans

# See `api.backend`.
OPTIONS = ("causal", "chunk", "deterministic", "sink_tokens", "spans", "tokens", "tree")
READS_LATENT_ROWS = True
READS_SHARED_ONCE = False
write_kv = None
write_and_attend = None


def paged_attention(q, stored: StoredKV, batch: PagedBatch, mask: MaskSpec, options: SoftmaxOptions, *, interpret=None):
    """Computes what [`pallas_kernels.paged_attention`][] does; see `step.attend`."""
    if interpret is not None:
        check_interpreter_threads()
    if mask.tokens is not None:
        return attend_tokens(functools.partial(attend, interpret=interpret), q, stored, batch, mask, options)
    return attend_spans(attend, q, stored, batch, mask, options, interpret=interpret)
