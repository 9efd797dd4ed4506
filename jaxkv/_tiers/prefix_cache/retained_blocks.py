"""Table operations for the blocks that a `PrefixCache` keeps on the device."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._core.blocks.allocator import replace_entries
from jaxkv._core.blocks.block_copy import pad_size, read_group
from jaxkv._core.cache.cache import Cache
from jaxkv._core.state.multihost import read_local_shards
from jaxkv._core.state.state import BlockTables, Pool
from jaxkv._tiers.prefix_cache.node import Node


@jax.jit
def keep(tables: BlockTables, kept: jax.Array) -> BlockTables:
    """Replaces the kept blocks, i32[N + 1], by others that rows hold or that were kept before."""
    return replace_entries(tables, tables.tables, jnp.asarray(kept))


@jax.jit
def claim(tables: BlockTables, labels: jax.Array) -> tuple[BlockTables, jax.Array]:
    """Keeps a free block for each of `labels` i32[n], except zeros at the end. There must be enough.

    Returns:
      The tables, and i32[n], the blocks; the null block where the label is 0.
    """
    place = tables.num_blocks - tables.num_free + jnp.arange(labels.shape[0], dtype=jnp.int32)
    blocks = jnp.where(labels != 0, tables.free_list.at[place].get(mode="fill", fill_value=0), 0)
    num_free = tables.num_free - jnp.sum(labels != 0, dtype=jnp.int32)
    return dataclasses.replace(
        tables,
        kept=tables.kept.at[jnp.where(labels != 0, blocks, tables.kept.shape[0])].set(labels, mode="drop"),
        num_free=num_free,
        peak=jnp.maximum(tables.peak, tables.num_blocks - num_free),
    ), blocks  # fmt: skip


@jax.jit
def attach(
    tables: BlockTables, row: jax.Array, entries: jax.Array, length: jax.Array, skipped: jax.Array
) -> BlockTables:
    """Attaches kept blocks, `entries` i32[M], to an empty row, after those that it skips."""
    here = jnp.arange(tables.lengths.shape[0], dtype=jnp.int32) == row
    tables = replace_entries(tables, jnp.where(here[:, None], entries[None], tables.tables))
    return dataclasses.replace(
        tables,
        lengths=jnp.where(here, length, tables.lengths),
        new=jnp.where(here, np.int32(0), tables.new),
        skipped=None if tables.skipped is None else jnp.where(here, skipped, tables.skipped),
    )


def warm(cache: Cache) -> None:
    """Compiles the table operations of an index, without changing a row or the kept blocks."""
    for tables in cache.tables:
        keep(tables, np.asarray(tables.kept))
        attach(
            tables,
            np.int32(tables.tables.shape[0]),
            np.zeros(tables.tables.shape[1], np.int32),
            np.int32(0),
            np.int32(0),
        )
        skipped = None if tables.skipped is None else tables.skipped[0]
        jax.device_get((tables.tables[0], tables.lengths[0], tables.num_blocks_per_row, skipped))


def count_unused(tables: BlockTables) -> jax.Array:
    """Returns `i32[]`: the number of kept blocks that no row holds."""
    return jnp.sum((tables.kept != 0) & (tables.refcounts == 1), dtype=jnp.int32)


def read_contents(cache: Cache, group: int, nodes: Sequence[Node]) -> list[list[Pool]]:
    """Returns the contents of nodes in a group, layer by layer, copied to host memory."""
    blocks = np.zeros(pad_size(len(nodes)), np.int32)
    blocks[: len(nodes)] = [node.blocks[group] for node in nodes]
    found = read_group(cache, group, blocks)
    # As if it had lain on one device: so does what comes from a file.
    layers = cache.config.groups[group]
    pools = [dataclasses.replace(found[layer], heads=None, context=None, num_shards=1) for layer in layers]
    pools = read_local_shards(pools)
    return [jax.tree.map(lambda x, i=i: x[i].copy(), pools) for i in range(len(nodes))]
