"""Pools divided over devices by KV heads, by the tokens of each block, or both. Functions that read or write a pool run
on each device's shard.

Without that, the compiler refuses kernels on a TPU, and elsewhere silently gathers the pools, which is slow. So every
access to a pool goes through `run_on_shards`, which wraps the function in a `shard_map`. On one device, or inside a
`shard_map` of the caller, the function runs as it is.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jaxkv._core.state.state import IndexKeys, Pool

# Axis names in the specs for `run_on_shards`: a pool's KV heads, a step's new KV heads, query heads, a block's tokens;
# and blocks, or head rows, which are divided instead where each head has its own.
KV, NEW, Q, TOKENS, BLOCK_AXIS = "kv heads", "new kv heads", "query heads", "tokens of a block", "blocks"


def head_spec(axis: int, heads: str = KV) -> PartitionSpec:
    """Returns the spec of an array whose heads are at `axis`."""
    return PartitionSpec(*[None] * axis, heads)


POOL = PartitionSpec(BLOCK_AXIS, None, KV, TOKENS)
BLOCKS = PartitionSpec(None, None, KV, TOKENS)  # blocks copied out of a pool
WHOLE = PartitionSpec()


class PoolMesh(NamedTuple):
    """A mesh, and its axes that KV heads and the tokens of blocks are divided over, except those of a surrounding
    `shard_map`."""

    mesh: AbstractMesh
    heads: str | None
    context: str | None

    @property
    def head_devices(self) -> int:
        return 1 if self.heads is None else self.mesh.shape[self.heads]


def find_pool_mesh(pool: Pool) -> PoolMesh | None:
    """Returns a pool's shards; None on one device, and inside a `shard_map` over all axes that divide the pool.

    Raises:
      ValueError: the pool is on a mesh without the axis.
    """
    mesh = _find_mesh(pool)
    if mesh is None:
        return None
    heads, context = (None if x is None or _is_manual(mesh, x) else x for x in (pool.heads, pool.context))
    return None if heads is None and context is None else PoolMesh(mesh, heads, context)


def count_shards(num_heads: int, count: int, axis: str) -> int:
    """Returns the number of shards of KV heads on an axis of `count` devices: 1 if there are fewer heads.

    Raises:
      ValueError: there are at least `count` heads, but not equally many for each device.

    >>> count_shards(8, 4, "model"), count_shards(2, 4, "model")
    (4, 1)
    """
    if num_heads < count:
        return 1
    if num_heads % count:
        raise ValueError(
            f"{num_heads} KV heads cannot be divided among the {count} devices of the mesh axis {axis!r}: their number "
            "must be a multiple of it, or less than it, and then each device has all of them."
        )
    return count


def run_on_shards(
    pool: Pool,
    function: Callable[..., Any],
    arguments: tuple,
    in_specs: tuple,
    out_specs: Any,
    *,
    query_heads: int | None = None,
    **static: Any,
) -> Any:
    """Runs `function(*arguments, **static)` on each device with its own shard of pools.

    Args:
      pool: the pool whose mesh and axes are used.
      function: a module-level function, since it is cached by identity.
      arguments: pytrees of arrays, pools among them.
      in_specs, out_specs: spec prefixes of the arguments and of the result, with `KV`, `Q` and so on as axis names.
      query_heads: number of query heads, if the function takes queries.
      static: hashable keyword arguments.
    """
    shards = find_pool_mesh(pool)
    if shards is None:
        return function(*arguments, **static)
    devices = shards.head_devices
    by_blocks = pool.num_shards > 1
    by_kv = not by_blocks and count_shards(pool.kv.shape[2], devices, str(shards.heads)) == devices
    by_q = by_kv or by_blocks if query_heads is None else query_heads % devices == 0
    if not by_q:  # every device computes all query heads
        arguments = jax.tree.map(functools.partial(_set_axis, None), arguments, is_leaf=_is_pool)
    divided = {KV: by_kv, NEW: by_kv or by_blocks, Q: by_q, BLOCK_AXIS: by_blocks}
    axes = {name: shards.heads if is_so else None for name, is_so in divided.items()} | {TOKENS: shards.context}

    def rename_axes(spec: PartitionSpec) -> PartitionSpec:
        return PartitionSpec(*(axes.get(name) for name in spec))

    leaves, structure = jax.tree.flatten(arguments)
    named_specs = jax.tree.broadcast(in_specs, arguments, is_leaf=_is_spec)
    specs = jax.tree.leaves(jax.tree.map(_keep_whole, named_specs, is_leaf=_is_index_or_spec), is_leaf=_is_spec)
    out = _run(
        leaves,
        function=function,
        structure=structure,
        in_specs=tuple(map(rename_axes, specs)),
        out_specs=jax.tree.map(rename_axes, out_specs, is_leaf=_is_spec),
        shards=shards,
        static=tuple(static.items()),
    )
    return jax.tree.map(functools.partial(_set_axis, pool.heads), out, is_leaf=_is_pool)


@functools.partial(jax.jit, static_argnames=("function", "structure", "in_specs", "out_specs", "shards", "static"))
def _run(leaves, *, function, structure, in_specs, out_specs, shards, static):
    mesh = shards.mesh
    leaves = [reshard(x, spec, mesh) for x, spec in zip(leaves, in_specs, strict=True)]

    apart = _IndexApart(out_specs, shards.context)

    def run_shard(*leaves):
        return apart.split(function(*jax.tree.unflatten(structure, leaves), **dict(static)))

    return apart.join(*map_devices(run_shard, mesh, in_specs, apart.specs)(*leaves))


class _IndexApart:
    """Takes index keys, which lie otherwise than what a pool's specs say, out of a function's result, and puts them
    back."""

    def __init__(self, specs: Any, context: str | None):
        self._given, self._context = specs, context
        self._structure: Any = None

    @property
    def specs(self) -> Any:
        """The specs of what `split` returns."""
        return self._given, WHOLE, PartitionSpec(None, None, None, self._context)

    def split(self, out: Any) -> tuple[Any, list[Any], list[Any]]:
        """Returns a result without index keys, then those that each device has whole, and those that it has runs of."""
        leaves, self._structure = jax.tree.flatten(out, is_leaf=_is_index)
        specs = jax.tree.leaves(jax.tree.broadcast(self._given, out, is_leaf=_is_spec), is_leaf=_is_index_or_spec)
        in_runs = [_is_index(spec) and self._context is not None and self._context in spec.keys for spec in specs]
        keys = [[x if _is_index(x) and run is kind else None for x, run in zip(leaves, in_runs, strict=True)]
                for kind in (False, True)]  # fmt: skip
        return self._structure.unflatten([None if _is_index(x) else x for x in leaves]), *keys

    def join(self, out: Any, whole: list[Any], in_runs: list[Any]) -> Any:
        """Returns the result that was split."""
        found = zip(self._structure.flatten_up_to(out), whole, in_runs, strict=True)
        return self._structure.unflatten([next((x for x in kinds if x is not None), None) for kinds in found])


def map_devices(function: Callable, mesh: AbstractMesh, in_specs: Any, out_specs: Any) -> Callable:
    """Wraps a function in a `shard_map` over all mesh axes but those of a surrounding one."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    free = frozenset(name for name, kind in kinds if kind != AxisType.Manual)
    # Replicated arrays are equal on all devices by construction, which need not be proved. Without the check kernels
    # may use references, which JAX refuses for arrays that it assumes may differ.
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=free, check_vma=False)


