"""The snapshots of a `PrefixCache`: states of recurrent layers at ends of blocks. Only there can a prompt go on.

They lie beside the cache, as arrays of their own: an evicted or interrupted one is gone, and nothing else has changed.
From the device they go to host memory, and from there to the disk, each tier by the same ranking.
"""

import dataclasses
import functools
import heapq
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from jaxkv._core.blocks.slot_allocator import put_row_states, read_row_states
from jaxkv._core.cache.cache import Cache
from jaxkv._core.config.cache_config import CacheConfig
from jaxkv._core.state.multihost import read_local_shards
from jaxkv._core.state.state_slots import NULL_SLOT
from jaxkv._files.blocks import BlockFiles
from jaxkv._tiers.prefix_cache.node import Node

SHARE = 0.1  # of the cache's bytes, by default
LEAST, LEAST_BYTES = 4, 2**26  # snapshots for each row of a small cache, as far as they take no more
RECENT = 0.1  # of the snapshots, which stay whatever they save: those that a running request is likely to come back to
HOST_SHARE = 0.5  # of the host memory for blocks, which snapshots may take of it


@dataclasses.dataclass(eq=False, frozen=True)
class Snapshot:
    """The states after a node's tokens."""

    node: Node
    states: Any  # [1, ...] of each array of each layer
    before: tuple[bytes, ...]  # digests of earlier nodes of the chain that had snapshots, the nearest first
    floor: float  # `Snapshots.floor` at its last use
    used: int  # `Snapshots.clock` at its last use


Tier = dict[bytes, Snapshot]  # by the digests of nodes; never changed, only replaced


