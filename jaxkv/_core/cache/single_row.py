"""A cache of a single row."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv._core.cache.cache import Cache
from jaxkv._core.state.head_rows import HEAD_ROW_FIELDS
from jaxkv._core.state.state import BlockTables


def view_row(cache: Cache, row: jax.Array) -> Cache:
    """Returns a read-only cache of one row, `i32[]`, that reads the same blocks of the same pools."""

    def take_row(tables: BlockTables) -> BlockTables:
        heads = tables.lengths.shape[0] // cache.config.max_seqs
        lines = row + cache.config.max_seqs * jnp.arange(heads, dtype=jnp.int32)
        found = ((name, getattr(tables, name)) for name in HEAD_ROW_FIELDS)
        fields: dict[str, Any] = {name: x if x is None else x[lines] for name, x in found}
        return dataclasses.replace(tables, **fields)

    return cache.replace(config=cache.config.replace(max_seqs=1), tables=tuple(map(take_row, cache.tables)))
