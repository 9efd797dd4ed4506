"""Attention over a cache: passes the state to the kernels."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from jaxkv._core.attention.attention_options import AttendOptions, AttentionOptions, read_options, read_tree
from jaxkv._core.attention.layer_call import (
    check_extended,
    check_tokens,
    find_layer,
    layer_specs,
    make_call,
    name_values,
    open_layer,
)
from jaxkv._core.attention.layout_adapters import (
    BY_HEAD,
    adapt,
    check_heads,
    kernel_layout,
    storage_arguments,
)
from jaxkv._core.attention.plan import Step, check_plan
from jaxkv._core.attention.query_capture import record_queries
from jaxkv._core.attention.residual import describe_residual, merge_outputs, split_options
from jaxkv._core.attention.shared_prefix import describe_sharing, find_planned_sharing
from jaxkv._core.attention.write import make_pool, store_tokens
from jaxkv._core.cache.cache import Cache
from jaxkv._core.config.validation import flag
from jaxkv._core.state.arguments import is_known, read_numbers, row_counts
from jaxkv._core.state.head_rows import repeat_for_heads, row_tables
from jaxkv._core.state.sharding import NEW, POOL, WHOLE, Q, head_spec, run_on_shards, shard_shapes
from jaxkv._core.state.state import Layer
from pallas_kernels.api.cascade import cascade_refusal
from pallas_kernels.common.batch import bundle_call


@overload
def attention[C: (Cache, Layer)](
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    cache: C,
    *,
    layer: Any = None,
    step: Step | None = None,
    implementation: str | None = None,
    return_lse: Literal[False] = False,
    **options: Unpack[AttentionOptions],
) -> tuple[jax.Array, C]: ...
@overload
def attention[C: (Cache, Layer)](
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    cache: C,
    *,
    layer: Any = None,
    step: Step | None = None,
    implementation: str | None = None,
    return_lse: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[tuple[jax.Array, jax.Array], C]: ...
@overload
def attention[C: (Cache, Layer)](
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    cache: C,
    *,
    layer: Any = None,
    step: Step | None = None,
    implementation: str | None = None,
    return_lse: bool,
    **options: Unpack[AttentionOptions],
) -> tuple[Any, C]: ...
def attention(
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    cache: Any,
    *,
    layer: Any = None,
    step: Step | None = None,
    implementation: str | None = None,
    **options: Any,
) -> tuple[Any, Any]:
    """Stores this step's keys and values of one layer, and attends causally to the context of each token.

    Call `extend` once before the step's first layer; it sets the number of tokens of each row.

    Args:
      q: `[S, T, H, D]` padded (row s uses its first `num_tokens[s]` slots) or `[N, H, D]` packed (rows one after
        another, each with its `num_tokens` slots).
      k, v: the same with K heads, v as wide as the layer's `v_head_dim`. H must be a multiple of K. None for a layer
        that shares another's (`shares_with`). For a latent layer (`LayerConfig.latent`) q is absorbed, k
        `[.., 1, rank + rope_dim]`, v None, and out `[.., H, rank]`.
      cache: a cache, or one of its `layers`.
      layer: the layer's index, for a cache. In a stacked cache it may be traced.
      step: the plan of this step from `plan_step`; without it the same is computed here.
      implementation: None picks the platform's kernels and falls back to "xla"; or "xla", "gpu", "tpu", "reference".
      scale: the factor of the logits, a float or a scalar array; default `head_dim ** -0.5`. Required for a latent
        layer.
      soft_cap: logits become `soft_cap * tanh(logits / soft_cap)`, after `scale`.
      window: a token sees only the last `window` positions, its own included; default and upper limit: the layer's own
        window. A layer's chunk cannot be changed.
      sink_tokens: with `window`, a token also sees the first `sink_tokens` positions of its row (StreamingLLM);
        default: the layer's own. A layer made with a window and no sink tokens has freed its first blocks.
      sinks: `f32[H]`, one more logit per head in the softmax's denominator, without a value.
      mask: `bool[S, T, C]` padded or `bool[N, C]` packed, and-ed with causality: may the token see position c of its
        row? Positions from C on are not seen. Kernels for TPU and GPU do not support it: then XLA runs.
      alibi: `f32[H]`, slopes: each logit is lowered by the slope times the distance of the positions, after `soft_cap`.
      spans: `i32[S, T]` or `i32[N]`, 0 for none: tokens of one row and one step with the same number see each other,
        regardless of order, window and chunk. Kernels support contiguous spans; else XLA runs.
      tree: `i32[S, T]` or `i32[N]`, each token's parent, counted from the row's first new token; -1 is the context. A
        token sees the context, its ancestors and itself. Parents that are known on the host must be -1 or an earlier
        token; a step planned with a tree has it already.
      tokens: `i32[S, T, n]` or `i32[N, n]`, as `jaxkv.scores.indexer` chooses them: a token sees these positions of its
        row and no others, each once. A position ahead of it, beyond its window, or not held is none, as is -1. Work and
        bytes go by n, not by the context. Not with `tree`, `spans`, `mask` or `blocks`. Kernels for TPU and
        GPU read the rows of each query, which XLA brings together for them.
      deterministic: a row's output is the same to the bit for any other rows in the batch, in any row and blocks, and
        for a prompt in one step or in pieces of two tokens or more; see `pallas_kernels.paged_attention`.
      cascade: False: read every row by itself, also in a step that was planned with `cascade=True`.
      return_lse: also return the natural logarithm of the softmax's denominator, `f32[S, T, H]` or `f32[N, H]`.

    Returns:
      `(out, cache)`; out has q's shape and dtype, but the width of values, and is 0 for padding and for rows that
      failed. With `return_lse`, out is `(out, lse)`. For a layer, `(out, layer)`.

    Raises:
      ValueError, IndexError: invalid shapes, dtypes, options or layer; outside of `jit` also where `extend` has made
        room for no token, or for more than q has. TypeError: no such option.

    >>> import jax.numpy as jnp, jaxkv
    >>> layer = jaxkv.LayerConfig(num_kv_heads=2, head_dim=8)
    >>> cache = jaxkv.init(jaxkv.CacheConfig(layers=(layer,), max_seqs=2, max_seq_len=64, num_blocks=4))
    >>> cache = jaxkv.extend(cache, [3, 1])
    >>> q, kv = jnp.ones((2, 3, 4, 8)), jnp.ones((2, 3, 2, 8))
    >>> out, cache = jaxkv.attention(q, kv, kv, cache, layer=0)
    >>> out.shape
    (2, 3, 4, 8)

    Layer by layer, for models whose blocks take and return a cache of their own:

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
        found = find_layer(cache, layer)
        if found.config.owner(found.number) != found.number:
            return attend(q, cache, layer=layer, step=step, implementation=implementation, **options), cache
    opened, put_back = open_layer(cache, layer, step, stores=True, q=q, k=k, **name_values(cache, layer, v))
    record_queries(opened.number, q, options.get("scale"))
    options = _kernel_options(opened, step, q.shape[:-2], options)
    check_heads(opened, q=q, k=k, v=v, **options)
    check_extended(find_layer(cache, layer), q.shape[:-2])
    with jax.named_scope("attention"):
        out, stored = _attend_to_new(opened, step, dict(q=q, k=k, v=v), options, implementation)
        return out, put_back(stored)


