"""Who waits, in the order in which they are to be served.

A lower priority comes first, then who came first. Where there is no room for who comes first, others may go ahead, each
of those that wait being overtaken a bounded number of times: then nobody behind it begins before it does.
"""

import bisect
import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Any

LOOK_AHEAD = 32  # sequences that are looked at for one that may begin
MOST_OVERTAKEN = 16  # times that a sequence is overtaken for lack of room


class Queue:
    """Sequences that wait, the first to be served first. Those that come back keep their place."""

    def __init__(self) -> None:
        self._sequences: list[Any] = []
        self._arrivals = itertools.count()

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._sequences)

    def __contains__(self, sequence: Any) -> bool:
        return sequence in self._sequences

    def add(self, sequence: Any) -> None:
        """Have a sequence wait. Those that follow it get their places behind it."""
        for new in (sequence, *sequence.followers):
            if new.arrival is None:
                new.arrival = next(self._arrivals)
        bisect.insort(self._sequences, sequence, key=operator.attrgetter("order"))

    def remove(self, sequence: Any) -> None:
        self._sequences.remove(sequence)

    def first(self, count: int = LOOK_AHEAD) -> list[Any]:
        """The first of them."""
        return self._sequences[:count]

    def may_begin(self, sequence: Any, is_idle: Callable[[Any], bool]) -> bool:
        """Whether nobody before a sequence was overtaken so often that it has to begin first.

        Args:
          is_idle: whether one waits for something else than room, so that no one who goes ahead delays it.
        """
        before = itertools.takewhile(lambda other: other is not sequence, self._sequences)
        return all(other.overtaken < MOST_OVERTAKEN or is_idle(other) for other in before)

    def take(self, sequence: Any, is_idle: Callable[[Any], bool]) -> None:
        """Remove a sequence that begins, and count who is overtaken by it."""
        place = self._sequences.index(sequence)
        for other in self._sequences[:place]:
            other.overtaken += not is_idle(other)
        del self._sequences[place]
