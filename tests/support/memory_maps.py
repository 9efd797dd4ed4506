"""Lets go of compiled programs once there are many.

Each takes some thirty memory maps, of which Linux allows a process 65,530: without this, XLA crashes in a process that
has run most of the tests.
"""

import gc
import pathlib

import jax

MAPS = pathlib.Path("/proc/self/maps")
MANY_MAPS = 30_000


def forget_many_programs() -> None:
    if not MAPS.exists() or MAPS.read_bytes().count(b"\n") > MANY_MAPS:
        gc.unfreeze()
        jax.clear_caches()
