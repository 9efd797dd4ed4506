"""Questions to a cache on the host: did a row fail, is the state sound, what is in use. They read the device back."""

from typing import Any

import jax
import numpy as np

from jaxkv._errors import CacheError, OutOfBlocks, SequenceTooLong
from jaxkv._state import NULL_BLOCK, BlockTables, Cache


def check(cache: Cache) -> None:
    """Raise if a request of any row could not be met, in one sentence that names rows, needs and what is free.

    Raises:
      SequenceTooLong: a row was to hold more than `max_seq_len` tokens.
      OutOfBlocks: there were too few free blocks.
      CacheError: a request made no sense: a negative number of tokens, more than were given, or a row out of range.

    >>> import jaxkv
    >>> layer = jaxkv.LayerConfig(num_kv_heads=2, head_dim=8)
    >>> cache = jaxkv.init(jaxkv.CacheConfig(layers=(layer,), max_seqs=2, max_seq_len=64, num_blocks=2))
    >>> jaxkv.check(jaxkv.extend(cache, [10, 40]))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    jaxkv.OutOfBlocks: Row 1 (0 tokens, 0 blocks) needs 3 more blocks for 40 tokens, but 1 of 2 blocks is free. ...
    """
    tables = jax.device_get(cache.tables)
    for t in tables:
        rows = np.flatnonzero(t.failed)
        if not rows.size:
            continue
        limit = cache.config.max_seq_len
        too_long = [r for r in rows if t.wanted[r] > limit]
        senseless = [r for r in rows if t.wanted[r] < 0]
        if too_long:
            holders = _list(f"row {r} (it holds {t.lengths[r]})" for r in too_long)
            raise SequenceTooLong(
                f"More than max_seq_len = {limit} tokens were asked for in {holders}. The row is as it was before; "
                "truncate or "
                "free it, or give the cache a larger max_seq_len."
            )
        if senseless:
            raise CacheError(
                f"A request that makes no sense was made for {_list(f'row {r}' for r in senseless)}: a negative "
                "number of tokens, more "
                "tokens than the step's arrays have places for, or a row out of range. The row is as it was before; "
                "free clears it."
            )
        held = np.sum(t.tables != NULL_BLOCK, axis=1)
        needs = _list(
            f"row {r} ({t.lengths[r]} tokens, {held[r]} blocks) needs {_more(t.needed[r])} for {t.wanted[r]} tokens"
            for r in rows
        )
        free = f"{t.num_free} of {cache.num_blocks} blocks {'is' if t.num_free == 1 else 'are'} free"
        raise OutOfBlocks(
            f"{needs[0].upper()}{needs[1:]}, but {free}. The row is as it was before; free or truncate rows, or give "
            "the cache more num_blocks."
        )


def check_invariants(cache: Cache) -> None:
    """Raise AssertionError unless the whole state is consistent. For tests and debugging; it reads everything back."""
    block_size, config = cache.config.block_size, cache.config
    assert len(cache.tables) == len(config.groups), "one BlockTables for each group"
    assert len(cache.pools) == config.num_layers, "one pool for each layer"
    for layer, pool in enumerate(cache.pools):
        assert pool.kv.shape[3] == block_size, f"layer {layer}: the pool's block_size"
        assert not np.asarray(pool.kv[NULL_BLOCK]).any(), f"layer {layer}: the null block was written"
    for t in jax.device_get(cache.tables):
        _check_tables(t, block_size, config.max_seq_len, config.contiguous)


def _check_tables(t: BlockTables, block_size: int, max_seq_len: int, contiguous: bool) -> None:
    num_blocks = t.free_list.shape[0]
    assert ((t.lengths >= 0) & (t.lengths <= max_seq_len)).all(), f"lengths within [0, {max_seq_len}]: {t.lengths}"
    assert ((t.new >= 0) & (t.new <= t.lengths)).all(), f"new within [0, lengths]: {t.new} of {t.lengths}"
    assert 0 <= t.num_free <= num_blocks, f"num_free within [0, {num_blocks}]: {t.num_free}"
    assert ((t.tables >= 0) & (t.tables <= num_blocks)).all(), "table entries name blocks"
    held = np.sum(t.tables != NULL_BLOCK, axis=1)
    used = np.arange(t.tables.shape[1]) < held[:, None]
    assert (used == (t.tables != NULL_BLOCK)).all(), "a row's entries come first, then null blocks"
    assert (held >= -(-t.lengths // block_size)).all(), f"every row has the blocks for its tokens: {held}, {t.lengths}"
    counts = np.bincount(t.tables.ravel(), minlength=num_blocks + 1)
    counts[NULL_BLOCK] = 0
    free = np.asarray(t.free_list)[num_blocks - t.num_free :]
    assert len(set(free.tolist())) == len(free) and NULL_BLOCK not in free.tolist(), "a block is free at most once"
    assert (counts[free] == 0).all(), "a free block is in no table"
    assert len(free) + np.count_nonzero(counts) == num_blocks, "every block is free or in a table"
    expected = np.maximum(counts, 1)
    expected[NULL_BLOCK] = 0
    assert (t.refcounts == expected).all(), f"refcounts {t.refcounts}, but the tables say {expected}"
    full = np.arange(t.tables.shape[1]) < (t.lengths // block_size)[:, None]
    assert contiguous or (counts[t.tables[used & ~full]] == 1).all(), "a block that can still be written has one owner"
    assert num_blocks - t.num_free <= t.peak <= num_blocks, "peak is the most ever in use"
    assert (t.failed | (t.wanted == 0)).all(), "wanted only where failed"


def stats(cache: Cache) -> dict[str, Any]:
    """What is in use, as plain numbers.

    Returns:
      A dict: blocks (in all, used, free, peak, shared by several rows), tokens, bytes, rows in use, failed rows, and
      waste: token places in held blocks that hold no token, in all and per row. Shared blocks are full.

    >>> import jaxkv
    >>> layer = jaxkv.LayerConfig(num_kv_heads=2, head_dim=8)
    >>> cache = jaxkv.init(jaxkv.CacheConfig(layers=(layer,), max_seqs=2, max_seq_len=64, num_blocks=8))
    >>> jaxkv.stats(jaxkv.extend(cache, [20, 0]))["waste"]
    12
    """
    block_size = cache.config.block_size
    t = jax.device_get(cache.tables[0])
    held = np.sum(t.tables != NULL_BLOCK, axis=1)
    waste_per_row = held * block_size - t.lengths
    used = cache.num_blocks - int(t.num_free)
    counts = np.bincount(t.tables.ravel(), minlength=cache.num_blocks + 1)[1:]
    return {
        "num_blocks": cache.num_blocks,
        "blocks_used": used,
        "blocks_free": int(t.num_free),
        "blocks_shared": int((counts > 1).sum()),
        "blocks_peak": int(t.peak),
        "block_size": block_size,
        "rows": t.lengths.shape[0],
        "rows_used": int((t.lengths > 0).sum()),
        "rows_failed": int(t.failed.sum()),
        "tokens": int(t.lengths.sum()),
        "tokens_per_row": t.lengths.tolist(),
        "waste": int(waste_per_row.sum()),
        "waste_per_row": waste_per_row.tolist(),
        "bytes": cache.bytes,
        "bytes_used": used * cache.config.bytes_per_block,
        "dense_bytes": cache.config.dense_bytes,
    }


def _list(parts: Any) -> str:
    parts = list(parts)
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _more(blocks: int) -> str:
    return f"{blocks} more block{'' if blocks == 1 else 's'}"
