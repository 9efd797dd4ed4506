"""Text generation: continuous batching of many prompts over one cache."""

import inspect
import math
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._core.cache import Cache
from jaxkv._core.checks import check
from jaxkv._core.config import CacheConfig
from jaxkv._core.errors import OutOfBlocks
from jaxkv._core.tables import extend, leave_windows
from jaxkv._engine.resident import Residents, room_of
from jaxkv._engine.sampling import Sampling, greedy, sample
from jaxkv._engine.scheduler import Scheduler, Step
from jaxkv._engine.scheduler import Sequence as _Sequence
from jaxkv._tiers.prefix import PrefixCache


def generate(
    model: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int | Sequence[int] = 64, temperature: float = 0.0,
    eos: int | Collection[int] | None = None, *, top_k: int = 0, top_p: float = 1.0, seed: int = 0,
    progress: bool = False, **engine: Any,
) -> list[list[int]]:  # fmt: skip
    """Continue prompts: token lists in, token lists out.

    Prompts of any length share one paged cache; rows that finish are taken by waiting prompts at once. What a prompt
    gets does not depend on the others.

    Args:
      model: called as `logits, cache = model(tokens, cache=cache)` with packed `i32[N]` tokens; for example what
        `jaxkv.models.load` returns.
      prompts: non-empty lists of token ids.
      max_new_tokens: the most tokens to add, for all prompts or one number for each. A sequence also ends when it
        reaches `max_seq_len`.
      temperature: 0: always the likeliest token; above: sample.
      eos: a token, or several, at which a sequence ends. It is not part of the output.
      top_k: sample among so many likeliest tokens; 0: all.
      top_p: sample among the likeliest tokens that together have this probability.
      seed: of the random draws. The same seed gives the same tokens.
      progress: show a progress bar (needs tqdm).
      **engine: how to hold and compute them: see `Engine`.

    Returns:
      For each prompt the tokens that follow it.

    Raises:
      ValueError: an argument or a prompt that cannot be honoured; nothing has been computed then.

    >>> import jaxkv
    >>> model = jaxkv.models.small()
    >>> outputs = jaxkv.generate(model, [list(b"import "), list(b"def main(")], max_new_tokens=8)
    >>> [len(tokens) for tokens in outputs]
    [8, 8]
    """
    engine_ = Engine(model, longest=_longest(prompts, max_new_tokens), **engine)
    outputs: list[list[int]] = [[] for _ in prompts]
    tokens = engine_.stream(prompts, max_new_tokens, temperature, eos, top_k=top_k, top_p=top_p, seed=seed)
    if progress:
        tokens = _progress_bar(tokens, prompts, max_new_tokens)
    for index, token in tokens:
        outputs[index].append(token)
    return outputs


