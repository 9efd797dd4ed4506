"""How much a cache of given memory holds. The arithmetic is `CacheConfig`'s own; here it is asked for many sizes."""

import bisect
import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxkv._core.config import CacheConfig
from jaxkv._core.layer import LayerConfig
from jaxkv._core.numbers import MOST_INDEX, integer, real

BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
MOST_ROWS = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """One way to use the memory.

    Fields:
      config: what makes this cache; its `bytes` are the pools', null blocks and padding of head_dim included.
      rows: how many rows of `max_seq_len` tokens fit at once, one step's tokens included.
      waste: the share of places in rows' blocks that hold no token, expected at the mean length.
    """

    config: CacheConfig
    rows: int
    waste: float

    @property
    def bytes_per_token(self) -> int:
        """Over all layers."""
        return self.config.bytes_per_block // self.config.block_size

    @property
    def tokens(self) -> int:
        """Places for tokens in the layers that have most."""
        return max(self.config.group_blocks) * self.config.block_size


def plan(
    layers: Sequence[LayerConfig], memory_bytes: int, *, max_seq_len: int, max_seqs: int | None = None,
    mean_len: float | None = None, step_tokens: int = 256, **fields: Any,
) -> Plan:  # fmt: skip
    """The cache that fits into `memory_bytes`.

    Args:
      layers: one `LayerConfig` per layer.
      max_seq_len: the most tokens of one row.
      max_seqs: rows; default: as many as can reach `max_seq_len` at once, but at least one.
      mean_len: tokens of a row on the average; default: half of `max_seq_len`.
      step_tokens: the most tokens of one step, which bounds what layers with a window hold.
      **fields: other fields of `CacheConfig`, such as block_size and dtype.

    Raises:
      ValueError: the memory is too little for one block, or a field that `CacheConfig` refuses.

    >>> found = plan([LayerConfig(num_kv_heads=8, head_dim=128)] * 32, 10 * 2**30, max_seq_len=8192, block_size=16)
    >>> found.config.num_blocks, found.tokens, found.rows, f"{found.waste:.2%}"
    (5119, 81904, 9, '0.18%')
    """
    max_seq_len = integer("max_seq_len", max_seq_len, least=1)
    step_tokens = integer("step_tokens", step_tokens, least=1)
    if mean_len is not None and real("mean_len", mean_len, above=0) > max_seq_len:
        raise ValueError(f"mean_len must be at most max_seq_len = {max_seq_len}, not {mean_len}.")
    if max_seqs is not None:
        max_seqs = integer("max_seqs", max_seqs, least=1)

    def config(rows: int) -> CacheConfig:
        sizes = CacheConfig(layers=layers, max_seqs=rows, max_seq_len=max_seq_len, num_blocks=1, **fields)
        return sizes.with_memory(memory_bytes, step_tokens=max(step_tokens, rows))

    def too_many(rows: int) -> bool:
        return not _hold(config(rows if max_seqs is None else max_seqs), rows, step_tokens)

    columns = -(-max_seq_len // config(1).block_size)
    most = min(MOST_ROWS, MOST_INDEX // columns) if max_seqs is None else max_seqs
    rows = bisect.bisect_left(range(1, most + 1), True, key=too_many)
    chosen = config(max(rows, 1) if max_seqs is None else max_seqs)
    empty = (chosen.block_size - 1) / 2  # a row's last block is as likely to be filled up to any of its places
    mean_len = max_seq_len / 2 if mean_len is None else mean_len
    return Plan(config=chosen, rows=rows, waste=empty / (mean_len + empty))


def _hold(config: CacheConfig, rows: int, step_tokens: int) -> bool:
    """Whether so many rows can have `max_seq_len` tokens at once."""
    needed = config.replace(max_seqs=rows)
    return all(
        blocks >= (rows * config.max_blocks_per_seq if window is None
                   else needed.window_blocks(window, max(step_tokens, rows)))
        for blocks, window in zip(config.group_blocks, config.group_windows, strict=True)
    )  # fmt: skip
