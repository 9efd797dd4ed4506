"""Checks of single rows, heads and periods that a caller names, of a `Cache`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._core.config.validation import integer, show


def check_row(cache: Any, row: Any) -> None:
    """Raises IndexError unless `row` is one of the cache's, or traced."""
    rows = cache.lengths.shape[0]
    if isinstance(row, jax.core.Tracer):
        return
    index = row.item() if isinstance(row, jax.Array | np.ndarray) and row.ndim == 0 else row
    if isinstance(index, bool) or not isinstance(index, int | np.integer) or not 0 <= index < rows:
        raise IndexError(f"row must be an integer from 0 to {rows - 1}, not {show(row)}.")


def check_head(cache: Any, layer: int, head: Any) -> None:
    """Raises IndexError unless `head` is a KV head of a layer, or traced."""
    heads = cache.layer_config(layer).num_kv_heads
    if isinstance(head, jax.core.Tracer):
        return
    head = head.item() if isinstance(head, jax.Array | np.ndarray) and head.ndim == 0 else head
    if not isinstance(head, int | np.integer) or not 0 <= head < heads:
        raise IndexError(f"head must be an integer from 0 to {heads - 1} in layer {layer}, not {show(head)}.")


def read_period(number: Any, count: int) -> jax.Array:
    """Returns a period's index below `count`. Raises IndexError if known and out of range; callers clip traced ones."""
    is_array = isinstance(number, jax.Array | np.ndarray)
    if is_array and (number.ndim or not jnp.issubdtype(number.dtype, jnp.integer)):
        raise ValueError(
            f"layer[1], the number of the repeat, must be an integer, not {number.dtype}{list(number.shape)}."
        )
    if not isinstance(number, jax.core.Tracer):
        number = integer("layer[1], the number of the repeat,", number, most=None)
        if not 0 <= number < count:
            raise IndexError(f"layer[1], the number of the repeat, must be from 0 to {count - 1}, not {show(number)}.")
    return jnp.asarray(number, jnp.int32)
