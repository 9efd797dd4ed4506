"""The index of a `PrefixCache`: full blocks of tokens, chained. Plain Python on the host.

A cache says of each block it keeps which node it keeps it for, by the node's label; the index says what the label
stands for. No label is given twice, so whatever cache is handed in, a block is taken for what it holds or not at all:
nothing depends on the index having heard of everything that became of the cache. Where the two differ (a call was cut
off, or this is an older cache), `follow` believes the cache.

What an exception can cut off, at any instruction, is only ever half of what follows from `nodes`, each change of which
is one instruction. `settled` says that nothing was cut off; `mend` computes what follows anew.
"""

import collections
import dataclasses
import hashlib
import itertools
import secrets
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxkv._core.config.cache_config import CacheConfig
from jaxkv._core.state.state import NULL_BLOCK
from jaxkv._files.blocks import Block, BlockFiles

# Unlike those of any other index of this process and, since they start anywhere, of the one that a cache was saved by.
_numbers = itertools.count(secrets.randbits(31))


def _new_label() -> int:
    return next(_numbers) % (2**31 - 1) + 1


def digest_of(before: bytes, what: Any) -> bytes:
    """`[20]`: of a chain that ends with `what`, tokens or whose they are, behind a chain of the digest `before`."""
    return hashlib.blake2b(before + repr(what).encode(), digest_size=20).digest()


@dataclasses.dataclass(eq=False)
class Node:
    """One full block of tokens behind everything that stands before it."""

    parent: "Node | None"  # None: a root, which stands for what is the same for all tokens, and has none itself
    tokens: tuple[int, ...]
    hash: Any  # of the whole chain up to here
    blocks: list[int]  # for each group of layers the physical block; NULL_BLOCK: there is none
    host: list[Any]  # for each group its contents in host memory, or None
    digest: bytes  # of the whole chain, too: the same in every process, and no two chains have the same
    identity: Hashable  # whose it is: a root's
    depth: int = -1  # blocks before it
    num_children: int = 0
    label: int = dataclasses.field(default_factory=_new_label)

    @property
    def is_hollow(self) -> bool:
        """Whether nothing is left of it but its place in a chain."""
        return not any(self.blocks) and not any(x is not None for x in self.host)

    def has(self, group: int) -> bool:
        """Whether its keys and values are there, on the device or the host."""
        return self.blocks[group] != NULL_BLOCK or self.host[group] is not None

    def block(self, group: int) -> Block:
        """What a file of it is of."""
        assert self.parent is not None
        return Block(self.digest, self.parent.digest, self.tokens, group, self.depth, self.identity)


