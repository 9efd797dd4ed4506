"""Whether Pallas's GPU interpreter is safe on the machine at hand."""

import os

import jax

THREADS = 4  # of XLA:CPU, with which the prefill kernel's threads have been seen to end every time


def check_interpreter_threads() -> None:
    """Raises RuntimeError where Pallas's GPU interpreter may wait for ever.

    A kernel's threads wait for each other inside callbacks, each of which holds a thread of XLA:CPU. Of those there are
    as many as cores or host devices; with two, one run in six of a longer prefill hung.
    """
    threads = max(count_cores(), len(jax.devices("cpu")))
    if threads < THREADS:
        raise RuntimeError(
            f"Pallas's GPU interpreter may wait for ever here, for XLA has {threads} threads and it wants {THREADS}: "
            f"call jax.config.update('jax_num_cpu_devices', {THREADS}) before JAX is first used, or start Python with "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={THREADS}."
        )


def count_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
