"""Requests and the tokens generated for them so far. Nothing here is lost when a step is interrupted."""

import dataclasses
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np

from jaxkv._core.state.errors import OutOfBlocks
from jaxkv._engine.requests.prompt_scores import PromptScores
from jaxkv._engine.requests.sampling import KINDS, NO_TOKEN, SamplingParams
from jaxkv._engine.requests.stops import Stops, StopSearch
from jaxkv._engine.requests.waiting import call_all, copy_error, iterate, iterate_async, wait_until

Stop = Literal["eos", "stop", "cancelled", "error", "length"]
KeepPrefix = Literal[True, False, "prompt"]
STOPS: tuple[Stop, ...] = ("eos", "stop", "cancelled", "error", "length")


@dataclasses.dataclass
class Times:
    """When things happened to a request, in seconds of `time.monotonic`."""

    submitted: float = dataclasses.field(default_factory=time.monotonic)
    tokens: list[float] = dataclasses.field(default_factory=list)  # when each token of the output was read
    ended: float | None = None

    @property
    def first_token(self) -> float | None:
        """When its first token was read; None: it has none yet."""
        return self.tokens[0] if self.tokens else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestParams:
    """What `Engine.submit` asks for beside a prompt and a number of tokens; its arguments say what each means."""

    choice: SamplingParams
    eos: frozenset[int] = frozenset()
    salt: str | bytes | None = None
    num_logprobs: int | None = None
    priority: int = 0
    hook_args: list[np.ndarray] | None = None
    keep_prefix: KeepPrefix = True
    adapter: int = 0
    stops: Sequence[Stops] = ()
    include_stop: bool = False
    on_token: "Callable[[Request, int | None], Any] | None" = None
    # How many likeliest tokens are wanted at each of the prompt's tokens, beside its own; None: not even that one.
    num_prompt_logprobs: int | None = None


