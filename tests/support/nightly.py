"""Whether the tests run by night, when what takes long is done in full: the environment variable JAXKV_NIGHTLY=1."""

import importlib.util
import os

import pytest

NIGHTLY = os.environ.get("JAXKV_NIGHTLY") == "1"


def skip_by_day(reason):
    """Marks a test, or a case of one, that is left out by day: `reason` says what is tried by day instead."""
    return pytest.mark.skipif(not NIGHTLY, reason=reason)


def is_named(case, args, root):
    """Tells whether arguments of pytest name a case or its test, by a path from here or from anywhere: then it runs by
    day too, so that a planted mistake is noticed by whatever its test tries."""
    return any(os.path.relpath(arg, root) in (case, case.partition("[")[0]) for arg in args)


def compiles_for_cpus() -> bool:
    """Tells whether this process compiles for CPUs alone: nothing else is installed, or JAX_PLATFORMS says so."""
    others = "libtpu", "jax_cuda13_plugin", "jax_cuda12_plugin"
    return os.environ.get("JAX_PLATFORMS") == "cpu" or not any(map(importlib.util.find_spec, others))
