"""Plans a step, for all its layers: `plan_step`, and the step's positions.

A plan follows from tables, lengths and counts alone, so it is computed once a step. Layers that are called without a
plan get theirs here too, and find that the tables have been settled already: all of them compute from the same arrays,
and XLA merges their common work.
"""

import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from jaxkv._core.attention.attention_options import read_tree, tree_positions
from jaxkv._core.attention.shared_prefix import can_share, count_blocks_read, find_sharing
from jaxkv._core.blocks.tables import mark_failed
from jaxkv._core.cache.cache import Cache, check_cache
from jaxkv._core.config.cache_config import CacheConfig
from jaxkv._core.config.validation import flag, integer
from jaxkv._core.state.head_rows import repeat_for_heads, row_tables
from jaxkv._core.state.jax_internals import find_trace
from jaxkv._core.state.state import SENSELESS, STALE, BlockTables, Layer
from jaxkv._core.state.state_repr import check_living, describe_step
from jaxkv._core.state.static_fields import register_export
from pallas_kernels.common.shared_prefix import TOGETHER, queries_together


@register_export
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Step:
    """The plan of a step: the tokens that `extend` has made room for. Made by `plan_step`.

    >>> import jaxkv
    >>> sizes = dict(num_layers=1, num_kv_heads=2, head_dim=8, max_seqs=2, max_seq_len=64)
    >>> cache = jaxkv.init(jaxkv.CacheConfig.uniform(**sizes, num_blocks=4))
    >>> step = jaxkv.plan_step(jaxkv.extend(cache, [1, 1]), (2, 1))
    >>> step.decode, step.token_axes, step.positions.tolist()
    (True, (2, 1), [[0], [0]])
    """

    tables: tuple[BlockTables, ...]  # of each group, without the tokens of rows that do not fit, which are marked
    dropped: jax.Array  # i32[S]: tokens dropped from each row
    token: pallas_kernels.Tokens  # the row and position of each token, of the token axes; positions by depth
    tree: jax.Array | None = None  # i32 of the token axes: the parents of a tree's tokens
    shared: tuple[jax.Array, ...] | None = None  # of each group, i32[4, S]: rows that read first blocks together
    token_axes: tuple[int, ...] = dataclasses.field(metadata={"static": True})  # (S, T) or (N,)
    top_k: int | None = dataclasses.field(default=None, metadata={"static": True})  # tokens that a query chooses
    decode: bool = dataclasses.field(metadata={"static": True})  # no row has more than one token
    config: CacheConfig = dataclasses.field(metadata={"static": True})

    __repr__ = describe_step

    @property
    def positions(self) -> jax.Array:
        """The absolute position of every token, as rotary embeddings want it; 0 for padding."""
        return self.token.position

    @property
    def bytes_read(self) -> Any:
        """Bytes of keys and values, scales included, that the first attention layer reads in this step: each row's
        blocks once, blocks shared by many rows once per 64 queries. An int; within `jit` f32[].

        This assumes a decode step of up to two query heads per KV head, since a plan does not know that number: for
        more use `bytes_read_by`. In layers with a sliding window or chunk, kernels for TPU and GPU read every row by
        itself, and prompts read their context again for every tile of queries. For small tables XLA reads them whole.
        Planned with `top_k`, it is what queries read that choose tokens: the keys and values of so many each, and the
        index keys of their rows once.
        """
        return self._bytes_read(TOGETHER)

    def bytes_read_by(self, num_heads: int) -> Any:
        """Returns `bytes_read` for `num_heads` query heads in all. With more of them per KV head, fewer queries read
        shared blocks together, in XLA and in the kernels for GPUs.

        Raises:
          ValueError: not a multiple of the first layer's KV heads.

        >>> import jaxkv
        >>> sizes = dict(num_layers=1, num_kv_heads=2, head_dim=8, max_seqs=2, max_seq_len=64)
        >>> cache = jaxkv.init(jaxkv.CacheConfig.uniform(**sizes, num_blocks=4, dtype="float32"))
        >>> jaxkv.plan_step(jaxkv.extend(cache, [1, 1]), (2, 1)).bytes_read_by(num_heads=16) // cache.config.block_size
        256
        """
        num_heads, num_kv_heads = (
            integer("num_heads", num_heads, least=1),
            self.config.layers[self.config.groups[0][0]].num_kv_heads,
        )
        if num_heads % num_kv_heads:
            raise ValueError(f"num_heads must be a multiple of the {num_kv_heads} KV heads, not {num_heads}.")
        return self._bytes_read(queries_together(num_heads, num_kv_heads))

    def _bytes_chosen(self, top_k: int) -> Any:
        layer, block_size, tables = self.config.groups[0][0], self.config.block_size, self.tables[0]
        seen = jnp.where(self.token.valid, jnp.minimum(self.token.position + 1, top_k), 0)
        held = jnp.where(tables.new > 0, tables.lengths, 0)
        sizes = self.config.bytes_per_block_read(layer), self.config.index_bytes_per_block(layer)
        if isinstance(seen, jax.core.Tracer):
            chosen, rows = (jnp.sum(x.astype(jnp.float32)) for x in (seen, held))
            return (chosen * sizes[0] + rows * sizes[1]) / block_size
        counts = (int(np.asarray(x, np.int64).sum()) for x in (seen, held))
        return sum(count * size for count, size in zip(counts, sizes, strict=True)) // block_size

    def _bytes_read(self, together: int) -> Any:
        if self.top_k is not None:
            return self._bytes_chosen(self.top_k)
        layer = self.config.groups[0][0]
        if (residual := self.config.residual_layer(layer)) is None:
            return self._layer_bytes(layer, self.tables[0], together)
        older = jnp.maximum(self.tables[0].lengths - (self.config.residual_length or 0), 0)
        tables = dataclasses.replace(self.tables[0], lengths=older)
        return self._layer_bytes(layer, tables, together) + self._layer_bytes(
            residual, self.tables[self.config.group(residual)], together
        )

    def _layer_bytes(self, layer: int, tables: BlockTables, together: int) -> Any:
        group, size = self.config.group(layer), self.config.bytes_per_block_read(layer)
        shared = None if self.shared is None else self.shared[group]
        blocks = count_blocks_read(self.config, tables, group, shared, together)
        return blocks.astype(jnp.float32) * size if isinstance(blocks, jax.core.Tracer) else int(blocks) * size


