"""The index of a `PrefixCache`: full blocks of tokens, chained. Plain Python on the host.

A cache records the label of the node that it keeps each block for; the index maps labels to nodes. No label is used
twice, so for any cache that is passed in, a block is taken for its contents or not at all: the index need not know all
changes of the cache. Where the two differ (after an interrupted call, or for an older cache), `follow` believes the
cache.

An exception at any instruction can only interrupt updates of state derived from `nodes`, each change of which is one
instruction. `soundness` tells that none was interrupted; `mend` recomputes the derived state.
"""

import collections
import functools
import hashlib
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxkv._core.config.cache_config import CacheConfig
from jaxkv._core.state.interrupts import Soundness
from jaxkv._core.state.state import NULL_BLOCK
from jaxkv._files.blocks import BlockFiles
from jaxkv._tiers.prefix_cache.ends import Ends, can_serve, find_needed, no_disk
from jaxkv._tiers.prefix_cache.node import Node
from jaxkv._tiers.prefix_cache.snapshots import Snapshots

Blocks = tuple[tuple[int, ...], ...]  # the tokens of full blocks
# Pins of each chain by its last node: for each the blocks behind it that were to be pinned too, but were not there.
Pins = dict[Node, tuple[Blocks, ...]]


def is_on_disk(disk: BlockFiles, node: Node, group: int) -> bool:
    """Tells whether a node's block of a group has a file, as far as is known."""
    return disk.has_seen(node.block(group))


def digest_of(before: bytes, what: Any) -> bytes:
    """Returns the 20-byte digest of a chain: `what`, tokens or an identity, after a chain of digest `before`."""
    return hashlib.blake2b(before + repr(what).encode(), digest_size=20).digest()


