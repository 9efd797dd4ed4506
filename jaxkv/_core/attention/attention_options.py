"""Options of attention beyond causality, from a layer's config and from a call."""

from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._core.config.cache_config import CacheConfig
from jaxkv._core.config.validation import MOST_TOKENS, flag, integer, show
from jaxkv._core.state.arguments import cast_int32, is_known, read_numbers
from jaxkv._core.state.state import BlockTables, Layer
from pallas_kernels.api.arguments import check_numbers
from pallas_kernels.api.dispatch import check_names
from pallas_kernels.common import tree_attention as trees
from pallas_kernels.common.batch import as_float


class AttentionOptions(TypedDict, total=False):
    """Options of `attention` that change which keys a token sees or their weights; documented there."""

    scale: float | jax.Array | None
    soft_cap: float | jax.Array | None
    window: int | None
    sink_tokens: int | None
    sinks: Any  # f32[H]
    mask: Any  # bool[S, T, C] or bool[N, C]
    alibi: Any  # f32[H]
    spans: Any  # i32[S, T] or i32[N]
    tree: Any  # i32[S, T] or i32[N]
    tokens: Any  # i32[S, T, n] or i32[N, n]
    deterministic: bool
    cascade: bool


class AttendOptions(AttentionOptions, total=False):
    """Options of `attend`: those of `attention`, and which blocks to read."""

    blocks: Any  # i32[S, n]


# Options that the kernels take, and others that `attention` and `attend` read themselves, for error messages.
OPTIONS = AttendOptions.__optional_keys__ - {"cascade"} | {"causal", "return_lse"}
READ_BEFORE = {"cascade", "implementation", "layer", "step"}


