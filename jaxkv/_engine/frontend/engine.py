"""The engine: continuous batching of requests, with asynchronous steps that do not wait for the one before."""

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Unpack

from jaxkv._core.config.cache_config import CacheConfig
from jaxkv._core.config.fields import EngineFields
from jaxkv._core.config.mesh_shape import find_mesh
from jaxkv._core.config.validation import flag, integer, read_list, real, refuse_unknown, show
from jaxkv._core.state.device_arrays import split_model, take_local_model
from jaxkv._engine.frontend import metrics
from jaxkv._engine.frontend.build import MEANT, CoreOptions, check_fields, make_cores, read_deterministic, read_longest
from jaxkv._engine.frontend.checkpoint import Resumable
from jaxkv._engine.frontend.data_parallel import DataParallelCores, join_config, split_fields
from jaxkv._engine.frontend.engine_lock import EngineLock
from jaxkv._engine.frontend.request_reader import RequestReader, check_hook_args
from jaxkv._engine.frontend.rollouts import Updatable
from jaxkv._engine.frontend.serving import Servable
from jaxkv._engine.frontend.warmup import call_all
from jaxkv._engine.hosts.channel import list_engine_processes, refuse_options
from jaxkv._engine.hosts.lockstep import LockstepCores
from jaxkv._engine.hosts.prefix import share_prefix
from jaxkv._engine.programs.model import ADAPTERS_ARGUMENT, Model, check_form, check_shapes, takes
from jaxkv._engine.programs.recompute import recompute
from jaxkv._engine.programs.step_rows import Hook, column_of, read_hook
from jaxkv._engine.requests.drafters import read_draft
from jaxkv._engine.requests.eviction_policy import Eviction, read_eviction
from jaxkv._engine.requests.hook_args import HookArgs, to_json
from jaxkv._engine.requests.request import KeepPrefix, Request
from jaxkv._engine.requests.sampling import KINDS, Kind, SamplingParams, read_kinds, read_seed
from jaxkv._engine.requests.stops import TokenizerLike
from jaxkv._engine.requests.submission import (
    count_most_tokens,
    find_foreign,
    read_model_eos,
    read_prompt,
    read_prompts,
)
from jaxkv._engine.requests.waiting import collect_tokens, raise_refusal
from jaxkv._engine.runner.disaggregated_prefill import check_prefill
from jaxkv._engine.runner.model_runner import count_likeliest
from jaxkv._engine.runner.swap_policy import Swap
from jaxkv._tiers.prefix_cache.data_parallel import join_prefixes


