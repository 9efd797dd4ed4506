"""Paged attention and the cache write in plain XLA, for every platform.

`attention` runs the tiles of a work list (`work`), which is index arithmetic on the device; `gradients` pulls
cotangents back through it, for every backend.
"""

from pallas_kernels.common.quantization import LARGEST as KINDS  # noqa: F401 (what it stores)
from pallas_kernels.xla.attention import (
    paged_attention as paged_attention,
    write_and_attend as write_and_attend,
    write_kv as write_kv,
)

LATENT = True  # it reads latent rows
SHARES = True  # it reads once what rows have in common
# What else it takes.
VARIANTS = frozenset({"alibi", "spans", "tree", "causal", "chunk", "blocks", "deterministic", "sink_tokens", "stripe"})
