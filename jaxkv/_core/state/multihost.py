"""Several processes that run one program: messages between them, and arrays on the devices of all.

Messages go through the key-value store of JAX's coordinator, not through devices, so that they arrive even if the
processes' programs differ, which is the fault to detect.
"""

import collections
import functools
import hashlib
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jaxkv._core.config.validation import is_tracing
from jaxkv._core.state.jax_internals import find_process_state

PATIENCE = 60  # seconds until the other processes must make the same call

_counts: collections.defaultdict[str, Iterator[int]] = collections.defaultdict(itertools.count)


def coordinator_store() -> Any:
    """Returns the coordinator's key-value store; None in a single process."""
    return find_process_state().client


def list_processes(mesh: Mesh) -> list[int]:
    """Returns the processes that own a mesh's devices."""
    return sorted({device.process_index for device in mesh.devices.flat})


def find_shared_placement(mesh: Mesh | None) -> NamedSharding | None:
    """Returns the sharding of arrays that are whole on all devices of a mesh of several processes; None for any other
    mesh."""
    return NamedSharding(mesh, PartitionSpec()) if mesh is not None and len(list_processes(mesh)) > 1 else None


def exchange(what: str, said: str, processes: Iterable[int]) -> list[str]:
    """Exchanges messages among processes, and returns them in order. All of them, this one included, must call this.

    Raises:
      RuntimeError: one process did not call this in time, or there is no coordinator.
      ValueError: this process is not among them.
    """
    processes, client = list(processes), coordinator_store()
    if client is None:
        raise RuntimeError(
            f"{what} is for processes that know each other: call jaxkv.distributed.initialize() first in each."
        )
    if jax.process_index() not in processes:
        raise ValueError(
            f"{what} is for {_name_processes(processes)}, on whose devices the mesh lies, but this is process "
            f"{jax.process_index()}: give it a mesh with devices of its own, or leave it out."
        )
    group = f"{what} of {','.join(map(str, processes))}"
    number, me = next(_counts[group]), jax.process_index()

    def key(number: int, process: int) -> str:
        return f"jaxkv/{group}/{number}/{process}"

    client.key_value_set(key(number, me), f".{said}")  # there are no empty values
    if number > 1:  # every process that sent the next message has read this one
        client.key_value_delete(key(number - 2, me))
    heard = []
    for process in processes:
        try:
            heard.append(client.blocking_key_value_get(key(number, process), PATIENCE * 1000)[1:])
        except Exception as error:
            raise RuntimeError(
                f"Process {process} did not come to {what} within {PATIENCE} s: all processes must run the same "
                "program, and this one waited for it."
            ) from error
    return heard


def check_agreement(what: str, said: str, processes: Iterable[int]) -> None:
    """Raises ValueError in every process unless all pass the same text."""
    processes = list(processes)
    heard = exchange(what, hashlib.blake2b(said.encode(), digest_size=16).hexdigest(), processes)
    if others := [p for p, x in zip(processes, heard, strict=True) if x != heard[0]]:
        raise ValueError(
            f"All processes must call {what} with the same arguments, but those of {_name_processes(others)} are not "
            f"those of process {processes[0]}: give each the same."
        )


