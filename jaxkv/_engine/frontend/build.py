"""Makes an engine's core from its options, or one per device of the mesh axis that rows are divided over."""

import dataclasses
import difflib
import inspect
from typing import Any

from jaxkv._core.config.cache_config import CacheConfig
from jaxkv._core.config.validation import flag, integer, real
from jaxkv._core.state.device_arrays import AXIS, split_model
from jaxkv._engine.frontend.options import EngineOptions
from jaxkv._engine.hosts.remote_prefill import RemotePrefill
from jaxkv._engine.programs.draft_model import check_draft, make_drafter
from jaxkv._engine.programs.model import takes
from jaxkv._engine.programs.step_rows import Hook
from jaxkv._engine.requests.eviction_policy import Eviction
from jaxkv._engine.requests.hook_args import HookArgs
from jaxkv._engine.runner.cache_manager import CacheManager
from jaxkv._engine.runner.disaggregated_prefill import Prefill
from jaxkv._engine.runner.engine_core import EngineCore
from jaxkv._engine.runner.fingerprint import fingerprint, make_prefix
from jaxkv._engine.runner.model_runner import ModelRunner
from jaxkv._engine.runner.swap_policy import Swap

# Other libraries' names of options, by the name here.
MESH = "the mesh of the model, as of jaxkv.models.load(folder, mesh=)"
MEANT = {
    "batch_size": "max_seqs", "chunked_prefill_size": "step_tokens", "context_length": "max_seq_len",
    "data_parallel_size": MESH, "do_sample": "temperature", "dp_size": MESH, "enable_chunked_prefill": "step_tokens",
    "enable_prefix_caching": "prefix_cache", "gpu_memory_utilization": "memory_bytes", "kv_cache_dtype": "cache_dtype",
    "logits_processors": "logits_hook", "long_prefill_token_threshold": "long_prefill_tokens",
    "max_batch_size": "max_seqs", "max_length": "max_seq_len", "max_model_len": "max_seq_len",
    "max_num_batched_tokens": "step_tokens", "max_num_seqs": "max_seqs", "max_running_requests": "max_seqs",
    "max_token": "max_new_tokens", "mem_fraction_static": "memory_bytes", "num_beams": "jaxkv.beam_search",
    "num_gpu_blocks_override": "num_blocks", "num_return_sequences": "n", "num_scheduler_steps": "steps_per_dispatch",
    "num_speculative_tokens": "draft_tokens", "page_size": "block_size", "speculative_config": "draft",
    "speculative_model": "draft", "stop": "eos", "stop_token_ids": "eos", "swap_space": "swap",
    "tensor_parallel_size": MESH, "tp_size": MESH,
}  # fmt: skip


def check_fields(fields: dict[str, Any]) -> None:
    """Raises TypeError for a name that is neither an option nor a cache field open to the caller. `fields` are those
    that are not named in the signature of `Engine`."""
    made = set(inspect.signature(CacheConfig.from_model).parameters)
    made -= {"model", "fields", "step_tokens", "prefix_cache", "mesh"}
    known = made | {field.name for field in dataclasses.fields(CacheConfig)} - {"layers"}
    for name in fields:
        if name not in known:
            own = EngineOptions.__annotations__.keys() - known
            close = difflib.get_close_matches(name, sorted({*own, *known, *MEANT, *MEANT.values()}), n=1, cutoff=0.75)
            if name in MEANT or close:
                meant = name if name in MEANT else close[0]
                raise TypeError(f"Engine and generate take no {name}: did you mean {MEANT.get(meant, meant)}?")
            raise TypeError(
                f"Engine and generate take no {name}: options are {', '.join(sorted(own))}; and of a cache "
                f"{', '.join(sorted(known))}."
            )


def read_deterministic(deterministic: Any, *models: Any) -> bool:
    """Tells whether to use deterministic attention. Raises ValueError if one of the models, None aside, takes no such
    option."""
    if not flag("deterministic", deterministic):
        return False
    for model in models:
        if model is not None and not takes(model, "deterministic"):
            raise ValueError(
                "Engine(deterministic=True) is for a model that is called with deterministic=True and gives it to "
                f"jaxkv.attention, as those of jaxkv.models do: {type(model).__name__} takes no such option."
            )
    return True


@dataclasses.dataclass(frozen=True, kw_only=True)
class CoreOptions:
    """How an engine's cores work: options of `Engine`, read and equal in all cores; bytes are of all cores together."""

    step_tokens: int
    long_prefill_tokens: int | None
    steps_per_dispatch: int
    draft_tokens: int
    draft_branches: int
    swap: Swap
    host_bandwidth: float
    evict: Eviction | None
    hook: Hook | None
    hook_args: HookArgs
    deterministic: bool
    prefix_cache: Any
    spill_bytes: Any
    disk: Any
    disk_bytes: Any
    snapshot_bytes: Any


def make_cores(
    models: list[Any],
    config: CacheConfig,
    options: CoreOptions,
    *,
    draft: Any,
    prefill: Any,
    vocab_size: int | None,
) -> list[EngineCore]:
    """Makes a core for each shard of a model; `config` is that of each shard's cache. Raises ValueError."""
    count, disk, snapshot_bytes = len(models), options.disk, options.snapshot_bytes
    if snapshot_bytes is not None:
        snapshot_bytes = real("snapshot_bytes", snapshot_bytes, least=0) / count
    spill_bytes = real("spill_bytes", options.spill_bytes, least=0) // count
    drafts, prefills = _split_by_shard("draft", draft, count), _split_by_shard("prefill", prefill, count)
    guesses, deterministic = (options.draft_tokens, options.draft_branches), options.deterministic
    sizes = (options.step_tokens, options.long_prefill_tokens)
    drafters = [make_drafter(own, config, options.step_tokens, *guesses) for own in drafts]
    check_draft(drafters[0], drafts[0], vocab_size)
    cores = []
    for model, drafter, own_prefill in zip(models, drafters, prefills, strict=True):
        own_prefix = make_prefix(
            model, config, options.prefix_cache, spill_bytes, disk, options.disk_bytes, snapshot_bytes
        )
        disk = None if own_prefix is None else own_prefix.files  # one folder, whose index all of them share
        cache_manager = CacheManager(
            config,
            model,
            prefix=own_prefix,
            swap=options.swap,
            host_bandwidth=options.host_bandwidth,
            eviction=options.evict,
        )
        runner = ModelRunner(
            model, cache_manager, options.hook, options.step_tokens, *guesses, options.hook_args, deterministic
        )
        apart: Prefill | RemotePrefill | None = None
        if isinstance(own_prefill, str):
            apart = RemotePrefill(own_prefill, config, fingerprint(model))
        elif own_prefill is not None:
            apart = Prefill(own_prefill, config, *sizes, cache_manager, deterministic)
        cores.append(EngineCore(cache_manager, runner, *sizes, options.steps_per_dispatch, drafter, apart))
    return cores


def _split_by_shard(name: str, model: Any, count: int) -> list[Any]:
    if model is None or isinstance(model, str):
        return [model] * count
    models = split_model(model)
    if len(models) != count:
        raise ValueError(
            f"The model's rows are divided over {count} device{'s' * (count > 1)} of the mesh axis {AXIS!r}, but those "
            f"of {name}= over {len(models)}: load it on a mesh with as many."
        )
    return models


def read_longest(longest: Any, model_config: Any) -> int:
    """Returns `max_seq_len` for sequences up to `longest`. Raises ValueError."""
    length = max(64, 1 << (integer("longest", longest, least=1) - 1).bit_length())
    return min(length, getattr(model_config, "max_seq_len", length))
