"""An engine: requests come and go, their prompts are continued together, and no step waits for the one before."""

import functools
import itertools
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from jaxkv._core.config.cache_config import CacheConfig
from jaxkv._core.config.mesh_shape import mesh_of
from jaxkv._core.config.validation import MOST_INDEX, flag, integer, listed, real, shown
from jaxkv._core.state.device_arrays import in_this_process, parts_of_model
from jaxkv._engine.frontend import metrics as figures
from jaxkv._engine.frontend.build import check_fields, make_loops, read_longest
from jaxkv._engine.frontend.checkpoint import Resumable
from jaxkv._engine.frontend.data_parallel import Shards, config_of_all, share_of
from jaxkv._engine.frontend.engine_lock import Turn
from jaxkv._engine.frontend.lifetime import Closable
from jaxkv._engine.frontend.warmup import call_all
from jaxkv._engine.programs.step import Hook, column_of, read_hook, recompute
from jaxkv._engine.requests.drafters import read_draft
from jaxkv._engine.requests.eviction_policy import Eviction, read_eviction
from jaxkv._engine.requests.hook_args import HookArgs
from jaxkv._engine.requests.request import (
    KeepPrefix,
    Request,
    handed_out,
    problem_of,
    raise_refusal,
    read_eos,
    read_keep_prefix,
    read_limits,
    read_model_eos,
    read_prompt,
    read_salt,
)
from jaxkv._engine.requests.sampling import KINDS, Choice, Kind, read_kinds, read_seed
from jaxkv._engine.runner.cache_manager import Swap
from jaxkv._engine.runner.disaggregated_prefill import check_prefill
from jaxkv._tiers.prefix_cache.data_parallel import as_one


