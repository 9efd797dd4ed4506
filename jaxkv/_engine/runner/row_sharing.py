"""Which leading tokens a sequence shares with others: with running ones, and through a prefix cache."""

from collections.abc import Iterator

from jaxkv._core.config.cache_config import CacheConfig
from jaxkv._engine.requests.common_beginning import count_common_blocks
from jaxkv._engine.requests.scheduler import Sequence
from jaxkv._engine.runner.state_keeper import StateKeeper
from jaxkv._tiers.prefix_cache.prefix_cache import PrefixCache


class RowSharing:
    """Finds tokens that need not be computed, and blocks that need not be taken, for they are in another's row.

    With a prefix cache a sequence shares with any that begins alike. Without one, or once its blocks are on the host,
    only the samples of one request share.
    """

    def __init__(self, config: CacheConfig, prefix: PrefixCache | None, states: StateKeeper, *, is_thinned: bool):
        self.prefix, self.states, self.block_size = prefix, states, config.block_size
        self._is_thinned, self._holds_whole_rows = is_thinned, not (is_thinned or config.contiguous)
        # A row can always begin with another's first blocks: that one has all of them, and no state behind them is
        # needed that it no longer has.
        self._keeps_beginnings = self._holds_whole_rows and not (config.has_windows or config.recurrent_layers)

    def find_source(self, running: list[Sequence], sequence: Sequence) -> tuple[int, Sequence | None]:
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

    def is_coming(self, running: list[Sequence], sequence: Sequence) -> bool:
        """Tells whether a running sequence, served as early, is about to compute blocks to share with this one."""
        if sequence.host is not None:
            return False
        prompts = [s for s in running if s.pending > 1 and s.priority <= sequence.priority]
        return any(other.cached < common * self.block_size for other, common in self._common(prompts, sequence))

    def known(self, others: list[Sequence], sequence: Sequence) -> int:
        """Returns the leading tokens of a sequence that the prefix cache has, or will have after `others`."""
        if self.prefix is None or sequence.needs_scores:
            return 0
        common = (blocks * self.block_size for _, blocks in self._common(others, sequence))
        return max(self.prefix.known(sequence.tokens, **sequence.identity), *common, 0)

    def must_follow(self, leader: Sequence, sequence: Sequence) -> bool:
        """Tells whether a waiting sequence can share what `leader` is about to compute by a fork at its time alone."""
        if self.prefix is not None or self._is_thinned or self._keeps_beginnings:
            return False
        are_samples = _are_siblings(leader, sequence) and leader.request is not sequence.request
        return are_samples and sequence.host is None and not (leader.needs_scores or sequence.needs_scores)

    def _may_share(self, sequence: Sequence) -> bool:
        """Tells whether a sequence can share blocks of a running sibling. What comes from the host brings its states,
        and the blocks of its windows that the sibling has no longer."""
        return self._keeps_beginnings or (sequence.host is not None and self._holds_whole_rows)

    def _common(self, running: list[Sequence], sequence: Sequence) -> Iterator[tuple[Sequence, int]]:
        """Yields running sequences to share with, and the number of leading blocks in common with each."""
        if sequence.needs_scores:
            return
        by_prefix = self.prefix is not None and sequence.host is None
        if not by_prefix:
            if not self._may_share(sequence):
                return
            running = [s for s in running if _are_siblings(s, sequence)]
        end = len(sequence.tokens) - 1
        if sequence.host is not None and sequence.num_hosted is not None:
            end = min(end, sequence.num_hosted)
        most = end // self.block_size
        for other in running:
            common = min(most, count_common_blocks(other, sequence, self.block_size))
            yield other, int(min(common, other.shareable // self.block_size)) if by_prefix else common


def _are_siblings(a: Sequence, b: Sequence) -> bool:
    """Tells whether both are samples of one request, which share a prompt. A file does not say which were samples: of
    those it holds, all with one prompt, salt and adapter are taken for such."""
    if a.request is None or b.request is None or a.request.prompt is not b.request.prompt:
        return False
    return a.salt == b.salt and a.adapter == b.adapter
