"""Writes of blocks from the host into empty rows of a cache."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._core.blocks.block_copy import put_blocks, put_group, put_in_place
from jaxkv._core.blocks.reblock import GroupRows, find_head_rows
from jaxkv._core.cache.cache import Cache
from jaxkv._core.cache.key_bounds import add_bounds
from jaxkv._core.config.cache_config import CacheConfig
from jaxkv._core.state.columns import columns_for
from jaxkv._core.state.head_rows import any_head
from jaxkv._core.state.multihost import put_replicated
from jaxkv._core.state.state import NULL_BLOCK, BlockTables, Pool
from pallas_kernels.common.channel_groups import join_groups, split_groups

LATER_FIELDS = ("v_head_dim", "index_dim", "compress_ratio")  # of `LayerConfig`, after the first files


def put_rows(
    cache: Cache,
    rows: np.ndarray,
    lengths: np.ndarray,
    group_rows: Sequence[GroupRows],
    read: Callable[[int], Any],
    *,
    in_place: bool,
) -> Cache:
    """Returns a cache in which `rows` have `lengths` tokens.

    Args:
      rows: indices of empty rows; enough blocks must be free.
      group_rows: what the rows hold in each group. Blocks count from 1, in the order of `read`; 0: none. Rows may share
        them.
      read: returns a layer's blocks `[n, 2, K, block_size, D]`, more may follow; called for one layer after another.
      in_place: whether the old cache's pools are donated.
    """
    groups, result = [], cache
    for group, (tables, own) in enumerate(zip(cache.tables, group_rows, strict=True)):
        lines, seen = find_head_rows(rows, cache.config, group), np.tile(lengths, cache.config.group_heads[group])
        changed, blocks = _adopt(tables, own, lines, seen, cache.config, group)
        groups.append(changed)
        if len(blocks):
            found = functools.partial(_read_with_bounds, read, own, cache.config)
            result = put_group(result, group, found, blocks, put_in_place if in_place else put_blocks)
    return result.replace(tables=tuple(groups))


def _adopt(
    tables: BlockTables, group_rows: GroupRows, rows: np.ndarray, seen: np.ndarray, config: CacheConfig, group: int
) -> tuple[BlockTables, np.ndarray]:
    """Returns tables in which `rows` hold blocks, and the indices `i32[n]` of those blocks."""
    entries = group_rows.tables
    count = int(entries.max(initial=0))
    used = tables.num_blocks - int(np.sum(tables.num_free))
    table, refcounts, all_lengths = (np.array(x) for x in (tables.tables, tables.refcounts, tables.lengths))
    blocks = np.full(count + 1, NULL_BLOCK, np.int32)
    line, column = np.nonzero(entries)
    num_free = np.array(tables.num_free)
    if config.contiguous:  # every row has its own block
        blocks[entries[line, column]] = table[rows[line], column]
    else:
        shard = np.zeros(count + 1, np.int32)
        shard[entries[line, column]] = rows[line] // (len(table) // tables.num_shards)
        taken = np.bincount(shard[1:], minlength=tables.num_shards)
        lists = np.asarray(tables.free_list).reshape(tables.num_shards, -1)
        for number, (free, left) in enumerate(zip(lists, np.atleast_1d(num_free).tolist(), strict=True)):
            first = len(free) - left
            blocks[1:][shard[1:] == number] = free[first : first + taken[number]]
        used, num_free = used + count, num_free - taken.astype(np.int32).reshape(num_free.shape)
        placed, skipped = columns_for(blocks[entries], config, group)
        table[rows] = placed
        refcounts[blocks[1:]] = np.bincount(entries.ravel(), minlength=count + 1)[1:]
    all_lengths[rows] = group_rows.lengths
    changes: dict[str, Any] = {
        "tables": table,
        "refcounts": refcounts,
        "lengths": all_lengths,
        "num_free": num_free,
        "peak": np.maximum(np.asarray(tables.peak), used),
    }
    if tables.skipped is not None:
        all_skipped = np.array(tables.skipped)
        all_skipped[rows] = skipped
        changes["skipped"] = all_skipped
    if tables.evicted is not None and tables.thinned is not None:
        evicted, thinned = np.array(tables.evicted), np.array(tables.thinned)
        evicted[rows] = seen - group_rows.lengths
        thinned[rows] = 0 if group_rows.thinned is None else group_rows.thinned
        changes |= {"evicted": evicted, "thinned": thinned}
    like = {name: _place_like(getattr(tables, name), value) for name, value in changes.items()}
    return dataclasses.replace(tables, **like), blocks[1:]


def _read_with_bounds(read: Callable[[int], Any], group_rows: GroupRows, config: CacheConfig, layer: int) -> Pool:
    return add_bounds(read(layer), group_rows.tables, group_rows.lengths, config, layer)


def _place_like(old: jax.Array, new: np.ndarray) -> jax.Array:
    """Puts `new` on the devices of `old`, so that a compiled step takes either."""
    new = np.asarray(new, old.dtype)
    return put_replicated(new, old.sharding) if getattr(old, "committed", False) else jnp.asarray(new)


def empty_rows(cache: Cache) -> np.ndarray:
    """Returns `bool[S]`, the rows without tokens, reserved blocks or failures."""
    config, (failed, lengths, tables) = cache.config, jax.device_get((cache.failed, cache.lengths, cache.tables))
    empty = ~failed & (lengths == 0)
    for group_tables in () if config.contiguous else tables:
        empty &= ~any_head(group_tables.tables.any(axis=1), config)
    return empty


def pool_layers(config: CacheConfig) -> list[int]:
    """Returns the layers that store keys and values of their own, residual layers included."""
    return [i for i, layer in enumerate(config.layers) if layer.shares_with is None and not layer.is_recurrent]


def model_layers(config: CacheConfig) -> list[int]:
    """Returns the model's layers that store keys and values of their own: those without their residual layers."""
    return [i for i in pool_layers(config) if not config.layers[i].is_residual]


