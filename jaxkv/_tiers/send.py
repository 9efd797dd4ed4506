"""Sends rows from one cache to another, from device to device: `send`, and in two halves for an engine."""

import contextlib
import dataclasses
import functools
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._core.blocks.block_copy import pad_size, read_blocks, read_group
from jaxkv._core.blocks.reblock import (
    BlockPlan,
    GroupRows,
    TokensGone,
    describe_lack,
    fill_blocks,
    find_group_rows,
    fit,
)
from jaxkv._core.blocks.restore import empty_rows, layer_facts, put_rows
from jaxkv._core.blocks.row_snapshots import put_row_snapshots, read_row_snapshots
from jaxkv._core.blocks.slot_allocator import place_states, put_row_states, take_states
from jaxkv._core.cache.cache import Cache, check_cache
from jaxkv._core.cache.checks import check_on_host
from jaxkv._core.config.mesh_shape import find_mesh
from jaxkv._core.state.arguments import distinct_rows, read_numbers
from jaxkv._core.state.columns import are_too_long, columns_of
from jaxkv._core.state.errors import OutOfBlocks
from jaxkv._core.state.multihost import check_local, place_like
from jaxkv._core.state.shard_local import read_slots
from jaxkv._core.state.sharding import POOL, WHOLE, head_spec, run_on_shards
from jaxkv._core.state.state import NULL_BLOCK, Pool
from jaxkv._core.state.state_slots import split_states
from jaxkv._tiers.host_blocks import HostBlocks, order_unshared
from jaxkv._tiers.host_room import may_share
from jaxkv._tiers.host_tier import bring_in, make_host, pool_for
from jaxkv._tiers.remote import offer


@overload
def send(cache: Cache, rows: Any, *, to: Cache, at: Any = None) -> Cache: ...
@overload
def send(cache: Cache, rows: Any, *, to: str) -> None: ...
def send(cache: Cache, rows: Any, *, to: Cache | str, at: Any = None) -> Cache | None:
    """Copies rows of one cache into empty rows of another, to prefill on some devices and decode on others.

    The blocks go from device to device, in one transfer per layer, where the runtime supports it. Both caches may lie
    on meshes, sharded in different ways. `block_size`, `num_blocks`, `max_seqs`, `max_seq_len`, `layout`,
    `head_dim_multiple` and `join_kv` may differ; layers and dtypes may not. Full blocks that rows share stay shared,
    and one that equals a block of a row of `to` to the bit is shared with that row: siblings may be sent one by one.
    Neither cache is donated or changed, so in-flight steps go on. Not for use inside `jit`: the amount to send depends
    on data.

    Args:
      rows: a row index of `cache` or a list of them; `free` them when they are no longer needed there.
      to: the destination cache. Or the address of another process, its `jaxkv.distributed.transfer_address()`: the
        rows are copied by way of the hosts, and are `receive`d there. This does not wait for it, and keeps the copy
        until then, in host memory, or until that process is gone.
      at: the rows of `to`, one for each; default: the same indices. Not for an address.

    Returns:
      `to` with the rows, equal to the bit. For an address nothing.

    Raises:
      ValueError: caches of other layers or dtypes, a row named twice or not empty, a row longer than `to.max_seq_len`,
        or a row that has lost tokens before its window that larger blocks would need.
      IndexError: no such row. OutOfBlocks: `to` has too few free blocks. ConnectionError: the process at the address is
      gone.

    Disaggregated prefill is from DistServe and Splitwise (https://arxiv.org/abs/2401.09670,
    https://arxiv.org/abs/2311.18677).

    >>> import jax.numpy as jnp, jaxkv
    >>> sizes = dict(num_layers=1, num_kv_heads=2, head_dim=8, max_seqs=2, max_seq_len=64)
    >>> prefill = jaxkv.init(jaxkv.CacheConfig.uniform(**sizes, block_size=32))
    >>> decode = jaxkv.init(jaxkv.CacheConfig.uniform(**sizes, block_size=16))
    >>> kv = jnp.ones((1, 2, 20, 2, 8))
    >>> prefill = jaxkv.append(prefill, kv, kv, [20, 5])
    >>> jaxkv.send(prefill, 0, to=decode, at=1).lengths.tolist()
    [0, 20]
    """
    if isinstance(to, str):
        if at is not None:
            raise ValueError("at= is for a cache: the process at an address chooses its rows itself, in receive.")
        check_cache(cache)
        check_local(cache.pools, "send")
        offer(cache, _read_distinct(cache, "rows", rows), to)
        return None
    for found in (cache, to):
        if not isinstance(found, Cache):
            raise ValueError(f"send takes two caches, or one and an address, not {type(found).__name__}.")
        check_on_host(found, "send")
        check_local(found.pools, "send")
    _check_layers(cache, to)
    source = _read_distinct(cache, "rows", rows)
    target = _read_distinct(to, "at", source if at is None else at)
    if len(target) != len(source):
        raise ValueError(f"at must name {len(source)} rows, one for each that is sent, not {len(target)}.")
    lengths = np.asarray(cache.lengths)[source]
    groups = cache.config.groups
    group_rows = [
        find_group_rows(tables, cache.config, g, source) for g, tables in enumerate(jax.device_get(cache.tables))
    ]
    plans = _fit(cache, source, group_rows, to, target)
    if not len(source):
        return to
    with _use_mesh(cache):
        blocks = {layer: _convert_layout(to, layer, cache, _read(cache, layer, plan)) for layer, plan in plans.items()}
        states = take_states(cache, source)
        snapshots = read_row_snapshots(cache, source)
    sent = fill_blocks(group_rows, groups, plans, to.config)
    with _use_mesh(to):
        if may_share(to):
            brought = [
                _bring_blocks(blocks[layer], to, layer) if layer in blocks else None for layer in range(len(to.pools))
            ]
            host = make_host(to.config, lengths, sent, brought, states)
            return _put_beside(to, target, dataclasses.replace(host, snapshots=snapshots))
        result = put_rows(
            to, target, lengths, sent, lambda layer: _bring_blocks(blocks[layer], to, layer), in_place=False
        )
        if snapshots is not None:
            snapshots = dataclasses.replace(snapshots, states=place_states(snapshots.states, to))
        return put_row_snapshots(put_row_states(result, target, place_states(states, to)), target, snapshots)