def _attend_to_new(layer: Layer, step: Step | None, new: dict, options: dict, implementation: Any) -> tuple[Any, Layer]:
    """Returns the output of a step's queries, and the layer with the step's keys and values."""
    q, residual = new["q"], layer.residual
    if residual is not None:
        layer = dataclasses.replace(layer, residual=None)
        newest, older = split_options(layer, options)
        out, residual = _attend_to_new(residual, step, new, newest, implementation)
        if older is None:
            layer = store_tokens(layer, step, new["k"], new["v"], implementation=implementation)
        else:
            older_out, layer = _attend_to_new(layer, step, new, older, implementation)
            out = merge_outputs(layer, out, older_out, options)
        return out, dataclasses.replace(layer, residual=residual)
    arrays, static = _split_static(options)
    token, outs = head_spec(q.ndim - 2, NEW), _out_specs(q, static)
    specs = (layer_specs(layer), WHOLE, dict(q=head_spec(q.ndim - 2, Q), k=token, v=token), _option_specs(arrays))
    out, pool = run_on_shards(
        layer.pool,
        _store_and_attend,
        (layer, step, new, arrays),
        specs,
        (outs, POOL),
        query_heads=q.shape[-2],
        implementation=implementation,
        **static,
    )
    return out, dataclasses.replace(layer, pool=pool)


