"""The cache of an engine on its devices, from the leaves that its programs take and return."""

import functools
from typing import Any

import jax

from jaxkv._core.cache.cache import Cache
from jaxkv._core.cache.init import init
from jaxkv._core.config.cache_config import CacheConfig
from jaxkv._core.config.mesh_shape import context_axis, find_placement, model_mesh
from jaxkv._core.state.device_arrays import delete
from jaxkv._core.state.interrupts import HandOver
from jaxkv._core.state.multihost import find_shared_placement

RELEASED = "This engine has given its memory back: engine.restore() takes it again, and its requests go on."


class DeviceCache:
    """A cache that each program is given by donation, and returns.

    An interrupt finds it whole: before the program, or after. What a program that failed has left of it is lost.
    """

    def __init__(self, config: CacheConfig, model: Any):
        self.config = config
        self.mesh, self.place = model_mesh(model), find_placement(model)
        self.shared = find_shared_placement(self.mesh)  # of what every one of several processes reads
        self.is_released = False
        self._hand_over = HandOver()
        self._earlier_peak = 0  # of the caches before this one
        self._cache: Cache | None = None  # made of `leaves` on demand
        self.renew()
        self.structure = jax.tree.structure(self.cache)

    @property
    def cache(self) -> Cache:
        """The current cache. Raises RuntimeError if its memory is released."""
        if self.is_released:
            raise RuntimeError(RELEASED)
        self._take_over()
        if self._cache is None:
            self._cache = jax.tree.unflatten(self.structure, self.leaves)
        return self._cache

    @cache.setter
    def cache(self, cache: Cache) -> None:
        self._cache, self.leaves = cache, jax.tree.leaves(cache)

    def renew(self) -> None:
        """Allocates an empty cache."""
        # On a device by name, as blocks that come back from the host are: else every program would be compiled for
        # the cache before, and once more for the one after.
        cache = init(self.config, mesh=self.mesh, context=context_axis(self.mesh))
        self.cache = cache if self.mesh is not None else jax.device_put(cache, self.place)

    def call(self, program: Any, *arguments: Any, **options: Any) -> list[jax.Array]:
        """Runs a `cache_program` with the cache donated, and returns its other results."""
        self._hand_over.results.clear()
        out, _ = self._hand_over.call(functools.partial(program, **options), self.leaves, *arguments)
        self._take_over()
        return out

    def _take_over(self) -> None:
        if self._hand_over.results:
            self._cache, self.leaves = None, self._hand_over.results[0][1]
            self._hand_over.results.clear()

    @property
    def is_lost(self) -> bool:
        """Tells whether the cache was donated to a program that did not finish."""
        return any(x.is_deleted() for x in self.leaves)

    def recover(self) -> None:
        """Takes over what the last program returned, and deletes the cache if that failed on the device: only waiting
        for the cache shows that."""
        self._take_over()
        leaves = [x for x in self.leaves if not x.is_deleted()]
        try:
            jax.block_until_ready(leaves)
        except Exception:  # any error of the program, a hook's own too
            for x in leaves:
                x.delete()

    def close(self) -> None:
        """Frees the memory for good."""
        self._take_over()
        delete(self.leaves)
        self._cache, self.leaves = None, []

    def release(self) -> None:
        """Frees the memory until `restore`."""
        self._earlier_peak = self.blocks_peak
        self.is_released = True  # from here on it is not looked at: an interrupt finds no half of it
        self.close()

    def restore(self) -> None:
        """Allocates an empty cache again."""
        self.renew()
        self.is_released = False

    @property
    def blocks_peak(self) -> int:
        """The peak number of blocks in use."""
        now = 0 if self.is_released else sum(int(tables.peak) for tables in self.cache.tables)
        return max(self._earlier_peak, now)
