"""Forms of prefill on GPUs that a plan may choose, and no default does: see `pallas_kernels.gpu.prefill.attend`."""

import contextlib
import dataclasses
from unittest import mock

from pallas_kernels.gpu import tuning

FORMS = {
    "registers": {"weights_in_registers": True},
    "turns": {"in_turns": True},
    "registers, turns": {"weights_in_registers": True, "in_turns": True},
    "ahead": {"ahead": True},
    "turns, ahead": {"in_turns": True, "ahead": True},
    "registers, turns, ahead": {"weights_in_registers": True, "in_turns": True, "ahead": True},
}


def use_form(name: str | None) -> contextlib.AbstractContextManager:
    """Plans of prefill with one of `FORMS`, or as they are."""
    planned, form = tuning.prefill_plan, FORMS.get(name or "", {})
    return mock.patch.object(tuning, "prefill_plan", lambda *asked: dataclasses.replace(planned(*asked), **form))
