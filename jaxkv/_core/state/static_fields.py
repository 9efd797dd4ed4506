"""Serializes the static fields of pytrees, so that `jax.export` can serialize programs that take or return them."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import jax.export

from jaxkv._core.config.cache_config import CacheConfig
from jaxkv._core.config.layer_config import LayerConfig, kind_of

_CONFIG = "CacheConfig"


def register_export[T: type](cls: T) -> T:
    """Registers a pytree class whose static fields are configs, strings, numbers and tuples of them with `jax.export`.

    The registered name is `jaxkv.` and the class name, in whatever module the class is.

    >>> import jaxkv
    >>> sizes = dict(num_layers=1, num_kv_heads=2, head_dim=8, max_seqs=2, max_seq_len=64)
    >>> cache = jaxkv.init(jaxkv.CacheConfig.uniform(**sizes))
    >>> program = jax.export.export(jax.jit(lambda cache: jaxkv.extend(cache, [1, 2])))(cache)
    >>> program.call(cache).lengths.tolist()  # or of jax.export.deserialize(program.serialize()), in another process
    [1, 2]
    """
    register: Callable[..., Any] = jax.export.register_pytree_node_serialization
    register(
        cls, serialized_name=f"jaxkv.{cls.__name__}", serialize_auxdata=render_static, deserialize_auxdata=parse_static
    )
    return cls


def render_static(fields: Any) -> bytes:
    """Returns static fields as JSON."""
    return json.dumps(fields, default=_render_config, allow_nan=False).encode()


def parse_static(data: bytes) -> Any:
    """Returns the fields that `render_static` wrote. Raises ValueError for other data."""
    return _as_tuples(json.loads(bytes(data), object_hook=_parse_config))


def _render_config(config: Any) -> dict[str, Any]:
    if not isinstance(config, CacheConfig):
        raise TypeError(f"a static field is a CacheConfig or plain values, not {type(config).__name__}")
    layers = [dataclasses.asdict(layer) for layer in config.layers]
    for layer in layers:
        layer["dtype"] = None if layer["dtype"] is None else kind_of(layer["dtype"], "dtype").name
    # Derived sizes are derived again on load, except the block size, which depends on the platform.
    given = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    given = {name: x for name, x in given.items() if name == "block_size" or name not in config.settled_fields}
    return {_CONFIG: given | {"dtype": kind_of(config.dtype, "dtype").name, "layers": layers}}


def _parse_config(found: dict[str, Any]) -> Any:
    if found.keys() != {_CONFIG}:
        return found
    fields = {name: _as_tuples(x) for name, x in found[_CONFIG].items()}
    return CacheConfig(**fields | {"layers": [LayerConfig(**layer) for layer in fields["layers"]]})


def _as_tuples(x: Any) -> Any:
    return tuple(map(_as_tuples, x)) if isinstance(x, list) else x
