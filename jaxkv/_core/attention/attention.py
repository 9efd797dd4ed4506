"""Attention over a cache: where the state meets the kernels."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from jaxkv._core.attention.attention_options import read_options, read_tree
from jaxkv._core.attention.plan import Step
from jaxkv._core.attention.query_capture import note_queries
from jaxkv._core.attention.shared_prefix import shared_in, sharing_in_words
from jaxkv._core.attention.write import (
    as_pool,
    check_heads,
    check_tokens,
    gathered,
    is_spread,
    layer_of,
    layer_specs,
    new_rows,
    offsets_of,
    open_layer,
    outputs,
    queries,
    spread,
    storage,
    stripe_of,
    turned,
    values_of,
)  # fmt: skip
from jaxkv._core.config.validation import flag
from jaxkv._core.state.arguments import is_known, read_numbers, row_counts
from jaxkv._core.state.head_rows import (
    join_heads,
    own_lines,
    seen_by_rows,
    split_heads,
    split_offsets,
    split_tokens,
    to_lines,
)
from jaxkv._core.state.shard_local import OwnHeads, Part, own_heads, part_of, runs_of
from jaxkv._core.state.sharding import NEW, POOL, WHOLE, Q, heads_at, on_shards, parts_of_blocks
from jaxkv._core.state.state import Layer, Pool
from pallas_kernels.api.cascade import why_alone

BY_HEAD = ("sinks", "alibi")  # options with an entry for each query head
BY_TOKEN = {"mask", "spans", "tree"}  # and for each token


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
      scale: what the logits are multiplied by, a float or a scalar array; default `head_dim ** -0.5`. A latent layer
        must be given one.
      soft_cap: logits become `soft_cap * tanh(logits / soft_cap)`, after `scale`.
      window: a token sees only the last `window` positions, its own included; default: the layer's own, which it cannot
        exceed. A layer's chunk is always its own.
      sink_tokens: with `window`, it sees the first so many positions of its row, too (StreamingLLM); default: the
        layer's own. A layer made with a window and without them has given the first ones back.
      sinks: `f32[H]`, one more logit per head in the softmax's denominator, without a value.
      mask: `bool[S, T, C]` padded or `bool[N, C]` packed, and-ed with causality: may the token see position c of its
        row? Positions from C on are not seen. Kernels for TPU and GPU take none: then XLA runs.
      alibi: `f32[H]`, the slope of what each logit loses with the distance of the positions, after `soft_cap`.
      spans: `i32[S, T]` or `i32[N]`, 0 for none: tokens of one row and one step with the same number see each other,
        whatever their order, window and chunk. Kernels take those that stand one after another; else XLA runs.
      tree: `i32[S, T]` or `i32[N]`, each token's parent, counted from the row's first new token; -1 is the context. A
        token sees the context, its ancestors and itself. Parents that are known on the host must be -1 or an earlier
        token; a step planned with a tree has it already.
      deterministic: a row's output is the same to the bit, whoever else is in the batch, in any row and blocks, and
        whether a prompt comes at once or in pieces of two tokens or more; see `pallas_kernels.paged_attention`.
      cascade: False: read every row by itself, also in a step that was planned with `cascade=True`.
      return_lse: also return the natural logarithm of the softmax's denominator, `f32[S, T, H]` or `f32[N, H]`.

    Returns:
      `(out, cache)`; out has q's shape and dtype, and is 0 for padding and for rows that failed. With `return_lse`,
      out is `(out, lse)`. Of a layer, `(out, layer)`.

    Raises:
      ValueError, IndexError: shapes, dtypes, options or a layer that do not fit. TypeError: no such option.

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
    if options.get("causal", True) is not True:
        raise ValueError(
            "attention is causal, for its tokens are the row's last; what is stored already is read by "
            "attend(q, cache, layer=..., causal=False)."
        )
    if k is None and v is None:
        one = layer_of(cache, layer)
        if one.config.owner(one.number) != one.number:
            return attend(q, cache, layer=layer, step=step, implementation=implementation, **options), cache
    one, put_back = open_layer(cache, layer, step, stores=True, q=q, k=k, **values_of(cache, layer, v))
    note_queries(one.number, q, options.get("scale"))
    arrays, static = _divided(_for_rows(one, step, q.shape[:-2], options))
    check_heads(one, q=q, k=k, v=v, **arrays, **static)
    with jax.named_scope("attention"):
        token, outs = heads_at(q.ndim - 2, NEW), _out_specs(q, static)
        arguments = (one, step, dict(q=q, k=k, v=v), arrays)
        specs = (layer_specs(one), WHOLE, dict(q=heads_at(q.ndim - 2, Q), k=token, v=token), _option_specs(arrays))
        out, pool = on_shards(
            one.pool, _store_and_attend, arguments, specs, (outs, POOL), query_heads=q.shape[-2],
            implementation=implementation, **static,
        )  # fmt: skip
        return out, put_back(pool)


def _store_and_attend(one: Layer, step: Step | None, new: dict, arrays: dict, *, implementation: Any, **static: Any):
    part, one = part_of(one.pool), own_lines(one)
    arrays, t = _of_lines(part, arrays), one.tables
    q, k, v = (spread(step, one, turned(one, new[name])) for name in ("q", "k", "v"))
    own = own_heads(one.pool, one.layer_config.num_kv_heads, q.shape[-2])
    q, arrays = _widened(own, q, arrays)
    offsets, (q, k, v) = offsets_of(q, one), (split_heads(one, x) for x in (q, k, v))
    q, (k, v) = queries(one, q), new_rows(one, k, v)
    out, written = pallas_kernels.write_and_attend(
        q, k, v, one.pool.kv, one.blocks, t.lengths, t.new, offsets=offsets,
        implementation=implementation, **storage(one), **_of_part(one.pool, arrays | static),
    )  # fmt: skip
    out = _of_whole(one.pool, outputs(one, out), arrays | static)
    return _for_tokens(one, step, own, out), as_pool(written, one, k)


def attend(
    q: jax.Array, cache: Any, *, layer: Any = None, step: Step | None = None, implementation: str | None = None,
    causal: bool = True, num_tokens: Any = None, **options: Any,
) -> Any:  # fmt: skip
    """The reading half of `attention`: attend to what `write` or `append` has stored. Arguments as there.

    Args:
      causal: False: the queries are another sequence's, and each sees all that its row holds (cross-attention). The
        cache is written once, and read by any number of steps.
      blocks: (an option) `i32[S, n]`: read these logical blocks of each row and no others, in increasing order, with
        -1 behind them.
      num_tokens: `i32[S]`, with `causal=False`: how many queries of each row there are; default: all T padded ones.

    Returns:
      The output, or `(out, lse)` with `return_lse`.

    >>> import jax.numpy as jnp, jaxkv
    >>> layer = jaxkv.LayerConfig(num_kv_heads=2, head_dim=8)
    >>> memory = jaxkv.init(jaxkv.CacheConfig(layers=(layer,), max_seqs=2, max_seq_len=64, num_blocks=4))
    >>> kv = jnp.ones((1, 2, 5, 2, 8))
    >>> memory = jaxkv.append(memory, kv, kv, [5, 3])
    >>> jaxkv.attend(jnp.ones((2, 9, 4, 8)), memory, layer=0, causal=False).shape
    (2, 9, 4, 8)
    """
    if causal is not True or num_tokens is not None:
        one, new, offsets = _open_memory(cache, layer, step, q, causal, num_tokens)
        given, options = None, _for_rows(one, None, q.shape[:-2], options) | {"causal": False}
    else:
        one, _ = open_layer(cache, layer, step, q=q)
        note_queries(one.number, q, options.get("scale"))
        t, given, options = one.tables, step, _for_rows(one, step, q.shape[:-2], options)
        new, offsets = t.new, None if is_spread(step) else offsets_of(q, one)
    arrays, static = _divided(options)
    check_heads(one, q=q, **arrays, **static)
    with jax.named_scope("attend"):
        arguments = (one, given, q, new, offsets, arrays)
        specs = (layer_specs(one), WHOLE, heads_at(q.ndim - 2, Q), WHOLE, WHOLE, _option_specs(arrays))
        return on_shards(
            one.pool, _attend, arguments, specs, _out_specs(q, static), query_heads=q.shape[-2],
            implementation=implementation, **static,
        )  # fmt: skip


def _attend(
    one: Layer, step: Step | None, q: jax.Array, new: jax.Array, offsets: jax.Array | None, arrays: dict, *,
    implementation: Any, **static: Any,
) -> Any:  # fmt: skip
    part, one = part_of(one.pool), own_lines(one)
    arrays, t = _of_lines(part, arrays), one.tables
    if part is not None:
        new, offsets = part.first(new), None if offsets is None else part.first(offsets)
    q = spread(step, one, turned(one, q))
    own = own_heads(one.pool, one.layer_config.num_kv_heads, q.shape[-2])
    q, arrays = _widened(own, q, arrays)
    q = queries(one, split_heads(one, q))
    out = pallas_kernels.paged_attention(
        q, one.pool.kv, one.blocks, t.lengths, new, offsets=offsets, implementation=implementation,
        **storage(one), **_of_part(one.pool, arrays | static),
    )  # fmt: skip
    return _for_tokens(one, step, own, _of_whole(one.pool, outputs(one, out), arrays | static))


def _open_memory(
    cache: Any, layer: Any, step: Step | None, q: jax.Array, causal: Any, num_tokens: Any
) -> tuple[Layer, jax.Array, jax.Array | None]:
    """A layer that other sequences read, how many queries each row has, and where packed ones start."""
    one = layer_of(cache, layer)
    token_axes = check_tokens(one, {"q": q})
    if flag("causal", causal):
        raise ValueError("num_tokens is for causal=False; otherwise extend has said how many tokens a row has.")
    if step is not None:
        raise ValueError("A step is planned for a cache's own new tokens: leave step out with causal=False.")
    rows, padded = one.rows, len(token_axes) == 2
    if num_tokens is None and not padded:
        raise ValueError("Packed queries need num_tokens, how many of them belong to each row.")
    everything = np.full(rows, token_axes[-1], np.int32)
    given = everything if num_tokens is None else read_numbers("num_tokens", num_tokens)
    new = row_counts("num_tokens", given, rows)
    if is_known(given) and (most := given.max(initial=0) if padded else given.sum()) > token_axes[-1]:
        raise ValueError(f"num_tokens asks for {most} queries, but q has places for {token_axes[-1]}.")
    new = jnp.clip(new, 0, token_axes[-1])
    offsets = None if padded else split_offsets(one, jnp.cumsum(new) - new, token_axes[0])
    return one, jnp.where(one.tables.failed, 0, to_lines(new, one.tables)), offsets


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
      **options: as for `attend`.

    Raises:
      TypeError: an option that `attend` does not take.

    >>> import jax, jax.numpy as jnp, jaxkv
    >>> layer = jaxkv.LayerConfig(num_kv_heads=2, head_dim=8)
    >>> cache = jaxkv.init(jaxkv.CacheConfig(layers=(layer,), max_seqs=2, max_seq_len=64, num_blocks=4))
    >>> print(jaxkv.explain(jax.ShapeDtypeStruct((2, 1, 4, 8), jnp.bfloat16), cache, platform="cpu").reason)
    There are no kernels for the platform 'cpu'; XLA runs on all of them.
    """
    one = layer_of(cache, 0 if layer is None and not isinstance(cache, Layer) else layer)
    check_tokens(one, {"q": q})
    options = {name: x for name, x in options.items() if name != "num_tokens"}
    cascades = flag("cascade", options.pop("cascade", True))
    q = jax.eval_shape(lambda q: queries(one, split_heads(one, q)), q)
    arguments = dict(q=q, tables=one.tables.tables, **storage(one) | parts_of_blocks(one.pool))
    arguments |= read_options(one, options)
    choice = pallas_kernels.explain(platform=platform, implementation=implementation, **arguments)
    reads_once = cascades and why_alone(choice.implementation, arguments) is None
    return choice._replace(reason=choice.reason + _padding_in_words(one) + sharing_in_words(one, reads_once))


