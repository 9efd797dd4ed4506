"""Makes a cache from existing keys, values and block tables, of another system or a file."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxkv._core.blocks.block_copy import put_blocks
from jaxkv._core.cache.cache import Cache
from jaxkv._core.cache.init import init
from jaxkv._core.cache.key_bounds import add_bounds
from jaxkv._core.config.cache_config import CacheConfig
from jaxkv._core.config.kv_packing import stack_kv
from jaxkv._core.config.layer_config import LayerConfig
from jaxkv._core.config.validation import integer, read_list, show
from jaxkv._core.state.arguments import require_host
from jaxkv._core.state.columns import columns_for
from jaxkv._core.state.head_rows import refuse_gaps, refuse_index
from jaxkv._core.state.state import NULL_BLOCK, BlockTables, Pool
from jaxkv.convert.dense import check_latent, check_widths, infer_layer, read_layers


def from_blocks(
    *,
    k: Sequence[Any],
    v: Sequence[Any],
    tables: Any,
    lengths: Any,
    layout: str = "head_major",
    max_seq_len: int | None = None,
    layers: Sequence[LayerConfig] | None = None,
    **fields: Any,
) -> Cache:
    """Makes a cache from existing blocks. The blocks are copied, and everything is validated.

    Args:
      k, v: one array per layer, `[n, K, block_size, D]`, or `[n, block_size, K, D]` with `layout="token_major"`.
        Blocks are numbered from 0, without a null block. For a latent layer v has None.
      tables: `i32[S, M]`, the physical block of each logical block. Entries past a row's length are ignored.
      lengths: `i32[S]`, number of tokens of each row.
      max_seq_len: default `M * block_size`.
      layers: the layers' configs, if they have windows or are latent; by default inferred from the shapes.
      **fields: other fields of `CacheConfig`.

    Raises:
      ValueError: shapes that disagree, a length beyond the table, a block id out of range, or a block that one row can
        still write into and another row shares.

    >>> import numpy as np, jaxkv
    >>> blocks = np.ones((3, 2, 4, 8), np.float32)
    >>> cache = jaxkv.convert.from_blocks(k=[blocks], v=[blocks], tables=[[2, 0], [1, 0]], lengths=[6, 3])
    >>> cache.blocks_in_use
    3
    """
    order = {"head_major": (0, 1, 2, 3), "token_major": (0, 2, 1, 3)}.get(layout if isinstance(layout, str) else "")
    if order is None:
        raise ValueError(f"layout must be 'head_major' or 'token_major', not {show(layout)}.")
    k, v = read_layers(k, v)
    for layer, (one_k, one_v) in enumerate(zip(k, v, strict=True)):
        if np.ndim(one_k) != 4 or (one_v is not None and np.shape(one_k)[:-1] != np.shape(one_v)[:-1]):
            raise ValueError(
                f"k and v of layer {layer} must be alike and have four axes, but are {np.shape(one_k)} and "
                f"{np.shape(one_v)}."
            )
    k = [jnp.transpose(jnp.asarray(x), order) for x in k]
    v = [None if x is None else jnp.transpose(jnp.asarray(x), order) for x in v]
    num_blocks, _, block_size, _ = k[0].shape
    for layer, x in enumerate(k):
        if (x.shape[0], x.shape[2]) != (num_blocks, block_size):
            raise ValueError(
                f"Layer {layer} has {x.shape[0]} blocks of {x.shape[2]} tokens, but layer 0 has {num_blocks} of "
                f"{block_size}."
            )
    entries, lengths, max_seq_len = _check_tables(tables, lengths, num_blocks, block_size, max_seq_len)

    if layers is None:
        layers = tuple(infer_layer(x, y, heads=x.shape[1], dtype=x.dtype) for x, y in zip(k, v, strict=True))
    layers = read_list("layers", layers)
    for i, layer in enumerate(layers):
        if not isinstance(layer, LayerConfig):
            raise ValueError(f"layers[{i}] must be a LayerConfig, not {show(layer)}.")
    named = [(layer.num_kv_heads, layer.head_dim) for layer in layers]
    given = [(x.shape[1], x.shape[3]) for x in k]
    if any(layer.shares_with is not None for layer in layers):
        raise ValueError("from_blocks takes layers that store keys and values of their own, so none with shares_with.")
    if named != given:
        raise ValueError(f"layers say (num_kv_heads, head_dim) {named}, but the arrays have {given}.")
    check_latent(layers, v)
    check_widths(layers, v)
    fields = {"dtype": k[0].dtype} | fields
    config = CacheConfig(
        layers=layers,
        max_seqs=len(lengths),
        max_seq_len=max_seq_len,
        num_blocks=num_blocks,
        block_size=block_size,
        **fields,
    )
    refuse_gaps(config, "from_blocks takes", ("head",))
    refuse_index(config, "from_blocks takes")
    cache = init(config)
    for i, (one_k, one_v) in enumerate(zip(k, v, strict=True)):
        blocks = Pool(*config.blocks_of(i, stack_kv(one_k, one_v, axis=1)))
        blocks = add_bounds(blocks, entries, lengths, config, i)
        cache = cache.replace_pool(i, put_blocks(cache.pool(i), blocks, jnp.arange(1, num_blocks + 1, dtype=jnp.int32)))
    counts = np.bincount(entries.ravel(), minlength=num_blocks + 1)
    free = 1 + np.flatnonzero(counts[1:] == 0)
    free_list = np.concatenate([np.zeros(num_blocks - len(free)), free])
    refcounts = np.maximum(counts, 1)
    refcounts[NULL_BLOCK] = 0
    columns = -(-config.max_seq_len // block_size)

    def i32(x: Any) -> Any:
        return jnp.array(x, jnp.int32)  # a copy: asarray may share the caller's memory, which is not immutable

    def fill(empty: BlockTables, group: int) -> BlockTables:
        placed, _ = columns_for(entries[:, :columns], config, group)
        return dataclasses.replace(
            empty,
            tables=i32(placed),
            lengths=i32(lengths),
            refcounts=i32(refcounts),
            free_list=i32(free_list),
            num_free=i32(len(free)),
            peak=i32(num_blocks - len(free)),
        )

    return cache.replace(tables=tuple(fill(t, group) for group, t in enumerate(cache.tables)))


def _check_tables(
    tables: Any, lengths: Any, num_blocks: int, block_size: int, max_seq_len: int | None
) -> tuple[np.ndarray, np.ndarray, int]:
    """Returns the block table in jaxkv's numbering (blocks from 1, unused entries 0), the lengths, and max_seq_len."""
    tables, lengths = require_host("tables", tables), require_host("lengths", lengths)
    if tables.ndim != 2 or lengths.shape != tables.shape[:1]:
        raise ValueError(
            f"tables must be [S, M] and lengths [S], but their shapes are {tables.shape} and {lengths.shape}."
        )
    if not (np.issubdtype(tables.dtype, np.integer) and np.issubdtype(lengths.dtype, np.integer)):
        raise ValueError(f"tables and lengths must be integers, not {tables.dtype} and {lengths.dtype}.")
    places = tables.shape[1] * block_size
    max_seq_len = places if max_seq_len is None else integer("max_seq_len", max_seq_len, least=1)
    if max_seq_len > places:
        raise ValueError(
            f"max_seq_len={max_seq_len} is beyond the table: {tables.shape[1]} blocks of {block_size} hold {places} "
            "tokens."
        )
    for row, length in enumerate(lengths):
        if not 0 <= length <= max_seq_len:
            raise ValueError(f"lengths must be from 0 to max_seq_len = {max_seq_len}, but row {row} has {length}.")
    used = np.arange(tables.shape[1]) < -(-lengths // block_size)[:, None]
    bad = np.argwhere(used & ((tables < 0) | (tables >= num_blocks)))
    if len(bad):
        row, column = bad[0]
        raise ValueError(f"tables[{row}, {column}] is {tables[row, column]}, but the blocks are 0 to {num_blocks - 1}.")
    entries = np.where(used, tables + 1, NULL_BLOCK)
    counts = np.bincount(entries.ravel(), minlength=num_blocks + 1)
    partial = used & (np.arange(tables.shape[1]) >= (lengths // block_size)[:, None])
    for row, column in np.argwhere(partial):
        if counts[entries[row, column]] > 1:
            raise ValueError(
                f"Block {tables[row, column]} is the partial last block of row {row}, and stands in the tables once "
                "more: only full blocks can be shared. Give each row a copy of its own."
            )
    return entries, lengths, max_seq_len
