"""Finds the keys and values in dense caches: nested collections of Flax, pairs of Hugging Face."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxkv._core.config.validation import show
from pallas_kernels.common.quantization import FORMATS

# Field names of a layer's keys and values, and whether heads come before tokens.
NAMES = {
    ("cached_key", "cached_value"): False,
    ("k", "v"): False,
    ("key", "value"): False,
    ("k_cache", "v_cache"): False,
    ("keys", "values"): True,
}
LISTS = (("key_cache", "value_cache"),)  # one list of all layers' keys and one of their values, heads first


class Dense(NamedTuple):
    """The shape and dtype of one layer's dense cache."""

    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    places: int
    rows: int
    dtype: str


def dense_layers(cache: Any, heads_first: bool | None = None) -> list[Dense]:
    """Returns the layers of a dense cache in order. Mappings are sorted by name, with numbers in names as numbers.

    Raises:
      ValueError: there is no layer, or its arrays cannot be keys and values.
    """
    found = [
        layer
        for where, key, value, first in _pairs(cache, "")
        for layer in _read(where, key, value, first if heads_first is None else heads_first)
    ]
    if not found:
        raise ValueError(
            f"There are no keys and values in {show(cache)}: give a Flax collection with cached_key or k in it (for "
            "NNX: nnx.state(model, nnx.Cache)), or (key, value) for each layer, as Hugging Face keeps them."
        )
    return found


def natural(text: str) -> list[Any]:
    """Returns a sort key that puts layer_2 before layer_10."""
    return [int(x) if x.isdigit() else x for x in re.split(r"(\d+)", text)]


def _pairs(node: Any, where: str) -> Iterator[tuple[str, Any, Any, bool]]:
    """Yields `(where, key, value, heads_first)` for every layer's pair of arrays."""
    fields = node if isinstance(node, Mapping) else _attributes(node)
    for names, first in NAMES.items():
        if all(_is_array(fields.get(name)) for name in names):
            yield where or "the cache", fields[names[0]], fields[names[1]], first
            return
    for names in LISTS:
        if all(isinstance(fields.get(name), Sequence) for name in names):
            for i, (key, value) in enumerate(zip(*(fields[name] for name in names), strict=True)):
                yield f"{where}[{i}]", key, value, True
            return
    if isinstance(node, Mapping):
        for name in sorted(node, key=lambda name: natural(str(name))):
            yield from _pairs(node[name], f"{where}/{name}" if where else str(name))
    elif isinstance(node, list | tuple) or "layers" in fields:
        layers = node if isinstance(node, list | tuple) else fields["layers"]
        if len(layers) >= 2 and all(map(_is_array, layers[:2])):  # other data of the layer may follow the pair
            yield where or "the cache", layers[0], layers[1], True
            return
        for i, child in enumerate(layers):
            yield from _pairs(child, f"{where}[{i}]")


def _attributes(node: Any) -> Mapping[str, Any]:
    """Returns the fields of an object that holds keys and values as attributes."""
    names = {name for names in (*NAMES, *LISTS, ("layers",)) for name in names}
    if _is_array(node) or node is None:
        return {}
    return {name: getattr(node, name) for name in names if hasattr(type(node), name) or name in _own(node)}


def _own(node: Any) -> Mapping[str, Any]:
    return getattr(node, "__dict__", {})


def _is_array(x: Any) -> bool:
    return isinstance(getattr(x, "shape", None), tuple) and hasattr(x, "dtype")


def _read(where: str, key: Any, value: Any, heads_first: bool) -> list[Dense]:
    """Returns the layer of a pair of arrays, or the layers stacked along one more axis."""
    shape, other = tuple(key.shape), tuple(value.shape)
    if shape[:-1] != other[:-1] or len(shape) not in (4, 5) or 0 in (*shape[-3:], *other[-1:]):
        axes = "[B, K, T, D]" if heads_first else "[B, T, K, D]"
        raise ValueError(
            f"The keys and values of a layer must be {axes}, or have an axis of layers before that, but {where} has "
            f"{list(shape)} and {list(other)}."
        )
    rows, *middle, head_dim = shape[-4:]
    num_kv_heads, places = middle if heads_first else middle[::-1]
    dtype = str(key.dtype).removeprefix("torch.")
    if dtype not in FORMATS:
        dtype = np.dtype(key.dtype).name if isinstance(key.dtype, np.dtype) else dtype
    dense = Dense(num_kv_heads, head_dim, other[-1], places, rows, dtype)
    return [dense] * (shape[0] if len(shape) == 5 else 1)
