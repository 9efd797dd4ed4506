"""The queue of waiting sequences, in the order of service.

A lower priority comes first, then the earlier arrival. If the first one does not fit, others may overtake it, a bounded
number of times: then no later sequence begins before it does.
"""

import bisect
import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Any

LOOK_AHEAD = 32  # sequences that are looked at for one that may begin
MOST_OVERTAKEN = 16  # times that a sequence may be overtaken for lack of room


class Queue:
    """Waiting sequences in the order of service. Those that come back keep their place in it."""

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
        """Adds a sequence; those that follow it are ordered behind it."""
        for new in (sequence, *sequence.followers):
            if new.arrival is None:
                new.arrival = next(self._arrivals)
        bisect.insort(self._sequences, sequence, key=operator.attrgetter("order"))

    def remove(self, sequence: Any) -> None:
        self._sequences.remove(sequence)

    def first(self, count: int = LOOK_AHEAD) -> list[Any]:
        """Returns the first sequences."""
        return self._sequences[:count]

    def may_begin(self, sequence: Any, is_idle: Callable[[Any], bool]) -> bool:
        """Tells whether no earlier sequence has been overtaken so often that it must begin first.

        Args:
          is_idle: tells whether a sequence waits for something other than room, so that overtaking does not delay it.
        """
        before = itertools.takewhile(lambda other: other is not sequence, self._sequences)
        return all(other.overtaken < MOST_OVERTAKEN or is_idle(other) for other in before)

    def take(self, sequence: Any, is_idle: Callable[[Any], bool]) -> None:
        """Removes a sequence that begins, and counts it for each sequence it overtakes."""
        place = self._sequences.index(sequence)
        for other in self._sequences[:place]:
            other.overtaken += not is_idle(other)
        del self._sequences[place]
