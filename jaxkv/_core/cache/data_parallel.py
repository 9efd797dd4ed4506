"""Rows divided over the devices of a mesh: each has a whole cache, with its own tables, pools and free blocks.

A block never leaves its device, so that work on rows needs no communication, and each device computes bit by bit what
it would compute alone.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxkv._core.cache.cache import Cache
from jaxkv._core.config.cache_config import CacheConfig
from jaxkv._core.config.validation import integer, read_list, show
from jaxkv._core.state.device_arrays import join_shards, take_shard
from jaxkv._core.state.state import BlockTables, Pool
from jaxkv._core.state.state_repr import DONATED, is_donated
from jaxkv._core.state.state_slots import StateSlots
from jaxkv._core.state.static_fields import register_export

WAY_OUT = "call what works on a cache inside jaxkv.by_rows, or on one of its shards, cache.shards[i]."


@register_export
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class RowShards:
    """A cache for each device of a mesh axis, as one pytree of arrays that are divided over the axis. Made by
    `jaxkv.init(config, mesh=mesh, rows=axis)`, used inside `jaxkv.by_rows`.

    Fields:
      tables, pools, state_slots, states: those of all caches, along the first axis; a single number becomes one number
        per cache.
      config: the config of all caches together: `max_seqs`, `num_blocks` and so on are totals; static.
      axis: the mesh axis; static.

    >>> import jax, jaxkv
    >>> config = jaxkv.CacheConfig.uniform(num_layers=1, num_kv_heads=2, head_dim=8, max_seqs=4, max_seq_len=64)
    >>> cache = jaxkv.init(config, mesh=jax.make_mesh((1,), ("data",)), rows="data")
    >>> cache, len(cache.shards), cache.shards[0].lengths.tolist()
    (RowShards(4 rows over the mesh axis 'data'), 1, [0, 0, 0, 0])
    """

    NO_CACHE: ClassVar[str] = (
        f"cache must be one cache, but the rows of this one are divided over a mesh axis: {WAY_OUT}"
    )

    tables: tuple[BlockTables, ...]
    pools: tuple[Pool | None, ...]
    state_slots: StateSlots | None = None
    states: tuple[dict[str, jax.Array] | None, ...] = ()
    config: CacheConfig = dataclasses.field(metadata={"static": True})
    axis: str = dataclasses.field(metadata={"static": True})

    def __repr__(self) -> str:
        if is_donated((self.tables, self.pools)):
            return f"RowShards({DONATED})"
        return f"RowShards({self.config.max_seqs} rows over the mesh axis {self.axis!r})"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(
            f"The rows of this cache are divided over the mesh axis {self.axis!r}, and it has no {name!r}: {WAY_OUT}"
        )

    @property
    def mesh(self) -> Mesh:
        """The mesh of the arrays. Raises ValueError inside `jit`."""
        mesh = getattr(getattr(self.tables[0].lengths, "sharding", None), "mesh", None)
        if not isinstance(mesh, Mesh):
            raise ValueError(
                "cache.shards are looked at outside jit; inside, jaxkv.by_rows(function) has each of them."
            )
        return mesh

    @property
    def shards(self) -> list[Cache]:
        """Each device's rows as a cache of its own, on that device alone (or on those that heads and contexts are
        divided over). Nothing is copied, so that donating a shard invalidates both.

        For use outside `jit`, and outside `jax.set_mesh`, under which JAX takes no arrays of fewer devices than the
        mesh has. A cache whose rows are divided needs none set."""
        mesh = self.mesh
        count = mesh.shape[self.axis]
        config = shard_config(self.config, count, self.axis)
        take = functools.partial(take_shard, mesh=mesh, axis=self.axis)
        return [
            _make_cache(jax.tree.map(functools.partial(take, i=i), self), config, alone=len(mesh.axis_names) == 1)
            for i in range(count)
        ]

    def with_shards(self, shards: Sequence[Cache]) -> "RowShards":
        """Joins `shards`, each as it was or as functions for one cache returned it. For use outside `jit`. Arrays that
        are still on their device are not copied.

        Raises:
          ValueError: the number of caches or their config differs.

        >>> import jax, jaxkv
        >>> config = jaxkv.CacheConfig.uniform(num_layers=1, num_kv_heads=2, head_dim=8, max_seqs=4, max_seq_len=64)
        >>> cache = jaxkv.init(config, mesh=jax.make_mesh((1,), ("data",)), rows="data")
        >>> cache = cache.with_shards([jaxkv.extend(cache.shards[0], [3, 0, 20, 1])])
        >>> cache.shards[0].lengths.tolist()
        [3, 0, 20, 1]
        """
        mesh = self.mesh
        shard = shard_config(self.config, mesh.shape[self.axis], self.axis)
        if len(shards) != mesh.shape[self.axis] or any(not _is_cache(x) or x.config != shard for x in shards):
            raise ValueError(
                f"with_shards takes {mesh.shape[self.axis]} caches of the config of cache.shards, as these are changed "
                f"one by one, not {show(list(shards))}."
            )
        places = [[x.sharding for x in jax.tree.leaves(old)] for old in self.shards]
        there = [
            jax.tree.unflatten(jax.tree.structure(new), jax.device_put(jax.tree.leaves(new), place))
            for new, place in zip(shards, places, strict=True)
        ]
        return join_caches(there, jax.tree.map(lambda x: x.sharding.spec, self), mesh)


def join_caches(shards: Sequence[Cache], specs: RowShards, mesh: Mesh) -> RowShards:
    """Joins the caches of the devices of an axis into one with these specs."""
    leaves, structure = jax.tree.flatten(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    by_leaf = zip(*(jax.tree.leaves(shard) for shard in shards), strict=True)
    found = [
        join_shards(leaf_shards, NamedSharding(mesh, spec)) for leaf_shards, spec in zip(by_leaf, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, found)


def leave_mesh(cache: Any) -> contextlib.AbstractContextManager:
    """Returns a context without the mesh of `jax.set_mesh`, for functions that go through a cache's shards."""
    is_set = not jax.sharding.get_abstract_mesh().empty
    nothing_set = Mesh(np.empty((), object), ())
    return jax.set_mesh(nothing_set) if is_set and isinstance(cache, RowShards) else contextlib.nullcontext()