class Snapshots:
    """Snapshots by the digests of their nodes, as many on the device as fit into `most_bytes`, and in host memory as
    fit into their share of `spill_bytes`.

    The last used stay. Of the others those go first that lack their blocks, then those behind which the chain went on,
    if prompts do not part there, then those that save the fewest tokens: what a prompt would compute from the snapshot
    before, plus what was saved least when it was last used, so that old ones lose their worth (GreedyDual).
    """

    def __init__(
        self, config: CacheConfig, most_bytes: float | None, spill_bytes: float = 0, disk: BlockFiles | None = None
    ):
        self.block_size, self.state_bytes = config.block_size, config.bytes_per_state
        if most_bytes is None:
            least = max(2 * self.state_bytes, min(LEAST * config.max_seqs * self.state_bytes, LEAST_BYTES))
            most_bytes = max(SHARE * config.bytes, least)
        self.most, self.most_hosted = (
            int(most_bytes) // self.state_bytes,
            int(HOST_SHARE * spill_bytes) // self.state_bytes,
        )
        self.on_device: Tier = {}
        self.hosted: Tier = {}
        self.disk = disk
        self.floor, self.clock = 0.0, 0

    @property
    def device_bytes(self) -> int:
        """The bytes of the snapshots on the device."""
        return len(self.on_device) * self.state_bytes

    @property
    def host_bytes(self) -> int:
        """The bytes of the snapshots that have left the device for host memory."""
        return len(self.hosted) * self.state_bytes

    def has(self, node: Node) -> bool:
        """Tells whether there are states after a node's tokens, on the device or in host memory."""
        return self._find(node) is not None

    def is_on_disk(self, node: Node) -> bool:
        """Tells whether there is a file of the states after a node's tokens."""
        return self.disk is not None and self.disk.has(self._file(node))

    def use(self, node: Node) -> Any:
        """Returns the states after a node's tokens, and records their use."""
        found, self.clock = self._find(node), self.clock + 1
        assert found is not None
        used = {node.digest: dataclasses.replace(found, node=node, floor=self.floor, used=self.clock)}
        if node.digest in self.on_device:
            self.on_device = self.on_device | used
        else:
            self.hosted = self.hosted | used
        return found.states

    def add(self, found: Mapping[Node, Any], nodes: Mapping[int, Node], pinned: Iterable[Node], host_room: int) -> None:
        """Adds states by their nodes. Those worth least go to host memory, and from there to the disk.

        Args:
          nodes: all nodes of the index, by label. pinned: nodes whose snapshots stay.
          host_room: the bytes of host memory that snapshots may take at most.
        """
        on_device, stay = dict(self.on_device), {node.digest for node in pinned}
        self._add(on_device, found)
        floor, victims = self._drop(on_device, nodes, stay, self.most)
        self._host(victims, nodes, stay, host_room)
        self.on_device, self.floor = on_device, floor

    def recall(self, node: Node, nodes: Mapping[int, Node], pinned: Iterable[Node], host_room: int) -> bool:
        """Reads the states after a node's tokens from the disk to host memory. Tells whether they are there."""
        assert self.disk is not None
        contents = self.disk.read(self._file(node))
        if contents is None or not self._count_hosted(host_room):
            return False
        found: Tier = {}
        self._add(found, {node: contents})
        self._host(found, nodes, {node.digest, *(other.digest for other in pinned)}, host_room)
        return True

    def flush(self) -> None:
        """Writes files of all snapshots: the blocks of those whose nodes are gone may be on the disk."""
        assert self.disk is not None
        for snapshot in (*self.on_device.values(), *self.hosted.values()):
            if not self.disk.keep(self._file(snapshot.node)):
                self.disk.write(self._file(snapshot.node), jax.device_get(snapshot.states))

    def move_to_host(self, nodes: Mapping[int, Node]) -> None:
        """Moves the states of the device to host memory, of nodes that have blocks; drops the others."""
        whole = {digest: x for digest, x in self.on_device.items() if _is_whole(x, nodes)}
        states = read_local_shards({digest: x.states for digest, x in whole.items()})
        self.on_device = {digest: dataclasses.replace(x, states=states[digest]) for digest, x in whole.items()}

    # The parts.

    def _find(self, node: Node) -> Snapshot | None:
        found = self.on_device.get(node.digest) or self.hosted.get(node.digest)
        return found if found is not None and _is_same(found.node, node) else None

    def _file(self, node: Node) -> Any:
        assert self.disk is not None
        return node.block(self.disk.states_group)

    def _count_hosted(self, room: int) -> int:
        """Returns how many snapshots may lie in `room` bytes of host memory."""
        return min(self.most_hosted, room // self.state_bytes)

    def _add(self, tier: Tier, found: Mapping[Node, Any]) -> None:
        self.clock += 1
        for node, states in found.items():
            known = self.on_device.keys() | self.hosted.keys() | tier.keys()
            before = tuple(x.digest for x in node.back() if x.digest in known and x is not node)
            tier[node.digest] = Snapshot(node, states, before, self.floor, self.clock)

    def _host(self, found: Tier, nodes: Mapping[int, Node], stay: Collection[bytes], room: int) -> None:
        """Moves snapshots to host memory, and what is too much there to the disk. Drops those without blocks, if no
        disk may have these."""
        if self.disk is None:
            found = {digest: x for digest, x in found.items() if _is_whole(x, nodes)}
        if not found or (self.disk is None and not self._count_hosted(room)):
            return
        states = read_local_shards({digest: x.states for digest, x in found.items()})
        hosted = self.hosted | {digest: dataclasses.replace(x, states=states[digest]) for digest, x in found.items()}
        _, victims = self._drop(hosted, nodes, set(stay), self._count_hosted(room))
        for snapshot in victims.values():
            if self.disk is not None:
                self.disk.write(self._file(snapshot.node), snapshot.states)
        self.hosted = hosted

    def _drop(self, tier: Tier, nodes: Mapping[int, Node], stay: set[bytes], most: int) -> tuple[float, Tier]:
        """Drops snapshots of a tier until they fit. Returns the new `floor`, and those that were dropped."""
        recent, floor, victims = max(1, min(4, most // 4), int(RECENT * most)), self.floor, {}
        if len(tier) > most:
            stay = stay.union(heapq.nlargest(recent, tier, key=lambda digest: tier[digest].used))
        while len(tier) > most:
            passed = {self._find_before(tier, digest) for digest in tier}

            def rank(digest: bytes, passed: set[bytes | None] = passed) -> tuple[bool, bool, bool, float]:
                node = tier[digest].node
                is_end = node.is_fork or digest not in passed
                return digest in stay, _is_whole(tier[digest], nodes), is_end, self._worth(tier, digest)

            least = min(tier, key=rank)
            if all(rank(least)[1:3]):
                floor = max(floor, self._worth(tier, least))
            victims[least] = tier.pop(least)
        return floor, victims

    def _find_before(self, tier: Tier, digest: bytes) -> bytes | None:
        """Returns the nearest earlier snapshot of a chain, if there is one."""
        return next((before for before in tier[digest].before if before in tier), None)

    def _worth(self, tier: Tier, digest: bytes) -> float:
        before = self._find_before(tier, digest)
        depth = -1 if before is None else tier[before].node.depth
        return tier[digest].floor + (tier[digest].node.depth - depth) * self.block_size


def _is_whole(snapshot: Snapshot, nodes: Mapping[int, Node]) -> bool:
    """Tells whether the blocks of a snapshot's node are on the device or in host memory."""
    return nodes.get(snapshot.node.label) is snapshot.node and not snapshot.node.is_hollow


def _is_same(node: Node, other: Node) -> bool:
    """Tells whether two nodes stand for the same tokens behind the same tokens, of one identity: a node whose blocks
    were on disk alone comes back as another one."""
    if node is other:
        return True
    pairs = zip(node.back(), other.back(), strict=False)
    return node.depth == other.depth and node.identity == other.identity and all(a.tokens == b.tokens for a, b in pairs)


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
        row_slots = np.asarray(slots.snapshots[row])[: min(count, length) // config.snapshot_every]
        for column in np.flatnonzero(row_slots != NULL_SLOT).tolist():
            found[(column + 1) * config.snapshot_every] = functools.partial(_read_slot, cache.states, row_slots[column])
    if length and length <= count and length % config.block_size == 0:
        found[length] = functools.partial(read_states, cache, row)
    return found
