"""The `repr` of configs: Python that makes them again, without what is as it would be anyway."""

import dataclasses
from collections.abc import Sequence
from typing import Any


def write_fields(config: Any, defaults: dict[str, Any] | None = None, **written: str) -> str:
    """Returns a dataclass as a call with its fields, those equal to their defaults left out.

    Args:
      defaults: what fields are by default, where the class does not say it.
      written: fields that are written already; "" leaves one out.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(config)} | (defaults or {})
    given = {name: written.get(name, _write(getattr(config, name))) for name in defaults}
    given = {name: text for name, text in given.items() if text and (name in written or not _is_default(
        getattr(config, name), defaults[name]))}  # fmt: skip
    return f"{type(config).__name__}({', '.join(f'{name}={text}' for name, text in given.items())})"


def write_layers(layers: Sequence[Any]) -> str:
    """Returns layers as a tuple, in which what repeats is counted: `(local, local, full) * 4`.

    >>> write_layers([1, 1, 2] * 4), write_layers([1, 1, 1, 2]), write_layers([1])
    ('(1, 1, 2) * 4', '(1,) * 3 + (2,)', '(1,)')
    """
    layers, count = list(layers), len(layers)
    for period in range(1, count // 2 + 1):
        if count % period == 0 and layers == layers[:period] * (count // period):
            return f"{_tuple(layers[:period])} * {count // period}"
    runs: list[list[Any]] = []
    for layer in layers:
        if runs and runs[-1][0] == layer:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    if len(runs) == count:
        return _tuple(layers)
    return " + ".join(_tuple(run[:1]) + (f" * {len(run)}" if len(run) > 1 else "") for run in runs)


def _tuple(layers: Sequence[Any]) -> str:
    return f"({', '.join(map(repr, layers))}{',' * (len(layers) == 1)})"


def _write(x: Any) -> str:
    """Returns a value as Python, a dtype by its name."""
    return repr(getattr(x, "name", x)) if hasattr(x, "itemsize") else repr(x)


def _is_default(x: Any, default: Any) -> bool:
    if default is dataclasses.MISSING:
        return False
    return x is None if default is None else _write(x) == _write(default)
