"""Cascade attention: finds rows with a common prefix of blocks, which are read once, and counts the reads."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv._core.blocks.allocator import count_blocks
from jaxkv._core.config.cache_config import CacheConfig
from jaxkv._core.state.state import BlockTables, Layer
from pallas_kernels.common.shared_prefix import WORTH_ROWS, WORTH_TOKENS, Shared, find_shared


def can_share(config: CacheConfig) -> bool:
    """Tells whether rows of such a cache can share enough blocks that reading them once pays."""
    rows_left = config.max_seqs - WORTH_ROWS
    return not config.contiguous and rows_left > 0 and rows_left * config.max_seq_len > WORTH_TOKENS


def find_sharing(config: CacheConfig, tables: BlockTables, group: int, queries: jax.Array) -> jax.Array:
    """Returns `i32[4, S]`, the sharing of rows in a group's layers: see `pallas_kernels.common.shared_prefix`."""
    before = tables.lengths - tables.new
    if config.group_sink_blocks[group]:  # rows are read one by one
        return jnp.zeros((4, before.shape[0]), jnp.int32)
    if config.residual_length is not None:  # queries read their newest tokens elsewhere, each its own
        before = jnp.maximum(before - config.residual_length, 0)
    first = config.first_retained_block(group, before)
    if tables.skipped is not None:  # what rows share stands in the same columns, or is read one by one
        before, first = before - tables.skipped * config.block_size, jnp.maximum(first - tables.skipped, 0)
    return find_shared(tables.tables, before, queries, block_size=config.block_size, first=first, worth=WORTH_TOKENS)


def count_blocks_read(
    config: CacheConfig, tables: BlockTables, group: int, shared: jax.Array | None, together: int
) -> jax.Array:
    """Returns `i32[]`: blocks that a layer of a group reads in a step, each row's once, and shared blocks once for
    every `together` queries."""
    first = config.first_retained_block(group, tables.lengths - tables.new)
    at_once = jnp.int32(0)
    if shared is not None:
        of = Shared.unpack(shared)
        common = of.tokens // config.block_size
        common = common if tables.skipped is None else jnp.where(common > 0, common + tables.skipped, 0)
        at_once = jnp.sum(-(-of.queries // together) * jnp.maximum(common - first, 0))
        first = jnp.maximum(first, common)
    first -= jnp.minimum(first, config.group_sink_blocks[group])
    own = jnp.where(tables.new > 0, count_blocks(tables.lengths, config.block_size) - first, 0)
    return jnp.sum(own) + at_once


def find_planned_sharing(layer: Layer, step: Any) -> jax.Array | None:
    """Returns a plan's sharing of a layer's rows, as long as it was made for the layer's tables."""
    if step is None or step.shared is None:
        return None
    shared, planned = step.shared[layer.group], step.tables[layer.group]
    if layer.tables is planned:
        return shared
    alike = jnp.all(layer.tables.tables == planned.tables)
    if planned.skipped is not None:
        alike &= jnp.all(layer.tables.skipped == planned.skipped)
    return jnp.where(alike, shared, 0)


def describe_sharing(layer: Layer, reads_once: bool) -> str:
    """Describes the sharing of a concrete cache's rows for `explain`, each before its next token; "" if none."""
    tables = layer.tables
    if isinstance(tables.tables, jax.core.Tracer | jax.ShapeDtypeStruct) or not can_share(layer.config):
        return ""
    tables = dataclasses.replace(jax.tree.map(jnp.asarray, tables), new=jnp.zeros_like(tables.new))
    shared = Shared.unpack(find_sharing(layer.config, tables, layer.group, jnp.where(tables.lengths > 0, 1, 0)))
    rows, tokens = int((shared.tokens > 0).sum()), int(shared.tokens.max())
    if not rows:
        return ""
    how = "a step planned with cascade=True reads them once" if reads_once else "every row reads them by itself"
    return f" {rows} rows share up to {tokens} of their first tokens with others: {how}."
