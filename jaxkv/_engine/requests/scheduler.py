"""Which tokens of which sequences go into the next step: plain Python on the host, no arrays.

Continuous batching: a row is given back as soon as its sequence ends and taken by a waiting one; long prompts are cut
into chunks that share steps with decoding rows. When blocks run out, the sequence admitted last is set back: its row is
taken from it, and it goes on when there is room. The ideas are Orca's (iteration-level scheduling) and vLLM's
(preemption, chunked prefill).

Everything is planned with counts alone, so that a step can be planned before the tokens of the one before have come.
"""

import bisect
import collections
import dataclasses
import operator
from typing import Any, Protocol


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
    # Those of the same prompt: as soon as all of it but its last token is computed, they go on from there too.
    followers: "list[Sequence]" = dataclasses.field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.tokens) + self.unread

    @property
    def pending(self) -> int:
        """Tokens yet to be computed: one when decoding, more before that."""
        return self.length - self.cached


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

    def admit(self, sequence: Sequence) -> None:
        """Give it a row; `cached` says what is there of it already."""

    def fork(self, source: Sequence, sequence: Sequence) -> None:
        """Give it a row that goes on from what `source` holds."""

    def set_back(self, sequence: Sequence) -> None:
        """Take its row from it for a while."""

    def retire(self, sequence: Sequence) -> None:
        """Take its row from it for good."""


class Scheduler:
    """Sequences waiting, and sequences in rows."""

    def __init__(self, rows: Rows, *, step_tokens: int):
        self.rows, self.step_tokens = rows, step_tokens
        self.waiting: collections.deque[Sequence] = collections.deque()
        self.running: list[Sequence] = []  # in the order of admission
        self.times_set_back = 0
        self._spare: list[int] | None = None  # blocks that each group can have; None: to be asked for

    def plan(self, *, certain: bool = True) -> Step:
        """The next step. Decoding rows come first; what is left of the step goes to prompts, oldest first.

        Args:
          certain: all that was computed has been read. Otherwise `available` may be too low, and nothing is decided
            that more blocks would change.

        Raises:
          Unsure: not certain, and room may have run out. What was admitted until then stays so.
        """
        step = Step(self.rows)
        times_set_back, self._spare = self.times_set_back, None
        for sequence in [s for s in self.running if s.followers]:
            self._split(sequence, certain)
        for sequence in sorted(self.running, key=lambda s: s.pending > 1):  # stable: oldest first among equals
            if sequence.row is not None:  # it may have been set back by an older one just now
                self._schedule(sequence, step, certain)
        # Right after one was set back there is no room for another.
        while self.waiting and self.times_set_back == times_set_back and step.num_tokens < self.step_tokens:
            if not self._has_room(self.waiting[0], certain):
                break
            sequence = self.waiting[0]
            self.rows.admit(sequence)
            self._spare = None
            self.running.append(self.waiting.popleft())
            self._split(sequence, certain)  # it may have come with all that they share
            self._schedule(sequence, step, certain)
        return step

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
        """Let the first of those that follow a sequence go ahead of the others."""
        if sequence.followers:
            first, *others = sequence.followers
            sequence.followers, first.followers = [], others
            self.waiting.appendleft(first)

    def _has_room(self, sequence: Sequence, certain: bool, source: Sequence | None = None) -> bool:
        if self.rows.has_room(self.running, sequence, source):
            return True
        if not self.rows.may_have_more:
            return False
        if not certain:
            raise Unsure
        self.rows.settle()
        return self.rows.has_room(self.running, sequence, source)

    def _schedule(self, sequence: Sequence, step: Step, certain: bool) -> None:
        while step.num_tokens < self.step_tokens:
            count, blocks = self._affordable(sequence, step, certain)
            if count:
                step.add(sequence, count, blocks)
                return
            newest = self.running[-1]
            step.remove(newest)
            self.rows.set_back(newest)
            self._spare = None
            self.running.remove(newest)
            self.waiting.appendleft(newest)
            self.times_set_back += 1
            if newest is sequence:
                return

    def _affordable(self, sequence: Sequence, step: Step, certain: bool) -> tuple[int, list[int]]:
        """How many of its tokens the step and the blocks that are left have room for, and the step's blocks then."""
        wanted = min(sequence.pending + len(sequence.guesses), self.step_tokens - step.num_tokens)
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
