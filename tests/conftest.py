"""Strict settings for every test: no implicit dtype or rank promotion, and several virtual CPU devices."""

import gc
import os
import pathlib

from nightly import NIGHTLY, compiles_for_cpus, is_named

# Most of the time went into the machine code of small programs that run once. By day LLVM does little for it; what is
# fused, aliased and copied, which tests read from compiled programs, XLA decides before. Nor is a program cut into
# parts for threads, when all cores have a process of tests. By night nothing is spared, nor where an accelerator's
# plug-in may compile by these flags too. What is given from outside comes later, and wins.
if not NIGHTLY and compiles_for_cpus():
    spared = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    os.environ["XLA_FLAGS"] = f"{spared} --xla_cpu_parallel_codegen_split_count=1 {os.environ.get('XLA_FLAGS', '')}"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
if not NIGHTLY:
    gc.disable()  # until all is imported

import jax
import pytest
from few_devices import MOST, skip_tests_of_more
from memory_maps import forget_many_programs

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

BY_NIGHT = pathlib.Path(__file__).parent / "by_night.txt"


@pytest.hookimpl(tryfirst=True)  # before -k and -m leave some out
def pytest_collection_modifyitems(config, items):
    """Leaves out by day what `by_night.txt` lists: cases that take long, of tests of which others run by day."""
    if NIGHTLY:
        return
    listed, there = set(BY_NIGHT.read_text().splitlines()), {item.nodeid for item in items}
    files = {item.nodeid.partition("::")[0] for item in items if "::" not in "".join(config.args)}
    if gone := sorted(case for case in listed - there if case.partition("::")[0] in files):
        raise pytest.UsageError(f"{BY_NIGHT.name} lists tests that are not there: {', '.join(gone[:5])}")
    for item in items:
        if item.nodeid in listed and not is_named(item.nodeid, config.args, config.rootpath):
            item.add_marker(pytest.mark.skip(reason="by day cheaper cases of this test run"))


def pytest_collection_finish():
    """What is imported stays. What tracing makes is in no cycles; by day Python looks for some now and then."""
    if not NIGHTLY:
        gc.freeze()
        gc.set_threshold(50_000, 10, 10)
        gc.enable()


@pytest.hookimpl(trylast=True)  # when what the file's tests share is gone
def pytest_runtest_teardown(item, nextitem):
    """Until there are many programs a file is served what the files before it compiled. By day Python does not look
    for cycles in that: waiting threads ask it to look, each time seconds long in what thousands of tests have left."""
    if nextitem is None or nextitem.path != item.path:
        forget_many_programs()
        if not NIGHTLY:
            gc.collect()
            gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def few_devices():
    """On one GPU, say, tests that want several devices are skipped."""
    with pytest.MonkeyPatch.context() as patch:
        if len(jax.devices()) < MOST:
            skip_tests_of_more(patch)
        yield


@pytest.fixture(scope="module")
def rows_in_tiles():
    """XLA reads the rows of this file's little caches in tiles, in a loop, as it does with longer ones."""
    from cases import use_sizes

    with pytest.MonkeyPatch.context() as patch:
        use_sizes(patch, at_once_bytes=0)
        jax.clear_caches()  # what was compiled before does otherwise
        yield
    jax.clear_caches()


@pytest.fixture
def traced_anew():
    """Programs are traced as the test has set things, and nobody else gets them."""
    jax.clear_caches()
    yield
    jax.clear_caches()
