"""The options of `Engine`, as `generate` hands them on: type checkers and completion know them."""

from typing import Any

from jaxkv._core.config.fields import EngineFields
from jaxkv._engine.programs.step_rows import Hook
from jaxkv._engine.requests.eviction_policy import Eviction
from jaxkv._engine.runner.swap_policy import Swap


class EngineOptions(EngineFields, total=False):
    """Documented at `Engine`; `test_types.py` holds them against its signature."""

    max_seqs: int
    max_seq_len: int | None
    longest: int
    step_tokens: int
    long_prefill_tokens: int | None
    steps_per_dispatch: int
    logits_hook: Hook | None
    hook_args: Any
    prefix_cache: bool
    spill_bytes: float
    disk: Any
    disk_bytes: float | None
    snapshot_bytes: float | None
    swap: Swap
    host_bandwidth: float
    draft: Any
    draft_tokens: int
    draft_branches: int
    cache_dtype: Any
    evict: Eviction | None
    prefill: Any
    deterministic: bool
    max_waiting: int | None
