"""Paged attention and the cache write in plain XLA, for every platform.

`attention` runs the tiles of a work list (`work`), which is index arithmetic on the device; `gradients` pulls
cotangents back through it, for every backend. `chosen` attends to chosen tokens, `recurrence` runs layers with states.
"""

from pallas_kernels.common.batch import Call
from pallas_kernels.common.quantization import QUANTIZED
from pallas_kernels.xla.attention import paged_attention as paged_attention
from pallas_kernels.xla.write import write_and_attend as write_and_attend, write_kv as write_kv

# See `api.backend`.
FORMATS = QUANTIZED
OPTIONS = (
    "alibi", "blocks", "causal", "chunk", "compress_ratio", "deterministic", "residual_length", "sink_tokens", "spans",
    "stripe", "tokens", "tree",
)  # fmt: skip
READS_LATENT_ROWS = True
READS_SHARED_ONCE = True


def unsupported(op: str, call: Call) -> str | None:
    """Nothing is."""
    return None