class PrefixIndex:
    """Nodes found by the hash of their chain, in the order of their last use.

    A hash only says where to look: a node is taken for what was asked when its tokens and its parent are the same. So
    a collision costs a comparison, and never gives another prompt's keys and values.
    """

    def __init__(
        self, config: CacheConfig, spill_bytes: int, hash_function: Callable[[Any], Hashable],
        disk: BlockFiles | None = None, owner: bytes = b"",
    ):  # fmt: skip
        self.block_size, self.spill_bytes, self.hash_function = config.block_size, spill_bytes, hash_function
        self.disk, self.owner = disk, owner  # where blocks go that leave the host; who computes them, for digests
        self.block_bytes = [config.bytes_per_group_block(g) for g in range(len(config.groups))]
        # By label; the least recently used first; of those used together, the ends of chains first.
        self.nodes: collections.OrderedDict[int, Node] = collections.OrderedDict()
        self.pins: dict[Node, int] = {}  # how often each is pinned; never changed, only replaced
        # For each group and block the label of what it holds, as the cache says; 0: not kept.
        self.kept = [np.zeros(n + 1, np.int32) for n in config.group_blocks]
        # What follows from these.
        self.settled = True
        self.buckets: dict[Hashable, list[Node]] = {}
        self.num_hosted = [0] * len(self.kept)  # for each group, nodes with contents in host memory
        # Held by their chains alone, so that a salt used once leaves nothing behind.
        self.roots: weakref.WeakValueDictionary[Any, Node] = weakref.WeakValueDictionary()

    # Chains of tokens.

    def root(self, identity: Hashable) -> Node:
        """Where the chains of one identity start; chains of different identities never meet."""
        root = self.roots.get(identity)
        if root is None:
            digest = digest_of(self.owner, identity)
            root = self.roots[identity] = Node(None, (), self.hash_function(identity), [], [], digest, identity)
        return root

    def walk(self, root: Node, tokens: Sequence[int]) -> list[Node]:
        """The longest known chain of full blocks that `tokens` begins with."""
        chain, node = [], root
        for block in self.split(tokens):
            found = self._child(node, block)
            if found is None:
                break
            chain.append(found)
            node = found
        return chain

    def extend(self, root: Node, tokens: Sequence[int]) -> list[Node]:
        """The chain of all full blocks of `tokens`; new nodes are hollow, until `hold` puts something into them."""
        self.settled = False
        chain, node = [], root
        for block in self.split(tokens):
            found = self._child(node, block)
            if found is None:
                groups = len(self.kept)
                found = Node(
                    node, block, self.hash_function((node.hash, block)), [NULL_BLOCK] * groups, [None] * groups,
                    digest_of(node.digest, block), node.identity, node.depth + 1,
                )  # fmt: skip
                self.nodes[found.label] = found
                self._link(found)
            chain.append(found)
            node = found
        return chain

    def usable(self, chain: Sequence[Node], needed: Callable[[int], Sequence[np.ndarray]]) -> int:
        """How many nodes of a chain a row can adopt: the most of which every group has what the next token sees.

        Args:
          needed: gives for each group which of so many blocks a row needs of it.
        """
        present = [np.array([node.has(g) for node in chain], bool) for g in range(len(self.kept))]
        for count in range(len(chain), 0, -1):
            if all(p[columns].all() for p, columns in zip(present, needed(count), strict=True)):
                return count
        return 0

    def touch(self, chain: Iterable[Node]) -> None:
        """Note that a chain was used just now."""
        for node in reversed(list(chain)):
            self.nodes.move_to_end(node.label)

    def split(self, tokens: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """The full blocks of `tokens`."""
        size = self.block_size
        return (tuple(tokens[i : i + size]) for i in range(0, len(tokens) - size + 1, size))

    # What they hold.

    def follow(self, kept: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Have the nodes hold what a cache says; the labels of `kept` without those that stand for nothing here."""
        self.mend()
        if all(map(np.array_equal, kept, self.kept)):
            return [labels.copy() for labels in self.kept]
        known = [np.where(np.isin(labels, np.fromiter(self.nodes, np.int64)), labels, 0) for labels in kept]
        self.hold(known)
        return [labels.copy() for labels in known]

    def hold(
        self, kept: Sequence[np.ndarray], *, hosted: Iterable[tuple[Node, int, Any]] = (), chain: Sequence[Node] = ()
    ) -> None:
        """Have the nodes hold the blocks that `kept` says, and for each `(node, group, contents)` these on the host.

        What is on the device is held no longer on the host. Nodes that hold nothing then are forgotten. `chain` is what
        was used just now.
        """
        self.settled = False
        changed = [
            (group, block, int(old[block]), int(new[block]))
            for group, (old, new) in enumerate(zip(self.kept, kept, strict=True))
            for block in np.flatnonzero(old != new).tolist()
        ]
        left = [self.nodes[label] for _, _, label, _ in changed if label]
        for group, _, label, _ in changed:
            if label:
                self.nodes[label].blocks[group] = NULL_BLOCK
        for node, group, contents in hosted:
            self._host(node, group, contents)
        for group, block, _, label in changed:
            if label:
                self.nodes[label].blocks[group] = block
                self._host(self.nodes[label], group, None)
        self.kept = [labels.copy() for labels in kept]
        self.touch(chain)
        self._spare_host()
        for node in (*left, *reversed(chain)):
            self._prune(node)
        self.settled = True

    @property
    def host_bytes(self) -> int:
        """What the nodes hold in host memory."""
        return sum(n * size for n, size in zip(self.num_hosted, self.block_bytes, strict=True))

    def bytes_held(self, nodes: Iterable[Node]) -> int:
        """What some of them hold there."""
        sizes = self.block_bytes
        return sum(size for node in nodes for x, size in zip(node.host, sizes, strict=True) if x is not None)

    def mend(self) -> None:
        """Make good what an exception has cut off: compute anew what follows from the nodes and the labels."""
        if self.settled:
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
        self._spare_host()
        for node in list(self.nodes.values()):
            self._prune(node)
        self.settled = True

    def check(self) -> None:
        """Raise AssertionError unless what follows from the nodes is what is noted."""
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

    # The parts. Each leaves the index unsettled if it is cut off.

    def _link(self, node: Node) -> None:
        assert node.parent is not None
        node.parent.num_children += 1
        self.buckets.setdefault(node.hash, []).append(node)

    def _host(self, node: Node, group: int, contents: Any) -> None:
        self.num_hosted[group] += (contents is not None) - (node.host[group] is not None)
        node.host[group] = contents

    def _spare_host(self) -> None:
        """Hold `spill_bytes` in host memory at the most: the least recently used goes, to the disk if there is one."""
        for node in list(self.nodes.values()) if self.host_bytes > self.spill_bytes else ():
            if node not in self.pins:
                for group, contents in enumerate(node.host):
                    if self.disk is not None and contents is not None:
                        self.disk.write(node.block(group), contents)
                    self._host(node, group, None)
                self._prune(node)
                if self.host_bytes <= self.spill_bytes:
                    break

    def _prune(self, node: Node) -> None:
        """Forget a hollow node that no chain goes through, and those before it that nothing needs any more."""
        while node.label in self.nodes and node.is_hollow and not (node.num_children or node in self.pins):
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


def needed(config: CacheConfig, count: int) -> list[np.ndarray]:
    """For each group which of `count` blocks the token behind them sees: first ones that stay, and the last."""
    length = count * config.block_size
    firsts = [(sinks, config.first_seen(g, length)) for g, sinks in enumerate(config.group_sinks)]
    return [np.r_[: min(sinks, first), first:count] for sinks, first in firsts]
