"""A cache: its block tables, pools and config as one pytree."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._core.cache.inspection import Views
from jaxkv._core.cache.key_bounds import renew_bounds
from jaxkv._core.cache.pool_access import put_token, update_slice
from jaxkv._core.cache.row_checks import check_head
from jaxkv._core.config.cache_config import CacheConfig
from jaxkv._core.config.kv_packing import stack_kv
from jaxkv._core.config.validation import show
from jaxkv._core.state.sharding import POOL, WHOLE, head_spec, run_on_shards
from jaxkv._core.state.state import BlockTables, Layer, Pool
from jaxkv._core.state.state_repr import check_living, check_pools
from jaxkv._core.state.state_slots import NULL_SLOT, StateLayer, StateSlots
from jaxkv._core.state.static_fields import register_export


def check_cache(cache: Any, *, may_be_donated: bool = False) -> None:
    """Raises ValueError unless `cache` is a whole cache, one from which something can be read."""
    if not isinstance(cache, Cache):
        message = getattr(type(cache), "NO_CACHE", None)  # the message of a class easily taken for one
        raise ValueError(message or f"cache must be a Cache, as jaxkv.init makes one, not {show(cache)}.")
    if not may_be_donated:
        check_living("cache", cache.tables[0].lengths)
        check_pools("cache", cache.pools)


@register_export
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Cache(Views):
    """An immutable paged KV cache, made by `jaxkv.init`. Every function of the library returns a new one.

    Fields:
      tables: the block tables of each group of layers.
      pools: the blocks, one pool per layer.
      state_slots, states: where the states of rows are, and the states, for recurrent layers.
      config: the sizes of the cache; static.

    An older cache stays valid unless it, or a cache that shares its pools, was donated:

    >>> import jaxkv
    >>> sizes = dict(num_layers=1, num_kv_heads=2, head_dim=8, max_seqs=2, max_seq_len=64)
    >>> cache = jaxkv.init(jaxkv.CacheConfig.uniform(**sizes, num_blocks=4))
    >>> longer = jaxkv.extend(cache, [20, 3])
    >>> cache.lengths.tolist(), longer.lengths.tolist(), longer.blocks_in_use
    ([0, 0], [20, 3], 3)
    """

    tables: tuple[BlockTables, ...]  # one per group of layers
    # One per layer; None for a layer that shares another's, or that is stacked after another.
    pools: tuple[Pool | None, ...]
    # For configs with recurrent layers: the rows' slots, and of each layer its arrays, None for an attention layer.
    state_slots: StateSlots | None = None
    states: tuple[dict[str, jax.Array] | None, ...] = ()
    config: CacheConfig = dataclasses.field(metadata={"static": True})

    def replace(self, **changes: Any) -> "Cache":
        """Returns a copy with other fields."""
        return dataclasses.replace(self, **changes)

    def replace_pool(self, layer: int, pool: Pool) -> "Cache":
        """Returns a copy in which a layer reads another pool."""
        found, stack = self.layer(layer), self.config.stack(layer)
        if found.place is not None:  # a slice of the stack's pool
            start = stack.index(self.config.owner(layer)) * pool.kv.shape[0]
            pool = run_on_shards(found.pool, update_slice, (found.pool, pool), (POOL, POOL), POOL, start=start)
        return self._with_stack(stack[0], pool)

    def _with_stack(self, first: int, pool: Pool) -> "Cache":
        return self.replace(pools=(*self.pools[:first], pool, *self.pools[first + 1 :]))

    @property
    def layers(self) -> "Layers":
        """The layers of the cache. Make a `list` of them, call `out, layers[i] = jaxkv.attention(q, k, v, layers[i])`
        for each, then `cache.with_layers(layers)`.

        In a scan over a stacked cache, `cache.layers[i]` takes a traced `i`, and `cache.with_layer(i, layer)` puts the
        layer back in place. A list of a stacked cache's layers splits the stacks, which copies them.

        In a list, a layer with `shares_with` has no pool, since the other layer's writes would not reach it, and
        attention refuses it: use `cache.with_layer(j, layers[j]).layers[i]`, where j is the layer that it reads.
        """
        return Layers(self)

    def with_layer(self, i: Any, layer: Layer) -> "Cache":
        """Returns a copy with layer `i` as `attention` or `write` returned it."""
        if isinstance(layer, StateLayer):
            return self._with_state_layer(i, layer)
        number, place = self._place(i)
        if (owner := self.config.owner(number)) != number:
            raise ValueError(f"Layer {number} reads what layer {owner} keeps: it has nothing of its own to put back.")
        if not isinstance(layer, Layer) or layer.config != self.config or layer.number not in self.config.stack(number):
            raise ValueError(f"layer must be what became of layers[{i}] of this cache, not {_describe(layer)}.")
        if (layer.place is None) != (place is None):  # a list of layers has split the stack
            if layer.number != number or isinstance(i, tuple | jax.Array):
                raise ValueError(
                    f"Layer {layer.number} stands in a list of its own, so it can only be put back as layers["
                    f"{layer.number}], a number, not as layers[{i}]: in a scan take it from cache.layers[i]."
                )
            cache = self.replace_pool(number, layer.pool)
        else:
            cache = self._with_stack(self.config.stack(number)[0], layer.pool)
        group = self.config.group(number)
        tables = _mark_failures(self.tables[group], layer.tables)
        cache = cache.replace(tables=(*self.tables[:group], tables, *self.tables[group + 1 :]))
        if layer.residual is None:
            return cache
        residual = self.config.residual_layer(number)
        assert residual is not None
        return cache.with_layer(residual, layer.residual)

    def _with_state_layer(self, i: Any, layer: StateLayer) -> "Cache":
        number, place = self._place(i)
        stack = self.config.state_stack(number)
        if layer.config != self.config or layer.number not in stack:
            raise ValueError(f"layer must be what became of layers[{i}] of this cache, not {_describe(layer)}.")
        tables = (_mark_failures(self.tables[0], layer.tables), *self.tables[1:])
        own, first = layer.states, stack[0]
        if layer.place is None and place is not None:  # a list of layers has split the stack
            stacked = self.states[first]
            assert stacked is not None
            own = {name: x.at[:, place].set(own[name]) for name, x in stacked.items()}
        states = (*self.states[:first], own, *self.states[first + 1 :])
        return self.replace(tables=tables, states=states, state_slots=_merge_slots(self.state_slots, layer.slots))

    def with_layers(self, layers: Sequence[Layer]) -> "Cache":
        """Returns a copy with the updated layers of `list(cache.layers)`."""
        if len(layers) != self.num_layers:
            raise ValueError(f"layers must have all {self.num_layers} layers of the cache, but has {len(layers)}.")
        cache = self
        for i, layer in enumerate(layers):
            if self.config.owner(i) == i:
                cache = cache.with_layer(i, layer)
        return cache

    def store(self, layer: int, row: int, head: int, position: int, k: Any, v: Any) -> "Cache":
        """Returns a cache with k, v `[D]` stored for one head of one token; v is None for a latent layer. For
        debugging: shared blocks change for all rows."""
        check_head(self, layer, head)
        self.token(row, position, layer)  # the same errors
        block, offset = self.slots(row, position, layer=layer)
        found = self.layer_config(layer)
        is_wrong = v is not None if found.rank else v is None or jnp.shape(v) != (found.value_dim,)
        if jnp.shape(k) != (found.head_dim,) or is_wrong:
            each = "each, one head of one token" if found.rank is None else "and None, one token of a latent layer"
            got = None if v is None else jnp.shape(v)
            wanted = f"[{found.head_dim}]" + ("" if found.v_head_dim is None else f" and [{found.v_head_dim}]")
            raise ValueError(f"k and v must be {wanted} {each}, not {jnp.shape(k)} and {got}.")
        pool = self.pool(layer)
        if block.ndim:  # a layer that evicts by heads has one head per block
            block, offset, head = block[head], offset[head], 0
        column, length = position // self.config.block_size, self.layer(layer).held[row]
        form = self.config.form(layer)
        numbers, scale = self.config.encode(layer, stack_kv(k, v, axis=0), axis=0)
        token = Pool(form.pack_head(numbers), scale).like(pool)
        stored_head, start = form.locate_head(head)
        number = jnp.arange(pool.kv.shape[2], dtype=jnp.int32)
        arguments, specs = (
            (pool, block, offset, jnp.int32(stored_head), token, number),
            (POOL, *[WHOLE] * 4, head_spec(0)),
        )
        pool = run_on_shards(pool, put_token, arguments, specs, POOL, start=start)
        if pool.bounds is not None:
            filled = jnp.clip(length - column * self.config.block_size, 0, self.config.block_size)
            pool = renew_bounds(pool, block[None], filled[None], config=self.config, layer=layer)
        cache, residual = self.replace_pool(self.config.owner(layer), pool), self.config.residual_layer(layer)
        if residual is None or not np.asarray(self.slots(row, position, layer=residual)[0]).any():
            return cache
        return cache.store(residual, row, head, position, k, v)


@jax.tree_util.register_pytree_node_class
class Layers(Sequence[Layer | StateLayer]):
    """The layers of a cache. `jit` and tree maps turn them into a tuple of `Layer` and `StateLayer`."""

    def __init__(self, cache: Cache):
        self._cache = cache

    def __len__(self) -> int:
        return self._cache.num_layers

    @overload
    def __getitem__(self, i: int | jax.Array | tuple) -> Layer: ...

    @overload
    def __getitem__(self, i: slice) -> tuple[Layer, ...]: ...

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return tuple(self)[i]
        number = i[0] if isinstance(i, tuple) and len(i) == 2 else i
        if isinstance(number, int) and self._cache.config.layer_config(number).is_recurrent:
            return self._cache.state_layer(i)
        return self._cache.layer(i)

    def __iter__(self) -> Iterator[Layer | StateLayer]:
        for i in range(len(self)):
            if self._cache.config.layers[i].is_recurrent:
                found = self._cache.state_layer(i)
                own = found.states if found.place is None else {n: x[:, found.place] for n, x in found.states.items()}
                yield dataclasses.replace(found, states=own, place=None)
                continue
            layer = self._cache.layer(i)
            if self._cache.config.owner(i) != i:
                yield dataclasses.replace(layer, pool=None, place=None, residual=None)  # type: ignore[arg-type]
            else:
                yield self._split(layer)

    def _split(self, layer: Layer) -> Layer:
        """Returns a layer with a pool of its own, a copy of its slice of a stack's."""
        if layer.place is None:
            return layer
        residual = None if layer.residual is None else self._split(layer.residual)
        return dataclasses.replace(layer, pool=self._cache.pool(layer.number), place=None, residual=residual)

    def tree_flatten(self) -> tuple[tuple[Layer | StateLayer, ...], None]:
        return tuple(self), None

    @classmethod
    def tree_unflatten(cls, _: None, layers: tuple[Layer | StateLayer, ...]) -> Any:
        return tuple(layers)