class Engine:
    """A model and its cache, ready to continue prompts. It keeps its cache between calls.

    Args:
      model: as for `generate`.
      max_seqs: rows of the cache: sequences computed at the same time.
      max_seq_len: the most tokens of one sequence, prompt and output; default: `longest`, rounded up to a power of 2.
      longest: tokens of the longest sequence to come, if `max_seq_len` is not given.
      step_tokens: the most tokens of one step. Longer prompts are computed in chunks beside decoding rows.
      prefix_cache: keep the blocks of what was computed, and share them with prompts that begin alike; `stats` says how
        much that saved. See `PrefixCache`.
      spill_bytes: host memory for what the prefix cache must give up on the device.
      swap: what happens to a sequence that is set back because blocks ran out: it is swapped to host memory ("always"),
        computed again ("never"), or what is estimated to be faster ("auto").
      host_bandwidth: bytes/s to and from host memory, for that estimate.
      **fields: `num_blocks`, `memory_bytes`, `block_size`, `dtype` and other fields of `CacheConfig.from_model`.

    Attributes:
      cache: the cache as it is now; its rows are empty when no `stream` is under way.
      prefix: its `PrefixCache`, or None.
      steps: steps computed so far. tokens: tokens computed so far.
      set_back: how often a sequence was set back because blocks ran out.
      blocks_peak: the most blocks in use at once.
    """

    def __init__(
        self, model: Any, *, max_seqs: int = 8, max_seq_len: int | None = None, longest: int = 1024,
        step_tokens: int = 256, prefix_cache: bool = False, spill_bytes: int = 0,
        swap: Literal["auto", "always", "never"] = "auto", host_bandwidth: float = 1e10, **fields: Any,
    ):  # fmt: skip
        model_config = getattr(model, "config", None)
        if max_seq_len is None:
            max_seq_len = max(64, 1 << (longest - 1).bit_length())
            max_seq_len = min(max_seq_len, getattr(model_config, "max_seq_len", max_seq_len))
        self.model = model
        self.vocab_size: int | None = getattr(model_config, "vocab_size", None)
        self.step_tokens = max(step_tokens, max_seqs)
        self.config = CacheConfig.from_model(
            model, max_seqs=max_seqs, max_seq_len=max_seq_len,
            # What windows give back is of use to a prefix cache, so it wants more than they need.
            step_tokens=None if prefix_cache else self.step_tokens, **fields,
        )  # fmt: skip
        self.prefix = PrefixCache(self.config, spill_bytes=spill_bytes) if prefix_cache else None
        self._residents = Residents(self.config, prefix=self.prefix, swap=swap, host_bandwidth=host_bandwidth)
        self._step_sizes: set[int] = set()  # those compiled so far
        self.steps = self.tokens = 0

    @property
    def cache(self) -> Cache:
        """The cache as it is now."""
        return self._residents.cache

    @property
    def set_back(self) -> int:
        """How often a sequence was set back because blocks ran out."""
        return self._residents.counts["set_back"]

    @property
    def blocks_peak(self) -> int:
        """The most blocks that were in use at once."""
        return sum(int(t.peak) for t in self.cache.tables)

    def stats(self) -> dict[str, Any]:
        """What has been computed so far, as plain numbers; with a prefix cache, also what it saved."""
        counts = {name: self._residents.counts[name] for name in ("set_back", "swapped_out")}
        own = {"steps": self.steps, "tokens": self.tokens, "blocks_peak": self.blocks_peak}
        return own | counts | (self.prefix.stats() if self.prefix else {})

    def problem(self, prompt: Sequence[int], max_new_tokens: int) -> str | None:
        """Why a prompt cannot be continued, or None."""
        limit, config = self._limit(prompt, max_new_tokens), self.config
        if not len(prompt):
            return "it is empty: give at least one token, for example the model's beginning-of-sequence token"
        if len(prompt) >= config.max_seq_len:
            most = f"max_seq_len = {config.max_seq_len}"
            return f"it has {len(prompt)} tokens, and {most} must hold one more: raise max_seq_len"
        for group, num_blocks in enumerate(config.group_blocks):
            if (blocks := config.row_blocks(group, limit)) > num_blocks:
                return (
                    f"its {limit} tokens take {blocks} blocks, but the cache has {num_blocks}: raise num_blocks, or "
                    "lower max_new_tokens"
                )
        if self.vocab_size is not None and not all(0 <= token < self.vocab_size for token in prompt):
            return f"it has a token outside of the model's vocabulary, 0 to {self.vocab_size - 1}"
        return None

    def stream(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int | Sequence[int] = 64, temperature: float = 0.0,
        eos: int | Collection[int] | None = None, *, top_k: int = 0, top_p: float = 1.0, seed: int = 0,
        salt: str | bytes | None = None,
    ) -> Iterator[tuple[int, int]]:  # fmt: skip
        """Yield `(prompt number, token)` as tokens come. Arguments as for `generate`.

        With a prefix cache, prompts share blocks only with those of the same `salt`, for example a tenant's name.

        All arguments are checked before this returns. One stream at a time: leaving it early frees its rows.
        """
        sampling = _sampling(temperature, top_k, top_p, seed)
        limits = _per_prompt(max_new_tokens, len(prompts))
        problems = [
            f"Prompt {i} cannot be continued: {why}."
            for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
            if (why := self.problem(prompt, limit))
        ]
        if problems:
            raise ValueError("\n".join(problems))
        scheduler = Scheduler(self._residents, step_tokens=self.step_tokens)
        for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
            tokens = [int(token) for token in prompt]
            scheduler.waiting.append(_Sequence(i, tokens, len(tokens), self._limit(prompt, limit), salt))
        return self._run(scheduler, sampling, {eos} if isinstance(eos, int) else set(eos or ()))

    def recompute(
        self, prompt: Sequence[int], output: Sequence[int], *, index: int = 0, temperature: float = 0.0, top_k: int = 0,
        top_p: float = 1.0, seed: int = 0,
    ) -> list[int]:  # fmt: skip
        """The tokens that the model chooses after `prompt` and after each token of `output`, without any cache.

        They equal `output` if that is what `stream` yielded for prompt number `index` with the same arguments.
        """
        tokens = [*prompt, *output]
        padded = np.zeros(1 << (len(tokens) - 1).bit_length(), np.int32)  # few shapes; what comes after is not seen
        padded[: len(tokens)] = tokens
        chosen = _recompute(self.model, padded, np.int32(index), _sampling(temperature, top_k, top_p, seed))
        return np.asarray(chosen)[len(prompt) - 1 : len(tokens) - 1].tolist()

    def _limit(self, prompt: Sequence[int], max_new_tokens: int) -> int:
        return min(len(prompt) + max_new_tokens, self.config.max_seq_len)

    def _run(self, scheduler: Scheduler, sampling: Sampling | None, eos: set[int]) -> Iterator[tuple[int, int]]:
        try:
            while scheduler.waiting or scheduler.running:
                step = scheduler.plan()
                if not step.counts:
                    raise OutOfBlocks(_stuck(scheduler, self._residents))
                self._residents.make_room(step.num_blocks)
                next_tokens = self._compute(step, sampling)
                due = scheduler.commit(step)
                for sequence, count in step.counts.items():
                    if count > 1:  # of a prompt: what it has computed is of use to others already
                        self._residents.offer(sequence)
                for sequence in due:
                    token = int(next_tokens[sequence.row])
                    sequence.tokens.append(token)
                    ended = token in eos
                    if ended or len(sequence.tokens) == sequence.limit:
                        scheduler.finish(sequence)
                    if not ended:
                        yield sequence.index, token
        finally:
            for sequence in list(scheduler.running):
                scheduler.finish(sequence)
            self._residents.settle()

    def _compute(self, step: Step, sampling: Sampling | None) -> np.ndarray:
        """Compute one step; the token that follows each row's last one."""
        rows = sorted(step.counts, key=lambda sequence: sequence.row or 0)  # packed tokens come row by row
        tokens = np.zeros(self._bucket(step.num_tokens), np.int32)
        counts, streams = np.zeros((2, self.config.max_seqs), np.int32)
        start = 0
        for sequence in rows:
            count = step.counts[sequence]
            tokens[start : start + count] = sequence.tokens[sequence.cached : sequence.cached + count]
            counts[sequence.row], streams[sequence.row] = count, sequence.index
            start += count
        began = time.perf_counter()
        out, self._residents.cache = _step(
            self.model, self.cache, tokens, counts, streams, sampling, leave=self.prefix is None
        )
        next_tokens, room = jax.device_get(out)
        compiled = len(tokens) not in self._step_sizes
        self._residents.computed(room, None if compiled else (time.perf_counter() - began) / start)
        self._step_sizes.add(len(tokens))
        self.steps, self.tokens = self.steps + 1, self.tokens + start
        if (next_tokens < 0).any():  # the scheduler counts blocks as the cache does: this would be a bug
            check(self.cache)
        return next_tokens

    def _bucket(self, num_tokens: int) -> int:
        """The places of a step, so that steps come in few shapes: one for decoding, then twice as many each."""
        size = self.config.max_seqs
        while size < num_tokens:
            size *= 2
        return min(size, self.step_tokens)


