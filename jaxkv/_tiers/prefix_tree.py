"""The index of a `PrefixCache`: full blocks of tokens, chained. Plain Python on the host, no arrays."""

import collections
import dataclasses
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any


@dataclasses.dataclass(eq=False)
class Node:
    """One full block of tokens behind everything that stands before it."""

    parent: "Node | None"  # None: a root, which stands for what is the same for all tokens, and has none itself
    tokens: tuple[int, ...]
    hash: Any  # of the whole chain up to here
    blocks: list[int]  # for each group of layers the physical block; 0: there is none
    host: list[Any]  # for each group its contents in host memory, or None
    depth: int = -1  # blocks before it
    num_children: int = 0
    pins: int = 0

    @property
    def is_hollow(self) -> bool:
        """Whether nothing is left of it but its place in a chain."""
        return not any(self.blocks) and not any(x is not None for x in self.host)

    def has(self, group: int) -> bool:
        """Whether its keys and values are there, on the device or the host."""
        return self.blocks[group] != 0 or self.host[group] is not None


class PrefixTree:
    """Nodes found by the hash of their chain, in the order of their last use.

    A hash only says where to look: a node is taken for what was asked when its tokens and its parent are the same. So
    a collision costs a comparison, and never gives another prompt's keys and values.
    """

    def __init__(self, block_size: int, num_groups: int, hash_function: Callable[[Any], Hashable] = hash):
        self.block_size, self.num_groups, self.hash_function = block_size, num_groups, hash_function
        # Held by their chains alone, so that a salt used once leaves nothing behind.
        self.roots: weakref.WeakValueDictionary[Any, Node] = weakref.WeakValueDictionary()
        self.buckets: dict[Hashable, list[Node]] = {}
        # The least recently used first; of those used together, the ends of chains first.
        self.nodes: collections.OrderedDict[Node, None] = collections.OrderedDict()

    def root(self, identity: Hashable) -> Node:
        """Where the chains of one identity start; chains of different identities never meet."""
        root = self.roots.get(identity)
        if root is None:
            root = self.roots[identity] = Node(None, (), self.hash_function(identity), [], [])
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
        """The chain of all full blocks of `tokens`; new nodes are hollow."""
        chain, node = [], root
        for block in self.split(tokens):
            found = self._child(node, block)
            if found is None:
                found = Node(
                    node, block, self.hash_function((node.hash, block)), [0] * self.num_groups,
                    [None] * self.num_groups, node.depth + 1,
                )  # fmt: skip
                node.num_children += 1
                self.buckets.setdefault(found.hash, []).append(found)
                self.nodes[found] = None
            chain.append(found)
            node = found
        return chain

    def touch(self, chain: Iterable[Node]) -> None:
        """Note that a chain was used just now."""
        for node in reversed(list(chain)):
            self.nodes.move_to_end(node)

    def prune(self, node: Node) -> None:
        """Forget a hollow node that no chain goes through, and those before it that nothing needs any more."""
        while node in self.nodes and node.is_hollow and not (node.num_children or node.pins):
            bucket = self.buckets[node.hash]
            bucket.remove(node)
            if not bucket:
                del self.buckets[node.hash]
            del self.nodes[node]
            assert node.parent is not None  # roots are not among the nodes
            node.parent.num_children -= 1
            node = node.parent

    def split(self, tokens: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """The full blocks of `tokens`."""
        size = self.block_size
        return (tuple(tokens[i : i + size]) for i in range(0, len(tokens) - size + 1, size))

    def _child(self, parent: Node, tokens: tuple[int, ...]) -> Node | None:
        for node in self.buckets.get(self.hash_function((parent.hash, tokens)), ()):
            if node.parent is parent and node.tokens == tokens:
                return node
        return None