def plan_step(
    cache: Cache,
    token_axes: Sequence[int],
    *,
    longest: int | None = None,
    tree: Any = None,
    cascade: bool = False,
    top_k: int | None = None,
) -> Step:
    """Plans a step once, for all its layers: pass it to `attention`, `write` and `attend` as `step=`.

    The result is the same with and without a plan. With a plan there is less to trace, and packed tokens with at most
    one in each row are computed as a decode step.

    A plan is valid until the next function that changes the tables. After that, rows whose plan differs from the cache
    store no token, their output is 0, and they are marked in `cache.failed`.

    Args:
      cache: after `extend`.
      token_axes: `(S, T)` for padded tokens, `(N,)` for packed ones.
      longest: the limit of tokens of a row, if the caller knows it; rows with more are left out and marked. Outside
        `jit` packed tokens are counted here.
      tree: `i32` of the token axes, each token's parent, as for `attention`, which then takes it from the plan.
        Positions go by depth.
      cascade: find rows with a common prefix of blocks (forks, samples of a prompt, a common system prompt), and read
        these once for all rows where that saves more than it costs. Results are the same up to rounding: kernels round
        the shared part and the rest before they merge them. The device decides in each step, but it must be requested,
        because programs become longer: layers that are not scanned take about twice as long to compile.
      top_k: number of tokens that a query chooses, for `bytes_read` alone.

    Raises:
      ValueError: parents known on the host that are no earlier tokens; axes that are not those of a step of this cache.

    >>> import jaxkv
    >>> layer = jaxkv.LayerConfig(num_kv_heads=2, head_dim=8)
    >>> cache = jaxkv.init(jaxkv.CacheConfig(layers=(layer,), max_seqs=2, max_seq_len=64, num_blocks=4))
    >>> step = jaxkv.plan_step(jaxkv.extend(cache, [3, 2]), (5,))
    >>> step.positions.tolist()
    [0, 1, 2, 0, 1]
    """
    check_cache(cache)
    rows = row_tables(cache.tables[0], cache.config)
    token_axes = check_token_axes(rows, token_axes)
    new, tree = rows.new, read_tree(tree, token_axes, rows, cache.config)
    if longest is not None:
        longest = integer("longest", longest, least=0)
    elif len(token_axes) == 1 and not isinstance(new, jax.core.Tracer):
        longest = int(np.max(np.asarray(new), initial=0))
    decode = token_axes[-1] <= 1 or (longest is not None and longest <= 1)
    with jax.named_scope("plan"):
        tables = tuple(_drop_unfit_rows(group_tables, token_axes, longest) for group_tables in cache.tables)
        group_tables = row_tables(tables[0], cache.config)
        token = _locate(group_tables, token_axes, tree)
        shared = None
        if flag("cascade", cascade) and can_share(cache.config):
            shared = tuple(
                find_sharing(cache.config, group_tables, group, group_tables.new)
                for group, group_tables in enumerate(tables)
            )
    step = Step(
        tables=tables,
        dropped=rows.lengths - group_tables.lengths,
        token=token,
        tree=tree,
        shared=shared,
        token_axes=token_axes,
        decode=decode,
        config=cache.config,
        top_k=None if top_k is None else integer("top_k", top_k, least=1),
    )
    for before, after in zip(cache.tables, tables, strict=True):
        _note_reconciled(step, before, after)
    return step