def _padding_in_words(one: Layer) -> str:
    """How a layer's head_dim is stored, where that is not as it is."""
    head_dim, stored = one.layer_config.head_dim, one.pool.kv.shape[-1]
    if words := one.config.form(one.number).in_words:
        return f" {words} stand in one row of {stored}."
    padded = one.config.padded_head_dim(one.number)
    return "" if padded == head_dim else f" A head_dim of {head_dim} is stored as {padded}."


def _for_rows(one: Layer, step: Step | None, token_axes: tuple[int, ...], options: dict[str, Any]) -> dict[str, Any]:
    """The options as the kernels take them, those with an entry for each token spread as the tokens are."""
    if one.layer_config.rank is not None and options.get("scale") is None:
        raise ValueError(
            f"Layer {one.number} is latent, so scale= must be given: it goes by the width that heads had before "
            "queries were absorbed, which the cache does not know."
        )
    options = dict(options)
    if one.config.form(one.number).joins and options.get("scale") is None:
        options["scale"] = one.layer_config.head_dim**-0.5  # the kernels see the width of the row
    shared = shared_in(one, step) if flag("cascade", options.pop("cascade", True)) else None
    tree = read_tree(options.pop("tree", None), token_axes, seen_by_rows(one.tables, one.config))
    if step is not None and step.tree is not None:
        if tree is not None:
            raise ValueError("This step was planned with a tree: leave tree out, or plan the step without one.")
        tree = step.tree
    options = read_options(one, options | {"tree": tree})
    for name in BY_TOKEN & options.keys():
        options[name] = split_tokens(one, spread(step, one, options[name]))
    return options if shared is None else options | {"shared": shared}


