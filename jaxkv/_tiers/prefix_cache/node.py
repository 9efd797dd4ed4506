"""One block of tokens behind all that stand before it, and where its keys and values are."""

import dataclasses
import itertools
import secrets
from collections.abc import Hashable
from typing import Any

from jaxkv._core.state.state import NULL_BLOCK
from jaxkv._files.blocks import Block

# Unlike those of any other index of this process and, since they start anywhere, of the one that a cache was saved by.
_numbers = itertools.count(secrets.randbits(31))


def _new_label() -> int:
    return next(_numbers) % (2**31 - 1) + 1


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
    is_fork: bool = False  # whether prompts have parted behind it, or one has ended there that others go beyond
    is_proven: bool = False  # whether one was looked for that ends there, as far as it is known
    label: int = dataclasses.field(default_factory=_new_label)

    @property
    def is_hollow(self) -> bool:
        """Whether nothing is left of it but its place in a chain."""
        return not any(self.blocks) and not any(x is not None for x in self.host)

    def has(self, group: int) -> bool:
        """Whether its keys and values are there, on the device or the host."""
        return self.blocks[group] != NULL_BLOCK or self.host[group] is not None

    @property
    def chain(self) -> "list[Node]":
        """All nodes up to it."""
        nodes, node = [], self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def block(self, group: int) -> Block:
        """What a file of it is of."""
        assert self.parent is not None
        return Block(self.digest, self.parent.digest, self.tokens, group, self.depth, self.identity)
