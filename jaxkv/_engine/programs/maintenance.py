"""Programs between steps: measure room, and free, restore or fork rows."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxkv._core.blocks.sharing import fork, share_first_blocks
from jaxkv._core.blocks.slot_allocator import put_row_states
from jaxkv._core.blocks.tables import free, release_windows
from jaxkv._core.cache.cache import Cache
from jaxkv._core.state.sharding import share
from jaxkv._engine.programs.cache_program import cache_program
from jaxkv._tiers.host_tier import swap_in_beside
from jaxkv._tiers.prefix_cache.retained_blocks import count_unused


def measure_room(cache: Cache) -> jax.Array:
    """Returns `i32[groups, 2]`: free blocks, and blocks that only an index keeps."""
    counts = ((tables.num_shards, tables.num_free) for tables in cache.tables)
    free = (num_free if num_shards == 1 else num_shards * num_free.min() for num_shards, num_free in counts)
    return jnp.stack([jnp.stack([n, count_unused(tables)]) for n, tables in zip(free, cache.tables, strict=True)])


@functools.lru_cache(maxsize=16)
def compile_maintenance(structure: Any, place: NamedSharding | None = None) -> tuple[Any, Any, Any, Any, Any]:
    """Compiles the programs between steps: free rows and blocks that left windows, restore a row, `fork`, begin a row
    with another's first blocks, and give a row its states.

    A restored row shares its first `num_blocks` blocks with row `source`. Room is whole on `place`, as in `share`.
    """

    def settle(cache: Cache, rows: jax.Array) -> tuple[jax.Array, Cache]:
        cache = release_windows(free(cache, rows))
        return share(measure_room(cache), place), cache

    def swap_one_in(
        cache: Cache, row: jax.Array, host: Any, source: jax.Array, num_blocks: jax.Array
    ) -> tuple[None, Cache]:
        return None, swap_in_beside(cache, row, host, source, num_blocks)

    def fork_one(cache: Cache, src: jax.Array, dst: jax.Array) -> tuple[None, Cache]:
        return None, fork(cache, src, dst)

    def begin_one(cache: Cache, src: jax.Array, dst: jax.Array, num_blocks: jax.Array) -> tuple[None, Cache]:
        return None, share_first_blocks(cache, src, dst, num_blocks)

    def put_one(cache: Cache, row: jax.Array, states: Any) -> tuple[None, Cache]:
        return None, put_row_states(cache, row, states)

    settle_, swap_, fork_, begin_, put_ = (
        cache_program(structure, f) for f in (settle, swap_one_in, fork_one, begin_one, put_one)
    )
    return settle_, swap_, fork_, begin_, put_
