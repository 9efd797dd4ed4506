"""Converts to and from Hugging Face caches: a key and a value per layer, heads first, rows padded to one length."""

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._core.blocks.restore import model_layers
from jaxkv._core.cache.cache import Cache
from jaxkv._core.cache.checks import check_on_host
from jaxkv._core.config.validation import read_list, show
from jaxkv._core.state.head_rows import refuse_gaps
from jaxkv.convert.dense import as_array, from_dense, refuse_latent, row_lengths, row_numbers

Padding = Literal["left", "right"]


def from_hugging_face(past_key_values: Any, lengths: Any = None, *, padding: Padding = "left", **fields: Any) -> Cache:
    """Makes a cache from a Hugging Face model's: for each layer a key and a value, `[B, K, T, D]`.

    Args:
      past_key_values: `(key, value)` for each layer, as tuples or as transformers' cache classes yield them; NumPy
        arrays, JAX arrays or PyTorch tensors.
      lengths: `i32[B]`, tokens of each row without padding: the sums of the attention mask. Default: T.
      padding: the side of the padding; transformers generates with "left".
      **fields: as in `from_dense`.

    A row's first token is at position 0, whatever padding precedes it, as in transformers.

    >>> import jaxkv, numpy as np
    >>> key = np.ones((2, 4, 7, 8), np.float32)
    >>> jaxkv.convert.from_hugging_face([(key, key)], [7, 5]).lengths.tolist()
    [7, 5]
    """
    _check_padding(padding)
    pairs = [_read_pair(i, layer) for i, layer in enumerate(read_list("past_key_values", past_key_values))]
    for i, (key, value) in enumerate(pairs):
        if key.ndim != 4 or key.shape != value.shape:
            raise ValueError(
                f"past_key_values must have [B, K, T, D] in every layer, but layer {i} has {key.shape} and "
                f"{value.shape}."
            )
    if not pairs:
        raise ValueError("past_key_values must have at least one layer, but is empty.")
    batch, _, places, _ = pairs[0][0].shape
    lengths = row_lengths(places if lengths is None else lengths, batch, places)
    # Rolls each row's tokens to the front; the padding wraps around to behind its length.
    start = places - lengths if padding == "left" else np.zeros_like(lengths)
    index = (np.arange(places) + start[:, None]) % max(places, 1)

    def rows_first(x: Any) -> jax.Array:
        return jnp.take_along_axis(jnp.asarray(x).transpose(0, 2, 1, 3), index[:, :, None, None], axis=1)

    keys, values = zip(*pairs, strict=True)
    return from_dense([*map(rows_first, keys)], [*map(rows_first, values)], lengths, **fields)


def to_hugging_face(
    cache: Cache, rows: Sequence[int] | None = None, *, padding: Padding = "left"
) -> tuple[tuple[tuple[jax.Array, jax.Array], ...], jax.Array]:
    """Returns rows of a cache in the format of Hugging Face models.

    Args:
      rows: the rows to convert; default: all.
      padding: the side on which shorter rows are padded with zeros.

    Returns:
      `(past_key_values, attention_mask)`: for each layer `(key, value)`, `[B, K, T, D]` each, T the longest row; the
      mask is `i32[B, T]`, 1 for a token. Tokens outside of a layer's sliding window are zeros in that layer.

    >>> import jax.numpy as jnp, jaxkv
    >>> kv = jnp.ones((1, 2, 40, 2, 8))
    >>> layers, mask = jaxkv.convert.to_hugging_face(jaxkv.convert.from_dense(kv, kv, [5, 3]))
    >>> layers[0][0].shape, mask.tolist()
    ((2, 2, 5, 8), [[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    """
    check_on_host(cache, "to_hugging_face")
    _check_padding(padding)
    refuse_latent(cache, "A Hugging Face model")
    refuse_gaps(cache.config, "to_hugging_face takes")
    chosen = row_numbers(cache, rows)
    lengths = np.asarray(cache.lengths)[chosen]
    places = int(lengths.max(initial=0))
    start = places - lengths if padding == "left" else np.zeros_like(lengths)
    position = np.arange(places)[None] - start[:, None]
    mask = jnp.asarray((position >= 0) & (position < lengths[:, None]), jnp.int32)
    layers = []
    for layer in model_layers(cache.config):
        k, v = cache.read(layer, np.broadcast_to(chosen[:, None], position.shape), position)
        layers.append((k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)))
    return tuple(layers), mask


def _read_pair(i: int, layer: Any) -> tuple[Any, Any]:
    try:
        return as_array(layer[0]), as_array(layer[1])
    except (TypeError, IndexError, KeyError):
        raise ValueError(
            f"past_key_values must have (key, value) for each layer, but layer {i} has {show(layer)}."
        ) from None


def _check_padding(padding: str) -> None:
    if not isinstance(padding, str) or padding not in ("left", "right"):
        raise ValueError(f"padding must be 'left' or 'right', not {show(padding)}.")
