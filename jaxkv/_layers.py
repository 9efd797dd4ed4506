"""Shared helpers of the two Flax adapters: attention with or without a cache, and token positions."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxkv._core.attention.attention import attention
from jaxkv._core.attention.plan import Step, positions
from jaxkv._core.attention.query_capture import capture_rotation
from jaxkv._core.config.validation import flag, integer, show
from jaxkv._core.state.state import Layer
from pallas_kernels.api.arguments import check_numbers
from pallas_kernels.common.batch import as_float


def attend_or_dense(
    q: jax.Array,
    k: jax.Array,
    v: Any,
    cache: Any,
    layer: Any,
    step: Step | None,
    position_fn: Any = None,
    deterministic: bool = False,
    chunk: int | None = None,
    **options: Any,
):
    """Returns `(out, cache)` of `jaxkv.attention`, or without a cache of `dense_attention`. A window of None is the
    cache's own, and a cache has its own chunks. `position_fn` has rotated queries and keys. `deterministic` applies to
    attention with a cache."""
    if cache is None:
        return dense_attention(q, k, v, chunk=chunk, **options), None
    options = {name: x for name, x in options.items() if x is not None}
    if flag("deterministic", deterministic):
        options["deterministic"] = True
    with capture_rotation(position_fn):
        return attention(q, k, v, cache, layer=None if isinstance(cache, Layer) else layer, step=step, **options)


def token_positions(shape: tuple[int, ...], cache: Any = None) -> jax.Array:
    """Returns positions, `i32` of `shape`: the cache's, or without a cache 0, 1, 2 ... along the last axis."""
    if cache is None:
        return jax.lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)
    return positions(cache, shape)


def own_inputs(inputs_q: Any, inputs_k: Any, inputs_v: Any) -> tuple[Any, Any]:
    """Returns the inputs of keys and values by Flax's rule: each defaults to the preceding input."""
    if inputs_k is None and inputs_v is not None:
        raise ValueError("inputs_v needs inputs_k: for both to be the same, give it as inputs_k alone.")
    inputs_k = inputs_q if inputs_k is None else inputs_k
    return inputs_k, inputs_k if inputs_v is None else inputs_v


def num_kv_heads_of(num_heads: int, num_kv_heads: int | None) -> int:
    """Returns the number of KV heads, by default `num_heads`. Raises ValueError if it does not divide `num_heads`."""
    num_heads = integer("num_heads", num_heads, least=1)
    num_kv_heads = num_heads if num_kv_heads is None else integer("num_kv_heads", num_kv_heads, least=1)
    if num_heads % num_kv_heads:
        raise ValueError(
            f"{num_heads} query heads cannot be shared among {num_kv_heads} KV heads: num_heads must be a multiple of "
            "num_kv_heads."
        )
    return num_kv_heads


def head_dim_of(in_features: int, num_heads: int, head_dim: int | None) -> int:
    """Returns the head dimension, by default `in_features / num_heads`. Raises ValueError if that is no integer."""
    in_features = integer("in_features", in_features, least=1)
    if head_dim is None and in_features % num_heads:
        raise ValueError(f"in_features {in_features} is not a multiple of num_heads {num_heads}: give head_dim.")
    return in_features // num_heads if head_dim is None else integer("head_dim", head_dim, least=1)


def read_dtype(name: str, dtype: Any) -> jnp.dtype:
    """Returns a dtype of floating point numbers. Raises ValueError."""
    try:
        found = jnp.dtype(dtype)
    except (TypeError, ValueError):
        found = jnp.dtype(object)
    if dtype is None or not jnp.issubdtype(found, jnp.floating):
        raise ValueError(f"{name} must be a floating point dtype, such as 'bfloat16', not {show(dtype)}.")
    return found


def dense_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    window: int | None = None,
    chunk: int | None = None,
    sinks: jax.Array | None = None,
    mask: jax.Array | None = None,
) -> jax.Array:
    """Computes causal attention of whole sequences from dense keys and values: for training, and as a reference.

    Args:
      q: `[S, T, H, D]`, or `[T, H, D]` for one sequence.
      k, v: `[S, C, K, D]` or `[C, K, D]`, of the T tokens, and behind them of what else they may see, whatever its
        place; H must be a multiple of K. Values may be narrower than keys.
      scale, soft_cap, window, chunk, sinks: as for `pallas_kernels.paged_attention`.
      mask: `bool[S, T, C]` or `bool[T, C]`, and-ed with causality: which keys each token may see.

    Returns:
      The output in q's shape, of the values' width, and dtype. Softmax and accumulation are in float32.

    Raises:
      ValueError: invalid options.
    """
    check_numbers(scale, soft_cap, window, chunk)
    scale, soft_cap = as_float(scale), as_float(soft_cap)
    *leading, num_tokens, num_heads, head_dim = q.shape
    num_keys, num_kv_heads = k.shape[-3:-1]
    scale = head_dim**-0.5 if scale is None else scale
    # Heads come first, with the G queries of a KV head adjacent: one plain batched matrix product per KV head.
    grouped = q.reshape(*leading, num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
    grouped = jnp.moveaxis(grouped, -4, -2)  # [..., K, G, T, D]
    shape = grouped.shape
    grouped = grouped.reshape(*shape[:-3], -1, head_dim)
    k, v = jnp.moveaxis(k, -2, -3), jnp.moveaxis(v, -2, -3)  # [..., K, C, D]
    logits = jnp.einsum("...qd,...cd->...qc", grouped, k, preferred_element_type=jnp.float32) * scale
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)

    logits = logits.reshape(*shape[:-1], num_keys)  # [..., K, G, T, C]
    query, key = jnp.arange(num_tokens)[:, None], jnp.arange(num_keys)[None]  # positions [T, 1], [1, C]
    seen = query >= key if window is None else (query >= key) & (query - key < window)
    seen = seen if chunk is None else seen & (query // chunk == key // chunk)
    seen = seen if num_keys == num_tokens else seen | (key >= num_tokens)
    seen = jnp.expand_dims(seen, tuple(range(logits.ndim - 2)))
    seen = seen if mask is None else seen & mask[..., None, None, :, :]
    logits = jnp.where(seen, logits, jnp.finfo(jnp.float32).min)
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape((1,) * len(leading) + (num_kv_heads, -1, 1, 1))
        logits = jnp.concatenate([logits, jnp.broadcast_to(sinks, (*shape[:-1], 1))], axis=-1)
    weights = jax.nn.softmax(logits, axis=-1)[..., :num_keys].astype(v.dtype).reshape(*grouped.shape[:-1], num_keys)
    out = jnp.einsum("...qc,...cd->...qd", weights, v, preferred_element_type=jnp.float32)
    out = jnp.moveaxis(out.reshape(*shape[:-1], v.shape[-1]), -2, -4)
    return out.reshape(*q.shape[:-1], v.shape[-1]).astype(q.dtype)