def positions(cache: Cache | Layer, shape: Sequence[int], *, tree: Any = None) -> jax.Array:
    """Returns the absolute position of every token of this step, for rotary embeddings; 0 for padding.

    Args:
      cache: a cache, or one of its layers.
      shape: `(S, T)` for padded tokens, `(N,)` for packed ones.
      tree: each token's parent, as for `attention`: a tree token's position is the context length plus its depth.

    Returns:
      i32 of that shape.

    >>> import jaxkv
    >>> layer = jaxkv.LayerConfig(num_kv_heads=2, head_dim=8)
    >>> cache = jaxkv.init(jaxkv.CacheConfig(layers=(layer,), max_seqs=2, max_seq_len=64, num_blocks=4))
    >>> cache = jaxkv.extend(jaxkv.extend(cache, [3, 0]), [2, 4])
    >>> jaxkv.positions(cache, (2, 4)).tolist()
    [[3, 4, 0, 0], [0, 1, 2, 3]]
    """
    if isinstance(cache, Layer):
        check_living("layer", cache.tables.lengths)
    else:
        check_cache(cache)
    tables = row_tables(cache.tables if isinstance(cache, Layer) else cache.tables[0], cache.config)
    shape = check_token_axes(tables, shape, "shape")
    with jax.named_scope("plan"):
        tree = read_tree(tree, shape, tables, cache.config)
        return _locate(_drop_unfit_rows(tables, shape, None), shape, tree).position


def _locate(tables: BlockTables, token_axes: tuple[int, ...], tree: jax.Array | None) -> pallas_kernels.Tokens:
    """Locates the tokens of settled tables."""
    token = pallas_kernels.locate(token_axes, tables.lengths, tables.new, tables.offsets)
    return token if tree is None else token._replace(position=tree_positions(tree, token, tables))


def settle_tables(tables: BlockTables, group: int, token_axes: tuple[int, ...], step: Step | None) -> BlockTables:
    """Returns a group's tables as the layers of a step read them: reverts the step of rows that do not fit the step's
    arrays, or whose plan differs."""
    if step is None:
        return _drop_unfit_rows(tables, token_axes, None)
    agreed = _reconciled_tables(step)
    if tables in agreed:
        return agreed[tables] or tables
    with jax.named_scope("plan"):
        settled = _reconcile(tables, step.tables[group], step.dropped)
    _note_reconciled(step, tables, settled)
    return settled


def settle_cache(cache: Cache, token_axes: tuple[int, ...], step: Step | None) -> Cache:
    """Returns a cache with the tables that all layers of a step read, as `attention` returns, with old pools."""
    tables = tuple(
        settle_tables(group_tables, group, token_axes, step) for group, group_tables in enumerate(cache.tables)
    )
    return cache.replace(tables=tables)


