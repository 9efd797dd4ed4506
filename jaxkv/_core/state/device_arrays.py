"""Splits arrays into the shards of a mesh axis, and joins such shards, outside `jit`. Nothing is copied: an array over
several devices consists of one array per device."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxkv._core.config.mesh_shape import find_mesh
from jaxkv._core.state.multihost import list_processes

AXIS = "data"  # the mesh axis for rows


def take_shard(x: jax.Array, i: int, *, mesh: Mesh, axis: str) -> jax.Array:
    """Returns the i-th shard of an array along a mesh axis, as an array on the rest of the mesh: a slice of the first
    axis if that is divided over the mesh axis, else the replica."""
    sharding = x.sharding
    assert isinstance(sharding, NamedSharding)
    names = [name for name in mesh.axis_names if name != axis]
    at = mesh.axis_names.index(axis)
    devices = np.take(mesh.devices, [i], axis=at).squeeze(at)
    divided = tuple(sharding.spec[:1]) == (axis,)
    place: Sharding
    if names:
        kinds = tuple(k for name, k in zip(mesh.axis_names, mesh.axis_types, strict=True) if name != axis)
        spec = PartitionSpec(None, *sharding.spec[1:]) if divided else sharding.spec
        place = NamedSharding(Mesh(devices, names, axis_types=kinds), spec)
    else:
        place = SingleDeviceSharding(devices.item())
    shape = (x.shape[0] // mesh.shape[axis], *x.shape[1:]) if divided else x.shape
    shards = {shard.device: shard.data for shard in x.addressable_shards}
    return _assemble(shape, place, devices, shards)


def _assemble(shape: tuple[int, ...], place: Sharding, devices: np.ndarray, shards: dict[Any, jax.Array]) -> jax.Array:
    """Returns an array of what this process has of it on some of the devices."""
    return jax.make_array_from_single_device_arrays(shape, place, [shards[d] for d in devices.flat if d in shards])


def abstract_array(x: jax.Array) -> jax.ShapeDtypeStruct:
    """Returns what programs are compiled for of an array: its shape, dtype and sharding."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def join_shards(shards: Sequence[jax.Array], sharding: NamedSharding) -> jax.Array:
    """Joins shards, as `take_shard` returns them, along the first axis; numbers become an array of one per shard."""
    pieces = [piece.data for shard in shards for piece in shard.addressable_shards]
    if shards[0].ndim == 0:
        pieces = [jax.device_put(np.asarray(x)[None], x.sharding) for x in pieces]
        shape: tuple[int, ...] = (len(shards),)
    else:
        shape = (sum(shard.shape[0] for shard in shards), *shards[0].shape[1:])
    return jax.make_array_from_single_device_arrays(shape, sharding, pieces)


def split_model(model: Any, axis: str = AXIS) -> list[Any]:
    """Returns a model's replica for each device of the mesh axis for rows that this process has; the model itself if
    there is no such axis, or it has one device.

    Raises:
      ValueError: a parameter is divided over the axis.
    """
    model = take_local_model(model, axis)
    mesh = find_mesh(model, axis)
    if mesh is None or mesh.shape[axis] == 1:
        return [model]

    def take(x: Any, i: int) -> Any:
        if not (isinstance(x, jax.Array) and isinstance(x.sharding, NamedSharding)):
            return x
        _check_whole(x, axis)
        return take_shard(x, i, mesh=mesh, axis=axis)

    return [jax.tree.map(lambda x, i=i: take(x, i), model) for i in range(mesh.shape[axis])]


def take_local_model(model: Any, axis: str = AXIS) -> Any:
    """Returns a model of several processes as it is on this process's shards of the axis for rows; the model itself if
    all of it is here, or there is no such axis.

    Raises:
      ValueError: shards have different processes beside this one; a parameter is divided over the axis.
    """
    mesh = find_mesh(model, axis)
    if mesh is None or mesh.shape[axis] == 1 or list_processes(mesh) == [jax.process_index()]:
        return model
    own = _local_shards(mesh, axis)
    here = Mesh(
        np.take(mesh.devices, own, axis=mesh.axis_names.index(axis)), mesh.axis_names, axis_types=mesh.axis_types
    )

    def localize(x: Any) -> Any:
        if not (isinstance(x, jax.Array) and isinstance(x.sharding, NamedSharding)):
            return x
        _check_whole(x, axis)
        shards = {shard.device: shard.data for shard in x.addressable_shards}
        place = NamedSharding(here, x.sharding.spec)
        return _assemble(x.shape, place, here.devices, shards)

    return jax.tree.map(localize, model)


def count_model_shards(model: Any, axis: str = AXIS) -> int:
    """Returns the number of models that `split_model` makes. Raises ValueError if this process has none."""
    mesh = find_mesh(model, axis)
    return 1 if mesh is None or mesh.shape[axis] == 1 else len(_local_shards(mesh, axis))


def _local_shards(mesh: Mesh, axis: str) -> list[int]:
    """Returns the shards of the axis that this process has to itself, or together with the same other processes."""
    devices = np.moveaxis(mesh.devices, mesh.axis_names.index(axis), 0).reshape(mesh.shape[axis], -1)
    owners = [{device.process_index for device in shard} for shard in devices]
    own = [i for i, processes in enumerate(owners) if jax.process_index() in processes]
    if any(owners[i] != owners[own[0]] for i in own):
        raise ValueError(
            f"Process {jax.process_index()} shares parts of the mesh axis {axis!r} with different processes, and an "
            "Engine is of the same ones in all its parts: let the devices of each part be of one process, or all parts "
            "of the same ones."
        )
    return own


def _check_whole(x: jax.Array, axis: str) -> None:
    spec = x.sharding.spec  # type: ignore[attr-defined]
    if axis in jax.tree.leaves(tuple(spec)):
        raise ValueError(
            f"Rows are divided over the mesh axis {axis!r}, but so is a parameter of the model, {spec}: parameters "
            "must be whole on each of its devices."
        )


def delete(tree: Any) -> None:
    """Frees the memory of all arrays in a pytree, even if they are still referenced."""
    for x in jax.tree.leaves(tree):
        if isinstance(x, jax.Array) and not x.is_deleted():
            x.delete()
