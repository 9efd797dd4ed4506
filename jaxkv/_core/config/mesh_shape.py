"""On which devices a pytree lies, and by which axes of their mesh."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

HEADS = "model"  # the axis of a model's mesh for heads, unless it is said
CONTEXT = "context"  # and that for the tokens of blocks


def mesh_of(tree: Any, axis: str = HEADS) -> Mesh | None:
    """The first mesh with that axis that any of the arrays of a pytree lies on."""
    for x in jax.tree.leaves(tree):
        sharding = getattr(x, "sharding", None)
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh) and axis in sharding.mesh.axis_names:
            return sharding.mesh
    return None


def model_mesh(model: Any) -> Mesh | None:
    """The mesh that a model is divided over, by its heads or its contexts; None if it is not."""
    return mesh_of(model) or mesh_of(model, CONTEXT)


def context_axis(mesh: Mesh | None) -> str | None:
    """The axis that a model's mesh has for contexts, if it has one."""
    return CONTEXT if mesh is not None and CONTEXT in mesh.axis_names else None


def place_of(tree: Any) -> Sharding | None:
    """Where what every device is to have goes, to lie with a pytree; None if that lies on a mesh without the axis."""
    if (mesh := model_mesh(tree)) is not None:
        return NamedSharding(mesh, PartitionSpec())
    placed = (x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array) and x.committed)
    devices = next(placed, jnp.zeros(())).sharding.device_set
    return SingleDeviceSharding(*devices) if len(devices) == 1 else None
