"""Forms of prefill on GPUs that a plan may choose, and no default does: see `pallas_kernels.gpu.prefill.attend`. And
products by warps, as on Blackwell, which a Hopper GPU can do, too: see `pallas_kernels.gpu.products`."""

import contextlib
import dataclasses
from unittest import mock

from pallas_kernels.gpu import chips, tuning

FORMS = {
    "registers": {"weights_in_registers": True},
    "turns": {"in_turns": True},
    "registers, turns": {"weights_in_registers": True, "in_turns": True},
    "ahead": {"ahead": True},
    "turns, ahead": {"in_turns": True, "ahead": True},
    "registers, turns, ahead": {"weights_in_registers": True, "in_turns": True, "ahead": True},
}
BY_WARPS = "by warps"


def use_form(name: str | None) -> contextlib.AbstractContextManager:
    """Plans of prefill with one of `FORMS`, products `BY_WARPS`, or all as it is."""
    if name == BY_WARPS:
        blackwell = dataclasses.replace(chips.find_chip(), capability="10.0")
        return mock.patch.object(chips, "find_chip", lambda: blackwell)
    planned, form = tuning.prefill_plan, FORMS.get(name or "", {})
    return mock.patch.object(tuning, "prefill_plan", lambda *asked: dataclasses.replace(planned(*asked), **form))
