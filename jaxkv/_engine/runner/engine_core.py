"""What an engine does again and again: take in what was asked for, send a step, read the one before."""

import collections
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

from jaxkv._core.cache.cache import Cache
from jaxkv._engine.requests.drafters import Drafter
from jaxkv._engine.requests.request import Request
from jaxkv._engine.requests.sampling import Kind
from jaxkv._engine.requests.scheduler import Scheduler, Sequence, Unsure
from jaxkv._engine.runner.cache_manager import Residents
from jaxkv._engine.runner.disaggregated_prefill import Prefill
from jaxkv._engine.runner.model_runner import Pipeline


class Loop:
    """Requests, and where they stand.

    What is certain are the requests that are not done, the tokens that they got, and the cache. Rows, queues and steps
    under way follow from these, and are made anew after a call that was cut off anywhere: then every row is empty and
    every request waits again. So an interrupt needs no place where it would be safe.
    """

    def __init__(
        self, residents: Residents, pipeline: Pipeline, step_tokens: int, long_prefill_tokens: int | None,
        steps_per_dispatch: int, drafter: Drafter | None, prefill: Prefill | None,
    ):  # fmt: skip
        self.residents, self.pipeline, self.drafter, self.prefill = residents, pipeline, drafter, prefill
        self.step_tokens, self.long_prefill_tokens = step_tokens, long_prefill_tokens
        self.steps_per_dispatch = steps_per_dispatch
        self.ahead = 1 if drafter is None else 0  # steps under way while the next one is planned
        # Whatever thread puts something in, the one at work takes it out.
        self.submitted: collections.deque[Request] = collections.deque()
        self.cancelled: collections.deque[Request] = collections.deque()
        self.open: dict[Request, Sequence] = {}  # requests that are not done, and where they stand
        self.is_at_work = False
        self._is_sound = True  # no call was cut off
        self._restart()

    @property
    def is_busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.open or self.submitted or self.cancelled or not self._is_sound)

    @property
    def cache(self) -> Cache:
        """The cache. If nothing is under way, the rows that were given up are freed first."""
        if self.residents.to_free and not self.is_busy:
            self.residents.flush()
        return self.residents.cache

    def advance(self) -> None:
        """Send a step, and read the one before."""
        self.is_at_work = True
        try:
            self.end(self.begin())
        finally:
            self.is_at_work = False

    def begin(self) -> list[Sequence] | None:
        """The first half of `advance`, which waits for nothing: send a step. Who is due tokens by it; None: there was
        nothing to send."""
        self.make_sound()
        self._is_sound = False
        self._take_in()
        if self.prefill is not None:
            is_idle = not (self.scheduler.running or self.pipeline.flights)
            self.prefill.exchange(self.scheduler.waiting, wait=is_idle)
        return self._send()

    def end(self, due: list[Sequence] | None) -> None:
        """The second half: read the step before."""
        if due is not None:
            self._read(self.ahead)
            for sequence in due:
                if sequence.length >= sequence.limit and sequence.row is not None:  # nothing more to compute
                    if self.residents.prefix is not None and len(sequence.tokens) < sequence.cached:
                        self._read(0)  # it wants to know them
                    self.scheduler.finish(sequence)
        elif self.scheduler.waiting and not self.scheduler.running:  # all that there is does not suffice
            self._refuse(self.scheduler.waiting.first()[0])
        self._rest()
        self._is_sound = True

    def spare(self, sequence: Sequence) -> tuple[bool, int]:
        """Whether a sequence could begin here at once, and how many blocks would be left."""
        residents, others = self.residents, [*self.scheduler.running, *self.scheduler.waiting]
        if not self.open:
            residents.settle()
        spare = residents.spare(others, sequence)
        return len(others) < residents.config.max_seqs and spare >= 0, spare

    def known(self, sequence: Sequence) -> int:
        """How many of a sequence's first tokens a prefix cache has here, or will have."""
        return self.residents.known([*self.scheduler.running, *self.scheduler.waiting], sequence)

    def may_have_room(self, sequence: Sequence) -> bool:
        """Whether there may be room for a sequence, of which nothing is known yet."""
        residents = self.residents
        return residents.may_have_more and not self.scheduler.waiting and residents.can_hold(sequence)

    def receive(self, request: Request) -> None:
        """Have a request wait here."""
        self._is_sound = False
        self.submitted.append(request)
        self._take_in()
        self._is_sound = True

    def has(self, request: Request) -> bool:
        """Whether a request has been put here."""
        return request in self.submitted or any(sample in self.open for sample in request.samples)

    def cancel(self, requests: Iterable[Request]) -> None:
        """Have requests taken out by whoever works next."""
        for request in requests:
            if request.withdraw():
                self.cancelled.append(request)

    def tidy(self) -> None:
        """Take out what was cancelled."""
        self.make_sound()
        self._is_sound = False
        self._take_in()
        self._rest()
        self._is_sound = True

    def settle(self) -> None:
        """Have nothing under way: what was submitted is taken in, and whatever was computed has been read."""
        self.is_at_work = True
        try:
            self.make_sound()
            self._is_sound = False
            self._take_in()
            self._read(0)
            self._rest()
            self._is_sound = True
        finally:
            self.is_at_work = False

    def adopt(self, sequences: list[Sequence]) -> None:
        """Go on with sequences of another process."""
        self._is_sound = False
        self.open |= {sequence.request: sequence for sequence in sequences}
        followers = {id(follower) for sequence in sequences for follower in sequence.followers}
        for sequence in sequences:
            if id(sequence) not in followers:
                self.scheduler.waiting.add(sequence)
        self._is_sound = True

    def reset(self) -> None:
        """Begin anew with an empty cache."""
        self._is_sound = False
        for residents in self._all_residents():
            residents.reset()
        self._restart()
        self._rest()
        self._is_sound = True

    def close(self) -> None:
        """Give back what lies on devices, whoever names this; requests that are not done are cancelled."""
        submitted = [sample for request in self.submitted for sample in request.samples]
        for request in (*self.open, *submitted):
            request.withdraw()
        for one in (self.residents, self.pipeline, self.drafter, self.prefill):
            if one is not None:
                one.close()
        self.submitted.clear()
        self.cancelled.clear()
        self.open = {}
        self.scheduler = self._new_scheduler()
        self._is_sound = True

    def warm(self, kinds: tuple[Kind, ...], counts: tuple[int, ...]) -> list[Callable[[], Any]]:
        """What to call, one after another, to compile all programs."""
        self.make_sound()
        steps = tuple({1, self.steps_per_dispatch})
        others = [one.warm() for one in (self.drafter, self.prefill) if one is not None]
        return [*self.pipeline.warm(kinds, counts, steps), *self.residents.warm(), *itertools.chain(*others)]

    def _send(self) -> list[Sequence] | None:
        """Send a step. Who is due tokens by it; None: there was nothing to send."""
        scheduler, residents = self.scheduler, self.residents
        self._guess()
        try:
            step = scheduler.plan(certain=not self.pipeline.flights)
        except Unsure:
            self._read(0)
            step = scheduler.plan()
        if not step.counts:
            self._read(0)
            if scheduler.waiting:  # there may be more room than was known
                residents.settle()
                step = scheduler.plan()
        if not step.counts:
            return None
        steps = 1 if self.submitted else scheduler.stretch(step, self.steps_per_dispatch)
        residents.free_rows(are_wanted=bool(scheduler.waiting))
        work = self.pipeline.send(step, steps)
        due = scheduler.commit(step)
        if residents.eviction is not None:
            self.pipeline.thin([s for s in step.counts if residents.eviction.is_due(s)])
        for sequence, _, count in work:
            # Of a prompt what it has computed is of use to others already. Who needs it before it is whole asks for it
            # when it begins, but what falls out of windows would be gone then.
            is_prompt = count > 1 and steps == 1 and not sequence.guesses
            if is_prompt and (sequence.pending <= 1 or residents.config.has_windows):
                residents.offer(sequence)
        return due

    def _guess(self) -> None:
        """Have tokens guessed that may follow those of decoding rows."""
        if self.drafter is None:
            return
        ready = []
        for sequence in self.scheduler.running:
            sequence.guesses, sequence.parents = [], []
            # Of its limit one token is left to be chosen, and what comes after it is of no use.
            if sequence.pending == 1 and not sequence.followers and sequence.limit - sequence.length > 1:
                ready.append(sequence)
        guessed = self.drafter.guess(ready, self.pipeline.draft_tokens)
        for sequence, guesses in zip(ready, guessed, strict=True):
            most = sequence.limit - sequence.length - 1
            sequence.guesses, sequence.parents = guesses.tokens[:most], guesses.parents[:most]

    def _read(self, left: int) -> None:
        """Read steps until so many are under way."""
        while len(self.pipeline.flights) > left:
            for sequence, tokens in self.pipeline.read():
                request = sequence.request
                for token, logprobs in tokens:
                    if request.done:  # this one was computed before that was known
                        break
                    request.receive(token, logprobs)
                    if not request.stopped:
                        sequence.tokens.append(token)
                        sequence.unread -= 1
                if request.done:
                    self.scheduler.finish(sequence)
                    self.open.pop(request, None)

    def _take_in(self) -> None:
        """What was submitted and cancelled since the last step, maybe by another thread."""
        while self.submitted:
            request = self.submitted[0]
            new = [sequence_of(s) for s in request.samples if not (s.done or s in self.open)]
            self.open |= {sequence.request: sequence for sequence in new}
            self.submitted.popleft()
            # Of one token there is nothing to share, and thinned rows share nothing.
            if len(request.prompt) > 1 and self.residents.eviction is None:
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
        """If nothing is left to do, forget what is under way. Rows are freed when they are wanted, or looked at."""
        if not self.open:
            self.pipeline.flights.clear()
            if self.prefill is not None:
                self.prefill.pipeline.flights.clear()

    def _all_residents(self) -> list[Residents]:
        return [self.residents] if self.prefill is None else [self.residents, self.prefill.residents]

    def make_sound(self) -> None:
        """After a call that was cut off: begin anew with what is certain."""
        if not self._is_sound:
            for residents in self._all_residents():
                residents.recover()
            self._restart()
            self._is_sound = True

    def _restart(self) -> None:
        self.pipeline.clear()
        if self.prefill is not None:
            self.prefill.restart()
        self.scheduler = self._new_scheduler()
        self.open = {request: sequence_of(request) for request in self.open if not request.done}
        for sequence in self.open.values():
            self.scheduler.waiting.add(sequence)

    def _new_scheduler(self) -> Scheduler:
        return Scheduler(self.residents, step_tokens=self.step_tokens, long_prefill_tokens=self.long_prefill_tokens)

    def _refuse(self, sequence: Sequence) -> None:
        """End a request for which there is no room, whatever ends before it."""
        request = sequence.request
        request.refuse(
            f"There is no room for prompt {request.number} with {len(sequence.tokens)} tokens: "
            f"{self.residents.available} blocks can be had. Unpin blocks of the prefix cache, or give the cache more "
            "num_blocks."
        )
        self.scheduler.finish(sequence)
        del self.open[request]


def sequence_of(request: Request) -> Sequence:
    """A request at its beginning: nothing of it is in any cache."""
    limit = len(request.prompt) + request.limit
    tokens = [*request.prompt, *request.tokens]
    shareable = {True: math.inf, False: 0, "prompt": len(request.prompt)}[request.keep_prefix]
    return Sequence(
        tokens, limit, request.salt, request, len(request.prompt), priority=request.priority, shareable=shareable
    )