def _store_and_attend(
    layer: Layer, step: Step | None, new: dict, arrays: dict, *, implementation: Any, **static: Any
) -> tuple[Any, Any]:
    call, undo = adapt(make_call(layer, step, **new, options=arrays | static))
    layer, lengths = call.layer, call.layer.tables.lengths
    out, written = pallas_kernels.write_and_attend(
        call.q,
        call.k,
        call.v,
        layer.pool.kv,
        layer.blocks,
        lengths,
        call.query_lens,
        offsets=call.query_starts,
        implementation=implementation,
        **storage_arguments(layer),
        **call.options,
    )
    return undo(out), make_pool(written, layer, call.tokens)


@overload
def attend(
    q: jax.Array,
    cache: Cache | Layer,
    *,
    layer: Any = None,
    step: Step | None = None,
    implementation: str | None = None,
    causal: bool = True,
    num_tokens: Any = None,
    return_lse: Literal[False] = False,
    **options: Unpack[AttendOptions],
) -> jax.Array: ...
@overload
def attend(
    q: jax.Array,
    cache: Cache | Layer,
    *,
    layer: Any = None,
    step: Step | None = None,
    implementation: str | None = None,
    causal: bool = True,
    num_tokens: Any = None,
    return_lse: Literal[True],
    **options: Unpack[AttendOptions],
) -> tuple[jax.Array, jax.Array]: ...
@overload
def attend(
    q: jax.Array,
    cache: Cache | Layer,
    *,
    layer: Any = None,
    step: Step | None = None,
    implementation: str | None = None,
    causal: bool = True,
    num_tokens: Any = None,
    return_lse: bool,
    **options: Unpack[AttendOptions],
) -> Any: ...
def attend(
    q: jax.Array,
    cache: Any,
    *,
    layer: Any = None,
    step: Step | None = None,
    implementation: str | None = None,
    causal: bool = True,
    num_tokens: Any = None,
    **options: Any,
) -> Any:
    """Attends to the keys and values stored by `write` or `append`. Arguments are those of `attention`.

    In a layer with `compress_ratio` a query sees the entries, stored by `compress`, whose tokens it sees all, and
    `tokens` names entries.

    Args:
      causal: False: the queries are another sequence's, and each sees all tokens of its row (cross-attention). The
        cache is written once, and read by any number of steps.
      blocks: (an option) `i32[S, n]`: read only these logical blocks of each row, in increasing order, padded with -1
        at the end.
      num_tokens: `i32[S]`, with `causal=False`: the number of queries of each row; default: all T padded ones.

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
    query_lens: jax.Array | None = None
    query_starts: jax.Array | None = None
    if causal is not True or num_tokens is not None:
        opened, query_lens, query_starts = _open_memory(cache, layer, step, q, causal, num_tokens)
        given, read = None, _kernel_options(opened, None, q.shape[:-2], options) | {"causal": False}
        opened = dataclasses.replace(opened, residual=None)  # other sequences have no newest tokens here
    else:
        opened, _ = open_layer(cache, layer, step, q=q)
        record_queries(opened.number, q, options.get("scale"))
        given, read = step, _kernel_options(opened, step, q.shape[:-2], options)
    check_heads(opened, q=q, **read)
    with jax.named_scope("attend"):
        return _attend_to_stored(opened, given, q, read, implementation, query_lens, query_starts)


def _attend_to_stored(
    layer: Layer,
    step: Step | None,
    q: jax.Array,
    options: dict,
    implementation: Any,
    query_lens: jax.Array | None = None,
    query_starts: jax.Array | None = None,
) -> Any:
    if (residual := layer.residual) is not None:
        layer = dataclasses.replace(layer, residual=None)
        newest, older = split_options(layer, options)
        out = _attend_to_stored(residual, step, q, newest, implementation)
        if older is None:
            return out
        return merge_outputs(layer, out, _attend_to_stored(layer, step, q, older, implementation), options)
    arrays, static = _split_static(options)
    arguments = (layer, step, q, query_lens, query_starts, arrays)
    specs = (layer_specs(layer), WHOLE, head_spec(q.ndim - 2, Q), WHOLE, WHOLE, _option_specs(arrays))
    return run_on_shards(
        layer.pool,
        _attend,
        arguments,
        specs,
        _out_specs(q, static),
        query_heads=q.shape[-2],
        implementation=implementation,
        **static,
    )


def _attend(
    layer: Layer,
    step: Step | None,
    q: jax.Array,
    query_lens: jax.Array | None,
    query_starts: jax.Array | None,
    arrays: dict,
    *,
    implementation: Any,
    **static: Any,
) -> Any:
    call = make_call(layer, step, query_lens=query_lens, query_starts=query_starts, q=q, options=arrays | static)
    call, undo = adapt(call)
    layer = call.layer
    out = pallas_kernels.paged_attention(
        call.q,
        layer.pool.kv,
        layer.blocks,
        layer.tables.lengths,
        call.query_lens,
        offsets=call.query_starts,
        implementation=implementation,
        **storage_arguments(layer),
        **call.options,
    )
    return undo(out)


def _open_memory(
    cache: Any, layer: Any, step: Step | None, q: jax.Array, causal: Any, num_tokens: Any
) -> tuple[Layer, jax.Array, jax.Array | None]:
    """Returns a layer for cross-attention, the query lens of its rows, and the starts of packed rows."""
    found = find_layer(cache, layer)
    token_axes = check_tokens(found, {"q": q})
    if flag("causal", causal):
        raise ValueError("num_tokens is for causal=False; otherwise extend has said how many tokens a row has.")
    if step is not None:
        raise ValueError("A step is planned for a cache's own new tokens: leave step out with causal=False.")
    rows, padded = found.rows, len(token_axes) == 2
    if num_tokens is None and not padded:
        raise ValueError("Packed queries need num_tokens, how many of them belong to each row.")
    everything = np.full(rows, token_axes[-1], np.int32)
    given = everything if num_tokens is None else read_numbers("num_tokens", num_tokens)
    query_lens = row_counts("num_tokens", given, rows)
    if is_known(given) and (most := given.max(initial=0) if padded else given.sum()) > token_axes[-1]:
        raise ValueError(f"num_tokens asks for {most} queries, but q has slots for {token_axes[-1]}.")
    query_lens = jnp.clip(query_lens, 0, token_axes[-1])
    query_starts = None if padded else jnp.cumsum(query_lens) - query_lens
    return found, jnp.where(found.tables.failed, 0, repeat_for_heads(query_lens, found.tables)), query_starts


def explain(
    q: Any,
    cache: Cache | Layer,
    *,
    layer: Any = None,
    platform: str | None = None,
    implementation: str | None = None,
    **options: Any,
) -> pallas_kernels.Choice:
    """Explains which implementation `attend` picks for such queries, and why.

    Args:
      q: the queries, or a `jax.ShapeDtypeStruct` of their shape and dtype.
      cache: a cache, or one of its layers.
      layer: the layer's index; default: the first.
      platform: "cpu", "cuda" or "tpu"; default: that of the devices on which q or the cache say that they lie, else the
        one that a program traced now would be lowered for.
      **options: as for `attend`.

    Raises:
      TypeError: not an option of `attend`.

    >>> import jax, jax.numpy as jnp, jaxkv
    >>> layer = jaxkv.LayerConfig(num_kv_heads=2, head_dim=8)
    >>> cache = jaxkv.init(jaxkv.CacheConfig(layers=(layer,), max_seqs=2, max_seq_len=64, num_blocks=4))
    >>> print(jaxkv.explain(jax.ShapeDtypeStruct((2, 1, 4, 8), jnp.bfloat16), cache, platform="cpu").reason)
    There are no kernels for the platform 'cpu'; XLA runs on all of them.
    """
    found = find_layer(cache, 0 if layer is None and not isinstance(cache, Layer) else layer)
    token_axes = check_tokens(found, {"q": q})
    read = {name: x for name, x in options.items() if name != "num_tokens"}
    cascades = flag("cascade", read.pop("cascade", True))
    if (step := read.pop("step", None)) is not None:
        check_plan(step, found.config, "q", token_axes)
        read = {"tree": step.tree} | read
    q, _, _ = kernel_layout(found, q=q)
    arguments = dict(q=q, tables=found.tables.tables, **storage_arguments(found) | shard_shapes(found.pool))
    arguments |= read_options(found, read)
    choice = pallas_kernels.explain(platform=platform, implementation=implementation, **arguments)
    reads_once = cascades and cascade_refusal(choice.implementation, bundle_call(**arguments)) is None
    notes = (
        _describe_tokens(read)
        + _describe_padding(found)
        + describe_residual(found)
        + describe_sharing(found, reads_once)
    )
    return choice._replace(reason=choice.reason + notes)


def _describe_tokens(options: Mapping[str, Any]) -> str:
    """Returns a sentence about what queries read that have chosen tokens; "" if they have not."""
    if (tokens := options.get("tokens")) is None:
        return ""
    return f" Each query reads at most {tokens.shape[-1]} tokens, by their positions, and no others."


def _describe_padding(layer: Layer) -> str:
    """Returns a sentence about how a layer's head_dim is stored; "" where it is stored as it is."""
    head_dim, stored = layer.layer_config.head_dim, layer.pool.kv.shape[-1]
    if words := layer.config.form(layer.number).description:
        return f" {words} are stored in one row of {stored}."
    padded = layer.config.padded_head_dim(layer.number)
    if (v_head_dim := layer.layer_config.v_head_dim) is not None:
        return f" Values of {v_head_dim} and keys of {head_dim} are stored in one row of {stored}."
    return "" if padded == head_dim else f" A head_dim of {head_dim} is stored as {padded}."