def by_rows(function: Callable[..., Any], *, whole: Collection[int] = ()) -> Callable[..., Any]:
    """Maps `function` over the devices of a mesh axis, each with its own rows: `by_rows(step)(tokens, cache)`.

    Inside, a `RowShards` argument is a `Cache` of the device's rows and blocks, which every function takes. Other
    arrays are divided along their first axis: rows, or packed tokens, padded per device and in device order. Results
    are joined in the same way; a number becomes one number per device.

    Args:
      function: a pure function, as for `jax.jit`. Apply `jit` last:
        `jax.jit(jaxkv.by_rows(step), donate_argnums=1)`.
      whole: indices of arguments that are passed whole to every device, such as a model. They may be divided over other
        axes of the mesh.

    Returns:
      A function of the same arguments, by position.

    Raises:
      ValueError: there is no `RowShards` among the arguments, or an array cannot be divided evenly.
      TypeError: an argument by name.

    >>> import jax, jaxkv
    >>> mesh = jax.make_mesh((1,), ("data",))
    >>> sizes = dict(num_layers=1, num_kv_heads=2, head_dim=8, max_seqs=4, max_seq_len=64)
    >>> cache = jaxkv.init(jaxkv.CacheConfig.uniform(**sizes), mesh=mesh, rows="data")
    >>> cache = jax.jit(jaxkv.by_rows(jaxkv.extend))(cache, jax.numpy.array([3, 0, 20, 1]))
    >>> cache.shards[0].lengths.tolist()
    [3, 0, 20, 1]
    """
    if not callable(function):
        raise ValueError(f"function must be a function of a cache, not {show(function)}.")
    whole = frozenset(integer("whole, indices of arguments,", i, least=0) for i in read_list("whole", whole))

    @functools.wraps(function)
    def run(*arguments: Any, **named: Any) -> Any:
        if named:
            raise TypeError(f"A function by rows takes its arguments by position, but {', '.join(named)} came by name.")
        caches = [x for x in jax.tree.leaves(arguments, is_leaf=_is_shards) if _is_shards(x)]
        if not caches:
            raise ValueError(
                "by_rows needs a cache whose rows are divided, jaxkv.init(config, mesh=mesh, rows=axis), among its "
                f"arguments, but there are {show([type(x).__name__ for x in arguments])}."
            )
        axis, mesh = caches[0].axis, jax.typeof(caches[0].tables[0].lengths).sharding.mesh
        if any(cache.axis != axis for cache in caches) or axis not in mesh.axis_names:
            raise ValueError(
                f"All caches of one call must lie on the mesh axis that they were made for, but these were made for "
                f"{' and '.join(repr(cache.axis) for cache in caches)}, and the mesh has "
                f"{', '.join(map(repr, mesh.axis_names))}."
            )
        count = mesh.shape[axis]
        configs = {cache.config: shard_config(cache.config, count, axis) for cache in caches}
        for i, argument in enumerate(arguments):
            if i not in whole:
                _check_divides(i, argument, count, axis)

        def run_shard(*arguments: Any) -> Any:
            out = function(*_local(arguments, configs))
            return _join_outputs(out, {local: config for config, local in configs.items()}, axis)

        specs = tuple(PartitionSpec() if i in whole else PartitionSpec(axis) for i in range(len(arguments)))
        lie = functools.partial(_reshard, mesh=mesh, axis=axis)
        arguments = tuple(jax.tree.map(functools.partial(lie, is_whole=i in whole), x) for i, x in enumerate(arguments))
        return jax.shard_map(
            run_shard, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(axis), axis_names={axis}, check_vma=False
        )(*arguments)

    return run