def put_replicated(tree: Any, sharding: Sharding | None) -> Any:
    """Puts the arrays of a pytree, equal in all processes, on the devices of all, without communication. With None they
    are put where JAX puts arrays."""
    if sharding is None or sharding.is_fully_addressable or is_tracing():
        return jax.device_put(tree, sharding)

    def put(x: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    return jax.tree.map(put, jax.tree.map(np.asarray, tree))


def place_like(x: Any, own: Any) -> Any:
    """Returns `x` on the devices of the array `own`, committed only if `own` is.

    A compiled step then takes arrays made from `x` like those made from `own`.

    Traced arrays, whose devices are unknown, move to device memory.
    """
    if any(isinstance(y, jax.core.Tracer) for y in (x, own)):
        is_there = jax.typeof(x).memory_space == jax.memory.Space.Device
        return x if is_there else jax.device_put(x, jax.memory.Space.Device)
    if getattr(own, "committed", False):  # NumPy arrays are not
        is_there = isinstance(x, jax.Array) and x.committed and x.sharding.device_set == own.sharding.device_set
        if is_there and own.sharding.is_fully_replicated and own.sharding.is_fully_addressable:
            is_there = x.sharding.is_fully_replicated  # of explicit axes nothing is gathered by itself
        return jax.device_put(x, jax.memory.Space.Device) if is_there else put_replicated(x, own.sharding)
    # A committed array stays committed wherever JAX puts it, unless it goes through the host.
    return jax.device_put(np.asarray(x)) if isinstance(x, np.ndarray) or x.committed else x


def read_local_shards(tree: Any) -> Any:
    """Returns the arrays of a pytree on the host: of those on devices of several processes what this one has."""
    if is_local(tree):
        return jax.device_get(tree)

    def read(x: Any) -> np.ndarray:
        if not _is_divided(x):
            return np.asarray(x)
        local = None
        for shard in x.addressable_shards:
            shape, place = _find_place(shard.index, x.sharding, x.shape)
            local = np.empty(shape, x.dtype) if local is None else local
            local[place] = shard.data
        assert local is not None  # this process has a device of them
        return local

    return jax.tree.map(read, tree)


def read_whole(tree: Any) -> Any:
    """Returns the arrays of a pytree on the host, whole in every process. Those that no process has whole are gathered:
    then all processes must call this."""
    if is_local(tree):
        return jax.device_get(tree)

    leaves, structure = jax.tree.flatten(tree)
    divided = [i for i, x in enumerate(leaves) if _is_divided(x)]
    if divided:
        gather = _gather_on(NamedSharding(leaves[divided[0]].sharding.mesh, PartitionSpec()))
        for i, whole in zip(divided, gather([leaves[i] for i in divided]), strict=True):
            leaves[i] = whole
    return jax.tree.unflatten(structure, map(np.asarray, leaves))


def _is_divided(x: Any) -> bool:
    """Tells whether no process has all of an array."""
    return isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated)


@functools.lru_cache(maxsize=8)
def _gather_on(sharding: NamedSharding) -> Any:
    """Returns a program that lays arrays out by `sharding`: one for all calls, so that it is compiled once."""
    return jax.jit(lambda arrays: arrays, out_shardings=sharding)


def put_local_shards(tree: Any, own: Any) -> Any:
    """Returns blocks `[n, ...]`, as `read_local_shards` returned them, on the devices of those in `own`, which have
    the same shapes. What is there already, or whole in every process, stays as it is."""
    if is_local(own):
        return tree

    def put(local: Any, x: jax.Array) -> Any:
        if isinstance(local, jax.Array) or x.is_fully_replicated:
            return local
        shape = (local.shape[0], *x.shape[1:])
        return jax.make_array_from_callback(
            shape, x.sharding, lambda index: local[_find_place(index, x.sharding, shape)[1]]
        )

    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, map(put, leaves, jax.tree.leaves(own)))


def _find_place(index: Any, sharding: Sharding, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[slice, ...]]:
    """Returns the shape of all shards that this process has of an array, and where the shard `index` is in it."""
    local_shape, place = [], []
    shards = sharding.addressable_devices_indices_map(shape).values()
    for axis, size in enumerate(shape):
        ranges = sorted({s[axis].indices(size)[:2] for s in shards if s is not None})
        first, width = ranges.index(index[axis].indices(size)[:2]), ranges[0][1] - ranges[0][0]
        local_shape.append(len(ranges) * width)
        place.append(slice(first * width, (first + 1) * width))
    return tuple(local_shape), tuple(place)


def is_local(tree: Any) -> bool:
    """Tells whether all arrays of a pytree are on devices of this process."""
    return all(x.is_fully_addressable for x in jax.tree.leaves(tree) if isinstance(x, jax.Array))


def check_local(tree: Any, function: str) -> None:
    """Raises ValueError unless all arrays are in this process, as `function`, which moves blocks, requires."""
    if not is_local(tree):
        raise ValueError(
            f"{function} takes caches on devices of one process, but this one lies on those of others too: save and "
            "load move its rows."
        )


def _name_processes(processes: list[int]) -> str:
    return f"process{'es' if len(processes) > 1 else ''} {', '.join(map(str, processes))}"