def check_plan(step: Any, config: CacheConfig, name: str, token_axes: tuple[int, ...]) -> None:
    """Raises unless `step` is a plan for a cache like this and for the tokens of the array `name`."""
    if step is None:
        return
    if not isinstance(step, Step):
        raise ValueError(f"step must be what plan_step returned, not {type(step).__name__}.")
    if step.config != config:
        raise ValueError("This step was planned for a cache of another config: plan it from the cache it is used with.")
    if step.token_axes != token_axes:
        raise ValueError(
            f"This step was planned for the token axes {step.token_axes}, but {name} has {token_axes}: plan a step for "
            "these."
        )


def check_token_axes(tables: BlockTables, token_axes: Any, name: str = "token_axes") -> tuple[int, ...]:
    """Returns `(S, T)` or `(N,)` as a tuple of Python integers. Raises ValueError, with the argument's name."""
    rows = tables.lengths.shape[0]
    is_list = isinstance(token_axes, list | tuple) or getattr(token_axes, "ndim", 0) == 1
    axes = tuple(token_axes) if is_list else (token_axes,)
    if len(axes) not in (1, 2) or (len(axes) == 2 and axes[0] != rows):
        raise ValueError(f"{name} must be (N,) or ({rows}, T), as this step's arrays begin, not {axes}.")
    return tuple(integer("a token axis", n, least=0) for n in axes)


# Which tables have been settled is noted on the objects, beside their fields: that is for one trace, where layers hand
# on the very same tables. Where an object is made anew (at a jit's or a loop's boundary) it is settled once more, which
# changes nothing.


def _drop_unfit_rows(tables: BlockTables, token_axes: tuple[int, ...], longest: int | None) -> BlockTables:
    """Reverts the step of rows that were extended by more tokens than the step's arrays have.

    Otherwise the unwritten slots, which may hold another row's old tokens, would count as theirs.
    """
    noted = getattr(tables, "_settled_for", None)
    if noted is not None and noted[0] == token_axes and longest in (None, noted[1]):
        return tables
    end = tables.new if len(token_axes) == 2 else tables.offsets + tables.new
    unfit = (tables.new > 0) & (end > np.int32(token_axes[-1]))
    if longest is not None and longest < token_axes[-1]:
        unfit |= tables.new > longest
    settled = _revert_step(tables, unfit, SENSELESS)
    object.__setattr__(settled, "_settled_for", (token_axes, longest))
    return settled


def _revert_step(tables: BlockTables, rows: jax.Array, why: int) -> BlockTables:
    tables = mark_failed(tables, rows, jnp.full_like(tables.wanted, why), 0)
    step = jnp.where(rows, tables.new, 0)
    return dataclasses.replace(tables, lengths=tables.lengths - step, new=tables.new - step)


def _reconcile(tables: BlockTables, planned: BlockTables, dropped: jax.Array) -> BlockTables:
    """Reconciles tables with a plan for others, row by row: reverts the step of rows that differ."""
    dropped = repeat_for_heads(dropped, tables)
    before = (tables.lengths == planned.lengths + dropped) & (tables.new == planned.new + dropped)
    after = (tables.lengths == planned.lengths) & (tables.new == planned.new)
    alike = jnp.all(tables.tables == planned.tables, axis=1) & (tables.offsets == planned.offsets) & (before | after)
    if tables.skipped is not None:
        alike &= tables.skipped == planned.skipped
    idle = (tables.new == 0) & (planned.new == 0)
    tables = _revert_step(tables, ~alike & ~idle, STALE)
    unfit = alike & (dropped > 0) & (tables.new > 0)
    return _revert_step(tables, unfit, SENSELESS)


def _reconciled_tables(step: Step) -> "weakref.WeakKeyDictionary[BlockTables, BlockTables | None]":
    """Returns the map from tables reconciled with a plan to the results; None: unchanged."""
    found = getattr(step, "_reconciled_tables", None)
    if found is None:
        found = weakref.WeakKeyDictionary()
        object.__setattr__(step, "_reconciled_tables", found)
    return found


def _note_reconciled(step: Step, before: BlockTables, after: BlockTables) -> None:
    agreed = _reconciled_tables(step)
    agreed[after] = None
    if before is not after and find_trace(before.lengths) is find_trace(after.lengths):
        agreed[before] = after  # else it is known within a loop's body, or a jit's, that has the tables from outside
