"""Rows that begin with the same blocks, and read them once: who reads what with whom.

Nothing here touches keys, values or queries: it is index arithmetic on the device, and follows from which blocks are
equal, whatever their numbers.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.export
import jax.numpy as jnp

# Found by experiment on two CPU cores, see benchmarks/NOTES.md: queries that are computed together, how many rows that
# read by themselves take as long as those do over the same tokens, and what it costs beside, in tokens of a row.
TOGETHER = 64
WORTH_ROWS = 6
WORTH_TOKENS = 8192


def queries_together(num_heads: int, num_kv_heads: int) -> int:
    """Returns how many queries share one read of a group's prefix. With many query heads per KV head it is fewer:
    those are bound by arithmetic, and their last tile is not full.

    >>> [queries_together(heads, 2) for heads in (2, 4, 14, 64)]
    [64, 64, 18, 8]
    """
    return max(8, min(TOGETHER, 128 * num_kv_heads // num_heads))


@functools.partial(jax.export.register_namedtuple_serialization, serialized_name="pallas_kernels.Shared")
class Shared(NamedTuple):
    """What rows read together with others, an entry for each, `i32[S]`. Made by `find_shared`.

    >>> tables, ones = jnp.array([[1, 2, 3 + row] for row in range(8)], jnp.int32), jnp.ones(8, jnp.int32)
    >>> shared = Shared.unpack(find_shared(tables, 6144 * ones, ones, block_size=2048))
    >>> shared.tokens[0].item(), shared.leader[7].item(), shared.queries[0].item()
    (4096, 0, 8)
    """

    tokens: jax.Array  # how many of its first tokens a row reads together with others; 0: none
    leader: jax.Array  # the first row of its group; itself, where it reads alone
    place: jax.Array  # of its first query, where the queries of each group stand one after another
    queries: jax.Array  # of a leader: how many its group has; 0 for others

    @classmethod
    def unpack(cls, shared: jax.Array) -> "Shared":
        """Unpacks `i32[4, S]`."""
        return cls(*shared)


@functools.partial(jax.jit, static_argnames=("block_size", "worth"))
def find_shared(
    tables: jax.Array,
    before: jax.Array,
    queries: jax.Array,
    *,
    block_size: int,
    first: jax.Array | None = None,
    worth: int = WORTH_TOKENS,
) -> jax.Array:
    """Groups of rows that had better read their common first blocks once; see `Shared`.

    Args:
      tables: `i32[S, M]`.
      before: `i32[S]`, tokens that all queries of a row see; only full blocks of them are shared.
      queries: `i32[S]`, of the step. Rows with none, or with more than are computed together, read by themselves.
      first: `i32[S]`, the first column that a row sees; default: 0.
      worth: how many tokens a group must be spared.

    Returns:
      `i32[4, S]`, for `paged_attention(shared=...)`.

    A row can have much in common with few rows, and little with many: it goes where most is saved. One reading for many
    rows is Hydragen's (https://arxiv.org/abs/2402.05099) and FlashInfer's (https://arxiv.org/abs/2501.01005) cascade.

    >>> tables, ones = jnp.array([[1, 2, 3 + row] for row in range(8)], jnp.int32), jnp.ones(8, jnp.int32)
    >>> find_shared(tables, 6144 * ones, ones, block_size=2048)[0].tolist()
    [4096, 4096, 4096, 4096, 4096, 4096, 4096, 4096]
    """
    index = jnp.arange(tables.shape[0], dtype=jnp.int32)
    column = jnp.arange(tables.shape[1], dtype=jnp.int32)[None]
    itself = index[:, None] == index[None]
    first = jnp.zeros_like(before) if first is None else first
    full = jnp.where((queries > 0) & (queries <= TOGETHER), jnp.minimum(before // block_size, tables.shape[1]), 0)
    common = jnp.where(itself, 0, _common_columns(tables, full))
    others = jnp.sum(common[:, None] >= common[:, :, None], axis=2, dtype=jnp.int32)
    saved = others * jnp.maximum(common - first[:, None], 0)
    best = jnp.argmax(saved, axis=1, keepdims=True)
    columns = jnp.where(jnp.max(saved, axis=1) > 0, jnp.take_along_axis(common, best, axis=1)[:, 0], 0)
    # Who has so much in common is of one group, whose first row all are held against, block by block.
    like = jnp.argmax((common >= columns[:, None]) | itself, axis=1).astype(jnp.int32)
    is_alike = jnp.all((tables == tables[like]) | (column >= columns[:, None]), axis=1)
    columns = jnp.where(is_alike, columns, 0)
    together = (like[:, None] == like[None]) & (columns[:, None] == columns[None]) & (columns > 0)[None]

    def reduce_group(of: Callable, x: jax.Array) -> jax.Array:
        return of(jnp.where(together, x[None], 0), axis=1)

    count = reduce_group(jnp.sum, queries)
    rows_spared = reduce_group(jnp.sum, jnp.ones_like(index)) - WORTH_ROWS * -(-count // TOGETHER)
    seen = jnp.maximum(columns - reduce_group(jnp.max, first), 0)
    pays = rows_spared * seen * block_size >= worth
    leader = jnp.where(pays, jnp.argmax(together, axis=1).astype(jnp.int32), index)
    is_earlier = leader[:, None] > leader[None]
    is_earlier |= (leader[:, None] == leader[None]) & (index[:, None] > index[None])
    place = jnp.sum(jnp.where(is_earlier & pays[None], queries[None], 0), axis=1)
    tokens, of_group = jnp.where(pays, columns * block_size, 0), jnp.where(pays & (leader == index), count, 0)
    return jnp.stack(Shared(tokens, leader, place, of_group))


def _common_columns(tables: jax.Array, full: jax.Array) -> jax.Array:
    """`i32[S, S]`: how many first columns two rows have in common, if rows that meet in a column are alike before it,
    as those that fork and adopt are. Found by halving."""

    def halve(_, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        known, most = bounds
        middle = (known + most + 1) // 2
        column = jnp.maximum(middle - 1, 0)
        is_equal = jnp.take_along_axis(tables, column, axis=1) == jnp.take_along_axis(tables, column.T, axis=1).T
        return jnp.where(is_equal, middle, known), jnp.where(is_equal, most, middle - 1)

    most = jnp.minimum(full[:, None], full[None])
    known, _ = jax.lax.fori_loop(0, tables.shape[1].bit_length(), halve, (jnp.zeros_like(most), most))
    return known