@jax.jit(donate_argnames="cache", static_argnames="leave")
def _step(model, cache, tokens, counts, streams, sampling, *, leave):
    """One step of every row: `i32[S]`, the token after each row's last, -1 where a row's tokens did not fit; and the
    room that is left, after leaving windows or before."""
    cache = extend(cache, counts)
    last = jnp.cumsum(counts) - 1
    logits, cache = _logits_at(model, tokens, cache, jnp.maximum(last, 0))
    next_tokens = _choose(logits, sampling, streams, cache.lengths)
    if leave:
        cache = leave_windows(cache)
    return (jnp.where(cache.failed, -1, next_tokens), room_of(cache)), cache


def _logits_at(model, tokens, cache, places):
    """The logits of some packed tokens only, if the model can spare the others: a prompt's are large."""
    if "logits_at" in inspect.signature(model.__call__).parameters:
        return model(tokens, cache=cache, logits_at=places)
    logits, cache = model(tokens, cache=cache)
    return logits[places], cache


def _choose(logits, sampling, streams, positions):
    return greedy(logits) if sampling is None else sample(logits, sampling, streams, positions)


@jax.jit
def _recompute(model, tokens, stream, sampling):
    """The token that follows each of `i32[T]`, computed without a cache."""
    logits, _ = model(tokens[None], cache=None)
    positions = jnp.arange(1, tokens.shape[0] + 1, dtype=jnp.int32)
    return _choose(logits[0], sampling, jnp.full_like(positions, stream), positions)


