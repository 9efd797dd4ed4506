"""Paged attention over a pool of blocks: kernels for TPU and NVIDIA GPU, XLA everywhere else.

Usable without a cache: these functions know arrays only.
"""

from pallas_kernels import reference as reference
from pallas_kernels.api.backends import IMPLEMENTATIONS as IMPLEMENTATIONS, Choice as Choice
from pallas_kernels.api.dispatch import (
    explain as explain,
    paged_attention as paged_attention,
    write_and_attend as write_and_attend,
    write_kv as write_kv,
)
from pallas_kernels.common.merge import merge_attention as merge_attention
from pallas_kernels.common.ragged_layout import Tokens as Tokens, locate as locate
from pallas_kernels.common.shapes import SHAPES as SHAPES, AttentionShape as AttentionShape
from pallas_kernels.common.shared_prefix import Shared as Shared, find_shared as find_shared

__all__ = [
    "IMPLEMENTATIONS", "SHAPES", "AttentionShape", "Choice", "Shared", "Tokens", "explain", "find_shared", "locate",
    "merge_attention", "paged_attention", "reference", "write_and_attend", "write_kv",
]  # fmt: skip