class PrefixIndex:
    """Nodes by the hash of their chain, and the ends of chains in the order of their last use.

    A hash is only a hint: a node matches if its tokens and its parent are the same. So a collision costs a comparison,
    and never gives another prompt's keys and values.
    """

    def __init__(
        self,
        config: CacheConfig,
        spill_bytes: int,
        hash_function: Callable[[Any], Hashable],
        disk: BlockFiles | None = None,
        owner: bytes = b"",
        snapshots: Snapshots | None = None,
    ):
        self.config, self.block_size = config, config.block_size
        self.spill_bytes, self.hash_function = spill_bytes, hash_function
        self.disk, self.owner = disk, owner  # the tier below the host; the model's name, for digests
        self.snapshots = snapshots  # of recurrent layers; None: there are none
        self.block_bytes = [config.bytes_per_group_block(g) for g in range(len(config.groups))]
        self.nodes: dict[int, Node] = {}  # by label
        self.ends = Ends(
            config, no_disk if disk is None else functools.partial(is_on_disk, disk)
        )  # where prompts may go on
        self.pins: Pins = {}  # never changed, only replaced
        self._pinned: tuple[Pins, list[set[Node]]] = (self.pins, [set() for _ in config.groups])
        # For each group and block the label that the cache records; 0: not kept.
        self.kept = [np.zeros(n + 1, np.int32) for n in config.group_blocks]
        # State derived from these.
        self.soundness = Soundness()
        self.buckets: dict[Hashable, list[Node]] = {}
        self.num_hosted = [0] * len(self.kept)  # for each group, nodes with contents in host memory
        # Held by their chains alone, so that a salt used once leaves nothing behind.
        self.roots: weakref.WeakValueDictionary[Any, Node] = weakref.WeakValueDictionary()

    # Chains of tokens.

    def root(self, identity: Hashable) -> Node:
        """Returns the root of the chains of an identity; different identities share no nodes."""
        root = self.roots.get(identity)
        if root is None:
            digest = digest_of(self.owner, identity)
            root = self.roots[identity] = Node(None, (), self.hash_function(identity), [], [], digest, identity)
        return root

    def walk(self, root: Node, tokens: Sequence[int]) -> list[Node]:
        """Returns the longest known chain of full blocks that is a prefix of `tokens`."""
        chain, node = [], root
        for block in self.split(tokens):
            found = self._child(node, block)
            if found is None:
                break
            chain.append(found)
            node = found
        return chain

    def look(self, root: Node, tokens: Sequence[int]) -> list[Node]:
        """Does `walk` for a lookup: where a prompt ends, the next may end too."""
        chain = self.walk(root, tokens)
        self.ends.clock += 1
        if chain:
            chain[-1].is_fork |= chain[-1].num_children > 0
            chain[-1].is_proven = True
        return chain

    def extend(self, root: Node, tokens: Sequence[int]) -> list[Node]:
        """Returns the nodes of all full blocks of `tokens`, behind a root or another node; new nodes are hollow until
        `hold` fills them."""
        self.soundness.begin()
        chain, node = [], root
        for block in self.split(tokens):
            found = self._child(node, block)
            if found is None:
                groups = len(self.kept)
                found = Node(
                    node,
                    block,
                    self.hash_function((node.hash, block)),
                    [NULL_BLOCK] * groups,
                    [None] * groups,
                    digest_of(node.digest, block),
                    node.identity,
                    node.depth + 1,
                )
                node.is_fork |= node.num_children > 0
                self.nodes[found.label] = found
                self._link(found)
            chain.append(found)
            node = found
        return chain

    def usable(self, chain: Sequence[Node]) -> int:
        """Returns how many nodes of a chain a row can adopt, so that every group has what the next token sees, and
        recurrent layers have their states."""
        present = [np.array([node.has(g) for node in chain], bool) for g in range(len(self.kept))]
        found = can_serve(self.config, present)
        if self.snapshots is not None:
            found[1:] &= np.array([self.snapshots.has(node) for node in chain], bool)
        return int(np.flatnonzero(found)[-1])

    def use(self, chain: Sequence[Node]) -> None:
        """Records the use of a chain."""
        with self.soundness:
            self._use(chain)

    def split(self, tokens: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Yields the full blocks of `tokens`."""
        size = self.block_size
        return (tuple(tokens[i : i + size]) for i in range(0, len(tokens) - size + 1, size))

    def can_go_on(self, node: Node | None) -> bool:
        """Tells whether prompts may go on after a node, so that a longer chain may begin behind it."""
        return node is not None and self.nodes.get(node.label) is node and node.label in self.ends.order

    # What they hold.

    def follow(self, kept: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Updates the nodes from a cache; returns the labels of `kept` without those unknown here."""
        self.mend()
        if all(map(np.array_equal, kept, self.kept)):
            return [labels.copy() for labels in self.kept]
        known = [np.where(np.isin(labels, np.fromiter(self.nodes, np.int64)), labels, 0) for labels in kept]
        self.hold(known)
        return [labels.copy() for labels in known]

    def hold(
        self,
        kept: Sequence[np.ndarray],
        *,
        hosted: Iterable[tuple[Node, int, Any]] = (),
        chain: Sequence[Node] = (),
        pruned: Sequence[Node] = (),
        after: Node | None = None,
    ) -> None:
        """Updates the nodes: blocks of `kept` on the device, and each `(node, group, contents)` on the host.

        Blocks on the device are dropped from the host. Nodes left empty are forgotten, those among `pruned` too.
        `chain` was used just now; it begins behind `after`, if that is given.
        """
        self.soundness.begin()
        changed = [
            (group, block, int(old[block]), int(new[block]))
            for group, (old, new) in enumerate(zip(self.kept, kept, strict=True))
            for block in np.flatnonzero(old != new).tolist()
        ]
        left = [self.nodes[label] for _, _, label, _ in changed if label]
        for group, _, label, _ in changed:
            if label:
                self.nodes[label].blocks[group] = NULL_BLOCK
        hosted = list(hosted)
        for node, group, contents in hosted:
            self._host(node, group, contents)
        for group, block, _, label in changed:
            if label:
                self.nodes[label].blocks[group] = block
                self._host(self.nodes[label], group, None)
        self.kept = [labels.copy() for labels in kept]
        found = (self.nodes[label] for *_, label in changed if label)
        self.ends.settle((*left, *found, *(node for node, *_ in hosted)))
        self._use(chain, after)
        self._spare_host(chain, after)
        for node in (*left, *reversed(chain), *reversed(pruned)):
            self._prune(node)
        self.soundness.end()

    @property
    def host_bytes(self) -> int:
        """The bytes of the nodes and snapshots in host memory."""
        states = 0 if self.snapshots is None else self.snapshots.host_bytes
        return states + sum(n * size for n, size in zip(self.num_hosted, self.block_bytes, strict=True))

    def keep_states(self, found: Mapping[Node, Any]) -> None:
        """Keeps states after the tokens of nodes. In host memory blocks make room for those that leave the device."""
        if self.snapshots is None or not found:
            return
        self.soundness.begin()
        self.snapshots.add(found, self.nodes, self.pinned_nodes, self.spill_bytes - self.count_pinned_bytes(()))
        self._spare_host()
        self.soundness.end()

    def recall_states(self, node: Node, chain: Sequence[Node]) -> bool:
        """Reads the states after a node's tokens from the disk to host memory, beside the blocks of a chain. Tells
        whether they are there."""
        assert self.snapshots is not None
        was_kept = self.soundness.is_kept
        self.soundness.begin()
        room = self.spill_bytes - self.count_pinned_bytes(chain)
        found = self.snapshots.recall(node, self.nodes, self.pinned_nodes, room)
        self._spare_host(chain)
        if was_kept:
            self.soundness.end()
        return found

    @property
    def pinned_nodes(self) -> set[Node]:
        """The nodes of which blocks are pinned, in whatever group."""
        return set[Node]().union(*self.pinned)

    def count_pinned_bytes(self, chain: Iterable[Node]) -> int:
        """Returns the bytes in host memory of a chain and of pinned nodes."""
        each = zip(self.pinned, self.block_bytes, strict=True)
        nodes = set(chain)
        return sum(size for g, (pinned, size) in enumerate(each) for n in nodes | pinned if n.host[g] is not None)

    @property
    def pinned(self) -> list[set[Node]]:
        """Returns, for each group, the nodes whose blocks are pinned: those that pinned chains need of it."""
        if self._pinned[0] is not (pins := self.pins):
            nodes: list[set[Node]] = [set() for _ in self.kept]
            for end in pins:
                for group, own in enumerate(self.find_needed(end.chain)):
                    nodes[group].update(own)
            self._pinned = (pins, nodes)
        return self._pinned[1]

    def pin(self, end: Node, tokens: Sequence[int]) -> None:
        """Notes a pin of `tokens`, of which the chain up to a node is there."""
        self.pins = self.pins | {end: (*self.pins.get(end, ()), self._blocks_behind(end, tokens))}

    def unpin(self, root: Node, tokens: Sequence[int]) -> bool:
        """Undoes a pin of `tokens`; returns False if there is none. Its last node is forgotten if it holds nothing any
        more: a pin outlives what a lost or renewed cache held."""
        for end in reversed(self.walk(root, tokens)):  # blocks inserted since the pin are behind its end
            pins, behind = [*self.pins.get(end, ())], self._blocks_behind(end, tokens)
            if behind in pins:
                break
        else:
            return False
        self.mend()
        self.soundness.begin()
        pins.remove(behind)
        left = self.pins | {end: tuple(pins)}
        self.pins = {node: its_pins for node, its_pins in left.items() if its_pins}
        self._prune(end)
        self.soundness.end()
        return True

    def _blocks_behind(self, end: Node, tokens: Sequence[int]) -> Blocks:
        """Returns the full blocks of tokens behind a node of their chain."""
        return tuple(self.split(tokens[(end.depth + 1) * self.block_size :]))

    def find_needed(self, chain: Sequence[Node]) -> list[list[Node]]:
        """Returns, for each group, the nodes whose blocks a row needs to go on after a chain."""
        return [[chain[i] for i in columns.tolist()] for columns in find_needed(self.config, len(chain))]

    def mend(self) -> None:
        """Repairs interrupted updates: recomputes the state derived from the nodes and the labels."""
        if self.soundness.is_kept:
            return
        self.buckets, self.num_hosted = {}, [0] * len(self.kept)
        for node in self.nodes.values():
            node.blocks, node.num_children = [NULL_BLOCK] * len(self.kept), 0
            assert node.parent is not None
            if node.depth == 0:
                node.parent.num_children = 0
        self.kept = [np.where(np.isin(labels, np.fromiter(self.nodes, np.int64)), labels, 0) for labels in self.kept]
        for node in self.nodes.values():
            self._link(node)
            for group, contents in enumerate(node.host):
                self.num_hosted[group] += contents is not None
        for group, labels in enumerate(self.kept):
            for block in np.flatnonzero(labels).tolist():
                self.nodes[int(labels[block])].blocks[group] = block
        self.ends.rebuild(self.nodes.values())
        self._spare_host()
        for node in list(self.nodes.values()):
            self._prune(node)
        self.soundness.end()

    def check(self) -> None:
        """Raises AssertionError unless the derived state follows from the nodes."""
        self.mend()
        for group, labels in enumerate(self.kept):
            blocks = sorted(n.blocks[group] for n in self.nodes.values() if n.blocks[group] != NULL_BLOCK)
            assert blocks == np.flatnonzero(labels).tolist(), f"group {group}: nodes {blocks}, labels {labels}"
            assert all(labels[n.blocks[group]] in (0, n.label) for n in self.nodes.values()), "each holds its own"
            hosted = sum(n.host[group] is not None for n in self.nodes.values())
            assert hosted == self.num_hosted[group], f"group {group}: {hosted} on the host, noted {self.num_hosted}"
        assert self.host_bytes <= self.spill_bytes, f"{self.host_bytes} bytes of the host are used"
        children = collections.Counter(node.parent for node in self.nodes.values())
        for node in self.nodes.values():
            assert node.num_children == children[node], "children are counted"
            assert node.parent and (not node.depth or node.parent.label in self.nodes), "chains are whole"
            assert node in self.buckets[node.hash], "every node is found"
            assert not node.is_hollow or node.num_children or node in self.pins, "what holds nothing is forgotten"
        assert sum(map(len, self.buckets.values())) == len(self.nodes), "every node is found once"
        assert all(n.label in self.nodes for n in self.pins), "what is pinned is there"
        self.ends.check(self.nodes.values())

    # Helpers. Each leaves the index unsettled if it is interrupted.

    def _link(self, node: Node) -> None:
        assert node.parent is not None
        node.parent.num_children += 1
        self.buckets.setdefault(node.hash, []).append(node)

    def _host(self, node: Node, group: int, contents: Any) -> None:
        self.num_hosted[group] += (contents is not None) - (node.host[group] is not None)
        node.host[group] = contents

    def _use(self, chain: Sequence[Node], after: Node | None = None) -> None:
        gone = None if after is None else self.ends.use_more(after, chain)
        if gone is None:
            gone = self.ends.use(chain if after is None else [*after.chain, *chain])
        for node, group in gone:
            if self.disk is not None:
                self.disk.spare(node.block(group))

    def _spare_host(self, chain: Sequence[Node] = (), after: Node | None = None) -> None:
        """Limits host memory to `spill_bytes`: the least needed blocks go, to the disk if there is one. Blocks that a
        chain needs stay."""
        if (excess := self.host_bytes - self.spill_bytes) <= 0:
            return
        chain = chain if after is None else [*after.chain, *chain]
        dropped, spared = (
            [],
            [pinned.union(own) for pinned, own in zip(self.pinned, self.find_needed(chain), strict=True)],
        )
        for node, group in self.ends.least_needed(range(len(self.kept))):
            if node.host[group] is not None and node not in spared[group]:
                dropped.append((node, group, self.ends.is_needed(node, group)))
                excess -= self.block_bytes[group]
                if excess <= 0:
                    break
        for node, group, is_needed in dropped:
            if self.disk is not None:
                self.disk.write(node.block(group), node.host[group], is_spare=not is_needed)
            self._host(node, group, None)
        self.ends.settle(node for node, *_ in dropped)
        for node, *_ in dropped:
            self._prune(node)

    def _prune(self, node: Node) -> None:
        """Forgets a hollow node that no chain goes through, and those before it that nothing needs any more."""
        while node.label in self.nodes and node.is_hollow and not (node.num_children or node in self.pins):
            self.ends.forget(node)
            bucket = self.buckets[node.hash]
            bucket.remove(node)
            if not bucket:
                del self.buckets[node.hash]
            del self.nodes[node.label]
            assert node.parent is not None  # roots are not among the nodes
            node.parent.num_children -= 1
            node = node.parent

    def _child(self, parent: Node, tokens: tuple[int, ...]) -> Node | None:
        for node in self.buckets.get(self.hash_function((parent.hash, tokens)), ()):
            if node.parent is parent and node.tokens == tokens:
                return node
        return None
