"""Which tokens of which sequences go into the next step: plain Python on the host, no arrays.

Continuous batching: a row is given back as soon as its sequence ends and taken by a waiting one; long prompts are cut
into chunks that share steps with decoding rows. When blocks run out, the sequence that comes last in the order of
service is set back: its row is taken from it, and it goes on when there is room. The ideas are Orca's (iteration-level
scheduling) and vLLM's (preemption, chunked prefill).

A part of each step goes to prompts in their order, so that nobody starves; the rest goes to much shorter prompts first,
so that these need not wait for long ones. A sequence for which there is no room is overtaken by others that have room.

Everything is planned with counts alone, so that a step can be planned before the tokens of the one before have come.
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
    """One prompt, what has been generated for it, and where it stands in the cache."""

    tokens: list[int]  # the prompt, then the generated tokens that have been read
    limit: int  # the length at which it ends
    salt: str | bytes | None = None  # whom it may share blocks with
    request: Any = None  # whose it is
    prompt: int = 0  # how many of them are the prompt
    unread: int = 0  # tokens that come after them, chosen on the device
    row: int | None = None
    cached: int = 0  # its first tokens, whose keys and values are in the cache
    guesses: list[int] = dataclasses.field(default_factory=list)  # what may follow all its tokens, to be verified
    parents: list[int] = dataclasses.field(default_factory=list)  # of which guess each follows; -1: of its tokens
    host: Any = None  # where they are instead while it is in no row: `HostBlocks`, or a function that fetches these
    num_hosted: int | None = None  # how many tokens `host` has; None: all but the last
    # Those of the same prompt: as soon as all of it but its last token is computed, they go on from there too.
    followers: "list[Sequence]" = dataclasses.field(default_factory=list)
    priority: int = 0  # the lower, the earlier it is served
    arrival: int | None = None  # its number among those of one priority, given by the queue
    overtaken: int = 0  # how often another that came later has begun before it
    shareable: float = math.inf  # so many first tokens may be shared, and kept in a prefix cache
    block_hashes: list[int] = dataclasses.field(default_factory=list)  # of its full blocks, as far as they were needed

    @property
    def length(self) -> int:
        return len(self.tokens) + self.unread

    @property
    def pending(self) -> int:
        """Tokens yet to be computed: one when decoding, more before that."""
        return self.length - self.cached

    @property
    def order(self) -> tuple[int, int]:
        """Its place in the order of service: of two the lower is served first."""
        return self.priority, self.arrival or 0


class Step:
    """What to compute next: so many tokens of each of these sequences, from `cached` on."""

    def __init__(self, rows: "Rows"):
        self.rows = rows
        self.counts: dict[Sequence, int] = {}
        self.num_tokens = 0
        self.blocks: list[int] = []  # taken beyond those that the sequences have, in each group of layers

    def add(self, sequence: Sequence, count: int, blocks: list[int]) -> None:
        """Compute `count` tokens of a sequence that is not part of the step yet, `blocks` as `with_tokens` has them."""
        self.counts[sequence] = count
        self.num_tokens += count
        self.blocks = blocks

    def remove(self, sequence: Sequence) -> None:
        """Leave a sequence out again, if it is part of the step."""
        if count := self.counts.pop(sequence, 0):
            self.num_tokens -= count
            taken = self.rows.taken_by(sequence, count)
            self.blocks = [all_ - its for all_, its in zip(self.blocks, taken, strict=True)]

    def with_tokens(self, sequence: Sequence, count: int) -> list[int]:
        """Its blocks if `count` tokens of a sequence were computed too."""
        taken = self.rows.taken_by(sequence, count)
        return [all_ + its for all_, its in zip(self.blocks, taken, strict=True)] if self.blocks else taken

    @property
    def is_decode(self) -> bool:
        """Whether every sequence has one token in it."""
        return self.num_tokens == len(self.counts)


class Unsure(Exception):
    """Room may have run out, which cannot be said for certain before the steps under way have been read."""


class Rows(Protocol):
    """What a scheduler asks of whoever holds the cache."""

    def taken_by(self, sequence: Sequence, count: int) -> list[int]:
        """Blocks that `count` more tokens of a sequence take in each group of layers."""

    def until(self, sequence: Sequence) -> float:
        """How many tokens of a sequence can be computed before something else is to be done with its row."""

    @property
    def available(self) -> list[int]:
        """Blocks that can be had now in each group of layers: at least so many."""

    @property
    def may_have_more(self) -> bool:
        """Whether something was given back that `available` does not count yet."""

    def settle(self) -> None:
        """Have `available` say exactly how many."""

    def has_room(self, running: list[Sequence], sequence: Sequence, source: Sequence | None = None) -> bool:
        """Whether there is a row for a sequence, and blocks for all its tokens beside all of the others'."""

    def is_coming(self, running: list[Sequence], sequence: Sequence) -> bool:
        """Whether a running sequence is about to compute what a waiting one can share with it then."""

    def admit(self, running: list[Sequence], sequence: Sequence) -> None:
        """Give it a row; `cached` says what is there of it already, of running ones too."""

    def fork(self, source: Sequence, sequence: Sequence) -> None:
        """Give it a row that goes on from what `source` holds."""

    def set_back(self, sequence: Sequence) -> None:
        """Take its row from it for a while."""

    def retire(self, sequence: Sequence) -> None:
        """Take its row from it for good."""


