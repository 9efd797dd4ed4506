"""Tiles of four bits as an H200 would widen them: the kernel's PTX, run in NumPy. No interpreter does that part.
test_gpu_compile.py has numbers in halves.

Needs the extra `compile`, as test_gpu_compile.py does.
"""

import pytest
from nightly import NIGHTLY, skip_by_day
from test_gpu_compile import printed_by, pytestmark as pytestmark

HEAD_DIMS = (64, 80, 96, 192, 256)
EACH = ["keys", "values", "float16, keys", "float16, values", "values of 32, float16"] if NIGHTLY else []
EACH += [f"{what} of {n}" for what in ("keys", "values") for n in HEAD_DIMS] if NIGHTLY else ["keys of 96"]
EACH += [f"{what} of {n}, groups of 64" for what in ("keys", "values") for n in (64, 96, 128, 192, 256)] * NIGHTLY
EACH += [f"{what} of 64, float16, groups of 64" for what in ("keys", "values")] * NIGHTLY
CONTROLS = (
    "lanes", "warps", "pieces without padding", "the other's scales", "rows", "groups", "halves", "columns of a part",
    "no lowest bits", "values with the keys' bits", "lowest bits of other columns", "lowest bits of other tokens",
    "lowest bits of the keys' bytes",
)  # fmt: skip


@pytest.fixture(scope="module")
def report():
    """Everything that gpu_widen.py prints, by job."""
    controls = [f"control: {name}" for name in CONTROLS if NIGHTLY]
    return {name: found for job in printed_by("gpu_widen.py", *EACH, *controls) for name, found in job.items()}


@pytest.mark.parametrize("name", EACH)
def test_numbers_times_scales(name, report):
    """Each in its place; keys under a value's scale that is infinite are NaN, values finite."""
    found = report[name]
    most = 0.0009 if "float16" in name else 0.009
    if name.startswith("keys") and "groups of 64" in name:  # of five bits: a sum and two products are rounded
        most = 3 * 2 ** (-11 if "float16" in name else -8)
    assert found["off"] < most
    assert found["nan"] == ([70] if "keys" in name else []) and found["known"] > 0.99


@skip_by_day("negative controls of what is compared")
@pytest.mark.parametrize("name", CONTROLS)
def test_mistakes_show(name, report):
    found = report[f"control: {name}"]
    assert found["off"] > 0.1 or found["nan"] != [70]
