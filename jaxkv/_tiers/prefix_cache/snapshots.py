"""The snapshots of a `PrefixCache`: states of recurrent layers at ends of blocks. Only there can a prompt go on.

They lie beside the cache, as arrays of their own: an evicted or interrupted one is gone, and nothing else has changed.
"""

import dataclasses
import functools
import heapq
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from jaxkv._core.blocks.state_slots import put_row_states, read_row_states
from jaxkv._core.cache.cache import Cache
from jaxkv._core.config.cache_config import CacheConfig
from jaxkv._core.state.state_slots import NULL_SLOT
from jaxkv._tiers.prefix_cache.node import Node

SHARE = 0.1  # of the cache's bytes, by default
LEAST, LEAST_BYTES = 4, 2**26  # snapshots for each row of a small cache, as far as they take no more
RECENT = 0.1  # of the snapshots, which stay whatever they save: those that a running request is likely to come back to


@dataclasses.dataclass(eq=False, frozen=True)
class Snapshot:
    """The states after a node's tokens."""

    node: Node
    states: Any  # [1, ...] of each array of each layer
    before: tuple[int, ...]  # labels of earlier nodes of the chain that had snapshots, the nearest first
    floor: float  # `Snapshots.floor` at its last use
    used: int  # `Snapshots.clock` at its last use


class Snapshots:
    """Snapshots by the labels of their nodes, as many as fit into `most_bytes`.

    The last used stay. Of the others those go first that lack their blocks, then those behind which the chain went on,
    if prompts do not part there, then those that save the fewest tokens: what a prompt would compute from the snapshot
    before, plus what was saved least when it was last used, so that old ones lose their worth (GreedyDual).
    """

    def __init__(self, config: CacheConfig, most_bytes: float | None):
        self.block_size, self.state_bytes = config.block_size, config.bytes_per_state
        if most_bytes is None:
            least = max(2 * self.state_bytes, min(LEAST * config.max_seqs * self.state_bytes, LEAST_BYTES))
            most_bytes = max(SHARE * config.bytes, least)
        self.most = int(most_bytes) // self.state_bytes
        self.held: dict[int, Snapshot] = {}  # never changed, only replaced
        self.floor, self.clock = 0.0, 0

    @property
    def bytes(self) -> int:
        """The bytes of all snapshots."""
        return len(self.held) * self.state_bytes

    def has(self, node: Node) -> bool:
        """Tells whether there are states after a node's tokens."""
        return node.label in self.held

    def use(self, node: Node) -> Any:
        """Returns the states after a node's tokens, and records their use."""
        found, self.clock = self.held[node.label], self.clock + 1
        self.held = self.held | {node.label: dataclasses.replace(found, floor=self.floor, used=self.clock)}
        return found.states

    def add(self, found: Mapping[Node, Any], nodes: Mapping[int, Node], pinned: Iterable[Node]) -> None:
        """Adds states by their nodes, and drops those worth least.

        Args:
          nodes: all nodes of the index, by label. pinned: nodes whose snapshots stay.
        """
        held, self.clock = dict(self.held), self.clock + 1
        for node, states in found.items():
            before = tuple(earlier.label for earlier in node.back() if earlier.label in held and earlier is not node)
            held[node.label] = Snapshot(node, states, before, self.floor, self.clock)
        if len(held) > self.most:
            self.floor = self._drop(held, nodes, {node.label for node in pinned})
        self.held = held

    def move_to_host(self, nodes: Mapping[int, Node]) -> None:
        """Moves the states to host memory, of nodes that have blocks; drops the others."""
        whole = {label: x for label, x in self.held.items() if nodes.get(label) is x.node and not x.node.is_hollow}
        states = jax.device_get({label: x.states for label, x in whole.items()})
        self.held = {label: dataclasses.replace(x, states=states[label]) for label, x in whole.items()}

    def _drop(self, held: dict[int, Snapshot], nodes: Mapping[int, Node], stay: set[int]) -> float:
        """Drops snapshots until they fit. Returns the new `floor`."""
        recent = max(1, min(4, self.most // 4), int(RECENT * self.most))
        stay = stay.union(heapq.nlargest(recent, held, key=lambda label: held[label].used))
        floor = self.floor
        while len(held) > self.most:
            passed = {self._before(held, label) for label in held}

            def rank(label: int, passed: set[int | None] = passed) -> tuple[bool, bool, bool, float]:
                node = held[label].node
                is_whole = nodes.get(label) is node and not node.is_hollow
                return label in stay, is_whole, node.is_fork or label not in passed, self._worth(held, label)

            least = min(held, key=rank)
            if all(rank(least)[1:3]):
                floor = max(floor, self._worth(held, least))
            del held[least]
        return floor

    def _before(self, held: Mapping[int, Snapshot], label: int) -> int | None:
        """Returns the nearest earlier snapshot of a chain, if there is one."""
        return next((before for before in held[label].before if before in held), None)

    def _worth(self, held: Mapping[int, Snapshot], label: int) -> float:
        before = self._before(held, label)
        depth = -1 if before is None else held[before].node.depth
        return held[label].floor + (held[label].node.depth - depth) * self.block_size


def read_states(cache: Cache, row: int) -> Any:
    """Returns the present states of a row, `[1, ...]` of each array."""
    return _read_row(cache.replace(pools=()), np.array([row], np.int32))


def put_states(cache: Cache, row: int, states: Any) -> Cache:
    """Returns a cache in which a row that holds tokens has these states."""
    changed = _put_row(cache.replace(pools=()), np.array([row], np.int32), states)
    return changed.replace(pools=cache.pools)


_read_row, _put_row = jax.jit(read_row_states), jax.jit(put_row_states)


@jax.jit
def _read_slot(states: Any, slot: jax.Array) -> Any:
    return jax.tree.map(lambda x: x[slot][None], states)


def find_snapshots(cache: Cache, row: int, count: int) -> dict[int, Any]:
    """Returns the states that a row's first `count` tokens have snapshots of, by their number of tokens: those of
    `CacheConfig.snapshot_every`, and of the row's end if that is the end of a block."""
    config, slots = cache.config, cache.state_slots
    if slots is None:
        return {}
    found, length = {}, int(cache.lengths[row])
    if slots.snapshots is not None and config.snapshot_every is not None:
        held = np.asarray(slots.snapshots[row])[: min(count, length) // config.snapshot_every]
        for column in np.flatnonzero(held != NULL_SLOT).tolist():
            found[(column + 1) * config.snapshot_every] = functools.partial(_read_slot, cache.states, held[column])
    if length and length <= count and length % config.block_size == 0:
        found[length] = functools.partial(read_states, cache, row)
    return found
