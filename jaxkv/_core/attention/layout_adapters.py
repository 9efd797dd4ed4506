"""Layout adapters between a model's arrays and those that kernels read: one for each difference.

An adapter changes a `LayerCall` on its way to the kernel (`inputs`) and undoes that in what comes back (`outputs`).
`adapt` folds a call over the list `ADAPTERS`; `write`, `attention` and `attend` do nothing else. Order matters: each
sees what those before it made, and outputs go through them in reverse. A new difference is one more class in the list.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

import pallas_kernels
from jaxkv._core.attention.layer_call import LayerCall
from jaxkv._core.attention.plan import Step
from jaxkv._core.attention.table_columns import (
    add_columns,
    begin_with_table,
    columns_of_blocks,
    mask_of_columns,
    places_of_tokens,
)
from jaxkv._core.config.kv_packing import Apart
from jaxkv._core.state.head_rows import join_heads, row_tables, split_heads, split_offsets, split_tokens
from jaxkv._core.state.shard_local import BlockRuns, LocalHeads, find_block_runs, find_local_heads
from jaxkv._core.state.sharding import find_pool_mesh
from jaxkv._core.state.state import Layer
from pallas_kernels.api.arguments import check_attention, check_new, check_query_heads
from pallas_kernels.common.batch import StoredKV, bundle_call
from pallas_kernels.common.ragged_layout import locate
from pallas_kernels.common.rotation import rotate
from pallas_kernels.common.xla_cpu import side_by_side

BY_HEAD = ("sinks", "alibi")  # options with an entry for each query head
BY_TOKEN = ("mask", "spans", "tree", "tokens")  # and for each token


class Output(NamedTuple):
    """The output of attention: `[.., H, D]`, and the LSE `f32[.., H]` where requested."""

    out: jax.Array
    lse: jax.Array | None = None

    def map(self, out: Callable[[jax.Array], jax.Array], lse: Callable[[jax.Array], jax.Array]) -> "Output":
        """Returns both, each mapped by its own function."""
        return Output(out(self.out), None if self.lse is None else lse(self.lse))


class Adapter(Protocol):
    """One difference of layout. `match` returns an adapter where a call needs one, else None."""

    @classmethod
    def match(cls, call: LayerCall) -> "Adapter | None": ...
    def inputs(self, call: LayerCall) -> LayerCall: ...
    def outputs(self, output: Output) -> Output: ...


def is_packed_decode(step: Step | None) -> bool:
    """Tells whether a step of packed tokens has no row with more than one of them."""
    return step is not None and step.decode and len(step.token_axes) == 1 and step.token_axes[0] > 0


class TableColumns(NamedTuple):
    """Rows that slid along their table begin with it; options by position and block go by column instead."""

    aligned: bool
    apart: bool

    @classmethod
    def match(cls, call: LayerCall) -> "TableColumns | None":
        options, tables = call.options, call.layer.tables
        if tables.skipped is None and "blocks" not in options:
            return None
        # Slopes alone go by how far tokens are apart.
        return cls(bool(options.get("deterministic")), "alibi" in options and bool(options.get("sink_tokens")))

    def inputs(self, call: LayerCall) -> LayerCall:
        layer, options = add_columns(call.layer, aligned=self.aligned, apart=self.apart), dict(call.options)
        tables = layer.tables
        if tables.skipped is not None and any(self):
            options.pop("shared", None)  # what rows share was found in other columns
        if "blocks" in options:
            options["blocks"] = columns_of_blocks(layer, options["blocks"])
        if tables.skipped is not None and ("mask" in options or "tokens" in options):
            axes, row = call.tokens.shape[:-2], jnp.arange(tables.lengths.shape[0], dtype=jnp.int32)
            if len(axes) == 1:
                row = locate(axes, tables.lengths, call.query_lens, call.query_starts).row
            for name, convert in (("mask", mask_of_columns), ("tokens", places_of_tokens)):
                if name in options:
                    options[name] = convert(layer, options[name], row)
        return call.replace(layer=begin_with_table(layer), options=options)

    def outputs(self, output: Output) -> Output:
        return output


class DecodePacking(NamedTuple):
    """Packed decode tokens `[N, ..]` stand in the rows that kernels for decoding read, `[S, 1, ..]`."""

    step: Step

    @classmethod
    def match(cls, call: LayerCall) -> "DecodePacking | None":
        return cls(call.step) if call.step is not None and is_packed_decode(call.step) else None

    def inputs(self, call: LayerCall) -> LayerCall:
        starts = row_tables(call.layer.tables, call.layer.config).offsets

        def unpack(x: jax.Array) -> jax.Array:
            return x[jnp.clip(starts, 0, x.shape[0] - 1)][:, None]

        return call.map_tokens(unpack).map_options(BY_TOKEN, unpack).replace(query_starts=None)

    def outputs(self, output: Output) -> Output:
        return output.map(lambda x: self.repack(x, 0.0), lambda x: self.repack(x, -float("inf")))

    def repack(self, x: jax.Array, padding: float) -> jax.Array:
        """Returns `[N, ..]` of `[S, 1, ..]`."""
        token = self.step.token
        valid = jnp.expand_dims(token.valid, range(1, x.ndim - 1))
        return jnp.where(valid, x[token.row, 0], jnp.asarray(padding, x.dtype))


class HeadRotation(NamedTuple):
    """A layer stores its heads rotated, so queries and values are rotated too, and outputs back. What is stored does
    not depend on which other tokens a step has."""

    deterministic: bool

    @classmethod
    def match(cls, call: LayerCall) -> "HeadRotation | None":
        rotates = call.layer.config.rotates(call.layer.number)
        return cls(bool(call.options.get("deterministic"))) if rotates else None

    def inputs(self, call: LayerCall) -> LayerCall:
        stored = {name: rotate(x, deterministic=True) for name in ("k", "v") if (x := getattr(call, name)) is not None}
        return call.replace(q=None if call.q is None else self._rotate(call.q), **stored)

    def outputs(self, output: Output) -> Output:
        return output.map(self._rotate, lambda lse: lse)

    def _rotate(self, x: jax.Array) -> jax.Array:
        return rotate(x, deterministic=self.deterministic)


class ReplicatedHeads(NamedTuple):
    """A device holds all KV heads, more than its query heads belong to: these get a place for each KV head."""

    heads: LocalHeads

    @classmethod
    def match(cls, call: LayerCall) -> "ReplicatedHeads | None":
        if call.q is None:
            return None
        heads = find_local_heads(call.layer.pool, call.layer.layer_config.num_kv_heads, call.q.shape[-2])
        return None if heads is None else cls(heads)

    def inputs(self, call: LayerCall) -> LayerCall:
        assert call.q is not None
        call = call.replace(q=self.heads.spread(call.q, -2))
        return call.map_options(BY_HEAD, lambda x: self.heads.spread(x, -1))

    def outputs(self, output: Output) -> Output:
        return output.map(lambda x: self.heads.gather(x, -2), lambda x: self.heads.gather(x, -1))


class HeadRows(NamedTuple):
    """A layer that evicts by heads has a row of its own for each KV head: `[S, T, K * G, D]` is `[K * S, T, G, D]`."""

    layer: Layer

    @classmethod
    def match(cls, call: LayerCall) -> "HeadRows | None":
        rows = call.layer.tables.lengths.shape[0]
        return cls(call.layer) if rows != call.layer.config.max_seqs else None

    def inputs(self, call: LayerCall) -> LayerCall:
        starts = split_offsets(self.layer, call.query_starts, call.tokens.shape[0])
        call = call.map_tokens(lambda x: split_heads(self.layer, x)).replace(query_starts=starts)
        return call.map_options(BY_TOKEN, lambda x: split_tokens(self.layer, x))

    def outputs(self, output: Output) -> Output:
        return output.map(
            lambda x: join_heads(self.layer, x, x.ndim - 2), lambda x: join_heads(self.layer, x, x.ndim - 1)
        )


class ContextShards(NamedTuple):
    """A device holds a run of every block's tokens: attention over these, then one small gather puts all together."""

    runs: BlockRuns
    sinks: jax.Array | None
    return_lse: bool

    @classmethod
    def match(cls, call: LayerCall) -> "ContextShards | None":
        runs = find_block_runs(call.layer.pool)
        if runs is None:
            return None
        return cls(runs, call.options.get("sinks"), bool(call.options.get("return_lse")))

    def inputs(self, call: LayerCall) -> LayerCall:
        options = {name: x for name, x in call.options.items() if name != "sinks"} | {"stripe": self.runs.stripe}
        return call.replace(options=options if call.q is None else options | {"return_lse": True})

    def outputs(self, output: Output) -> Output:
        out, lse = output
        assert lse is not None
        both = self.runs.gather(jnp.concatenate([out.astype(jnp.float32), lse[..., None]], axis=-1), 0, tiled=False)
        whole, lse = pallas_kernels.merge_attention(both[..., :-1], both[..., -1])
        if self.sinks is not None:  # no device's run holds the sink
            with_sink = jnp.logaddexp(lse, jnp.broadcast_to(self.sinks.astype(jnp.float32), lse.shape))
            saw = ~jnp.isneginf(lse)
            whole *= jnp.where(saw, jnp.exp(lse - with_sink), 0.0)[..., None]
            lse = jnp.where(saw, with_sink, lse)
        return Output(whole.astype(out.dtype), lse if self.return_lse else None)


