"""Tokens in blocks of one size, seen as blocks of another. On the host: index arithmetic of NumPy."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxkv._core.blocks.block_copy import padded_size
from jaxkv._core.config.cache_config import CacheConfig
from jaxkv._core.state.columns import rows_entries
from jaxkv._core.state.state import NULL_BLOCK


class Blocks(NamedTuple):
    """The blocks that rows need: which, and where each of their tokens is now."""

    tables: np.ndarray  # i32[R, M]: blocks from 1 in the order of `slots`; null where a row has none
    slots: np.ndarray  # i64[n, new_size]: block * old_size + offset of each token; -1: no token

    @property
    def padded(self) -> np.ndarray:
        """`slots` with empty blocks behind them, so that a program that takes them compiles for few shapes."""
        count = len(self.slots)
        return np.pad(self.slots, ((0, padded_size(count) - count), (0, 0)), constant_values=-1)


class Held(NamedTuple):
    """What rows hold in the layers of a group; line by line in one that evicts by heads, see `lines`."""

    tables: np.ndarray  # i32[n, blocks]: their blocks, one behind the other from the first on
    lengths: np.ndarray  # i32[n]: the tokens in them
    thinned: np.ndarray | None = None  # i32[n], as in `BlockTables`, in a layer that evicts


def held_by(tables: Any, config: CacheConfig, group: int, rows: np.ndarray) -> Held:
    """What a group's tables, on the host, say that `rows` i32[R] hold."""
    lines = lines_of(rows, config, group)
    thinned = None if tables.thinned is None else np.asarray(tables.thinned)[lines]
    return Held(rows_entries(tables, config, group, lines), np.asarray(tables.lengths)[lines], thinned)


def lines_of(rows: np.ndarray, config: CacheConfig, group: int) -> np.ndarray:
    """The lines of rows in a group's tables."""
    return np.concatenate([rows + head * config.max_seqs for head in range(config.group_heads[group])])


class TokensGone(ValueError):
    """A row has given tokens back that its blocks would need."""

    def __init__(self, row: int, start: int, needed: int, layer: int | None = None):
        super().__init__(f"row {row} holds tokens from {start} on, not from {needed}")
        self.row, self.start, self.needed, self.layer = row, start, needed, layer


def reblock(
    tables: np.ndarray, lengths: np.ndarray, old_size: int, new_size: int, *, first: np.ndarray | None = None,
    sinks: int = 0, share: bool = True, partial: bool = False,
) -> Blocks:  # fmt: skip
    """The same tokens in blocks of `new_size`.

    Args:
      tables: `i32[R, M]`, the blocks of `old_size` tokens that each row holds; null entries before others are blocks
        that fell out of the row's window.
      lengths: `i32[R]`, tokens of each row.
      first: `i32[R]`: a row needs the tokens from this block of `new_size` on; default: all.
      sinks: of what is before that, its first so many blocks of `new_size` too.
      share: rows that hold the same tokens of the same blocks have one block for them, if it is full. Sharing of whole
        blocks survives a smaller `new_size`; with a larger one, as far as whole new blocks are shared.
      partial: where a row's first block would begin with tokens that it has given back, leave their places empty.

    Raises:
      TokensGone: a row's first block would begin with tokens that it has given back.

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
        column = column[(column >= (0 if first is None else first[row])) | (column < sinks)]
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
    return Blocks(entries, np.array(slots, np.int64).reshape(-1, new_size))


def lacking(plan: Blocks, num_free: Any) -> tuple[int, int] | None:
    """What rows need and what there is, where they need more blocks than are free, of any part if `num_free` is
    i32[P]."""
    num_free = np.atleast_1d(num_free)
    if len(num_free) == 1:
        needs = [len(plan.slots)]
    else:
        needs = [len(np.setdiff1d(lines, NULL_BLOCK)) for lines in np.split(plan.tables, len(num_free))]
    need, free = max(zip(needs, num_free.tolist(), strict=True), key=lambda both: both[0] - both[1])
    return (need, free) if need > free else None


def fit(
    config: CacheConfig, groups: Sequence[Sequence[int]], held: Sequence[Held], old_size: int, *, partial: bool = False
) -> dict[int, Blocks]:  # fmt: skip
    """For each layer with a pool the blocks that rows need in a cache of this config.

    Args:
      groups, held: how their layers are grouped now, and what the rows hold in each group. A contiguous cache's one
        group may be several elsewhere.
      old_size: of their blocks now.
      partial: as for `reblock`.

    Raises:
      TokensGone: as `reblock`; it says in which layer.
    """
    plans: dict[int, Blocks] = {}
    for g, layers in enumerate(config.groups):
        found: dict[int, Blocks] = {}
        for layer in layers:
            group = next(i for i, members in enumerate(groups) if layer in members)
            if group not in found:
                tables, lengths, _ = held[group]
                try:
                    found[group] = reblock(
                        tables, lengths, old_size, config.block_size, first=config.first_seen(g, lengths),
                        sinks=config.group_sinks[g], share=not config.contiguous, partial=partial,
                    )  # fmt: skip
                except TokensGone as gone:
                    raise TokensGone(gone.row, gone.start, gone.needed, layer) from None
            plans[layer] = found[group]
    return plans


def with_blocks(
    held: Sequence[Held], groups: Sequence[Sequence[int]], plans: dict[int, Blocks], config: CacheConfig
) -> list[Held]:
    """The same tokens in the blocks that `fit` says, for each group of `config`; `groups` are those of `held`."""
    found = []
    for layer, *_ in config.groups:
        own = next(one for one, members in zip(held, groups, strict=True) if layer in members)
        found.append(own._replace(tables=plans[layer].tables))
    return found


def tokens_at(kv: Any, slots: np.ndarray, *, first: int = 0) -> Any:
    """`[n, 2, K, new_size, D]`: the keys and values at `slots`; whatever stands where there is no token.

    Args:
      kv: `[N, 2, K, old_size, D]`, a pool's array or one in a file. Scales may have no last axis, here and there.
      slots: as in `Blocks`.
      first: the number of kv's first block.
    """
    old_size = kv.shape[3]
    block = np.maximum(slots // old_size - first, 0)
    if slots.shape[1] == old_size:  # whole blocks
        return kv[block.max(axis=1)]
    tokens = kv[block, :, :, np.maximum(slots, 0) % old_size]  # [n, new_size, 2, K, D]
    return tokens.transpose(0, 2, 3, 1, *range(4, tokens.ndim))


def clear_unused(blocks: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """`blocks` with zeros where there is no token, in place where that is possible."""
    blocks = blocks if blocks.flags.writeable else blocks.copy()
    blocks.transpose(0, 3, 1, 2, *range(4, blocks.ndim))[slots < 0] = 0
    return blocks
