"""The public names of `jaxkv`, and what they are. It is imported when the first of them is asked for."""

from jaxkv._core.attention.attention import attend as attend, attention as attention, explain as explain
from jaxkv._core.attention.compress import compress as compress
from jaxkv._core.attention.index import write_index as write_index
from jaxkv._core.attention.mixers import (
    causal_conv as causal_conv,
    gated_delta_rule as gated_delta_rule,
    read_states as read_states,
    state_space as state_space,
    write_states as write_states,
)
from jaxkv._core.attention.plan import Step as Step, plan_step as plan_step, positions as positions
from jaxkv._core.attention.ragged import (
    counts as counts,
    last as last,
    left_align as left_align,
    right_align as right_align,
)
from jaxkv._core.attention.write import append as append, write as write
from jaxkv._core.blocks.evict import evict as evict
from jaxkv._core.blocks.sharing import fork as fork, reorder as reorder, truncate as truncate
from jaxkv._core.blocks.speculative import keep as keep
from jaxkv._core.blocks.tables import extend as extend, free as free, reserve as reserve
from jaxkv._core.cache.block_selection import BlockBounds as BlockBounds, block_bounds as block_bounds
from jaxkv._core.cache.cache import Cache as Cache
from jaxkv._core.cache.checks import check as check, check_invariants as check_invariants, stats as stats
from jaxkv._core.cache.data_parallel import RowShards as RowShards, by_rows as by_rows
from jaxkv._core.cache.gather import gather as gather
from jaxkv._core.cache.init import init as init, partition_specs as partition_specs
from jaxkv._core.cache.state_checks import snapshots as snapshots
from jaxkv._core.config.cache_config import CacheConfig as CacheConfig
from jaxkv._core.config.layer_config import LayerConfig as LayerConfig
from jaxkv._core.state.errors import (
    CacheError as CacheError,
    CacheFileError as CacheFileError,
    DamagedFile as DamagedFile,
    OutOfBlocks as OutOfBlocks,
    OutOfWindow as OutOfWindow,
    SequenceTooLong as SequenceTooLong,
)
from jaxkv._drop_in import dot_product_attention as dot_product_attention, jax_attention as jax_attention
from jaxkv._engine.frontend.engine import Engine as Engine
from jaxkv._engine.frontend.generate import generate as generate
from jaxkv._engine.frontend.serving import EngineFull as EngineFull
from jaxkv._engine.programs.beam_search import Beams as Beams, beam_search as beam_search
from jaxkv._engine.programs.model import Model as Model
from jaxkv._engine.requests.eviction_policy import Eviction as Eviction
from jaxkv._engine.requests.request import Request as Request
from jaxkv._files.load_rows import describe as describe, load as load
from jaxkv._files.save_rows import save as save
from jaxkv._tiers.host_blocks import HostBlocks as HostBlocks
from jaxkv._tiers.host_tier import swap_in as swap_in, swap_out as swap_out
from jaxkv._tiers.prefix_cache.events import PrefixEvent as PrefixEvent
from jaxkv._tiers.prefix_cache.match import Match as Match
from jaxkv._tiers.prefix_cache.prefix_cache import PrefixCache as PrefixCache
from jaxkv._tiers.remote import receive as receive
from jaxkv._tiers.send import send as send
from pallas_kernels import merge_attention as merge_attention
