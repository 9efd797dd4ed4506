"""One layer's call in a step: finds the layer, checks the arrays, and collects the kernel's arguments."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxkv._core.attention.plan import Step, check_plan, settle_cache, settle_tables
from jaxkv._core.cache.cache import Cache
from jaxkv._core.config.validation import show
from jaxkv._core.state.head_rows import HEAD_ROW_FIELDS
from jaxkv._core.state.shard_local import find_head_shard
from jaxkv._core.state.sharding import POOL, WHOLE
from jaxkv._core.state.state import Layer
from jaxkv._core.state.state_repr import check_living, check_pools
from jaxkv._core.state.state_slots import StateLayer

ORDERS = ": the order is attention(q, k, v, cache), attend(q, cache) and write(cache, k, v)"  # of who gave an array


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerCall:
    """Arrays of one layer and one step on their way to a kernel. Layout adapters return changed copies."""

    layer: Layer
    step: Step | None = None
    q: jax.Array | None = None  # [S, T, H, D] or [N, H, D]; None: a write
    k: jax.Array | None = None  # the same with K heads; None: a read
    v: jax.Array | None = None
    query_lens: jax.Array  # i32[S]: tokens of each row in this step
    query_starts: jax.Array | None = None  # i32[S]: where packed rows start; None: padded
    options: dict[str, Any] = dataclasses.field(default_factory=dict)  # as the kernels take them

    def replace(self, **changes: Any) -> "LayerCall":
        """Returns a copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def map_tokens(self, function: Callable[[Any], Any]) -> "LayerCall":
        """Returns a copy whose q, k and v, where there are any, went through `function`."""
        changes = {name: function(x) for name in ("q", "k", "v") if (x := getattr(self, name)) is not None}
        return self.replace(**changes)

    def map_options(self, names: Any, function: Callable[[Any], Any]) -> "LayerCall":
        """Returns a copy whose options of those names, where they are given, went through `function`."""
        changes = {name: function(self.options[name]) for name in names if name in self.options}
        return self.replace(options=self.options | changes) if changes else self

    @property
    def tokens(self) -> jax.Array:
        """Returns the queries, or the keys if there are none: they show the layout."""
        tokens = self.k if self.q is None else self.q
        assert tokens is not None
        return tokens


def make_call(
    layer: Layer, step: Step | None, *, query_lens: Any = None, query_starts: Any = None, **rest: Any
) -> LayerCall:
    """Returns the `LayerCall` of a layer, with the tables of the heads whose blocks this device holds.

    `query_lens` (one for each of the table's rows, all heads) and `query_starts` are of queries that are another
    sequence's; default: the step's own.
    """
    shard = find_head_shard(layer.pool)
    if shard is not None:
        fields: dict[str, Any] = {name: getattr(layer.tables, name) for name in HEAD_ROW_FIELDS}
        fields = {name: x if x is None else shard.lines(x) for name, x in fields.items()}
        fields["tables"] = shard.own(fields["tables"])
        layer = dataclasses.replace(layer, tables=dataclasses.replace(layer.tables, **fields))
        query_lens = None if query_lens is None else shard.first(query_lens)
    call = LayerCall(layer=layer, step=step, query_lens=layer.tables.new if query_lens is None else query_lens, **rest)
    if call.tokens.ndim == 4:
        return call
    return call.replace(query_starts=layer.tables.offsets if query_starts is None else query_starts)


def find_layer(cache: Any, layer: Any) -> Layer:
    """Returns the layer that a cache and an index name, or the layer that was given itself."""
    hint = " Without a cache, as in training, call jax.nn.dot_product_attention." if cache is None else ""
    if is_layer(cache, layer, Layer, hint):
        if cache.pool is None:
            i, owner = cache.number, cache.config.owner(cache.number)
            raise ValueError(
                f"Layer {i} reads what layer {owner} keeps, and in a list of layers does not see what that one writes: "
                f"take cache.with_layer({owner}, layers[{owner}]).layers[{i}] once layer {owner} is written."
            )
        return cache
    found = cache.layer(layer)
    if found.layer_config.is_residual:
        raise IndexError(f"layer must be an integer from 0 to {cache.num_layers - 1}, not {show(layer)}.")
    return found


