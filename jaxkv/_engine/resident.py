"""Sequences in the rows of a cache: how they get in, what is kept of them, and where they go when room runs out."""

import collections
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._core.cache import Cache, init
from jaxkv._core.config import CacheConfig
from jaxkv._core.errors import OutOfBlocks
from jaxkv._core.tables import free, leave_windows
from jaxkv._engine.scheduler import Sequence
from jaxkv._tiers.host import swap_in, swap_out
from jaxkv._tiers.kept import count_unused
from jaxkv._tiers.prefix import PrefixCache


class Residents:
    """The cache of an engine, and the sequences that live in its rows.

    A sequence that is set back is either swapped out to host memory or forgotten and computed again, whichever is
    estimated to be faster: moving its bytes there and back at `host_bandwidth` bytes/s, or computing its tokens at the
    rate of the fastest step so far. With a prefix cache it is forgotten, but for what that still has of it later.
    """

    def __init__(
        self, config: CacheConfig, *, prefix: PrefixCache | None, swap: Literal["auto", "always", "never"],
        host_bandwidth: float,
    ):  # fmt: skip
        if swap not in ("auto", "always", "never"):
            raise ValueError(f"swap must be 'auto', 'always' or 'never', not {swap!r}.")
        self.config, self.prefix, self.swap, self.host_bandwidth = config, prefix, swap, host_bandwidth
        self.block_size = config.block_size
        self.cache: Cache = init(config)
        self.seconds_per_token: float | None = None  # of the fastest step so far
        self.counts: collections.Counter[str] = collections.Counter()
        self._free_rows = list(range(config.max_seqs - 1, -1, -1))  # the lowest on top
        self._to_free: list[int] = []  # rows whose blocks the device still has to free
        self._room: np.ndarray | None = None  # `room_of` the cache; None: ask the device

    @property
    def available(self) -> list[int]:
        """For each group of layers, blocks that are free or that the prefix cache can spare."""
        if self.config.contiguous:  # every row has its block already
            return list(self.config.group_blocks)
        pinned = [self.prefix.pinned(g) if self.prefix else 0 for g in range(len(self.config.groups))]
        return [int(free) + max(0, int(unused) - p) for (free, unused), p in zip(self.settle(), pinned, strict=True)]

    def computed(self, room: np.ndarray, seconds_per_token: float | None) -> None:
        """Note that a step was computed, the room it left, and what it took, unless it was compiled meanwhile."""
        # With a prefix cache, what falls out of windows is first offered to it.
        self._room = None if self.prefix is not None and self.config.has_windows else room
        if seconds_per_token is not None:
            self.seconds_per_token = min(seconds_per_token, self.seconds_per_token or seconds_per_token)

    def has_room(self, running: list[Sequence], sequence: Sequence) -> bool:
        """Whether there is a row for a sequence, and blocks for all its tokens beside all of the others'."""
        if not self._free_rows:
            return False
        shared = self._shared(running, sequence)
        for group, available in enumerate(self.available):
            growth = sum(self._growth(group, s.tokens, s.cached) for s in running)
            if growth + self._growth(group, sequence.tokens, shared) > available:
                return False
        return True

    def admit(self, sequence: Sequence) -> None:
        """Give a sequence a row, and put into it what is there of the sequence already."""
        self.settle()
        row = sequence.row = self._free_rows.pop()
        if sequence.host is not None:
            self.make_room(max(int(count[0]) for count in sequence.host.count))
            self.cache = _swap_in(self.cache, np.array([row], np.int32), sequence.host)
            sequence.cached, sequence.host = sequence.host.num_tokens, None
            self._room = None
        elif self.prefix is not None:
            match = self.prefix.match(sequence.tokens, salt=sequence.salt)
            try:
                self.cache = self.prefix.adopt(self.cache, row, match, donate=True)
            except OutOfBlocks:  # for what would come back from the host
                return
            sequence.cached = match.num_tokens
            self._room = None

    def offer(self, sequence: Sequence) -> None:
        """Let the prefix cache have what a sequence holds."""
        if self.prefix is not None and sequence.cached >= self.block_size:
            tokens = sequence.tokens[: sequence.cached]
            self.cache = self.prefix.insert(self.cache, sequence.row, tokens, salt=sequence.salt)  # type: ignore[arg-type]

    def settle(self) -> np.ndarray:
        """`room_of` the cache, once the rows that were given up are really free."""
        if self._to_free or self._room is None:
            mask = np.isin(np.arange(self.config.max_seqs), self._to_free)
            self._to_free.clear()
            room, self.cache = _settle(self.cache, mask)
            self._room = np.asarray(room)
        return self._room

    def retire(self, sequence: Sequence) -> None:
        """Take a sequence's row from it for good."""
        self.offer(sequence)
        self._release(sequence)

    def set_back(self, sequence: Sequence) -> None:
        """Take a sequence's row from it for a while."""
        self.counts["set_back"] += 1
        self.offer(sequence)
        if self._should_swap(sequence):
            self.counts["swapped_out"] += 1
            self.cache, sequence.host = swap_out(self.cache, sequence.row)
        self._release(sequence)

    def make_room(self, num_blocks: int) -> None:
        """Have `num_blocks` free blocks in every group, at the cost of the prefix cache."""
        if self.prefix is not None and num_blocks > self.settle()[:, 0].min():
            self.cache = self.prefix.make_room(self.cache, num_blocks)
            self._room = None

    def _release(self, sequence: Sequence) -> None:
        assert sequence.row is not None
        self._to_free.append(sequence.row)
        self._free_rows.append(sequence.row)
        sequence.row, sequence.cached = None, 0

    def _should_swap(self, sequence: Sequence) -> bool:
        if self.swap != "auto" or not sequence.cached:
            return self.swap == "always" and sequence.cached > 0
        if self.prefix is not None or self.seconds_per_token is None:
            return False
        moved = 2 * sum(
            self._held(g, sequence.cached) * self.config.bytes_per_group_block(g)
            for g in range(len(self.config.groups))
        )
        return moved / self.host_bandwidth < sequence.cached * self.seconds_per_token

    def _shared(self, running: list[Sequence], sequence: Sequence) -> int:
        """How many first tokens of a sequence stand in blocks of running ones, so that it takes none for them."""
        if self.prefix is None or sequence.host is not None:
            return 0
        most, size = 0, self.block_size
        for other in running:
            end = min(other.cached, len(sequence.tokens) - 1)
            while other.salt == sequence.salt and most + size <= end and (
                other.tokens[: most + size] == sequence.tokens[: most + size]
            ):  # fmt: skip
                most += size
        return most

    def _held(self, group: int, length: int) -> int:
        """Blocks of a row of `length` tokens at rest."""
        return -(-length // self.block_size) - self.config.first_seen(group, length)

    def _growth(self, group: int, tokens: list[int], cached: int) -> int:
        """Blocks that a row with `cached` tokens takes yet until it holds all of them."""
        return max(0, self.config.row_blocks(group, len(tokens)) - self._held(group, cached))


def room_of(cache: Cache) -> jax.Array:
    """`i32[groups, 2]`: free blocks, and blocks that only an index keeps."""
    return jnp.stack([jnp.stack([t.num_free, count_unused(t)]) for t in cache.tables])


@jax.jit(donate_argnames="cache")
def _settle(cache: Cache, rows: jax.Array) -> tuple[jax.Array, Cache]:
    """Free rows, and give back what fell out of windows."""
    cache = leave_windows(free(cache, rows))
    return room_of(cache), cache


_swap_in = jax.jit(swap_in, donate_argnames="cache")
