"""Guards pools that are updated in place against exceptions at any point of the call."""

import functools
from typing import Any

import jax
import numpy as np

from jaxkv._core.blocks.block_copy import put_blocks
from jaxkv._core.cache.cache import Cache
from jaxkv._core.state.errors import CacheError
from jaxkv._core.state.interrupts import HandOver
from jaxkv._core.state.state import Pool
from jaxkv._tiers.prefix_cache.retained_blocks import keep


@functools.partial(jax.jit, donate_argnums=0, static_argnums=3)
def _put(leaves: list[jax.Array], blocks: list[jax.Array], target: jax.Array, structure: Any) -> list[jax.Array]:
    pool, contents = (structure.unflatten(x) for x in (leaves, blocks))
    return jax.tree.leaves(put_blocks(pool, contents, target))


class Landing:
    """Holds the successors of donated pools, so that a call that is cut off loses none."""

    def __init__(self) -> None:
        self._given: list[tuple[list[jax.Array], Any]] = []
        self._hand_over = HandOver()

    def put(self, pool: Pool, blocks: Pool, target: Any) -> Pool:
        """Calls `put_blocks`, donating the pool."""
        given, structure = jax.tree.flatten(pool)
        self._given = [*self._given[: len(self._hand_over.results)], (given, target)]
        landed = self._hand_over.call(_put, given, jax.tree.leaves(blocks), target, structure)
        return jax.tree.unflatten(structure, landed)

    def whole(self, cache: Cache) -> Cache:
        """Returns the cache with the successors of pools that were donated here.

        Its rows are unchanged. Writes went only to blocks that are free in it, or that it keeps for an index alone; it
        no longer keeps these.

        Raises:
          CacheError: it was donated elsewhere, or the device failed.
        """
        if not any(map(_is_deleted, jax.tree.leaves(cache))):
            return cache
        pools, overwritten = list(cache.pools), [np.zeros(tables.kept.shape, bool) for tables in cache.tables]
        for layer, pool in enumerate(cache.pools):
            structure: Any
            leaves, structure = jax.tree.flatten(pool)
            for (given, target), landed in zip(self._given, self._hand_over.results, strict=False):
                if leaves and given[0] is leaves[0]:
                    pools[layer] = structure.unflatten(landed)
                    blocks = overwritten[cache.config.group(layer)]
                    blocks[np.asarray(target) % blocks.size] = True  # of stacked layers one lies behind the other
        cache = cache.replace(pools=tuple(pools))
        if any(map(_is_deleted, jax.tree.leaves(cache))):
            raise CacheError(
                "This cache was used up, donated to a call: go on with the one that the call returned. If that was cut "
                "off, begin anew: cache = prefix.reset(jaxkv.init(prefix.config))."
            )
        kept = (
            np.where(gone, 0, np.asarray(tables.kept)) for tables, gone in zip(cache.tables, overwritten, strict=True)
        )
        return cache.replace(tables=tuple(map(keep, cache.tables, kept)))


def _is_deleted(x: Any) -> bool:
    return isinstance(x, jax.Array) and x.is_deleted()