class Scheduler:
    """Sequences waiting, and sequences in rows."""

    def __init__(self, rows: Rows, *, step_tokens: int, long_prefill_tokens: int | None = None):
        self.rows, self.step_tokens, self.long_prefill_tokens = rows, step_tokens, long_prefill_tokens
        self.waiting = Queue()
        self.running: list[Sequence] = []  # in the order of admission
        self.times_set_back = 0
        self._spare: list[int] | None = None  # blocks that each group can have; None: to be asked for
        self._may_admit = True  # right after one was set back there is no room for another

    def plan(self, *, certain: bool = True) -> Step:
        """The next step. Decoding rows come first; what is left of the step goes to prompts, those that wait too.

        Args:
          certain: all that was computed has been read. Otherwise `available` may be too low, and nothing is decided
            that more blocks would change.

        Raises:
          Unsure: not certain, and room may have run out. What was admitted until then stays so.
        """
        step = Step(self.rows)
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

    def _serve_prompts(self, step: Step, key: Callable[[Sequence], Any], most: int, certain: bool) -> None:
        """Give prompts tokens of a step, in the order of a key, until it has `most` tokens."""
        if step.num_tokens >= most:
            return
        prompts = [s for s in self.running if s.pending > max(1, step.counts.get(s, 0))]
        for sequence in sorted([*prompts, *self.waiting.first()], key=key):
            if step.num_tokens >= most:
                break
            self._serve(sequence, step, most, certain)

    def _serve(self, sequence: Sequence, step: Step, most: int, certain: bool) -> None:
        """Give a sequence tokens of a step until that has `most`, if it is in a row or can get one."""
        if sequence.row is not None or self._admit(sequence, certain):
            self._schedule(sequence, step, most, certain)

    def _admit(self, sequence: Sequence, certain: bool) -> bool:
        """Give a waiting sequence a row, if it may begin and there is room."""
        if not (self._may_admit and self.waiting.may_begin(sequence, self._is_coming)) or self._is_coming(sequence):
            return False
        if not self._has_room(sequence, certain):
            return False
        self.rows.admit(self.running, sequence)
        self._spare = None
        self.waiting.take(sequence, self._is_coming)
        self.running.append(sequence)
        self._split(sequence, certain)  # it may have come with all that they share
        return True

    def _is_coming(self, sequence: Sequence) -> bool:
        return self.rows.is_coming(self.running, sequence)

    def stretch(self, step: Step, most: int) -> int:
        """Let a decode step go on for up to `most` tokens of each sequence, if all know what to do until then and no
        row becomes free that a waiting one could take.

        Returns:
          How many steps it is then: `most`, or 1 and the step is as it was.
        """
        if most == 1 or not step.is_decode or any(s.pending > 1 or s.followers for s in step.counts):
            return 1
        longer = Step(self.rows)
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

    def commit(self, step: Step) -> list[Sequence]:
        """Note that a step was computed; the sequences that are due new tokens now, still unread."""
        due = []
        for sequence, count in step.counts.items():
            sequence.cached += min(count, sequence.pending) if sequence.guesses else count  # of guesses it is not known
            if sequence.cached >= sequence.length:  # its last tokens were chosen on the way
                sequence.unread = sequence.cached + 1 - len(sequence.tokens)
                due.append(sequence)
        return due

    def finish(self, sequence: Sequence) -> None:
        """Give a sequence's row and blocks back, or its place in the queue."""
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
        """Let those that follow a sequence go on from what it has computed, if that is all they share."""
        if sequence.pending > 1 and sequence.length > 1:
            return
        while sequence.followers and sequence.cached and self._has_room(sequence.followers[0], certain, sequence):
            follower = sequence.followers[0]
            self.rows.fork(sequence, follower)
            self.running.append(sequence.followers.pop(0))
        self._hand_on(sequence)  # there is no room: they compute the prompt again

    def _hand_on(self, sequence: Sequence) -> None:
        """Have the first of those that follow a sequence wait in its place, and the others follow that one."""
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

    def _schedule(self, sequence: Sequence, step: Step, most: int, certain: bool) -> None:
        """Compute as many tokens of a sequence as there is room for, until the step has `most`."""
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
            self.waiting.add(last)
            self.times_set_back += 1
            if last is sequence:
                return

    def _affordable(self, sequence: Sequence, step: Step, most: int, certain: bool) -> tuple[int, list[int]]:
        """How many of its tokens the step and the blocks that are left have room for, and the step's blocks then."""
        wanted = min(sequence.pending + len(sequence.guesses), most - step.num_tokens)
        if sequence.followers and sequence.pending > 1:
            wanted = min(wanted, sequence.pending - 1)
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
        """Whether there is room for so many blocks."""
        if self._spare is None:
            self._spare = self.rows.available
        return _fits(blocks, self._spare)


def _fits(blocks: list[int], available: list[int]) -> bool:
    return all(map(operator.le, blocks, available))


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.order


def _order_by_size(sequence: Sequence, share: int) -> tuple[int, int, int | None]:
    """By what is left to compute, in shares of a step: up to 1, 4, 16 ... are alike.

    In fine steps two long prompts of nearly equal length would be computed side by side, and both end late.
    """
    left = 1 if sequence.host is not None else sequence.pending
    return sequence.priority, (((left - 1) // share).bit_length() + 1) // 2, sequence.arrival