def _put_beside(to: Cache, target: np.ndarray, host: HostBlocks) -> Cache:
    """Returns `to` with rows that share full blocks with the rows it has."""
    result = bring_in(to, jnp.asarray(target, jnp.int32), host)
    if np.asarray(result.failed)[target].any():
        few = min(int(np.min(tables.num_free)) for tables in jax.device_get(to.tables))
        raise OutOfBlocks(
            f"These rows need more blocks, beside those that they share, than the {few} that are free in the cache "
            f"sent to: free rows of it, raise its {to.config.size_argument}, or send fewer."
        )
    return result


def lift_row(cache: Cache, row: int, num_tokens: int, *, to: Cache) -> HostBlocks:
    """Sends a row to the devices of another cache of the same config, as `HostBlocks` for `swap_in`.

    Does not wait for either device: in layers that do not evict, the contents of the row follow from `num_tokens`.
    """
    config, length = cache.config, np.array([num_tokens], np.int32)
    groups, none = range(len(config.groups)), (None,) * len(config.groups)
    first = [np.asarray(config.first_retained_block(g, length), np.int32) for g in groups]
    count = [np.asarray(-(-length // config.block_size) - f, np.int32) for f in first]
    sizes = tuple(pad_size(int(n[0])) for n in count)
    with _use_mesh(cache):
        found = _row_blocks(cache, np.int32(row), np.concatenate(first), np.concatenate(count), sizes=sizes)
        states = take_states(cache, np.array([row], np.int32))
    pools = tuple(None if blocks is None else _bring_blocks(blocks, to, layer) for layer, blocks in enumerate(found))
    return HostBlocks(
        lengths=length,
        first=tuple(first),
        count=tuple(count),
        order=order_unshared(count),
        held=none,
        thinned=none,
        pools=pools,
        states=split_states(to.config, place_states(states, to)),
        groups=config.groups,
        retentions=tuple(map(str, config.retentions)),
        rotates=tuple(map(config.rotates, range(len(cache.pools)))),
        kinds=config.kind_names,
    )


@functools.partial(jax.jit, static_argnames="sizes")
def _row_blocks(cache: Cache, row: jax.Array, first: jax.Array, count: jax.Array, *, sizes: tuple[int, ...]):
    """Returns `sizes` blocks of a row for each layer, with undefined contents behind the last block."""
    pools: list[Pool | None] = [None] * len(cache.pools)
    for group, (tables, size) in enumerate(zip(cache.tables, sizes, strict=True)):
        i = jnp.arange(size, dtype=jnp.int32)
        skipped = None if tables.skipped is None else tables.skipped[row]
        column = columns_of(first[group] + i, skipped, cache.config.group_sink_blocks[group])
        blocks = jnp.where(
            i < count[group], tables.tables[row, jnp.clip(column, 0, tables.tables.shape[1] - 1)], NULL_BLOCK
        )
        for layer, found in read_group(cache, group, blocks).items():
            pools[layer] = found
    return pools


def _read_distinct(cache: Cache, name: str, rows: Any) -> np.ndarray:
    """Returns distinct row indices."""
    if isinstance(rows := read_numbers(name, rows), jax.core.Tracer):
        raise ValueError(f"{name} must be known on the host: send cannot be part of jit. Call it between steps.")
    return distinct_rows(name, rows, cache.config.max_seqs)


def _check_layers(cache: Cache, to: Cache) -> None:
    counts = [x.config.num_layers for x in (cache, to)]
    if counts[0] != counts[1]:
        raise ValueError(f"Rows of {counts[0]} layers cannot be sent to a cache of {counts[1]}: it is another model's.")
    lengths = [x.config.residual_length for x in (cache, to)]
    if lengths[0] != lengths[1]:
        own, other = (f"residual_length={length}" if length is not None else None for length in lengths)
        raise ValueError(
            f"The cache has {own or 'no residual_length'}, but the cache sent to has {other or 'none'}: make both with "
            "the same."
        )
    ours, theirs = ([layer_facts(x.config, i) for i in range(len(x.pools))] for x in (cache, to))
    for layer, (our, their) in enumerate(zip(ours, theirs, strict=True)):
        if wrong := [name for name in our | their if our.get(name) != their.get(name)]:
            found, other = (", ".join(f"{name} = {x.get(name)}" for name in wrong) for x in (our, their))
            raise ValueError(
                f"Layer {layer} has {found}, but that of the cache sent to has {other}: make both with the same layers "
                "and dtypes; keys and values are not converted."
            )


def _fit(
    cache: Cache, source: np.ndarray, group_rows: list[GroupRows], to: Cache, target: np.ndarray
) -> dict[int, BlockPlan]:
    """Returns the blocks that the rows need in each layer. Raises if they do not fit, as far as is known before their
    blocks are compared with those of `to`."""
    config, tables = to.config, jax.device_get(to.tables)
    lengths, own = np.asarray(cache.lengths)[source], [None if x.thinned is None else x.lengths for x in group_rows]
    for row, length, too_long in zip(source, lengths, are_too_long(lengths, own, config), strict=True):
        if too_long:
            raise ValueError(
                f"Row {row} has {length} tokens, but the cache sent to takes {config.max_seq_len}: give it a larger "
                "max_seq_len, or leave the row out."
            )
    if len(taken := target[~empty_rows(to)[target]]):
        why = "have failed" if np.asarray(to.failed)[taken].all() else "hold tokens or blocks"
        raise ValueError(
            f"Rows can only be sent to empty rows, but {taken.tolist()} {why}: free them first, or give others in at=."
        )
    try:
        plans = fit(config, cache.config.groups, group_rows, cache.config.block_size)
    except TokensGone as gone:
        raise ValueError(
            f"Row {source[gone.row]} holds the tokens of {config.name_layer(gone.layer)} from {gone.start} on, the "
            f"others fell out of its window, but in blocks of {config.block_size} they begin at {gone.needed}: send it "
            f"to a cache with a block_size that divides {cache.config.block_size}."
        ) from None
    for layers, group_tables in () if may_share(to) else zip(config.groups, tables, strict=True):
        if (lack := describe_lack(plans[layers[0]], group_tables.num_free)) and not config.contiguous:
            need, few = lack
            raise OutOfBlocks(
                f"These rows need {need} blocks of {config.block_size} tokens, but in the cache sent to {few} "
                f"{'is' if few == 1 else 'are'} free: free rows of it, raise its {config.size_argument}, or send "
                "fewer."
            )
    return plans


def _read(cache: Cache, layer: int, plan: BlockPlan) -> Pool:
    """Returns a layer's tokens in blocks of the other cache's size, `[n, 2, K, new_size, D]`, on their devices."""
    pool, stack, size = cache.layer(layer).pool.tokens, cache.config.stack(layer), cache.config.block_slots(layer)
    slots = np.maximum(plan.padded, 0)
    block = slots // size + stack.index(layer) * (pool.kv.shape[0] // len(stack))
    if slots.shape[1] == size:
        return read_blocks(pool, np.asarray(block.max(axis=1), np.int32))[0]
    return _read_tokens(pool, np.asarray(block, np.int32), np.asarray(slots % size, np.int32))


def _convert_layout(to: Cache, layer: int, cache: Cache, blocks: Pool) -> Pool:
    """Returns blocks of a cache's layer in the key and value layout of the other cache."""
    form, other = cache.config.form(layer), to.config.form(layer)
    if type(form) is type(other):
        return blocks
    width = cache.config.kind(layer).stored_dim(cache.layer_config(layer).head_dim)
    kv = form.unpack(blocks.kv, axis=1)[..., :width]
    return dataclasses.replace(blocks, kv=other.pack(kv, axis=1))


@jax.jit
def _read_tokens(pool: Pool, block: jax.Array, offset: jax.Array) -> Pool:
    return run_on_shards(pool, _tokens, (pool, block, offset), (POOL, WHOLE, WHOLE), head_spec(2))


def _tokens(pool: Pool, block: jax.Array, offset: jax.Array) -> Pool:
    return jax.tree.map(lambda x: jnp.moveaxis(x, 1, 3), read_slots(pool, block, offset))


def _bring_blocks(blocks: Pool, to: Cache, layer: int) -> Pool:
    """Returns blocks on the devices of their destination pool."""
    pool = pool_for(blocks, to, layer)

    def bring(x: jax.Array, own: jax.Array) -> jax.Array:
        return place_like(x[..., : own.shape[-1]] if x.ndim > 4 else x, own)

    return jax.tree.map(bring, blocks.like(pool), pool)


def _use_mesh(cache: Cache) -> contextlib.AbstractContextManager:
    """Returns the context for calls on a cache: its mesh, if it has one."""
    pool = next(pool for pool in cache.pools if pool is not None)
    axis = pool.heads or pool.context
    mesh = None if axis is None else find_mesh(cache.pools, axis)
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)
