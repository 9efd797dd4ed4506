"""Known-bad kernels: a module of the GPU backend with a line changed, for the negative controls."""

import inspect
import sys
import types
from types import ModuleType


def mutant(module: ModuleType, *changes: tuple[str, str]) -> ModuleType:
    """A copy of `module` in which each change's old text, which must occur exactly once, is replaced by the new."""
    source = inspect.getsource(module)
    for old, new in changes:
        assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times in {module.__name__}"
        source = source.replace(old, new)
    copy = types.ModuleType(f"{module.__name__}_mutant")
    sys.modules[copy.__name__] = copy  # dataclasses look their module up
    exec(compile(source, f"{module.__name__} with {changes}", "exec"), copy.__dict__)
    return copy
