"""Tokens in blocks of one size, regrouped into blocks of another: NumPy index arithmetic on the host."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxkv._core.blocks.block_copy import pad_size
from jaxkv._core.config.cache_config import CacheConfig
from jaxkv._core.config.layer_config import LayerConfig
from jaxkv._core.state.columns import rows_entries
from jaxkv._core.state.state import NULL_BLOCK


class BlockPlan(NamedTuple):
    """The blocks that rows need, and the current slot of each of their tokens."""

    tables: np.ndarray  # i32[R, M]: blocks from 1 in the order of `slots`; null where a row has none
    slots: np.ndarray  # i64[n, new_size]: block * old_size + offset of each token; -1: no token

    @property
    def padded(self) -> np.ndarray:
        """`slots` padded with empty blocks, so that programs that take them compile for few shapes."""
        count = len(self.slots)
        return np.pad(self.slots, ((0, pad_size(count) - count), (0, 0)), constant_values=-1)

    def locate_entries(self, layer: LayerConfig) -> "BlockPlan":
        """Returns the plan of what a layer stores, which may be entries of several tokens: they lie where the last of
        their tokens would."""
        if (ratio := layer.compress_ratio) is None:
            return self
        last = self.slots[:, ratio - 1 :: ratio]
        return self._replace(slots=np.where(last < 0, -1, last // ratio))


class GroupRows(NamedTuple):
    """What rows hold in the layers of a group, by head rows if it evicts by heads; see `head_rows`."""

    tables: np.ndarray  # i32[n, blocks]: their blocks in order, from the first block on
    lengths: np.ndarray  # i32[n]: the tokens in them
    thinned: np.ndarray | None = None  # i32[n], as in `BlockTables`, in a layer that evicts


def find_group_rows(tables: Any, config: CacheConfig, group: int, rows: np.ndarray) -> GroupRows:
    """Returns what `rows` i32[R] hold, by a group's tables on the host."""
    lines = find_head_rows(rows, config, group)
    thinned = None if tables.thinned is None else np.asarray(tables.thinned)[lines]
    return GroupRows(rows_entries(tables, config, group, lines), np.asarray(tables.lengths)[lines], thinned)


def find_head_rows(rows: np.ndarray, config: CacheConfig, group: int) -> np.ndarray:
    """Returns the indices of the rows' head rows in a group's tables."""
    return np.concatenate([rows + head * config.max_seqs for head in range(config.group_heads[group])])


class TokensGone(ValueError):
    """A row has freed tokens that its new blocks would need, of a layer that `fit` names."""

    def __init__(self, row: int, start: int, needed: int, layer: int = 0):
        super().__init__(f"row {row} holds tokens from {start} on, not from {needed}")
        self.row, self.start, self.needed, self.layer = row, start, needed, layer