def _divided(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options that are arrays, and those that are not."""
    arrays = {name: x for name, x in options.items() if isinstance(x, jax.Array | np.ndarray)}
    return arrays, {name: x for name, x in options.items() if name not in arrays}


def _option_specs(arrays: dict[str, Any]) -> dict[str, Any]:
    return {name: heads_at(0, Q) if name in BY_HEAD else WHOLE for name in arrays}


def _out_specs(q: jax.Array, static: dict[str, Any]) -> Any:
    heads = heads_at(q.ndim - 2, Q)
    return (heads, heads) if static.get("return_lse") else heads


def _widened(own: OwnHeads | None, q: jax.Array, arrays: dict[str, Any]) -> tuple[jax.Array, dict[str, Any]]:
    """Queries and options with a place for each KV head, where a device has more KV heads than its queries belong
    to."""
    if own is None:
        return q, arrays
    return own.spread(q, -2), {name: own.spread(x, -1) if name in BY_HEAD else x for name, x in arrays.items()}


def _of_lines(part: Part | None, options: dict[str, Any]) -> dict[str, Any]:
    """What is said of tokens, for those of the lines that a device has."""
    return options if part is None else {name: part.first(x) if name in BY_TOKEN else x for name, x in options.items()}


def _of_part(pool: Pool, options: dict[str, Any]) -> dict[str, Any]:
    """The options of a call, for the part of every row that a device holds."""
    if not (stripe := stripe_of(pool)):
        return options
    return {name: x for name, x in options.items() if name != "sinks"} | stripe | {"return_lse": True}


def _of_whole(pool: Pool, out: Any, options: dict[str, Any]) -> Any:
    """What the devices have found in their parts of rows, put together: one small gather. A sink, which is in no part,
    is put to it."""
    if (runs := runs_of(pool)) is None:
        return out
    out, lse = out
    both = runs.gathered(jnp.concatenate([out.astype(jnp.float32), lse[..., None]], axis=-1), 0, tiled=False)
    whole, lse = pallas_kernels.merge_attention(both[..., :-1], both[..., -1])
    if (sinks := options.get("sinks")) is not None:
        with_sink = jnp.logaddexp(lse, jnp.broadcast_to(sinks.astype(jnp.float32), lse.shape))
        saw = ~jnp.isneginf(lse)
        whole *= jnp.where(saw, jnp.exp(lse - with_sink), 0.0)[..., None]
        lse = jnp.where(saw, with_sink, lse)
    whole = whole.astype(out.dtype)
    return (whole, lse) if options.get("return_lse") else whole


def _for_tokens(one: Layer, step: Step | None, own: OwnHeads | None, out: Any) -> Any:
    if isinstance(out, tuple):
        out = (out[0], join_heads(one, out[1], out[1].ndim - 1))
        lse = out[1] if own is None else own.gathered(out[1], -1)
        return _for_tokens(one, step, own, out[0]), gathered(step, lse, -float("inf"))
    out = join_heads(one, out, out.ndim - 2)
    out = out if own is None else own.gathered(out, -2)
    return gathered(step, turned(one, out), 0.0)
