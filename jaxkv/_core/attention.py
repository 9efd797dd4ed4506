"""Attention over a cache: where the state meets the kernels."""

from typing import Any

import jax

import pallas_kernels
from jaxkv._core.cache import Cache
from jaxkv._core.pools import check_step, check_stores
from jaxkv._core.state import Pool
from jaxkv._core.tables import drop_unfit


def attention(
    q: jax.Array, k: jax.Array | None, v: jax.Array | None, cache: Cache, *, layer: int,
    implementation: str | None = None, **options: Any,
) -> tuple[Any, Cache]:  # fmt: skip
    """Store this step's keys and values of one layer, and attend causally to everything up to each token.

    Call `extend` once before the step's first layer; it says which tokens there are.

    Args:
      q: `[S, T, H, D]` padded (row s uses its first `num_tokens[s]` places) or `[N, H, D]` packed (rows one after
        another, as many places each as `num_tokens` asked for).
      k, v: the same with K heads. H must be a multiple of K. None for a layer that shares another's (`shares_with`).
      layer: the layer's index.
      implementation: None picks what the platform has and falls back to "xla"; or "xla", "gpu", "tpu", "reference".
      **options: `scale`, `soft_cap`, `sinks`, `window`, `mask` and `return_lse`, as in
        `pallas_kernels.paged_attention`. `window` is the layer's own by default, and cannot be wider.

    Returns:
      `(out, cache)`; out has q's shape and dtype, and is 0 for padding and for rows that failed. With `return_lse`,
      out is `(out, lse)`.

    Raises:
      ValueError, IndexError: shapes, dtypes, options or a layer that do not fit.

    >>> import jax.numpy as jnp, jaxkv
    >>> layer = jaxkv.LayerConfig(num_kv_heads=2, head_dim=8)
    >>> cache = jaxkv.init(jaxkv.CacheConfig(layers=(layer,), max_seqs=2, max_seq_len=64, num_blocks=4))
    >>> cache = jaxkv.extend(cache, [3, 1])
    >>> q, kv = jnp.ones((2, 3, 4, 8)), jnp.ones((2, 3, 2, 8))
    >>> out, cache = jaxkv.attention(q, kv, kv, cache, layer=0)
    >>> out.shape
    (2, 3, 4, 8)
    """
    if (k is None and v is None) and cache.config.owner(layer) != layer:
        return attend(q, cache, layer=layer, implementation=implementation, **options), cache
    check_step(cache, layer, q=q, k=k, v=v)
    check_stores(cache, layer)
    cache = drop_unfit(cache, q.shape[:-2])
    tables = cache.layer(layer).tables
    out, kv = pallas_kernels.write_and_attend(
        q, k, v, cache.pool(layer).kv, tables.tables, tables.lengths, tables.new, offsets=tables.offsets,
        implementation=implementation, **_with_window(cache, layer, options),
    )  # fmt: skip
    return out, cache.replace_pool(layer, Pool(kv=kv))


def attend(q: jax.Array, cache: Cache, *, layer: int, implementation: str | None = None, **options: Any) -> Any:
    """The reading half of `attention`: attend to what `write` or `append` has stored. Arguments as there.

    Returns:
      The output, or `(out, lse)` with `return_lse`.
    """
    check_step(cache, layer, q=q)
    tables = drop_unfit(cache, q.shape[:-2]).layer(layer).tables
    return pallas_kernels.paged_attention(
        q, cache.pool(layer).kv, tables.tables, tables.lengths, tables.new, offsets=tables.offsets,
        implementation=implementation, **_with_window(cache, layer, options),
    )  # fmt: skip


def explain(
    q: Any, cache: Cache, *, layer: int = 0, platform: str | None = None, implementation: str | None = None,
    **options: Any,
) -> pallas_kernels.Choice:  # fmt: skip
    """Which implementation `attend` picks for such queries, and why.

    Args:
      q: the queries, or a `jax.ShapeDtypeStruct` of their shape and dtype.
      platform: "cpu", "cuda" or "tpu"; default: the one a program traced now would be lowered for.

    >>> import jax, jax.numpy as jnp, jaxkv
    >>> layer = jaxkv.LayerConfig(num_kv_heads=2, head_dim=8)
    >>> cache = jaxkv.init(jaxkv.CacheConfig(layers=(layer,), max_seqs=2, max_seq_len=64, num_blocks=4))
    >>> print(jaxkv.explain(jax.ShapeDtypeStruct((2, 1, 4, 8), jnp.bfloat16), cache, platform="cpu").reason)
    There are no kernels for the platform 'cpu'; XLA runs on all of them.
    """
    check_step(cache, layer, q=q)
    tables = cache.layer(layer).tables
    return pallas_kernels.explain(
        q=q, kv=cache.pool(layer).kv, tables=tables.tables, platform=platform, implementation=implementation,
        **_with_window(cache, layer, options),
    )  # fmt: skip


def _with_window(cache: Cache, layer: int, options: dict[str, Any]) -> dict[str, Any]:
    own, asked = cache.layer_config(layer).window, options.get("window")
    if asked is None:
        return options | {"window": own}
    if own is not None and asked > own:
        raise ValueError(
            f"window={asked} is wider than what layer {layer} keeps, a window of {own} tokens: give its "
            "LayerConfig the wider one."
        )
    return options
