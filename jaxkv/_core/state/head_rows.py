"""Head rows of a table: one for each row, or one for each KV head of each row if a layer evicts by heads.

Kernels then take a head as a row of its own: tables `[K * S, M]`, blocks of one head, queries `[K * S, T, G, D]`. Heads
come first: head row `k * S + s` is head k of row s. Packed tokens thus stay consecutive head by head, and values of
rows are repeated to become values of head rows.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._core.config.cache_config import CacheConfig
from jaxkv._core.state.state import NULL_BLOCK, BlockTables, Layer

HEAD_ROW_FIELDS = ("tables", "lengths", "new", "offsets", "failed", "wanted", "needed", "skipped", "evicted", "thinned")


def refuse_evicting(config: CacheConfig, what: str, kinds: tuple[str, ...] = ("layer", "head")) -> None:
    """Raises ValueError if a layer evicts, for a function that does not support that."""
    for i, layer in enumerate(config.layers):
        if layer.evict in kinds:
            raise ValueError(f"{what} no layers with evict={layer.evict!r} yet, but layer {i} has it: leave it out.")


def refuse_states(config: CacheConfig, what: str) -> None:
    """Raises ValueError if a layer keeps a state, for a function that does not support that."""
    for i, layer in enumerate(config.layers):
        if layer.is_recurrent:
            raise ValueError(f"{what} no recurrent layers yet, but layer {i} is one {layer.retention}: leave it out.")


def refuse_sink_tokens(config: CacheConfig, what: str) -> None:
    """Raises ValueError if a layer keeps sink tokens before its window, for a function that does not support that."""
    for i, layer in enumerate(config.layers):
        if layer.sink_tokens is not None and layer.shares_with is None and not config.contiguous:
            raise ValueError(
                f"{what} no layers with window={layer.window} and sink_tokens={layer.sink_tokens} yet, but layer {i} "
                "has them: leave sink_tokens out."
            )


def refuse_index(config: CacheConfig, what: str) -> None:
    """Raises ValueError if a layer keeps index keys, for a function that is given none."""
    for i, layer in enumerate(config.layers):
        if layer.index_dim is not None:
            raise ValueError(
                f"{what} no layers with index_dim, but layer {i} has it, and its index keys would be missing: append "
                "the tokens to an empty cache, and give it their index keys by write_index."
            )


def refuse_entries(config: CacheConfig, what: str) -> None:
    """Raises ValueError if a layer stores entries of several tokens, for a function of tokens."""
    for i, layer in enumerate(config.layers):
        if layer.compress_ratio is not None:
            raise ValueError(
                f"{what} no layers with compress_ratio, but layer {i} has it, and stores entries of "
                f"{layer.compress_ratio} tokens: leave it out."
            )


def refuse_gaps(config: CacheConfig, what: str, kinds: tuple[str, ...] = ("layer", "head")) -> None:
    """Raises ValueError if not all layers store one token after another, for a function that assumes it."""
    refuse_entries(config, what)
    refuse_states(config, what)
    refuse_evicting(config, what, kinds)
    refuse_sink_tokens(config, what)


def repeat_for_heads(x: Any, tables: BlockTables) -> Any:
    """Repeats `[S, ...]` of rows for the head rows of a table; a scalar stays."""
    if not jnp.ndim(x) or x.shape[0] == (lines := tables.lengths.shape[0]):
        return x
    return jnp.tile(x, (lines // x.shape[0], *(1,) * (x.ndim - 1)))


def group_by_row(x: Any, config: CacheConfig) -> Any:
    """Reshapes `[S * n, ...]` of head rows to `[n, S, ...]`."""
    return x.reshape(-1, config.max_seqs, *x.shape[1:])


def sum_rows(x: Any, config: CacheConfig) -> Any:
    """Sums `i32[S * n]` over the head rows of each row, to `i32[S]`."""
    return x if x.shape[0] == config.max_seqs else group_by_row(x, config).sum(axis=0, dtype=x.dtype)


def sum_shards(x: jax.Array, tables: BlockTables) -> jax.Array:
    """Sums values of head rows: to `i32[]`, or per shard `i32[P]` if a table's blocks are in shards."""
    x = x if tables.num_shards == 1 else x.reshape(tables.num_shards, -1)
    return x.sum(axis=-1, dtype=x.dtype)


