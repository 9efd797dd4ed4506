"""Causal attention without a cache, for training and for checks: every key and value is at hand."""

import jax
import jax.numpy as jnp


def dense_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    window: int | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """What [`jaxkv.attention`][] gives for rows that start empty and bring all their tokens at once.

    Args:
      q: `[S, T, H, D]`, or `[T, H, D]` for one sequence.
      k, v: `[S, T, K, D]` or `[T, K, D]`; H must be a multiple of K.
      scale, soft_cap, window, sinks: as for `jaxkv.attention`.

    Returns:
      The output in q's shape and dtype. Softmax and accumulation are in float32.
    """
    *leading, num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[-2]
    if num_heads % num_kv_heads:
        raise ValueError(
            f"{num_heads} query heads cannot be shared among {num_kv_heads} KV heads: H must be a multiple of K."
        )
    scale = head_dim**-0.5 if scale is None else scale
    # Heads first, and the G queries of a KV head one after another: one plain batched matrix product per KV head.
    grouped = q.reshape(*leading, num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
    grouped = jnp.moveaxis(grouped, -4, -2)  # [..., K, G, T, D]
    k, v = jnp.moveaxis(k, -2, -3), jnp.moveaxis(v, -2, -3)  # [..., K, C, D]
    shape = grouped.shape
    grouped = grouped.reshape(*shape[:-3], -1, head_dim)
    logits = jnp.einsum("...qd,...cd->...qc", grouped, k, preferred_element_type=jnp.float32) * scale
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)

    logits = logits.reshape(*shape[:-1], num_tokens)  # [..., K, G, T, C]
    distance = jnp.arange(num_tokens)[:, None] - jnp.arange(num_tokens)[None]  # [T, C]
    seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    logits = jnp.where(jnp.expand_dims(seen, tuple(range(logits.ndim - 2))), logits, -jnp.inf)
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape((1,) * len(leading) + (num_kv_heads, -1, 1, 1))
        logits = jnp.concatenate([logits, jnp.broadcast_to(sinks, (*shape[:-1], 1))], axis=-1)
    weights = jax.nn.softmax(logits, axis=-1)[..., :num_tokens].astype(v.dtype).reshape(*grouped.shape[:-1], num_tokens)
    out = jnp.einsum("...qc,...cd->...qd", weights, v, preferred_element_type=jnp.float32)
    return jnp.moveaxis(out.reshape(shape), -2, -4).reshape(q.shape).astype(q.dtype)
