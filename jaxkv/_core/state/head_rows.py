"""Lines of a table: one for each row, or, where a layer evicts by heads, one for each KV head of each row.

A head is a row of its own then, and kernels take it as one: tables `[K * S, M]`, blocks of one head, queries
`[K * S, T, G, D]`. Heads come first, line `k * S + s` is head k of row s: so packed tokens stay runs, head by head, and
what is said of rows is said of lines by repeating it.
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
    """Raise ValueError where a layer evicts, whole tokens or by heads, for a function that does not know that."""
    for i, layer in enumerate(config.layers):
        if layer.evict in kinds:
            raise ValueError(f"{what} no layers with evict={layer.evict!r} yet, but layer {i} has it: leave it out.")


def refuse_sinks(config: CacheConfig, what: str) -> None:
    """Raise ValueError where rows of a layer keep first tokens before its window, for a function that does not know."""
    for i, layer in enumerate(config.layers):
        if layer.sink_tokens is not None and layer.shares_with is None and not config.contiguous:
            raise ValueError(
                f"{what} no layers with window={layer.window} and sink_tokens={layer.sink_tokens} yet, but layer {i} "
                "has them: leave sink_tokens out."
            )


def refuse_gaps(config: CacheConfig, what: str, kinds: tuple[str, ...] = ("layer", "head")) -> None:
    """`refuse_evicting` and `refuse_sinks`: for a function that takes rows to hold all tokens from one on."""
    refuse_evicting(config, what, kinds)
    refuse_sinks(config, what)


def to_lines(x: Any, tables: BlockTables) -> Any:
    """`[S, ...]` of rows, or a scalar, for each line of a table."""
    if not jnp.ndim(x) or x.shape[0] == (lines := tables.lengths.shape[0]):
        return x
    return jnp.tile(x, (lines // x.shape[0], *(1,) * (x.ndim - 1)))


def by_row(x: Any, config: CacheConfig) -> Any:
    """`[S * n, ...]` of lines as `[n, S, ...]`."""
    return x.reshape(-1, config.max_seqs, *x.shape[1:])


def row_sums(x: Any, config: CacheConfig) -> Any:
    """`i32[S]`: what the lines of each row have together."""
    return x if x.shape[0] == config.max_seqs else by_row(x, config).sum(axis=0, dtype=x.dtype)


def part_sums(x: jax.Array, tables: BlockTables) -> jax.Array:
    """`i32[]`: all numbers of lines together; `i32[P]` where a table's blocks are in parts."""
    x = x if tables.parts == 1 else x.reshape(tables.parts, -1)
    return x.sum(axis=-1, dtype=x.dtype)


def row_needs(x: jax.Array, tables: BlockTables, config: CacheConfig) -> jax.Array:
    """`i32[S]`: what the lines of each row need together of a table's blocks; of each part of them, `i32[P, S]`."""
    if tables.parts == 1:
        return row_sums(x, config)
    return x.reshape(tables.parts, -1, config.max_seqs).sum(axis=1, dtype=x.dtype)


def of_parts(x: Any, tables: BlockTables) -> jax.Array:
    """What is said of a table's parts, `[P]` or of their rows `[P, S]`, for each line; where there is one, as it is."""
    if tables.parts == 1:
        return x
    lines = tables.lengths.shape[0] // tables.parts
    if x.ndim == 1:
        return jnp.repeat(x, lines)
    return jnp.broadcast_to(x[:, None], (x.shape[0], lines // x.shape[1], x.shape[1])).reshape(-1)


def block_numbers(tables: BlockTables) -> np.ndarray:
    """`i32[N]`: a table's blocks, without the null blocks."""
    return numbers_in_parts(tables.num_blocks, tables.parts)


def numbers_in_parts(num_blocks: int, parts: int) -> np.ndarray:
    """`i32[N]`: so many blocks in so many parts, each behind a null block."""
    number = np.arange(num_blocks + parts, dtype=np.int32)
    return number[number % (len(number) // parts) != NULL_BLOCK]


def any_of_row(x: Any, config: CacheConfig) -> Any:
    """`bool[S]`: whether it is so for any line of a row."""
    return x if x.shape[0] == config.max_seqs else by_row(x, config).any(axis=0)


def seen_by_rows(tables: BlockTables, config: CacheConfig) -> BlockTables:
    """Tables that say of rows what all groups say alike: lengths are the tokens that a row has seen."""
    if tables.evicted is None:
        return tables
    rows = {
        name: getattr(tables, name)[..., : config.max_seqs] for name in ("new", "offsets", "failed", "wanted", "needed")
    }
    return dataclasses.replace(tables, lengths=tables.seen[..., : config.max_seqs], evicted=None, thinned=None, **rows)


def source_lines(source: jax.Array, tables: BlockTables) -> jax.Array:
    """`i32[S]`, the rows that rows are to be like, for lines: each head is to be like the same head of the other."""
    rows = source.shape[0]
    head = jnp.arange(tables.lengths.shape[0], dtype=jnp.int32) // rows
    return to_lines(source, tables) + head * rows


def _heads_of(one: Layer) -> int:
    """How many lines a row has: of those that are at hand."""
    return one.tables.lengths.shape[0] // one.config.max_seqs


def split_heads(one: Layer, x: Any) -> Any:
    """Queries, keys or values `[S, T, heads, D]` or `[N, heads, D]` as the lines' own, `[K * S, T, heads / K, D]` or
    `[K * N, heads / K, D]`, of a layer that evicts by heads."""
    heads = _heads_of(one)
    if heads == 1 or x is None:
        return x
    if x.shape[-2] % heads:
        raise ValueError(f"{x.shape[-2]} heads cannot be shared among {heads} KV heads: H must be a multiple of K.")
    axis = x.ndim - 2
    x = jnp.moveaxis(x.reshape(*x.shape[:axis], heads, x.shape[axis] // heads, x.shape[-1]), axis, 0)
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def join_heads(one: Layer, out: Any, axis: int) -> Any:
    """The opposite of `split_heads`, of an array with its heads at `axis`."""
    heads = _heads_of(one)
    if heads == 1:
        return out
    out = jnp.moveaxis(out.reshape(heads, out.shape[0] // heads, *out.shape[1:]), 0, axis)
    return out.reshape(*out.shape[:axis], heads * out.shape[axis + 1], *out.shape[axis + 2 :])


def split_tokens(one: Layer, x: Any) -> Any:
    """What is said of tokens, `[S, T]` or `[N]`, for those of all lines."""
    heads = _heads_of(one)
    return x if heads == 1 or x is None else jnp.tile(x, (heads, *(1,) * (x.ndim - 1)))


def split_offsets(one: Layer, offsets: Any, count: int) -> Any:
    """Where each line's packed tokens start, `count` of each head one after another."""
    heads = _heads_of(one)
    if heads == 1 or offsets is None:
        return offsets
    # Where a row's tokens do not fit it has none: its lines start where the next head's do.
    start = jnp.minimum(offsets[: one.config.max_seqs], count)
    return (start[None] + count * jnp.arange(heads, dtype=jnp.int32)[:, None]).reshape(-1)
