"""Converts to and from the collections in which Flax's own attention layers keep their dense caches."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxkv._core.blocks.restore import model_layers
from jaxkv._core.cache.cache import Cache
from jaxkv._core.config.dense_caches import natural
from jaxkv._core.config.validation import integer
from jaxkv._core.state.head_rows import refuse_gaps
from jaxkv.convert.dense import from_dense, refuse_latent, row_numbers

FLAX_NAMES = ("cached_key", "cached_value", "cache_index")


def from_flax(
    collection: Mapping[Any, Any], lengths: Any = None, *, paths: Sequence[str] | None = None, **fields: Any
) -> Cache:
    """Makes a cache from a decoding Flax model's: `cached_key`, `cached_value` and `cache_index` of its layers.

    Args:
      collection: nested dicts, such as Linen's `variables["cache"]`, or for NNX `nnx.state(model, nnx.Cache)`. Keys
        and values are `[B, T, K, D]`.
      lengths: `i32[B]`; default: `cache_index`, which Flax keeps for the whole batch.
      paths: the attention modules in the order of the layers, such as "decoder/layer_0/attention"; default: all,
        sorted by name, numbers as numbers.
      **fields: as in `from_dense`.

    >>> import jaxkv, numpy as np
    >>> layer = {"cached_key": np.ones((2, 9, 4, 8)), "cached_value": np.ones((2, 9, 4, 8)), "cache_index": 3}
    >>> jaxkv.convert.from_flax({"layer_0": layer, "layer_1": layer}, dtype="float32").lengths.tolist()
    [3, 3]
    """
    modules = _modules(collection, paths)
    index = {path: integer("cache_index", module["cache_index"], least=0) for path, module in modules.items()}
    if len(set(index.values())) > 1:
        raise ValueError(
            f"All layers must be at the same cache_index, but they are at {index}: name those of one decoder with "
            "paths, as one call of the model left them."
        )
    if lengths is None:
        lengths = next(iter(index.values()))
    k, v = ([module[name] for module in modules.values()] for name in FLAX_NAMES[:2])
    return from_dense(k, v, lengths, **fields)


def to_flax(
    cache: Cache,
    collection: Mapping[Any, Any],
    rows: Sequence[int] | None = None,
    *,
    paths: Sequence[str] | None = None,
) -> dict[Any, Any]:
    """Returns a Flax model's own cache with the tokens of a `Cache`, for the model to continue.

    Args:
      collection: the model's cache, for its structure, sizes and dtypes; nested dicts, as for `from_flax`.
      rows: the rows to convert; default: all. Their number must be the model's batch size, and their lengths must be
        equal, since Flax has one index for all.
      paths: as in `from_flax`.

    Returns:
      A new collection. For NNX, pass it to `nnx.update(model, ...)`.

    >>> import jaxkv, numpy as np
    >>> layer = {"cached_key": np.ones((2, 9, 4, 8)), "cached_value": np.ones((2, 9, 4, 8)), "cache_index": 3}
    >>> cache = jaxkv.convert.from_flax({"attn": layer}, dtype="float32")
    >>> int(jaxkv.convert.to_flax(cache, {"attn": layer})["attn"]["cache_index"])
    3
    """
    refuse_latent(cache, "A Flax model")
    refuse_gaps(cache.config, "to_flax takes")
    modules = _modules(collection, paths)
    layers = model_layers(cache.config)
    if len(modules) != len(layers):
        raise ValueError(
            f"The collection has {len(modules)} layers, but the cache has {len(layers)}: give the collection of the "
            "model that the cache is of, or name with paths the modules that are meant."
        )
    chosen = row_numbers(cache, rows)
    lengths = np.asarray(cache.lengths)[chosen].tolist()
    if len(set(lengths)) > 1:
        raise ValueError(
            f"Flax has one index for the whole batch, but the rows have {lengths} tokens: name rows of one length."
        )
    length = lengths[0] if lengths else 0
    changed: dict[str, Any] = {}
    for layer, (path, module) in zip(layers, modules.items(), strict=True):
        shape, config = np.shape(module["cached_key"]), cache.layer_config(layer)
        wanted = (len(chosen), shape[1], config.num_kv_heads, config.head_dim)
        values = (*wanted[:-1], config.value_dim)
        if shape != wanted or np.shape(module["cached_value"]) != values or length > shape[1]:
            raise ValueError(
                f"{path} is made for [B, T, K, D] = {list(shape)}, but the rows are "
                f"{[len(chosen), length, *wanted[2:]]}."
            )
        k, v = cache.read(layer, chosen[:, None], np.arange(shape[1])[None])
        arrays = (
            x.astype(jnp.asarray(old).dtype) for x, old in ((k, module["cached_key"]), (v, module["cached_value"]))
        )
        index = jnp.asarray(length, jnp.asarray(module["cache_index"]).dtype)
        changed[path] = {**module, **dict(zip(FLAX_NAMES, (*arrays, index), strict=True))}
    return _replace(collection, changed, ())


def _modules(collection: Mapping[Any, Any], paths: Sequence[str] | None) -> dict[str, Mapping[str, Any]]:
    """Returns the attention modules of a Flax collection, by path, in the order of the layers."""
    found: dict[str, Mapping[str, Any]] = {}

    def walk(node: Any, path: tuple[str, ...]) -> None:
        if isinstance(node, Mapping):
            if "cached_key" in node:
                found["/".join(path)] = node
            for name, child in node.items():
                walk(child, (*path, str(name)))

    walk(collection, ())
    if not found:
        raise ValueError(
            f"The collection, a {type(collection).__name__}, has no cached_key: give variables['cache'] of a Linen "
            "model, or nnx.state(model, nnx.Cache), after its cache was initialised, with decode=True."
        )
    for path, module in found.items():
        if missing := [name for name in FLAX_NAMES if name not in module]:
            raise ValueError(f"{path} lacks {', '.join(missing)}.")
        if np.ndim(module["cached_key"]) != 4:
            raise ValueError(
                f"cached_key of {path} must be [B, T, K, D], but is {np.shape(module['cached_key'])}: take layers "
                "that were scanned apart first."
            )
    if paths is None:
        return dict(sorted(found.items(), key=lambda item: natural(item[0])))
    if sorted(paths) != sorted(found):
        raise ValueError(f"paths must name every layer once, {sorted(found, key=natural)}, but are {list(paths)}.")
    return {path: found[path] for path in paths}


def _replace(node: Any, changed: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    if not isinstance(node, Mapping):
        return node
    if "cached_key" in node:
        return changed["/".join(path)]
    return {name: _replace(child, changed, (*path, str(name))) for name, child in node.items()}