def read_options(layer: Layer, options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options of a call for the kernels, with the layer's window or chunk.

    Raises:
      TypeError: no such option. ValueError: an option that the layer does not support.
    """
    if "chunk" in options:
        raise TypeError("attention takes no chunk: a layer's chunk is its LayerConfig's.")
    check_names("attention", options, OPTIONS, READ_BEFORE)
    options = {name: x for name, x in options.items() if x is not None}
    _check_evicting(layer, options)
    for name in ("window", "sink_tokens"):
        if name in options:
            options[name] = integer(name, options[name])
    for name in ("spans", "tree", "tokens"):
        if name in options and getattr(options[name], "dtype", None) != jnp.int32:
            options[name] = to_integers(name, options[name])
    for name in ("alibi", "sinks", "mask"):
        if name in options:
            options[name] = to_array(name, options[name])
    if "return_lse" in options:
        options["return_lse"] = flag("return_lse", options["return_lse"])
    if "blocks" in options:
        most = MOST_TOKENS if layer.config.is_endless else layer.config.max_blocks_per_seq
        options["blocks"] = _read_blocks(options["blocks"], (layer.rows, most))
    return layer.layer_config.mask_options(layer.number, options)


def to_array(name: str, x: Any) -> jax.Array:
    """Returns an array or list of numbers or flags as a device array. Raises ValueError for anything else."""
    found: Any = read_numbers(name, x)
    if not is_known(found):
        return found
    if found.dtype.kind not in "fiub" and found.dtype != jnp.bfloat16:
        raise ValueError(f"{name} must be an array of {'flags' if name == 'mask' else 'numbers'}, not {show(x)}.")
    return jnp.asarray(found)


def read_scale(scale: Any, head_dim: int) -> Any:
    """Returns the factor of logits, by default `head_dim ** -0.5`. Raises ValueError."""
    check_numbers(scale)
    return head_dim**-0.5 if scale is None else as_float(scale)


def _check_evicting(layer: Layer, options: dict[str, Any]) -> None:
    retention = layer.config.retentions[layer.group]
    for name in retention.refused_options:
        if name in options:
            raise ValueError(
                f'Layer {layer.number} has evict="{retention.evict}", where a token\'s slot is not its position, or '
                f"each head has its own, so it cannot take {name}: leave it out, or make the layer without evict."
            )


def _read_blocks(blocks: Any, table: tuple[int, ...]) -> Any:
    """Returns logical blocks of each row. Raises ValueError if they are known on the host and do not increase."""
    if isinstance(blocks, jax.Array | jax.ShapeDtypeStruct):
        return blocks
    blocks = read_numbers("blocks", blocks)
    if not is_known(blocks):
        return to_integers("blocks", blocks)
    if blocks.ndim != 2 or blocks.shape[0] != table[0] or not np.issubdtype(blocks.dtype, np.integer):
        raise ValueError(
            f"blocks must be i32[{table[0]}, n], the logical blocks of each row to read, not "
            f"{blocks.dtype}{list(blocks.shape)}."
        )
    there = blocks >= 0
    wrong = (there & (blocks >= table[1])) | (blocks < -1)
    wrong[:, 1:] |= there[:, 1:] & (blocks[:, 1:] <= blocks[:, :-1])
    wrong[:, 1:] |= there[:, 1:] & ~there[:, :-1]
    if wrong.any():
        row = int(np.argmax(wrong.any(axis=1)))
        raise ValueError(
            f"blocks must name blocks 0 to {table[1] - 1} in increasing order, with -1 behind them, but row {row} has "
            f"{show(blocks[row].tolist())}."
        )
    return to_integers("blocks", blocks)


def to_integers(name: str, x: Any) -> jax.Array:
    """Returns an array of integers as int32; those on the host must fit. Raises ValueError."""
    x = read_numbers(name, x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(f"{name} must be integers, one for each token, not {x.dtype}: {show(x)}.")
    return cast_int32(x)


def read_tree(tree: Any, token_axes: tuple[int, ...], tables: BlockTables, config: CacheConfig) -> jax.Array | None:
    """Returns the parents of a step's tokens, `i32` of its token axes.

    Raises:
      ValueError: another shape, or a parent known on the host that is neither -1 nor an earlier token of its row; a
        cache with recurrent layers.
    """
    if tree is None:
        return None
    for i in config.recurrent_layers[:1]:
        raise ValueError(
            f"tree is for caches of attention layers, but layer {i} of this one is one {config.layers[i].retention}, "
            "which takes one token after another: leave tree out."
        )
    for i, layer in enumerate(config.layers):
        if layer.compress_ratio is not None:
            raise ValueError(
                f"tree is for caches of layers that store tokens, but layer {i} of this one stores entries of "
                f"{layer.compress_ratio} tokens one after another: leave tree out."
            )
    tree = read_numbers("tree", tree)
    parents = to_integers("tree", tree)
    if parents.shape != token_axes:
        raise ValueError(f"tree must be i32{list(token_axes)}, each token's parent, but its shape is {parents.shape}.")
    if is_known(tree):
        _check_parents(tree, tables)
    return parents


def _check_parents(parents: np.ndarray, tables: BlockTables) -> None:
    """Checks all parents except padding, where padding is known."""
    known = not isinstance(tables.new, jax.core.Tracer)
    number = np.broadcast_to(np.arange(parents.shape[-1]), parents.shape)
    valid = np.ones(parents.shape, bool)
    if known:
        new, start = np.asarray(tables.new), np.asarray(tables.offsets)
        if parents.ndim == 2:
            valid = number < new[:, None]
        else:
            row = np.maximum(np.searchsorted(start, number, side="right") - 1, 0)
            number = number - start[row]
            valid = (number >= 0) & (number < new[row])
    wrong = valid & ((parents < -1) | (parents >= number))
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        what = "itself" if parents[at] == number[at] else "no earlier one"
        raise ValueError(
            f"tree must name for each token -1, the context, or an earlier token of its row, counted from the first "
            f"new one, but the parent of token {number[at]} at {list(at)} is {show(int(parents[at]))}, {what}."
        )


def tree_positions(parents: jax.Array, token: Any, tables: BlockTables) -> jax.Array:
    """Returns the position of each token of a tree: the context length plus its depth; 0 for padding."""
    axes, flat = parents.shape, jax.tree.map(jnp.ravel, token)
    before = tables.lengths - tables.new
    start = tables.offsets if len(axes) == 1 else jnp.arange(axes[0], dtype=jnp.int32) * axes[1]
    depth = trees.climb(parents.reshape(-1), flat, before, start, axes[-1]).depth
    return jnp.where(flat.valid, before[flat.row] + depth, 0).reshape(axes)
