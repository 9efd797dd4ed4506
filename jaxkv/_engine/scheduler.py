"""Which tokens of which sequences go into the next step: plain Python on the host, no arrays.

Continuous batching: a row is given back as soon as its sequence ends and taken by a waiting one; long prompts are cut
into chunks that share steps with decoding rows. When blocks run out, the sequence admitted last is set back: its row is
taken from it, and it goes on when there is room. The ideas are Orca's (iteration-level scheduling) and vLLM's
(preemption, chunked prefill).
"""

import collections
import dataclasses
from typing import Any, Protocol


@dataclasses.dataclass(eq=False)
class Sequence:
    """One prompt and what has been generated for it."""

    index: int  # its number among the prompts
    tokens: list[int]  # the prompt, then the generated tokens
    num_prompt: int
    limit: int  # the length at which it ends
    salt: str | bytes | None = None  # whom it may share blocks with
    row: int | None = None
    cached: int = 0  # its first tokens, whose keys and values are in the cache
    host: Any = None  # where they are instead while it is swapped out

    @property
    def pending(self) -> int:
        """Tokens yet to be computed: one when decoding, more before that."""
        return len(self.tokens) - self.cached


class Step:
    """What to compute next: so many tokens of each of these sequences, from `cached` on."""

    def __init__(self, block_size: int):
        self.block_size = block_size
        self.counts: dict[Sequence, int] = {}
        self.num_tokens = 0
        self.num_blocks = 0  # taken beyond those that the sequences have; the same in every group of layers

    def add(self, sequence: Sequence, count: int) -> None:
        """Compute `count` tokens of a sequence that is not part of the step yet."""
        self.counts[sequence] = count
        self._total(sequence, count)

    def remove(self, sequence: Sequence) -> None:
        """Leave a sequence out again, if it is part of the step."""
        self._total(sequence, -self.counts.pop(sequence, 0))

    def _total(self, sequence: Sequence, change: int) -> None:
        held = -(-sequence.cached // self.block_size)
        blocks = -(-(sequence.cached + abs(change)) // self.block_size) - held
        self.num_tokens += change
        self.num_blocks += blocks if change > 0 else -blocks


class Rows(Protocol):
    """What a scheduler asks of whoever holds the cache."""

    block_size: int

    @property
    def available(self) -> list[int]:
        """Blocks that could be had now, in each group of layers."""

    def has_room(self, running: list[Sequence], sequence: Sequence) -> bool:
        """Whether there is a row for a sequence, and blocks for all its tokens beside all of the others'."""

    def admit(self, sequence: Sequence) -> None:
        """Give it a row; `cached` says what is there of it already."""

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

    def plan(self) -> Step:
        """The next step. Decoding rows come first; what is left of the step goes to prompts, oldest first."""
        step = Step(self.rows.block_size)
        times_set_back = self.times_set_back
        for sequence in sorted(self.running, key=lambda s: s.pending > 1):  # stable: oldest first among equals
            if sequence.row is not None:  # it may have been set back by an older one just now
                self._schedule(sequence, step)
        # Right after one was set back there is no room for another.
        while self.waiting and self.times_set_back == times_set_back and step.num_tokens < self.step_tokens:
            if not self.rows.has_room(self.running, self.waiting[0]):
                break
            sequence = self.waiting.popleft()
            self.rows.admit(sequence)
            self.running.append(sequence)
            self._schedule(sequence, step)
        return step

    def commit(self, step: Step) -> list[Sequence]:
        """Note that a step was computed; the sequences that are due a new token now."""
        for sequence, count in step.counts.items():
            sequence.cached += count
        return [s for s in step.counts if s.pending == 0]

    def finish(self, sequence: Sequence) -> None:
        """Give a sequence's row and blocks back."""
        self.running.remove(sequence)
        self.rows.retire(sequence)

    def _schedule(self, sequence: Sequence, step: Step) -> None:
        while step.num_tokens < self.step_tokens:
            if count := self._affordable(sequence, step):
                step.add(sequence, count)
                return
            newest = self.running[-1]
            step.remove(newest)
            self.running.remove(newest)
            self.rows.set_back(newest)
            self.waiting.appendleft(newest)
            self.times_set_back += 1
            if newest is sequence:
                return

    def _affordable(self, sequence: Sequence, step: Step) -> int:
        """How many of its tokens the step and the blocks that are left have room for."""
        size = self.rows.block_size
        blocks = min(self.rows.available) - step.num_blocks
        places = (-(-sequence.cached // size) + blocks) * size - sequence.cached
        return max(0, min(sequence.pending, self.step_tokens - step.num_tokens, places))
