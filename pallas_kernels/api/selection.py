"""The choice of tokens by index keys, for `jaxkv.scores.indexer`: which backend makes it, and why nothing faster does.

A backend's module, named in `MODULES`, provides `select_tokens(q, weights, stored, batch, mask, top_k)`, as
`xla.chosen.index` has it, and `unsupported(q, stored, batch, top_k) -> str | None`, which reads no values. There are no
gradients.
"""

import functools
import importlib
from typing import Any

import jax

from pallas_kernels.api.backends import Choice, choose_among, find_backend, read_platform, run_chosen
from pallas_kernels.api.mixer_dispatch import is_divided
from pallas_kernels.common.batch import MaskSpec, PagedBatch
from pallas_kernels.common.index_keys import Best, StoredIndex
from pallas_kernels.common.quantization import find_format

MODULES = {"xla": "xla.chosen.index", "tpu": "tpu.index"}  # implementation -> its module in this package


def select_tokens(
    q: jax.Array,
    weights: jax.Array,
    stored: StoredIndex,
    batch: PagedBatch,
    mask: MaskSpec,
    top_k: int,
    implementation: str | None = None,
) -> Best:
    """Returns the best `top_k` tokens of each query, of those that it sees: see `xla.chosen.index.select_tokens`."""
    choice = _choose(q, stored, batch, top_k, implementation, None)

    def bind(name: str) -> Any:
        def run(q: jax.Array, weights: jax.Array, keys: jax.Array, scale: Any, batch: PagedBatch) -> Best:
            its_stored = StoredIndex(keys, scale, stored.format)
            return _find_module(name).select_tokens(q, weights, its_stored, batch, mask, top_k)

        return run

    arrays = (q, weights, stored.keys, stored.scale, batch)
    return run_chosen(bind, choice.implementation, implementation is not None, *arrays)


def explain_selection(
    *,
    q: Any,
    keys: Any,
    tables: Any,
    top_k: int = 2048,
    kind: str | None = None,
    stripe: Any = None,
    platform: str | None = None,
    implementation: str | None = None,
) -> Choice:
    """Returns what `explain` says of a choice; of arrays only shapes and dtypes are read."""
    batch = PagedBatch(tables, None, None, context_shard=stripe)
    platform = None if platform is None else read_platform(platform)
    return _choose(q, StoredIndex(keys, None, find_format(kind)), batch, top_k, implementation, platform)


def _choose(
    q: Any, stored: StoredIndex, batch: PagedBatch, top_k: int, implementation: str | None, platform: str | None
) -> Choice:
    return choose_among(functools.partial(_find_refusal, q, stored, batch, top_k), implementation, platform)


def _find_refusal(q: Any, stored: StoredIndex, batch: PagedBatch, top_k: int, implementation: str) -> str | None:
    """Returns why a backend cannot make a choice, and the way out; None: it can."""
    find_backend(implementation)
    module = _find_module(implementation)
    if module is None:
        return f"The {implementation} backend has no kernel that chooses tokens: leave it to XLA."
    if implementation == "xla":
        return None
    if is_divided(stored.keys):
        return (
            f"The compiler cannot divide the {implementation} kernel that chooses tokens over the devices of a mesh: "
            "call it inside jax.shard_map, or leave it to XLA."
        )
    return module.unsupported(q, stored, batch, top_k)


def _find_module(implementation: str) -> Any:
    """Returns a backend's module, or None."""
    name = MODULES.get(implementation)
    return None if name is None else importlib.import_module(f"pallas_kernels.{name}")
