"""Configs from sizes of equal layers, or from a dense cache."""

import dataclasses
import types
from collections.abc import Iterable, Mapping
from typing import Any, Self, Unpack

from jaxkv._core.config.byte_sizes import ByteSizes
from jaxkv._core.config.dense_caches import dense_layers
from jaxkv._core.config.fields import UniformFields
from jaxkv._core.config.layer_config import LayerConfig
from jaxkv._core.config.validation import integer, show

MOST_LAYERS = 2**16


class MadeLike(ByteSizes):
    """Constructors of `CacheConfig` from sizes or a dense cache."""

    @classmethod
    def uniform(
        cls,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        max_seqs: int,
        max_seq_len: int,
        v_head_dim: int | None = None,
        windows: Any = None,
        bounds: bool = False,
        dtype: Any = "bfloat16",
        **fields: Unpack[UniformFields],
    ) -> Self:
        """Makes the config for layers equal but for their windows. All rows can reach `max_seq_len` at once.

        Args:
          num_layers: number of attention layers, L in shapes.
          num_kv_heads, head_dim: KV heads and head_dim of every layer, K and D in shapes.
          v_head_dim: the width of values, where it is another; see `LayerConfig`.
          max_seqs: number of rows, the sequences held at once.
          max_seq_len: maximum tokens of one row.
          windows: sliding windows: None, one number for all layers, or one entry for each.
          bounds: whether every layer stores bounds of its blocks' keys; see `LayerConfig`.
          dtype: storage format of keys and values; see `CacheConfig`.
          **fields: `num_blocks` or `memory_bytes` for fewer blocks than all rows need, `block_size`, `step_tokens` and
            other arguments of `CacheConfig.from_model`.

        Raises:
          ValueError: a field has a value that is not allowed. The message names the field, value and what is allowed.

        >>> import jaxkv
        >>> sizes = dict(num_layers=3, num_kv_heads=2, head_dim=64, max_seqs=4, max_seq_len=100)
        >>> config = jaxkv.CacheConfig.uniform(**sizes, windows=(32, 32, None))
        >>> config.num_blocks, config.group_windows
        (28, (32, None))
        """
        num_layers = integer("num_layers", num_layers, least=1, most=MOST_LAYERS)
        layer = LayerConfig(num_kv_heads=num_kv_heads, head_dim=head_dim, v_head_dim=v_head_dim, bounds=bounds)
        layers = tuple(dataclasses.replace(layer, window=window) for window in _list_windows(windows, num_layers))
        return _make_config(cls, layers, max_seqs, max_seq_len, dtype, fields)

    @classmethod
    def like(
        cls,
        dense_cache: Any,
        *,
        max_seqs: int | None = None,
        max_seq_len: int | None = None,
        windows: Any = None,
        bounds: bool = False,
        dtype: Any = None,
        heads_first: bool | None = None,
        **fields: Unpack[UniformFields],
    ) -> Self:
        """Makes the config for a paged cache that replaces a dense one, with its layers, rows, length and dtype.

        Args:
          dense_cache: nested mappings, sequences or objects with one key and one value per layer: arrays, tensors or
            `jax.ShapeDtypeStruct`s. Flax: `[B, T, K, D]`, named `cached_key` and `cached_value` or `k` and `v`; for
            NNX pass `nnx.state(model, nnx.Cache)`. Hugging Face: `[B, K, T, D]`, unnamed pairs or its cache classes.
            A leading axis of layers (a scanned model's) is split into layers.
          max_seqs: number of rows; default: B.
          max_seq_len: maximum tokens of one row; default: the largest T of a layer.
          windows: sliding windows, which a dense cache does not tell: None, one number for all layers, or one entry
            for each.
          bounds: as in `uniform`.
          dtype: storage format; default: the first key's dtype.
          heads_first: whether arrays are `[B, K, T, D]`, to override the rule above.
          **fields: as in `uniform`.

        Raises:
          ValueError: there are no keys and values, or their shapes and dtypes fit no cache.

        >>> import jaxkv, numpy as np
        >>> flax = {f"layer_{i}": {n: np.zeros((4, 100, 2, 64), "float32") for n in ("k", "v")} for i in range(3)}
        >>> config = jaxkv.CacheConfig.like(flax)
        >>> config.num_layers, config.max_seqs, config.max_seq_len, config.num_blocks
        (3, 4, 100, 28)
        """
        found = dense_layers(dense_cache, heads_first)
        rows = {layer.rows for layer in found}
        if max_seqs is None and len(rows) > 1:
            raise ValueError(f"The layers have {sorted(rows)} rows: say max_seqs.")
        layers = tuple(
            LayerConfig(
                num_kv_heads=layer.num_kv_heads,
                head_dim=layer.head_dim,
                v_head_dim=layer.v_head_dim,
                window=window,
                bounds=bounds,
            )
            for layer, window in zip(found, _list_windows(windows, len(found)), strict=True)
        )
        max_seqs = found[0].rows if max_seqs is None else max_seqs
        max_seq_len = max(layer.places for layer in found) if max_seq_len is None else max_seq_len
        return _make_config(cls, layers, max_seqs, max_seq_len, found[0].dtype if dtype is None else dtype, fields)


def _make_config(
    cls: Any, layers: tuple[LayerConfig, ...], max_seqs: int, max_seq_len: int, dtype: Any, fields: Any
) -> Any:
    model = types.SimpleNamespace(layer_configs=layers, dtype=dtype)
    return cls.from_model(model, max_seqs=max_seqs, max_seq_len=max_seq_len, **fields)


def _list_windows(windows: Any, num_layers: int) -> tuple[Any, ...]:
    """Returns the window of each layer."""
    is_one = isinstance(windows, str | bytes | Mapping) or getattr(windows, "shape", None) == ()
    if is_one or not isinstance(windows, Iterable):
        return (windows,) * num_layers
    windows = tuple(windows)
    if len(windows) != num_layers:
        raise ValueError(
            f"windows must be None, one number, or one entry for each of the {num_layers} layers, not "
            f"{len(windows)}: {show(windows)}."
        )
    return windows
