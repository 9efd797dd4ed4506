"""Which tokens of which sequences go into the next step: plain Python on the host, no arrays.

Continuous batching: a row is given back as soon as its sequence ends and taken by a waiting one; long prompts are cut
into chunks that share steps with decoding rows. It counts blocks itself, so nothing is read back from the device. When
they run out, the sequence admitted last is set back: its blocks are freed, and it is computed again when there is room.
The ideas are Orca's (iteration-level scheduling) and vLLM's (recomputation, chunked prefill).
"""

import collections
import dataclasses


@dataclasses.dataclass(eq=False)
class Sequence:
    """One prompt and what has been generated for it."""

    index: int  # its number among the prompts
    tokens: list[int]  # the prompt, then the generated tokens
    num_prompt: int
    limit: int  # the length at which it ends
    row: int | None = None
    cached: int = 0  # its first tokens, whose keys and values are in the cache

    @property
    def pending(self) -> int:
        """Tokens yet to be computed: one when decoding, more before that."""
        return len(self.tokens) - self.cached


@dataclasses.dataclass(frozen=True)
class Step:
    """What to compute next: so many tokens of each of these sequences, from `cached` on."""

    counts: dict[Sequence, int]

    @property
    def num_tokens(self) -> int:
        return sum(self.counts.values())


class Scheduler:
    """Sequences waiting, sequences in rows, and the blocks they hold."""

    def __init__(self, *, max_seqs: int, num_blocks: int, block_size: int, step_tokens: int):
        self.num_blocks, self.block_size, self.step_tokens = num_blocks, block_size, step_tokens
        self.waiting: collections.deque[Sequence] = collections.deque()
        self.running: list[Sequence] = []  # in the order of admission
        self.rows = list(range(max_seqs - 1, -1, -1))  # free ones, the lowest on top
        self.to_free: list[int] = []  # rows whose blocks the device still has to free
        self.times_set_back = 0

    def blocks(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.block_size)

    @property
    def free_blocks(self) -> int:
        return self.num_blocks - sum(self.blocks(s.cached) for s in self.running)

    def plan(self) -> Step:
        """The next step. Decoding rows come first; what is left of the step goes to prompts, oldest first."""
        counts: dict[Sequence, int] = {}
        self._free_blocks = self.free_blocks
        times_set_back = self.times_set_back
        for sequence in sorted(self.running, key=lambda s: s.pending > 1):  # stable: oldest first among equals
            if sequence.row is not None:  # it may have been set back by an older one just now
                self._schedule(sequence, counts)
        while self.waiting and self.rows and self.times_set_back == times_set_back and self._admit(counts):
            pass
        return Step({s: n for s, n in counts.items() if n})

    def commit(self, step: Step) -> list[Sequence]:
        """Note that a step was computed; the sequences that are due a new token now."""
        for sequence, count in step.counts.items():
            sequence.cached += count
        return [s for s in step.counts if s.pending == 0]

    def finish(self, sequence: Sequence) -> None:
        """Give a sequence's row and blocks back."""
        self.running.remove(sequence)
        self._release(sequence)

    def _schedule(self, sequence: Sequence, counts: dict[Sequence, int]) -> None:
        count = min(sequence.pending, self.step_tokens - sum(counts.values()))
        held = self.blocks(sequence.cached)
        while (need := self.blocks(sequence.cached + count) - held) > self._free_blocks:
            newest = self.running[-1]
            self._set_back(newest, counts)
            if newest is sequence:
                return
        self._free_blocks -= need
        counts[sequence] = count

    def _admit(self, counts: dict[Sequence, int]) -> bool:
        sequence = self.waiting[0]
        room = self.step_tokens - sum(counts.values())
        # All of its tokens must fit beside all of the others', not only its first chunk: else it is soon set back.
        promised = sum(self.blocks(len(s.tokens)) for s in self.running)
        if room < 1 or promised + self.blocks(len(sequence.tokens)) > self.num_blocks:
            return False
        self.waiting.popleft()
        sequence.row = self.rows.pop()
        self.running.append(sequence)
        counts[sequence] = min(sequence.pending, room)
        return True

    def _set_back(self, sequence: Sequence, counts: dict[Sequence, int]) -> None:
        self._free_blocks += self.blocks(sequence.cached + counts.pop(sequence, 0))
        self.running.remove(sequence)
        self._release(sequence)
        self.waiting.appendleft(sequence)
        self.times_set_back += 1

    def _release(self, sequence: Sequence) -> None:
        assert sequence.row is not None
        self.to_free.append(sequence.row)
        self.rows.append(sequence.row)
        sequence.row, sequence.cached = None, 0
