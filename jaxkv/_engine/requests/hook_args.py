"""The numbers that requests pass to a logits hook: pytrees of one structure, differing only in values."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._core.config.validation import show


@dataclasses.dataclass(frozen=True)
class Form:
    """The common structure of the pytrees of an engine's requests. Hashable, since programs compile it in."""

    structure: Any
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]  # "int32" or "float32", of each leaf

    def pack(self, leaves: list[np.ndarray] | None) -> np.ndarray:
        """Returns `i32[size]`: the numbers' bits; zeros if a request gave none."""
        if leaves is None:
            return np.zeros(sum(map(math.prod, self.shapes)), np.int32)
        bits = [x.astype(dtype).ravel().view(np.int32) for x, dtype in zip(leaves, self.dtypes, strict=True)]
        return np.concatenate([np.zeros(0, np.int32), *bits])

    def unpack(self, bits: jax.Array) -> Any:
        """Returns the pytree of arrays `[S, ...]` from `i32[size, S]`."""
        leaves, at = [], 0
        for shape, dtype in zip(self.shapes, self.dtypes, strict=True):
            size = math.prod(shape)
            leaves.append(jax.lax.bitcast_convert_type(bits[at : at + size].T.reshape(-1, *shape), jnp.dtype(dtype)))
            at += size
        return jax.tree.unflatten(self.structure, leaves)


class HookArgs:
    """Reads requests' numbers, and keeps their common form once there are some.

    Args:
      default: those of a request that gives none; None: zeros.
    """

    def __init__(self, default: Any = None) -> None:
        self.form: Form | None = None
        self._default: list[np.ndarray] | None = None
        self._default = self.read(default)

    def read(self, value: Any) -> list[np.ndarray] | None:
        """Returns a request's numbers; the first ones fix the form. Raises ValueError."""
        if value is None:
            return self._default
        leaves, structure = jax.tree.flatten(value)
        arrays = [_read_numbers(x) for x in leaves]
        shapes, dtypes = tuple(x.shape for x in arrays), tuple(x.dtype.name for x in arrays)
        known = self.form or Form(structure, shapes, dtypes)
        if (structure, shapes) != (known.structure, known.shapes):
            wanted = jax.tree.unflatten(known.structure, [list(shape) for shape in known.shapes])
            raise ValueError(
                f"hook_args must have the structure and shapes of this engine's first, {wanted}, not {show(value)}: "
                "give every request the same fields, and arrays as long as the longest."
            )
        # A request with 0 may be followed by one with 0.5.
        both = tuple("float32" if "float32" in pair else "int32" for pair in zip(dtypes, known.dtypes, strict=True))
        if self.form is None or both != known.dtypes:  # else the same object, which `==` is quick to tell
            self.form = dataclasses.replace(known, dtypes=both)
        return arrays

    def to_json(self, leaves: list[np.ndarray] | None) -> Any:
        """Returns a request's numbers as JSON, for `from_json`. Raises ValueError for pytrees of classes."""
        return None if leaves is None or self.form is None else to_json(jax.tree.unflatten(self.form.structure, leaves))


def _read_numbers(x: Any) -> np.ndarray:
    try:
        array = np.asarray(x)
    except (ValueError, TypeError, OverflowError):
        array = np.asarray(None)
    if array.dtype == bool or np.issubdtype(array.dtype, np.integer):
        if array.size and not -(2**31) <= int(array.min()) <= int(array.max()) < 2**31:
            raise ValueError(f"hook_args must be numbers of 32 bits, not {show(x)}.")
        return array.astype(np.int32)
    if array.dtype == object or not jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(f"hook_args must be a pytree of numbers and arrays of numbers, not of {show(x)}.")
    return array.astype(np.float32)


def to_json(value: Any) -> Any:
    """Returns a request's pytree of dicts, lists, tuples and numbers as JSON."""
    if isinstance(value, dict):
        return {"dict": [[key, to_json(x)] for key, x in value.items()]}
    if type(value) in (list, tuple):
        return {type(value).__name__: [to_json(x) for x in value]}
    if value is None:
        return None
    array = _read_numbers(value)
    return {"dtype": array.dtype.name, "shape": list(array.shape), "numbers": list(map(repr, array.ravel().tolist()))}


def from_json(entry: Any) -> Any:
    """Returns what `to_json` wrote. Raises KeyError, TypeError or ValueError for anything else."""
    if entry is None:
        return None
    if "dict" in entry:
        return {key: from_json(x) for key, x in entry["dict"]}
    for kind in (list, tuple):
        if kind.__name__ in entry:
            return kind(from_json(x) for x in entry[kind.__name__])
    dtype = {"int32": np.int32, "float32": np.float32}[entry["dtype"]]
    return np.array([float(x) for x in entry["numbers"]]).astype(dtype).reshape(entry["shape"])
