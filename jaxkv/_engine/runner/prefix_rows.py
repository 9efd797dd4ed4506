"""Moves blocks between the rows of an engine and its prefix cache, if it has one."""

import contextlib

import numpy as np

from jaxkv._core.config.cache_config import CacheConfig
from jaxkv._core.state.errors import CacheError, OutOfBlocks
from jaxkv._engine.requests.scheduler import Sequence
from jaxkv._engine.runner.device_cache import DeviceCache
from jaxkv._engine.runner.room import Room
from jaxkv._engine.runner.state_keeper import StateKeeper
from jaxkv._tiers.prefix_cache.match import Match
from jaxkv._tiers.prefix_cache.prefix_cache import PrefixCache


class PrefixRows:
    """The prefix cache of an engine, or none: then nothing is offered, nothing found, and there is nothing to free.

    Each method leaves the prefix cache and the engine's cache in accord.
    """

    def __init__(
        self, prefix: PrefixCache | None, config: CacheConfig, device: DeviceCache, room: Room, states: StateKeeper
    ):
        self.prefix, self.config, self.device, self.room, self.states = prefix, config, device, room, states

    def pinned(self) -> list[int]:
        """Returns the pinned blocks of each group of layers."""
        return [0 if self.prefix is None else self.prefix.pinned(group) for group in range(len(self.config.groups))]

    # Rows.

    def offer(self, sequence: Sequence, count: int | None = None) -> None:
        """Offers the shareable tokens of a sequence, or at most its first `count` tokens."""
        most = sequence.cached if count is None else count
        most = int(min(most, sequence.shareable, len(sequence.tokens)))
        if self.prefix is not None and most >= self.config.block_size:
            assert sequence.row is not None
            states = self.states.hand_over(sequence, most)
            self.device.cache, sequence.offered = self.prefix.insert_more(
                self.device.cache,
                sequence.row,
                sequence.tokens,
                most,
                sequence.offered,
                states=states,
                **sequence.identity,
            )

    def offer_shared(self, sequence: Sequence, shared: int, source: Sequence | None) -> None:
        """Offers the first tokens of a running sequence, which another that begins shares with it."""
        if source is None or self.prefix is None:
            return
        if self.prefix.known(sequence.tokens, **sequence.identity) < shared:
            self.offer(source, shared)

    def match(self, sequence: Sequence) -> Match:
        """Looks a sequence up in the prefix cache. Only its first lookup counts: later ones find its own blocks."""
        assert self.prefix is not None
        is_repeat = sequence.request is not None and sequence.request.has_begun
        return self.prefix.match(sequence.tokens, **sequence.identity, is_repeat=is_repeat)

    def adopt(self, sequence: Sequence, row: int, match: Match) -> tuple[np.ndarray, ...]:
        """Fills an empty row with the blocks of a match, if there is room for those that come from the host. Returns
        the states behind them, in models that keep some."""
        assert self.prefix is not None
        try:
            try:
                self.device.cache, states = self.prefix.adopt_blocks(self.device.cache, row, match, donate=True)
            except ValueError:  # an interrupted call left the index ahead of the cache; now they agree
                match = self.match(sequence)
                self.device.cache, states = self.prefix.adopt_blocks(self.device.cache, row, match, donate=True)
        except OutOfBlocks:
            return ()
        sequence.cached = match.num_tokens
        self.room.taken += match.num_tokens // self.config.block_size
        self.room.clock += 1
        return states

    # Room and memory.

    def make_room(self, num_blocks: list[int]) -> None:
        """Evicts blocks until this number is free in each group, or no more can be evicted."""
        if self.prefix is not None:
            self.device.cache = self.prefix.make_room(self.device.cache, num_blocks)
            self.room.clock += 1

    def recover(self) -> None:
        """Takes back a cache that was donated to an interrupted call, if it can be had."""
        if self.prefix is not None:
            with contextlib.suppress(CacheError):
                self.device.cache = self.prefix.recover(self.device.cache)

    def reset(self) -> None:
        """Drops all prefixes, on the device, in host memory and on disk."""
        if self.prefix is not None:
            self.device.cache = self.prefix.reset(self.device.cache)
            self.room.clock += 1

    def forget(self) -> None:
        """Frees the host memory. What is on the device is forgotten."""
        if self.prefix is not None:
            self.prefix.forget()

    def release(self, *, keep: bool) -> None:
        """Prepares for the loss of the device memory: with `keep`, as many blocks go to host memory as may."""
        if not keep:
            self.forget()
        elif self.prefix is not None:
            self.make_room(list(self.config.group_blocks))
            self.prefix.release_states()

    def rename(self, model: str | None) -> None:
        """Drops all prefixes: what follows is computed by other weights, of which `model` is the fingerprint."""
        if self.prefix is None:
            return
        if self.device.is_released:
            self.prefix.forget()
        else:
            self.reset()
        self.prefix.rename(model)