class KVPacking(NamedTuple):
    """A pool's row holds two heads, or keys and values of one: queries stand where theirs do, with zeros beside."""

    form: Apart
    layer: Layer

    @classmethod
    def match(cls, call: LayerCall) -> "KVPacking | None":
        form = call.layer.config.form(call.layer.number)
        return cls(form, call.layer) if form.joins else None

    def inputs(self, call: LayerCall) -> LayerCall:
        blocks, _, heads, block_size, _ = self.layer.pool.kv.shape
        if call.k is not None:  # what the kernels would say is of rows
            apart = (blocks, 2, self.form.heads(heads), block_size, self.form.head_dim)
            shape = jax.ShapeDtypeStruct(apart, self.layer.pool.kv.dtype)
            check_new(call.k, call.v, StoredKV(shape), self.layer.tables.tables.shape[0])
            k, v = self.form.pack_kv(call.k, call.v)
            call = call.replace(k=k, v=v)
        if call.q is not None:
            check_query_heads(call.q.shape[-2], self.form.heads(heads))
            call = call.replace(q=self.form.pack_queries(call.q, heads))
        return call

    def outputs(self, output: Output) -> Output:
        num_heads = self.layer.pool.kv.shape[2]
        return output.map(lambda x: self.form.unpack_outputs(x, num_heads), lambda lse: lse)


