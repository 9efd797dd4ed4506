"""The cache manager: gives sequences rows and blocks of a cache, and preempts them when blocks run out."""

import collections
import contextlib
import functools
import math
import operator
from collections.abc import Iterator
from typing import Any, Literal

import jax
import numpy as np

from jaxkv._core.cache.cache import Cache
from jaxkv._core.cache.init import init
from jaxkv._core.config.cache_config import CacheConfig
from jaxkv._core.config.mesh_shape import context_axis, find_placement, model_mesh
from jaxkv._core.state.device_arrays import delete
from jaxkv._core.state.errors import CacheError, OutOfBlocks
from jaxkv._core.state.multihost import list_processes
from jaxkv._engine.programs.maintenance import between_steps
from jaxkv._engine.requests.block_accounting import Holdings, ThinnedHoldings
from jaxkv._engine.requests.common_beginning import count_common_blocks
from jaxkv._engine.requests.eviction_policy import Eviction
from jaxkv._engine.requests.scheduler import Sequence
from jaxkv._engine.runner.state_keeper import StateKeeper
from jaxkv._tiers.host_tier import swap_out_rows
from jaxkv._tiers.prefix_cache.match import Match
from jaxkv._tiers.prefix_cache.prefix_cache import PrefixCache
from jaxkv._tiers.prefix_cache.retained_blocks import warm

RELEASED = "This engine has given its memory back: engine.restore() takes it again, and its requests go on."
Swap = Literal["auto", "always", "never"]
Room = list[list[int]]  # what `measure_room` returns


