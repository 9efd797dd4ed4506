"""Makes an empty cache, and the specs of its arrays on a mesh of devices."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxkv._core.cache.cache import Cache
from jaxkv._core.cache.data_parallel import RowShards, row_specs, shard_config
from jaxkv._core.config.cache_config import CacheConfig, check_config
from jaxkv._core.config.layer_config import LayerConfig
from jaxkv._core.config.validation import is_tracing, show
from jaxkv._core.state.arguments import to_device
from jaxkv._core.state.head_rows import list_shard_blocks, refuse_sink_tokens
from jaxkv._core.state.multihost import check_agreement, list_processes, put_replicated
from jaxkv._core.state.sharding import count_shards
from jaxkv._core.state.state import NULL_BLOCK, BlockTables, Pool
from jaxkv._core.state.state_slots import NULL_SLOT, StateSlots

DIVIDED = {"heads": "KV heads", "context": "the tokens of each block", "rows": "rows"}


@overload
def init(
    config: CacheConfig,
    *,
    mesh: Mesh | None = None,
    heads: str | None = "model",
    context: str | None = None,
    rows: None = None,
) -> Cache: ...
@overload
def init(
    config: CacheConfig,
    *,
    mesh: Mesh | None = None,
    heads: str | None = "model",
    context: str | None = None,
    rows: str,
) -> RowShards: ...
def init(
    config: CacheConfig,
    *,
    mesh: Mesh | None = None,
    heads: str | None = "model",
    context: str | None = None,
    rows: str | None = None,
) -> Any:
    """Makes an empty cache: every block is free, every pool is a zeroed buffer of its own.

    Args:
      mesh: the devices to make the cache on, each its shard only; default: one device. Axes may be automatic
        (`jax.sharding.Mesh`) or explicit (`jax.make_mesh`); with explicit axes make calls outside `jit` under
        `jax.set_mesh`. Every function takes such a cache like any other.
      heads, context: the mesh axes that KV heads, and the tokens of every block, are divided over; see
        `partition_specs`.
      rows: the mesh axis that rows and blocks are divided over. The result is then a `RowShards` with a cache for each
        device, to be used inside `by_rows`.

    Raises:
      ValueError: the cache would exceed the memory that the device reports; the mesh lacks an axis; heads, blocks or
        rows cannot be divided over their axis. On a mesh of several processes, all of which must call this: one
        process passes other arguments, or `rows` is given.

    >>> import jaxkv
    >>> layer = jaxkv.LayerConfig(num_kv_heads=2, head_dim=8)
    >>> jaxkv.init(jaxkv.CacheConfig(layers=(layer,), max_seqs=4, max_seq_len=64, num_blocks=10))
    Cache(0 of 10 blocks used, 0 tokens in 0 of 4 rows, 1 layer, 11.0 KiB)
    """
    check_config(config)
    for name, axis in {"context": context, "rows": rows}.items():
        if mesh is None and axis is not None:
            raise ValueError(
                f"{name} needs mesh=, the devices that it names an axis of, but there is only {show(axis)}."
            )
    if mesh is None:
        config.check_memory()
        # One array after another: the same zeros used twice could not be donated.
        return Cache(
            tables=_init_tables(config),
            pools=_init_pools(config, None, None),
            state_slots=_init_slots(config),
            states=_init_states(config),
            config=config,
        )
    specs = partition_specs(config, mesh, heads, context, rows)
    # Shapes are computed without the other processes, of which there may be none.
    if not is_tracing() and len(processes := list_processes(mesh)) > 1:
        fields = dataclasses.astuple(config)  # all of them: `repr` leaves some out
        check_agreement("init", f"{fields} {heads} {context} {rows} {mesh} {mesh.devices.ravel()}", processes)
        if rows is not None:
            raise ValueError("rows= is for a mesh of one process: give each process a cache of its own rows instead.")
    divided = [math.prod(mesh.shape[axis] for axis in p.kv if axis is not None) for p in specs.pools if p is not None]
    config.check_memory(next(iter(mesh.local_devices), None), min(divided))
    # With rows=, one cache for each device of the axis, concatenated.
    count = 1 if rows is None else mesh.shape[rows]
    shard = config if rows is None else shard_config(config, count, rows)
    on_mesh = functools.partial(NamedSharding, mesh)
    axes = next((p.heads, p.context) for p in specs.pools if p is not None)
    group_shards = tuple(specs.pools[config.stack(layers[0])[0]].num_shards for layers in config.groups)
    program = jax.jit(_init_pools, static_argnums=(0, 1, 2, 3, 4), out_shardings=jax.tree.map(on_mesh, specs.pools))

    def place_rows(x: jax.Array) -> jax.Array:
        if rows is None:
            return put_replicated(x, on_mesh(PartitionSpec()))
        maths: Any = jnp if is_tracing() else np  # nothing compiles
        return put_replicated(maths.concatenate([maths.atleast_1d(x)] * count), on_mesh(PartitionSpec(rows)))

    tables, slots = jax.tree.map(place_rows, (_init_tables(shard, group_shards), _init_slots(shard)))
    lie = jax.tree.map(on_mesh, specs.states)
    states = jax.jit(_init_states, static_argnums=(0, 1), out_shardings=lie)(shard, count) if specs.states else ()
    pools = program(shard, *axes, group_shards, count)
    return dataclasses.replace(specs, tables=tables, pools=pools, state_slots=slots, states=states)


def partition_specs(
    config: CacheConfig,
    mesh: Mesh | AbstractMesh | None = None,
    heads: str | None = "model",
    context: str | None = None,
    rows: str | None = None,
) -> Any:
    """Returns how a cache is sharded: a `PartitionSpec` for each array of `init(config, mesh=mesh)`.

    Pools and scales are divided over KV heads, states of recurrent layers over their first axis, where that is even.
    Block tables are replicated, as are layers with fewer heads than there
    are devices, latent ones among them. If a layer evicts by heads, a block holds one head, and each device has an
    equal share of the blocks for its own heads. A row fails if one device has too few, however many others have.

    With `context` the tokens of every block are divided too, for contexts that do not fit on one device: the first
    device of the axis has the first run of each block's tokens, the second the next run, and so on. Each device attends
    to its tokens, and one small gather merges the outputs by their LSE. Kernels for TPU and GPU, which read blocks of a
    run's size, compute decode steps of layers without windows; XLA computes the rest.

    Args:
      mesh: default: the mesh set by `jax.set_mesh`.
      heads: the mesh axis for KV heads; None: they are not divided. "model" counts as None if the mesh has no such axis
        and `context` or `rows` is given.
      context: the mesh axis for the tokens of blocks; `block_size` must be a multiple of its number of devices.
      rows: the mesh axis for rows: the specs are those of a `RowShards`, in which every array is divided along its
        first axis.

    Returns:
      A `Cache` of specs. It serves as `in_specs` and `out_specs` of a `shard_map`, in which all functions work, with
      `check_vma` too; there, q has the device's query heads, and k and v have its KV heads, or all of them where they
      are not divided. Through `NamedSharding` it serves as `out_shardings`. A cache made without a mesh has other
      static fields: `send` brings its rows into one that `init` made on the mesh, `jax.device_put` does not.

    Raises:
      ValueError: there is no mesh, or it lacks an axis; heads, at least as many as devices, cannot be divided evenly;
        with `context`, blocks cannot be divided evenly, or layers evict, store bounds or keep sink tokens.

    Striping a context over devices to balance their work follows Striped Attention (https://arxiv.org/abs/2311.09431).

    >>> import jax, jaxkv
    >>> config = jaxkv.CacheConfig.uniform(num_layers=1, num_kv_heads=2, head_dim=8, max_seqs=2, max_seq_len=64)
    >>> mesh = jax.make_mesh((1,), ("model",))
    >>> jaxkv.partition_specs(config, mesh).pools[0].kv
    P(None, None, 'model')
    """
    check_config(config)
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    if not isinstance(mesh, Mesh | AbstractMesh) or mesh.empty:
        what = "there is none" if isinstance(mesh, Mesh | AbstractMesh) else f"not {show(mesh)}"
        raise ValueError(
            f"A cache is laid out over the devices of a jax.sharding.Mesh, but {what}: give mesh=, or call this under "
            "jax.set_mesh(mesh)."
        )
    if (context or rows) is not None and heads == "model" and heads not in mesh.axis_names:
        heads = None
    for name, axis in {"heads": heads, "context": context, "rows": rows}.items():
        if axis is not None and axis not in mesh.axis_names:
            axes = " and ".join(map(repr, mesh.axis_names))
            raise ValueError(
                f"{name}={show(axis)} is no axis of the mesh, which has {axes}: say {name}={mesh.axis_names[0]!r} to "
                f"divide {DIVIDED[name]} over that axis, or {name}=None to divide none."
            )
    named = [axis for axis in (heads, context, rows) if axis is not None]
    if len(set(named)) < len(named):
        raise ValueError(
            f"heads, context and rows cannot be divided over the same axis of the mesh, but they name "
            f"{', '.join(map(repr, named))}: name different ones."
        )
    if rows is not None:
        local = partition_specs(shard_config(config, mesh.shape[rows], rows), mesh, heads, context)
        if any(p is not None and p.num_shards > 1 for p in local.pools):
            raise ValueError(
                f"Blocks of layers that evict by heads are divided over the mesh axis {heads!r}, and cannot be over "
                f'{rows!r} too: give these layers evict="layer", or heads=None.'
            )
        return row_specs(config, local, rows)
    if context is not None:
        _check_runs(config, mesh.shape[context], context)

    group_shards = _count_group_shards(config, mesh, heads)

    def pool(layer: int) -> Pool:
        num_heads = config.layer_config(layer).num_kv_heads
        count = 1 if heads is None else mesh.shape[heads]
        is_divided = heads is not None and count_shards(num_heads, count, heads) == count
        if is_divided and not config.pairs_divide(layer, count):
            raise ValueError(
                f"Layer {layer} has its {num_heads} KV heads in pairs, {num_heads // 2} in all, which cannot be "
                f'divided among the {count} devices of the mesh axis {heads!r}: give the config join_kv="head".'
            )
        by_heads = config.layer_config(layer).evict == "head"  # then blocks are divided
        places = (heads, None, None, context) if by_heads else (None, None, heads, context)
        axes = tuple(None if axis == heads and not is_divided else axis for axis in places)
        spec = PartitionSpec(*axes[: max((i + 1 for i, axis in enumerate(axes) if axis is not None), default=0)])
        replicated = PartitionSpec() if context is None else PartitionSpec(None, None, None, context)
        specs = (spec, spec, spec, replicated, replicated)  # index keys belong to no head
        found = (None if shape is None else own for shape, own in zip(config.stack_shapes(layer), specs, strict=True))
        return Pool.bundle(*found, heads=heads, context=context, num_shards=group_shards[config.group(layer)])

    fields: dict[str, Any] = {field.name: PartitionSpec() for field in dataclasses.fields(BlockTables)}
    evicts, slides = ({"evicted": None, "thinned": None}, {"skipped": None})
    tables = tuple(
        BlockTables(**fields | ({} if evict else evicts) | ({} if slide else slides))
        for evict, slide in zip(config.group_evicts, config.group_slides, strict=True)
    )
    pools = tuple(pool(i) if config.stack(i)[:1] == (i,) else None for i in range(len(config.layers)))
    states: tuple[Any, ...] = ()
    if config.recurrent_layers:
        firsts = {layers[0] for layers in config.state_stacks}
        states = tuple(
            _state_specs(layer, mesh, heads, config.stacked) if i in firsts else None
            for i, layer in enumerate(config.layers)
        )
    slots: Any = None
    if states:
        whole: Any = PartitionSpec()
        slots = StateSlots(slots=whole, source=whole, snapshots=whole if config.num_snapshots else None)
    return Cache(tables=tables, pools=pools, state_slots=slots, states=states, config=config)


def _state_specs(
    layer: LayerConfig, mesh: Mesh | AbstractMesh, heads: str | None, stacked: bool
) -> dict[str, PartitionSpec]:
    """Returns the specs of a recurrent layer's arrays: each divided over its first axis, heads or channels, if even."""
    count = 1 if heads is None else mesh.shape[heads]
    whole = {array.name: heads is None or array.shape[0] % count > 0 for array in layer.states or ()}
    divided = PartitionSpec(None, None, heads) if stacked else PartitionSpec(None, heads)
    return {name: PartitionSpec() if is_whole else divided for name, is_whole in whole.items()}


def _init_slots(config: CacheConfig) -> StateSlots | None:
    if not config.recurrent_layers:
        return None
    slots, source = (to_device(np.full(config.max_seqs, NULL_SLOT, np.int32)) for _ in range(2))
    if not config.num_snapshots:
        return StateSlots(slots=slots, source=source)
    columns = np.full((config.max_seqs, config.row_snapshots), NULL_SLOT, np.int32)
    return StateSlots(slots=slots, source=source, snapshots=to_device(columns))


def _init_states(config: CacheConfig, count: int = 1) -> tuple[dict[str, jax.Array] | None, ...]:
    """Makes the zeroed states of `count` caches, concatenated: of each layer its arrays, with a null slot each."""
    if not config.recurrent_layers:
        return ()
    slots = count * (config.num_state_slots + 1)

    def zeros(i: int) -> dict[str, jax.Array] | None:
        layers = config.state_stack(i)
        if layers[:1] != (i,):
            return None
        front = (slots, len(layers)) if config.stacked else (slots,)
        return {a.name: jnp.zeros((*front, *a.shape), a.dtype) for a in config.layers[i].states or ()}

    return tuple(map(zeros, range(len(config.layers))))


def _count_group_shards(config: CacheConfig, mesh: Mesh | AbstractMesh, heads: str | None) -> tuple[int, ...]:
    """Returns the number of shards of each group's blocks: one per device of the axis if the layer evicts by heads.

    Raises:
      ValueError: the blocks cannot be divided evenly.
    """
    if heads is None:
        return (1,) * len(config.groups)
    counts = (count_shards(n, mesh.shape[heads], heads) if n > 1 else 1 for n in config.group_heads)
    group_shards = tuple(counts)
    for layers, blocks, count in zip(config.groups, config.group_blocks, group_shards, strict=True):
        if blocks % count:
            raise ValueError(
                f"The {blocks} blocks of layer {layers[0]}, which evicts by heads, cannot be divided among the {count} "
                f"devices of the mesh axis {heads!r}: make group_blocks a multiple of it."
            )
    return group_shards


def _check_runs(config: CacheConfig, count: int, context: str) -> None:
    """Raises ValueError unless the tokens of every block can be divided among `count` devices."""
    if config.block_size % count:
        raise ValueError(
            f"Blocks of {config.block_size} tokens cannot be divided among the {count} devices of the mesh axis "
            f"{context!r}: make block_size a multiple of it, {-(-config.block_size // count) * count}, say."
        )
    refuse_sink_tokens(config, f"Divided over the mesh axis {context!r}, a cache takes")
    for i, layer in enumerate(config.layers):
        if layer.bounds:
            raise ValueError(
                f"Layer {i} keeps bounds of whole blocks, which cannot be divided over the mesh axis {context!r}: make "
                "it without bounds, or leave context out."
            )
        if layer.compress_ratio is not None:
            raise ValueError(
                f"Layer {i} stores entries of {layer.compress_ratio} tokens, and its blocks cannot be divided over the "
                f"mesh axis {context!r} yet: leave context out."
            )
        if layer.evict is not None:
            raise ValueError(
                f"Layer {i} has evict={layer.evict!r}, which moves tokens from block to block, and its blocks cannot "
                f"be divided over the mesh axis {context!r}: make it without evict, or leave context out."
            )


def _init_pools(
    config: CacheConfig,
    heads: str | None,
    context: str | None,
    group_shards: Sequence[int] | None = None,
    count: int = 1,
) -> tuple[Pool | None, ...]:
    """Makes the zeroed pools of `count` caches, concatenated."""

    def zeros(shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return jnp.zeros((count * shape[0], *shape[1:]), dtype)

    def pool(layer: int) -> Pool:
        own = 1 if group_shards is None else group_shards[config.group(layer)]
        pairs = zip(config.stack_shapes(layer, own), config.array_dtypes(layer), strict=True)
        arrays = (None if shape is None else zeros(shape, dtype) for shape, dtype in pairs)
        return Pool.bundle(*arrays, heads=heads, context=context, num_shards=own)

    return tuple(pool(i) if config.stack(i)[:1] == (i,) else None for i in range(len(config.layers)))


def _init_tables(config: CacheConfig, group_shards: Sequence[int] | None = None) -> tuple[BlockTables, ...]:
    counts = (1,) * len(config.groups) if group_shards is None else group_shards
    return tuple(_init_group(config, group, count) for group, count in enumerate(counts))


def _init_group(config: CacheConfig, group: int, num_shards: int) -> BlockTables:
    """Makes the tables of a group by NumPy: nothing compiles, and each array can be donated."""
    rows, num_blocks = config.max_seqs * config.group_heads[group], config.group_blocks[group]
    evicts = config.group_evicts[group] is not None

    def zeros() -> jax.Array:
        return to_device(np.zeros(rows, np.int32))

    blocks = list_shard_blocks(num_blocks, num_shards)
    if config.contiguous:  # every row always has its own block
        tables, num_free = blocks[:, None], 0
    else:
        tables, num_free = np.full((rows, config.table_widths[group]), NULL_BLOCK, np.int32), num_blocks
    num_each = np.int32(num_free) if num_shards == 1 else np.full(num_shards, num_free // num_shards, np.int32)
    refcounts = np.ones(num_blocks + num_shards, np.int32)
    refcounts[NULL_BLOCK] = 0
    return BlockTables(
        tables=to_device(tables),
        lengths=zeros(),
        new=zeros(),
        offsets=zeros(),
        refcounts=to_device(refcounts),
        kept=to_device(np.zeros(num_blocks + num_shards, np.int32)),
        free_list=to_device(blocks),
        num_free=to_device(num_each),
        peak=to_device(np.int32(num_blocks - num_free)),
        failed=to_device(np.zeros(rows, bool)),
        wanted=zeros(),
        needed=zeros(),
        skipped=zeros() if config.group_slides[group] else None,
        evicted=zeros() if evicts else None,
        thinned=zeros() if evicts else None,
    )