@functools.cache
def shard_config(config: CacheConfig, count: int, axis: str) -> CacheConfig:
    """Returns the config of each of `count` equal shards of a cache's rows and blocks. Raises ValueError."""
    max_seqs = divide_evenly("max_seqs", config.max_seqs, count, axis)
    group_blocks = tuple(divide_evenly("num_blocks", n, count, axis) for n in config.group_blocks)
    if config.contiguous:
        return config.replace(max_seqs=max_seqs)
    return config.resize(group_blocks, max_seqs=max_seqs, block_size=config.block_size)


def divide_evenly(name: str, number: int, count: int, axis: str) -> int:
    """Returns `number // count`. Raises ValueError if the division is not even."""
    if number % count:
        raise ValueError(
            f"{name}={number} cannot be divided among the {count} devices of the mesh axis {axis!r}: make it a "
            "multiple of it."
        )
    return number // count


def row_specs(config: CacheConfig, local: Cache, axis: str) -> RowShards:
    """Returns the specs of the caches of an axis, from those of one cache."""
    divided = jax.tree.map(lambda spec: PartitionSpec(axis, *spec[1:]), _arrays(local))
    return RowShards(**divided, config=config, axis=axis)


def _arrays(cache: Any) -> dict[str, Any]:
    """Returns the arrays of a cache, or of a `RowShards`, by field."""
    return {name: getattr(cache, name) for name in ("tables", "pools", "state_slots", "states")}


def _is_shards(x: Any) -> bool:
    return isinstance(x, RowShards)


def _is_cache(x: Any) -> bool:
    return isinstance(x, Cache)


def _check_divides(number: int, argument: Any, count: int, axis: str) -> None:
    for x in jax.tree.leaves(argument):
        shape = jnp.shape(x)
        if not shape:
            raise ValueError(
                f"Argument {number} of a function by rows is, or has in it, a single number, which the {count} devices "
                f"of the mesh axis {axis!r} cannot share: make an array of a list of numbers, or name the argument in "
                "whole= if each is to have it."
            )
        if shape[0] % count:
            raise ValueError(
                f"Argument {number} of a function by rows has an array of the shape {shape}, whose first axis cannot "
                f"be divided among the {count} devices of the mesh axis {axis!r}: name the argument in whole= if each "
                "is to have all of it."
            )


def _reshard(x: Any, *, mesh: AbstractMesh, axis: str, is_whole: bool) -> Any:
    """Reshards an array over the axis, or as whole, if the axis is explicit: `shard_map` leaves that to its caller."""
    if dict(zip(mesh.axis_names, mesh.axis_types, strict=True))[axis] != AxisType.Explicit:
        return x
    spec = [None if name == axis else name for name in jax.typeof(x).sharding.spec]
    return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*(spec if is_whole else [axis, *spec[1:]]))))


def _local(arguments: Sequence[Any], configs: dict[CacheConfig, CacheConfig]) -> Any:
    def local(x: Any) -> Any:
        return _make_cache(x, configs[x.config]) if _is_shards(x) else x

    return jax.tree.map(local, tuple(arguments), is_leaf=_is_shards)


def _make_cache(x: RowShards, config: CacheConfig, alone: bool | None = None) -> Cache:
    """Returns a device's shard as a cache. Outside `jit`, `alone` tells whether the shard is on no mesh."""
    unwrap = _number if alone is not None else lambda x: x[0]
    tables = tuple(
        dataclasses.replace(group_tables, num_free=unwrap(group_tables.num_free), peak=unwrap(group_tables.peak))
        for group_tables in x.tables
    )
    pools = tuple(p.like(Pool(p.kv)) if alone and p is not None else p for p in x.pools)
    return Cache(**_arrays(x) | {"tables": tables, "pools": pools}, config=config)


def _number(x: jax.Array) -> jax.Array:
    """Returns an array `[1]` as a number on the same devices, whatever mesh is set."""
    place = x.sharding
    if isinstance(place, NamedSharding):
        place = NamedSharding(place.mesh, PartitionSpec())
    return jax.device_put(np.asarray(x)[0], place)


def _join_outputs(out: Any, configs: dict[CacheConfig, CacheConfig], axis: str) -> Any:
    def together(x: Any) -> Any:
        if not _is_cache(x):
            return jnp.atleast_1d(x)
        tables = jax.tree.map(jnp.atleast_1d, x.tables)
        if x.config not in configs:
            raise ValueError("A function by rows can only return caches that have come from those it was given.")
        return RowShards(**_arrays(x) | {"tables": tables}, config=configs[x.config], axis=axis)

    return jax.tree.map(together, out, is_leaf=_is_cache)
