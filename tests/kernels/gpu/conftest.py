"""Run the GPU kernels natively where there is a GPU, and else in Pallas's interpreter with race detection."""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

from pallas_kernels.gpu import tuning
from pallas_kernels.gpu.tiles import Tile


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


@pytest.fixture
def small_plans(monkeypatch):
    """Few thread blocks, which the interpreter runs one after another, and slots that are soon used again."""
    decode = tuning.DecodePlan(Tile(tokens=64, stages=2), num_blocks=6)
    monkeypatch.setattr(tuning, "decode_plan", lambda head_dim, columns: decode)
    prefill = tuning.PrefillPlan(Tile(tokens=64, stages=2))
    monkeypatch.setattr(tuning, "prefill_plan", lambda head_dim, block_size: prefill)
