"""Strict settings for every test: no implicit dtype or rank promotion, and several virtual CPU devices."""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"

import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_runtest_teardown(item, nextitem):
    """Let go of compiled programs after each file. Each takes some thirty memory maps, of which Linux allows a process
    65,530: without this, XLA crashes in a worker that has run most of the tests."""
    if nextitem is None or nextitem.path != item.path:
        jax.clear_caches()
