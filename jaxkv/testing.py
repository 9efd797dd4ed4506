"""For your own tests: was a pool copied, and does anything depend on what must not be read?"""

import dataclasses
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._core.cache import Cache
from jaxkv._core.state import NULL_BLOCK, Pool
from jaxkv._tiers.host import HostBlocks

# What XLA does in place, or without touching memory at all.
IN_PLACE = {
    "parameter", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "fusion", "custom-call",
    "dynamic-update-slice", "scatter", "optimization-barrier", "async-start", "async-update", "async-done",
}  # fmt: skip
INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?(?P<name>\S+) = \(?\w+\[(?P<dims>[\d,]+)\]\S* (?P<opcode>[\w-]+)\(")


def assert_no_copy(jitted: Any, *args: Any, temp_fraction: float = 0.5, **kwargs: Any) -> None:
    """Raise AssertionError if a compiled step copies a pool of its cache instead of updating it in place.

    Args:
      jitted: a function under `jax.jit` that donates its cache and returns it.
      *args, **kwargs: its arguments, a `Cache` among them. Nothing is run, so arrays may be `jax.ShapeDtypeStruct`s:
        `jax.eval_shape(lambda: jaxkv.init(config))` is a cache that takes no memory.
      temp_fraction: how much scratch memory the step may take, as a share of its largest pool.

    Copies hide well: a pool that is padded or transposed for a kernel, converted as a whole, carried through `scan` as
    `xs` and `ys`, or simply not donated. Each doubles the memory, and costs time that grows with the pool.

    >>> import jax, jaxkv
    >>> layer = jaxkv.LayerConfig(num_kv_heads=2, head_dim=8)
    >>> config = jaxkv.CacheConfig(layers=(layer,), max_seqs=2, max_seq_len=64, num_blocks=400)
    >>> cache = jax.eval_shape(lambda: jaxkv.init(config))
    >>> kv = jax.ShapeDtypeStruct((1, 2, 1, 2, 8), "bfloat16")
    >>> assert_no_copy(jax.jit(jaxkv.append, donate_argnames="cache"), cache, kv, kv)
    >>> assert_no_copy(jax.jit(jaxkv.append), cache, kv, kv)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    AssertionError: Only 0 of the 410624 bytes of the cache's pools are updated in place: ...
    """
    leaves: list[Any] = jax.tree.leaves((args, kwargs), is_leaf=lambda x: isinstance(x, Pool | HostBlocks))
    pools = [x.kv for x in leaves if isinstance(x, Pool)]  # not what lies on the host
    if not pools:
        raise ValueError("None of the arguments holds a jaxkv.Cache, so there is no pool that could be copied.")
    compiled = jitted.lower(*args, **kwargs).compile()
    memory = compiled.memory_analysis()
    total = sum(_bytes(pool) for pool in pools)
    if memory.alias_size_in_bytes < total:
        raise AssertionError(
            f"Only {memory.alias_size_in_bytes} of the {total} bytes of the cache's pools are updated in place: donate "
            'the cache, jax.jit(step, donate_argnames="cache"), and return it with the shapes and dtypes it came with.'
        )
    for line in compiled.as_text().splitlines():
        found = INSTRUCTION.match(line)
        if found and found["opcode"] not in IN_PLACE and any(_as_large(found["dims"], pool) for pool in pools):
            where = re.search(r'op_name="([^"]*)"', line)
            raise AssertionError(
                f"A whole pool goes through the instruction {found['opcode']} ({found['name']}, [{found['dims']}])"
                f"{f', which comes from {where[1]}' if where else ''}. Index or slice the pool instead, and write into "
                "it with jaxkv.write or .at[...]."
            )
    largest = max(_bytes(pool) for pool in pools)
    if memory.temp_size_in_bytes > temp_fraction * largest:
        raise AssertionError(
            f"The step takes {memory.temp_size_in_bytes} bytes of scratch memory, more than {temp_fraction} of its "
            f"largest pool of {largest} bytes: something in it is as large as a pool. If that is not the cache's "
            "doing (a large model, a small pool), test with more num_blocks or a larger temp_fraction."
        )


def poison(cache: Cache, value: float = np.nan) -> Cache:
    """The same cache with every place that holds no row's token set to `value`: free blocks, and what lies past the
    last token of each row. Of quantised layers it is the scales; their numbers become any. Whatever computes with the
    cache must give the same, bit by bit. The null block stays 0; blocks that a `PrefixCache` keeps stay as they are.

    >>> import jaxkv
    >>> layer = jaxkv.LayerConfig(num_kv_heads=2, head_dim=8)
    >>> cache = jaxkv.init(jaxkv.CacheConfig(layers=(layer,), max_seqs=2, max_seq_len=64, num_blocks=4))
    >>> bool(jnp.isnan(poison(cache).pools[0].kv[1:]).all())
    True
    """
    pools = list(cache.pools)
    row, position = jnp.arange(cache.config.max_seqs)[:, None], jnp.arange(cache.config.max_seq_len)[None]
    for group, tables in enumerate(cache.tables):
        keep = jnp.repeat((tables.kept != 0).at[NULL_BLOCK].set(True)[:, None], cache.config.block_size, axis=1)
        held = cache.slots(row, position, layer=cache.config.groups[group][0])
        keep = keep.at[held].set(True)
        for stack in cache.config.group_stacks(group):
            kept = jnp.tile(keep, (len(stack), 1))[:, None, None]  # [blocks, 1, 1, block_size]
            pools[stack[0]] = jax.tree.map(functools.partial(_spoil, kept, value), cache.layer(stack[0]).pool)
    return cache.replace(pools=tuple(pools))


def permute_blocks(cache: Cache, seed: int = 0) -> Cache:
    """The same cache with its blocks in another physical order. Whatever computes with it must give the same.

    Raises:
      ValueError: the layout is contiguous, where row s holds block s + 1 by definition.

    >>> import jaxkv
    >>> layer = jaxkv.LayerConfig(num_kv_heads=2, head_dim=8)
    >>> cache = jaxkv.init(jaxkv.CacheConfig(layers=(layer,), max_seqs=2, max_seq_len=64, num_blocks=4))
    >>> permute_blocks(cache).tables[0].free_list.tolist()
    [3, 1, 2, 4]
    """
    if cache.config.contiguous:
        raise ValueError('layout="contiguous" has no blocks to permute: row s holds block s + 1.')
    rng = np.random.default_rng(seed)
    pools, groups = list(cache.pools), []
    for group, t in enumerate(cache.tables):
        new_id = jnp.asarray(np.append(NULL_BLOCK, 1 + rng.permutation(t.num_blocks)), jnp.int32)

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


def _spoil(keep: jax.Array, value: float, x: jax.Array) -> jax.Array:
    """`value` wherever `keep` does not say otherwise; in integers, which have no NaN, some number."""
    spoilt = jnp.asarray(value if jnp.issubdtype(x.dtype, jnp.floating) else 85, x.dtype)
    return jnp.where(keep.reshape(*keep.shape, *(1,) * (x.ndim - keep.ndim)), x, spoilt)


def _bytes(x: Any) -> int:
    return math.prod(x.shape) * x.dtype.itemsize


def _as_large(dims: str, pool: Any) -> bool:
    """Whether an array has at least a pool's elements, and an axis that can be the pool's blocks."""
    sizes = [int(d) for d in dims.split(",")]
    return math.prod(sizes) >= math.prod(pool.shape) and any(d % pool.shape[0] == 0 for d in sizes)
