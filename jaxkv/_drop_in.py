"""Drop-in replacements with a cache for Flax's and JAX's `dot_product_attention`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._core.attention.attention import attention
from jaxkv._core.attention.attention_options import to_array
from jaxkv._core.config.validation import integer, read_list, show


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: Any = None,
    mask: Any = None,
    broadcast_dropout: bool = True,
    dropout_rng: Any = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    promote_dtype: Any = None,
    is_causal: bool = False,
    *,
    cache: Any = None,
    **options: Any,
) -> tuple[Any, Any]:
    """Computes Flax's `dot_product_attention` over a paged cache: its arguments and `cache=`; also returns the cache.

    With a cache the step's keys and values are stored, and attention is causal over all tokens of the row, whatever
    `is_causal` says; see `attention`. Without a cache this is Flax's own function.

    Args:
      query: `[S, T, H, D]` padded or `[N, H, D]` packed; for the rows that `extend` has prepared.
      key, value: the same with K heads: this step's tokens alone.
      mask: true where a token may attend, broadcastable to `[S, 1, T, C]` (packed: `[1, N, C]`); column c is the row's
        position c. A mask only restricts causal attention. Omit a mask that only marks causality or padding: the cache
        knows both, and kernels take no mask.
      dtype: queries, keys and values are first cast to this dtype.
      bias, module, dropout_rate: refused with a cache, the last unless `deterministic`.
      broadcast_dropout, dropout_rng, precision, promote_dtype, is_causal: ignored with a cache.
      cache: one of a cache's `layers`, or a cache, with `layer=`.
      **options: with a cache, `layer`, `step`, `implementation`, `scale`, `soft_cap`, `sinks`, `window` and
        `return_lse`, as in `attention`.

    Returns:
      `(out, cache)`; out is `[S, T, H, D]` or `[N, H, D]`.

    Raises:
      ValueError: names arguments that a cache does not support; and as `attention`.

    >>> import jax.numpy as jnp, jaxkv
    >>> sizes = dict(num_layers=1, num_kv_heads=2, head_dim=8, max_seqs=2, max_seq_len=64)
    >>> cache = jaxkv.extend(jaxkv.init(jaxkv.CacheConfig.uniform(**sizes)), [3, 1])
    >>> q, kv = jnp.ones((2, 3, 4, 8)), jnp.ones((2, 3, 2, 8))
    >>> out, layer = jaxkv.dot_product_attention(q, kv, kv, cache=cache.layers[0])
    >>> out.shape, cache.with_layer(0, layer).lengths.tolist()
    ((2, 3, 4, 8), [3, 1])
    """
    if cache is None:
        from flax import nnx

        _refuse("without a cache", options)
        promote = {} if promote_dtype is None else {"promote_dtype": promote_dtype}
        out = nnx.dot_product_attention(
            query,
            key,
            value,
            bias,
            mask,
            broadcast_dropout,
            dropout_rng,
            dropout_rate,
            deterministic,
            dtype,
            precision,
            module,
            is_causal=is_causal,
            **promote,
        )
        return out, None
    drops = dropout_rate > 0 and not deterministic
    _refuse(
        "with a cache", {"bias": bias, "module (sow_weights)": module, "dropout_rate": dropout_rate * drops or None}
    )
    if dtype is not None:
        query, key, value = (None if x is None else x.astype(dtype) for x in (query, key, value))
    options |= _read_mask(mask, query, cache)
    return attention(query, key, value, cache, **options)


def jax_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
    cache: Any = None,
    **options: Any,
) -> tuple[Any, Any]:
    """Computes `jax.nn.dot_product_attention` over a paged cache: its arguments and `cache=`; also returns the cache.

    With a cache the step's keys and values are stored, and attention is causal over all tokens of the row, whatever
    `is_causal` says; see `attention`. Without a cache this is JAX's own function.

    Args:
      query, key, value, mask, cache: as in `jaxkv.dot_product_attention`.
      scale: factor of the logits; default `head_dim ** -0.5`.
      local_window_size: `(left, right)`, or one number for both: a token sees `left` tokens before itself. With a cache
        no token sees later tokens.
      implementation: None, "xla", "gpu", "tpu" or "reference", as in `attention`; "cudnn" cannot read blocks.
      return_residual: return `(out, lse)` as output; lse is the log of the softmax's denominator, `[S, T, H]`.
      bias, query_seq_lengths, key_value_seq_lengths: refused with a cache, which knows its lengths.
      is_causal: ignored with a cache.
      **options: with a cache, `layer`, `step`, `soft_cap` and `sinks`, as in `attention`.

    Returns:
      `(out, cache)`, out as JAX's function returns it.

    Raises:
      ValueError: names arguments that a cache does not support; and as `attention`.

    >>> import jax.numpy as jnp, jaxkv
    >>> sizes = dict(num_layers=1, num_kv_heads=2, head_dim=8, max_seqs=2, max_seq_len=64)
    >>> cache = jaxkv.extend(jaxkv.init(jaxkv.CacheConfig.uniform(**sizes)), [1, 1])
    >>> q, kv = jnp.ones((2, 1, 4, 8)), jnp.ones((2, 1, 2, 8))
    >>> out, layer = jaxkv.jax_attention(q, kv, kv, scale=0.125, cache=cache.layers[0])
    >>> out.shape
    (2, 1, 4, 8)
    """
    if cache is None:
        _refuse("without a cache", options)
        out = jax.nn.dot_product_attention(  # type: ignore[call-overload]
            query,
            key,
            value,
            bias,
            mask,
            scale=scale,
            is_causal=is_causal,
            query_seq_lengths=query_seq_lengths,
            key_value_seq_lengths=key_value_seq_lengths,
            local_window_size=local_window_size,
            implementation=implementation,
            return_residual=return_residual,
        )
        return out, None
    lengths = {"query_seq_lengths": query_seq_lengths, "key_value_seq_lengths": key_value_seq_lengths}
    _refuse("with a cache", {"bias": bias, **lengths, "implementation='cudnn'": implementation == "cudnn" or None})
    if local_window_size is not None:
        options["window"] = _left_of(local_window_size) + 1
    options |= {"scale": scale, "implementation": implementation, "return_lse": return_residual}
    return attention(query, key, value, cache, **options, **_read_mask(mask, query, cache))


def _left_of(window: Any) -> int:
    """Returns the left size of a `local_window_size`. Raises ValueError."""
    sides = read_list("local_window_size", window) if np.ndim(window) else [window] * 2
    if len(sides) != 2:
        raise ValueError(f"local_window_size must be (left, right), or one number for both, not {show(window)}.")
    left, _ = (integer("local_window_size", side, least=0) for side in sides)
    return left


def _refuse(when: str, given: dict[str, Any]) -> None:
    if unknown := [name for name, x in given.items() if x is not None]:
        instead = " (a slope by distance is alibi=, True and False mask=)" * ("bias" in unknown)
        out = "give deterministic=True, as model.eval() does" if unknown == ["dropout_rate"] else "leave it out"
        raise ValueError(f"Attention {when} takes no {' and no '.join(unknown)}{instead}: {out}.")


def _read_mask(mask: Any, query: jax.Array, cache: Any) -> dict[str, Any]:
    """Returns a mask without its axis of heads, as `attention` expects it: `[S, T, C]`, or `[N, C]` packed."""
    if mask is None:
        return {}
    mask = to_array("mask", mask)
    rank = query.ndim  # with an axis of heads, and C in place of D
    if mask.ndim > rank or (mask.ndim > 2 and mask.shape[-3] != 1):
        wanted = "[S, 1, T, C]" if rank == 4 else "[1, N, C]"
        raise ValueError(
            f"mask must broadcast to {wanted}, one for all heads, but its shape is {mask.shape}: the heads of a cache "
            "see the same tokens."
        )
    is_known = not isinstance(mask, jax.core.Tracer) and mask.is_fully_addressable
    if is_known and jnp.issubdtype(mask.dtype, jnp.floating) and bool((mask < 0).any()):
        raise ValueError(
            "mask must be true, or not 0, where a token may attend, but it has negative numbers, as if to be added to "
            "the logits: give mask >= 0 in its place."
        )
    mask = mask.astype(bool).reshape((1,) * (rank - mask.ndim) + mask.shape)
    mask = mask[:, 0] if rank == 4 else mask[0]
    if any(m not in (1, n) for m, n in zip(mask.shape, query.shape[:-2], strict=False)):
        raise ValueError(
            f"mask must broadcast to the query's tokens {query.shape[:-2]}, but without its heads it has the shape "
            f"{mask.shape}."
        )
    columns = cache.config.max_seq_len if mask.shape[-1] == 1 else mask.shape[-1]  # a single column broadcasts to all
    return {"mask": jnp.broadcast_to(mask, (*query.shape[:-2], columns))}
