"""Which states of running sequences a prefix cache is to have, and where prompts are cut so that they come by."""

import math
from collections.abc import Callable
from typing import Any

from jaxkv._core.cache.cache import Cache
from jaxkv._core.config.cache_config import CacheConfig
from jaxkv._engine.requests.common_beginning import count_common_blocks
from jaxkv._engine.requests.scheduler import Sequence
from jaxkv._tiers.prefix_cache.prefix_cache import PrefixCache
from jaxkv._tiers.prefix_cache.snapshots import read_states


class StateKeeper:
    """Takes snapshots of rows' states between steps, for models with recurrent layers and a prefix cache.

    A prompt is cut at the end of its last full block, where prompts part, and every `snapshot_every` tokens: there a
    later prompt can go on. Of the tokens behind the prompt the states at the end of the last full block are kept.
    """

    def __init__(self, config: CacheConfig, prefix: PrefixCache | None):
        self.is_needed = prefix is not None and bool(config.recurrent_layers)
        self.block_size, self.every = config.block_size, config.snapshot_every

    def begin(self, sequence: Sequence, known: int) -> None:
        """Chooses where the prompt of a sequence is cut that gets a row; `known` of its tokens other prompts have."""
        sequence.states = {}
        if not self.is_needed:
            return
        end = self._last_block_end(sequence)
        for length in (end, known, *range(self.every or end + 1, end + 1, self.every or 1)):
            self._add_point(sequence, min(length, end))

    def note_partings(self, running: list[Sequence], waiting: list[Sequence]) -> None:
        """Has the prompts of sequences cut where those of waiting sequences, which begin alike, part from them."""
        prompts = [sequence for sequence in running if sequence.pending > 1]
        for sequence in waiting:
            for other in prompts:
                common = count_common_blocks(other, sequence, self.block_size) * self.block_size
                self._add_point(other, min(common, self._last_block_end(sequence)))
            prompts.append(sequence)

    def _last_block_end(self, sequence: Sequence) -> int:
        """Returns the end of the last full block before the last token, up to which a sequence can be found."""
        return (len(sequence.tokens) - 1) // self.block_size * self.block_size

    def _add_point(self, sequence: Sequence, length: int) -> None:
        if 0 < length <= sequence.shareable:
            sequence.points.add(length)

    def next_point(self, sequence: Sequence) -> float:
        """Returns the length at which the next step of a sequence must end at the latest."""
        return min((point for point in sequence.points if point > sequence.cached), default=math.inf)

    def limit_guesses(self, sequence: Sequence, most: int) -> int:
        """Returns how many of `most` draft tokens a step may have, so that it passes no end of a block."""
        left = self.block_size - sequence.cached % self.block_size - 1
        return min(most, left) if self.is_needed else most

    def is_due(self, sequence: Sequence) -> bool:
        """Tells whether the states of a sequence's row are to be kept now."""
        length = sequence.cached
        is_end = 0 < length <= sequence.shareable and length % self.block_size == 0
        return self.is_needed and is_end and sequence.row is not None and length not in sequence.states

    def keep(self, sequence: Sequence, cache: Cache) -> None:
        """Keeps the states of a sequence's row. Does not wait for the device."""
        assert sequence.row is not None
        # A step ahead may have passed the end of a sequence: then the states before are those to keep.
        first = sequence.cached - self.block_size
        stay = {n: x for n, x in sequence.states.items() if n in sequence.points or n >= first or x is None}
        sequence.states = stay | {sequence.cached: read_states(cache, sequence.row)}

    def hand_over(self, sequence: Sequence, count: int) -> dict[int, Any]:
        """Returns the kept states of the first `count` tokens that the prefix cache has not had yet."""
        found = {length: x for length, x in sequence.states.items() if x is not None and length <= count}
        sequence.states = sequence.states | dict.fromkeys(found)
        return found

    def limit(self, sequence: Sequence, blocks: int) -> int:
        """Returns how many of a row's first blocks another row can begin with: up to states that are kept."""
        if not self.is_needed:
            return blocks
        lengths = (length // self.block_size for length in sequence.states)
        return max((length for length in lengths if length <= blocks), default=0)

    def warm(self, cache: Callable[[], Cache], put: Callable[[Any], None]) -> list[Callable[[], Any]]:
        """Returns functions that compile the programs."""
        return [lambda: put(read_states(cache(), 0))]