class JoinedWidths(NamedTuple):
    """Values of another width than keys stand before them in a row: queries are 0 there."""

    v_head_dim: int

    @classmethod
    def match(cls, call: LayerCall) -> "JoinedWidths | None":
        v_head_dim = call.layer.layer_config.v_head_dim
        return None if v_head_dim is None else cls(v_head_dim)

    def inputs(self, call: LayerCall) -> LayerCall:
        k, v = call.k, call.v
        if k is not None and v is not None:
            if k.shape[:-1] != v.shape[:-1] or k.dtype != v.dtype:
                raise ValueError(
                    f"k and v must be alike but for their width, but k is {k.dtype}{list(k.shape)} and v is "
                    f"{v.dtype}{list(v.shape)}."
                )
            call = call.replace(k=side_by_side(v, k), v=None)
        if call.q is not None:
            call = call.replace(q=jnp.pad(call.q, [(0, 0)] * (call.q.ndim - 1) + [(self.v_head_dim, 0)]))
        return call

    def outputs(self, output: Output) -> Output:
        return output


ADAPTERS: tuple[type[Adapter], ...] = (
    TableColumns,
    DecodePacking,
    HeadRotation,
    ReplicatedHeads,
    HeadRows,
    ContextShards,
    KVPacking,
    JoinedWidths,
)


def adapt(call: LayerCall, adapters: tuple[type[Adapter], ...] = ADAPTERS) -> tuple[LayerCall, Callable[[Any], Any]]:
    """Returns a call as kernels take it, and a function of what they return that undoes every change of layout."""
    used = []
    for kind in adapters:
        if (adapter := kind.match(call)) is not None:
            call = adapter.inputs(call)
            used.append(adapter)

    def undo(result: Any) -> Any:
        output = Output(*result) if isinstance(result, tuple) else Output(result)
        for adapter in reversed(used):
            output = adapter.outputs(output)
        return output.out if output.lse is None else tuple(output)

    return call, undo


def kernel_layout(layer: Layer, *, q: Any = None, k: Any = None, v: Any = None) -> tuple[Any, Any, Any]:
    """Returns the shapes of q, k and v as the kernels see them, for checks before anything is computed."""

    def shapes(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
        call = LayerCall(layer=layer, q=q, k=k, v=v, query_lens=layer.tables.new)
        call, _ = adapt(call, (HeadRows, KVPacking, JoinedWidths))
        return call.q, call.k, call.v

    return jax.eval_shape(shapes, q, k, v)


def storage_arguments(layer: Layer) -> dict[str, Any]:
    """Returns what the kernels have to know of how a pool stores its tokens."""
    kind = layer.config.kind(layer.number).kind
    rank = layer.layer_config.row_rank or layer.config.form(layer.number).rank
    known = {} if kind is None else {"kv_scale": layer.pool.scale, "kind": kind}
    return known if rank is None else known | {"rank": rank}


def check_heads(layer: Layer, *, k: Any = None, v: Any = None, q: Any = None, **options: Any) -> None:
    """Raises where the heads of a step's arrays do not fit a layer's, before they are divided among devices."""
    if find_pool_mesh(layer.pool) is None:  # the computation checks it
        return
    known = dict(kv=layer.pool.kv, tables=layer.tables.tables) | storage_arguments(layer)
    known.pop("kv_scale", None)
    q, k, v = kernel_layout(layer, q=q, k=k, v=v)
    if k is not None:
        check_new(k, v, bundle_call(**known).stored, layer.tables.tables.shape[0])
    if q is not None:
        options = {name: options.get(name) for name in ("scale", "sinks", "alibi")}
        check_attention(bundle_call(q=q, **known, **options))
