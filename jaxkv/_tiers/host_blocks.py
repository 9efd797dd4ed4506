"""The contents of rows, in host memory."""

import dataclasses
import functools
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from jaxkv._core.blocks.block_copy import pad_size
from jaxkv._core.blocks.row_snapshots import RowSnapshots
from jaxkv._core.state.state import Pool
from jaxkv._core.state.static_fields import register_export


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class HostBlocks:
    """The contents of rows, in host memory. Made by `swap_out`; `host[i]` is one of the rows.

    A block that several rows share is stored once. Arrays are padded to a power of two, so that programs compile for
    few shapes.

    >>> import jaxkv
    >>> sizes = dict(num_layers=1, num_kv_heads=2, head_dim=8, max_seqs=2, max_seq_len=64)
    >>> cache = jaxkv.init(jaxkv.CacheConfig.uniform(**sizes, num_blocks=4))
    >>> cache, host = jaxkv.swap_out(jaxkv.extend(cache, [20, 5]), [0, 1])
    >>> len(host), host[1].num_tokens, host[1].lengths.tolist()
    (2, 5, [5])
    """

    lengths: np.ndarray  # i32[n]: tokens of each row, evicted ones included
    # For each group; of one that evicts by heads n is K * n, head row by head row: see `head_rows`.
    first: tuple[np.ndarray, ...]  # i32[n]: logical index of the row's first block after `group_sink_blocks`
    count: tuple[np.ndarray, ...]  # i32[n]: blocks of the row
    order: tuple[np.ndarray, ...]  # i32[m]: indices into the B blocks, row by row, in the order of their tables
    held: tuple[np.ndarray | None, ...]  # i32[n]: tokens left; None: all, in a group that does not evict
    thinned: tuple[np.ndarray | None, ...]  # i32[n]: as in `BlockTables`
    pools: tuple[Pool | None, ...]  # the B blocks of each layer; None for a layer that shares another's
    # The rows' states [n, ...] of each layer, by name; None for an attention layer, nothing without recurrent layers.
    states: tuple[dict[str, Any] | None, ...] = ()
    snapshots: RowSnapshots | None = None  # None: the rows have none
    groups: tuple[tuple[int, ...], ...] = dataclasses.field(metadata={"static": True})
    retentions: tuple[str, ...] = dataclasses.field(metadata={"static": True})  # of each group, in words
    rotates: tuple[bool, ...] = dataclasses.field(metadata={"static": True})  # of each layer: are its heads rotated?
    kinds: tuple[str, ...] = dataclasses.field(metadata={"static": True})  # of each layer: bytes do not tell
    # Whether the cache was committed to its devices. What lies in pinned memory always is, and so would be whatever a
    # program makes of it: of a cache that was not, a program is given NumPy arrays.
    committed: bool = dataclasses.field(default=True, metadata={"static": True})

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def blocks(self) -> tuple[Any, ...]:
        """`[B, 2, K, block_size, D]` for each layer, or None for a layer that shares another's."""
        return tuple(None if pool is None else pool.kv for pool in self.pools)

    def __getitem__(self, i: int) -> "HostBlocks":
        if not 0 <= operator.index(i) < len(self):
            raise IndexError(f"There are {len(self)} rows, so there is no row {i!r} among them.")
        pools, lines, orders = list(self.pools), [], []
        for layers, count, order in zip(self.groups, self.count, self.order, strict=True):
            lines.append(np.arange(i, len(count), len(self)))
            end = np.cumsum(count)
            named = np.concatenate([order[end[line] - count[line] : end[line]] for line in lines[-1]])
            blocks, own = np.unique(named, return_inverse=True)
            orders.append(pad(own))
            for layer in layers:
                pools[layer] = jax.tree.map(functools.partial(_pick, pad(blocks)), pools[layer])

        def select_row(several: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(x if x is None else x[own] for x, own in zip(several, lines, strict=True))

        return dataclasses.replace(
            self,
            lengths=self.lengths[i : i + 1],
            first=select_row(self.first),
            count=select_row(self.count),
            order=tuple(orders),
            held=select_row(self.held),
            thinned=select_row(self.thinned),
            pools=tuple(pools),
            states=jax.tree.map(functools.partial(_pick, np.array([i])), self.states),
            snapshots=None if self.snapshots is None else self.snapshots.select(i),
        )

    def drop_shared(
        self, num_blocks: int, first_retained: Sequence[int], sink_blocks: Sequence[int]
    ) -> tuple["HostBlocks", list[int]]:
        """Returns one row without the contents of blocks that another row of a cache holds, and their number in each
        group.

        `order` then names those blocks behind the ones in `pools`.

        Args:
          num_blocks: the leading blocks that both rows have in common.
          first_retained: for each group the first block that the other row certainly holds, behind its
            `sink_blocks`.
        """
        pools, orders, dropped = list(self.pools), [], []
        groups = zip(self.groups, self.count, self.order, self.first, first_retained, sink_blocks, strict=True)
        for layers, count, order, first, retained_from, num_sinks in groups:
            number = np.arange(int(count.sum()))
            ahead = min(len(number), num_sinks)
            block = np.where(number < ahead, number, number - ahead + int(first[0]))
            is_shared = (block < num_blocks) & ((block < ahead) | (block >= retained_from))
            moved, own = np.unique(order[: len(number)][~is_shared], return_inverse=True)
            blocks = pad(moved)
            named = np.empty(len(number), np.int32)
            named[~is_shared], named[is_shared] = own, len(blocks) + np.arange(np.count_nonzero(is_shared))
            orders.append(pad(named))
            dropped.append(int(np.count_nonzero(is_shared)))
            for layer in layers if dropped[-1] else ():
                pools[layer] = jax.tree.map(functools.partial(_pick, blocks), pools[layer])
        if not any(dropped):
            return self, dropped
        orders = [new if n else old for new, n, old in zip(orders, dropped, self.order, strict=True)]
        return dataclasses.replace(self, order=tuple(orders), pools=tuple(pools)), dropped

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all rows."""
        return int(self.lengths.sum())

    @property
    def bytes(self) -> int:
        """The bytes of all blocks, states and snapshots, scales included."""
        snapshots = () if self.snapshots is None else self.snapshots.states
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((self.pools, self.states, snapshots)))

    def __repr__(self) -> str:
        rows = f"{len(self)} row{'s' * (len(self) != 1)}"
        return f"HostBlocks({self.num_tokens} tokens of {rows}, {self.bytes} bytes)"


_DATA = [field.name for field in dataclasses.fields(HostBlocks) if not field.metadata.get("static")]
_STATIC = [field.name for field in dataclasses.fields(HostBlocks) if field.metadata.get("static")]


def _flatten(host: HostBlocks) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
    def free(x: Any) -> Any:
        return np.asarray(x) if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) else x

    data = {name: getattr(host, name) for name in _DATA}
    if not host.committed:
        data |= {name: jax.tree.map(free, data[name]) for name in ("pools", "states", "snapshots")}
    keyed = [(jax.tree_util.GetAttrKey(name), x) for name, x in data.items()]
    return keyed, tuple(getattr(host, name) for name in _STATIC)


def _unflatten(static: tuple[Any, ...], data: Iterable[Any]) -> HostBlocks:
    return HostBlocks(**dict(zip(_DATA, data, strict=True)), **dict(zip(_STATIC, static, strict=True)))


jax.tree_util.register_pytree_with_keys(HostBlocks, _flatten, _unflatten)
register_export(HostBlocks)


def order_unshared(counts: Iterable[np.ndarray]) -> tuple[np.ndarray, ...]:
    """Returns `order` for unshared blocks, from `counts` i32[n] of each group: the blocks of each row."""
    return tuple(pad(np.arange(count.sum(), dtype=np.int32)) for count in counts)


def pad(blocks: np.ndarray) -> np.ndarray:
    """Returns `i32[...]`: these numbers, padded with 0 to a power of two."""
    padded = np.full(pad_size(len(blocks)), 0, np.int32)
    padded[: len(blocks)] = blocks
    return padded


def _pick(places: np.ndarray, x: Any) -> Any:
    if isinstance(x, jax.Array) and not x.is_fully_addressable:  # each process picks from its own shards
        return _picker(x.sharding)(jax.device_put(x, jax.memory.Space.Device), places)
    picked = np.asarray(x)[places]
    return jax.device_put(picked, x.sharding) if isinstance(x, jax.Array) else picked


@functools.lru_cache(maxsize=16)
def _picker(sharding: jax.sharding.Sharding) -> Any:
    return jax.jit(lambda x, places: x[places], out_shardings=sharding)
