"""Arguments from users. Values known on the host are checked; values on the device are not read."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._core.config.validation import MOST_INDEX, show


def read_numbers(name: str, x: Any) -> np.ndarray | jax.Array:
    """Returns numbers or flags as one array: NumPy's if all of them are known on the host, else JAX's.

    Callers pass Python or NumPy numbers, arrays, and nested lists of these. Under `jit` some entries of a list may be
    traced and others not.

    Raises:
      ValueError: lists of unequal lengths.
    """
    x = _unwrap(x)
    if isinstance(x, jax.Array):
        return x
    if isinstance(x, list | tuple) and any(isinstance(leaf, jax.core.Tracer) for leaf in _leaves(x)):
        return _stack(name, [read_numbers(name, entry) for entry in x])
    try:
        return np.asarray(x)
    except ValueError:
        raise ValueError(f"{name} must be an array, or lists of equal lengths, not {show(x)}.") from None


def is_known(x: Any) -> bool:
    """Tells whether the entries of `x`, a result of `read_numbers`, are on the host and can be checked."""
    return isinstance(x, np.ndarray | np.generic)


def _leaves(x: Any) -> Iterator[Any]:
    for entry in x:
        if isinstance(entry, list | tuple):
            yield from _leaves(entry)
        else:
            yield _unwrap(entry)


def _unwrap(x: Any) -> Any:
    """Returns the array that a Flax variable holds; anything else as it is."""
    if not isinstance(x, jax.Array) and callable(convert := getattr(x, "__jax_array__", None)):
        return convert()
    return x


def _stack(name: str, entries: list[Any]) -> jax.Array:
    """Stacks arrays of bools, floats or integers of any size as bool, float32 or int32."""
    if len(shapes := {entry.shape for entry in entries}) > 1:
        raise ValueError(f"{name} must be lists of equal lengths, but has entries of the shapes {sorted(shapes)}.")
    dtypes = [entry.dtype for entry in entries]
    if all(jnp.issubdtype(dtype, jnp.bool_) for dtype in dtypes):
        return jnp.stack([jnp.asarray(entry) for entry in entries])
    if any(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes):
        return jnp.stack([jnp.asarray(entry, jnp.float32) for entry in entries])
    return jnp.stack([cast_int32(entry) for entry in entries])


def row_counts(name: str, x: Any, rows: int) -> jax.Array:
    """Returns `x` as `i32[rows]`. Raises ValueError for negative numbers known on the host; JAX arrays are not read."""
    x = read_numbers(name, x)
    if x.shape != (rows,):
        raise ValueError(f"{name} must have one integer for each of the {rows} rows, but its shape is {x.shape}.")
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(f"{name} must be integers, not {x.dtype}.")
    if is_known(x) and (x < 0).any():
        row = int(np.argmax(x < 0))
        raise ValueError(f"{name} must not be negative, but row {row} has {x[row]}.")
    return cast_int32(x)


def row_indices(name: str, x: Any, rows: int) -> jax.Array:
    """Returns `x` as `i32[n]` row indices. Raises IndexError for one out of range on the host; none wraps around."""
    x = read_numbers(name, x)
    if x.ndim > 1 or not (jnp.issubdtype(x.dtype, jnp.integer) or x.size == 0):
        raise ValueError(f"{name} must be a row index or a list of them, not {x.dtype}{list(x.shape)}.")
    if is_known(x) and x.size and not ((x >= 0) & (x < rows)).all():
        raise IndexError(f"{name} must be rows from 0 to {rows - 1}, not {x.tolist()}.")
    return cast_int32(x.reshape(-1))


def distinct_rows(name: str, x: Any, rows: int) -> np.ndarray:
    """Returns `x`, known on the host, as row indices without duplicates. Raises IndexError, ValueError."""
    indices = np.asarray(row_indices(name, require_host(name, x), rows))
    _refuse_duplicates(name, indices)
    return indices


def _refuse_duplicates(name: str, indices: np.ndarray, hint: str = "") -> None:
    if len(np.unique(indices)) < indices.size:
        raise ValueError(f"{name} names a row twice: {indices.tolist()}.{hint}")


def require_host(name: str, x: Any) -> np.ndarray:
    """Returns `x` as a NumPy array. Raises ValueError if `x` is traced."""
    x = read_numbers(name, x)
    if isinstance(x, jax.core.Tracer):
        raise ValueError(f"{name} must be known on the host, not traced: call this between steps, outside of jit.")
    return np.asarray(x)


def cast_int32(x: Any) -> jax.Array:
    """Returns `x` as int32. Numbers that would wrap are clipped, and still exceed what any row holds."""
    dtype = jnp.dtype(x.dtype)
    if jnp.issubdtype(dtype, jnp.integer) and (dtype.itemsize > 4 or dtype == jnp.uint32):
        at = np if is_known(x) else jnp
        x = at.minimum(x, at.asarray(MOST_INDEX, dtype))
        if not jnp.issubdtype(dtype, jnp.unsignedinteger):
            x = at.maximum(x, at.asarray(-MOST_INDEX, dtype))
    return jnp.asarray(x, jnp.int32)


def row_mask(name: str, x: Any, rows: int) -> jax.Array:
    """Returns a mask, or the indices of its True rows, as `bool[rows]`."""
    x = read_numbers(name, x)
    if x.dtype == bool:
        x = jnp.asarray(x)
        if x.shape != (rows,):
            raise ValueError(
                f"{name} must be bool[{rows}], one for each row, or row indices, but its shape is {x.shape}."
            )
        return x
    indices = row_indices(name, x, rows)
    if not is_known(x):
        return scatter_rows(jnp.zeros(rows, bool), indices, True)
    _refuse_duplicates(name, x, f" A mask must be bool[{rows}], not integers.")
    return jnp.asarray(np.isin(np.arange(rows), x))  # on the host, so that nothing runs on the device


def to_device(x: Any) -> jax.Array:
    """Places a NumPy array on the device, unlike `jnp.array` without compiling for its shape.

    A CPU may use it in place: nobody may write to it any more.
    """
    return jax.device_put(x)


def scatter_rows(per_row: jax.Array, rows: jax.Array, values: Any) -> jax.Array:
    """Returns `per_row` with `values` at `rows`; indices out of range, negative ones too, are dropped."""
    rows = jnp.where((rows >= 0) & (rows < per_row.shape[0]), rows, per_row.shape[0])
    return per_row.at[rows].set(values, mode="drop")