def is_layer(cache: Any, layer: Any, kind: type[Layer] | type[StateLayer], hint: str = "") -> bool:
    """Tells whether `cache` is a layer of this kind itself.

    Raises ValueError if `layer` names another besides, if it is neither that nor a cache with the index of a layer, or
    if it was donated.
    """
    if isinstance(cache, kind):
        if layer is not None:
            raise ValueError(f"layer={layer} is for a cache, but this is one of its layers: leave it out.")
        check_living("layer", cache.tables.lengths)
        check_pools("layer", (getattr(cache, "pool", None),))
        return True
    if not isinstance(cache, Cache):
        is_array = kind is Layer and isinstance(cache, jax.Array | np.ndarray)
        found = type(cache).__name__ + ORDERS * is_array
        raise ValueError(f"cache must be a jaxkv.Cache or one of its layers, not {found}.{hint}")
    check_living("cache", cache.tables[0].lengths)
    check_pools("cache", cache.pools)
    if layer is None:
        raise ValueError("layer must say which of the cache's layers is meant, unless one of cache.layers is given.")
    return False


def open_layer(
    cache: Any, layer: Any, step: Step | None, *, stores: bool = False, **arrays: Any
) -> tuple[Layer, Callable[[Layer], Any]]:
    """Returns one layer with its tables settled for a step, and a function that puts it back, with new pools.

    Args:
      cache: a cache, or one of its layers, which needs no `layer`.
      stores: raise if the layer has no keys and values of its own.
      **arrays: the step's arrays, `[S, T, heads, head_dim]` or `[N, heads, head_dim]`.
    """
    found = find_layer(cache, layer)
    if stores:
        _refuse_entries(found)
    token_axes = check_tokens(found, arrays)
    if stores:
        check_stores(found)
    check_plan(step, found.config, next(iter(arrays)), token_axes)
    return settle_layer(cache, layer, found, token_axes, step)


def settle_layer(
    cache: Any, layer: Any, found: Layer, token_axes: tuple[int, ...], step: Step | None
) -> tuple[Layer, Callable[[Layer], Any]]:
    """Returns the layer that was found, its tables settled for a step, and a function that puts it back, with new
    pools."""
    if isinstance(cache, Layer):
        return _settle(found, token_axes, step), lambda stored: stored
    cache = settle_cache(cache, token_axes, step)
    return cache.layer(layer), lambda stored: cache.with_layer(layer, stored)


def _settle(layer: Layer, token_axes: tuple[int, ...], step: Step | None) -> Layer:
    residual = None if layer.residual is None else _settle(layer.residual, token_axes, step)
    tables = settle_tables(layer.tables, layer.group, token_axes, step)
    return dataclasses.replace(layer, tables=tables, residual=residual)


def check_extended(layer: Layer, token_axes: tuple[int, ...]) -> None:
    """Raises ValueError if it is known that a step has no tokens although it is given some, or more tokens than it is
    given. Rows that failed are no mistake of the caller's; inside `jit` nothing is known."""
    tables = layer.tables
    if any(isinstance(x, jax.core.Tracer) or not x.is_fully_addressable for x in (tables.new, tables.failed)):
        return
    new = np.asarray(tables.new)[..., : layer.rows]
    if 0 not in token_axes and not (new.any() or np.asarray(tables.failed).any()):
        raise ValueError(
            "No row has a token in this step, so nothing would be stored or seen: call cache = jaxkv.extend(cache, "
            "num_tokens) once before the step's first layer. See docs/your_model.md."
        )
    if (most := int(new.max() if len(token_axes) == 2 else new.sum())) > token_axes[-1]:
        raise ValueError(
            f"extend has made room for {most} tokens{' of a row' * (len(token_axes) == 2)} in this step, but q has "
            f"slots for {token_axes[-1]}: call cache = jaxkv.extend(cache, num_tokens) once before each step's first "
            "layer, with the numbers of that step's tokens." + _describe_padding(token_axes)
        )


