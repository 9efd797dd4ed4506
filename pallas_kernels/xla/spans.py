"""Kernels take spans whose tokens stand one after another. Others XLA takes, and only the device knows which."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from pallas_kernels.common.batch import MaskSpec, PagedBatch, SoftmaxOptions, StoredKV
from pallas_kernels.common.masks import are_runs
from pallas_kernels.common.ragged_layout import locate
from pallas_kernels.xla.attention import paged_attention


def attend_spans(
    kernel: Callable, q, stored: StoredKV, batch: PagedBatch, mask: MaskSpec, options: SoftmaxOptions, **others: Any
) -> Any:
    """Returns what `kernel` does; where there are spans, if each one's tokens stand one after another, as images' and
    prompts' do, and else what XLA does. A token that is alone in its row is its whole span."""
    if mask.spans is None or q.shape[-3] == 1:
        return kernel(q, stored, batch, dataclasses.replace(mask, spans=None), options, **others)
    token = jax.tree.map(jax.numpy.ravel, locate(q.shape[:-2], *batch[1:4]))
    return lax.cond(
        are_runs(token, mask.spans.reshape(-1)),
        lambda: kernel(q, stored, batch, mask, options, **others),
        lambda: paged_attention(q, stored, batch, mask, options),
    )