def layer_facts(config: CacheConfig, layer: int) -> dict[str, Any]:
    """Describes what one layer stores, in plain values. Layers with equal descriptions can hold each other's tokens;
    bounds are left out, since they follow from the keys."""
    said = dataclasses.asdict(config.layers[layer]) | {
        "dtype": config.kind(layer).name,
        "rotate": config.rotates(layer),
    }
    states = {} if said["states"] is None else {"states": [list(array) for array in config.layers[layer].states or ()]}
    left_out = ("bounds", "states") if said["is_residual"] else ("bounds", "states", "is_residual")
    return {name: x for name, x in said.items() if name not in left_out} | states


def leave_out_unset(described: dict[str, Any]) -> dict[str, Any]:
    """Returns a layer's description without what is not set of the fields that came later: so files and blocks are
    found, and read, by those who do not know these fields."""
    return {name: x for name, x in described.items() if name not in LATER_FIELDS or x is not None}


def ungroup_channels(described: dict[str, Any]) -> dict[str, Any]:
    """Returns a layer's description with the last inputs of its convolution as `[C, width - 1]`, whether or not its
    channels stand in groups: `regroup_channels` turns either form into the other."""
    if "states" not in described:
        return described
    states = [[name, list(_ungrouped(name, shape)), dtype] for name, shape, dtype in described["states"]]
    return described | {"states": states}


def _ungrouped(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[0] * shape[2], shape[1]) if name == "conv" and len(shape) == 3 else shape


def regroup_channels(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Returns rows' last inputs `[n, C, width - 1]`, or `[n, C // m, width - 1, m]`, as `[n, *shape]`, which is one of
    these forms; any other array as it is."""
    return x if x.shape[1:] == shape else split_groups(join_groups(x), shape)
