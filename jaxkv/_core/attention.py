"""Attention over a cache: where the state meets the kernels."""

from typing import Any

import jax

import pallas_kernels
from jaxkv._core.plan import Step
from jaxkv._core.state import Layer
from jaxkv._core.write import (
    as_pool,
    check_tokens,
    gathered,
    layer_of,
    offsets_of,
    open_layer,
    spread,
    storage,
    turned,
    values_of,
)  # fmt: skip


def attention(
    q: jax.Array, k: jax.Array | None, v: jax.Array | None, cache: Any, *, layer: Any = None,
    step: Step | None = None, implementation: str | None = None, **options: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """Store this step's keys and values of one layer, and attend causally to everything up to each token.

    Call `extend` once before the step's first layer; it says which tokens there are.

    Args:
      q: `[S, T, H, D]` padded (row s uses its first `num_tokens[s]` places) or `[N, H, D]` packed (rows one after
        another, as many places each as `num_tokens` asked for).
      k, v: the same with K heads. H must be a multiple of K. None for a layer that shares another's (`shares_with`).
        For a latent layer (`LayerConfig.latent`) q is absorbed, k `[.., 1, rank + rope_dim]`, v None, and out
        `[.., H, rank]`.
      cache: a cache, or one of its `layers`.
      layer: the layer's index, for a cache. In a stacked one it may be traced.
      step: what `plan_step` made of this step; without it the same is found out here.
      implementation: None picks what the platform has and falls back to "xla"; or "xla", "gpu", "tpu", "reference".
      **options: `scale` (which a latent layer must be given), `soft_cap`, `sinks`, `window`, `mask` and `return_lse`,
        as in `pallas_kernels.paged_attention`. `window` is the layer's own by default, and cannot be wider.

    Returns:
      `(out, cache)`; out has q's shape and dtype, and is 0 for padding and for rows that failed. With `return_lse`,
      out is `(out, lse)`. Of a layer, `(out, layer)`.

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

    Layer by layer, for models whose blocks take a cache of their own and give it back:

    >>> cache = jaxkv.extend(cache, [3, 1])
    >>> layers = list(cache.layers)
    >>> out, layers[0] = jaxkv.attention(q, kv, kv, layers[0])
    >>> cache = cache.with_layers(layers)
    """
    if k is None and v is None:
        one = layer_of(cache, layer)
        if one.config.owner(one.number) != one.number:
            return attend(q, cache, layer=layer, step=step, implementation=implementation, **options), cache
    one, put_back = open_layer(cache, layer, step, stores=True, q=q, k=k, **values_of(cache, layer, v))
    t = one.tables
    options = _for_rows(one, step, options)
    with jax.named_scope("attention"):
        q, k, v = (spread(step, t, turned(one, x)) for x in (q, k, v))
        out, written = pallas_kernels.write_and_attend(
            q, k, v, one.pool.kv, one.blocks, t.lengths, t.new, offsets=offsets_of(q, t),
            implementation=implementation, **storage(one), **options,
        )  # fmt: skip
        return _for_tokens(one, step, out), put_back(as_pool(written))


def attend(
    q: jax.Array, cache: Any, *, layer: Any = None, step: Step | None = None, implementation: str | None = None,
    **options: Any,
) -> Any:  # fmt: skip
    """The reading half of `attention`: attend to what `write` or `append` has stored. Arguments as there.

    Returns:
      The output, or `(out, lse)` with `return_lse`.
    """
    one, _ = open_layer(cache, layer, step, q=q)
    t = one.tables
    options = _for_rows(one, step, options)
    with jax.named_scope("attend"):
        q = spread(step, t, turned(one, q))
        out = pallas_kernels.paged_attention(
            q, one.pool.kv, one.blocks, t.lengths, t.new, offsets=offsets_of(q, t), implementation=implementation,
            **storage(one), **options,
        )  # fmt: skip
        return _for_tokens(one, step, out)


def explain(
    q: Any, cache: Any, *, layer: Any = None, platform: str | None = None, implementation: str | None = None,
    **options: Any,
) -> pallas_kernels.Choice:  # fmt: skip
    """Which implementation `attend` picks for such queries, and why.

    Args:
      q: the queries, or a `jax.ShapeDtypeStruct` of their shape and dtype.
      cache: a cache, or one of its layers.
      layer: the layer's index; default: the first.
      platform: "cpu", "cuda" or "tpu"; default: the one a program traced now would be lowered for.

    >>> import jax, jax.numpy as jnp, jaxkv
    >>> layer = jaxkv.LayerConfig(num_kv_heads=2, head_dim=8)
    >>> cache = jaxkv.init(jaxkv.CacheConfig(layers=(layer,), max_seqs=2, max_seq_len=64, num_blocks=4))
    >>> print(jaxkv.explain(jax.ShapeDtypeStruct((2, 1, 4, 8), jnp.bfloat16), cache, platform="cpu").reason)
    There are no kernels for the platform 'cpu'; XLA runs on all of them.
    """
    one = layer_of(cache, 0 if layer is None and not isinstance(cache, Layer) else layer)
    check_tokens(one, {"q": q})
    return pallas_kernels.explain(
        q=q, kv=one.pool.kv, tables=one.tables.tables, platform=platform, implementation=implementation,
        **storage(one), **_with_window(one, options),
    )  # fmt: skip


def _for_rows(one: Layer, step: Step | None, options: dict[str, Any]) -> dict[str, Any]:
    """The options as the kernels take them, those with an entry for each token spread as the tokens are."""
    if one.layer_config.rank is not None and options.get("scale") is None:
        raise ValueError(
            f"Layer {one.number} is latent, so scale= must be given: it goes by the width that heads had before "
            "queries were absorbed, which the cache does not know."
        )
    options = _with_window(one, options)
    if "mask" in options:
        options["mask"] = spread(step, one.tables, options["mask"])
    return options


def _for_tokens(one: Layer, step: Step | None, out: Any) -> Any:
    if isinstance(out, tuple):
        return _for_tokens(one, step, out[0]), gathered(step, out[1], -float("inf"))
    return gathered(step, turned(one, out), 0.0)


def _with_window(one: Layer, options: dict[str, Any]) -> dict[str, Any]:
    own, asked = one.layer_config.window, options.get("window")
    if asked is None:
        return options | {"window": own}
    if own is not None and asked > own:
        raise ValueError(
            f"window={asked} is wider than what layer {one.number} keeps, a window of {own} tokens: give its "
            "LayerConfig the wider one."
        )
    return dict(options)
