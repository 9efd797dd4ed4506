"""The scheduler: selects the tokens of each sequence for the next step, in plain Python without arrays.

Continuous batching: a row is freed as soon as its sequence ends, and a waiting sequence takes it. Long prompts are cut
into chunks that share steps with decoding rows. When blocks run out, the sequence that is last in the order of service
is preempted: it loses its row, and goes on when there is room. The ideas are Orca's (iteration-level scheduling) and
vLLM's (preemption, chunked prefill).

A share of each step goes to prompts in their order, so that none starves. The rest goes to much shorter prompts first,
so that these need not wait for long ones. A sequence that does not fit may be overtaken by others that do.

Planning uses counts alone, so that a step can be planned before the tokens of the step before are read.
"""

import bisect
import dataclasses
import math
import operator
from collections.abc import Callable
from typing import Any, Protocol

from jaxkv._engine.requests.queue import Queue


@dataclasses.dataclass(eq=False)
class Sequence:
    """One prompt, its generated tokens, and its state in the cache."""

    tokens: list[int]  # the prompt, then the generated tokens that have been read
    limit: int  # the length at which it ends
    salt: str | bytes | None = None  # it shares blocks only with sequences of the same salt
    request: Any = None  # the request that it computes
    prompt: int = 0  # how many of `tokens` are the prompt
    unread: int = 0  # tokens after these, chosen on the device
    row: int | None = None
    cached: int = 0  # leading tokens whose keys and values are in the cache
    is_noted: bool = False  # the model runner has noted what its row has, since it has the row
    guesses: list[int] = dataclasses.field(default_factory=list)  # draft tokens, to be verified behind one given
    parents: list[int] = dataclasses.field(default_factory=list)  # the draft token that each follows; -1: the sequence
    host: Any = None  # its blocks while it has no row: `HostBlocks`, or a function that fetches them
    num_hosted: int | None = None  # how many tokens `host` has; None: all but the last
    # Sequences with the same prompt: they fork from this one once all but the prompt's last token is computed.
    followers: "list[Sequence]" = dataclasses.field(default_factory=list)
    priority: int = 0  # the lower, the earlier it is served
    arrival: int | None = None  # its number within its priority, given by the queue
    overtaken: int = 0  # how often a later sequence has begun before it
    adapter: int = 0  # the adapter that its keys and values depend on; 0: none
    offered: Any = None  # the node of a prefix cache up to which its blocks were offered
    # With recurrent layers and a prefix cache: lengths at which its states are worth keeping, and states by the length
    # they belong to; None: the prefix cache has had them.
    points: set[int] = dataclasses.field(default_factory=set)
    states: dict[int, Any] = dataclasses.field(default_factory=dict)
    shareable: float = math.inf  # leading tokens that may be shared, and kept in a prefix cache
    block_hashes: list[int] = dataclasses.field(default_factory=list)  # hashes of its full blocks, computed as needed

    @property
    def identity(self) -> dict[str, Any]:
        """Returns the salt and adapter by which a prefix cache tells its tokens from others."""
        return {"salt": self.salt, "adapter": str(self.adapter) if self.adapter else None}

    @property
    def length(self) -> int:
        return len(self.tokens) + self.unread

    @property
    def pending(self) -> int:
        """Tokens yet to be computed: one when decoding, more before that."""
        return len(self.tokens) + self.unread - self.cached

    @property
    def needs_scores(self) -> bool:
        """Tells whether log-probabilities of its prompt are wanted and missing: then it shares no computed tokens."""
        return getattr(self.request, "needs_scores", False)

    @property
    def order(self) -> tuple[int, int]:
        """Its key in the order of service: the lower is served first."""
        return self.priority, self.arrival or 0


_order = operator.attrgetter("order")


