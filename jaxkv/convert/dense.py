"""Makes a cache from dense arrays that hold each row's tokens in order, from index 0."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._core.blocks.reblock import GroupRows, gather_slots, reblock
from jaxkv._core.blocks.restore import model_layers, put_rows
from jaxkv._core.cache.cache import Cache
from jaxkv._core.cache.init import init
from jaxkv._core.config.cache_config import CacheConfig
from jaxkv._core.config.kv_packing import stack_kv
from jaxkv._core.config.layer_config import LayerConfig
from jaxkv._core.config.validation import read_list
from jaxkv._core.state.arguments import require_host, row_indices
from jaxkv._core.state.head_rows import refuse_gaps, refuse_index
from jaxkv._core.state.state import Pool


def from_dense(
    k: Sequence[Any], v: Sequence[Any], lengths: Any, *, layers: Sequence[LayerConfig] | None = None, **fields: Any
) -> Cache:
    """Makes a cache that holds the tokens of dense arrays; row s becomes row s.

    Args:
      k, v: one array `[S, C, K, D]` per layer, or all in one `[L, S, C, K, D]`; layers may differ in K and D. Layers
        that read another layer's KV have none; latent layers have None for v.
      lengths: `i32[S]`: number of tokens of each row, at the first indices of C.
      layers: the layers' configs, if they have windows or are latent; by default inferred from the shapes.
      **fields: other fields of `CacheConfig`. Defaults: max_seqs S, max_seq_len C, the arrays' dtype, and enough blocks
        for every row to reach max_seq_len.

    Raises:
      ValueError: shapes that disagree, a length beyond C or max_seq_len, or too few blocks.

    >>> import jax.numpy as jnp, jaxkv
    >>> kv = jnp.ones((1, 2, 40, 2, 8))
    >>> jaxkv.convert.from_dense(kv, kv, [40, 3], num_blocks=9)
    Cache(4 of 9 blocks used, 43 tokens in 2 of 2 rows, 1 layer, 20.0 KiB)
    """
    k, v = read_layers(k, v)
    k, v = [as_array(x) for x in k], [None if x is None else as_array(x) for x in v]
    for i, (one_k, one_v) in enumerate(zip(k, v, strict=True)):
        if one_k.ndim != 4:
            raise ValueError(
                f"k and v must be [S, C, K, D] in every layer, [layers, S, C, K, D] in all, but k of layer {i} is "
                f"{list(one_k.shape)}."
            )
        alike = one_v is None or one_k.shape[:-1] == one_v.shape[:-1]  # values may have a width of their own
        if not alike or one_k.shape[:2] != k[0].shape[:2]:
            raise ValueError(
                f"k and v must be [S, C, K, D] in every layer, S and C the same, but layer {i} has {one_k.shape} and "
                f"{np.shape(one_v)}, and layer 0 {k[0].shape}."
            )
    rows, places = k[0].shape[:2]
    config = _config(k, v, layers, {"max_seqs": rows, "max_seq_len": places, "dtype": k[0].dtype} | fields)
    if rows > config.max_seqs:
        raise ValueError(
            f"k and v have {rows} rows, but max_seqs = {config.max_seqs}: give at least as many, or fewer rows."
        )
    lengths = row_lengths(lengths, rows, min(places, config.max_seq_len))
    # Dense rows are blocks of C tokens, one a row.
    tables = np.arange(1, rows + 1, dtype=np.int32)[:, None]
    refuse_gaps(config, "from_dense takes", ("head",))
    refuse_index(config, "from_dense takes")
    plans = []
    for group, blocks in enumerate(config.group_blocks):
        first = config.first_retained_block(group, lengths)
        plan = reblock(tables, lengths, places, config.block_size, first=first, share=False)
        if len(plan.slots) > blocks:
            raise ValueError(
                f"The rows need {len(plan.slots)} blocks of {config.block_size} tokens, but the cache has {blocks}: "
                f"raise {config.size_argument}."
            )
        plans.append(plan)

    quantized = {residual: layer for layer, residual in config.residual_layers.items()}

    def read(layer: int) -> Pool:
        slots, own = plans[config.group(layer)].padded, model_layers(config).index(quantized.get(layer, layer))
        kind = config.kind(layer)
        exact = jnp.float32 if kind.is_quantized else kind.storage_dtype  # keys and values may come in different dtypes
        keys, values = (None if x[own] is None else jnp.asarray(x[own]).astype(exact) for x in (k, v))
        kv = stack_kv(keys, values, axis=1)
        blocks = gather_slots(kv.transpose(0, 1, 3, 2, 4), slots, first=1)
        blocks = jnp.where((slots >= 0)[:, None, None, :, None], blocks, jnp.zeros((), kv.dtype))
        return Pool(*config.blocks_of(layer, blocks))

    return put_rows(
        init(config),
        np.arange(rows),
        lengths,
        [GroupRows(plan.tables, lengths) for plan in plans],
        read,
        in_place=True,
    )


def read_layers(k: Any, v: Any) -> tuple[list[Any], list[Any]]:
    """Returns the arrays of each layer. Raises ValueError unless there are as many of keys as of values."""
    k, v = read_list("k", k), read_list("v", v)
    if len(k) != len(v) or not k:
        raise ValueError(f"k and v must have one array per layer each, but have {len(k)} and {len(v)}.")
    return k, v


def check_latent(layers: Sequence[LayerConfig], v: Sequence[Any]) -> None:
    """Raises ValueError unless exactly the latent layers have no values."""
    for i, (layer, one_v) in enumerate(zip(layers, v, strict=True)):
        if (layer.rank is None) == (one_v is None):
            what = "no values, for they are part of its keys" if layer.rank else "values"
            raise ValueError(f"v must have {'None' if layer.rank else 'an array'} for layer {i}, which stores {what}.")


def refuse_latent(cache: Cache, whose: str) -> None:
    """Raises where a layer keeps latent rows: only the model's weights make keys and values of heads from them."""
    latent = [i for i, layer in enumerate(cache.config.layers) if layer.rank is not None]
    if latent:
        raise ValueError(
            f"{whose} keeps keys and values of heads, but layer {latent[0]} keeps latent rows, from which only the "
            "model's weights make them: compute the tokens anew there."
        )


