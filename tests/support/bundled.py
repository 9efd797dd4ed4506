"""The model that comes with jaxkv; by day over scanned layers. It has five, all alike: a fifth to compile."""

import pathlib

import jax.numpy as jnp
from nightly import NIGHTLY

import jaxkv

FOLDER = pathlib.Path(jaxkv.__file__).parent / "data" / "small"


def small(*, dtype=jnp.float32, mesh=None):
    """As `jaxkv.models.small`."""
    return jaxkv.models.load(FOLDER, dtype=dtype, scan=not NIGHTLY, mesh=mesh)
