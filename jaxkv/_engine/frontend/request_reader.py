"""Reads what a caller asks for into requests, and checks it against the engine's model, cache and options."""

import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxkv._core.config.validation import MOST_INDEX, flag, integer
from jaxkv._core.state.interrupts import Numbers
from jaxkv._engine.requests.block_accounting import Holdings
from jaxkv._engine.requests.hook_args import HookArgs
from jaxkv._engine.requests.request import Request, RequestParams
from jaxkv._engine.requests.sampling import SamplingParams
from jaxkv._engine.requests.stops import read_stops
from jaxkv._engine.requests.submission import (
    find_problem,
    read_callback,
    read_eos,
    read_keep_prefix,
    read_limits,
    read_prompt,
    read_salt,
)

Draw = tuple[Any, Any, Any, Any, Any]  # temperature, top_k, top_p, min_p and seed, as they are given


def check_hook_args(hook_args: Any, has_hook: bool) -> None:
    """Raises ValueError for numbers that no hook takes."""
    if hook_args is not None and not has_hook:
        raise ValueError("hook_args are for a logits_hook, and this Engine has none: make it with logits_hook=.")


class RequestReader:
    """Makes the requests of an engine, and numbers them once nothing about them can be refused any more.

    Attributes:
      news: requests that may have tokens not handed out by `step` and `run`.
    """

    def __init__(
        self,
        engine: Any,
        *,
        vocab_size: int | None,
        most_tokens: int,
        hook_args: HookArgs,
        has_hook: bool,
        takes_adapters: bool,
        is_apart: bool,
        holdings: Holdings,
    ):
        self.engine = weakref.ref(engine)
        self.vocab_size, self.most_tokens = vocab_size, most_tokens
        self.hook_args, self.has_hook, self.takes_adapters, self.holdings = (
            hook_args,
            has_hook,
            takes_adapters,
            holdings,
        )
        self.is_apart = is_apart  # prompts are computed on other devices
        self.numbers = Numbers()
        self.news: dict[Request, None] = {}

    def read_default(self, name: str) -> Any:
        """Returns an attribute of the engine, `seed` or `eos_ids`, which may be set after it was made."""
        return getattr(self.engine(), name)

    def find_problem(self, prompt: Any, max_new_tokens: Any) -> str | None:
        """Returns why a prompt cannot be continued, or None."""
        return find_problem(prompt, max_new_tokens, self.most_tokens, self.vocab_size, self.holdings)

    def read(
        self,
        prompt: Any,
        max_new_tokens: Any,
        n: Any,
        draw: Draw,
        *,
        stop: Any,
        tokenizer: Any,
        prompt_logprobs: Any,
        **options: Any,
    ) -> tuple[int, list[RequestParams]]:
        """Returns the limit of tokens, and what each sample of a request asks for, for `make`. Raises ValueError.

        Args:
          options: others of `Engine.submit`, as they are given.
        """
        num_prompt_logprobs = self.read_prompt_logprobs(prompt_logprobs)
        is_scored = num_prompt_logprobs is not None
        if is_scored and self.is_apart:
            raise ValueError(
                "prompt_logprobs is not for an Engine with prefill=, whose prompts are computed elsewhere: leave it "
                "out, or submit the prompt to an Engine without prefill=."
            )
        limit = integer("max_new_tokens", max_new_tokens, least=0 if is_scored else 1)
        if why := self.find_problem(prompt, max(limit, 1)):
            raise ValueError(f"The prompt cannot be continued: {why}.")
        count = integer("n", n, least=1, most=2**16)
        choices = [self._read_choice(draw, None if draw[-1] is None else j) for j in range(count)]
        shared = RequestParams(
            choice=choices[0],
            eos=read_eos(options["eos"], self.read_default("eos_ids")),
            salt=read_salt(options["salt"]),
            num_logprobs=self.read_logprobs(options["logprobs"]),
            priority=integer("priority", options["priority"], least=-MOST_INDEX, most=MOST_INDEX),
            keep_prefix=read_keep_prefix(options["keep_prefix"]),
            adapter=self.read_adapter(options["adapter"]),
            include_stop=flag("include_stop", options["include_stop"]),
            on_token=read_callback(options["on_token"]),
        )
        return limit, [
            dataclasses.replace(
                shared,
                choice=choice,
                stops=read_stops(stop, tokenizer, prompt),
                num_prompt_logprobs=None if j else num_prompt_logprobs,  # all have the first one's
            )
            for j, choice in enumerate(choices)
        ]

    def make(self, prompt: Any, limit: int, samples: list[RequestParams], hook_args: Any) -> Request:
        """Makes the request of samples that were read. Raises ValueError for hook_args alone, of which the first fix
        the form of all: so they are read last."""
        leaves = self.read_hook_args(hook_args, self.hook_args)
        samples = [dataclasses.replace(params, hook_args=leaves) for params in samples]
        made = [self._make(params, self.numbers.take(), prompt, limit, self.news) for params in samples]
        return Request.several(made)

    def read_stream(
        self,
        prompts: Sequence[Any],
        max_new_tokens: Any,
        n: Any,
        draw: Draw,
        *,
        eos: Any,
        salt: Any,
        news: dict[Request, None],
    ) -> list[list[Request]]:
        """Returns the samples of each prompt of a stream, numbered from 0 on. Raises ValueError for any of them."""
        n = integer("n", n, least=1, most=2**16)
        params = RequestParams(
            choice=self._read_choice(draw, None),
            eos=read_eos(eos, self.read_default("eos_ids")),
            salt=read_salt(salt),
            hook_args=self.read_hook_args(None, self.hook_args),
        )
        limits = read_limits(max_new_tokens, len(prompts))
        asked = list(enumerate(zip(prompts, limits, strict=True)))
        problems = [
            f"Prompt {i} cannot be continued: {why}."
            for i, (prompt, limit) in asked
            if (why := self.find_problem(prompt, limit))
        ]
        if problems:
            raise ValueError("\n".join(problems))
        return [[self._make(params, i * n + j, prompt, limit, news) for j in range(n)] for i, (prompt, limit) in asked]

    def _make(self, params: RequestParams, number: int, prompt: Any, limit: int, news: dict[Request, None]) -> Request:
        tokens = read_prompt(prompt)
        assert isinstance(tokens, list)
        limit = min(limit, self.most_tokens - len(tokens))
        return Request(params, number=number, prompt=tokens, limit=limit, news=news, engine=self.engine)

    # Single options.

    def _read_choice(self, draw: Draw, draws: int | None) -> SamplingParams:
        temperature, top_k, top_p, min_p, seed = draw
        return SamplingParams.read(
            temperature, top_k, top_p, min_p, self.read_default("seed") if seed is None else seed, draws
        )

    def read_hook_args(self, hook_args: Any, known: HookArgs) -> Any:
        """Returns the numbers of a request for the hook, as `known` reads them. Raises ValueError."""
        check_hook_args(hook_args, self.has_hook)
        return known.read(hook_args)

    def read_adapter(self, adapter: Any) -> int:
        """Returns the number of an adapter. Raises ValueError."""
        number = integer("adapter", adapter, least=0, most=MOST_INDEX)
        if number and not self.takes_adapters:
            raise ValueError(
                "adapter= is for a model whose call has an argument adapters, or a logits_hook, and this Engine has "
                "neither."
            )
        return number

    def read_logprobs(self, logprobs: Any, name: str = "logprobs") -> int | None:
        """Returns how many likeliest tokens are wanted; None: no log-probabilities. Raises ValueError."""
        return None if logprobs is None else integer(name, logprobs, least=0, most=self.vocab_size or 2**16)

    def read_prompt_logprobs(self, prompt_logprobs: Any) -> int | None:
        """Returns the same of a prompt, where True is 0, and False is None. Raises ValueError."""
        if isinstance(prompt_logprobs, bool | np.bool):
            return 0 if prompt_logprobs else None
        return self.read_logprobs(prompt_logprobs, "prompt_logprobs")