def as_array(x: Any) -> Any:
    """Returns a NumPy or JAX array; a PyTorch tensor becomes a NumPy array, which lacks a native bfloat16."""
    if hasattr(x, "detach"):
        x = x.detach().cpu()
        if str(x.dtype) == "torch.bfloat16":
            return np.asarray(x.float()).astype(jnp.bfloat16)
    return x if isinstance(x, jax.Array) else np.asarray(x)


def infer_layer(k: Any, v: Any, *, heads: int, dtype: Any = None) -> LayerConfig:
    """Returns the config of a layer with such keys and values, whose last axis is the width."""
    v_head_dim = None if v is None else v.shape[-1]
    return LayerConfig(num_kv_heads=heads, head_dim=k.shape[-1], v_head_dim=v_head_dim, dtype=dtype)


def check_widths(layers: Sequence[LayerConfig], v: Sequence[Any]) -> None:
    """Raises ValueError unless values are as wide as the layers say."""
    for i, (layer, one_v) in enumerate(zip(layers, v, strict=True)):
        if one_v is not None and one_v.shape[-1] != layer.value_dim:
            raise ValueError(f"v of layer {i} has heads of {one_v.shape[-1]}, but the layer of {layer.value_dim}.")


def _config(k: list[Any], v: list[Any], layers: Sequence[LayerConfig] | None, fields: dict[str, Any]) -> CacheConfig:
    given = [x.shape[2:] for x in k]
    if layers is None:
        layers = tuple(infer_layer(k, v, heads=k.shape[2]) for k, v in zip(k, v, strict=True))
    if fields.get("layout") != "contiguous" and not {"num_blocks", "max_tokens"} & fields.keys():
        # A row's last block may be partly used: whole blocks for every row.
        size = CacheConfig(layers=layers, **fields | {"max_tokens": fields["max_seqs"]}).block_size
        fields = fields | {"max_tokens": fields["max_seqs"] * -(-fields["max_seq_len"] // size) * size}
    config = CacheConfig(layers=layers, **fields)
    named = [(config.layers[i].num_kv_heads, config.layers[i].head_dim) for i in model_layers(config)]
    if named != given:
        raise ValueError(f"layers say (num_kv_heads, head_dim) {named}, but the arrays have {given}.")
    stored = [config.layers[i] for i in model_layers(config)]
    check_latent(stored, v)
    check_widths(stored, v)
    return config


def row_lengths(lengths: Any, rows: int, most: int) -> np.ndarray:
    lengths = require_host("lengths", lengths)
    if not np.issubdtype(lengths.dtype, np.integer) or lengths.shape not in ((), (rows,)):
        raise ValueError(
            f"lengths must be one integer for each of the {rows} rows, not {lengths.dtype}{list(lengths.shape)}."
        )
    lengths = np.broadcast_to(lengths, (rows,))
    if ((lengths < 0) | (lengths > most)).any():
        raise ValueError(f"lengths must be from 0 to {most}, but are {lengths.tolist()}.")
    return lengths.astype(np.int32)


def row_numbers(cache: Cache, rows: Sequence[int] | None) -> np.ndarray:
    count = cache.lengths.shape[0]
    return np.arange(count) if rows is None else np.asarray(row_indices("rows", require_host("rows", rows), count))
