"""Arguments from users: what is known on the host is checked there, what is on the device is left to the device."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._core.config.validation import MOST_INDEX


def row_counts(name: str, x: Any, rows: int) -> jax.Array:
    """`x` as `i32[rows]`. Lists and NumPy arrays may not be negative; a JAX array is data, and not looked at."""
    on_device = isinstance(x, jax.Array)
    x = x if on_device else np.asarray(x)
    if x.shape != (rows,):
        raise ValueError(f"{name} must have one integer for each of the {rows} rows, but its shape is {x.shape}.")
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(f"{name} must be integers, not {x.dtype}.")
    if not on_device and (x < 0).any():
        row = int(np.argmax(x < 0))
        raise ValueError(f"{name} must not be negative, but row {row} has {x[row]}.")
    if not on_device:
        x = x.astype(np.int64) if x.itemsize < 8 else x
        x = np.minimum(x, MOST_INDEX)
    return as_int32(x)


def row_indices(name: str, x: Any, rows: int) -> jax.Array:
    """`x` as `i32[n]` row indices. On the host an index out of range is an IndexError; negative ones do not wrap."""
    on_device = isinstance(x, jax.Array)
    x = x if on_device else np.asarray(x)
    if x.ndim > 1 or not (jnp.issubdtype(x.dtype, jnp.integer) or x.size == 0):
        raise ValueError(f"{name} must be a row index or a list of them, not {x.dtype}{list(x.shape)}.")
    if not on_device and x.size and not ((x >= 0) & (x < rows)).all():
        raise IndexError(f"{name} must be rows from 0 to {rows - 1}, not {x.tolist()}.")
    return as_int32(x.reshape(-1))


def distinct_rows(name: str, x: Any, rows: int) -> np.ndarray:
    """`x`, known on the host, as indices of rows, none of them twice. Raises IndexError, ValueError."""
    indices = np.asarray(row_indices(name, np.asarray(x), rows))
    if len(set(indices.tolist())) != len(indices):
        raise ValueError(f"{name} names a row twice: {indices.tolist()}.")
    return indices


def as_int32(x: Any) -> jax.Array:
    """`x` as int32. What is more than any row holds stays so, where as int32 it would wrap."""
    if x.dtype.itemsize > 4 and isinstance(x, jax.Array):
        x = jnp.minimum(x, MOST_INDEX)
        x = x if jnp.issubdtype(x.dtype, jnp.unsignedinteger) else jnp.maximum(x, -MOST_INDEX)
    return jnp.asarray(x, jnp.int32)


def row_mask(name: str, x: Any, rows: int) -> jax.Array:
    """`x` as `bool[rows]`: a mask, or the indices of the rows it is True for."""
    if getattr(x, "dtype", None) == jnp.bool_ or (isinstance(x, list | tuple) and any(isinstance(i, bool) for i in x)):
        x = jnp.asarray(x)
        if x.shape != (rows,):
            raise ValueError(
                f"{name} must be bool[{rows}], one for each row, or row indices, but its shape is {x.shape}."
            )
        return x
    indices = row_indices(name, x, rows)
    if isinstance(x, jax.Array):
        return scatter_rows(jnp.zeros(rows, bool), indices, True)
    return jnp.asarray(np.isin(np.arange(rows), x))  # known on the host: nothing runs on the device for it


def to_device(x: Any) -> jax.Array:
    """A NumPy array on the device, in memory of its own: unlike `jnp.array` this compiles nothing for its shape."""
    return jax.device_put(x, may_alias=False)


def scatter_rows(per_row: jax.Array, rows: jax.Array, values: Any) -> jax.Array:
    """`per_row` with `values` at `rows`; indices out of range, negative ones too, are dropped."""
    rows = jnp.where((rows >= 0) & (rows < per_row.shape[0]), rows, per_row.shape[0])
    return per_row.at[rows].set(values, mode="drop")
