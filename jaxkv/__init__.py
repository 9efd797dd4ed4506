"""A paged KV cache for JAX: immutable, functional, with kernels for TPU and NVIDIA GPU.

Where to begin; `help(jaxkv.NAME)` says the rest, and docs/ has a page on each:

- Run a checkpoint: `jaxkv.models.load(folder)`, then `generate(model, prompts)`; `jaxkv.text.Tokenizer(folder)`.
- Serve: `Engine(model)`, `engine.submit(prompt)`, `for request, token in engine.run()`.
- Your model: `Model` is what it must be; `jaxkv.nnx.Attention`, `jaxkv.linen.Attention`, `jaxkv.testing.check_model`.
- Your own step: `CacheConfig`, `init`, `extend` once a step, `attention` in each layer, `check`.
- Rows: `fork`, `truncate`, `reorder`, `free`, `PrefixCache`, `swap_out`, `save`, `load`.
- Look inside: `stats`, `gather`, `explain`; a cache draws itself in a notebook.
- On the command line: `python -m jaxkv generate`, `chat`, `plan`.
"""

import importlib
from typing import TYPE_CHECKING

from jaxkv._core.attention.attention import attend, attention, explain
from jaxkv._core.attention.block_selection import BlockBounds, block_bounds
from jaxkv._core.attention.mixers import causal_conv, gated_delta_rule, read_states, state_space, write_states
from jaxkv._core.attention.plan import Step, plan_step, positions
from jaxkv._core.attention.ragged import counts, last, left_align, right_align
from jaxkv._core.attention.write import append, write
from jaxkv._core.blocks.evict import evict
from jaxkv._core.blocks.sharing import fork, reorder, truncate
from jaxkv._core.blocks.speculative import keep
from jaxkv._core.blocks.tables import extend, free, reserve
from jaxkv._core.cache.cache import Cache
from jaxkv._core.cache.checks import check, check_invariants, stats
from jaxkv._core.cache.data_parallel import RowShards, by_rows
from jaxkv._core.cache.gather import gather
from jaxkv._core.cache.init import init, partition_specs
from jaxkv._core.config.cache_config import CacheConfig
from jaxkv._core.config.layer_config import LayerConfig
from jaxkv._core.state.errors import CacheError, CacheFileError, DamagedFile, OutOfBlocks, OutOfWindow, SequenceTooLong
from jaxkv._drop_in import dot_product_attention, jax_attention
from jaxkv._engine.frontend.engine import Engine
from jaxkv._engine.frontend.generate import generate
from jaxkv._engine.frontend.serving import EngineFull
from jaxkv._engine.programs.beam_search import Beams, beam_search
from jaxkv._engine.programs.model import Model
from jaxkv._engine.requests.eviction_policy import Eviction
from jaxkv._files.rows import describe, load, save
from jaxkv._tiers.host_blocks import HostBlocks as HostBlocks
from jaxkv._tiers.host_tier import swap_in as swap_in, swap_out as swap_out
from jaxkv._tiers.prefix_cache.events import PrefixEvent
from jaxkv._tiers.prefix_cache.match import Match
from jaxkv._tiers.prefix_cache.prefix_cache import PrefixCache
from jaxkv._tiers.send import send
from pallas_kernels import merge_attention

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
    )  # fmt: skip

__version__ = "0.1.0"

__all__ = [
    "Beams", "BlockBounds", "Cache", "CacheConfig", "CacheError", "CacheFileError", "DamagedFile", "Engine",
    "EngineFull", "Eviction", "HostBlocks", "LayerConfig", "Match", "Model", "OutOfBlocks", "OutOfWindow",
    "PrefixCache", "PrefixEvent", "RowShards", "SequenceTooLong",
    "Step", "append", "attend", "attention", "beam_search", "block_bounds", "by_rows",
    "causal_conv", "check", "check_invariants", "counts", "describe", "dot_product_attention", "evict", "explain",
    "extend", "fork", "free", "gated_delta_rule", "gather", "generate", "init", "jax_attention", "keep", "last",
    "left_align", "load", "merge_attention", "partition_specs", "plan_step", "positions", "read_states", "reorder",
    "reserve", "right_align", "save", "send", "state_space", "stats", "swap_in", "swap_out", "truncate", "write",
    "write_states",
]  # fmt: skip


# What needs Flax, or is for tests, is imported when it is asked for; type checkers and completion see it all the same.
_LATE = ("convert", "distributed", "hooks", "linen", "models", "nnx", "scores", "testing", "text")


def __getattr__(name: str):
    if name in _LATE:
        return importlib.import_module(f"jaxkv.{name}")
    raise AttributeError(f"module 'jaxkv' has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *_LATE})