class Request:
    """A prompt to be continued, made by `Engine.submit`. It is hashable by identity.

    Iterating over it, `for` and `async for`, yields its tokens as they come, from any thread: those of the first sample
    if there are several. Without `Engine.serve`, whoever waits takes the engine's steps.

    Attributes:
      prompt: its tokens. number: counts requests; draws depend only on the engine's seed, this and the position.
      samples: the request of each sample; `(request,)` itself if only one was asked for. If there are several,
        `step` and `run` name these, and `tokens` and `logprobs` here are the first one's.
      times: when it was submitted, had its tokens, and ended; see `Times`.

    >>> import jaxkv
    >>> engine = jaxkv.Engine(jaxkv.models.small(), max_seqs=2, max_seq_len=64)
    >>> request = engine.submit(list(b"import "), max_new_tokens=4)
    >>> list(request) == request.tokens == request.result(), request.ended
    (True, 'length')
    """

    def __init__(
        self,
        params: RequestParams,
        *,
        number: int,
        prompt: list[int],
        limit: int,
        news: "dict[Request, None]",
        engine: Callable[[], Any] = lambda: None,
    ):
        self.params, self.number, self.prompt, self.limit = params, number, prompt, limit
        self.search = StopSearch(params.stops, is_included=params.include_stop)
        self.on_token = params.on_token
        self.output: list[int] = []  # all tokens, those of a stop sequence too
        self.output_logprobs: list[dict[int, float]] = []
        count = params.num_prompt_logprobs
        self.scores = None if count is None else PromptScores(len(prompt), count)
        self.times = Times()
        self.listeners: dict[Callable[[], Any], None] = {}  # called when there is news
        self.observed = 0  # tokens whose latency was counted
        self._called = 0  # tokens that on_token was called with
        self._is_end_called = False
        self.exception: Exception | None = None  # what a callback or hook raised
        self.num_restarts = 0  # how often `Engine.update` began it anew
        self._samples: tuple[Request, ...] = ()  # where it stands for several; never itself
        self.column, self.kind = params.choice.column(number), KINDS.index(params.choice.kind)
        self.news = news  # the reader's set: the request adds itself there when it has news
        self.given = 0  # how many tokens have been handed out
        self.is_end_told = False
        self.stopped: Stop | None = None  # what ended it before its limit
        self.stop: tuple[int, dict[int, float] | None] | None = None  # the stop token, and log-probabilities if wanted
        self.refusal: str | None = None  # why there is no room for it
        self.is_refusal_raised = False
        self.engine = engine  # a weak reference: keeping a result keeps no device memory
        self._first: Request | None = None  # the sample that began for it
        self._has_begun = False
        self.overtaken = 0  # how often a later one was placed before it, where rows are divided

    @classmethod
    def several(cls, samples: "Sequence[Request]") -> "Request":
        """Makes the request that stands for all samples."""
        first = samples[0]
        if len(samples) == 1:
            return first
        both = cls(
            dataclasses.replace(first.params, stops=(), on_token=None, num_prompt_logprobs=None),
            number=first.number,
            prompt=first.prompt,
            limit=first.limit,
            news=first.news,
            engine=first.engine,
        )
        for sample in samples[1:]:
            sample.follow(first)
        both._samples, both.times = tuple(samples), first.times
        for sample in samples:
            sample.prompt = first.prompt  # one list: so samples of one request know each other
        return both

    def follow(self, first: "Request") -> None:
        """Records that it is a further sample of what another is the first of: scores of the prompt are kept there."""
        self._first = first

    @property
    def origin(self) -> "Request":
        """The request that was submitted: itself, but for those that the processes of an engine share."""
        return self

    @property
    def samples(self) -> "tuple[Request, ...]":
        """The request of each sample; only itself if one was asked for."""
        return self._samples or (self,)

    @property
    def tokens(self) -> list[int]:
        """What has been generated so far, without the stop token or stop sequence. What may be the beginning of a stop
        sequence is held back until that is known."""
        first = self.samples[0]
        return first.output if (count := first.num_visible) == len(first.output) else first.output[:count]

    @property
    def text(self) -> str:
        """The text generated so far, with `submit(tokenizer=)`: without the stop string, or what may begin one."""
        return self.samples[0].search.text

    @property
    def logprobs(self) -> list[dict[int, float]]:
        """With `submit(logprobs=k)`, for each token a dict from token to log-probability, else empty."""
        first = self.samples[0]
        return first.output_logprobs[: first.num_visible]

    @property
    def token_logprobs(self) -> np.ndarray:
        """With `submit(logprobs=k)`, f32[n]: the log-probability of each of `tokens`, else empty."""
        pairs = zip(self.tokens, self.logprobs, strict=False)
        return np.array([found[token] for token, found in pairs], np.float32)

    @property
    def prompt_logprobs(self) -> np.ndarray | None:
        """With `submit(prompt_logprobs=True)`, or a number, f32[P - 1]: the log-probability of each of the prompt's
        tokens but the first, given those before it; fewer while they are computed. Else None. The same for all samples.
        """
        return None if (scores := self.shared_scores) is None else scores.values

    @property
    def prompt_top_logprobs(self) -> list[dict[int, float]] | None:
        """With `submit(prompt_logprobs=k)`, for each of the prompt's tokens but the first a dict from token to
        log-probability, as in `logprobs`: of the k likeliest there and of its own. See `prompt_logprobs`."""
        return None if (scores := self.shared_scores) is None else scores.list_likeliest(self.prompt)

    @property
    def shared_scores(self) -> PromptScores | None:
        """The scores of the prompt: the first sample keeps them for all, whichever computes them."""
        return (self._first or self.samples[0]).scores

    @property
    def needs_scores(self) -> bool:
        """Tells whether scores of its prompt are missing that it has to compute: the first sample does, or any of those
        that are left once that one has ended."""
        return self._keeps_scores and self.shared_scores is not None and not self.shared_scores.is_complete

    @property
    def _keeps_scores(self) -> bool:
        return self._first is None or self._first.done

    @property
    def num_visible(self) -> int:
        """Number of leading tokens of `output` that are not part of a stop sequence, as far as is known."""
        is_whole = not self.search.stops or (self.search.match is None and self.done)
        return len(self.output) if is_whole else self.search.num_safe

    @property
    def done(self) -> bool:
        """Tells whether no more tokens will come; `ended` says why."""
        if self._samples:
            return all(sample.done for sample in self._samples)
        return self.stopped is not None or 0 < self.limit <= len(self.output)

    @property
    def ended(self) -> Literal["eos", "stop", "cancelled", "error", "length"] | None:
        """Why it ended: a stop token, a stop sequence, `cancel`, an `error`, or the limit of tokens asked for or that
        fit. None: it goes on. With several samples: the first one's reason, once all have ended."""
        if not self.done:
            return None
        return self._samples[0].ended if self._samples else self.stopped or "length"

    @property
    def stop_token(self) -> int | None:
        """The stop token that ended it, not part of `tokens`. With several samples: the first one's."""
        stop = self.samples[0].stop
        return None if stop is None else stop[0]

    @property
    def stop_logprob(self) -> float | None:
        """The log-probability of `stop_token` under the model's own logits, if submitted with `logprobs`."""
        stop = self.samples[0].stop
        return None if stop is None or stop[1] is None else stop[1][stop[0]]

    @property
    def stop_sequence(self) -> tuple[int, ...] | str | None:
        """The stop sequence or string that ended it."""
        return self.samples[0].search.match

    @property
    def error(self) -> str | None:
        """Why it failed, else None: its logits were NaN or all -inf, as a hook may make them, pinned blocks of the
        prefix cache left no room, or its callback or a hook raised. With several samples: the first one's."""
        first = self.samples[0]
        if first.stopped != "error":
            return None
        if first.exception is not None:
            return f"{type(first.exception).__name__} was raised while it was served: {first.exception}"
        return first.refusal or (
            f"after {len(self.prompt)} + {len(first.output)} tokens the logits, or what logits_hook made of them, are "
            f"NaN or all -inf, and no token can be chosen{self._doubt_prompt()}"
        )

    def _doubt_prompt(self) -> str:
        """Returns what may be wrong with the prompt if its own logits are: nothing if its tokens were looked at."""
        engine = self.engine()
        if self.samples[0].output or engine is None or engine.vocab_size is not None:
            return ""
        return (
            f"; the prompt's token ids go from {min(self.prompt)} to {max(self.prompt)}, and one outside the "
            "vocabulary does that, too: with model.config.vocab_size an engine refuses it"
        )

    @property
    def best(self) -> "Request":
        """The sample with the highest mean log-probability under the model's own logits (best of n).

        Raises:
          ValueError: it was submitted without `logprobs`.
        """
        if self.params.num_logprobs is None:
            raise ValueError("Samples are compared by their log-probabilities: submit the request with logprobs=0.")

        def score(sample: Request) -> float:
            chosen = sample.token_logprobs.tolist()
            return sum(chosen) / len(chosen) if chosen else -math.inf

        return max(self.samples, key=score)

    def cancel(self) -> None:
        """Cancels the request: no more tokens come, and its row is freed. Does nothing if it is done."""
        if (engine := self.engine()) is not None:
            engine._withdraw(self.samples)

    def result(self, timeout: float | None = None) -> list[int]:
        """Waits until it has ended, and returns its tokens; with several samples, until all have, and the first one's.

        May be called from any thread. Raises TimeoutError after `timeout` seconds; the error that it ended with:
        OutOfBlocks, FloatingPointError for logits that are NaN or all -inf, or what its callback raised.
        """
        lists = [sample.listeners for sample in self.samples]
        wait_until(lambda: self.done, lists, self.engine, timeout, f"Request {self.number} has not ended")
        self.raise_error()
        return self.tokens

    def __iter__(self) -> Iterator[int]:
        return iterate(self)

    def __aiter__(self) -> AsyncIterator[int]:
        return iterate_async(self)

    def raise_error(self) -> None:
        """Raises the error that it ended with, if it did: a copy, for a traceback names the caller's frames."""
        first = self.samples[0]
        if first.stopped == "error":
            if first.exception is not None:
                raise copy_error(first.exception)
            message = f"Request {first.number} cannot go on: {first.error}."
            raise OutOfBlocks(first.refusal) if first.refusal is not None else FloatingPointError(message)

    @property
    def has_begun(self) -> bool:
        """Tells whether it, or a sample of the same prompt, has had a row."""
        return (self._first or self)._has_begun

    def begin(self) -> None:
        """Records that it has a row."""
        (self._first or self)._has_begun = True

    def receive(self, token: int, logprobs: dict[int, float] | None) -> None:
        """Records the next token. After an interrupt, a second call completes it."""
        self.news[self] = None
        if token == NO_TOKEN:
            self._end("error")
            return
        if not self.limit:  # only the prompt was of interest
            self._end("length")
            return
        if token in self.params.eos:
            self.stop = (token, logprobs)
            self._end("eos")
            return
        if logprobs is not None:
            self.output_logprobs[len(self.output) :] = [logprobs]
        self.times.tokens[len(self.output) :] = [time.monotonic()]
        self.output.append(token)
        if self.search.stops:
            self.look_for_stops()
        if self.done:
            self.times.ended = time.monotonic()

    def _end(self, stopped: Stop) -> None:
        self.times.ended = time.monotonic()
        self.search.settle_text(self.output, is_whole=True)
        self.stopped = stopped

    def look_for_stops(self) -> None:
        """Looks for stop sequences in the tokens that have come, and ends with the first."""
        if self.search.find(self.output, self.limit):
            self.stopped = "stop"

    def restart(self) -> None:
        """Begins anew from the prompt, unless it is done. All its tokens come again, computed by other weights."""
        self.num_restarts += 1
        self.observed = self._called = self.given = 0
        self.search.restart()
        self.stop = None
        self.times = Times(submitted=self.times.submitted)
        if self._keeps_scores and self.shared_scores is not None:
            self.shared_scores.restart()
        self.output, self.output_logprobs = [], []
        call_all(self.listeners)

    def withdraw(self, error: Exception | None = None) -> bool:
        """Records the cancellation, or the error that ends it, unless it is done; tells whether it was not."""
        if self.done:
            return False
        if error is not None:
            self.fail(error)
            return True
        self.times.ended = time.monotonic()
        self.stopped = "cancelled"
        self.news[self] = None
        call_all(self.listeners)
        return True

    def fail(self, error: Exception) -> None:
        """Records that its callback, or a hook, raised an error, without what would keep the engine: its traceback."""
        self.news[self] = None
        self.on_token = None
        self.exception = copy_error(error)
        self._end("error")

    def deliver(self) -> None:
        """Calls `on_token` with tokens that are new, and wakes who waits. Raises what the callback raises."""
        if self.on_token is not None:
            while self._called < self.num_visible:
                self._called += 1
                self.on_token(self, self.output[self._called - 1])
            if self.done and not self._is_end_called:
                self._is_end_called = True
                self.on_token(self, None)
        call_all(self.listeners)

    @property
    def has_news(self) -> bool:
        """Tells whether it has tokens, or an end, that were not handed out."""
        return self.given < self.num_visible or (self.done and not self.is_end_told)

    def refuse(self, why: str) -> None:
        """Records that there is no room for it. After an interrupt, a second call completes it."""
        self.news[self] = None
        self.refusal = why
        self._end("error")

    def __repr__(self) -> str:
        state = self.ended or "not done"
        return f"Request({self.number}: {len(self.prompt)} + {len(self.samples[0].output)} tokens, {state})"
