"""A paged KV cache for JAX: immutable, functional, with kernels for TPU and NVIDIA GPU.

Where to begin; `help(jaxkv.NAME)` says the rest, and docs/ has a page on each:

- Run a checkpoint: `jaxkv.models.load(folder)`, then `generate(model, prompts)`; `jaxkv.text.Tokenizer(folder)`.
- Serve: `Engine(model)`, `engine.submit(prompt)`, `for request, token in engine.run()`.
- Your model: `Model` is what it must be; `jaxkv.nnx.Attention`, `jaxkv.linen.Attention`, `jaxkv.testing.check_model`.
- Your own step: `CacheConfig`, `init`, `extend` once a step, `attention` in each layer, `check`.
- Rows: `fork`, `truncate`, `reorder`, `free`, `PrefixCache`, `swap_out`, `save`, `load`.
- Look inside: `stats`, `gather`, `explain`; a cache draws itself in a notebook.
- On the command line: `python -m jaxkv generate`, `chat`, `plan`, `serve`.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxkv import (
        convert as convert,
        distributed as distributed,
        hooks as hooks,
        linen as linen,
        models as models,
        nnx as nnx,
        scores as scores,
        testing as testing,
        text as text,
    )
    from jaxkv._names import *  # noqa: F403

__version__ = "0.1.0"

__all__ = [
    "Beams", "BlockBounds", "Cache", "CacheConfig", "CacheError", "CacheFileError", "DamagedFile", "Engine",
    "EngineFull", "Eviction", "HostBlocks", "LayerConfig", "Match", "Model", "OutOfBlocks", "OutOfWindow",
    "PrefixCache", "PrefixEvent", "Request", "RowShards", "SequenceTooLong",
    "Step", "append", "attend", "attention", "beam_search", "block_bounds", "by_rows",
    "causal_conv", "check", "check_invariants", "compress", "counts", "describe", "dot_product_attention", "evict",
    "explain", "extend", "fork", "free", "gated_delta_rule", "gather", "generate", "init", "jax_attention", "keep",
    "last", "left_align", "load", "merge_attention", "partition_specs", "plan_step", "positions", "read_states",
    "receive", "reorder", "reserve", "right_align", "save", "send", "snapshots", "state_space", "stats", "swap_in",
    "swap_out", "truncate", "write", "write_index", "write_states",
]  # fmt: skip


# Nothing is imported before it is asked for, so that the command line answers at once; then all names are, but for what
# needs Flax or is for tests. Type checkers and completion see it all the same.
_LATE = ("convert", "distributed", "hooks", "linen", "models", "nnx", "scores", "testing", "text")


def __getattr__(name: str):
    if name in _LATE:
        return importlib.import_module(f"jaxkv.{name}")
    if not name.startswith("__"):
        names = vars(importlib.import_module("jaxkv._names"))
        for public in __all__:
            globals().setdefault(public, names[public])
        if name in globals():
            return globals()[name]
    raise AttributeError(f"module 'jaxkv' has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *__all__, *_LATE})
