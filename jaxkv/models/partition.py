"""How a decoder's parameters are divided over the devices of a mesh.

Attention is divided by heads, an MLP and each expert by its hidden width, the vocabulary by its entries. There are then
two sums over devices a layer, behind attention and behind the MLP or the experts. The division is that of Megatron-LM
(https://arxiv.org/abs/1909.08053).
"""

from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxkv._core.config.mesh_shape import HEADS
from jaxkv._core.config.validation import shown

AXIS = HEADS
# What is divided of each parameter, counted from its last axis, for layers may be stacked in front. Norms and routers
# are whole on each device.
ATTENTION = {
    "query": -3, "query_bias": -2, "query_up": -3, "key": -3, "key_bias": -2, "value": -3, "value_bias": -2,
    "key_up": -3, "value_up": -3, "out": -3, "sinks": -1,
}  # fmt: skip
MLP = {"gate": -2, "gate_bias": -1, "up": -2, "up_bias": -1, "down": -1}
EXPERTS = {"gate": -1, "gate_bias": -1, "up": -1, "up_bias": -1, "down": -2}
TABLES = {"embed": -2, "head": -2}
DIVIDED = {"attention": ATTENTION, "mlp": MLP, "shared": MLP, "experts": EXPERTS}


def automatic(mesh: Any) -> Mesh:
    """The mesh with axes over which the compiler divides what is computed.

    Raises:
      ValueError: it is no mesh.
    """
    if not isinstance(mesh, Mesh):
        raise ValueError(f"mesh must be a jax.sharding.Mesh, as jax.make_mesh makes it, not {shown(mesh)}.")
    return Mesh(mesh.devices, mesh.axis_names)


def sharding_of(path: tuple, shape: tuple[int, ...], mesh: Mesh | AbstractMesh) -> NamedSharding:
    """How the parameter at `path` of a decoder lies; whole on each device where it cannot be divided evenly."""
    axis = TABLES.get(path[0]) if len(path) == 1 else DIVIDED.get(path[-2], {}).get(path[-1])
    spec: list[str | None] = [None] * len(shape)
    if axis is not None and AXIS in mesh.axis_names and shape[axis] % mesh.shape[AXIS] == 0:
        spec[axis] = AXIS
    return NamedSharding(mesh, PartitionSpec(*spec))


def mesh_of_weights(x: jax.Array) -> AbstractMesh | None:
    """The mesh that a parameter lies on, if the compiler is to divide what is computed over its axis `AXIS`."""
    mesh = jax.typeof(x).sharding.mesh
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return mesh if kinds.get(AXIS) == AxisType.Auto and mesh.shape[AXIS] > 1 else None