def reshard(x: Any, spec: PartitionSpec, mesh: AbstractMesh) -> Any:
    """Reshards an array to its spec if axes are explicit, which `shard_map` leaves to its caller."""
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if AxisType.Explicit not in kinds.values():
        return x
    named = PartitionSpec(*(name if kinds.get(name) == AxisType.Explicit else None for name in spec))
    return jax.sharding.reshard(x, NamedSharding(mesh, named))


def replicate(x: jax.Array) -> jax.Array:
    """Returns a replicated copy of an array: with explicit axes only such arrays can be indexed."""
    mesh = jax.typeof(x).sharding.mesh
    return x if mesh.empty else reshard(x, WHOLE, mesh)


def share(tree: Any, place: NamedSharding | None) -> Any:
    """Returns the arrays of a pytree whole on every device of `place`, so that each of several processes can read them.
    With None, as they are."""
    if place is None:
        return tree
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(replicate(x), place), tree)


def shard_shapes(pool: Pool) -> dict[str, Any]:
    """Returns the shapes of a pool that kernels get; each device's run if the tokens of blocks are divided."""
    shards = find_pool_mesh(pool)
    if shards is None or shards.context is None:
        return {"kv": pool.kv}
    count = shards.mesh.shape[shards.context]

    def shard_shape(x: jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*x.shape[:3], x.shape[3] // count, *x.shape[4:]), x.dtype)

    scale = {} if pool.scale is None else {"kv_scale": shard_shape(pool.scale)}
    return {"kv": shard_shape(pool.kv), "stripe": jax.ShapeDtypeStruct((2,), jnp.int32)} | scale


def enclosing_mesh(pool: Pool, axis: str) -> AbstractMesh | None:
    """Returns a pool's mesh inside a `shard_map` over the given axis; None anywhere else."""
    mesh = _find_mesh(pool)
    return mesh if mesh is not None and _is_manual(mesh, axis) else None


def _find_mesh(pool: Pool) -> AbstractMesh | None:
    axes = [("heads", pool.heads), ("context", pool.context)]
    if not any(axis for _, axis in axes):
        return None
    mesh = jax.typeof(pool.kv).sharding.mesh
    if mesh.empty:
        return None
    for name, axis in axes:
        if axis is not None and axis not in mesh.axis_names:
            raise ValueError(
                f"This cache was made for a mesh with the axis {axis!r}, but its pools lie on one with "
                f"{', '.join(map(repr, mesh.axis_names))}: make it for that mesh, jaxkv.init(config, mesh=..., "
                f"{name}=...)."
            )
    return mesh


def _is_manual(mesh: AbstractMesh, axis: str) -> bool:
    return dict(zip(mesh.axis_names, mesh.axis_types, strict=True))[axis] == AxisType.Manual


def _is_pool(x: Any) -> bool:
    return isinstance(x, Pool)


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def _is_index(x: Any) -> bool:
    return isinstance(x, IndexKeys)


def _is_index_or_spec(x: Any) -> bool:
    return _is_index(x) or _is_spec(x)


def _keep_whole(x: Any) -> Any:
    """Returns the specs of index keys, which belong to no head, as those of arrays that each device has all heads of;
    any other spec as it is."""
    if not _is_index(x):
        return x

    def keep(spec: PartitionSpec) -> PartitionSpec:
        return PartitionSpec(*(None if name in (KV, BLOCK_AXIS) else name for name in spec))

    return jax.tree.map(keep, x, is_leaf=_is_spec)


def _set_axis(axis: str | None, x: Any) -> Any:
    """Returns a pool with `axis` as its heads' axis; anything else as it is."""
    return dataclasses.replace(x, heads=axis) if _is_pool(x) else x
