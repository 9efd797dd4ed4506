"""How a decoder's parameters are divided over the devices of a mesh.

Attention is divided by heads, an MLP by its hidden width, the vocabulary by its entries. The compiler then needs two
sums over devices a layer, behind attention and behind the MLP. The division is that of Megatron-LM
(https://arxiv.org/abs/1909.08053).
"""

from typing import Any

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxkv._core.numbers import shown

AXIS = "model"
# What is divided of each parameter, counted from its last axis, for layers may be stacked in front. Experts and norms
# are whole on each device.
ATTENTION = {
    "query": -2, "query_bias": -2, "query_up": -2, "key": -2, "key_bias": -2, "value": -2, "value_bias": -2,
    "up": -2, "out": -3, "sinks": -1,
}  # fmt: skip
MLP = {"gate": -2, "gate_bias": -1, "up": -2, "up_bias": -1, "down": -1}
TABLES = {"embed": -2, "head": -2}
DIVIDED = {"attention": ATTENTION, "mlp": MLP, "shared": MLP}


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
