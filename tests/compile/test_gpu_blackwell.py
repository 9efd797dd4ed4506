"""What the compiler makes of the GPU kernels for Blackwell, which multiply by warps; and their products run in NumPy.

Needs the extra `compile`, as test_gpu_compile.py does. "b200" has a Hopper GPU's shared memory, "rtx" less than half.
"""

import pytest
from nightly import NIGHTLY, skip_by_day
from test_gpu_compile import (
    DECODE_BUDGETS,
    LATENT,
    PREFILL,
    QUANTISED,
    STATES,
    printed_by,
    pytestmark as pytestmark,
)

from pallas_kernels.gpu.chips import SHARED_MEMORY

CAPABILITIES = {"b200": "10.0", "rtx": "12.0"}
ATTENTION = {"b200": ["step"]}
CHUNKS: list[str] = []
if NIGHTLY:
    wide = [name for name in QUANTISED if name.startswith(("gemma2", "192"))]  # heads of 256 and 192 in 8 bits and 4
    fit = {*DECODE_BUDGETS, *PREFILL, *QUANTISED} - {*wide}
    small = sorted(name for name in fit if "512" not in name and "320" not in name)
    ATTENTION = {"b200": [*DECODE_BUDGETS, *PREFILL, *QUANTISED, *LATENT], "rtx": small}
    CHUNKS = ["qwen3-next-chunks", "kimi-linear-chunks", "nemotron-h-prompts", "granite-4-prompts"]
CASES = [(chip, name) for chip, names in ATTENTION.items() for name in names]
# Bytes that are spilled, at most. With a gate a channel each thread has 255 registers and wants more.
SPILLED = {"kimi-linear-chunks": 900, "kimi-linear-prompts": 900, "512-all": 100}
FEW = 80
PRODUCTS = ["memory, transposed", "registers, memory"]
CONTROLS = ["columns", "lines", "spans", "parts"]
if NIGHTLY:
    PRODUCTS += ["memory, memory", "transposed, memory", "transposed, transposed", "registers, transposed"]
    PRODUCTS += ["8 columns", "24 columns", "256 columns", "256 columns, registers", "float16"]


@pytest.fixture(scope="module")
def report():
    """Everything that gpu_compile_states.py prints, by job. A process compiles for one chip: JAX remembers which."""
    jobs = [f"attention:{name}" for name in ATTENTION["b200"]] + [f"products:{name}" for name in PRODUCTS] + CHUNKS
    jobs += [*STATES, *(f"products:control: {name}" for name in CONTROLS)] if NIGHTLY else []
    jobs += ["attention:control-released-early"]
    found = printed_by("gpu_compile_states.py", *(f"b200:{job}" for job in jobs))
    if NIGHTLY:
        jobs = [f"attention:{name}" for name in ATTENTION["rtx"]] + [*STATES]
        found += printed_by("gpu_compile_states.py", *(f"rtx:{job}" for job in jobs))
    return {name: found for job in found for name, found in job.items()}


def check_kernel(kernel, chip, spilled):
    assert kernel["target"] == f"sm_{CAPABILITIES[chip].replace('.', '')}a"
    assert kernel["spills"] <= spilled and kernel["wgmma"] == 0 and not kernel["misaligned"]
    assert kernel["shared_memory"] <= SHARED_MEMORY[CAPABILITIES[chip]]


@pytest.mark.parametrize(("chip", "name"), CASES)
def test_attention(chip, name, report):
    """Next to nothing is spilled, all fits, and products are those of warps."""
    kernels = {k: x for k, x in report[f"{chip}:attention:{name}"].items() if isinstance(x, dict)}
    assert "paged_decode_plan" in kernels
    for kernel_name, kernel in kernels.items():
        check_kernel(kernel, chip, SPILLED.get(name, FEW))
        if kernel_name in ("paged_decode_split", "paged_prefill", "paged_latent_decode", "paged_latent_prefill"):
            assert kernel["mma"] and kernel["ldmatrix"]
            # What is widened lies in a place of its own; and the code of latent rows' four roles is not in order.
            assert name in QUANTISED or "latent" in kernel_name or not kernel["reads_of_released"]


def test_pools_are_updated_in_place(report):
    found = report["b200:attention:step"]
    assert found["pool_copies"] == 0 and found["alias_bytes"] >= found["pool_bytes"]
    assert found["kernels"] == 5  # a list of work, and two for each layer


@skip_by_day("the kernels of states compile as for Hopper")
@pytest.mark.parametrize("chip", CAPABILITIES)
@pytest.mark.parametrize("name", STATES)
def test_states(chip, name, report):
    """Token by token. Where there is too little shared memory for chunks, prompts too."""
    check_kernel(report[f"{chip}:{name}"], chip, SPILLED.get(name, FEW))


@skip_by_day("the interpreter runs them")
@pytest.mark.parametrize("name", CHUNKS)
def test_chunks(name, report):
    kernel = report[f"b200:{name}"]
    for each in (kernel, *kernel["ahead"]):
        check_kernel(each, "b200", SPILLED.get(name, FEW))
    assert kernel["mma"]


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name, report):
    """A sum and two products, of the PTX that a B200 would run."""
    assert report[f"b200:products:{name}"]["off"] < 1e-4


def test_a_slot_released_early_shows(report):
    assert report["b200:attention:control-released-early"]["paged_decode_split"]["reads_of_released"]


@skip_by_day("negative controls of what is compared")
@pytest.mark.parametrize("name", CONTROLS)
def test_mistakes_show(name, report):
    assert report[f"b200:products:control: {name}"]["off"] > 1
