"""Entries of layers with `compress_ratio`: made of the tokens of another layer, and stored, once a step completes them.

A layer that compresses has its inputs in a layer of their own, with a window: so they are freed, shared, copied and
rolled back as any tokens are, and an entry is computed from the pool, however its tokens were split into steps.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv._core.attention.index import store_index
from jaxkv._core.attention.layer_call import find_layer, settle_layer
from jaxkv._core.attention.plan import Step, check_plan
from jaxkv._core.attention.write import store_tokens
from jaxkv._core.cache.cache import Cache, check_cache
from jaxkv._core.cache.inspection import find_slots
from jaxkv._core.cache.pool_access import read_tokens
from jaxkv._core.config.validation import show
from jaxkv._core.state.sharding import POOL, WHOLE, head_spec, run_on_shards
from jaxkv._core.state.state import NULL_BLOCK, BlockTables, Layer
from jaxkv._core.state.state_repr import describe_array
from pallas_kernels import Tokens, locate

MOST_BYTES = 1 << 22  # of inputs that are read at once

# k and v of the inputs, which of them are tokens, and the position of each entry -> k, v, and index keys if there are.
Compressor = Callable[[Any, Any, jax.Array, jax.Array], tuple]


def compress(cache: Cache, compressor: Compressor, *, layer: Any, inputs: Any, step: Step) -> Cache:
    """Computes and stores the entries that this step completes in a layer with `compress_ratio`.

    Call it once a step, after the step's inputs are written to the layer `inputs` and before `attend` reads the
    entries. An entry is computed when the last of its tokens is there.

    Args:
      compressor: `compressor(k, v, is_token, position)` returns the keys and values `[n, K, D]` of n entries, v None
        for a latent layer; with `index_dim` a third array, `[n, index_dim]`, their index keys. Of each entry it gets
        the keys and values `[n, W, K', D']` of the last W tokens up to its own last one, W being the window of
        `inputs`, in order; `is_token` `bool[n, W]`, False before the row's first token; and `position` `i32[n]`, of
        the first of the entry's own `compress_ratio` tokens. It is called within loops, and for entries that there
        are not.
      layer: the layer that compresses; in a stacked cache it may be traced.
      inputs: a layer whose window is a multiple of `compress_ratio`, with what entries are made of.
      step: the plan of this step from `plan_step`.

    Raises:
      ValueError, IndexError: layers that do not fit together, arrays of other shapes than the layer's.

    Entries of two tokens, their means:

    >>> import jax.numpy as jnp, jaxkv
    >>> pairs = jaxkv.LayerConfig(num_kv_heads=1, head_dim=8, compress_ratio=2)
    >>> layers = (pairs, jaxkv.LayerConfig(num_kv_heads=1, head_dim=8, window=2))
    >>> cache = jaxkv.init(jaxkv.CacheConfig(layers=layers, max_seqs=1, max_seq_len=64, num_blocks=4))
    >>> cache = jaxkv.extend(cache, [5])
    >>> step, kv = jaxkv.plan_step(cache, (1, 5)), jnp.arange(5.0)[None, :, None, None].repeat(8, 3)
    >>> cache = jaxkv.write(cache, kv, kv, layer=1, step=step)
    >>> mean = lambda k, v, is_token, position: (k.mean(axis=1), v.mean(axis=1))
    >>> cache = jaxkv.compress(cache, mean, layer=0, inputs=1, step=step)
    >>> jaxkv.gather(cache, 0, layer=0)[0][:, 0, 0].tolist()
    [0.5, 2.5]
    """
    check_cache(cache)
    if step is None:
        raise ValueError("compress needs the plan of this step: give step=jaxkv.plan_step(cache, token_axes).")
    found, source = find_layer(cache, layer), find_layer(cache, inputs)
    ratio = _check_layers(found, source)
    check_plan(step, found.config, "step", step.token_axes)
    into, put_back = settle_layer(cache, layer, found, step.token_axes, step)
    source = settle_layer(cache, inputs, source, step.token_axes, step)[0]
    with jax.named_scope("compress"):
        tables = _count_entries(into.tables, ratio)
        entry = locate((_most_entries(step.token_axes, into.rows, ratio),), tables.lengths, tables.new, tables.offsets)
        k, v, index_k = _compute(compressor, source, entry, ratio)
        entries = dataclasses.replace(into, tables=tables)
        _check_entries(entries, k, v, index_k)
        stored = store_tokens(entries, None, k, v, implementation=None)
        if index_k is not None:
            stored = store_index(stored, None, index_k, implementation=None)
        return put_back(dataclasses.replace(into, pool=stored.pool))


def _check_layers(layer: Layer, source: Layer) -> int:
    """Returns the tokens of an entry. Raises ValueError unless a layer stores entries, and another what they are made
    of."""
    ratio, window = layer.layer_config.compress_ratio, source.layer_config.window
    if ratio is None:
        raise ValueError(
            f"Layer {layer.number} stores tokens, not entries: make it with LayerConfig(..., compress_ratio=), or "
            "store them by write."
        )
    if window is None or window % ratio or source.layer_config.sink_tokens is not None:
        raise ValueError(
            f"inputs must be a layer with a window of {ratio} tokens, or a multiple, which entries of layer "
            f"{layer.number} are made of, but layer {source.number} is one {source.layer_config.retention}."
        )
    return ratio


def _count_entries(tables: BlockTables, ratio: int) -> BlockTables:
    """Returns tables that count entries: those of each row, and those that this step completes, one after another."""
    lengths, before = tables.lengths // ratio, (tables.lengths - tables.new) // ratio
    new = lengths - before
    return dataclasses.replace(tables, lengths=lengths, new=new, offsets=jnp.cumsum(new, dtype=jnp.int32) - new)


def _most_entries(token_axes: tuple[int, ...], rows: int, ratio: int) -> int:
    """Returns how many entries a step can complete: in each row as many as its tokens have, and one that had begun."""
    num_tokens = math.prod(token_axes)
    return (num_tokens + (ratio - 1) * min(rows, num_tokens)) // ratio


def _compute(compressor: Compressor, source: Layer, entry: Tokens, ratio: int) -> tuple:
    """Computes entries, as many at a time as `MOST_BYTES` of inputs are for, and none where there are no more."""
    found = source.layer_config
    assert found.window is not None
    # Of what is read of an entry, in float32.
    size = found.window * found.num_kv_heads * (found.head_dim + (0 if found.rank else found.value_dim)) * 4
    count = entry.row.shape[0]
    at_once = max(1, min(count, MOST_BYTES // size))
    turns = -(-count // at_once)
    padded = jax.tree.map(lambda x: jnp.pad(x, (0, turns * at_once - count)), entry)

    def compute(some: Tokens) -> tuple:
        k, v, *index_k = compressor(*_read(source, some, ratio))
        return k, v, index_k[0] if index_k else None

    def compute_some(some: Tokens) -> tuple:
        shapes = jax.eval_shape(compute, some)

        def skip(_: Tokens) -> tuple:
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, out_sharding=x.sharding), shapes)

        def compute_if_any(some: Tokens) -> tuple:
            return jax.lax.cond(jnp.any(some.valid), compute, skip, some)

        # On a GPU the host takes branches, and all would wait for it: longer than reading a few windows takes.
        return jax.lax.platform_dependent(some, cuda=compute, default=compute_if_any)

    if turns == 1:
        return compute_some(padded)
    found = jax.lax.map(compute_some, jax.tree.map(lambda x: x.reshape(turns, at_once), padded))
    return jax.tree.map(lambda x: x.reshape(turns * at_once, *x.shape[2:])[:count], found)


def _read(source: Layer, entry: Tokens, ratio: int) -> tuple:
    """Reads the tokens that entries are made of: what a compressor gets."""
    window = source.layer_config.window
    assert window is not None
    end = (entry.position + 1) * ratio
    token = end[:, None] - window + jnp.arange(window, dtype=jnp.int32)[None]
    is_token = entry.valid[:, None] & (token >= 0)
    block, offset = find_slots(source, entry.row[:, None], jnp.where(is_token, token, -1))
    if source.place is not None:
        block = jnp.where(block == NULL_BLOCK, NULL_BLOCK, block + source.place * (source.tables.num_blocks + 1))
    specs, out = (POOL, WHOLE, WHOLE), head_spec(2)
    names: dict[str, Any] = dict(config=source.config, layer=source.number)
    k, v = run_on_shards(source.pool, read_tokens, (source.pool, block, offset), specs, (out, out), **names)
    return k, None if source.layer_config.rank is not None else v, is_token, entry.position * ratio


def _check_entries(layer: Layer, k: Any, v: Any, index_k: Any) -> None:
    """Raises ValueError unless a compressor returned what the layer stores."""
    found = layer.layer_config
    count = k.shape[0] if hasattr(k, "shape") and k.ndim else "n"
    wanted: dict[str, tuple | None] = {"k": (count, found.num_kv_heads, found.head_dim), "v": None, "index_k": None}
    if found.rank is None:
        wanted["v"] = (count, found.num_kv_heads, found.value_dim)
    if found.index_dim is not None:
        wanted["index_k"] = (count, found.index_dim)
    for (name, shape), x in zip(wanted.items(), (k, v, index_k), strict=True):
        if getattr(x, "shape", None) != shape:
            what = "None" if shape is None else f"[{', '.join(map(str, shape))}]"
            got = "None" if x is None else describe_array(x) if hasattr(x, "shape") else show(x)
            raise ValueError(f"A compressor of layer {layer.number} must return {name} {what}, not {got}.")
