"""How many blocks are free, as far as the host knows without waiting for the device."""

from collections.abc import Sequence
from typing import NamedTuple

Measured = list[list[int]]  # for each group what `measure_room` returns: free blocks, and blocks an index alone keeps


class Mark(NamedTuple):
    """A point in the life of a `Room`."""

    taken: int  # blocks taken until then
    clock: int  # changes of the room until then


class Room:
    """The room of each group of layers in the last step that was read, and what was taken since.

    Since then at most `taken` more blocks were taken. What was given back is not counted until it is measured again.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Forgets what was measured, when all rows are freed at once."""
        self._measured: Measured | None = None
        self.taken = self._taken_then = 0  # blocks taken so far, and when the room was measured
        self.clock = self._measured_at = self._given_back_at = 0  # counts changes of the room

    def mark(self) -> Mark:
        """Returns the present point, for a measurement that is read later."""
        return Mark(self.taken, self.clock)

    def measure(self, room: Measured, at: Mark) -> None:
        """Records the room as it was at a mark."""
        self._measured, (self._taken_then, self._measured_at) = room, at

    def give_back(self) -> None:
        """Records that a row was freed."""
        self.clock += 1
        self._given_back_at = self.clock

    @property
    def is_known(self) -> bool:
        """Tells whether it was ever measured."""
        return self._measured is not None

    @property
    def is_exact(self) -> bool:
        """Tells whether it was measured since it changed last."""
        return self.is_known and self._measured_at >= self.clock

    @property
    def has_grown(self) -> bool:
        """Tells whether rows were freed that it does not count yet."""
        return self._given_back_at > self._measured_at

    def available(self, pinned: Sequence[int]) -> list[int]:
        """Returns a lower bound, for each group, on blocks free or evictable; `pinned` of its blocks are not."""
        assert self._measured is not None
        since = self.taken - self._taken_then
        free = (blocks + max(0, unused - kept) for (blocks, unused), kept in zip(self._measured, pinned, strict=True))
        return [max(0, blocks - since) for blocks in free]

    def has_free(self, num_blocks: Sequence[int]) -> bool:
        """Tells whether this number of blocks is certainly free in each group."""
        assert self._measured is not None
        since = self.taken - self._taken_then
        return all(n + since <= blocks for n, (blocks, _) in zip(num_blocks, self._measured, strict=True))
