"""Collects the tensors to save of rows of a cache, or of a `RowShards`, whose caches are concatenated as one."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxkv._core.blocks.reblock import BlockPlan, clear_unused, find_group_rows, gather_slots, reblock
from jaxkv._core.blocks.restore import pool_layers
from jaxkv._core.blocks.row_snapshots import RowSnapshots, read_row_snapshots
from jaxkv._core.blocks.slot_allocator import take_states
from jaxkv._core.cache.cache import Cache
from jaxkv._core.cache.checks import check_on_host
from jaxkv._core.cache.data_parallel import RowShards
from jaxkv._core.config.kv_packing import Apart
from jaxkv._core.config.layer_config import count_tokens_of_entries
from jaxkv._core.state.multihost import read_whole
from jaxkv._core.state.state import NULL_BLOCK
from jaxkv._files.format import stored_states, stored_tensors

CONTIGUOUS_BLOCK = 16  # tokens per block of a file from a contiguous cache, whose own blocks are mostly empty


class RowsToSave:
    """Snapshot of rows `i32[n]` of a cache, to be written into a file."""

    def __init__(self, cache: Cache | RowShards, rows: np.ndarray):
        self.caches = cache.shards if isinstance(cache, RowShards) else [cache]
        for shard in self.caches:
            check_on_host(shard, "save")
        config, number = self.caches[0].config, len(self.caches)
        size = config.block_size
        least = math.lcm(CONTIGUOUS_BLOCK, count_tokens_of_entries(config.layers))
        self.block_size = min(least, size) if config.contiguous else size
        own = [rows[rows // config.max_seqs == i] - i * config.max_seqs for i in range(number)]
        # Maps the order of the caches back to the order of the rows.
        order = np.argsort(np.argsort(rows // config.max_seqs, kind="stable"), kind="stable")
        self._own, self._order = own, order
        tables = jax.device_get([shard.tables for shard in self.caches])
        self.plans: list[list[BlockPlan]] = []  # by group, then by cache
        self.tables: list[np.ndarray] = []  # by group, for all rows
        self.held: dict[int, np.ndarray] = {}  # for groups that evict: tokens held, and `thinned`
        lengths = [np.asarray(shard.lengths)[r] for shard, r in zip(self.caches, own, strict=True)]
        self.lengths = np.concatenate(lengths)[order].astype(np.int32)
        for g in range(len(config.groups)):
            by_cache = [find_group_rows(t[g], config, g, r) for t, r in zip(tables, own, strict=True)]
            plans = [
                reblock(
                    group_rows.tables, group_rows.lengths, size, self.block_size,
                    first=config.first_retained_block(g, group_rows.lengths),
                    sink_blocks=config.group_sink_blocks[g],
                )
                for group_rows in by_cache
            ]  # fmt: skip
            heads = config.group_heads[g]
            self.plans.append(plans)
            self.tables.append(_side_by_side(_behind(plans), heads, order))
            if by_cache[0].thinned is not None:
                both = [np.stack([x.lengths, x.thinned], axis=1) for x in by_cache if x.thinned is not None]
                self.held[g] = _side_by_side(both, heads, order).T
        # Of several processes all come here, but not all write.
        self.states = [read_whole(take_states(cache, rows)) for cache, rows in zip(self.caches, own, strict=True)]
        self.snapshots = self._read_snapshots()

    @property
    def num_snapshots(self) -> int:
        """The number of states in the file that are snapshots of rows."""
        return 0 if self.snapshots is None else int(self.snapshots.table.max())

    def num_blocks(self, group: int) -> int:
        """Returns the number of blocks of a group in the file."""
        return sum(len(plan.slots) for plan in self.plans[group])

    def tensors(self, here: Callable[..., Any]) -> Iterator[np.ndarray]:
        """Yields the tensors in order; `here(x, read)` applies `read` to this process's share of a pool's array."""
        config = self.caches[0].config
        yield self.lengths
        yield from self.tables
        yield from self.held.values()
        for layer in pool_layers(config):
            plans = [plan.locate_entries(config.layers[layer]) for plan in self.plans[config.group(layer)]]
            each = [jax.tree.leaves(found.pool(layer).tokens) for found in self.caches]
            for arrays, (name, (_, minor)) in zip(
                zip(*each, strict=True), stored_tensors(config, layer).items(), strict=True
            ):
                form = config.form(layer) if name.startswith("layer") else None
                pieces = [_blocks(form, x, plan, minor, here) for x, plan in zip(arrays, plans, strict=True)]
                yield pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        for i, name in stored_states(config):
            found = np.concatenate([each[i][name] for each in self.states])[self._order]
            empty = (self.lengths == 0).reshape(-1, *[1] * (found.ndim - 1))
            yield np.where(empty, np.zeros((), found.dtype), found)
        if self.snapshots is not None:
            yield self.snapshots.table
            for i, name in stored_states(config):
                yield np.asarray(self.snapshots.states[i][name])[: self.num_snapshots]

    def _read_snapshots(self) -> RowSnapshots | None:
        """Returns the snapshots of all rows; None if there are none."""
        each = [read_row_snapshots(cache, rows) for cache, rows in zip(self.caches, self._own, strict=True)]
        found = [snapshots for snapshots in each if snapshots is not None]
        if not found:
            return None
        tables, first = [], 0
        for snapshots, rows in zip(each, self._own, strict=True):
            table = np.zeros((len(rows), found[0].table.shape[1]), np.int32)
            if snapshots is not None:
                table = np.where(snapshots.table > 0, snapshots.table + first, 0)
                first += int(snapshots.table.max())
            tables.append(table)
        counts = [int(snapshots.table.max()) for snapshots in found]
        states = [read_whole(snapshots.states) for snapshots in found]
        cut = [jax.tree.map(lambda x, n=n: x[:n], x) for x, n in zip(states, counts, strict=True)]
        joined = jax.tree.map(lambda *x: np.concatenate(x), *cut)
        return dataclasses.replace(found[0], table=np.concatenate(tables)[self._order], states=joined)


def _blocks(form: Apart | None, x: Any, plan: BlockPlan, minor: Sequence[int], here: Callable[..., Any]) -> np.ndarray:
    blocks = here(x, lambda x: gather_slots(x, plan.padded))
    if minor:  # without the pool's padding; most scales have no further axis
        blocks = (blocks if form is None else form.unpack(blocks, axis=1))[..., : minor[0]]
    return clear_unused(np.asarray(blocks)[: len(plan.slots)], plan.slots)


def _behind(plans: list[BlockPlan]) -> list[np.ndarray]:
    """Returns block tables of one width, with the blocks of the caches numbered consecutively."""
    width, first, found = max(plan.tables.shape[1] for plan in plans), 0, []
    for plan in plans:
        table = np.where(plan.tables == NULL_BLOCK, NULL_BLOCK, plan.tables + first).astype(np.int32)
        found.append(np.pad(table, ((0, 0), (0, width - table.shape[1])), constant_values=NULL_BLOCK))
        first += len(plan.slots)
    return found


def _side_by_side(tables: list[np.ndarray], heads: int, order: np.ndarray) -> np.ndarray:
    """Concatenates the table rows of all caches, head by head, in the order of the rows."""
    width = tables[0].shape[1]
    split = [table.reshape(heads, len(table) // heads, width) for table in tables]
    return np.concatenate(split, axis=1)[:, order].reshape(heads * len(order), width)
