"""Block accounting: counts on the host the blocks that rows hold and will hold, without asking the device."""

import math
from collections.abc import Iterable

import numpy as np

from jaxkv._core.config.cache_config import CacheConfig
from jaxkv._engine.requests.eviction_policy import Eviction
from jaxkv._engine.requests.scheduler import Sequence


class Holdings:
    """Block counts of rows that keep all that their layers see, one number for each group of layers."""

    def __init__(self, config: CacheConfig):
        self.config, self.size = config, config.block_size
        self.groups: range | list[int] = range(len(config.groups))
        self.block_bytes = [config.bytes_per_group_block(g) for g in self.groups]

    def count_row_blocks(self, prompt: int, cached: int) -> list[int]:
        """Returns an upper bound on the blocks of a row with `cached` tokens and a prompt of `prompt`."""
        return [self.count_between_steps(g, cached) for g in self.groups]

    def taken(self, prompt: int, cached: int, count: int) -> list[int]:
        """Returns the blocks that `count` more tokens take, with no eviction in between."""
        return [-(-(cached + count) // self.size) - -(-cached // self.size)] * len(self.groups)

    def most(self, prompt: int, cached: int, length: int) -> list[int]:
        """Returns the peak number of blocks of a row that grows from `cached` tokens to `length`."""
        return [self.config.row_blocks(g, length) for g in self.groups]

    def next_point(self, prompt: int, cached: int) -> float:
        """Returns the row length at its next eviction; infinity: never."""
        return math.inf

    def growth(self, prompt: int, cached: int, length: int) -> list[int]:
        """Returns the blocks it takes until it has `length` tokens; some may be freed before."""
        most, current = self.most(prompt, cached, length), self.count_row_blocks(prompt, cached)
        return [max(0, at_most - now) for at_most, now in zip(most, current, strict=True)]

    def growth_beside(self, sequence: Sequence, source: Sequence, common: int) -> list[int]:
        """Returns the blocks that a sequence on the host takes until its end, beside a row with which it has `common`
        leading blocks in common."""
        there = len(sequence.tokens) - 1 if sequence.num_hosted is None else sequence.num_hosted
        most, all_ = self.most(sequence.prompt, 0, sequence.length), -(-sequence.length // self.size)
        found = []
        for group, at_most in zip(self.groups, most, strict=True):
            first = max(int(self.config.first_retained_block(group, n)) for n in (there, source.cached))
            shared = max(0, common - first) + min(common, self.config.group_sink_blocks[group], first)
            found.append(min(at_most, all_ - shared))
        return found

    def count_between_steps(self, group: int, length: int) -> int:
        """Returns the blocks of a row of `length` tokens between steps, without eviction."""
        leading, first = self.config.retained_blocks(group, length)
        return -(-length // self.size) - int(first - leading)


class ThinnedHoldings(Holdings):
    """Block counts of rows that evict. They share nothing, so free blocks follow from each row's bound."""

    def __init__(self, config: CacheConfig, eviction: Eviction, group_shards: Iterable[int]):
        super().__init__(config)
        self.eviction, self.group_shards = eviction, tuple(group_shards)  # of each group's blocks
        kept, self._kept, self.block_bytes = {}, [], []
        for group, layers in enumerate(config.groups):
            table = None
            if config.group_evicts[group] is not None:
                table = np.maximum.accumulate(eviction.kept(config, layers[0])).tolist()
            kind = (
                config.retentions[group],
                config.group_heads[group],
                config.group_blocks[group],
                table and tuple(table),
            )  # groups that are alike count once
            if kind not in kept:
                kept[kind] = group
                self._kept.append(table)
                self.block_bytes.append(0)
            self.block_bytes[list(kept).index(kind)] += config.bytes_per_group_block(group)
        self.groups = list(kept.values())

    def count_row_blocks(self, prompt: int, cached: int) -> list[int]:
        point = self.eviction.point_before(prompt, cached)
        return [self._blocks(g, table, point, cached) for g, table in zip(self.groups, self._kept, strict=True)]

    def taken(self, prompt: int, cached: int, count: int) -> list[int]:
        point, end, (plain, *_) = (
            self.eviction.point_before(prompt, cached),
            cached + count,
            super().taken(0, cached, count),
        )
        return [
            plain if table is None else self._blocks(g, table, point, end) - self._blocks(g, table, point, cached)
            for g, table in zip(self.groups, self._kept, strict=True)
        ]

    def most(self, prompt: int, cached: int, length: int) -> list[int]:
        every, point = self.eviction.every, self.eviction.point_before(prompt, length)
        # It peaks at its end, and before its first and last eviction, since the number of kept tokens grows with its
        # length.
        spans = [(point, length)]
        if cached < prompt:
            spans.append((0, min(prompt, length)))
        if every is not None and point > prompt:
            spans.append((point - every, point))
        return [
            self.config.row_blocks(g, length) if table is None else max(self._blocks(g, table, *span) for span in spans)
            for g, table in zip(self.groups, self._kept, strict=True)
        ]

    def next_point(self, prompt: int, cached: int) -> float:
        return self.eviction.point_after(prompt, cached)

    def room(self, sequences: Iterable[Sequence]) -> list[int]:
        """Returns the blocks that these sequences cannot hold."""
        counts = [self.count_row_blocks(s.prompt, s.cached) for s in sequences]
        return [self.config.group_blocks[g] - sum(blocks[i] for blocks in counts) for i, g in enumerate(self.groups)]

    def _blocks(self, group: int, table: list[int] | None, point: int, length: int) -> int:
        """Returns the blocks of a row of `length` tokens that last evicted after `point`."""
        if table is None:
            return self.count_between_steps(group, length)
        heads, size, num_shards = self.config.group_heads[group], self.size, self.group_shards[group]
        tokens = min(point, table[point]) + length - point
        if self.eviction.budget == "ada" and point:  # heads may have any shares of them, each with a block partly used
            own = heads // num_shards  # which may all be of one shard
            return num_shards * min(own * -(-length // size), (heads * tokens + own * (size - 1)) // size)
        return heads * -(-tokens // size)
