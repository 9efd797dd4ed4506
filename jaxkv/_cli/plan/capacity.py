"""Computes the capacity of a cache in a given memory, by `CacheConfig`'s own arithmetic for many sizes."""

import bisect
import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxkv._core.cache.inspection import format_bytes
from jaxkv._core.config.cache_config import CacheConfig
from jaxkv._core.config.layer_config import LayerConfig
from jaxkv._core.config.validation import MOST_INDEX, integer, real

BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
MOST_ROWS = 1 << 20
ASSUMED_MEAN = 2048  # default tokens of a row, unless half of max_seq_len is less


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lengths:
    """Row lengths: a sample of observed lengths, or their mean."""

    mean: float
    seen: np.ndarray | None = None  # i64[n]

    @classmethod
    def read(cls, mean_len: Any, lengths: Any, max_seq_len: int) -> "Lengths":
        """Makes lengths from at most one of the two arguments. Raises ValueError for impossible lengths."""
        if lengths is None:
            mean = min(max_seq_len / 2, ASSUMED_MEAN) if mean_len is None else real("mean_len", mean_len, above=0)
            if mean > max_seq_len:
                raise ValueError(f"mean_len must be at most max_seq_len = {max_seq_len}, not {mean_len}.")
            return cls(mean=mean)
        if mean_len is not None:
            raise ValueError("Say mean_len or lengths, not both.")
        seen = np.asarray(lengths)
        if seen.ndim != 1 or not seen.size or not np.issubdtype(seen.dtype, np.integer):
            raise ValueError(f"lengths must be a list of integers, not {seen.dtype}{list(seen.shape)}.")
        if seen.min() < 1 or seen.max() > max_seq_len:
            raise ValueError(
                f"lengths must be from 1 to max_seq_len = {max_seq_len}, but go from {seen.min()} to {seen.max()}."
            )
        return cls(mean=float(seen.mean()), seen=seen.astype(np.int64))

    def blocks(self, block_size: int) -> float:
        """Returns the mean number of blocks of a row."""
        if self.seen is not None:
            return float(np.mean(-(-self.seen // block_size)))
        # A row's last block is filled up to each slot with equal probability.
        return (self.mean + (block_size - 1) / 2) / block_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """One way to use the memory.

    Fields:
      config: the cache's config; its `bytes` are the pools', including null blocks and padding of head_dim.
      rows: number of rows of the expected lengths that fit at once, including one step's tokens.
      full_rows: number of rows of `max_seq_len` tokens that fit at once.
      waste: expected share of slots in rows' blocks that hold no token.
      mean_len: expected tokens of a row.
    """

    config: CacheConfig
    rows: int
    full_rows: int
    waste: float
    mean_len: float

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token over all layers."""
        return self.config.bytes_per_block // self.config.block_size

    @property
    def bytes_per_row(self) -> int:
        """Bytes of a row's states in all recurrent layers, whatever its length."""
        return self.config.bytes_per_state

    @property
    def marginal_bytes(self) -> int:
        """Bytes of one more token in a row of `mean_len`: layers whose window is full release as much."""
        groups = enumerate(self.config.group_visible_tokens)
        growing = (group for group, window in groups if window is None or window > self.mean_len)
        return sum(map(self.config.bytes_per_group_block, growing)) // self.config.block_size

    @property
    def tokens(self) -> int:
        """Number of token slots in the layers that have most."""
        return max(self.config.group_blocks) * self.config.block_size


def plan(
    layers: Sequence[LayerConfig],
    memory_bytes: int,
    *,
    max_seq_len: int,
    max_seqs: int | None = None,
    mean_len: float | None = None,
    lengths: Sequence[int] | None = None,
    step_tokens: int = 256,
    state_copies: int = 1,
    **fields: Any,
) -> Plan:
    """Returns the plan of the cache that fits into `memory_bytes`.

    Args:
      layers: one `LayerConfig` per layer.
      max_seq_len: maximum number of tokens of a row.
      max_seqs: number of rows; default: the rows of expected lengths that fit at once, at least one.
      mean_len: mean number of tokens of a row; default: half of `max_seq_len`, at most 2048.
      lengths: instead of `mean_len`, observed lengths of many rows.
      step_tokens: maximum number of tokens of a step, which bounds the blocks of layers with a sliding window.
      state_copies: how often the memory holds the states of recurrent layers: once on each device that it is of.
      **fields: other fields of `CacheConfig`, such as block_size and dtype.

    Raises:
      ValueError: the memory is too little for one block, or a field that `CacheConfig` refuses.

    >>> layers = [LayerConfig(num_kv_heads=8, head_dim=128)] * 32
    >>> found = plan(layers, 10 * 2**30, max_seq_len=8192, mean_len=800)
    >>> found.config.num_blocks, found.tokens, found.rows, found.full_rows, f"{found.waste:.2%}"
    (5119, 81904, 101, 9, '0.93%')
    """
    max_seq_len = integer("max_seq_len", max_seq_len, least=1)
    step_tokens = integer("step_tokens", step_tokens, least=1)
    expected = Lengths.read(mean_len, lengths, max_seq_len)
    if max_seqs is not None:
        max_seqs = integer("max_seqs", max_seqs, least=1)
    sizes = _Sizes(layers, max_seq_len, fields, state_copies)
    probe = sizes.make_config(1)
    first_rows = max_seqs or 1
    least = sizes.count_bytes([1] * len(sizes.group_bytes), sizes.make_config(first_rows))
    if memory_bytes < least:
        states = " and the states of all rows" * (sizes.state_bytes > 0)
        raise ValueError(
            f"{format_bytes(memory_bytes)} for the cache are too little: one block of {probe.block_size} tokens over "
            f"all layers, the null block{states} take {format_bytes(least)}."
        )

    def choose_config(rows: int) -> CacheConfig:
        return sizes.fill(sizes.make_config(rows), memory_bytes, max(step_tokens, rows))

    columns = -(-max_seq_len // probe.block_size)
    blocks = min(expected.blocks(probe.block_size), columns)
    fixed = choose_config(first_rows)
    if None in probe.group_visible_tokens and fixed.num_blocks < columns:
        # No row gets longer than all blocks together: the tables need no more columns, and so there can be more rows.
        sizes = _Sizes(layers, fixed.num_blocks * probe.block_size, fields, state_copies)
        fixed = choose_config(first_rows)
    widest = -(-sizes.max_seq_len // probe.block_size)
    most = min(MOST_ROWS, MOST_INDEX // widest) if max_seqs is None else max_seqs

    def count_rows(blocks_each: float, config_of: Any) -> int:
        def is_too_many(rows: int) -> bool:
            return not _hold(config_of(rows), rows, blocks_each, step_tokens)

        return bisect.bisect_left(range(1, most + 1), True, key=is_too_many)

    by_rows = sizes.state_bytes > 0 or any(reach is not None for reach in probe.group_visible_tokens)
    rows_matter = max_seqs is None and by_rows
    rows = count_rows(blocks, choose_config if rows_matter else lambda _: fixed)
    chosen = choose_config(max(rows, 1) if max_seqs is None else max_seqs)
    full_rows = min(rows, count_rows(columns, lambda _: chosen))
    waste = 1 - expected.mean / (expected.blocks(chosen.block_size) * chosen.block_size)
    return Plan(config=sizes.make_whole(chosen), rows=rows, full_rows=full_rows, waste=waste, mean_len=expected.mean)


def needed_bytes(
    layers: Sequence[LayerConfig],
    rows: int,
    length: int,
    *,
    max_seq_len: int,
    step_tokens: int,
    state_copies: int = 1,
    **fields: Any,
) -> int:
    """Returns the pool bytes of a cache in which `rows` rows of `length` tokens fit at once.

    >>> layers = [LayerConfig(num_kv_heads=8, head_dim=128)] * 32
    >>> round(needed_bytes(layers, 100, 8192, max_seq_len=8192, step_tokens=256, dtype="bfloat16") / 2**30, 1)
    100.0
    """
    sizes = _Sizes(layers, max_seq_len, fields, state_copies)
    probe = sizes.make_config(rows)
    return sizes.count_bytes(sizes.limit(probe, rows * -(-length // probe.block_size), max(step_tokens, rows)), probe)


class _Sizes:
    """The arithmetic of `CacheConfig`, once for each kind of layer: a model of 100 layers has two or three kinds."""

    def __init__(self, layers: Sequence[LayerConfig], max_seq_len: int, fields: dict[str, Any], state_copies: int):
        self.layers, self.max_seq_len, self.fields = tuple(layers), max_seq_len, fields
        # Layers that share KV with another layer, or evict, are counted one by one.
        apart = any(layer.shares_with is not None or layer.evict is not None for layer in self.layers)
        counts = collections.Counter(self.layers)
        self.kinds = self.layers if apart else tuple(counts)
        self.state_bytes = state_copies * sum(layer.state_bytes for layer in self.layers)
        probe = self.make_config(1)
        each = [1 if apart else counts[kind] for kind in self.kinds]
        each += [each[i] for i in probe.residual_layers]
        self.group_bytes = [sum(probe.bytes_per_layer_block(i) * each[i] for i in group) for group in probe.groups]

    def make_config(self, rows: int) -> CacheConfig:
        """Returns a config with one layer of each kind; its number of blocks is set later."""
        return CacheConfig(layers=self.kinds, max_seqs=rows, max_seq_len=self.max_seq_len, num_blocks=1, **self.fields)

    def make_whole(self, config: CacheConfig) -> CacheConfig:
        """Returns the config of all layers with the same number of blocks."""
        return config.replace(layers=self.layers, group_blocks=config.group_blocks)

    def count_bytes(self, blocks: Sequence[int], config: CacheConfig) -> int:
        """Returns the bytes of a config's states, and of so many blocks of each group."""
        pools = sum((n + 1) * size for n, size in zip(blocks, self.group_bytes, strict=True))
        return pools + (config.num_state_slots + 1) * self.state_bytes

    def limit(self, config: CacheConfig, num_blocks: int, step_tokens: int) -> list[int]:
        """Returns the blocks of each group: `num_blocks`, but no more than its sliding window can use."""
        reaches, heads = config.group_visible_tokens, config.group_heads
        widest = max(range(len(reaches)), key=lambda g: reaches[g] or math.inf)
        return [
            num_blocks * heads[g] if g == widest or reach is None
            else min(num_blocks, config.window_blocks(config.retentions[g], step_tokens))
            for g, reach in enumerate(reaches)
        ]  # fmt: skip

    def fill(self, config: CacheConfig, memory_bytes: float, step_tokens: int) -> CacheConfig:
        """Returns the config with the largest number of blocks that fits, as in `CacheConfig.with_memory`."""
        most = int(memory_bytes) // min(self.group_bytes)
        if most > MOST_INDEX // 2:
            self.make_whole(config).with_memory(memory_bytes, step_tokens=step_tokens)  # may raise for too many blocks

        def is_too_much(num_blocks: int) -> bool:
            return self.count_bytes(self.limit(config, num_blocks, step_tokens), config) > memory_bytes

        num_blocks = max(1, bisect.bisect_left(range(1, min(most, MOST_INDEX // 2) + 2), True, key=is_too_much))
        return config.replace(group_blocks=tuple(self.limit(config, num_blocks, step_tokens)))


def _hold(config: CacheConfig, rows: int, blocks_each: float, step_tokens: int) -> bool:
    """Tells whether `rows` rows with a mean of `blocks_each` blocks fit at once."""
    needed, all_blocks = config.replace(max_seqs=rows), math.ceil(rows * blocks_each)
    return all(
        blocks
        >= (
            all_blocks
            if kept.visible_tokens is None
            else min(all_blocks, needed.window_blocks(kept, max(step_tokens, rows)))
        )
        for blocks, kept in zip(config.group_blocks, config.retentions, strict=True)
    )
