"""Blocks for tokens: `extend`, `reserve` and `free`. Index arithmetic only; keys and values are not touched."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._core.blocks.allocator import count_blocks, free_leading_blocks, grant_rows, replace_entries, take_blocks
from jaxkv._core.blocks.slot_allocator import begin_step, release_slots
from jaxkv._core.cache.cache import Cache, check_cache
from jaxkv._core.config.validation import MOST_TOKENS
from jaxkv._core.state.arguments import row_counts, row_mask
from jaxkv._core.state.columns import columns_of, slide
from jaxkv._core.state.head_rows import group_by_row, repeat_for_heads, repeat_for_shards, sum_needs
from jaxkv._core.state.state import NULL_BLOCK, TOO_LONG, BlockTables


def jit_tables(function: Callable[..., Cache]) -> Callable[..., Cache]:
    """Compiles `function(cache, arrays...)`, which changes block tables only, as one program.

    The pools bypass the program, which would copy them.
    """
    program = jax.jit(function)

    @functools.wraps(function)
    def run(cache: Cache, *arrays: jax.Array) -> Cache:
        return program(cache.replace(pools=(), states=()), *arrays).replace(pools=cache.pools, states=cache.states)

    return run


def extend(cache: Cache, num_tokens: Any, *, guesses: Any = None) -> Cache:
    """Allocates blocks for this step's tokens of every row.

    First, layers with a sliding window free the blocks that no later token of a row can attend to.

    Rows are served in order, each all or nothing. A row whose request cannot be met (too few free blocks, or past
    `max_seq_len`) stays as it was and is marked in `cache.failed`. Its tokens of this step are dropped, and the other
    rows go on. If no layer keeps all tokens, `max_seq_len` limits the tokens held at once: see `CacheConfig`.

    A failed row is left out of every step until `free`, so that no token ever follows a dropped one.

    Args:
      num_tokens: `i32[S]`, tokens of each row in this step; 0: the row is not in this step.
      guesses: for recurrent layers, the rows of whose tokens `keep` may drop some: `bool[S]`, row indices, or True for
        all. Their states stay as they are until `keep`, which must follow the step. Attention layers need no such word.

    Raises:
      ValueError: a wrong shape or dtype; a negative number known on the host; a step of guesses without `keep` before.
        On the device a negative number marks the row in `cache.failed`.

    >>> import jaxkv
    >>> layer = jaxkv.LayerConfig(num_kv_heads=2, head_dim=8)
    >>> cache = jaxkv.init(jaxkv.CacheConfig(layers=(layer,), max_seqs=3, max_seq_len=64, num_blocks=4))
    >>> cache = jaxkv.extend(cache, [20, 0, 60])
    >>> cache.lengths.tolist(), cache.failed.tolist()
    ([20, 0, 0], [False, False, True])
    """
    check_cache(cache)
    rows = cache.lengths.shape[0]
    requested = row_counts("num_tokens", num_tokens, rows)
    if guesses is None or guesses is False:
        return _extend(cache, requested)
    return _extend(cache, requested, row_mask("guesses", np.arange(rows) if guesses is True else guesses, rows))


@jit_tables
def _extend(cache: Cache, requested: jax.Array, guesses: jax.Array | None = None) -> Cache:
    room = room_left(cache)
    fits = (requested > 0) & (requested <= room) & ~cache.failed
    cache = release_windows(cache)
    granted, needs, tables = _make_room(cache, jnp.where(fits, cache.lengths + requested, 0))
    granted &= fits
    refused = (requested != 0) & ~granted & ~cache.failed  # `check` reports the first refusal
    # Any length past the longest sequence is reported as just too long: the sum could overflow.
    wanted = jnp.where(requested < 0, -1, cache.lengths + jnp.minimum(requested, room + 1))
    needs = [jnp.where(requested > room, TOO_LONG, needed) for needed in needs]
    # No packed array holds more than this, and the sum of all requests must not overflow.
    counted = jnp.clip(requested, 0, np.iinfo(np.int32).max // requested.shape[0])

    def begin(tables: BlockTables, needed: jax.Array) -> BlockTables:  # own arrays for every group, to donate
        new = repeat_for_heads(jnp.where(granted, requested, 0), tables)
        tables = mark_failed(tables, refused, wanted, needed)
        offsets = repeat_for_heads(jnp.cumsum(counted) - counted, tables)
        return dataclasses.replace(tables, lengths=tables.lengths + new, new=new, offsets=offsets)

    begun = tuple(begin(group_tables, n) for group_tables, n in zip(tables, needs, strict=True))
    return cache.replace(tables=begun, state_slots=begin_step(cache, jnp.where(granted, requested, 0), guesses))


def reserve(cache: Cache, target_lengths: Any) -> Cache:
    """Allocates the blocks for `target_lengths` tokens of every row, without adding tokens. Repeating changes nothing.

    A row whose request cannot be met stays as it was and is marked in `cache.failed`, as in `extend`. A row that failed
    before gets no blocks.

    Args:
      target_lengths: `i32[S]`; a row that has enough blocks already keeps them.

    >>> import jaxkv
    >>> layer = jaxkv.LayerConfig(num_kv_heads=2, head_dim=8)
    >>> cache = jaxkv.init(jaxkv.CacheConfig(layers=(layer,), max_seqs=2, max_seq_len=64, num_blocks=4))
    >>> jaxkv.reserve(cache, [33, 0]).blocks_in_use
    3
    """
    check_cache(cache)
    return _reserve(cache, row_counts("target_lengths", target_lengths, cache.lengths.shape[0]))


@jit_tables
def _reserve(cache: Cache, target: jax.Array) -> Cache:
    is_long = target - cache.lengths > room_left(cache)
    fits = (target >= 0) & ~is_long & ~cache.failed
    granted, needs, tables = _make_room(cache, jnp.where(fits, target, 0))
    needs = [jnp.where(is_long, TOO_LONG, needed) for needed in needs]
    refused, wanted = ~(granted & fits | cache.failed), jnp.where(target < 0, -1, target)
    return cache.replace(
        tables=tuple(
            mark_failed(group_tables, refused, wanted, n) for group_tables, n in zip(tables, needs, strict=True)
        )
    )


def free(cache: Cache, rows: Any) -> Cache:
    """Empties rows: sets their length to 0, clears failures and frees their blocks. An empty row stays empty.

    Args:
      rows: `bool[S]`, or row indices. Integers are always indices: a mask of 0 and 1 needs `.astype(bool)`.

    Raises:
      ValueError, IndexError: a wrong shape or dtype; an index named twice, out of range, or below 0, that is known on
        the host. On the device an index out of range names no row, so none is marked in `cache.failed`: it is ignored,
        as the padding of `jnp.nonzero(ended, size=S, fill_value=S)` must be. A mask cannot be out of range.

    >>> import jaxkv
    >>> layer = jaxkv.LayerConfig(num_kv_heads=2, head_dim=8)
    >>> cache = jaxkv.init(jaxkv.CacheConfig(layers=(layer,), max_seqs=2, max_seq_len=64, num_blocks=4))
    >>> jaxkv.free(jaxkv.extend(cache, [30, 30]), [0])
    Cache(2 of 4 blocks used, 30 tokens in 1 of 2 rows, 1 layer, 5.0 KiB)
    """
    check_cache(cache)
    return _free(cache, row_mask("rows", rows, cache.lengths.shape[0]))


@jit_tables
def _free(cache: Cache, rows: jax.Array) -> Cache:
    def empty(tables: BlockTables) -> BlockTables:
        mask = repeat_for_heads(rows, tables)
        if not cache.config.contiguous:
            tables = replace_entries(tables, jnp.where(mask[:, None], NULL_BLOCK, tables.tables))
        return dataclasses.replace(
            tables,
            lengths=jnp.where(mask, 0, tables.lengths),
            new=jnp.where(mask, 0, tables.new),
            failed=tables.failed & ~mask,
            wanted=jnp.where(mask, 0, tables.wanted),
            needed=jnp.where(mask, 0, tables.needed),
            skipped=None if tables.skipped is None else jnp.where(mask, 0, tables.skipped),
            evicted=None if tables.evicted is None else jnp.where(mask, 0, tables.evicted),
            thinned=None if tables.thinned is None else jnp.where(mask, 0, tables.thinned),
        )

    tables = tuple(empty(group_tables) for group_tables in cache.tables)
    return cache.replace(tables=tables, state_slots=release_slots(cache, rows))


def room_left(cache: Cache) -> jax.Array:
    """Returns `i32[S]`, the tokens that each row may still add, if there are blocks for them, before a layer would hold
    more than `max_seq_len` tokens of the row at once."""
    config, lengths = cache.config, cache.lengths
    if not config.is_endless:
        return config.max_seq_len - lengths
    room = MOST_TOKENS - lengths

    for group, tables in enumerate(cache.tables):
        if tables.evicted is None:
            held = tables.lengths - config.first_position(group, tables.lengths)
        else:
            held = group_by_row(tables.lengths, config).max(axis=0)
        room = jnp.minimum(room, config.max_seq_len - held)
    return room


def _make_room(cache: Cache, target: jax.Array) -> tuple[jax.Array, list[jax.Array], list[BlockTables]]:
    """Returns the rows that get blocks for `target` tokens, the blocks each group needs, and the new tables."""
    config = cache.config

    def end_of(group_tables: BlockTables) -> jax.Array:
        """Returns the columns that a row fills with `target` tokens."""
        held = (
            repeat_for_heads(target, group_tables)
            if group_tables.evicted is None
            else repeat_for_heads(target, group_tables) - group_tables.evicted
        )
        end = count_blocks(held, config.block_size)
        return end if group_tables.skipped is None else end - group_tables.skipped

    widened = enumerate(cache.tables)
    tables = [
        slide(group_tables, end_of(group_tables), config.group_sink_blocks[g], config.group_units[g])
        for g, group_tables in widened
    ]
    needs = [jnp.maximum(end_of(group_tables) - group_tables.end, 0) for group_tables in tables]
    of_rows = [sum_needs(n, group_tables, config) for n, group_tables in zip(needs, tables, strict=True)]
    if any(config.group_slides):  # blocks that a step may still attend to can leave too few columns
        wide = [
            end_of(group_tables) > group_tables.tables.shape[1]
            for group_tables in tables
            if group_tables.skipped is not None
        ]
        is_wide = functools.reduce(jnp.logical_or, wide)
        granted = grant_rows([jnp.where(is_wide, 0, n) for n in of_rows], tables) & ~is_wide
        of_rows = [
            n if group_tables.skipped is None else jnp.where(is_wide & (n <= group_tables.num_free), TOO_LONG, n)
            for n, group_tables in zip(of_rows, tables, strict=True)
        ]
    else:
        granted = grant_rows(of_rows, tables)
    rooms = [
        take_blocks(group_tables, jnp.where(repeat_for_heads(granted, group_tables), n, 0))
        for group_tables, n in zip(tables, needs, strict=True)
    ]
    return granted, of_rows, rooms


def mark_failed(tables: BlockTables, refused: jax.Array, wanted: jax.Array, needed: Any) -> BlockTables:
    """Marks rows whose request was refused, with the length (-1: invalid) and blocks (per shard if sharded) that they
    asked for."""
    needed = repeat_for_shards(needed, tables) if jnp.ndim(needed) == 2 else needed
    refused, wanted, needed = (repeat_for_heads(x, tables) for x in (refused, wanted, needed))
    return dataclasses.replace(
        tables,
        failed=tables.failed | refused,
        wanted=jnp.where(refused, wanted, tables.wanted),
        needed=jnp.where(refused, needed, tables.needed),
    )


def release_windows(cache: Cache) -> Cache:
    """Ends the step: frees the blocks that no row's next token attends to, in layers with a window or chunks."""
    config = cache.config

    def leave(group: int, tables: BlockTables) -> BlockTables:
        if config.group_visible_tokens[group] is not None:
            first, sink_blocks = config.first_retained_block(group, tables.lengths), config.group_sink_blocks[group]
            tables = free_leading_blocks(tables, columns_of(first, tables.skipped, sink_blocks), sink_blocks)
        return dataclasses.replace(tables, new=jnp.zeros_like(tables.new))  # their context may be gone

    return cache.replace(tables=tuple(leave(group, tables) for group, tables in enumerate(cache.tables)))