class CacheManager:
    """The cache of an engine, and the sequences in its rows.

    A preempted sequence is either swapped out to host memory or dropped and computed again, whichever is
    estimated to be faster: moving its bytes there and back at `host_bandwidth` bytes/s, or computing its tokens at the
    rate of the fastest step so far. With a prefix cache that may keep its blocks it is forgotten, but for what that
    still has of it later.

    What room there is, is known from the last step that was read: since then at most `taken` more blocks were taken,
    and what was given back is not counted. `settle` asks the device, and waits for it.
    """

    def __init__(
        self, config: CacheConfig, model: Any, *, prefix: PrefixCache | None, swap: Swap, host_bandwidth: float,
        eviction: Eviction | None = None,
    ):  # fmt: skip
        self.config, self.prefix, self.swap, self.host_bandwidth = config, prefix, swap, host_bandwidth
        self.mesh, self.place = model_mesh(model), find_placement(model)  # the placement of the cache
        if self.mesh is not None and len(list_processes(self.mesh)) > 1:
            raise ValueError(
                "An Engine serves from one process, but its model lies on the devices of several: give it a mesh of "
                'jax.local_devices(), or one that has an axis "data" for the processes.'
            )
        self.block_size, self.eviction = config.block_size, eviction
        self._landed: collections.deque[tuple[list[jax.Array], list[jax.Array]]] = collections.deque()
        self.is_released = False
        self._peak = 0  # of the caches before this one
        self._cache: Cache | None = None  # made of `_leaves` on demand
        self.cache = self._new_cache()
        parts = (tables.parts for tables in self.cache.tables)
        self.holdings = Holdings(config) if eviction is None else ThinnedHoldings(config, eviction, parts)
        self._structure = jax.tree.structure(self.cache)
        self._settle, self._swap_in, self._fork, self._begin, self._put_states = between_steps(self._structure)
        self.states = StateKeeper(config, prefix)
        self.seconds_per_token: float | None = None  # of the fastest step so far
        self.counts: collections.Counter[str] = collections.Counter()
        self._begin_empty()

    def _new_cache(self) -> Cache:
        # On a device by name, as blocks that come back from the host are: else every program would be compiled for
        # the cache before, and once more for the one after.
        cache = init(self.config, mesh=self.mesh, context=context_axis(self.mesh))
        return cache if self.mesh is not None else jax.device_put(cache, self.place)

    def _begin_empty(self) -> None:
        """Resets to no sequences in a new cache."""
        self._empty([])
        free_blocks = [0 if self.config.contiguous else count for count in self.config.group_blocks]
        self.measured([[count, 0] for count in free_blocks], taken=0, clock=0)

    def _empty(self, to_free: list[int]) -> None:
        """Resets to no sequences; `to_free` are rows that the device still has to free."""
        self._free_rows = list(range(self.config.max_seqs - 1, -1, -1))  # the lowest on top
        self._living: set[Sequence] = set()  # sequences with a row
        self._to_free = to_free
        self._room: Room | None = None  # the last that was measured; None: unknown
        self.taken = self._taken_then = 0  # blocks taken so far, and when the room was measured
        self.clock = self._measured_at = self._given_back_at = 0  # counts changes of the room

    # The device.

    @property
    def cache(self) -> Cache:
        """The current cache. Raises RuntimeError if its memory is released."""
        if self.is_released:
            raise RuntimeError(RELEASED)
        self._take_landed()
        if self._cache is None:
            self._cache = jax.tree.unflatten(self._structure, self._leaves)
        return self._cache

    @cache.setter
    def cache(self, cache: Cache) -> None:
        self._cache, self._leaves = cache, jax.tree.leaves(cache)

    def call(self, program: Any, *arguments: Any, **options: Any) -> list[jax.Array]:
        """Runs a `cache_program` with the cache donated, and returns its other results.

        An interrupt finds either cache whole: `map` and `extend` run to their end before Python can raise it.
        """
        self._landed.clear()
        program = functools.partial(program, **options)
        self._landed.extend(map(program, [self._leaves], *([argument] for argument in arguments)))
        out, _ = self._landed[0]
        self._take_landed()
        self.clock += 1
        return out

    def _take_landed(self) -> None:
        if self._landed:
            self._cache, self._leaves = None, self._landed[0][1]
            self._landed.clear()

    def flush(self) -> Any:
        """Frees the retired rows on the device; returns its room, on the device."""
        mask = np.isin(np.arange(self.config.max_seqs), self._to_free)
        (room,) = self.call(self._settle, mask)
        self._to_free = []
        return room

    def free_rows(self, are_wanted: bool) -> None:
        """Frees the retired rows on the device if other sequences want or have them. So a first call that reuses no row
        does not compile the program."""
        are_wanted |= self.eviction is not None  # with eviction, `available` counts their blocks already
        if self._to_free and (are_wanted or not set(self._to_free) <= set(self._free_rows)):
            self.flush()

    def settle(self) -> None:
        """Makes `available` exact. Waits for the device."""
        if self._to_free or self._room is None or self._measured_at < self.clock:
            room = np.asarray(self.flush()).tolist()
            self.measured(room, self.taken, self.clock)

    def warm(self) -> list[Any]:
        """Returns functions that compile the programs between steps when called in order."""
        rows = np.array([[0], [self.config.max_seqs]], np.int32)  # no such row: ignored
        calls = [self.flush, lambda: self.call(self._fork, *rows)]
        if self.states.is_needed:
            calls += self.states.warm(lambda: self.cache, self._warm_states)
        return calls if self.prefix is None else [*calls, lambda: warm(self.cache)]

    def _warm_states(self, states: Any) -> None:
        self.call(self._put_states, np.array([self.config.max_seqs], np.int32), states)  # no such row: ignored

    def measured(self, room: Room, taken: int, clock: int) -> None:
        """Records the room as of earlier values of `taken` and `clock`."""
        self._room, self._taken_then, self._measured_at = room, taken, clock

    def computed(self, room: Room, taken: int, clock: int, seconds_per_token: float | None) -> None:
        """Records a computed step: the room it left, and its speed unless it was compiled meanwhile."""
        # With a prefix cache, blocks that leave windows are first offered to it: there is more room than that.
        leaves = self.prefix is not None and self.config.has_windows
        self.measured(room, taken, clock - leaves)
        if seconds_per_token is not None:
            self.seconds_per_token = min(seconds_per_token, self.seconds_per_token or seconds_per_token)

    def recover(self) -> None:
        """Empties all rows after an interrupt, in-flight steps too. Raises CacheError if the cache is lost."""
        self._take_landed()
        self._give_up_failed()
        if self.is_lost and self.prefix is not None:
            with contextlib.suppress(CacheError):
                self.cache = self.prefix.recover(self.cache)
        if self.is_lost:
            raise CacheError(
                "The engine's cache was lost when a step was interrupted in the middle: engine.reset() starts anew "
                "with an empty one, and computes the requests that are not done from what they have."
            )
        self._empty(list(range(self.config.max_seqs)))

    def reset(self) -> None:
        """Resets to an empty cache and an empty prefix cache."""
        self._take_landed()
        self._give_up_failed()
        if self.is_lost:
            self.cache = self._new_cache()
        if self.prefix is not None:
            self.cache = self.prefix.reset(self.cache)
        self._empty(list(range(self.config.max_seqs)))

    def close(self) -> None:
        """Frees the memory of the cache, and the host memory of a prefix cache."""
        self._take_landed()
        delete(self._leaves)
        self._cache, self._leaves = None, []
        if self.prefix is not None:
            self.prefix.forget()
        self._empty([])

    def release(self, *, keep: bool) -> None:
        """Frees the memory of the cache until `restore`. No sequence has a row. With `keep` the prefix cache takes as
        many blocks to host memory as it may."""
        self.flush()
        if self.prefix is not None and keep:
            self.cache = self.prefix.make_room(self.cache, list(self.config.group_blocks))
            self.prefix.release_states()
        elif self.prefix is not None:
            self.prefix.forget()
        self._peak = self.blocks_peak
        self.is_released = True  # from here on it is not looked at: an interrupt finds no half of it
        delete(self._leaves)
        self._cache, self._leaves = None, []
        self._begin_empty()

    def restore(self) -> None:
        """Allocates an empty cache again."""
        if self.is_released:
            self.cache = self._new_cache()
            self._begin_empty()
            self.is_released = False

    def swap_out(self, sequence: Sequence) -> bool:
        """Moves the row of a sequence to host memory, if it can come back as it is; tells whether it did. All its
        tokens must have been read."""
        if not sequence.cached or self._needs_queries(sequence):
            return False
        sequence.num_hosted = sequence.cached
        self.cache, sequence.host = swap_out_rows(self.cache, sequence.row, with_snapshots=False)
        return True

    def drop_prefixes(self, model: str | None) -> None:
        """Drops all prefixes on the device, in host memory and on disk: what follows is computed by other weights."""
        if self.prefix is not None:
            if self.is_released:
                self.prefix.forget()
            else:
                self.cache = self.prefix.reset(self.cache)
                self.clock += 1
            self.prefix.rename(model)

    @property
    def blocks_peak(self) -> int:
        """The peak number of blocks in use."""
        now = 0 if self.is_released else sum(int(tables.peak) for tables in self.cache.tables)
        return max(self._peak, now)

    def _give_up_failed(self) -> None:
        """Deletes a cache whose program failed on the device: only waiting for the cache shows that."""
        leaves = [x for x in self._leaves if not x.is_deleted()]
        try:
            jax.block_until_ready(leaves)
        except Exception:  # any error of the program, a hook's own too
            for x in leaves:
                x.delete()

    @property
    def is_lost(self) -> bool:
        """Tells whether the cache was donated to a program that did not finish."""
        return any(x.is_deleted() for x in self._leaves)

    # Room.

    @property
    def available(self) -> list[int]:
        """Returns a lower bound, for each group of layers, on blocks free or evictable from the prefix cache."""
        if self.config.contiguous:  # every row has its block already
            return list(self.config.group_blocks)
        if isinstance(self.holdings, ThinnedHoldings):  # nothing is shared, so the host knows
            return self.holdings.room(self._living)
        if self._room is None:
            self.settle()
        assert self._room is not None
        since = self.taken - self._taken_then
        pinned = [self.prefix.pinned(g) if self.prefix else 0 for g in range(len(self._room))]
        return [
            max(0, free_ + max(0, unused - p) - since)
            for (free_, unused), p in zip(self._room, pinned, strict=True)
        ]  # fmt: skip

    @property
    def may_have_more(self) -> bool:
        """Tells whether blocks were freed that `available` does not count yet."""
        if self.eviction is not None:
            return False
        return bool(self._free_rows) and self._given_back_at > self._measured_at

    def make_room(self, num_blocks: list[int]) -> None:
        """Makes this number of blocks free in each group, evicting from the prefix cache, and counts them as taken."""
        if self.prefix is not None and any(num_blocks) and not self._are_free(num_blocks):
            self.settle()
            if not self._are_free(num_blocks):
                self.cache = self.prefix.make_room(self.cache, num_blocks)
                self.clock += 1
                self.settle()
        self.taken += max(num_blocks, default=0)

    def _are_free(self, num_blocks: list[int]) -> bool:
        """Tells whether this number of blocks is certainly free in each group."""
        if self._room is None:
            self.settle()
        assert self._room is not None
        since = self.taken - self._taken_then
        return all(n + since <= free_ for n, (free_, _) in zip(num_blocks, self._room, strict=True))

    def is_coming(self, running: list[Sequence], sequence: Sequence) -> bool:
        """Tells whether a running sequence, served as early, is about to compute blocks to share with this one."""
        if sequence.host is not None:
            return False
        prompts = [s for s in running if s.pending > 1 and s.priority <= sequence.priority]
        return any(other.cached < common * self.block_size for other, common in self._common(prompts, sequence))

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
            shared, source = self._shared(running, sequence)
            if sequence.host is None or source is None:
                grown.append(self._growth(sequence, shared))
            else:
                grown.append(self.holdings.growth_beside(sequence, source, shared // self.block_size))
        return min(map(operator.sub, self.available, map(sum, zip(*grown, strict=True))))

    def can_hold(self, sequence: Sequence) -> bool:
        """Tells whether a sequence fits beside pinned blocks, once all others have ended."""
        if self.prefix is None:
            return True
        pinned = [self.prefix.pinned(group) for group in self.holdings.groups]
        own = self.known([], sequence) // self.block_size if any(pinned) else 0
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
        point = min(self.holdings.next_point(sequence.prompt, sequence.cached), self.states.next_point(sequence))
        return point - sequence.cached

    # Sequences.

    def admit(self, running: list[Sequence], sequence: Sequence) -> None:
        """Gives a sequence a row, filled with its tokens that are cached already."""
        match, source, shared = None, None, 0
        if sequence.host is None and self.prefix is not None and not sequence.needs_scores:
            self._offer_shared(running, sequence)
            match = self._match(sequence)
        else:
            shared, source = self._shared(running, sequence)
        is_there = sequence.host is not None or source is not None or bool(match and match.num_tokens)
        row = self._take_row(must_be_empty=is_there)
        sequence.row = row
        self._note_begun(sequence)
        self.states.begin(sequence, 0 if match is None else match.num_known)
        first = shared // self.block_size
        beside = np.int32(0 if source is None or source.row is None else source.row)
        if sequence.host is not None:
            blocks = sequence.host() if callable(sequence.host) else sequence.host
            first_held = [
                0 if source is None else self.config.first_retained_block(g, source.cached)
                for g in range(len(self.config.groups))
            ]
            # What is shared is there already, and does not travel again.
            own, shared_blocks = blocks.drop_shared(first, first_held, self.config.group_sinks)
            self.make_room([int(count.sum()) - n for count, n in zip(blocks.count, shared_blocks, strict=True)])
            self.call(self._swap_in, np.array([row], np.int32), own, beside, np.int32(first))
            sequence.cached, sequence.host = blocks.num_tokens, None
        elif source is not None:
            self.call(self._begin, beside, np.int32(row), np.int32(first))
            sequence.cached = shared
        elif self.prefix is not None and match is not None and match.num_tokens:
            try:
                try:
                    self.cache, states = self.prefix.adopt_blocks(self.cache, row, match, donate=True)
                except ValueError:  # an interrupted call left the index ahead of the cache; now they agree
                    match = self._match(sequence)
                    self.cache, states = self.prefix.adopt_blocks(self.cache, row, match, donate=True)
            except OutOfBlocks:  # no room for blocks from the host
                return
            sequence.cached = match.num_tokens
            self.taken += match.num_tokens // self.block_size
            self.clock += 1
            if states:
                sequence.states[sequence.cached] = None
                self.call(self._put_states, np.array([row], np.int32), states)

    def _match(self, sequence: Sequence) -> Match:
        """Looks a sequence up in the prefix cache. Only its first lookup counts: later ones find its own blocks."""
        assert self.prefix is not None
        is_repeat = sequence.request is not None and sequence.request.has_begun
        return self.prefix.match(sequence.tokens, **sequence.identity, is_repeat=is_repeat)

    def _note_begun(self, sequence: Sequence) -> None:
        """Records that a sequence has a row."""
        self._living.add(sequence)
        if sequence.request is not None:
            sequence.request.begin()

    def _offer_shared(self, running: list[Sequence], sequence: Sequence) -> None:
        """Offers the prefix cache the blocks that a sequence which begins shares with a running one."""
        shared, source = self._shared(running, sequence)
        if source is None or self.prefix is None:
            return
        if self.prefix.known(sequence.tokens, **sequence.identity) < shared:
            self.offer(source, shared)

    def fork(self, source: Sequence, sequence: Sequence) -> None:
        """Gives a sequence a row that is a fork of the row of `source`."""
        row = self._take_row(must_be_empty=True)
        self.make_room([1] * len(self.config.groups))
        self.call(self._fork, np.array([source.row], np.int32), np.array([row], np.int32))
        sequence.row, sequence.cached = row, source.cached
        self._note_begun(sequence)

    def offer(self, sequence: Sequence, count: int | None = None) -> None:
        """Offers the prefix cache the shareable tokens of a sequence, or at most its first `count` tokens."""
        most = sequence.cached if count is None else count
        most = int(min(most, sequence.shareable, len(sequence.tokens)))
        if self.prefix is not None and most >= self.block_size:
            assert sequence.row is not None
            states = self.states.hand_over(sequence, most)
            self.cache, sequence.offered = self.prefix.insert_more(
                self.cache, sequence.row, sequence.tokens, most, sequence.offered, states=states, **sequence.identity
            )

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
        if self._should_swap(sequence):
            self.counts["swapped_out"] += 1
            self.swap_out(sequence)
        self._release(sequence)

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
        self.clock += 1
        self._given_back_at = self.clock
        sequence.row, sequence.cached, sequence.states = None, 0, {}

    @property
    def to_free(self) -> bool:
        """Tells whether there are rows that the device still has to free."""
        return bool(self._to_free)

    def _needs_queries(self, sequence: Sequence) -> bool:
        """Tells whether a sequence has remembered queries, which would be lost."""
        if self.eviction is None or not self.eviction.num_queries(self.config.max_seq_len):
            return False
        return math.isfinite(self.eviction.point_after(sequence.prompt, sequence.cached))

    def _should_swap(self, sequence: Sequence) -> bool:
        if self._needs_queries(sequence):
            return False
        if self.swap != "auto" or not sequence.cached:
            return self.swap == "always" and sequence.cached > 0
        if (self.prefix is not None and sequence.shareable) or self.seconds_per_token is None:
            return False
        held = self.holdings.held(sequence.prompt, sequence.cached)
        moved = 2 * (sum(map(operator.mul, held, self.holdings.block_bytes)) + self.config.bytes_per_state)
        return moved / self.host_bandwidth < sequence.cached * self.seconds_per_token

    def _shared(self, running: list[Sequence], sequence: Sequence) -> tuple[int, Sequence | None]:
        """Returns the number of leading tokens that a sequence can share with a running one, so that they take no
        blocks; and that one."""
        most, source = 0, None
        for other, common in self._common(running, sequence):
            shared = min(common, other.cached // self.block_size)
            if sequence.host is None:  # else its states come with it
                shared = self.states.limit(other, shared)
            # Of several the one that has computed least: it has most of the windows behind what they share.
            if shared > most or (source is not None and shared == most and other.cached < source.cached):
                most, source = shared, other
        return most * self.block_size, source

    def known(self, others: list[Sequence], sequence: Sequence) -> int:
        """Returns the leading tokens of a sequence that the prefix cache has, or will have after `others`."""
        if self.prefix is None or sequence.needs_scores:
            return 0
        common = (blocks * self.block_size for _, blocks in self._common(others, sequence))
        return max(self.prefix.known(sequence.tokens, **sequence.identity), *common, 0)

    def must_follow(self, leader: Sequence, sequence: Sequence) -> bool:
        """Tells whether a waiting sequence can share what `leader` is about to compute by a fork at its time alone."""
        if self.prefix is not None or self.eviction is not None or self._keeps_beginnings:
            return False
        are_samples = are_siblings(leader, sequence) and leader.request is not sequence.request
        return are_samples and sequence.host is None and not (leader.needs_scores or sequence.needs_scores)

    @property
    def _keeps_beginnings(self) -> bool:
        """Tells whether a row can always begin with another's first blocks: that one has all of them, and no state
        behind them is needed that it no longer has."""
        config = self.config
        return not (self.eviction or config.has_windows or config.contiguous or config.recurrent_layers)

    def _may_share_blocks(self, sequence: Sequence) -> bool:
        """Tells whether a sequence can share blocks of a running sibling. What comes from the host brings its states,
        and the blocks of its windows that the sibling has no longer."""
        is_whole = sequence.host is not None and not (self.eviction or self.config.contiguous)
        return is_whole or self._keeps_beginnings

    def _common(self, running: list[Sequence], sequence: Sequence) -> Iterator[tuple[Sequence, int]]:
        """Yields running sequences, and the number of leading blocks in common with each. Without a prefix cache, or
        for a sequence on the host: only other samples of the same request."""
        if sequence.needs_scores:
            return
        by_prefix = self.prefix is not None and sequence.host is None
        if not by_prefix:
            if not self._may_share_blocks(sequence):
                return
            running = [s for s in running if are_siblings(s, sequence)]
        end = len(sequence.tokens) - 1
        if sequence.host is not None and sequence.num_hosted is not None:
            end = min(end, sequence.num_hosted)
        most = end // self.block_size
        for other in running:
            common = min(most, count_common_blocks(other, sequence, self.block_size))
            yield other, int(min(common, other.shareable // self.block_size)) if by_prefix else common


def are_siblings(a: Sequence, b: Sequence) -> bool:
    """Tells whether both are samples of one request, which share a prompt."""
    return a.request is not None and b.request is not None and a.request.prompt is b.request.prompt