class Engine(Servable, Resumable, Updatable):
    """A model and its cache, ready to continue prompts. The cache persists between calls.

    `submit` adds a request at any time, from any thread; `step` or `run` computes. All other methods are for one thread
    at a time. The next step is sent to the device before the tokens of the last one are read, so tokens come one call
    of `step` late. After any interrupt, Ctrl-C too, the engine goes on at the next call, and no request is lost. If JAX
    was interrupted while it worked on the cache, the next call may raise a `CacheError`; then `reset` goes on from the
    tokens that requests have.

    Args:
      model: as for `generate`. Its parameters are read now, and the cache is placed on the parameters' mesh. Rows,
        blocks and bytes below are divided over the mesh axis "data". Each of its devices has its own cache, takes its
        own steps and keeps the requests placed there: where most of their prefix is cached, else where most room is. On
        a mesh of several processes all make the engine, with the same arguments: see `follow`. But where each part of
        the axis "data" is in one process, each process's engine has its own parts alone, and sizes are of these.
      max_seqs: rows of the cache: sequences computed at the same time.
      max_seq_len: the limit of tokens of a sequence, prompt and output; default: `longest`, rounded up to a power of 2.
        If all layers have windows or chunks, a sequence goes on beyond it, without `logits_hook`, `prefill`, `evict` or
        a draft model.
      longest: tokens of the longest expected sequence, if `max_seq_len` is not given.
      step_tokens: the limit of tokens of a step. Longer prompts are computed in chunks beside decoding rows.
      long_prefill_tokens: tokens of a step for prompts in their order while much shorter prompts wait, which get the
        rest; default: half of what decoding rows leave. With `step_tokens` all prompts are served in order.
      steps_per_dispatch: decode steps in one call of the device while no waiting request could begin. Requests
        submitted meanwhile wait for them. For small models on a GPU, whose steps the host starts no faster than they
        run: 8 made one of SmolLM2-135M 1.0 ms for 1.6 on an H200.
      seed: the seed of the random draws.
      logits_hook: `f(logits f32[S, V], rows) -> logits`, part of the compiled step, before temperature and filters.
        `rows` has `tokens` i32[S, max_seq_len], each row's tokens so far and then a number that is no token, `lengths`
        and `prompt_lengths` i32[S], `numbers` and `adapters` i32[S] of the requests, and their `hook_args` from
        `submit`; `jaxkv.hooks` has building blocks. The logits of rows that get no token are ignored. If a row has no
        logit above -inf left, its request ends with an `error`. If the hook raises, all requests of that step do.
      hook_args: those of requests that give none; default: zeros. With them `rows.hook_args` is never None, and all
        programs are compiled once: without, anew behind the first request that gives some.
      prefix_cache: keep computed blocks and share them with prompts of the same prefix; XLA reads them once where that
        pays. `stats` reports the savings. See `PrefixCache`. Blocks evicted from the device go to `spill_bytes` of host
        memory, and from there to `disk_bytes` in the folder `disk`, for the next process too:
        `engine.prefix.flush(engine.cache)` writes the rest. Files are keyed by a checksum of the model's parameters.
        With recurrent layers `snapshot_bytes` of device memory hold their states; default: a tenth of the cache.
      swap: how to preempt a sequence when blocks run out: swap it to host memory ("always"), compute it again
        ("never"), or whichever is estimated to be faster ("auto").
      host_bandwidth: bytes/s to and from host memory, for that estimate.
      draft: the drafter for speculative decoding: a model with the same vocabulary, which has its own cache, or
        "ngram", for tokens that followed the same ones before. The output is the same, up to rounding.
      draft_tokens, draft_branches: the limit of draft tokens of a row in a step, and the branches of the tree that
        "ngram" drafts, one path of which is accepted (32 and 8 do well). See `stats()["acceptance"]`.
      evict: an `Eviction`: which tokens rows keep after their prompt, or periodically. Evicted blocks are free for
        other rows. Rows then share nothing: each sample computes its prompt. Not with `prefix_cache` or `draft`. Rows
        whose last queries are still needed are not swapped.
      prefill: the same model on other devices, which computes prompts in its own cache of the same size. Rows are sent
        to this cache when there is room, so that no prompt delays a decoding row. Or the address of another process,
        whose engine of the same model is in `serve_prefill`: prompts are computed there, and here while it is gone.
      deterministic: call the model with `deterministic=True`, which the models of `jaxkv.models` give to
        `jaxkv.attention`: a row's attention is the same to the bit with any other rows, blocks and order, at
        the cost of some speed. A token that is computed by itself may round otherwise than in a piece of two or more:
        how a prompt is cut goes by what else is served, and a preempted row is computed again in pieces, unless
        `swap="always"`. XLA computes the model's other sums as usual.
      max_waiting: the limit of samples that wait while all rows are taken; `submit` raises `EngineFull` where there
        would be more. Those that free rows take at the next step do not count. Default: any number.
      cache_dtype: the dtype of stored keys and values, or a quantized format, such as "int8" or "k5v3"; default:
        the model's dtype.
      **fields: `num_blocks`, `memory_bytes`, `block_size` and other fields of `CacheConfig.from_model`.

    Attributes:
      prefix: its `PrefixCache`, or those of all devices that rows are divided over, or None.
      config: the config of its cache.

    >>> import jaxkv
    >>> engine = jaxkv.Engine(jaxkv.models.small(), max_seqs=2, max_seq_len=64)
    >>> request = engine.submit(list(b"import "), max_new_tokens=4)
    >>> [token for _, token in engine.run()] == [*request.tokens, None], request.ended
    (True, 'length')
    """

    def __init__(
        self,
        model: Model,
        *,
        max_seqs: int = 8,
        max_seq_len: int | None = None,
        longest: int = 1024,
        step_tokens: int = 256,
        long_prefill_tokens: int | None = None,
        steps_per_dispatch: int = 1,
        seed: int = 0,
        logits_hook: Hook | None = None,
        hook_args: Any = None,
        prefix_cache: bool = False,
        spill_bytes: float = 0,
        disk: Any = None,
        disk_bytes: float | None = None,
        snapshot_bytes: float | None = None,
        swap: Swap = "auto",
        host_bandwidth: float = 1e10,
        draft: Any = None,
        draft_tokens: int = 4,
        draft_branches: int = 1,
        cache_dtype: Any = None,
        evict: Eviction | None = None,
        prefill: Any = None,
        deterministic: bool = False,
        max_waiting: int | None = None,
        **fields: Unpack[EngineFields],
    ):
        sizes: dict[str, Any] = dict(fields)
        check_fields(sizes)
        self._prepare_serving(max_waiting)
        if not isinstance(swap, str) or swap not in ("auto", "always", "never"):
            raise ValueError(f"swap must be 'auto', 'always' or 'never', not {show(swap)}.")
        check_form(model, needs_dtype=cache_dtype is None)
        model_config = getattr(model, "config", None)
        max_seqs = integer("max_seqs", max_seqs, least=1)
        sized = read_longest(longest, model_config)
        max_seq_len = sized if max_seq_len is None else max_seq_len
        if cache_dtype is not None:
            sizes["dtype"] = cache_dtype
        host_bandwidth = real("host_bandwidth", host_bandwidth, least=1)
        self.steps_per_dispatch = integer("steps_per_dispatch", steps_per_dispatch, least=1)
        logits_hook, self.seed = read_hook(logits_hook), read_seed(seed)
        check_hook_args(hook_args, logits_hook is not None)
        known_args = HookArgs(hook_args)
        self.vocab_size: int | None = getattr(model_config, "vocab_size", None)
        self.eos_ids = read_model_eos(model_config)
        of_steps = (logits_hook, self.steps_per_dispatch, sizes.get("residual_length"))
        guesses = read_draft(draft, draft_tokens, draft_branches, model, *of_steps)
        models = split_model(model := take_local_model(model))
        if processes := list_engine_processes(models[0]):
            refuse_options(prefill=prefill, disk=disk)
        max_seqs, sizes = split_fields(len(models), max_seqs, sizes)
        self.step_tokens = max(integer("step_tokens", step_tokens, least=1), max_seqs * (1 + guesses[0]))
        if long_prefill_tokens is not None:
            long_prefill_tokens = integer("long_prefill_tokens", long_prefill_tokens, least=1)
        evict = read_eviction(evict, prefix_cache=prefix_cache, draft=draft is not None)
        mesh = find_mesh(model)
        config = CacheConfig.from_model(
            evict.model_of(model) if evict else model,
            max_seqs=max_seqs,
            max_seq_len=max_seq_len,
            step_tokens=self.step_tokens,
            prefix_cache=flag("prefix_cache", prefix_cache),
            mesh=mesh,
            **sizes,
        )
        deterministic = read_deterministic(deterministic, model, None if isinstance(prefill, str) else prefill)
        keepers = (logits_hook, prefill, evict, None if draft == "ngram" else draft)
        check_prefill(prefill, model, prefix_cache=prefix_cache, evict=evict)
        logits_size = check_shapes(models[0], config, is_divided=mesh is not None)
        self.config = join_config(config, len(models))
        options = CoreOptions(
            step_tokens=self.step_tokens,
            long_prefill_tokens=long_prefill_tokens,
            steps_per_dispatch=self.steps_per_dispatch,
            draft_tokens=guesses[0],
            draft_branches=guesses[1],
            swap=swap,
            host_bandwidth=host_bandwidth,
            evict=evict,
            hook=logits_hook,
            hook_args=known_args,
            deterministic=deterministic,
            prefix_cache=prefix_cache,
            spill_bytes=spill_bytes,
            disk=disk,
            disk_bytes=disk_bytes,
            snapshot_bytes=snapshot_bytes,
        )
        self._cores = make_cores(models, config, options, draft=draft, prefill=prefill, vocab_size=logits_size)
        self._core = DataParallelCores(self._cores, model, self.config) if len(models) > 1 else self._cores[0]
        self._turn, outer_args = EngineLock(), known_args  # of the requests that are submitted
        if processes:
            numbers: list[Any] = [step_tokens, long_prefill_tokens, steps_per_dispatch, seed, prefix_cache, spill_bytes]
            others = [snapshot_bytes, swap, host_bandwidth, guesses, draft == "ngram", deterministic]
            of_hook = [logits_hook is not None, to_json(hook_args)]
            said = repr([*numbers, *others, evict and evict.plain_fields, *of_hook])
            outer_args = HookArgs(hook_args)
            self._core = LockstepCores(self._core, self._cores, processes, said, known_args, outer_args)
            self._turn.refuse = self._core.refuse_follower
        self.prefix = share_prefix(self._core, join_prefixes([core.cache_manager.prefix for core in self._cores]))
        first = self._cores[0]  # all of them have the same options
        self._cache_manager, self._runner, self._prefill = first.cache_manager, first.runner, first.prefill
        self._remember_given(model)
        self._reader = RequestReader(
            self,
            vocab_size=self.vocab_size,
            hook_args=outer_args,
            has_hook=logits_hook is not None,
            is_apart=prefill is not None,
            holdings=self._cache_manager.holdings,
            takes_adapters=logits_hook is not None or takes(model, ADAPTERS_ARGUMENT),
            most_tokens=count_most_tokens(config, keeps_tokens=any(x is not None for x in keepers)),
        )

    # What there is.

    @property
    def cache(self) -> Any:
        """The current cache, a `RowShards` if rows are divided; rows are empty when no request is running."""
        with self._exclusive(is_brief=True):
            return self._core.cache

    @property
    def steps(self) -> int:
        """Steps computed so far on all devices, those of disaggregated prefill not counted."""
        return metrics.steps(self._cores)

    @property
    def tokens(self) -> int:
        """Tokens computed so far."""
        return metrics.tokens(self._cores)

    @property
    def set_back(self) -> int:
        """Preemptions so far, because blocks ran out."""
        return metrics.set_back(self._cores)

    @property
    def blocks_peak(self) -> int:
        """The peak number of blocks in use; where rows are divided, of each device."""
        with self._exclusive(is_brief=True):
            return metrics.blocks_peak(self._cores)

    def stats(self) -> dict[str, Any]:
        """Returns what there is to do, and counters of the work so far, as plain numbers; from any thread.

        `running` and `waiting` samples, `oldest_waiting_seconds`, `free_rows` and `free_blocks`; `steps`, `tokens`,
        `preemptions`, `acceptance` of draft tokens; quantiles of `first_token_seconds` and `between_tokens_seconds`;
        with a prefix cache also its `PrefixCache.stats`. docs/serving.md says each key's meaning.
        """
        with self._exclusive(is_brief=True):
            found = metrics.collect(self._cores) | {"waiting": self.num_waiting} | self._latencies.stats()
            return found | (self.prefix.stats() if self.prefix else {})

    def metrics_text(self) -> str:
        """Returns `stats` in Prometheus' text format, for an endpoint `/metrics`. From any thread.

        Raises ImportError without the package `prometheus_client`.
        """
        return metrics.render_prometheus(self.stats())

    def __repr__(self) -> str:
        if self.is_closed:
            return "Engine(closed)"
        rows, running = self.config.max_seqs, sum(len(core.scheduler.running) for core in self._cores)
        free, blocks = map(sum, zip(*(core.cache_manager.scarcest_room for core in self._cores), strict=True))
        served = ", served" if self.is_served else ""
        return (
            f"Engine({running} of {rows} rows running, {self.num_waiting} waiting, {free} of {blocks} blocks "
            f"free{served})"
        )

    def problem(self, prompt: Sequence[int], max_new_tokens: int) -> str | None:
        """Returns why a prompt cannot be continued, or None."""
        self._turn.refuse_closed()
        return self._reader.find_problem(prompt, max_new_tokens)

    @property
    def is_idle(self) -> bool:
        """Tells whether no work is left: `run` would end at once, and `step` return nothing."""
        return self.is_closed or not (self._core.is_busy or self._reader.news)

    # Requests.

    @refuse_unknown("submit", MEANT)
    def submit(
        self,
        prompt: Sequence[int],
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        *,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        eos: int | Collection[int] | None = None,
        salt: str | bytes | None = None,
        n: int = 1,
        logprobs: int | None = None,
        seed: int | None = None,
        priority: int = 0,
        hook_args: Any = None,
        keep_prefix: KeepPrefix = True,
        adapter: int = 0,
        stop: str | Collection[Collection[int] | str] | None = None,
        include_stop: bool = False,
        tokenizer: TokenizerLike | None = None,
        on_token: Callable[[Request, int | None], Any] | None = None,
        prompt_logprobs: bool | int | None = False,
    ) -> Request:
        """Adds a request to continue a prompt, for `step` and `run`. May be called from any thread, and meanwhile.

        Args:
          max_new_tokens, temperature, top_k, top_p, min_p, eos: as for `generate`.
          salt: with a prefix cache, share blocks only with requests of the same salt, for example a tenant's name.
          n: the number of samples, which share the prompt's blocks; see `Request.samples`.
          logprobs: keep the log-probabilities of this number of likeliest tokens and of the chosen one, from the
            model's own logits, before temperature and hook. 0: of the chosen one alone. None: none.
          seed: the seed of its random draws, which makes its tokens independent of earlier requests: those that
            `generate` gives one prompt with this seed. Default: the engine's seed and the request's number.
          priority: a lower number is served earlier, as in vLLM; equal ones in order of arrival. When blocks run out,
            the requests that are served last are preempted.
          hook_args: numbers for the `logits_hook`, in `rows.hook_args` for each row: a pytree of numbers and small
            arrays, with the same fields and shapes in every request. Requests without them get zeros.
          keep_prefix: with a prefix cache, the blocks of the request that it keeps for others. True: all blocks.
            "prompt": blocks of the prompt alone, say where outputs are never continued. False: none, and no request
            shares with it meanwhile. In any case it may use blocks of others.
          adapter: the number of the adapter, such as a LoRA, that its keys, values and tokens depend on; 0: none. A
            model whose call has an argument `adapters` gets those of all rows, i32[S], and a hook has them in
            `rows.adapters`. With a prefix cache only requests of the same adapter share blocks; `PrefixCache` names it
            `adapter=str(number)`, and None for 0.
          stop: stop sequences, each a list of token ids, or text. The first that appears in the output ends the
            request, and is not part of its `tokens`; no part of it is returned before.
          include_stop: keep the stop sequence in `tokens` and `text`, and hold nothing back.
          tokenizer: the model's `jaxkv.text.Tokenizer`, for text in `stop` and for `Request.text`.
          on_token: called as `on_token(request, token)` with each token, and at the end with None, in the thread that
            takes the steps. If it raises, the request ends with that error, and it is not called again.
          prompt_logprobs: True or 0: keep the log-probabilities of the prompt's tokens, in `Request.prompt_logprobs`.
            A number: and those of so many likeliest tokens at each of its positions, in `Request.prompt_top_logprobs`.
            The whole prompt is computed then, also where a prefix cache has some of it. `max_new_tokens` may be 0.
            False or None: none.

        Raises:
          ValueError: an invalid argument; nothing has changed then. EngineFull: `max_waiting` samples wait for a row.
        """
        self._turn.refuse_closed()
        limit, samples = self._reader.read(
            prompt,
            max_new_tokens,
            n,
            (temperature, top_k, top_p, min_p, seed),
            stop=stop,
            tokenizer=tokenizer,
            prompt_logprobs=prompt_logprobs,
            eos=eos,
            salt=salt,
            logprobs=logprobs,
            adapter=adapter,
            keep_prefix=keep_prefix,
            priority=priority,
            include_stop=include_stop,
            on_token=on_token,
        )
        self._refuse_full(len(samples))
        request = self._reader.make(prompt, limit, samples, hook_args)
        if not self._core.is_busy:
            self._warn_of_other_weights()
        self._core.submitted.append(request)
        self._wake()
        self._turn.refuse_closed()  # another thread may have closed it meanwhile
        return request

    def cancel(self, request: Request) -> None:
        """Cancels a request: no more tokens come, and its row is freed. Does nothing if it is done.

        May be called from any thread; the thread that runs the engine frees the row at its next step.
        """
        if not isinstance(request, Request):
            raise ValueError(f"request must be what submit returned, not {show(request)}.")
        request.cancel()  # goes to the engine that it was submitted to

    def step(self) -> list[tuple[Request, int | None]]:
        """Sends the next step to the device, and returns the `(request, token)` pairs of the step before.

        Each request's last pair is `(request, None)`: it has ended, for the reason in `request.ended`.

        Raises:
          OutOfBlocks: a request, the error's `request`, cannot begin, because pinned blocks of the prefix cache leave
            no room. It has ended with an `error` and is raised once; the others go on at the next call.
          RuntimeError: another thread is using the engine. CacheError: the cache was lost; see `reset`.
          What `logits_hook` raises; the requests of that step have ended with it.
        """
        self._refuse_served("step")
        with self._exclusive():
            if self._core.is_busy:
                self._advance()
            raise_refusal(self._reader.news)
            return list(collect_tokens(self._reader.news))

    def run(self) -> Iterator[tuple[Request, int | None]]:
        """Yields `(request, token)` as tokens come, until no request is left, including those submitted meanwhile.

        Each request's last pair is `(request, None)`: it has ended, by a stop token, `cancel`, an error or its limit.
        A request that cannot begin ends with an `error`, which is not raised here. Closing the iterator early keeps all
        requests: a later `run` or `step` goes on with them.
        """
        self._refuse_served("run")
        with self._turn.hold():
            self._turn.refuse_closed()
            yield from collect_tokens(self._reader.news)
            while not self.is_idle:
                if self._core.is_busy:
                    with self._compute():
                        self._advance()
                yield from collect_tokens(self._reader.news)

    def reset(self) -> None:
        """Empties the cache and the prefix cache. Requests that are not done go on from their tokens."""
        with self._exclusive():
            self._core.reset()

    def warmup(
        self, *, kinds: Iterable[Kind] = KINDS, logprobs: Iterable[int | None] = (None,), progress: bool = True
    ) -> None:
        """Compiles programs of steps and the prefix cache in advance.

        Those of swaps, of spills and of `prompt_logprobs` come later.

        Args:
          kinds: of expected requests: "greedy" (temperature 0), "sampled" (above), "filtered" (with top_k, top_p or
            min_p).
          logprobs: their values of `logprobs`; one program serves up to the next power of 2.
          progress: show a progress bar, if tqdm is installed.
        """
        wanted_logprobs = [None, *read_list("logprobs", logprobs)]  # requests that want none come beside the others
        counts = tuple({count_likeliest(self._reader.read_logprobs(n)): None for n in wanted_logprobs})
        wanted, progress = read_kinds(kinds), flag("progress", progress)
        with self._exclusive():
            call_all(self._core.warm(wanted, counts), progress)

    @refuse_unknown("stream", MEANT)
    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int | Sequence[int] = 64,
        temperature: float = 0.0,
        eos: int | Collection[int] | None = None,
        *,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int | None = None,
        salt: str | bytes | None = None,
        n: int = 1,
    ) -> Iterator[tuple[int, int]]:
        """Yields `(prompt number, token)` as tokens come; `(i * n + j, token)` for sample j of prompt i, if n is not 1.

        Arguments are those of `generate`; all are checked before this returns. Closing the iterator early frees its
        rows. With a prefix cache, prompts share blocks only with those of the same `salt`, for example a tenant's name.

        Raises:
          ValueError: an invalid argument or prompt.
          FloatingPointError: logits that are NaN or all -inf; earlier tokens have been yielded.
          OutOfBlocks: a prompt cannot begin, because pinned blocks of the prefix cache leave no room.
        """
        self._turn.refuse_closed()
        news: dict[Request, None] = {}
        draw = (temperature, top_k, top_p, min_p, seed)
        prompts = read_prompts(prompts)
        requests = self._reader.read_stream(prompts, max_new_tokens, n, draw, eos=eos, salt=salt, news=news)
        return self._stream(news, requests)

    def recompute(
        self,
        prompt: Sequence[int],
        output: Sequence[int],
        *,
        index: int = 0,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int | None = None,
        hook_args: Any = None,
        adapter: int = 0,
    ) -> list[int]:
        """Computes without any cache the tokens that the model chooses after `prompt` and each token of `output`.

        They equal `output` if `stream` yielded that for prompt number `index` with the same arguments, or its request.

        Raises:
          ValueError: not a list of tokens; an engine with `evict=`, whose rows see only the tokens kept in its cache;
            an engine over several processes, if there are `hook_args` here or in a request that came before.
        """
        if (eviction := self._cache_manager.eviction) is not None:
            kept = f"what {eviction.name} has kept in one"
            raise ValueError(
                f"recompute has no cache, and outputs here follow from {kept}: ask an Engine without evict."
            )
        choice = SamplingParams.read(temperature, top_k, top_p, min_p, self.seed if seed is None else seed)
        self._turn.refuse_closed()
        self._runner.refuse_donated()
        prompt = read_list("prompt", prompt)
        runner, tokens = self._runner, read_prompt([*prompt, *read_list("output", output)])
        if isinstance(tokens, str) or not prompt:
            raise ValueError("The prompt and the output must be lists of token ids, and the prompt not empty.")
        if why := find_foreign(tokens, self.vocab_size):
            raise ValueError(f"The prompt and its output cannot be computed again: {why}.")
        index = integer("index", index, least=0)
        if hook_args is not None or self._reader.hook_args.form is not None:
            self._refuse_lockstep("recompute where requests have hook_args")
        number, known = self._reader.read_adapter(adapter), copy.copy(self._reader.hook_args)
        leaves = self._reader.read_hook_args(hook_args, known)
        column, form = column_of(choice, index, len(prompt), number, leaves, known)
        if isinstance(self._core, LockstepCores):
            with self._exclusive(is_brief=True):
                chosen = self._core.recompute(tokens, column.tolist(), choice.kind)
        else:
            chosen = recompute(
                runner.structure, runner.leaves, runner.hook, self.config.max_seq_len, tokens, column, choice.kind, form
            )
        return chosen[len(prompt) - 1 : len(tokens) - 1]

    # The parts.

    def _stream(self, news: dict[Request, None], prompts: list[list[Request]]) -> Iterator[tuple[int, int]]:
        requests = [request for samples in prompts for request in samples]
        self._refuse_served("stream")
        with self._turn.hold():
            try:
                self._core.submitted.extend(map(Request.several, prompts))
                left = set(requests)
                while left:
                    with self._compute():
                        self._advance_cores()
                    failed = [request for request in news if request.error]
                    for request, token in collect_tokens(news):
                        if token is None:
                            left.discard(request)
                        else:
                            yield request.number, token
                    raise_refusal(dict.fromkeys(failed))
                    for request in failed:
                        raise FloatingPointError(f"Sequence {request.number} cannot go on: {request.error}.")
            finally:
                self._withdraw(requests)