def _stuck(scheduler: Scheduler, residents: Residents) -> str:
    waiting = scheduler.waiting[0]
    return (
        f"There is no room for prompt {waiting.index} with {len(waiting.tokens)} tokens: {residents.available} blocks "
        "can be had. Unpin blocks of the prefix cache, or give the cache more num_blocks."
    )


def _sampling(temperature: float, top_k: int, top_p: float, seed: int) -> Sampling | None:
    if not (temperature >= 0 and math.isfinite(temperature)):
        raise ValueError(
            f"temperature must be 0 (always the likeliest token) or a finite number above, not {temperature}."
        )
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1, not {top_p}.")
    if isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 0:
        raise ValueError(f"top_k must be 0 (all tokens) or a positive integer, not {top_k!r}.")
    if temperature == 0:
        return None
    return Sampling(jnp.float32(temperature), jnp.int32(top_k), jnp.float32(top_p), jax.random.key(seed))


def _per_prompt(max_new_tokens: int | Sequence[int], count: int) -> list[int]:
    limits = [max_new_tokens] * count if isinstance(max_new_tokens, int) else list(max_new_tokens)
    if len(limits) != count:
        raise ValueError(
            f"max_new_tokens must be one number or one for each of the {count} prompts, not {len(limits)}."
        )
    for limit in limits:
        if limit < 1:
            raise ValueError(f"max_new_tokens must be at least 1, not {limit}.")
    return limits


def _longest(prompts: Sequence[Sequence[int]], max_new_tokens: int | Sequence[int]) -> int:
    limits = _per_prompt(max_new_tokens, len(prompts))
    return max((len(p) + n for p, n in zip(prompts, limits, strict=True)), default=1)


def _progress_bar(tokens: Iterable[tuple[int, int]], prompts: Sequence[Any], max_new_tokens: Any) -> Any:
    try:
        from tqdm.auto import tqdm
    except ImportError:
        raise ModuleNotFoundError("progress=True needs tqdm: pip install tqdm, or 'jaxkv[hf]'.") from None
    return tqdm(tokens, total=sum(_per_prompt(max_new_tokens, len(prompts))), unit=" tokens")