def reblock(
    tables: np.ndarray,
    lengths: np.ndarray,
    old_size: int,
    new_size: int,
    *,
    first: np.ndarray | None = None,
    sink_blocks: int = 0,
    share: bool = True,
    partial: bool = False,
) -> BlockPlan:
    """Regroups the tokens of rows into blocks of `new_size`.

    Args:
      tables: `i32[R, M]`, the blocks of `old_size` tokens that each row holds; null entries before others are blocks
        that left the row's sliding window.
      lengths: `i32[R]`, tokens of each row.
      first: `i32[R]`, the first block of `new_size` that each row needs; default: 0.
      sink_blocks: number of leading blocks of `new_size` that a row needs too.
      share: whether rows that hold the same tokens of the same blocks share full new blocks. Sharing of whole blocks
        survives a smaller `new_size`; with a larger one only whole new blocks stay shared.
      partial: whether slots of freed tokens at the start of a row's first block may stay empty.

    Raises:
      TokensGone: a row's first block would begin with freed tokens, and `partial` is False.

    Row 1 is a fork of row 0, which holds blocks 3 and 1:

    >>> reblock(np.array([[3, 1], [3, 2]]), np.array([6, 5]), 4, 2)[0].tolist()
    [[1, 2, 3], [1, 2, 4]]
    """
    shared: dict[bytes, int] = {}
    slots: list[np.ndarray] = []
    width = int(-(-lengths.max(initial=0) // new_size))
    entries = np.full((len(tables), width), NULL_BLOCK, np.int32)
    for row, (table, length) in enumerate(zip(tables, lengths.tolist(), strict=True)):
        if not length:
            continue
        column = np.arange(-(-length // new_size), dtype=np.int64)
        column = column[(column >= (0 if first is None else first[row])) | (column < sink_blocks)]
        position = column[:, None] * new_size + np.arange(new_size)
        block = table[np.minimum(position // old_size, len(table) - 1)].astype(np.int64)
        gone = (block == NULL_BLOCK) & (position < length)
        if gone.any() and not partial:
            start = position.max(where=gone, initial=0) + 1
            raise TokensGone(row, int(start), int(position[gone.any(axis=1)][-1, 0]))
        places = np.where(gone | (position >= length), -1, block * old_size + position % old_size)
        for i, block_places in zip(column, places, strict=True):
            number = len(slots) + 1
            if share and block_places.min() >= 0:
                number = shared.setdefault(block_places.tobytes(), number)
            if number > len(slots):
                slots.append(block_places)
            entries[row, i] = number
    return BlockPlan(entries, np.array(slots, np.int64).reshape(-1, new_size))


def describe_lack(plan: BlockPlan, num_free: Any) -> tuple[int, int] | None:
    """Returns the blocks needed and free if rows need more than are free, else None; for the shard that lacks most if
    `num_free` is i32[P]."""
    num_free = np.atleast_1d(num_free)
    if len(num_free) == 1:
        needs = [len(plan.slots)]
    else:
        needs = [len(np.setdiff1d(lines, NULL_BLOCK)) for lines in np.split(plan.tables, len(num_free))]
    need, free = max(zip(needs, num_free.tolist(), strict=True), key=lambda both: both[0] - both[1])
    return (need, free) if need > free else None


def fit(
    config: CacheConfig,
    groups: Sequence[Sequence[int]],
    group_rows: Sequence[GroupRows],
    old_size: int,
    *,
    partial: bool = False,
) -> dict[int, BlockPlan]:
    """Returns the blocks that rows need in a cache of this config, for each layer with a pool.

    Args:
      groups, group_rows: the current groups of layers, and what the rows hold in each. The one group of a contiguous
        cache may become several.
      old_size: the current block size.
      partial: as for `reblock`.

    Raises:
      TokensGone: as `reblock`; names the layer.
    """
    plans: dict[int, BlockPlan] = {}
    for g, layers in enumerate(config.groups):
        found: dict[int, BlockPlan] = {}
        for layer in layers:
            group = next(i for i, members in enumerate(groups) if layer in members)
            if group not in found:
                tables, lengths, _ = group_rows[group]
                try:
                    found[group] = reblock(
                        tables,
                        lengths,
                        old_size,
                        config.block_size,
                        first=config.first_retained_block(g, lengths),
                        sink_blocks=config.group_sink_blocks[g],
                        share=not config.contiguous,
                        partial=partial,
                    )
                except TokensGone as gone:
                    raise TokensGone(gone.row, gone.start, gone.needed, layer) from None
            plans[layer] = found[group].locate_entries(config.layers[layer])
    return plans


def fill_blocks(
    group_rows: Sequence[GroupRows], groups: Sequence[Sequence[int]], plans: dict[int, BlockPlan], config: CacheConfig
) -> list[GroupRows]:
    """Returns the rows' blocks as `fit` planned them, for each group of `config`; `groups` are those that they are
    in now."""
    found = []
    for layer, *_ in config.groups:
        own = next(item for item, members in zip(group_rows, groups, strict=True) if layer in members)
        found.append(own._replace(tables=plans[layer].tables))
    return found


def gather_slots(kv: Any, slots: np.ndarray, *, first: int = 0) -> Any:
    """Reads the keys and values at `slots`, `[n, 2, K, new_size, D]`; slots without a token hold any numbers.

    Args:
      kv: `[N, 2, K, old_size, D]`, a pool's array or one in a file. Scales may lack the last axis, in kv and result.
      slots: as in `BlockPlan`.
      first: index of kv's first block.
    """
    old_size = kv.shape[3]
    block = np.maximum(slots // old_size - first, 0)
    if slots.shape[1] == old_size:  # whole blocks
        return kv[block.max(axis=1)]
    tokens = kv[block, :, :, np.maximum(slots, 0) % old_size]  # [n, new_size, 2, K, D]
    return tokens.transpose(0, 2, 3, 1, *range(4, tokens.ndim))


def clear_unused(blocks: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """Zeroes the slots of `blocks` that hold no token, in place if `blocks` is writeable."""
    blocks = blocks if blocks.flags.writeable else blocks.copy()
    blocks.transpose(0, 3, 1, 2, *range(4, blocks.ndim))[slots < 0] = 0
    return blocks