def _describe_padding(token_axes: tuple[int, ...]) -> str:
    """Returns how padded arrays were read, for who has heads before tokens; nothing for packed ones."""
    if len(token_axes) == 1:
        return ""
    rows, slots = token_axes
    return f" Padded arrays are [S, T, heads, D], of {rows} rows with {slots} slot{'s' * (slots != 1)} each."


def layer_specs(layer: Layer) -> Any:
    """Returns the specs of a layer for `run_on_shards`."""
    place = None if layer.place is None else WHOLE
    return dataclasses.replace(layer, pool=POOL, tables=WHOLE, place=place)  # type: ignore[arg-type]


def name_values(cache: Any, layer: Any, v: Any) -> dict[str, Any]:
    """Returns `{"v": v}` for the checks of a step's arrays; nothing for a latent layer, which must be given none."""
    found = find_layer(cache, layer)
    rank = found.layer_config.rank
    if rank is None:
        return {"v": v}
    if v is not None:
        raise ValueError(
            f"Layer {found.number} is latent, its values are the first {rank} numbers of its keys: give it None for v."
        )
    return {}


def check_tokens(layer: Layer, arrays: dict[str, Any]) -> tuple[int, ...]:
    """Returns the token axes of a step's arrays; each must be `[S, T, heads, head_dim]` or `[N, heads, head_dim]`."""
    found, rows, token_axes = layer.layer_config, layer.rows, None
    for name, x in arrays.items():
        head_dim = found.value_dim if name == "v" else found.head_dim
        if not hasattr(x, "ndim"):
            raise ValueError(f"{name} must be an array, not {type(x).__name__}: convert it with jnp.asarray.")
        if x.ndim not in (3, 4):
            raise ValueError(
                f"{name} must be [S, T, heads, {head_dim}] or packed [N, heads, {head_dim}], but its shape is "
                f"{x.shape}."
            )
        if x.ndim == 4 and x.shape[0] != rows:
            raise ValueError(
                f"{name} has {x.shape[0]} rows, but the cache has max_seqs = {rows}: pad it to all rows, those without "
                "a token in this step too, or pack the tokens, [N, heads, head_dim]."
            )
        if x.shape[-1] != head_dim and (rank := found.rank) is not None:
            raise ValueError(
                f"{name} has {x.shape[-1]} numbers a head, but layer {layer.number} is latent, with {rank} + "
                f"{head_dim - rank}: queries come absorbed, and behind them and the keys their rotated part."
            )
        if x.shape[-1] != head_dim:
            raise ValueError(
                f"{name} has head_dim {x.shape[-1]}, but layer {layer.number} of the cache has {head_dim}"
                f"{' for values' if name == 'v' and found.v_head_dim is not None else ''}."
            )
        token_axes = token_axes or (name, x.shape[:-2])
        if x.shape[:-2] != token_axes[1]:
            way_out = "they must agree, [S, T, heads, head_dim] or packed [N, heads, head_dim]."
            if token_axes[0] == "q":
                way_out += (
                    " Keys and values of other tokens, as in cross-attention, are stored once by jaxkv.append, and "
                    "read by jaxkv.attend(q, cache, layer=..., causal=False)."
                )
            raise ValueError(
                f"{name} has the token axes {x.shape[:-2]}, but {token_axes[0]} has {token_axes[1]}: {way_out}"
            )
    assert token_axes is not None
    return token_axes[1]


def _refuse_entries(layer: Layer) -> None:
    """Raises ValueError for a layer that stores no tokens."""
    if (ratio := layer.layer_config.compress_ratio) is not None:
        raise ValueError(
            f"Layer {layer.number} stores entries of {ratio} tokens, which jaxkv.compress computes and stores: attend "
            "to them by jaxkv.attend(q, cache, layer=...)."
        )


def check_stores(layer: Layer) -> None:
    """Raises ValueError for a layer that reads another's keys and values, or stores no tokens."""
    _refuse_entries(layer)
    owner = layer.config.owner(layer.number)
    if owner != layer.number:
        raise ValueError(
            f"Layer {layer.number} reads the keys and values of layer {owner} and stores none: give it None in "
            "their place."
        )