def _kernel_options(
    layer: Layer, step: Step | None, token_axes: tuple[int, ...], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns a call's options and a layer's own as the kernels take them."""
    options = dict(given)
    if layer.layer_config.rank is not None and options.get("scale") is None:
        raise ValueError(
            f"Layer {layer.number} is latent, so scale= must be given: it goes by the width that heads had before "
            "queries were absorbed, which the cache does not know."
        )
    is_joined = layer.config.form(layer.number).joins or layer.layer_config.v_head_dim is not None
    if is_joined and options.get("scale") is None:
        options["scale"] = layer.layer_config.head_dim**-0.5  # the kernels see the width of the row
    shared = find_planned_sharing(layer, step) if flag("cascade", options.pop("cascade", True)) else None
    tree = read_tree(options.pop("tree", None), token_axes, row_tables(layer.tables, layer.config), layer.config)
    if step is not None and step.tree is not None:
        if tree is not None:
            raise ValueError("This step was planned with a tree: leave tree out, or plan the step without one.")
        tree = step.tree
    options = read_options(layer, options | {"tree": tree})
    return options if shared is None or "compress_ratio" in options else options | {"shared": shared}


def _split_static(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the options that are arrays, and those that are not."""
    arrays = {name: x for name, x in options.items() if isinstance(x, jax.Array | np.ndarray)}
    return arrays, {name: x for name, x in options.items() if name not in arrays}


def _option_specs(arrays: dict[str, Any]) -> dict[str, Any]:
    return {name: head_spec(0, Q) if name in BY_HEAD else WHOLE for name in arrays}


def _out_specs(q: jax.Array, static: dict[str, Any]) -> Any:
    heads = head_spec(q.ndim - 2, Q)
    return (heads, heads) if static.get("return_lse") else heads
