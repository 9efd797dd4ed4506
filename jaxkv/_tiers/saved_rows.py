"""Reads rows of a saved cache on demand, as blocks in host memory for `swap_in`."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxkv._core.blocks.reblock import BlockPlan, GroupRows, TokensGone, fill_blocks, fit
from jaxkv._core.blocks.restore import pool_layers
from jaxkv._core.config.cache_config import CacheConfig
from jaxkv._core.state.state import Pool
from jaxkv._files.format import SavedCache
from jaxkv._files.load_rows import check_layers, lay_blocks, read_group_rows, read_source, saved_states
from jaxkv._files.multihost_file import open_saved
from jaxkv._tiers.host_blocks import HostBlocks
from jaxkv._tiers.host_tier import make_host


@dataclasses.dataclass(frozen=True)
class SavedRow:
    """A row of a file, read when it is called."""

    path: pathlib.Path
    row: int
    read: Callable[[], HostBlocks]

    def __call__(self) -> HostBlocks:
        return self.read()


class SavedRows:
    """The rows of a file of `jaxkv.save`: verified at once, read on demand. The file may be replaced meanwhile.

    Raises:
      FileNotFoundError; CacheFileError, a ValueError: as `jaxkv.load`.
    """

    def __init__(self, path: Any):
        self.path = read_source(path)
        self.saved: SavedCache
        self.saved, self._tensors = open_saved(self.path)

    def check_layers(self, config: CacheConfig) -> None:
        """Raises CacheFileError unless a cache of this config can hold the rows."""
        check_layers(self.path, self.saved.config, config)

    def row(self, row: int, config: CacheConfig) -> SavedRow | None:
        """Returns what reads a row for a cache of this config; None if its blocks need lost tokens."""
        read = plan_row(self.saved, self._tensors, row, config)
        return None if read is None else SavedRow(self.path, row, read)


def plan_row(
    saved: SavedCache, tensors: Mapping[str, np.ndarray], row: int, config: CacheConfig
) -> Callable[[], HostBlocks] | None:
    """Returns what reads a saved row for a cache of this config; None if its blocks need lost tokens."""
    own = np.array([row])
    group_rows = [read_group_rows(saved, tensors, g, own) for g in range(len(saved.groups))]
    try:
        plans = fit(config, saved.groups, group_rows, saved.block_size)
    except TokensGone:
        return None
    group_rows = fill_blocks(group_rows, saved.groups, plans, config)
    states = saved_states(tensors, config, own)
    return functools.partial(_read, tensors, config, saved.lengths[row], group_rows, plans, states)


def _read(
    tensors: Mapping[str, np.ndarray],
    config: CacheConfig,
    length: int,
    group_rows: list[GroupRows],
    plans: dict[int, BlockPlan],
    states: tuple[dict[str, np.ndarray] | None, ...],
) -> HostBlocks:
    pools: list[Pool | None] = [None] * len(config.layers)
    for layer in pool_layers(config):
        # One row's blocks come in the order of its table.
        found = lay_blocks(tensors, config, layer, plans[layer].padded)
        pairs = zip(found.arrays, config.array_shapes(layer), strict=True)
        widened = (x if x is None or shape is None else _pad_blocks(x, shape[1:]) for x, shape in pairs)
        pools[layer] = Pool.bundle(*widened)
    return make_host(config, np.array([length]), group_rows, pools, states)


def _pad_blocks(blocks: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Returns blocks padded to this shape: a pool's padding is not in the file."""
    return np.pad(blocks, [(0, 0), *((0, want - have) for want, have in zip(shape, blocks.shape[1:], strict=True))])
