"""Finds the blocks that rows from the host share, among themselves and with rows in the cache."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxkv._core.blocks.allocator import first_free, mark_taken
from jaxkv._core.blocks.block_copy import read_blocks, read_group
from jaxkv._core.cache.cache import Cache
from jaxkv._core.state.columns import columns_of
from jaxkv._core.state.state import NULL_BLOCK, BlockTables, Pool

State = tuple[jax.Array, jax.Array, jax.Array]  # of a search: entries compared, rows alike so far, the last such row


class Entries(NamedTuple):
    """The m table entries of a host's lines in a group, line by line."""

    line: jax.Array  # i32[m]: of which of the host's lines it is
    number: jax.Array  # i32[m]: how many entries of its line stand before it
    # i32[m]: where it stands in the line's table; which block of its row it is, until `skip`
    column: jax.Array
    is_ahead: jax.Array  # bool[m]: it is one of the first tokens', which no table skips
    block: jax.Array  # i32[m]: which of the B blocks that were moved it names
    is_there: jax.Array  # bool[m]: the others are padding

    def skip(self, columns: jax.Array) -> "Entries":
        """Returns the entries in tables that skip `columns` i32[m] columns."""
        return self._replace(column=self.column - jnp.where(self.is_ahead, 0, columns))


def list_entries(first: jax.Array, count: jax.Array, order: jax.Array, sink_blocks: int) -> Entries:
    """Returns the entries of lines that have `count` blocks, the first `sink_blocks` of the row and others from `first`
    on."""
    ahead = jnp.minimum(count, sink_blocks)
    i, end = jnp.arange(order.shape[0], dtype=jnp.int32), jnp.cumsum(count, dtype=jnp.int32)
    found = jnp.searchsorted(end, i, side="right", method="compare_all").astype(jnp.int32)
    line = jnp.minimum(found, count.shape[0] - 1)
    number = i - (end - count)[line]
    column = number + jnp.where(number < ahead[line], 0, (first - ahead)[line])
    return Entries(line, number, column, number < ahead[line], order, found < count.shape[0])


