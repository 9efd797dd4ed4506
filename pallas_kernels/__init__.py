"""Paged attention over a pool of blocks, and mixers over a pool of states.

Kernels for TPU and NVIDIA GPU compute attention; XLA computes everything everywhere.

Usable without a cache: these functions know arrays only.
"""

import importlib
from typing import TYPE_CHECKING

from pallas_kernels import reference as reference
from pallas_kernels.api.backend import Backend as Backend
from pallas_kernels.api.backends import IMPLEMENTATIONS as IMPLEMENTATIONS, Choice as Choice
from pallas_kernels.api.dispatch import (
    explain as explain,
    paged_attention as paged_attention,
    write_and_attend as write_and_attend,
    write_kv as write_kv,
)
from pallas_kernels.api.mixers import (
    causal_conv as causal_conv,
    gated_delta_rule as gated_delta_rule,
    state_space as state_space,
)
from pallas_kernels.api.registration import register_backend as register_backend
from pallas_kernels.common.merge import merge_attention as merge_attention
from pallas_kernels.common.ragged_layout import Tokens as Tokens, locate as locate
from pallas_kernels.common.shapes import SHAPES as SHAPES, AttentionShape as AttentionShape
from pallas_kernels.common.shared_prefix import Shared as Shared, find_shared as find_shared

if TYPE_CHECKING:
    from pallas_kernels import gpu as gpu, testing as testing, tpu as tpu, xla as xla

__all__ = [
    "IMPLEMENTATIONS", "SHAPES", "AttentionShape", "Backend", "Choice", "Shared", "Tokens", "causal_conv", "explain",
    "find_shared", "gated_delta_rule", "locate", "merge_attention", "paged_attention", "reference",
    "register_backend", "state_space", "write_and_attend", "write_kv",
]  # fmt: skip

_LATE = ("gpu", "testing", "tpu", "xla")  # kernels' imports are not cheap


def __getattr__(name: str):
    if name in _LATE:
        return importlib.import_module(f"pallas_kernels.{name}")
    raise AttributeError(f"module 'pallas_kernels' has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *_LATE})
