"""`pallas_kernels.reference` as a backend; see `backend`."""

from pallas_kernels.common.batch import Call
from pallas_kernels.common.quantization import QUANTIZED
from pallas_kernels.reference import attend as paged_attention, store as write_kv

__all__ = ["paged_attention", "write_kv"]
FORMATS = QUANTIZED
OPTIONS = (
    "alibi",
    "spans",
    "tree",
    "causal",
    "chunk",
    "blocks",
    "deterministic",
    "sink_tokens",
    "tokens",
    "compress_ratio",
)
READS_LATENT_ROWS = True
READS_SHARED_ONCE = False
write_and_attend = None


def unsupported(op: str, call: Call) -> str | None:
    """Nothing is."""
    return None
