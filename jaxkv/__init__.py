"""A paged KV cache for JAX: immutable, functional, with kernels for TPU and NVIDIA GPU."""

from jaxkv._core.attention import attend as attend, attention as attention, explain as explain
from jaxkv._core.bounds import BlockBounds as BlockBounds, block_bounds as block_bounds
from jaxkv._core.by_rows import RowShards as RowShards, by_rows as by_rows
from jaxkv._core.cache import Cache as Cache
from jaxkv._core.checks import check as check, check_invariants as check_invariants, stats as stats
from jaxkv._core.config import CacheConfig as CacheConfig
from jaxkv._core.empty import init as init, partition_specs as partition_specs
from jaxkv._core.errors import (
    CacheError as CacheError,
    CacheFileError as CacheFileError,
    DamagedFile as DamagedFile,
    OutOfBlocks as OutOfBlocks,
    OutOfWindow as OutOfWindow,
    SequenceTooLong as SequenceTooLong,
)
from jaxkv._core.evicting import evict as evict
from jaxkv._core.gathering import gather as gather
from jaxkv._core.keeping import keep as keep
from jaxkv._core.layer import LayerConfig as LayerConfig
from jaxkv._core.plan import Step as Step, plan_step as plan_step, positions as positions
from jaxkv._core.ragged import counts as counts, last as last, left_align as left_align, right_align as right_align
from jaxkv._core.sharing import fork as fork, reorder as reorder, truncate as truncate
from jaxkv._core.tables import extend as extend, free as free, reserve as reserve
from jaxkv._core.write import append as append, write as write
from jaxkv._drop_in import dot_product_attention as dot_product_attention, jax_attention as jax_attention
from jaxkv._engine.engine import Engine as Engine
from jaxkv._engine.eviction import Eviction as Eviction
from jaxkv._engine.generate import generate as generate
from jaxkv._engine.search import Beams as Beams, beam_search as beam_search
from jaxkv._files.rows import describe as describe, load as load, save as save
from jaxkv._tiers.events import PrefixEvent as PrefixEvent
from jaxkv._tiers.host import HostBlocks as HostBlocks, swap_in as swap_in, swap_out as swap_out
from jaxkv._tiers.match import Match as Match
from jaxkv._tiers.prefix import PrefixCache as PrefixCache
from jaxkv._tiers.send import send as send
from pallas_kernels import merge_attention as merge_attention

__version__ = "0.1.0"

__all__ = [
    "Beams", "BlockBounds", "Cache", "CacheConfig", "CacheError", "CacheFileError", "DamagedFile", "Engine", "Eviction",
    "HostBlocks", "LayerConfig", "Match", "OutOfBlocks", "OutOfWindow", "PrefixCache", "PrefixEvent", "RowShards",
    "SequenceTooLong", "Step", "append", "attend", "attention", "beam_search", "block_bounds", "by_rows", "check",
    "check_invariants", "counts", "describe", "dot_product_attention", "evict", "explain", "extend", "fork", "free",
    "gather", "generate", "init", "jax_attention", "keep", "last", "left_align", "load", "merge_attention",
    "partition_specs", "plan_step", "positions", "reorder", "reserve", "right_align", "save", "send", "stats",
    "swap_in", "swap_out", "truncate", "write",
]  # fmt: skip


def __getattr__(name: str):  # what needs Flax, or is for tests, is imported when it is asked for
    if name in ("convert", "distributed", "linen", "models", "nnx", "scores", "testing"):
        import importlib

        return importlib.import_module(f"jaxkv.{name}")
    raise AttributeError(f"module 'jaxkv' has no attribute {name!r}")
