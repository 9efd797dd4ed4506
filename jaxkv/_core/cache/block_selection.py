"""Elementwise bounds on the keys of each block, to skip blocks that cannot matter to a query."""

import functools
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp

from jaxkv._core.cache.cache import Cache, check_cache
from jaxkv._core.cache.key_bounds import read_bounds
from jaxkv._core.config.validation import integer, show
from jaxkv._core.state.columns import blocks_of, columns_of
from jaxkv._core.state.sharding import POOL, WHOLE, head_spec, run_on_shards
from jaxkv._core.state.state import NULL_BLOCK, BlockTables


@functools.partial(jax.export.register_namedtuple_serialization, serialized_name="jaxkv.BlockBounds")
class BlockBounds(NamedTuple):
    """Key bounds of every block in the table of every row, `f32[S, M, K, D]`; 0 without tokens. From `block_bounds`.

    >>> import jaxkv
    >>> sizes = dict(num_layers=1, num_kv_heads=2, head_dim=8, max_seqs=2, max_seq_len=64)
    >>> cache = jaxkv.init(jaxkv.CacheConfig.uniform(**sizes, num_blocks=4))
    >>> jaxkv.block_bounds(cache, layer=0).low.shape
    (2, 4, 2, 8)
    """

    low: jax.Array
    high: jax.Array


