"""Text generation in one call: token lists in, token lists out."""

import heapq
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Literal, Unpack, overload

from jaxkv._core.config.block_size import BLOCK_SIZE
from jaxkv._core.config.cache_config import CacheConfig
from jaxkv._core.config.validation import MOST_INDEX, flag, integer
from jaxkv._core.state.device_arrays import count_model_shards
from jaxkv._engine.frontend.build import read_longest
from jaxkv._engine.frontend.engine import Engine
from jaxkv._engine.frontend.options import EngineOptions
from jaxkv._engine.programs.model import Model, check_form
from jaxkv._engine.requests.submission import read_limits, read_prompt, read_prompts

# Options that set the size of the cache, or need more blocks than rows take.
ROOM = {
    "longest", "max_seq_len", "num_blocks", "group_blocks", "memory_bytes", "block_size", "layout",
    "prefix_cache", "draft", "evict", "prefill",
}  # fmt: skip


@overload
def generate(  # type: ignore[overload-overlap]
    model: Model,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int | Sequence[int] = 64,
    temperature: float = 0.0,
    eos: int | Collection[int] | None = None,
    *,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    n: Literal[1] = 1,
    progress: bool = False,
    **engine: Unpack[EngineOptions],
) -> list[list[int]]: ...
@overload
def generate(
    model: Model,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int | Sequence[int] = 64,
    temperature: float = 0.0,
    eos: int | Collection[int] | None = None,
    *,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    n: int,
    progress: bool = False,
    **engine: Unpack[EngineOptions],
) -> list[list[list[int]]]: ...
def generate(
    model: Model,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int | Sequence[int] = 64,
    temperature: float = 0.0,
    eos: int | Collection[int] | None = None,
    *,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    n: int = 1,
    progress: bool = False,
    **engine: Any,
) -> list[Any]:
    """Continues prompts: token lists in, token lists out.

    Prompts of any length share one paged cache; waiting prompts take finished rows at once. The output of a prompt does
    not depend on the others.

    Args:
      model: called as `logits, cache = model(tokens, cache=cache)` with packed `i32[N]` tokens, or padded `i32[S, 1]`
        where each row has one; for example what `jaxkv.models.load` returns.
      prompts: non-empty lists of token ids.
      max_new_tokens: the limit of new tokens, for all prompts or one number for each. A sequence also ends when it
        reaches `max_seq_len`.
      temperature: 0: always the likeliest token; above: sample.
      eos: a stop token, or several, at which a sequence ends. It is not part of the output. Default: those of the
        model's config, `model.config.eos_ids`; (): none.
      top_k: sample among the `top_k` likeliest tokens; 0: all.
      top_p: of these, sample among the likeliest that together have this share of their probability.
      min_p: of these, sample among those that have at least this share of the likeliest one's probability.
      seed: the seed of the random draws. The same seed gives the same tokens.
      n: the number of samples of each prompt, which share its blocks.
      progress: show a progress bar (needs tqdm).
      **engine: options of `Engine`. The default of `max_seqs` is at most 8, or the number of devices that rows are
        divided over. Unless sizes, a prefix cache or the like are given, there are blocks for the longest rows that may
        run at once, rounded up to a power of 2.

    Returns:
      For each prompt the tokens that follow it; with `n` above 1 a list of n such lists.

    Raises:
      ValueError: an invalid argument or prompt; nothing has been computed then.
      FloatingPointError: logits that are NaN or all -inf.

    On a mesh of several processes all call this, with the same arguments, and all get the outputs.

    >>> import jaxkv
    >>> model = jaxkv.models.small()
    >>> outputs = jaxkv.generate(model, [list(b"import "), list(b"def main(")], max_new_tokens=8)
    >>> [len(tokens) for tokens in outputs]
    [8, 8]
    """
    if "max_tokens" in engine:  # of a pool, which other libraries call the limit of an output
        raise TypeError(
            "Engine and generate take no max_tokens: did you mean max_new_tokens? The blocks of all rows are "
            "num_blocks, or memory_bytes."
        )
    prompts = read_prompts(prompts)
    limits = read_limits(max_new_tokens, len(prompts))
    lengths = [len(read_prompt(p)) + limit for p, limit in zip(prompts, limits, strict=True)] or [1]
    n, progress = integer("n", n, least=1, most=2**16), flag("progress", progress)
    check_form(model, needs_dtype=engine.get("cache_dtype") is None)
    devices = count_model_shards(model)
    max_seqs = max(1, min(8, n * len(prompts)))
    sizes = {"max_seqs": -(-max_seqs // devices) * devices, "longest": max(lengths)}
    if not ROOM & engine.keys():
        max_seqs = integer("max_seqs", engine.get("max_seqs", sizes["max_seqs"]), least=1)
        max_seq_len = read_longest(max(lengths), getattr(model, "config", None))
        lengths = [min(length, max_seq_len) for length in lengths]
        stored = {name: engine[name] for name in ("head_dim_multiple", "join_kv") if name in engine}
        countable = min(max_seqs, MOST_INDEX // max_seq_len)  # what an Engine of more rows says, it says itself
        block_size = CacheConfig.from_model(
            model, max_seqs=countable, max_seq_len=max_seq_len, dtype=engine.get("cache_dtype"), **stored
        ).block_size
        sizes |= _room(lengths, n, max_seqs // devices, max_seq_len, devices, block_size)
    outputs: list[list[int]] = [[] for _ in range(n * len(prompts))]
    with Engine(model, **sizes | engine) as engine_:
        if engine_.is_following:
            for request in engine_._follow_to_end():
                request.raise_error()
                outputs[request.number] = request.tokens
            return _group(outputs, n)
        tokens = engine_.stream(
            prompts, limits, temperature, eos, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, n=n
        )
        for index, token in _progress_bar(tokens, n * sum(limits)) if progress else tokens:
            outputs[index].append(token)
    return _group(outputs, n)


def _group(outputs: list[list[int]], n: int) -> Any:
    """Returns the outputs of each prompt's n samples together."""
    return outputs if n == 1 else [outputs[i : i + n] for i in range(0, len(outputs), n)]


def _room(
    lengths: list[int], n: int, rows: int, max_seq_len: int, devices: int, block_size: int = BLOCK_SIZE
) -> dict[str, int]:
    """Returns `max_tokens` for n sequences of each length, `rows` at once on each device, if all rows at `max_seq_len`
    take more."""
    longest = sorted(heapq.nlargest(rows, lengths) * min(n, rows), reverse=True)[:rows]  # all may be on one device
    blocks = sum(-(-length // block_size) for length in longest)
    blocks = 1 << max(0, blocks - 1).bit_length()  # few shapes to compile
    if blocks >= rows * -(-max_seq_len // block_size):
        return {}
    return {"max_tokens": devices * blocks * block_size}


def _progress_bar(tokens: Iterable[tuple[int, int]], total: int) -> Any:
    try:
        from tqdm.auto import tqdm
    except ImportError:
        raise ModuleNotFoundError("progress=True needs tqdm: pip install tqdm, or 'jaxkv[hf]'.") from None
    return tqdm(tokens, total=total, unit=" tokens")