def match_group_blocks(
    cache: Cache, group: int, entries: Entries, held: jax.Array, pools: Sequence[Pool | None]
) -> jax.Array:
    """Returns `i32[B]`: for each block that was moved the equal one of the cache that can be shared, or the null block.

    Searches for a row in the cache whose leading blocks are equal to the bit. Only blocks that are full in both rows
    are shared, since these are never written again; blocks of a row's last or next step are not compared.

    Args:
      held: `i32[n]`, tokens that are held of each line of the host.
      pools: the moved blocks of each layer, on the device.
    """
    tables, size = cache.tables[group], cache.config.block_size
    num_moved = pools[cache.config.groups[group][0]].kv.shape[0]  # type: ignore[union-attr]
    is_full = entries.is_there & ((entries.column + 1) * size <= held[entries.line])
    sink_blocks, width = cache.config.group_sink_blocks[group], tables.tables.shape[1]

    def look_up(lines: jax.Array, number: jax.Array) -> jax.Array:
        """Returns the cache's blocks at logical index `number` of lines."""
        column = columns_of(number, None if tables.skipped is None else tables.skipped[lines], sink_blocks)
        own = tables.tables[lines, jnp.clip(column, 0, width - 1)]
        return jnp.where((column >= 0) & (column < width), own, NULL_BLOCK)

    written = tables.lengths - tables.new
    num_rows, num_hosts = cache.config.max_seqs, held.shape[0] // cache.config.group_heads[group]
    probed = cache.config.group_stacks(group)[-1]  # the deepest layer: what it holds depends on all tokens before
    probe, pool = pools[probed[-1]], cache.layer(probed[0]).pool
    offset = (len(probed) - 1) * (pool.kv.shape[0] // len(probed))

    def find_row(line: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Finds the line of the cache with the longest prefix in common with a host's line, and its entries."""
        lines = (line // num_hosts) * num_rows + jnp.arange(num_rows, dtype=jnp.int32)
        start = jnp.argmax(entries.line == line)
        num_full = jnp.sum(is_full & (entries.line == line), dtype=jnp.int32)

        def go_on(state: State) -> jax.Array:
            number, alike, _ = state
            return alike.any() & (number < num_full)

        def compare(state: State) -> State:
            number, alike, row = state
            at = entries.column[start + number]
            own = look_up(lines, jnp.broadcast_to(at, lines.shape))
            block = jnp.where(alike & ((at + 1) * size <= written[lines]), own, NULL_BLOCK)
            (theirs,) = read_blocks(pool, jnp.where(block == NULL_BLOCK, NULL_BLOCK, block + offset))
            ours = jax.tree.map(lambda x: x[entries.block[start + number]][None], probe)
            alike = (block != NULL_BLOCK) & _are_equal(theirs, ours)
            return number + 1, alike, jnp.where(alike.any(), jnp.argmax(alike).astype(jnp.int32), row)

        zero = jnp.zeros((), jnp.int32)
        number, alike, row = jax.lax.while_loop(go_on, compare, (zero, written[lines] >= size, zero))
        return lines[row], jnp.where(alike.any(), number, jnp.maximum(number - 1, 0))

    like, most = jax.lax.map(find_row, jnp.arange(held.shape[0], dtype=jnp.int32))
    found = jnp.where(
        is_full & (entries.number < most[entries.line]), look_up(like[entries.line], entries.column), NULL_BLOCK
    )

    def verify(found: jax.Array) -> jax.Array:
        equal = found != NULL_BLOCK
        for layer, theirs in read_group(cache, group, found).items():
            equal &= _are_equal(theirs, jax.tree.map(lambda x: x[entries.block], pools[layer]))
        return jnp.where(equal, found, NULL_BLOCK)

    found = jax.lax.cond((found != NULL_BLOCK).any(), verify, lambda found: found, found)
    place = jnp.where(found == NULL_BLOCK, num_moved, entries.block)
    return jnp.full(num_moved, NULL_BLOCK, jnp.int32).at[place].set(found, mode="drop")


def _are_equal(theirs: Pool, ours: Any) -> jax.Array:
    """Returns `bool[n]`: which blocks are equal to the bit, in the arrays that `ours` has."""

    def are(x: jax.Array, own: jax.Array) -> jax.Array:
        x = x[(slice(None),) * 4 + tuple(slice(0, size) for size in own.shape[4:])]  # D may be padded in the pool
        own = jnp.broadcast_to(own, x.shape)
        return (_bits(x) == _bits(own)).all(axis=tuple(range(1, x.ndim)))

    theirs = theirs if ours.bounds is not None else theirs.tokens
    pairs = zip(jax.tree.leaves(theirs), jax.tree.leaves(ours), strict=True)
    return jnp.stack([are(x, own) for x, own in pairs]).all(axis=0)


def _bits(x: jax.Array) -> jax.Array:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))


def grant_shared_rows(
    groups: Sequence[BlockTables],
    entries: Sequence[Entries],
    equal: Sequence[jax.Array],
    shards: Sequence[jax.Array],
    sensible: jax.Array,
) -> tuple[jax.Array, list[jax.Array], list[jax.Array]]:
    """Returns which rows of a host get blocks: in order, each all or nothing in all groups.

    The first sharing row that gets all of its own blocks takes a shared block.

    Args:
      equal: for each group `i32[B]`, the block of the cache that stands for a moved block (`match_group_blocks`).
      shards: for each group `i32[B]`, the shard that a block is in.
      sensible: `bool[n]`, rows that can be granted.

    Returns:
      `bool[n]`; for each group `bool[B]`, the moved blocks for which a free one is taken; for each group `i32[P, n]`,
      how many of each shard the rows ask for.
    """
    num_rows = sensible.shape[0]

    def serve(state: tuple[Any, Any], row: jax.Array) -> tuple[tuple[Any, Any], tuple[jax.Array, list[jax.Array]]]:
        taken, free = state
        fresh = [
            _mark(jnp.where(e.is_there & (e.line % num_rows == row), e.block, there.shape[0]), there.shape[0])
            & ~already & (there == NULL_BLOCK)
            for e, there, already in zip(entries, equal, taken, strict=True)
        ]  # fmt: skip
        needs = [
            jnp.zeros(tables.num_shards, jnp.int32).at[shard].add(new.astype(jnp.int32))
            for tables, shard, new in zip(groups, shards, fresh, strict=True)
        ]
        fits = jnp.stack([jnp.all(need <= left) for need, left in zip(needs, free, strict=True)]).all()
        granted = sensible[row] & fits
        taken = [already | (new & granted) for already, new in zip(taken, fresh, strict=True)]
        free = [left - jnp.where(granted, need, 0) for left, need in zip(free, needs, strict=True)]
        return (taken, free), (granted, needs)

    none = [jnp.zeros(there.shape, bool) for there in equal]
    free = [jnp.atleast_1d(tables.num_free) for tables in groups]
    (taken, _), (granted, needs) = jax.lax.scan(serve, (none, free), jnp.arange(num_rows, dtype=jnp.int32))
    return granted, taken, [need.T for need in needs]


def find_block_shard(entries: Entries, num_lines: int, num_blocks: int, num_shards: int) -> jax.Array:
    """Returns `i32[B]`: the shard of a table for each moved block; lines in P equal runs are in P shards."""
    place = jnp.where(entries.is_there, entries.block, num_blocks)
    return jnp.zeros(num_blocks, jnp.int32).at[place].set(entries.line * num_shards // num_lines, mode="drop")


def take_shared_blocks(tables: BlockTables, taken: jax.Array, shard: jax.Array) -> tuple[BlockTables, jax.Array]:
    """Returns tables with a free block allocated for each of `taken` bool[B], and `i32[B]`: these blocks."""
    in_shard = taken[None] & (shard[None] == jnp.arange(tables.num_shards, dtype=jnp.int32)[:, None])
    rank = jnp.cumsum(in_shard, axis=1, dtype=jnp.int32)
    at = jnp.where(in_shard, rank, 0).sum(axis=0, dtype=jnp.int32) - 1 + jnp.atleast_1d(first_free(tables))[shard]
    block = jnp.where(taken, tables.free_list.at[at].get(mode="fill", fill_value=NULL_BLOCK), NULL_BLOCK)
    count = rank[:, -1]
    return mark_taken(tables, count[0] if tables.num_shards == 1 else count), block


def put_entries(
    tables: BlockTables, entries: Entries, lines: jax.Array, block: jax.Array, taken: jax.Array
) -> BlockTables:
    """Returns tables with the entries of a host in lines `lines` i32[n] (past the end: in none), and counts them.

    Args:
      block: `i32[B]`, the block of the cache that holds each moved block.
      taken: `bool[B]`, which of them were free: these count one owner already.
    """
    line = jnp.where(entries.is_there, lines[entries.line], tables.tables.shape[0])
    own = block[entries.block]
    named = jnp.where(line < tables.tables.shape[0], own, tables.refcounts.shape[0])
    counts = tables.refcounts.at[named].add(1, mode="drop")
    counts = counts.at[jnp.where(taken, block, counts.shape[0])].add(-1, mode="drop")
    return dataclasses.replace(
        tables, tables=tables.tables.at[line, entries.column].set(own, mode="drop"), refcounts=counts
    )


def _mark(place: jax.Array, size: int) -> jax.Array:
    return jnp.zeros(size, bool).at[place].set(True, mode="drop")
