"""The platform that a program is lowered for."""

from typing import Any

import jax

GPUS = ("cuda", "rocm")


def current_platform() -> str:
    """Returns what a program traced now is lowered for, if it does not say: the mesh's platform, else the default."""
    device = find_described_device()
    return read_name(device.platform if device is not None else jax.default_backend())


def find_described_device() -> Any:
    """Returns the device that the mesh of a program traced now describes; None if it does not."""
    return getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)


def is_for_gpu() -> bool:
    """Tells whether a program traced now is lowered for a GPU: a loop of XLA's launches each of its kernels anew there,
    in each of its steps, so that it should have few."""
    return current_platform() in GPUS


def read_name(platform: Any) -> Any:
    """Returns the name here of a platform that JAX has two names for."""
    return "cuda" if platform == "gpu" else platform
