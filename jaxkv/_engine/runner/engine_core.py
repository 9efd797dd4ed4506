"""The engine's core: accepts requests, sends a step, reads the one before."""

import collections
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax

from jaxkv._core.cache.cache import Cache
from jaxkv._core.state.interrupts import Soundness
from jaxkv._engine.requests.drafters import Drafter
from jaxkv._engine.requests.request import Request
from jaxkv._engine.requests.sampling import Kind
from jaxkv._engine.requests.scheduler import Scheduler, Sequence, Unsure
from jaxkv._engine.runner.cache_manager import CacheManager
from jaxkv._engine.runner.device_cache import RELEASED
from jaxkv._engine.runner.disaggregated_prefill import PromptComputer
from jaxkv._engine.runner.fingerprint import fingerprint
from jaxkv._engine.runner.model_runner import ModelRunner
from jaxkv._files.save_rows import save


class EngineCore:
    """The requests of an engine and their state.

    The durable state is the unfinished requests, their tokens and the cache. Rows, queues and in-flight steps follow
    from these, and are rebuilt after a call that was interrupted anywhere: then every row is empty and every request
    waits again. So an interrupt is safe at any time.
    """

    def __init__(
        self,
        cache_manager: CacheManager,
        runner: ModelRunner,
        step_tokens: int,
        long_prefill_tokens: int | None,
        steps_per_dispatch: int,
        drafter: Drafter | None,
        prefill: PromptComputer | None,
    ):
        self.cache_manager, self.runner, self.drafter, self.prefill = cache_manager, runner, drafter, prefill
        self.step_tokens, self.long_prefill_tokens = step_tokens, long_prefill_tokens
        self.steps_per_dispatch = steps_per_dispatch
        self.ahead = 1 if drafter is None else 0  # in-flight steps while the next one is planned
        # Any thread puts requests in; the thread that runs the engine takes them out.
        self.submitted: collections.deque[Request] = collections.deque()
        self.cancelled: collections.deque[Request] = collections.deque()
        self.open: dict[Request, Sequence] = {}  # requests that are not done, and their sequences
        # Called with each sequence whose last tokens are computed, while it still has its row.
        self.on_computed: Callable[[Sequence], None] | None = None
        self.is_at_work = False
        self._soundness = Soundness()
        self._restart()

    @property
    def is_busy(self) -> bool:
        """Tells whether there is work left."""
        return bool(self.open or self.submitted or self.cancelled or not self._soundness.is_kept)

    @property
    def cache(self) -> Cache:
        """The cache. If no step is in flight, retired rows are freed first."""
        if self.cache_manager.has_rows_to_free and not self.is_busy:
            self.cache_manager.flush()
        return self.cache_manager.cache

    def advance(self) -> None:
        """Sends a step, and reads the one before."""
        self.is_at_work = True
        try:
            self.end(self.begin())
        finally:
            self.is_at_work = False

    def begin(self) -> list[Sequence] | None:
        """Does the first half of `advance`: sends a step without waiting. Returns the sequences that get tokens by it;
        None: there was no step to send."""
        self.refuse_step()
        self.make_sound()
        self._soundness.begin()
        self._take_in()
        if self.prefill is not None:
            is_idle = not (self.scheduler.running or self.runner.flights)
            self.prefill.exchange(self.scheduler.waiting, wait=is_idle)
        return self._send()

    def end(self, due: list[Sequence] | None) -> None:
        """Does the second half of `advance`: reads the step before."""
        if due is not None:
            # Behind a step that was compiled another may be, for which its tokens must not wait.
            self._read(0 if self.runner.has_new_program else self.ahead)
            for sequence in due:
                if sequence.length >= sequence.limit and sequence.row is not None:  # nothing more to compute
                    if self.cache_manager.prefix is not None and len(sequence.tokens) < sequence.cached:
                        self._read(0)  # the drafter needs the tokens
                    self._finish(sequence)
        elif self.scheduler.waiting and not self.scheduler.running:  # even an otherwise empty cache has no room
            self._refuse(self.scheduler.waiting.first()[0])
        self._rest()
        self._soundness.end()

    def spare(self, sequence: Sequence) -> tuple[bool, int]:
        """Returns whether a sequence could begin here at once, and the blocks that would be left."""
        cache_manager, others = self.cache_manager, [*self.scheduler.running, *self.scheduler.waiting]
        if not self.open:
            cache_manager.settle()
        spare = cache_manager.spare(others, sequence)
        return len(others) < cache_manager.config.max_seqs and spare >= 0, spare

    def known(self, sequence: Sequence) -> int:
        """Returns the leading tokens of a sequence that a prefix cache has here, or will have."""
        return self.cache_manager.sharing.known([*self.scheduler.running, *self.scheduler.waiting], sequence)

    def may_have_room(self, sequence: Sequence) -> bool:
        """Tells whether there may be room for a sequence that has not been examined yet."""
        cache_manager = self.cache_manager
        return cache_manager.may_have_more and not self.scheduler.waiting and cache_manager.can_hold(sequence)

    def receive(self, request: Request) -> None:
        """Adds a request to those that wait here."""
        with self._soundness:
            self.submitted.append(request)
            self._take_in()

    def has(self, request: Request) -> bool:
        """Tells whether a request was placed here."""
        return request in self.submitted or any(sample in self.open for sample in request.samples)

    def cancel(self, requests: Iterable[Request], error: Exception | None = None) -> None:
        """Marks requests for removal by the next thread that runs the engine; with an error, as failed."""
        for request in requests:
            if request.withdraw(error):
                self.cancelled.append(request)

    def tidy(self) -> None:
        """Removes cancelled requests."""
        self.make_sound()
        with self._soundness:
            self._take_in()
            self._rest()

    def settle(self) -> None:
        """Accepts all submitted requests and reads all in-flight steps."""
        self.is_at_work = True
        try:
            self.make_sound()
            with self._soundness:
                self._take_in()
                self._read(0)
                self._rest()
        finally:
            self.is_at_work = False

    def refuse_step(self) -> None:
        """Raises RuntimeError if no step can be taken now: the memory is released, or parameters are gone."""
        if self.cache_manager.is_released:
            raise RuntimeError(RELEASED)
        for runner in self._all_runners():
            runner.refuse_donated()

    @property
    def can_step(self) -> bool:
        """Tells whether `refuse_step` raises nothing."""
        return not self.cache_manager.is_released and all(runner.has_parameters for runner in self._all_runners())

    def list_running(self) -> list[Request]:
        """Returns the requests of which something was computed already."""
        if not self.cache_manager.is_released:
            self.settle()
        return [request for request, sequence in self.open.items() if self._is_running(sequence)]

    def _is_running(self, sequence: Sequence) -> bool:
        is_apart = self.prefill is not None and self.prefill.has(sequence)
        return is_apart or sequence.row is not None or sequence.host is not None or bool(sequence.request.output)

    def update(self, leaves: list[Any], prefill: list[Any] | None, model: str | None) -> None:
        """Goes on with other weights: drops what the older ones computed, and begins all requests anew.

        Args:
          leaves: those of the model. prefill: of the model for prompts. model: a fingerprint, for files of prefixes.
        """
        with self._soundness:
            for request in self.open:
                request.restart()
            for cache_manager in self._all_cache_managers():
                if not cache_manager.is_released:
                    cache_manager.recover()
                cache_manager.prefix_rows.rename(model)
            self.runner.leaves = leaves
            if self.prefill is not None and prefill is not None:
                (apart,) = self.prefill.list_runners()
                apart.leaves = prefill
            if self.cache_manager.is_released:
                self._queue_open({})
            else:
                self._restart()
                self._rest()

    def release(self, *, keep: bool, parameters: bool) -> None:
        """Frees the device memory until `restore`, but for the model's. With `keep` rows and prefixes go to the host,
        else they are dropped, and requests computed again from their tokens. With `parameters` it lets go of these,
        too, until `update`."""
        if parameters:
            for runner in self._all_runners():
                runner.drop_parameters()
        if self.cache_manager.is_released:
            return
        self.settle()
        with self._soundness:
            for sequence in list(self.scheduler.running) if keep else []:
                self.cache_manager.offer(sequence)
                self.cache_manager.swap_out(sequence)
            hosted = {r: (s.host, s.num_hosted) for r, s in self.open.items() if s.host and not callable(s.host)}
            self.cache_manager.recover()
            self.cache_manager.release(keep=keep)
            for component in (self.runner, self.drafter, self.prefill):
                if component is not None:
                    component.release()
            self._queue_open(hosted)

    def restore(self) -> None:
        """Takes the memory again that `release` gave back, if it did. A second call completes an interrupted first
        one."""
        if not self.cache_manager.is_released:
            return
        self.runner.clear()
        if self.prefill is not None:
            self.prefill.restore()
        self.cache_manager.restore()

    def adopt(self, sequences: list[Sequence]) -> None:
        """Adopts sequences of another process."""
        with self._soundness:
            self.open |= {sequence.request: sequence for sequence in sequences}
            followers = {id(follower) for sequence in sequences for follower in sequence.followers}
            for sequence in sequences:
                if id(sequence) not in followers:
                    self.scheduler.waiting.add(sequence)

    def save(self, path: Any, rows: list[int], model: str | None, metadata: dict[str, Any]) -> None:
        """Writes rows of the cache to a file, as `jaxkv.save`."""
        save(path, self.cache, rows, model=model, metadata=metadata)

    def name_model(self) -> str | None:
        """Returns a fingerprint of the model. Raises RuntimeError if its parameters are gone."""
        self.runner.refuse_donated()
        return fingerprint(jax.tree.unflatten(self.runner.structure, self.runner.leaves))

    def reset(self) -> None:
        """Starts again with an empty cache."""
        with self._soundness:
            for cache_manager in self._all_cache_managers():
                cache_manager.reset()
            self._restart()
            self._rest()

    def close(self) -> None:
        """Frees device memory, even if this is referred to elsewhere; cancels requests that are not done."""
        submitted = [sample for request in self.submitted for sample in request.samples]
        for request in (*self.open, *submitted):
            request.withdraw()
        for component in (self.cache_manager, self.runner, self.drafter, self.prefill):
            if component is not None:
                component.close()
        self.submitted.clear()
        self.cancelled.clear()
        self.open = {}
        self.scheduler = self._new_scheduler()
        self._soundness.end()

    def warm(self, kinds: tuple[Kind, ...], counts: tuple[int, ...]) -> list[Callable[[], Any]]:
        """Returns functions that compile all programs when called in order."""
        self.refuse_step()
        self.make_sound()
        steps = tuple({1, self.steps_per_dispatch})
        others = [component.warm() for component in (self.drafter, self.prefill) if component is not None]
        return [*self.runner.warm(kinds, counts, steps), *self.cache_manager.warm(), *itertools.chain(*others)]

    def _send(self) -> list[Sequence] | None:
        """Sends a step. Returns the sequences that get tokens by it; None: there was no step to send."""
        scheduler, cache_manager = self.scheduler, self.cache_manager
        if cache_manager.states.is_needed:
            for sequence in scheduler.running:
                cache_manager.keep_states(sequence)
            cache_manager.states.note_partings(scheduler.running, scheduler.waiting.first())
        self._guess()
        try:
            step = scheduler.plan(certain=not self.runner.flights)
        except Unsure:
            self._read(0)
            step = scheduler.plan()
        if not step.counts:
            self._read(0)
            if scheduler.waiting:  # there may be more room than known
                cache_manager.settle()
                step = scheduler.plan()
        if not step.counts:
            return None
        steps = 1 if self.submitted else scheduler.stretch(step, self.steps_per_dispatch)
        cache_manager.free_rows(are_wanted=bool(scheduler.waiting))
        work = self.runner.send(step, steps)
        due = scheduler.commit(step)
        if cache_manager.eviction is not None:
            self.runner.thin([s for s in step.counts if cache_manager.eviction.is_due(s)])
        for sequence, _, count in work:
            # The computed part of a prompt is useful to others already. A sequence that needs it earlier asks for it
            # when it begins, but blocks that leave windows would be gone then.
            is_prompt = count > 1 and steps == 1 and not sequence.guesses
            if is_prompt and (sequence.pending <= 1 or cache_manager.config.has_windows):
                cache_manager.offer(sequence)
        return due

    def _guess(self) -> None:
        """Drafts tokens for the decoding rows."""
        if self.drafter is None:
            return
        ready = []
        for sequence in self.scheduler.running:
            sequence.guesses, sequence.parents = [], []
            # At one token before the limit, draft tokens are of no use.
            if sequence.pending == 1 and not sequence.followers and sequence.limit - sequence.length > 1:
                ready.append(sequence)
        guessed = self.drafter.guess(ready, self.runner.draft_tokens)
        for sequence, guesses in zip(ready, guessed, strict=True):
            most = self.cache_manager.states.limit_guesses(sequence, sequence.limit - sequence.length - 1)
            sequence.guesses, sequence.parents = guesses.tokens[:most], guesses.parents[:most]

    def _read(self, left: int) -> None:
        """Reads steps until `left` are in flight."""
        while len(self.runner.flights) > left:
            for sequence, tokens in self.runner.read():
                request = sequence.request
                for token, logprobs in tokens:
                    if request.done:  # this token was computed before that was known
                        break
                    request.receive(token, logprobs)
                    if not request.stopped:
                        sequence.tokens.append(token)
                        sequence.unread -= 1
                if request.done:
                    self._finish(sequence)
                    self.open.pop(request, None)

    def _finish(self, sequence: Sequence) -> None:
        """Frees the row of a sequence that has ended, or has nothing more to compute."""
        if self.on_computed is not None and sequence.row is not None:
            self.on_computed(sequence)
        self.scheduler.finish(sequence)

    def _take_in(self) -> None:
        """Accepts the requests submitted and cancelled since the last step, maybe by another thread."""
        while self.submitted:
            request = self.submitted[0]
            new = [make_sequence(s) for s in request.samples if not (s.done or s in self.open)]
            self.open |= {sequence.request: sequence for sequence in new}
            self.submitted.popleft()
            # One token has no prefix to share, and rows that evict share nothing.
            if len(request.prompt) > 1 and self.cache_manager.eviction is None:
                for first in new[:1]:
                    first.followers, new = new[1:], [first]
            for first in new:
                self.scheduler.waiting.add(first)
        while self.cancelled:
            sequence = self.open.pop(self.cancelled[0], None)
            if sequence is not None:
                self.scheduler.finish(sequence)
                if self.prefill is not None:
                    self.prefill.drop(sequence)
            self.cancelled.popleft()

    def _rest(self) -> None:
        """Forgets in-flight steps if no work is left. Rows are freed when they are needed or inspected."""
        if not self.open:
            self.runner.flights.clear()
            if self.prefill is not None:
                self.prefill.rest()

    def _all_cache_managers(self) -> list[CacheManager]:
        return [self.cache_manager, *(self.prefill.list_cache_managers() if self.prefill else [])]

    def _all_runners(self) -> list[ModelRunner]:
        return [self.runner, *(self.prefill.list_runners() if self.prefill else [])]

    def make_sound(self) -> None:
        """Rebuilds everything from the durable state after an interrupted call."""
        if not self._soundness.is_kept:
            for cache_manager in self._all_cache_managers():
                cache_manager.recover()
            self._restart()
            self._soundness.end()

    def _restart(self) -> None:
        self.runner.clear()
        if self.prefill is not None:
            self.prefill.restart()
        self._queue_open({})

    def _queue_open(self, hosted: dict[Request, tuple[Any, int | None]]) -> None:
        """Has all open requests wait, in order; those of which blocks are on the host have them."""
        self.scheduler = self._new_scheduler()
        self.open = {request: make_sequence(request) for request in self.open if not request.done}
        for request, sequence in self.open.items():
            sequence.host, sequence.num_hosted = hosted.get(request, (None, None))
            self.scheduler.waiting.add(sequence)

    def _new_scheduler(self) -> Scheduler:
        return Scheduler(self.cache_manager, step_tokens=self.step_tokens, long_prefill_tokens=self.long_prefill_tokens)

    def _refuse(self, sequence: Sequence) -> None:
        """Ends a request that has no room even once all others have ended."""
        request = sequence.request
        request.refuse(
            f"There is no room for prompt {request.number} with {len(sequence.tokens)} tokens: "
            f"{self.cache_manager.available} blocks can be had. Unpin blocks of the prefix cache, or raise "
            f"{self.cache_manager.config.size_argument}."
        )
        self.scheduler.finish(sequence)
        del self.open[request]


def make_sequence(request: Request) -> Sequence:
    """Returns the sequence of a request, with no tokens in any cache."""
    params = request.params
    limit = len(request.prompt) + max(request.limit, 1)  # the last of a prompt's tokens gives one in any case
    tokens = [*request.prompt, *request.output]
    shareable = {True: math.inf, False: 0, "prompt": len(request.prompt)}[params.keep_prefix]
    return Sequence(
        tokens,
        limit,
        params.salt,
        request,
        len(request.prompt),
        priority=params.priority,
        shareable=shareable,
        adapter=params.adapter,
    )