class ScheduledStep:
    """A planned step: the number of tokens of each sequence, from `cached` on."""

    def __init__(self, rows: "RowManager"):
        self.rows = rows
        self.counts: dict[Sequence, int] = {}
        self.num_tokens = 0
        self.blocks: list[int] = []  # new blocks that the step takes, in each group of layers

    def add(self, sequence: Sequence, count: int, blocks: list[int]) -> None:
        """Adds `count` tokens of a sequence that is not in the step yet; `blocks` is from `with_tokens`."""
        self.counts[sequence] = count
        self.num_tokens += count
        self.blocks = blocks

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence, if it is in the step."""
        if count := self.counts.pop(sequence, 0):
            self.num_tokens -= count
            taken = self.rows.taken_by(sequence, count)
            self.blocks = [all_ - its for all_, its in zip(self.blocks, taken, strict=True)]

    def with_tokens(self, sequence: Sequence, count: int) -> list[int]:
        """Returns its blocks with `count` more tokens of a sequence."""
        taken = self.rows.taken_by(sequence, count)
        return [all_ + its for all_, its in zip(self.blocks, taken, strict=True)] if self.blocks else taken

    @property
    def is_decode(self) -> bool:
        """Tells whether every sequence has one token in it."""
        return self.num_tokens == len(self.counts)


class Unsure(Exception):
    """Raised when blocks may have run out, which is only certain once the in-flight steps are read."""


class RowManager(Protocol):
    """The interface of the cache manager that the scheduler uses."""

    def taken_by(self, sequence: Sequence, count: int) -> list[int]:
        """Returns the blocks that `count` more tokens of a sequence take in each group of layers."""

    def until(self, sequence: Sequence) -> float:
        """Returns the tokens that can be computed before its row needs another operation."""

    @property
    def available(self) -> list[int]:
        """Returns a lower bound on the available blocks of each group of layers."""

    @property
    def may_have_more(self) -> bool:
        """Tells whether blocks were freed that `available` does not count yet."""

    def settle(self) -> None:
        """Makes `available` exact."""

    def has_room(self, running: list[Sequence], sequence: Sequence, source: Sequence | None = None) -> bool:
        """Tells whether there is a row, and blocks for all its tokens beside those of all others."""

    def is_coming(self, running: list[Sequence], sequence: Sequence) -> bool:
        """Tells whether a running sequence is about to compute blocks that a waiting one can share."""

    def must_follow(self, leader: Sequence, sequence: Sequence) -> bool:
        """Tells whether a waiting sequence can share what `leader` is about to compute by a fork at its time alone."""

    def admit(self, running: list[Sequence], sequence: Sequence) -> None:
        """Gives it a row, and sets `cached` to the tokens found in the cache, running rows included."""

    def fork(self, source: Sequence, sequence: Sequence) -> None:
        """Gives it a row that is a fork of the row of `source`."""

    def set_back(self, sequence: Sequence) -> None:
        """Preempts it: frees its row for a while."""

    def retire(self, sequence: Sequence) -> None:
        """Frees its row for good."""


class Scheduler:
    """The waiting sequences and the running ones, and the plan of each step."""

    def __init__(self, rows: RowManager, *, step_tokens: int, long_prefill_tokens: int | None = None):
        self.rows, self.step_tokens, self.long_prefill_tokens = rows, step_tokens, long_prefill_tokens
        self.waiting = Queue()
        self.running: list[Sequence] = []  # in the order of admission
        self.times_set_back = 0
        self._spare: list[int] | None = None  # available blocks of each group; None: unknown
        self._may_admit = True  # right after a preemption there is no room for another sequence

    def plan(self, *, certain: bool = True) -> ScheduledStep:
        """Plans the next step. Decoding rows come first; the rest of the step goes to prompts, waiting ones included.

        Args:
          certain: all steps have been read. Otherwise `available` may be too low, and nothing is decided that more
            blocks would change.

        Raises:
          Unsure: not certain, and blocks may have run out. Sequences admitted until then stay admitted.
        """
        step = ScheduledStep(self.rows)
        self._may_admit, self._spare = True, None
        for sequence in [s for s in self.running if s.followers]:
            self._split(sequence, certain)
        for sequence in sorted((s for s in self.running if s.pending <= 1), key=_order):
            self._serve(sequence, step, self.step_tokens, certain)
        left = self.step_tokens - step.num_tokens
        share = min(left, -(-left // 2) if self.long_prefill_tokens is None else self.long_prefill_tokens)
        self._serve_prompts(step, _order, step.num_tokens + share, certain)
        self._serve_prompts(step, lambda s: _order_by_size(s, share), self.step_tokens, certain)
        return step

    def _serve_prompts(self, step: ScheduledStep, key: Callable[[Sequence], Any], most: int, certain: bool) -> None:
        """Adds prompt tokens to a step, in the order of a key, until it has `most` tokens."""
        if step.num_tokens >= most:
            return
        prompts = [s for s in self.running if s.pending > 1 and s.pending > step.counts.get(s, 0)]
        for sequence in sorted([*prompts, *self.waiting.first()], key=key):
            if step.num_tokens >= most:
                break
            self._serve(sequence, step, most, certain)

    def _serve(self, sequence: Sequence, step: ScheduledStep, most: int, certain: bool) -> None:
        """Adds tokens of a sequence until the step has `most`, if it has a row or can get one."""
        if sequence.row is not None or self._admit(sequence, certain):
            self._schedule(sequence, step, most, certain)

    def _admit(self, sequence: Sequence, certain: bool) -> bool:
        """Admits a waiting sequence to a row, if it may begin and there is room."""
        if sequence not in self.waiting:  # it follows one that began in this step
            return False
        if not (self._may_admit and self.waiting.may_begin(sequence, self._is_coming)) or self._is_coming(sequence):
            return False
        if not self._has_room(sequence, certain):
            return False
        self.rows.admit(self.running, sequence)
        self._spare = None
        self.waiting.take(sequence, self._is_coming)
        self.running.append(sequence)
        self._gather(sequence)
        self._split(sequence, certain)  # all that they share may be cached already
        return True

    def _gather(self, sequence: Sequence) -> None:
        """Has waiting siblings follow a sequence that begins their prompt anew."""
        if sequence.cached < sequence.prompt - 1:
            for other in [s for s in self.waiting if self.rows.must_follow(sequence, s)]:
                self.waiting.remove(other)
                sequence.followers += [other, *other.followers]
                other.followers = []

    def _is_coming(self, sequence: Sequence) -> bool:
        return self.rows.is_coming(self.running, sequence)

    def stretch(self, step: ScheduledStep, most: int) -> int:
        """Extends a decode step to up to `most` tokens of each sequence, if none of them ends or needs anything else
        before, and no row becomes free for a waiting one.

        Returns:
          The number of steps: `most`, or 1 for an unchanged step.
        """
        if most == 1 or not step.is_decode or any(s.pending > 1 or s.followers for s in step.counts):
            return 1
        longer = ScheduledStep(self.rows)
        for sequence in step.counts:
            if self.rows.until(sequence) < most:
                return 1
            count = min(most, sequence.limit - sequence.length)
            longer.add(sequence, count, longer.with_tokens(sequence, count))
        counts = longer.counts.values()
        worth = min if self.waiting else max
        if worth(counts, default=0) < most or not _fits(longer.blocks, self.rows.available):
            return 1
        step.counts, step.num_tokens, step.blocks = longer.counts, longer.num_tokens, longer.blocks
        return most

    def commit(self, step: ScheduledStep) -> list[Sequence]:
        """Records that a step was computed; returns the sequences that get new tokens, still unread."""
        due = []
        for sequence, count in step.counts.items():
            sequence.cached += min(count, sequence.pending) if sequence.guesses else count  # drafts: unknown
            if sequence.cached >= sequence.length:  # its last tokens were chosen within the step
                sequence.unread = sequence.cached + 1 - len(sequence.tokens)
                due.append(sequence)
        return due

    def finish(self, sequence: Sequence) -> None:
        """Frees a sequence's row and blocks, or removes it from the queue."""
        if sequence in self.running:
            self.running.remove(sequence)
            self.rows.retire(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            for leader in (*self.running, *self.waiting):
                if sequence in leader.followers:
                    leader.followers.remove(sequence)
        self._hand_on(sequence)

    def _split(self, sequence: Sequence, certain: bool) -> None:
        """Forks the followers of a sequence from its row, once all that they share is computed."""
        if sequence.cached < sequence.prompt - 1:
            return
        while sequence.followers and sequence.cached and self._has_room(sequence.followers[0], certain, sequence):
            follower = sequence.followers[0]
            self.rows.fork(sequence, follower)
            self.running.append(sequence.followers.pop(0))
        self._hand_on(sequence)  # no room: they compute the prompt again

    def _hand_on(self, sequence: Sequence) -> None:
        """Makes the first follower wait in place of a sequence, and the others follow that one."""
        if sequence.followers:
            first, *others = sequence.followers
            sequence.followers, first.followers = [], others
            self.waiting.add(first)

    def _has_room(self, sequence: Sequence, certain: bool, source: Sequence | None = None) -> bool:
        if self.rows.has_room(self.running, sequence, source):
            return True
        if not self.rows.may_have_more:
            return False
        if not certain:
            raise Unsure
        self.rows.settle()
        return self.rows.has_room(self.running, sequence, source)

    def _schedule(self, sequence: Sequence, step: ScheduledStep, most: int, certain: bool) -> None:
        """Adds as many tokens of a sequence as there is room for, until the step has `most`."""
        step.remove(sequence)
        while step.num_tokens < most:
            count, blocks = self._affordable(sequence, step, most, certain)
            if count:
                step.add(sequence, count, blocks)
                return
            last = max(self.running, key=_order)
            step.remove(last)
            self.rows.set_back(last)
            self._spare, self._may_admit = None, False
            self.running.remove(last)
            last.guesses, last.parents = [], []  # they follow one token; when it returns, many may be missing
            self.waiting.add(last)
            self.times_set_back += 1
            if last is sequence:
                return

    def _affordable(self, sequence: Sequence, step: ScheduledStep, most: int, certain: bool) -> tuple[int, list[int]]:
        """Returns how many of its tokens fit into the step and the blocks left, and the step's blocks then."""
        wanted = min(sequence.pending + len(sequence.guesses), most - step.num_tokens)
        if sequence.followers and sequence.cached < sequence.prompt - 1:
            wanted = min(wanted, sequence.prompt - 1 - sequence.cached)
        wanted = int(min(wanted, self.rows.until(sequence)))
        if self._is_there(blocks := step.with_tokens(sequence, wanted)):
            return wanted, blocks
        if not certain:
            raise Unsure
        self.rows.settle()
        self._spare = None
        counts = range(1, wanted + 1)
        found = bisect.bisect(counts, False, key=lambda n: not self._is_there(step.with_tokens(sequence, n)))
        return found, step.with_tokens(sequence, found)

    def _is_there(self, blocks: list[int]) -> bool:
        """Tells whether this number of blocks is available."""
        if self._spare is None:
            self._spare = self.rows.available
        return _fits(blocks, self._spare)


def _fits(blocks: list[int], available: list[int]) -> bool:
    return all(map(operator.le, blocks, available))


def _order_by_size(sequence: Sequence, share: int) -> tuple[int, int, int | None]:
    """Returns a sort key by the tokens left to compute, in shares of a step: up to 1, 4, 16 ... are equal.

    With finer steps two long prompts of nearly equal length would be computed side by side, and both end late.
    """
    left = 1 if sequence.host is not None else sequence.pending
    return sequence.priority, (((left - 1) // share).bit_length() + 1) // 2, sequence.arrival
