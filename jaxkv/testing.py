"""Helpers to test code built on jaxkv. Import it by name: `import jaxkv.testing`.

- `assert_no_copy(jitted, *args)`: fails if XLA copies a pool in your step instead of updating it in place.
- `poison(cache)`: sets every slot without a token to NaN. Your step's results must stay the same, bit by bit.
- `permute_blocks(cache)`: moves the rows to other blocks. Again, no result may change.
- `check_model(model)`: runs a model of yours packed, padded, in chunks and beside other rows: all must agree.
- `record(engine)`: records a `Trace` of the contents of the cache's blocks, step by step, with a player.

    step = jax.jit(step, donate_argnames="cache")
    jaxkv.testing.assert_no_copy(step, model, tokens, num_tokens, cache)
    out, _ = step(model, tokens, num_tokens, jaxkv.testing.poison(cache))
    assert not jax.numpy.isnan(out).any()
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._copies import assert_no_copy as assert_no_copy
from jaxkv._core.cache.cache import Cache, check_cache
from jaxkv._core.config.validation import integer
from jaxkv._core.state.columns import blocks_of
from jaxkv._core.state.head_rows import list_blocks
from jaxkv._core.state.state_slots import NULL_SLOT
from jaxkv._engine.frontend.trace import Trace as Trace, record as record
from jaxkv._engine.programs.model_check import check_model as check_model

__all__ = ["Trace", "assert_no_copy", "check_model", "permute_blocks", "poison", "record"]


def poison(cache: Cache, value: float = np.nan) -> Cache:
    """Returns the cache with every slot that holds no row's token set to `value`: free blocks, and slots past the
    last token of each row. Computations with the cache must give the same results, bit by bit.

    Slots for states that no row holds are set too. In quantized layers the scales are set, and the values become
    arbitrary. The null block and the padding of heads (`head_dim_multiple`), which kernels may read, stay 0. Blocks
    that a `PrefixCache` keeps stay unchanged.

    >>> import jaxkv
    >>> layer = jaxkv.LayerConfig(num_kv_heads=2, head_dim=8)
    >>> cache = jaxkv.init(jaxkv.CacheConfig(layers=(layer,), max_seqs=2, max_seq_len=64, num_blocks=4))
    >>> bool(jnp.isnan(poison(cache).pools[0].kv[1:]).all())
    True
    """
    check_cache(cache)
    return _poison(cache, value)


def _find_kept(cache: Cache, group: int, layer: int) -> jax.Array:
    """Returns `bool[num_blocks + 1, slots]`: the null block, what a `PrefixCache` keeps, what a layer's rows hold."""
    tables, size = cache.tables[group], cache.config.block_slots(layer)
    skipped = None if tables.skipped is None else tables.skipped[:, None]
    columns = jnp.arange(cache.config.table_widths[group], dtype=jnp.int32)[None]
    block = blocks_of(columns, skipped, cache.config.group_sink_blocks[group])
    position = (block[:, :, None] * size + jnp.arange(size, dtype=jnp.int32)[None, None]).reshape(len(block), -1)
    keep = jnp.ones(tables.kept.shape, bool).at[list_blocks(tables)].set(False) | (tables.kept != 0)
    slots = cache.slots(jnp.arange(cache.config.max_seqs)[:, None], position, layer=layer)
    return jnp.repeat(keep[:, None], size, axis=1).at[slots].set(True)


@jax.jit
def _poison(cache: Cache, value: jax.Array) -> Cache:
    pools = list(cache.pools)
    for group in range(len(cache.tables)):
        found: dict[int, jax.Array] = {}  # by the slots of a block
        for stack in cache.config.group_stacks(group):
            if (slots := cache.config.block_slots(stack[0])) not in found:
                found[slots] = _find_kept(cache, group, stack[0])
            kept = jnp.tile(found[slots], (len(stack), 1))[:, None, None]  # [blocks, 1, 1, slots]
            pool = cache.layer(stack[0]).pool
            kind, (*_, width) = cache.config.kind(stack[0]), cache.config.form(stack[0]).row_shape(2, 2)
            padding = jnp.arange(pool.kv.shape[-1]) >= kind.stored_dim(width)
            kv = _spoil(kept[..., None] | padding[None, None, None, None], value, pool.kv)
            scale = None if pool.scale is None else _spoil(kept, value, pool.scale)
            bounds = None if pool.bounds is None else _spoil(kept.any(axis=-1), value, pool.bounds)
            index = jax.tree.map(lambda x, kept=kept: _spoil(kept, value, x), pool.index)
            pools[stack[0]] = dataclasses.replace(pool, kv=kv, scale=scale, bounds=bounds, index=index)
    return cache.replace(pools=tuple(pools), states=_spoil_states(cache, value))


def _spoil_states(cache: Cache, value: jax.Array) -> tuple[dict[str, jax.Array] | None, ...]:
    if cache.state_slots is None:
        return ()
    keep = jnp.zeros(cache.config.num_state_slots + 1, bool).at[NULL_SLOT].set(True)
    for slots in cache.state_slots.named:
        keep = keep.at[slots].set(True)
    return jax.tree.map(lambda x: _spoil(keep, value, x), cache.states)


def permute_blocks(cache: Cache, seed: int = 0) -> Cache:
    """Returns the cache with its blocks in another physical order. Computations with the cache must not change.

    Raises:
      ValueError: the layout is contiguous, where row s holds block s + 1 by definition.

    >>> import jaxkv
    >>> layer = jaxkv.LayerConfig(num_kv_heads=2, head_dim=8)
    >>> cache = jaxkv.init(jaxkv.CacheConfig(layers=(layer,), max_seqs=2, max_seq_len=64, num_blocks=4))
    >>> permute_blocks(cache).tables[0].free_list.tolist()
    [3, 1, 2, 4]
    """
    check_cache(cache)
    seed = integer("seed", seed, least=0)
    if cache.config.contiguous:
        raise ValueError('layout="contiguous" has no blocks to permute: row s holds block s + 1.')
    rng = np.random.default_rng(seed)
    pools, groups = list(cache.pools), []
    for group, t in enumerate(cache.tables):
        order = np.arange(t.refcounts.shape[0], dtype=np.int32)
        for own in np.split(list_blocks(t), t.num_shards):
            order[own] = rng.permutation(own)
        new_id = jnp.asarray(order)

        def move(per_block: jax.Array, new_id: jax.Array = new_id) -> jax.Array:
            return jnp.zeros_like(per_block).at[new_id].set(per_block)

        entries, free_list = new_id[t.tables], new_id[t.free_list]
        refcounts, kept = move(t.refcounts), move(t.kept)
        groups.append(dataclasses.replace(t, tables=entries, free_list=free_list, refcounts=refcounts, kept=kept))
        for stack in cache.config.group_stacks(group):

            def move_all(x: jax.Array, count: int = len(stack), move: Any = move) -> jax.Array:
                return jax.vmap(move)(x.reshape(count, -1, *x.shape[1:])).reshape(x.shape)

            pools[stack[0]] = jax.tree.map(move_all, cache.layer(stack[0]).pool)
    return cache.replace(tables=tuple(groups), pools=tuple(pools))


def _spoil(keep: jax.Array, value: jax.Array, x: jax.Array) -> jax.Array:
    """Sets `value` wherever `keep` is false; an arbitrary number in integers, which have no NaN."""
    spoilt = jnp.asarray(value if jnp.issubdtype(x.dtype, jnp.floating) else 85, x.dtype)
    return jnp.where(keep.reshape(*keep.shape, *(1,) * (x.ndim - keep.ndim)), x, spoilt)
