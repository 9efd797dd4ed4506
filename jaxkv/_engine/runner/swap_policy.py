"""Decides whether a preempted sequence is moved to host memory, or computed again."""

import math
import operator
from typing import Literal

from jaxkv._core.config.cache_config import CacheConfig
from jaxkv._engine.requests.block_accounting import Holdings
from jaxkv._engine.requests.eviction_policy import Eviction
from jaxkv._engine.requests.scheduler import Sequence

Swap = Literal["auto", "always", "never"]


class SwapPolicy:
    """Whichever is estimated to be faster, unless the user has chosen: to move the bytes of a row to the host and back
    at `host_bandwidth` bytes/s, or to compute its tokens at the rate of the fastest step so far."""

    def __init__(
        self,
        swap: Swap,
        host_bandwidth: float,
        config: CacheConfig,
        holdings: Holdings,
        eviction: Eviction | None,
        *,
        has_prefix: bool,
    ):
        self.swap, self.host_bandwidth, self.has_prefix = swap, host_bandwidth, has_prefix
        self.config, self.holdings, self.eviction = config, holdings, eviction
        self.measured: float | None = None  # seconds a token of the fastest step so far
        self.seconds_per_token: float | None = None  # by which it decides
        self.is_told = False  # several processes decide by the speed that one of them tells all

    def note_speed(self, seconds_per_token: float) -> None:
        """Records the speed of a step."""
        self.measured = min(seconds_per_token, self.measured or seconds_per_token)
        if not self.is_told:
            self.seconds_per_token = self.measured

    def can_swap(self, sequence: Sequence) -> bool:
        """Tells whether a row can come back as it is: not without remembered queries that it still needs."""
        if self.eviction is None or not self.eviction.num_queries(self.config.max_seq_len):
            return sequence.cached > 0
        return sequence.cached > 0 and math.isinf(self.eviction.point_after(sequence.prompt, sequence.cached))

    def should_swap(self, sequence: Sequence) -> bool:
        """Tells whether a row that can be swapped is to be. What a prefix cache may keep is not."""
        if not self.can_swap(sequence):
            return False
        if self.swap != "auto":
            return self.swap == "always"
        if (self.has_prefix and sequence.shareable) or self.seconds_per_token is None:
            return False
        blocks = self.holdings.count_row_blocks(sequence.prompt, sequence.cached)
        moved = 2 * (sum(map(operator.mul, blocks, self.holdings.block_bytes)) + self.config.bytes_per_state)
        return moved / self.host_bandwidth < sequence.cached * self.seconds_per_token