def sum_needs(x: jax.Array, tables: BlockTables, config: CacheConfig) -> jax.Array:
    """Sums the blocks that the head rows of each row need: to `i32[S]`, or per shard `i32[P, S]`."""
    if tables.num_shards == 1:
        return sum_rows(x, config)
    return x.reshape(tables.num_shards, -1, config.max_seqs).sum(axis=1, dtype=x.dtype)


def repeat_for_shards(x: Any, tables: BlockTables) -> jax.Array:
    """Repeats values of shards, `[P]` or `[P, S]`, for each head row; with one shard they stay as they are."""
    if tables.num_shards == 1:
        return x
    lines = tables.lengths.shape[0] // tables.num_shards
    if x.ndim == 1:
        return jnp.repeat(x, lines)
    return jnp.broadcast_to(x[:, None], (x.shape[0], lines // x.shape[1], x.shape[1])).reshape(-1)


def list_blocks(tables: BlockTables) -> np.ndarray:
    """Returns `i32[N]`, a table's blocks without the null blocks."""
    return list_shard_blocks(tables.num_blocks, tables.num_shards)


def list_shard_blocks(num_blocks: int, num_shards: int) -> np.ndarray:
    """Returns `i32[N]`, the indices of `num_blocks` blocks in `num_shards` shards, each after a null block."""
    number = np.arange(num_blocks + num_shards, dtype=np.int32)
    return number[number % (len(number) // num_shards) != NULL_BLOCK]


def any_head(x: Any, config: CacheConfig) -> Any:
    """Returns `bool[S]`: whether `x` is True for any head row of a row."""
    return x if x.shape[0] == config.max_seqs else group_by_row(x, config).any(axis=0)


def row_tables(tables: BlockTables, config: CacheConfig) -> BlockTables:
    """Returns tables with the values of rows that are equal in all groups: lengths are the tokens a row has seen."""
    if tables.evicted is None:
        return tables
    rows = {
        name: getattr(tables, name)[..., : config.max_seqs] for name in ("new", "offsets", "failed", "wanted", "needed")
    }
    return dataclasses.replace(tables, lengths=tables.seen[..., : config.max_seqs], evicted=None, thinned=None, **rows)


def source_head_rows(source: jax.Array, tables: BlockTables) -> jax.Array:
    """Expands source rows `i32[S]` to head rows: each head's source is the same head of the source row."""
    rows = source.shape[0]
    head = jnp.arange(tables.lengths.shape[0], dtype=jnp.int32) // rows
    return repeat_for_heads(source, tables) + head * rows


def _count_heads(layer: Layer) -> int:
    """Returns the number of head rows per row on this device."""
    return layer.tables.lengths.shape[0] // layer.config.max_seqs


def split_heads(layer: Layer, x: Any) -> Any:
    """Splits queries, keys or values `[S, T, heads, D]` or `[N, heads, D]` into head rows, `[K * S, T, heads / K, D]`
    or `[K * N, heads / K, D]`, for a layer that evicts by heads."""
    heads = _count_heads(layer)
    if heads == 1 or x is None:
        return x
    if x.shape[-2] % heads:
        raise ValueError(f"{x.shape[-2]} heads cannot be shared among {heads} KV heads: H must be a multiple of K.")
    axis = x.ndim - 2
    x = jnp.moveaxis(x.reshape(*x.shape[:axis], heads, x.shape[axis] // heads, x.shape[-1]), axis, 0)
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def join_heads(layer: Layer, out: Any, axis: int) -> Any:
    """Inverts `split_heads`, for a result with its heads at `axis`."""
    heads = _count_heads(layer)
    if heads == 1:
        return out
    out = jnp.moveaxis(out.reshape(heads, out.shape[0] // heads, *out.shape[1:]), 0, axis)
    return out.reshape(*out.shape[:axis], heads * out.shape[axis + 1], *out.shape[axis + 2 :])


def split_tokens(layer: Layer, x: Any) -> Any:
    """Repeats values of tokens, `[S, T]` or `[N]`, for all head rows."""
    heads = _count_heads(layer)
    return x if heads == 1 or x is None else jnp.tile(x, (heads, *(1,) * (x.ndim - 1)))


def split_offsets(layer: Layer, offsets: Any, count: int) -> Any:
    """Returns the start of each head row's packed tokens; each head has `count` consecutive tokens."""
    heads = _count_heads(layer)
    if heads == 1 or offsets is None:
        return offsets
    # A row whose tokens do not fit has none: its head rows start where the next head's do.
    start = jnp.minimum(offsets[: layer.config.max_seqs], count)
    return (start[None] + count * jnp.arange(heads, dtype=jnp.int32)[:, None]).reshape(-1)
