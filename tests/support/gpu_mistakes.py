"""Known-bad kernels: the GPU backend with one of its modules changed, for the negative controls."""

import pathlib
import re
import sys
import types
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from planting import Plant, Sources, plant_in_copy

from pallas_kernels import common, gpu

NAME = gpu.__name__
SOURCES = Sources(pathlib.Path(gpu.__file__).parent, NAME)
SOURCES.files |= Sources(pathlib.Path(common.__file__).parent, common.__name__).files
# How a trial may end in which something is read before it is there.
UNSYNCHRONISED = {"race", "wrong", "barrier"}
unless_on_a_gpu = pytest.mark.skipif(jax.default_backend() == "gpu", reason="a known-bad kernel may hang a GPU")


def plant(monkeypatch, *plants: Plant) -> None:
    """Makes the backend use a copy of a module with these mistakes: wherever the module or a function of it is used."""
    module, broken = plant_in_copy(SOURCES, *plants)
    for name, value in vars(module).items():
        if isinstance(value, int | tuple) and not name.startswith("__"):
            setattr(broken, name, value)  # what a trial has set
    users = [user for name, user in sys.modules.items() if name == NAME or name.startswith(f"{NAME}.")]
    for user in users:
        for name, value in list(vars(user).items()):
            if value is module:
                monkeypatch.setattr(user, name, broken)
            elif isinstance(value, types.FunctionType) and value.__module__ == module.__name__ and user is not module:
                monkeypatch.setattr(user, name, getattr(broken, value.__name__))


def outcome(trial: Any) -> str:
    """How interpreting a trial ends: "right", "wrong", "race", "barrier", "buffer has shape" (read
    out of bounds), or the exception."""
    interpret_pallas_call.reset_gpu_interpret_mode_state()
    try:
        trial.check(plgpu.InterpretGPUParams(detect_races=True, num_tma_threads_per_device=64))
        races = interpret_pallas_call.get_races()
        return "race" if races is not None and races.races_found else "right"
    except AssertionError:
        return "wrong"
    except Exception as e:  # newer interpreters raise on a race, and on a barrier left behind
        named = re.findall(r"\brace\b|barrier|buffer has shape", str(e).lower())
        return named[0] if named else repr(e)
    finally:
        interpret_pallas_call.reset_gpu_interpret_mode_state()


def skip_unseen_race(name: str) -> None:
    """Skips a mistake that releases something too early where the interpreter does not see such a race."""
    if "released" in name and jax.__version_info__ < (0, 12):
        pytest.skip("JAX 0.11's interpreter does not see this race")


def outcome_with(monkeypatch, trial: Any, *plants: Plant) -> str:
    """Returns how a trial ends, under the plans that it asks for, with these mistakes in the kernels."""
    trial.use_plans(monkeypatch)
    plant(monkeypatch, *plants)
    return outcome(trial)
