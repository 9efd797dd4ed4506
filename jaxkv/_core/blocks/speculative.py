"""Keeps some of a step's tokens: the accepted path of a tree, or a prefix."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._core.blocks.allocator import count_blocks, replace_entries
from jaxkv._core.blocks.block_copy import stack_blocks
from jaxkv._core.blocks.slot_allocator import has_snapshot, roll_slots_back
from jaxkv._core.blocks.state_replay import take_in
from jaxkv._core.blocks.tables import mark_failed
from jaxkv._core.cache.cache import Cache, check_cache
from jaxkv._core.cache.key_bounds import find_touched_blocks, renew_bounds
from jaxkv._core.config.validation import show
from jaxkv._core.state.arguments import cast_int32, is_known, read_numbers
from jaxkv._core.state.columns import relative
from jaxkv._core.state.head_rows import any_head, repeat_for_heads
from jaxkv._core.state.shard_local import localize_slots, read_slots
from jaxkv._core.state.sharding import POOL, WHOLE, run_on_shards
from jaxkv._core.state.state import GONE, NULL_BLOCK, SENSELESS, BlockTables, Pool


def keep(cache: Cache, path: Any) -> Cache:
    """Keeps some tokens of each row's last step, compacts them, and rolls the others back.

    Speculative decoding proposes a tree of tokens and accepts a path through the tree. The path's tokens move up right
    after the context, and blocks no longer needed are freed. Only the keys and values of kept tokens move. Call this
    before the next `extend`.

    Recurrent layers take one token after another, so with such layers the path is a chain, 0, 1, 2, ...: their states
    are those after its last token if the row was among the `guesses` of `extend`, or has a snapshot there.

    Args:
      path: `i32[S, n]`, the kept tokens of each row, counted from its first new one, in increasing order, padded with
        -1. A row that was not in the step has -1 only, and stays as it is.

    Raises:
      ValueError: a path known on the host does not increase, or goes beyond the row's new tokens. On the device such a
        row stays as it was and is marked in `cache.failed`, as is a row whose new blocks were shared since the step,
        or one with states of recurrent layers that have taken in the tokens to be dropped: it was not among the
        guesses of `extend`, and has no snapshot there.

    Token trees follow SpecInfer (https://arxiv.org/abs/2305.09781).

    >>> import jaxkv
    >>> layer = jaxkv.LayerConfig(num_kv_heads=2, head_dim=8)
    >>> cache = jaxkv.init(jaxkv.CacheConfig(layers=(layer,), max_seqs=2, max_seq_len=64, num_blocks=4))
    >>> cache = jaxkv.extend(jaxkv.extend(cache, [7, 3]), [5, 0])  # a tree of five tokens behind row 0's context
    >>> jaxkv.keep(cache, [[0, 2, -1], [-1, -1, -1]]).lengths.tolist()
    [9, 3]
    """
    check_cache(cache)
    return _keep(cache, _read_path(cache, path))


@jax.jit
def _keep(cache: Cache, path: jax.Array) -> Cache:
    number, is_kept = jnp.arange(path.shape[1], dtype=jnp.int32)[None], path >= 0
    count = jnp.sum(is_kept, axis=1, dtype=jnp.int32)
    increases = path > jnp.pad(path, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    is_right = jnp.where(number < count[:, None], increases & (path < cache.new[:, None]), path == -1)
    moved = is_kept & (path != number)
    slots, before = cache.state_slots, cache.lengths - cache.new
    if slots is not None:
        is_right &= ~moved  # a tree
    changes = moved.any(axis=1) | (count < cache.new)
    shared = jnp.stack([any_head(_shares_new_tokens(cache, tables), cache.config) for tables in cache.tables]).any(
        axis=0
    )
    refused = (~is_right.all(axis=1) | (changes & shared)) & ~cache.failed
    kept = cache.lengths - cache.new + count
    guessed = jnp.zeros_like(refused) if slots is None or slots.guesses is None else slots.guesses.rows
    gone = changes & ~refused & ~cache.failed & ~guessed & ~has_snapshot(cache, kept)
    refused |= gone
    changes &= ~refused & ~cache.failed
    cache = _move(cache, path, number, moved & changes[:, None])
    slots = roll_slots_back(cache, kept, changes & ~guessed)
    cache = _shorten(cache, cache.new - count, changes).replace(state_slots=slots)
    if slots is not None and slots.guesses is not None:
        cache = take_in(cache, before, jnp.where(cache.failed | refused, 0, count), path.shape[1])
    return cache.replace(
        tables=tuple(
            mark_failed(
                tables,
                refused,
                jnp.where(gone, kept, SENSELESS),
                jnp.where(gone, GONE, 0),
            )
            for tables in cache.tables
        )
    )


def revert_tokens(cache: Cache, count: jax.Array) -> Cache:
    """Drops the last `count[s]` tokens of each row's last step. Their blocks must not be shared."""
    return _shorten(cache, jnp.clip(count, 0, cache.new), count > 0)


def revert_guesses(cache: Cache, count: jax.Array, longest: int) -> Cache:
    """Does `revert_tokens` at the end of a step of guesses, whose rows then take in what they keep of their tokens, at
    most `longest` of each."""
    before, kept = cache.lengths - cache.new, cache.new - jnp.clip(count, 0, cache.new)
    return take_in(revert_tokens(cache, count), before, kept, longest)


def keep_guesses(cache: Cache, path: jax.Array, guessed: jax.Array) -> Cache:
    """Keeps those of the last `guessed[s]` tokens of each row's last step that are in `path` i32[S, n]. The path counts
    from the first guessed token, increases and is padded with -1. The tokens' blocks must not be shared."""
    guessed = jnp.clip(guessed, 0, cache.new)
    number, is_kept = jnp.arange(path.shape[1], dtype=jnp.int32)[None], path >= 0
    given = (cache.new - guessed)[:, None]
    moved = is_kept & (path != number) & (path < guessed[:, None])
    count = jnp.sum(is_kept, axis=1, dtype=jnp.int32)
    return revert_tokens(_move(cache, given + path, given + number, moved), guessed - count)


def _read_path(cache: Cache, path: Any) -> jax.Array:
    rows, path = cache.lengths.shape[0], read_numbers("path", path)
    if path.ndim != 2 or path.shape[0] != rows or not jnp.issubdtype(path.dtype, jnp.integer):
        raise ValueError(
            f"path must be i32[{rows}, n], the kept tokens of each row with -1 behind them, not "
            f"{path.dtype}{list(path.shape)}."
        )
    if is_known(path):
        known = not isinstance(cache.new, jax.core.Tracer)
        compressed = any(layer.compress_ratio is not None for layer in cache.config.layers)
        new = np.asarray(cache.new) if known else np.full(rows, np.iinfo(np.int32).max)
        for row, (entries, most) in enumerate(zip(path.tolist(), new.tolist(), strict=True)):
            kept = entries[: sum(entry >= 0 for entry in entries)]
            if any(entry != -1 for entry in entries[len(kept) :]) or any(entry < 0 for entry in kept):
                raise ValueError(f"path must have -1 only behind the kept tokens, but row {row} has {show(entries)}.")
            if any(b <= a for a, b in itertools.pairwise(kept)):
                raise ValueError(f"path must increase, but row {row} has {show(kept)}.")
            if cache.state_slots is not None and kept != list(range(len(kept))):
                raise ValueError(
                    f"path must be a chain, 0, 1, 2, ..., in a cache with recurrent layers, which take one token after "
                    f"another and no tree, but row {row} has {show(kept)}."
                )
            if compressed and kept != list(range(len(kept))):
                raise ValueError(
                    f"path must be a chain, 0, 1, 2, ..., in a cache with layers of compress_ratio, whose entries are "
                    f"made of tokens that stand together, but row {row} has {show(kept)}."
                )
            if kept and kept[-1] >= most:
                raise ValueError(f"path goes to token {kept[-1]} of row {row}, which has {most} new tokens.")
    return cast_int32(path)


def _shares_new_tokens(cache: Cache, tables: BlockTables) -> jax.Array:
    """Returns `bool[S]`, the rows whose last step has tokens in a block that was shared since."""
    size, column = cache.config.block_size, jnp.arange(tables.tables.shape[1], dtype=jnp.int32)[None]
    tables = relative(tables, size)
    first, end = (tables.lengths - tables.new) // size, count_blocks(tables.lengths, size)
    touched = (column >= first[:, None]) & (column < end[:, None]) & (tables.tables != NULL_BLOCK)
    return (touched & (tables.refcounts[tables.tables] > 1)).any(axis=1)


def _move(cache: Cache, source: jax.Array, target: jax.Array, moved: jax.Array) -> Cache:
    """Moves the step's tokens `source` i32[S, n] to the slots of `target` in all layers. All are read before any is
    written."""
    if not source.shape[1]:
        return cache
    pools, size = list(cache.pools), cache.config.block_size
    for group, tables in enumerate(relative(group_tables, size) for group_tables in cache.tables):
        width, before = tables.tables.shape[1], (tables.lengths - tables.new)[:, None]
        places = [before + repeat_for_heads(x, tables) for x in (source, target)]

        def blocks_of(position: jax.Array, tables: BlockTables = tables, width: int = width) -> jax.Array:
            block = jnp.take_along_axis(tables.tables, jnp.clip(position // size, 0, width - 1), axis=1)
            return jnp.where(repeat_for_heads(moved, tables), block, NULL_BLOCK).reshape(-1)

        blocks = [blocks_of(place) for place in places]
        for stack in cache.config.group_stacks(group):
            if cache.config.layers[stack[0]].compress_ratio is not None:
                continue  # there no token moves: paths are chains
            count = len(stack)
            stacked = (stack_blocks(x, count, tables.num_blocks + 1) for x in blocks)
            offsets = (jnp.tile(x.reshape(-1) % size, count) for x in places)
            pool, arrays = cache.layer(stack[0]).pool, (*stacked, *offsets)
            pool = run_on_shards(pool, _move_tokens, (pool, *arrays), (POOL, *[WHOLE] * 4), POOL)
            if pool.bounds is not None:  # from the tokens held before rows are shortened: no bound gets too narrow
                begin, end = places[1].min(axis=1), jnp.minimum(places[1].max(axis=1) + 1, tables.lengths)
                end = jnp.where(moved.any(axis=1), end, begin)
                block, filled = find_touched_blocks(tables.tables, tables.lengths, begin, end, size, places[1].size)
                block, filled = stack_blocks(block, count, tables.num_blocks + 1), jnp.tile(filled, count)
                pool = renew_bounds(pool, block, filled, config=cache.config, layer=stack[0])
            pools[stack[0]] = pool
    return cache.replace(pools=tuple(pools))


def _move_tokens(pool: Pool, old: jax.Array, new: jax.Array, old_offset: jax.Array, new_offset: jax.Array) -> Pool:
    tokens = read_slots(pool, old, old_offset)
    new, new_offset = localize_slots(pool, new, new_offset)
    place = jnp.where(new == NULL_BLOCK, pool.kv.shape[0] + jnp.arange(new.shape[0], dtype=jnp.int32), new)

    def move(x: jax.Array, tokens: jax.Array) -> jax.Array:
        return jnp.asarray(x).at[place, :, :, new_offset].set(tokens, mode="drop", unique_indices=True)

    return dataclasses.replace(jax.tree.map(move, pool.tokens, tokens), bounds=pool.bounds)


def _shorten(cache: Cache, dropped: jax.Array, rows: jax.Array) -> Cache:
    """Drops the last `dropped[s]` tokens of the rows' last step, and frees the blocks after the rest."""

    def shorten(tables: BlockTables) -> BlockTables:
        changed = repeat_for_heads(rows, tables)
        lengths = tables.lengths - jnp.where(changed, repeat_for_heads(dropped, tables), 0)
        if not cache.config.contiguous:
            column = jnp.arange(tables.tables.shape[1], dtype=jnp.int32)[None]
            end = count_blocks(lengths, cache.config.block_size)
            end = end if tables.skipped is None else end - tables.skipped
            behind = changed[:, None] & (column >= end[:, None])
            tables = replace_entries(tables, jnp.where(behind, NULL_BLOCK, tables.tables))
        return dataclasses.replace(tables, lengths=lengths, new=jnp.where(changed, 0, tables.new))

    return cache.replace(tables=tuple(map(shorten, cache.tables)))
