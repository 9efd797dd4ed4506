"""Where there are fewer devices than the four virtual ones of a CPU, tests that want more are skipped."""

import math
from typing import Any

import jax
import pytest

MOST = 4  # devices that a test wants


class Devices(list):
    """Devices of which no more may be taken than there are."""

    def __getitem__(self, which: Any) -> Any:
        wanted = which.stop or 0 if isinstance(which, slice) else which + 1
        if wanted > len(self):
            pytest.skip(f"needs {wanted} devices, and here {'is' if len(self) == 1 else 'are'} {len(self)}")
        return super().__getitem__(which)


def skip_tests_of_more(patch: pytest.MonkeyPatch) -> None:
    """Lets `jax.devices()` and `jax.make_mesh` skip the test that asks them for more devices than there are."""
    devices, make_mesh = jax.devices, jax.make_mesh

    def make_small_mesh(axis_shapes, axis_names, *args, **kwargs):
        if kwargs.get("devices") is None:
            Devices(devices())[: math.prod(axis_shapes)]
        return make_mesh(axis_shapes, axis_names, *args, **kwargs)

    patch.setattr(jax, "devices", lambda *args, **kwargs: Devices(devices(*args, **kwargs)))
    patch.setattr(jax, "make_mesh", make_small_mesh)
