"""Programs that are traced here for another platform."""

import jax
from jax.sharding import AbstractDevice, AbstractMesh


def trace_for(platform):
    """Programs traced under this mesh are for another platform."""
    device = AbstractDevice(device_kind=platform, num_cores=None, platform=platform)
    return jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device))