def _mark_failures(tables: BlockTables, layer: BlockTables) -> BlockTables:
    """Returns a group's tables, with the rows marked whose step a layer has reverted."""
    if layer is tables:
        return tables
    newly = layer.failed & ~tables.failed
    fields = ("lengths", "new", "failed", "wanted", "needed")
    changes = {name: jnp.where(newly, getattr(layer, name), getattr(tables, name)) for name in fields}
    return dataclasses.replace(tables, **changes)


def _merge_slots(slots: StateSlots | None, layer: StateSlots) -> StateSlots | None:
    """Returns the slots without the snapshots that a layer could not make, and with the inputs of its guesses."""
    if slots is None:
        return None
    if slots.guesses is not None and layer.guesses is not None:
        inputs = slots.guesses.inputs | layer.guesses.inputs
        slots = dataclasses.replace(slots, guesses=dataclasses.replace(slots.guesses, inputs=inputs))
    if slots.snapshots is None or layer.snapshots is slots.snapshots:
        return slots
    assert layer.snapshots is not None
    made = jnp.where(layer.snapshots == NULL_SLOT, NULL_SLOT, slots.snapshots)
    return dataclasses.replace(slots, snapshots=made)


def _describe(layer: Any) -> str:
    if not isinstance(layer, Layer | StateLayer):
        return f"a {type(layer).__name__}"
    return f"layer {layer.number} of a cache of {layer.config.num_layers} layers"
