"""Known-bad kernels: the GPU backend with one of its modules changed, for the negative controls."""

import pathlib
import sys
import types

from planting import Plant, Sources, plant_in_copy

from pallas_kernels import gpu

NAME = gpu.__name__
SOURCES = Sources(pathlib.Path(gpu.__file__).parent, NAME)


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
