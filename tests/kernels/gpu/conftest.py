"""Run the GPU kernels natively where there is a GPU, and else in Pallas's interpreter with race detection."""

import pathlib
import sys

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

sys.path.append(str(pathlib.Path(__file__).parents[3] / "benchmarks"))


@pytest.fixture
def interpret():
    """What to pass to the kernels; the test fails if they raced."""
    if jax.default_backend() == "gpu":
        yield None
        return
    interpret_pallas_call.reset_gpu_interpret_mode_state()
    # Each bulk copy gets a clock of its own, or copies in flight together look ordered.
    yield plgpu.InterpretGPUParams(detect_races=True, num_tma_threads_per_device=64)
    try:
        races = interpret_pallas_call.get_races()
        assert races is None or not races.races_found, "the kernels raced"
    finally:
        interpret_pallas_call.reset_gpu_interpret_mode_state()
