"""Strict settings for every test: no implicit dtype or rank promotion, and several virtual CPU devices."""

import atexit
import os
import pathlib
import shutil
import tempfile

from nightly import NIGHTLY

# Most of the time went into the machine code of small programs that run once. By day LLVM does little for it; what is
# fused, aliased and copied, which tests read from compiled programs, XLA decides before. By night nothing is spared.
# What is given from outside comes later, and wins.
if not NIGHTLY:
    os.environ["XLA_FLAGS"] = (
        "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true " + os.environ.get("XLA_FLAGS", "")
    )
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"

import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# The same small programs are compiled by many tests, and by several processes. By day what one has compiled in this run
# the others read back; an entry that another process is still writing cannot be read, and is compiled.
PROGRAMS = "JAXKV_TEST_PROGRAMS"
if not NIGHTLY:
    if PROGRAMS not in os.environ:
        os.environ[PROGRAMS] = tempfile.mkdtemp(prefix="jaxkv-programs-")
        atexit.register(shutil.rmtree, os.environ[PROGRAMS], ignore_errors=True)
    jax.config.update("jax_compilation_cache_dir", os.environ[PROGRAMS])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

MAPS = pathlib.Path("/proc/self/maps")
MANY_MAPS = 20_000


def pytest_runtest_teardown(item, nextitem):
    """Let go of compiled programs once there are many. Each takes some thirty memory maps, of which Linux allows a
    process 65,530: without this, XLA crashes in a worker that has run most of the tests. Until then a file is served
    what the files before it compiled."""
    last = nextitem is None or nextitem.path != item.path
    if last and (not MAPS.exists() or MAPS.read_bytes().count(b"\n") > MANY_MAPS):
        jax.clear_caches()
