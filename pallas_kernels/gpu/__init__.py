"""Paged attention on NVIDIA Hopper GPUs, in Pallas Mosaic GPU.

`step` prepares a step and calls the kernels: `decode` for rows with one new token, `prefill` for the others, `latent`
for both over latent rows. They take their work from lists built on the device (`work`) and their tile sizes from
`tuning`, and share `tiles`; `support` refuses what they cannot do. The write of the cache is XLA's in-place scatter.
"""

from pallas_kernels.common.masks import with_spans
from pallas_kernels.gpu.dequantize import KINDS as KINDS
from pallas_kernels.gpu.step import attend
from pallas_kernels.gpu.support import unsupported as unsupported

LATENT = True  # it reads latent rows
VARIANTS = frozenset({"causal", "chunk", "deterministic", "sink_tokens", "spans", "tree"})


def paged_attention(q, *arrays, **options):
    """What [`pallas_kernels.paged_attention`][] means; see `step.attend`."""
    return with_spans(attend, q, *arrays, **options)