class Engine(Closable, Resumable):
    """A model and its cache, ready to continue prompts. It keeps its cache between calls.

    `submit` takes a request at any time, from any thread; `step` or `run` computes. Everything else is one thread's at
    a time. The next step is sent to the device before the tokens of the last one are read, so tokens come one call of
    `step` late. Whatever interrupts a call, Ctrl-C too: the engine goes on at the next one, and no request is lost. If
    it was JAX's own work on the cache that was interrupted, the next call may say so with a `CacheError`; then `reset`
    goes on from the tokens that requests have.

    Args:
      model: as for `generate`. Its parameters are taken as they are now, and the cache lies on the mesh that they do.
        Rows, blocks and bytes below are divided over its axis "data": each device has a cache of its own, takes its own
        steps, and keeps requests that are placed there, where most of them is known, or else most room is. In each of
        several processes an engine has its own devices of that axis, and sizes are of these.
      max_seqs: rows of the cache: sequences computed at the same time.
      max_seq_len: the most tokens of one sequence, prompt and output; default: `longest`, rounded up to a power of 2.
      longest: tokens of the longest sequence to come, if `max_seq_len` is not given.
      step_tokens: the most tokens of one step. Longer prompts are computed in chunks beside decoding rows.
      long_prefill_tokens: the tokens of a step that prompts get in their order while much shorter ones wait, which get
        the rest; default: half of what decoding rows leave. With `step_tokens` all of it goes by their order.
      steps_per_dispatch: decode so many steps in one call of the device when nothing is waiting that could begin. What
        is submitted meanwhile waits for them.
      seed: of the random draws.
      logits_hook: `f(logits f32[S, V], rows) -> logits`, part of the compiled step, before temperature and filters.
        `rows` has `tokens` i32[S, max_seq_len], each row's so far with a number behind them that is no token,
        `lengths` and `prompt_lengths` i32[S], `numbers` i32[S] of the requests, and `hook_args`, what `submit` was
        given for them; `jaxkv.hooks` has what hooks are made of. Rows that no token is due for are of no account. Where
        it leaves no token a logit above -inf, the request ends with an `error`.
      prefix_cache: keep the blocks of what was computed, and share them with prompts that begin alike, in XLA read once
        where that pays; `stats` says how much was saved. See `PrefixCache`. What it must give up on the device goes to
        `spill_bytes` of host memory, and from there to `disk_bytes` in the folder `disk`, for the next process too:
        `engine.prefix.flush(engine.cache)` writes the rest. Files go by a checksum of the model's parameters.
      swap: what happens to a sequence that is set back because blocks ran out: it is swapped to host memory ("always"),
        computed again ("never"), or what is estimated to be faster ("auto").
      host_bandwidth: bytes/s to and from host memory, for that estimate.
      draft: who guesses tokens, of which one step confirms several: a model with the same vocabulary, which has a cache
        of its own, or "ngram", for what followed the same tokens before. The same tokens come out, but for rounding.
      draft_tokens, draft_branches: the most guesses of a row in a step, and from how many earlier places "ngram" takes
        them: a tree, of which one path counts (32 and 8 do well). `stats()["acceptance"]`: how many were right.
      evict: an `Eviction`: what rows keep after their prompt, or every so many tokens. What they give up is room for
        others, which share nothing with them then: samples compute their prompt each for itself. It does not go with
        `prefix_cache` or `draft`, and rows whose last queries are still wanted are not swapped.
      prefill: the same model on other devices, which computes prompts there, in a cache of its own of the same size.
        Their rows are sent to this cache when there is room, so that no prompt delays a decoding row.
      cache_dtype: what keys and values are stored in, quantised kinds among it; default: the model's dtype.
      **fields: `num_blocks`, `memory_bytes`, `block_size` and other fields of `CacheConfig.from_model`.

    Attributes:
      prefix: its `PrefixCache`, or those of all devices that rows are divided over, or None.
      config: of its cache.

    >>> import jaxkv
    >>> engine = jaxkv.Engine(jaxkv.models.small(), max_seqs=2, max_seq_len=64)
    >>> request = engine.submit(list(b"import "), max_new_tokens=4)
    >>> [token for _, token in engine.run()] == [*request.tokens, None], request.ended
    (True, 'length')
    """

    def __init__(
        self, model: Any, *, max_seqs: int = 8, max_seq_len: int | None = None, longest: int = 1024,
        step_tokens: int = 256, long_prefill_tokens: int | None = None, steps_per_dispatch: int = 1, seed: int = 0,
        logits_hook: Hook | None = None,
        prefix_cache: bool = False, spill_bytes: float = 0, disk: Any = None, disk_bytes: float | None = None,
        swap: Swap = "auto", host_bandwidth: float = 1e10, draft: Any = None, draft_tokens: int = 4,
        draft_branches: int = 1, cache_dtype: Any = None, evict: Eviction | None = None, prefill: Any = None,
        **fields: Any,
    ):  # fmt: skip
        check_fields(fields)
        if swap not in ("auto", "always", "never"):
            raise ValueError(f"swap must be 'auto', 'always' or 'never', not {swap!r}.")
        model_config = getattr(model, "config", None)
        max_seqs = integer("max_seqs", max_seqs, least=1)
        sized = read_longest(longest, model_config)
        max_seq_len = sized if max_seq_len is None else max_seq_len
        if cache_dtype is not None:
            fields["dtype"] = cache_dtype
        host_bandwidth = real("host_bandwidth", host_bandwidth, least=1)
        self.steps_per_dispatch = integer("steps_per_dispatch", steps_per_dispatch, least=1)
        logits_hook, self.seed, self._hook_args = read_hook(logits_hook), read_seed(seed), HookArgs()
        self.vocab_size: int | None = getattr(model_config, "vocab_size", None)
        self.eos_ids = read_model_eos(model_config)
        guesses = read_draft(draft, draft_tokens, draft_branches, model, logits_hook, self.steps_per_dispatch)
        models = parts_of_model(model := in_this_process(model))
        max_seqs, fields = share_of(len(models), max_seqs, fields)
        self.step_tokens = max(integer("step_tokens", step_tokens, least=1), max_seqs * (1 + guesses[0]))
        if long_prefill_tokens is not None:
            long_prefill_tokens = integer("long_prefill_tokens", long_prefill_tokens, least=1)
        evict = read_eviction(evict, prefix_cache=prefix_cache, draft=draft is not None)
        config = CacheConfig.from_model(
            evict.model_of(model) if evict else model, max_seqs=max_seqs, max_seq_len=max_seq_len,
            step_tokens=self.step_tokens, prefix_cache=flag("prefix_cache", prefix_cache), mesh=mesh_of(model),
            **fields,
        )  # fmt: skip
        check_prefill(prefill, model, prefix_cache=prefix_cache, evict=evict)
        self.config = config_of_all(config, len(models))
        self._loops = make_loops(
            models, config, prefix=(prefix_cache, spill_bytes, disk, disk_bytes), swap=swap, evict=evict,
            host_bandwidth=host_bandwidth, hook=logits_hook, hook_args=self._hook_args, step_tokens=self.step_tokens,
            long_prefill_tokens=long_prefill_tokens, steps_per_dispatch=self.steps_per_dispatch, draft=draft,
            guesses=guesses, prefill=prefill,
        )  # fmt: skip
        self.prefix = as_one([loop.residents.prefix for loop in self._loops])
        self._loop = Shards(self._loops, model, self.config) if len(models) > 1 else self._loops[0]
        first = self._loops[0]  # all of them have the same options
        self._residents, self._pipeline, self._prefill = first.residents, first.pipeline, first.prefill
        self._turn = Turn()
        self._numbers = itertools.count()
        self._news: dict[Request, None] = {}  # who may have tokens that `step` and `run` have not handed out

    # What there is.

    @property
    def cache(self) -> Any:
        """The cache as it is now, a `RowShards` if rows are divided; rows are empty when no request is under way."""
        with self._at_work(is_brief=True):
            return self._loop.cache

    @property
    def steps(self) -> int:
        """Steps computed so far, those of prefill apart not counted; where rows are divided, of all devices."""
        return figures.steps(self._loops)

    @property
    def tokens(self) -> int:
        """Tokens computed so far."""
        return figures.tokens(self._loops)

    @property
    def set_back(self) -> int:
        """How often a sequence was set back because blocks ran out."""
        return figures.set_back(self._loops)

    @property
    def blocks_peak(self) -> int:
        """The most blocks that were in use at once; where rows are divided, on each device."""
        with self._at_work(is_brief=True):
            return figures.blocks_peak(self._loops)

    def stats(self) -> dict[str, Any]:
        """What has been computed so far, as plain numbers; with a prefix cache, also what it saved."""
        with self._at_work(is_brief=True):
            return figures.all_of_them(self._loops) | (self.prefix.stats() if self.prefix else {})

    def problem(self, prompt: Sequence[int], max_new_tokens: int) -> str | None:
        """Why a prompt cannot be continued, or None."""
        self._turn.refuse_closed()
        own = self._residents
        return problem_of(prompt, max_new_tokens, own.config, self.vocab_size, own.holdings)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to do: `run` would end at once, and `step` return nothing."""
        return not (self._loop.is_busy or self._news)

    # Requests.

    def submit(
        self, prompt: Sequence[int], max_new_tokens: int = 64, temperature: float = 0.0, *, top_k: int = 0,
        top_p: float = 1.0, min_p: float = 0.0, eos: int | Collection[int] | None = None,
        salt: str | bytes | None = None, n: int = 1, logprobs: int = 0, seed: int | None = None, priority: int = 0,
        hook_args: Any = None, keep_prefix: KeepPrefix = True,
    ) -> Request:  # fmt: skip
        """Ask for a prompt to be continued; `step` and `run` do it. May be called from any thread, and while they run.

        Args:
          max_new_tokens, temperature, top_k, top_p, min_p, eos: as for `generate`.
          salt: with a prefix cache, share blocks only with requests of the same one, for example a tenant's name.
          n: so many samples, which share the prompt's blocks; see `Request.samples`.
          logprobs: keep the log-probabilities of so many likeliest tokens and of the chosen one, from the model's own
            logits, before temperature and hook.
          seed: of its random draws, so that it gets the same tokens whatever was asked for before: those that
            `generate` gives one prompt with this seed. Default: the engine's, and the request's number.
          priority: a lower number is served earlier, as in vLLM; of equal ones, who came first. When blocks run out,
            those that are served last are set back.
          hook_args: numbers for the `logits_hook`, in `rows.hook_args` for each row: a pytree of numbers and small
            arrays, with the same fields and shapes in every request. Zeros stand for who gives none.
          keep_prefix: with a prefix cache, what it keeps of the request for others to find. True: all that was
            computed. "prompt": blocks of the prompt alone, say where outputs are never continued. False: nothing, and
            meanwhile nobody shares with it. It may find what others have left in any case.

        Raises:
          ValueError: an argument that cannot be honoured; nothing has changed then.
        """
        if why := self.problem(prompt, max_new_tokens):
            raise ValueError(f"The prompt cannot be continued: {why}.")
        count = integer("n", n, least=1, most=2**16)
        own = self.seed if seed is None else seed
        choice = functools.partial(Choice.read, temperature, top_k, top_p, min_p, own)
        choices = [choice(None if seed is None else j) for j in range(count)]
        options = {
            "eos": read_eos(eos, self.eos_ids),
            "salt": read_salt(salt),
            "num_logprobs": self._read_logprobs(logprobs),
        }
        options["keep_prefix"] = read_keep_prefix(keep_prefix)
        options["priority"] = integer("priority", priority, least=-MOST_INDEX, most=MOST_INDEX)
        options["hook_args"] = self._read_hook_args(hook_args)
        request = Request.several([
            self._request(next(self._numbers), prompt, max_new_tokens, choice, self._news, **options)
            for choice in choices
        ])  # fmt: skip
        self._loop.submitted.append(request)
        self._turn.refuse_closed()  # by another thread, meanwhile
        return request

    def cancel(self, request: Request) -> None:
        """Take a request back: no more tokens come, and its row is free again. Does nothing if it is done.

        May be called from any thread; the row is free when the thread that runs the engine comes to it.
        """
        if not isinstance(request, Request):
            raise ValueError(f"request must be what submit returned, not {shown(request)}.")
        request.cancel()  # the engine that it was submitted to takes it back

    def step(self) -> list[tuple[Request, int | None]]:
        """Send the next step to the device, and read the one before: its `(request, token)` pairs.

        Each request's last pair is `(request, None)`: it has ended, by whatever `request.ended` says.

        Raises:
          OutOfBlocks: a request, the error's `request`, cannot begin, because pinned blocks of the prefix cache leave
            no room. It has ended with an `error` and is named once; the others go on at the next call.
          RuntimeError: another thread is at work. CacheError: the cache was lost; see `reset`.
        """
        with self._at_work():
            if self._loop.is_busy:
                self._loop.advance()
            raise_refusal(self._news)
            return list(handed_out(self._news))

    def run(self) -> Iterator[tuple[Request, int | None]]:
        """Yield `(request, token)` as tokens come, until no request is left, those submitted meanwhile included.

        Each request's last pair is `(request, None)`: it has ended, by a stop token, `cancel`, an error or its limit.
        A request that cannot begin ends with an `error`, which is not raised here. Leaving it early leaves the requests
        as they are: a later `run` or `step` goes on with them.
        """
        with self._in_turn():
            self._turn.refuse_closed()
            yield from handed_out(self._news)
            while not self.is_idle:
                if self._loop.is_busy:
                    with self._compute():
                        self._loop.advance()
                yield from handed_out(self._news)

    def reset(self) -> None:
        """Begin anew with an empty cache and prefix cache. Requests that are not done go on from what they have."""
        with self._at_work():
            self._loop.reset()

    def warmup(self, *, kinds: Iterable[Kind] = KINDS, logprobs: Iterable[int] = (0,), progress: bool = True) -> None:
        """Compile what steps and a prefix cache need, so that requests wait for nothing but what swaps and spills need.

        Args:
          kinds: of requests to come: "greedy" (temperature 0), "sampled" (above), "filtered" (with top_k, top_p or
            min_p).
          logprobs: numbers of log-probabilities that they want; one program serves up to the next power of 2.
          progress: show a progress bar, if tqdm is there.
        """
        counts = tuple(n and 1 << (n - 1).bit_length() for n in map(self._read_logprobs, listed("logprobs", logprobs)))
        wanted = read_kinds(kinds)
        with self._at_work():
            call_all(self._loop.warm(wanted, counts), progress)

    def stream(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int | Sequence[int] = 64, temperature: float = 0.0,
        eos: int | Collection[int] | None = None, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0,
        seed: int | None = None, salt: str | bytes | None = None, n: int = 1,
    ) -> Iterator[tuple[int, int]]:  # fmt: skip
        """Yield `(prompt number, token)` as tokens come; `(i * n + j, token)` of sample j of prompt i, if n is not 1.

        Arguments are those of `generate`, and all of them are checked before this returns. Leaving it early frees its
        rows. With a prefix cache, prompts share blocks only with those of the same `salt`, for example a tenant's name.

        Raises:
          ValueError: an argument or a prompt that cannot be honoured.
          FloatingPointError: logits that leave no choice, NaN or all -inf; tokens that came before have been yielded.
          OutOfBlocks: a prompt cannot begin, because pinned blocks of the prefix cache leave no room.
        """
        n = integer("n", n, least=1, most=2**16)
        choice = Choice.read(temperature, top_k, top_p, min_p, self.seed if seed is None else seed)
        prompts = listed("prompts", prompts)
        limits = read_limits(max_new_tokens, len(prompts))
        options: dict[str, Any] = {"eos": read_eos(eos, self.eos_ids), "salt": read_salt(salt), "num_logprobs": 0}
        problems = [
            f"Prompt {i} cannot be continued: {why}."
            for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
            if (why := self.problem(prompt, limit))
        ]
        if problems:
            raise ValueError("\n".join(problems))
        news: dict[Request, None] = {}
        return self._stream(news, [
            [self._request(i * n + j, prompt, limit, choice, news, **options) for j in range(n)]
            for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
        ])  # fmt: skip

    def recompute(
        self, prompt: Sequence[int], output: Sequence[int], *, index: int = 0, temperature: float = 0.0, top_k: int = 0,
        top_p: float = 1.0, min_p: float = 0.0, seed: int | None = None, hook_args: Any = None,
    ) -> list[int]:  # fmt: skip
        """The tokens that the model chooses after `prompt` and after each token of `output`, without any cache.

        They equal `output` if `stream` yielded that for prompt number `index` with the same arguments, or its request.

        Raises:
          ValueError: what is no list of tokens; an engine with `evict=`, whose rows see what a cache has kept.
        """
        if (eviction := self._residents.eviction) is not None:
            kept = f"what {eviction.name} has kept in one"
            raise ValueError(
                f"recompute has no cache, and outputs here follow from {kept}: ask an Engine without evict."
            )
        choice = Choice.read(temperature, top_k, top_p, min_p, self.seed if seed is None else seed)
        self._turn.refuse_closed()
        parts, tokens = self._pipeline, read_prompt([*listed("prompt", prompt), *listed("output", output)])
        if isinstance(tokens, str) or not len(prompt):
            raise ValueError("The prompt and the output must be lists of token ids, and the prompt not empty.")
        column, form = column_of(choice, index, len(prompt), self._read_hook_args(hook_args), self._hook_args)
        chosen = recompute(
            parts.structure, parts.leaves, parts.hook, self.config.max_seq_len, tokens, column, choice.kind, form
        )
        return chosen[len(prompt) - 1 : len(tokens) - 1]

    # The parts.

    def _request(self, number: int, prompt: Any, max_new_tokens: int, choice: Choice, news: dict, **options) -> Request:
        tokens = read_prompt(prompt)
        assert isinstance(tokens, list)
        limit = min(int(max_new_tokens), self.config.max_seq_len - len(tokens))
        return Request(
            number=number, prompt=tokens, limit=limit, choice=choice, news=news, engine=weakref.ref(self), **options
        )

    def _read_hook_args(self, hook_args: Any) -> Any:
        if hook_args is not None and self._pipeline.hook is None:
            raise ValueError("hook_args are for a logits_hook, and this Engine has none: make it with logits_hook=.")
        return self._hook_args.read(hook_args)

    def _read_logprobs(self, logprobs: Any) -> int:
        return integer("logprobs", logprobs, least=0, most=self.vocab_size or 2**16)

    def _stream(self, news: dict[Request, None], prompts: list[list[Request]]) -> Iterator[tuple[int, int]]:
        requests = [request for samples in prompts for request in samples]
        with self._in_turn():
            try:
                self._loop.submitted.extend(map(Request.several, prompts))
                left = set(requests)
                while left:
                    with self._compute():
                        self._loop.advance()
                    failed = [request for request in news if request.error]
                    for request, token in handed_out(news):
                        if token is None:
                            left.discard(request)
                        else:
                            yield request.number, token
                    raise_refusal(dict.fromkeys(failed))
                    for request in failed:
                        raise FloatingPointError(f"Sequence {request.number} cannot go on: {request.error}.")
            finally:
                self._withdraw(requests)