def block_bounds(
    cache: Cache, *, layer: int, bounds: BlockBounds | None = None, last: int | None = None
) -> BlockBounds:
    """Computes the elementwise least and largest keys of each block of each row and head. Pure and jittable.

    A layer made with `LayerConfig(bounds=True)` stores them beside its blocks: they are only looked up. After
    `truncate` and `keep`, the bounds of a row's last block may be too wide until it is written again; they always
    contain the keys held. Any other layer reads all keys; with the previous `bounds`, a decode step reads only the
    blocks that it wrote, the last ones of each row.

    Args:
      layer: its keys are read as attention sees them, quantized ones too.
      bounds: those of the same rows before this step. After any other change of a row (`free`, `truncate`, `fork`,
        `swap_in`), compute all of them again.
      last: with `bounds`, the number of last blocks of each row to read: `-(-T // block_size) + 1` for T new tokens;
        default: all. The others are copied from `bounds`. Where a window slides all of its blocks are read.

    Returns:
      `BlockBounds`, `f32[S, M, K, D]` each, over the tokens that rows hold, and 0 for blocks without any. M is
      the number of blocks of the longest row, or of as many as a window holds, from the first one held on. A NaN among
      the keys shows in the bounds.

    Raises:
      ValueError: bounds of another cache or layer, or `last` without them; a layer that evicts by heads, since each
        head has its own blocks. IndexError: no such layer.

    From Quest (Tang et al. 2024), which `jaxkv.scores.quest` is named after.

    >>> import jax.numpy as jnp, jaxkv
    >>> layer = jaxkv.LayerConfig(num_kv_heads=1, head_dim=2)
    >>> cache = jaxkv.init(jaxkv.CacheConfig(layers=(layer,), max_seqs=1, max_seq_len=4, num_blocks=2, block_size=2))
    >>> k = jnp.array([[3., -1.], [1., 5.], [7., 7.]]).reshape(1, 1, 3, 1, 2)
    >>> bounds = jaxkv.block_bounds(jaxkv.append(cache, k, k, [3]), layer=0)
    >>> bounds.low[0, :, 0].tolist(), bounds.high[0, :, 0].tolist()
    ([[1.0, -1.0], [7.0, 7.0]], [[3.0, 5.0], [7.0, 7.0]])
    """
    tables, size = find_tables(cache, layer), cache.config.block_size
    rows, width = cache.config.max_seqs, blocks_of_bounds(cache, layer)
    if bounds is None and last is not None:
        raise ValueError("last= says which blocks of the given bounds= are out of date: give those, too, or neither.")
    if bounds is not None:
        check_bounds(cache, layer, bounds)
        if tables.skipped is not None:  # the blocks that they are of may have moved up
            bounds = last = None
    count = width if last is None else min(integer("last", last, least=1), width)
    column = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (rows, width))
    if count < width:
        end = -(-tables.lengths // size)
        column = jnp.maximum(end[:, None] - count, 0) + jnp.arange(count, dtype=jnp.int32)[None]
    row = jnp.arange(rows, dtype=jnp.int32)[:, None]
    block = number_blocks(cache, layer, column)
    position = block[:, :, None] * size + jnp.arange(size, dtype=jnp.int32)[None, None]
    with jax.named_scope("block_bounds"):
        pool = cache.layer(layer).pool
        if bounds is None and pool.bounds is not None:
            entries = take_entries(cache, layer, block)
            is_used = (entries != 0) & (block * size < tables.lengths[:, None])
            found = cache.layer(layer)
            blocks = entries if found.place is None else entries + found.place * (tables.num_blocks + 1)
            arguments = (pool, blocks, is_used)
            both = run_on_shards(pool, read_bounds, arguments, (POOL, WHOLE, WHOLE), head_spec(3))
            return BlockBounds(both[:, :, 0], both[:, :, 1])
        keys = cache.read(layer, row[:, :, None], position)[0].astype(jnp.float32)
        stored, _ = cache.slots(row[:, :, None], position, layer=layer)
        is_held = (stored != 0)[..., None, None]
        low, high = (
            jnp.where(is_held.any(axis=2), reduce(jnp.where(is_held, keys, other), axis=2), jnp.float32(0))
            for reduce, other in ((jnp.min, jnp.float32(jnp.inf)), (jnp.max, jnp.float32(-jnp.inf)))
        )
        if bounds is None:
            return BlockBounds(low, high)
        return BlockBounds(*(_put(old, row, column, new) for old, new in zip(bounds, (low, high), strict=True)))


def find_tables(cache: Any, layer: int) -> BlockTables:
    """Returns the tables of a layer whose blocks hold all heads. Raises ValueError for any other."""
    check_cache(cache)
    if cache.config.group_evicts[cache.config.group(layer)] == "head":
        raise ValueError(
            f'In layer {layer}, with evict="head", each head has blocks of its own, and none can be chosen for all: '
            'make the layer with evict="layer", or without.'
        )
    if (ratio := cache.config.layer_config(layer).compress_ratio) is not None:
        raise ValueError(
            f"Layer {layer} stores entries of {ratio} tokens, and its blocks cannot be chosen by tokens: choose "
            "entries by jaxkv.scores.indexer."
        )
    return cache.layer(layer).tables


def blocks_of_bounds(cache: Cache, layer: int) -> int:
    """Returns the number of blocks of each row with bounds: those of the longest row, or of a window."""
    group, config = cache.config.group(layer), cache.config
    width = config.table_widths[group]
    return min(width, config.max_blocks_per_seq) if config.group_slides[group] else width


def number_blocks(cache: Cache, layer: int, column: jax.Array) -> jax.Array:
    """Returns the logical blocks `i32[S, n]` that have bounds in columns `i32[S, n]`."""
    tables, config = cache.layer(layer).tables, cache.config
    if tables.skipped is None:
        return column
    end = -(-tables.lengths // config.block_size)
    first = jnp.maximum(tables.skipped, end - blocks_of_bounds(cache, layer))  # the last ones have bounds in any case
    return blocks_of(column, first[:, None], config.group_sink_blocks[config.group(layer)])


def take_entries(cache: Cache, layer: int, block: jax.Array) -> jax.Array:
    """Returns the entries of a layer's table for logical blocks `i32[S, n]`; the null block for those that left it."""
    tables, sink_blocks = cache.layer(layer).tables, cache.config.group_sink_blocks[cache.config.group(layer)]
    column = columns_of(block, None if tables.skipped is None else tables.skipped[:, None], sink_blocks)
    width = tables.tables.shape[1]
    entries = jnp.take_along_axis(tables.tables, jnp.clip(column, 0, width - 1), axis=1)
    return jnp.where((column >= 0) & (column < width), entries, NULL_BLOCK)


def check_bounds(cache: Cache, layer: int, bounds: Any) -> None:
    """Raises ValueError unless these can be a layer's bounds."""
    found = cache.config.layer_config(layer)
    expected = (cache.config.max_seqs, blocks_of_bounds(cache, layer), found.num_kv_heads, found.head_dim)
    shapes = [getattr(x, "shape", None) for x in bounds] if isinstance(bounds, tuple) else show(bounds)
    if shapes != [expected] * 2:
        raise ValueError(f"bounds must be what block_bounds gave for this layer, two {expected}, not {shapes}.")


def _put(old: Any, row: jax.Array, column: jax.Array, new: jax.Array) -> jax.Array:
    return jnp.asarray(old, jnp.float32).at[row, column].set(new, mode="drop", unique_indices=True)
