"""Shards a decoder's parameters over the devices of a mesh.

Attention and mixers are sharded by heads or channels, an MLP and each expert by its hidden width, the vocabulary by its
entries. Each layer has two sums over devices, after attention or a mixer, and after the MLP or the experts. This is the
partitioning of Megatron-LM (https://arxiv.org/abs/1909.08053).
"""

from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxkv._core.config.mesh_shape import HEADS, check_mesh

AXIS = HEADS
# The sharded axis of each parameter, counted from the last, since layers may be stacked in front. Norms and routers are
# replicated.
ATTENTION = {
    "query": -3, "query_bias": -2, "query_up": -3, "key": -3, "key_bias": -2, "value": -3, "value_bias": -2,
    "key_up": -3, "value_up": -3, "out": -3, "sinks": -1, "gate": -3, "head_gate": -2, "out_down": -3, "out_up": -1,
}  # fmt: skip
MIXER = {
    "query": -2, "key": -2, "value": -2, "query_conv": -2, "key_conv": -2, "value_conv": -2, "decay": -2,
    "decay_bias": -1, "log_decay": -1, "beta": -2, "gate": -2, "project": -2, "project_bias": -1, "conv": -2,
    "conv_bias": -1, "step_bias": -1, "skip": -1, "out": -2,
}  # fmt: skip
MLP = {"gate": -2, "gate_bias": -1, "up": -2, "up_bias": -1, "down": -1}
EXPERTS = {"gate": -1, "gate_bias": -1, "up": -1, "up_bias": -1, "down": -2}
TABLES = {"embed": -2, "head": -2}
DIVIDED = {
    "layer_embed": {"embed": -2}, "attention": ATTENTION, "mixer": MIXER, "mlp": MLP, "shared": MLP, "experts": EXPERTS,
}  # fmt: skip


def automatic(mesh: Any) -> Mesh:
    """Returns the mesh with automatic axes: the compiler shards the computation over them.

    Raises:
      ValueError: the argument is no mesh.
    """
    mesh = check_mesh(mesh)
    return Mesh(mesh.devices, mesh.axis_names)


def sharding_of(path: tuple, shape: tuple[int, ...], mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Returns the sharding of the parameter at `path` of a decoder; replicated if it cannot be divided evenly."""
    axis = TABLES.get(path[0]) if len(path) == 1 else DIVIDED.get(path[-2], {}).get(path[-1])
    spec: list[str | None] = [None] * len(shape)
    if axis is not None and AXIS in mesh.axis_names and shape[axis] % mesh.shape[AXIS] == 0:
        spec[axis] = AXIS
    return NamedSharding(mesh, PartitionSpec(*spec))


def mesh_of_weights(x: jax.Array) -> AbstractMesh | None:
    """Returns a parameter's mesh, if the compiler is to shard the computation over its axis `AXIS`; else None."""
    mesh = jax.typeof(x).sharding.mesh
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return mesh if kinds.get(AXIS) == AxisType.Auto and mesh.shape[AXIS] > 1 else None
