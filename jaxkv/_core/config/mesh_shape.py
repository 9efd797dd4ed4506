"""The devices of a pytree, and the axes of their mesh."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxkv._core.config.validation import show

HEADS = "model"  # the default mesh axis for heads
CONTEXT = "context"  # the mesh axis for the tokens of blocks


def check_mesh(mesh: Any) -> Mesh:
    """Returns a mesh. Raises ValueError for anything else."""
    if not isinstance(mesh, Mesh):
        raise ValueError(f"mesh must be a jax.sharding.Mesh, as jax.make_mesh makes it, not {show(mesh)}.")
    return mesh


def find_mesh(tree: Any, axis: str = HEADS) -> Mesh | None:
    """Returns the first mesh with that axis among those of a pytree's arrays."""
    for x in jax.tree.leaves(tree):
        sharding = getattr(x, "sharding", None)
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh) and axis in sharding.mesh.axis_names:
            return sharding.mesh
    return None


def model_mesh(model: Any) -> Mesh | None:
    """Returns the mesh that a model is divided over by heads or contexts; None if there is none."""
    return find_mesh(model) or find_mesh(model, CONTEXT)


def context_axis(mesh: Mesh | None) -> str | None:
    """Returns the mesh axis for contexts, if the mesh has one."""
    return CONTEXT if mesh is not None and CONTEXT in mesh.axis_names else None


def find_placement(tree: Any) -> Sharding | None:
    """Returns the sharding that replicates arrays over a pytree's devices; None for a mesh without the axes."""
    if (mesh := model_mesh(tree)) is not None:
        return NamedSharding(mesh, PartitionSpec())
    placed = (x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array) and x.committed)
    devices = next(placed, jnp.zeros(())).sharding.device_set
    return SingleDeviceSharding(*devices) if len(devices) == 1 else None
