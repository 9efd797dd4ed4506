"""The cache manager: gives sequences rows and blocks of a cache, and preempts them when blocks run out."""

import collections
import operator
from typing import Any

import jax
import numpy as np

from jaxkv._core.cache.cache import Cache
from jaxkv._core.config.cache_config import CacheConfig
from jaxkv._core.state.errors import CacheError
from jaxkv._engine.programs.maintenance import compile_maintenance
from jaxkv._engine.requests.block_accounting import Holdings, ThinnedHoldings
from jaxkv._engine.requests.eviction_policy import Eviction
from jaxkv._engine.requests.scheduler import Sequence
from jaxkv._engine.runner.device_cache import DeviceCache
from jaxkv._engine.runner.prefix_rows import PrefixRows
from jaxkv._engine.runner.room import Mark, Measured, Room
from jaxkv._engine.runner.row_sharing import RowSharing
from jaxkv._engine.runner.state_keeper import StateKeeper
from jaxkv._engine.runner.swap_policy import Swap, SwapPolicy
from jaxkv._tiers.host_tier import swap_out_rows
from jaxkv._tiers.prefix_cache.prefix_cache import PrefixCache
from jaxkv._tiers.prefix_cache.retained_blocks import warm


class CacheManager:
    """The sequences in the rows of an engine's cache.

    A preempted sequence is either swapped out to host memory (see `SwapPolicy`), or dropped and computed again, but for
    what a prefix cache still has of it later.
    """

    def __init__(
        self,
        config: CacheConfig,
        model: Any,
        *,
        prefix: PrefixCache | None,
        swap: Swap,
        host_bandwidth: float,
        eviction: Eviction | None = None,
    ):
        self.config, self.prefix, self.eviction, self.block_size = config, prefix, eviction, config.block_size
        self.device, self.room, self.states = DeviceCache(config, model), Room(), StateKeeper(config, prefix)
        self.prefix_rows = PrefixRows(prefix, config, self.device, self.room, self.states)
        self.sharing = RowSharing(config, prefix, self.states, is_thinned=eviction is not None)
        group_shards = (tables.num_shards for tables in self.cache.tables)
        self.holdings = Holdings(config) if eviction is None else ThinnedHoldings(config, eviction, group_shards)
        self.swapping = SwapPolicy(swap, host_bandwidth, config, self.holdings, eviction, has_prefix=prefix is not None)
        programs = compile_maintenance(self.device.structure, self.device.shared)
        self._settle, self._swap_in, self._fork, self._begin, self._put_states = programs
        self.counts: collections.Counter[str] = collections.Counter()
        self._begin_empty()

    def _begin_empty(self) -> None:
        """Resets to no sequences in a new cache."""
        self._empty([])
        free_blocks = [0 if self.config.contiguous else count for count in self.config.group_blocks]
        self.room.measure([[count, 0] for count in free_blocks], Mark(0, 0))

    def _empty(self, to_free: list[int]) -> None:
        """Resets to no sequences; `to_free` are rows that the device still has to free."""
        self._free_rows = list(range(self.config.max_seqs - 1, -1, -1))  # the lowest on top
        self._living: set[Sequence] = set()  # sequences with a row
        self._to_free = to_free
        self.room.forget()

    # The device.

    @property
    def cache(self) -> Cache:
        """The current cache. Raises RuntimeError if its memory is released."""
        return self.device.cache

    @cache.setter
    def cache(self, cache: Cache) -> None:
        self.device.cache = cache

    def call(self, program: Any, *arguments: Any, **options: Any) -> list[jax.Array]:
        """Runs a `cache_program` with the cache donated, and returns its other results."""
        out = self.device.call(program, *arguments, **options)
        self.room.clock += 1
        return out

    def flush(self) -> Any:
        """Frees the retired rows on the device; returns its room, on the device."""
        mask = np.isin(np.arange(self.config.max_seqs), self._to_free)
        (room,) = self.call(self._settle, mask)
        self._to_free = []
        return room

    def free_rows(self, are_wanted: bool) -> None:
        """Frees the retired rows on the device if other sequences want or have them. So a first call that reuses no row
        does not compile the program."""
        if self._to_free and (are_wanted or not set(self._to_free) <= set(self._free_rows)):
            self.flush()

    def settle(self) -> None:
        """Makes `available` exact. Waits for the device."""
        if self._to_free or not self.room.is_exact:
            room = np.asarray(self.flush()).tolist()
            self.room.measure(room, self.room.mark())

    def warm(self) -> list[Any]:
        """Returns functions that compile the programs between steps when called in order."""
        rows = np.array([[0], [self.config.max_seqs]], np.int32)  # no such row: ignored
        calls = [self.flush, lambda: self.call(self._fork, *rows)]
        if self.states.is_needed:
            calls += self.states.warm(lambda: self.cache, self._warm_states)
        return calls if self.prefix is None else [*calls, lambda: warm(self.cache)]

    def _warm_states(self, states: Any) -> None:
        self.call(self._put_states, np.array([self.config.max_seqs], np.int32), states)  # no such row: ignored

    def note_computed(self, room: Measured, at: Mark, seconds_per_token: float | None) -> None:
        """Records a computed step: the room it left, and its speed unless it was compiled meanwhile."""
        # With a prefix cache, blocks that leave windows are first offered to it: there is more room than that.
        leaves = self.prefix is not None and self.config.has_windows
        self.room.measure(room, at._replace(clock=at.clock - leaves))
        if seconds_per_token is not None:
            self.swapping.note_speed(seconds_per_token)

    def recover(self) -> None:
        """Empties all rows after an interrupt, in-flight steps too. Raises CacheError if the cache is lost."""
        self.device.recover()
        if self.is_lost:
            self.prefix_rows.recover()
        if self.is_lost:
            raise CacheError(
                "The engine's cache was lost when a step was interrupted in the middle: engine.reset() starts anew "
                "with an empty one, and computes the requests that are not done from what they have."
            )
        self._empty(list(range(self.config.max_seqs)))

    def reset(self) -> None:
        """Resets to an empty cache and an empty prefix cache."""
        self.device.recover()
        if self.is_lost:
            self.device.renew()
        self.prefix_rows.reset()
        self._empty(list(range(self.config.max_seqs)))

    def close(self) -> None:
        """Frees the memory of the cache, and the host memory of a prefix cache."""
        self.device.close()
        self.prefix_rows.forget()
        self._empty([])

    def release(self, *, keep: bool) -> None:
        """Frees the memory of the cache until `restore`. No sequence has a row. With `keep` the prefix cache takes as
        many blocks to host memory as it may."""
        self.flush()
        self.prefix_rows.release(keep=keep)
        self.device.release()
        self._begin_empty()

    def restore(self) -> None:
        """Allocates an empty cache again."""
        if self.is_released:
            self._begin_empty()
            self.device.restore()

    @property
    def is_released(self) -> bool:
        """Tells whether the memory of the cache is given back until `restore`."""
        return self.device.is_released

    @property
    def is_lost(self) -> bool:
        """Tells whether the cache was donated to a program that did not finish."""
        return self.device.is_lost

    # Room.

    @property
    def available(self) -> list[int]:
        """Returns a lower bound, for each group of layers, on blocks free or evictable from the prefix cache."""
        if self.config.contiguous:  # every row has its block already
            return list(self.config.group_blocks)
        if isinstance(self.holdings, ThinnedHoldings):  # nothing is shared, so the host knows
            return self.holdings.room(self._living)
        if not self.room.is_known:
            self.settle()
        return self.room.available(self.prefix_rows.pinned())

    @property
    def scarcest_room(self) -> tuple[int, int]:
        """Returns the available blocks, and all blocks, of the group with the smallest share of them left."""
        every = [self.config.group_blocks[group] for group in self.holdings.groups]
        return min(zip(self.available, every, strict=True), key=lambda pair: pair[0] / pair[1])

    @property
    def may_have_more(self) -> bool:
        """Tells whether blocks were freed that `available` does not count yet."""
        if self.eviction is not None:
            return False
        return bool(self._free_rows) and self.room.has_grown

    def make_room(self, num_blocks: list[int]) -> None:
        """Makes this number of blocks free in each group, evicting from the prefix cache, and counts them as taken."""
        if self._to_free and self.eviction is not None:  # `available` counts their blocks already
            self.flush()
        if self.prefix is not None and any(num_blocks) and not self._are_free(num_blocks):
            self.settle()
            if not self._are_free(num_blocks):
                self.prefix_rows.make_room(num_blocks)
                self.settle()
        self.room.taken += max(num_blocks, default=0)

    def _are_free(self, num_blocks: list[int]) -> bool:
        """Tells whether this number of blocks is certainly free in each group."""
        if not self.room.is_known:
            self.settle()
        return self.room.has_free(num_blocks)

    def is_coming(self, running: list[Sequence], sequence: Sequence) -> bool:
        """Tells whether a running sequence is about to compute blocks that a waiting one can share."""
        return self.sharing.is_coming(running, sequence)

    def must_follow(self, leader: Sequence, sequence: Sequence) -> bool:
        """Tells whether a waiting sequence can share what `leader` is about to compute by a fork at its time alone."""
        return self.sharing.must_follow(leader, sequence)

    def has_room(self, running: list[Sequence], sequence: Sequence, source: Sequence | None = None) -> bool:
        """Tells whether there is a row, and blocks for all its tokens beside those of all others."""
        return bool(self._free_rows) and self.spare(running, sequence, source) >= 0

    def spare(self, running: list[Sequence], sequence: Sequence, source: Sequence | None = None) -> int:
        """Returns the blocks left in the scarcest group once this sequence and all others have all their tokens; below
        0: the blocks that are missing."""
        grown = [self._growth(s, s.cached) for s in running]
        if source is not None:
            grown.append(self._growth(sequence, source.cached // self.block_size * self.block_size))
        else:
            shared, source = self.sharing.find_source(running, sequence)
            if sequence.host is None or source is None:
                grown.append(self._growth(sequence, shared))
            else:
                grown.append(self.holdings.growth_beside(sequence, source, shared // self.block_size))
        return min(map(operator.sub, self.available, map(sum, zip(*grown, strict=True))))

    def can_hold(self, sequence: Sequence) -> bool:
        """Tells whether a sequence fits beside pinned blocks, once all others have ended."""
        if self.prefix is None:
            return True
        pinned = self.prefix_rows.pinned()
        own = self.sharing.known([], sequence) // self.block_size if any(pinned) else 0
        most = self.holdings.most(sequence.prompt, 0, sequence.length)
        groups = zip(self.holdings.groups, most, pinned, strict=True)
        return all(blocks - own <= self.config.group_blocks[group] - n for group, blocks, n in groups)

    def _growth(self, sequence: Sequence, cached: int) -> list[int]:
        """Returns the blocks that a row with `cached` tokens of a sequence still takes until its end."""
        return self.holdings.growth(sequence.prompt, cached, sequence.length)

    def taken_by(self, sequence: Sequence, count: int) -> list[int]:
        """Returns the blocks that `count` more tokens of a sequence take in each group of layers."""
        return self.holdings.taken(sequence.prompt, sequence.cached, count)

    def until(self, sequence: Sequence) -> float:
        """Returns the tokens that can be computed before its row must evict."""
        point = self.holdings.next_point(sequence.prompt, sequence.cached)
        if sequence.points:
            point = min(point, self.states.next_point(sequence))
        return point - sequence.cached

    # Sequences.

    def admit(self, running: list[Sequence], sequence: Sequence) -> None:
        """Gives a sequence a row, filled with its tokens that are cached already."""
        match, source, shared = None, None, 0
        if sequence.host is None and self.prefix is not None and not sequence.needs_scores:
            self.prefix_rows.offer_shared(sequence, *self.sharing.find_source(running, sequence))
            match = self.prefix_rows.match(sequence)
        else:
            shared, source = self.sharing.find_source(running, sequence)
        is_there = sequence.host is not None or source is not None or bool(match and match.num_tokens)
        row = self._take_row(must_be_empty=is_there)
        sequence.row = row
        self._note_begun(sequence)
        self.states.begin(sequence, 0 if match is None else match.num_known)
        first = shared // self.block_size
        beside = np.int32(0 if source is None or source.row is None else source.row)
        if sequence.host is not None:
            blocks = sequence.host() if callable(sequence.host) else sequence.host
            first_retained = [
                0 if source is None else self.config.first_retained_block(g, source.cached)
                for g in range(len(self.config.groups))
            ]
            # What is shared is there already, and does not travel again.
            own, shared_blocks = blocks.drop_shared(first, first_retained, self.config.group_sink_blocks)
            self.make_room([int(count.sum()) - n for count, n in zip(blocks.count, shared_blocks, strict=True)])
            self.call(self._swap_in, np.array([row], np.int32), own, beside, np.int32(first))
            sequence.cached, sequence.host = blocks.num_tokens, None
        elif source is not None:
            self.call(self._begin, beside, np.int32(row), np.int32(first))
            sequence.cached = shared
        elif match is not None and match.num_tokens:
            states = self.prefix_rows.adopt(sequence, row, match)
            if states:
                sequence.states[sequence.cached] = None
                self.call(self._put_states, np.array([row], np.int32), states)

    def _note_begun(self, sequence: Sequence) -> None:
        """Records that a sequence has a row."""
        self._living.add(sequence)
        if sequence.request is not None:
            sequence.request.begin()

    def fork(self, source: Sequence, sequence: Sequence) -> None:
        """Gives a sequence a row that is a fork of the row of `source`."""
        row = self._take_row(must_be_empty=True)
        self.make_room([1] * len(self.config.groups))
        self.call(self._fork, np.array([source.row], np.int32), np.array([row], np.int32))
        sequence.row, sequence.cached = row, source.cached
        self._note_begun(sequence)

    def offer(self, sequence: Sequence, count: int | None = None) -> None:
        """Offers the prefix cache the shareable tokens of a sequence, or at most its first `count` tokens."""
        self.prefix_rows.offer(sequence, count)

    def keep_states(self, sequence: Sequence) -> None:
        """Keeps the states of a sequence's row for the prefix cache, if they are worth it."""
        if self.states.is_due(sequence):
            self.states.keep(sequence, self.cache)

    def retire(self, sequence: Sequence) -> None:
        """Frees a sequence's row for good."""
        self.keep_states(sequence)
        self.offer(sequence)
        self._release(sequence)

    def set_back(self, sequence: Sequence) -> None:
        """Preempts a sequence. All its tokens must have been read."""
        self.counts["set_back"] += 1
        self.keep_states(sequence)
        self.offer(sequence)
        if self.swapping.should_swap(sequence):
            self.counts["swapped_out"] += 1
            self.swap_out(sequence)
        self._release(sequence)

    def swap_out(self, sequence: Sequence) -> bool:
        """Moves the row of a sequence to host memory, if it can come back as it is; tells whether it did. All its
        tokens must have been read."""
        if not self.swapping.can_swap(sequence):
            return False
        sequence.num_hosted = sequence.cached
        self.cache, sequence.host = swap_out_rows(self.cache, sequence.row, with_snapshots=False)
        return True

    def _take_row(self, *, must_be_empty: bool) -> int:
        row = self._free_rows[-1]
        if must_be_empty and row in self._to_free:
            self.flush()
        return self._free_rows.pop()

    def _release(self, sequence: Sequence) -> None:
        assert sequence.row is not None
        self._to_free.append(sequence.row)
        self._free_rows.append(sequence.row)
        self._living.discard(sequence)
        self.room.give_back()
        sequence.row, sequence.cached, sequence.states, sequence.is_noted = None, 0, {}, False

    @property
    def has_rows_to_free(self) -> bool:
        """Tells whether there are rows that the device still has to free."""
        return bool(self._to_free)
