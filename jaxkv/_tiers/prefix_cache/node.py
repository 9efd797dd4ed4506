"""A node of the index: one block of tokens in the context of its prefix, and where its keys and values are."""

import dataclasses
import itertools
import secrets
from collections.abc import Hashable, Iterator
from typing import Any

from jaxkv._core.state.state import NULL_BLOCK
from jaxkv._files.blocks import SavedBlock

# Unlike those of any other index of this process and, since they start anywhere, of the one that a cache was saved by.
_numbers = itertools.count(secrets.randbits(31))


def _new_label() -> int:
    return next(_numbers) % (2**31 - 1) + 1


@dataclasses.dataclass(eq=False)
class Node:
    """One full block of tokens in the context of its whole prefix."""

    parent: "Node | None"  # None: a root, which stands for an identity and has no tokens
    tokens: tuple[int, ...]
    hash: Any  # hash of the whole chain up to here
    blocks: list[int]  # for each group of layers the physical block; NULL_BLOCK: there is none
    host: list[Any]  # its contents in host memory for each group, or None
    digest: bytes  # digest of the whole chain: equal in every process, and unique
    identity: Hashable  # the identity of its root
    depth: int = -1  # blocks before it
    num_children: int = 0
    is_fork: bool = False  # whether prompts part behind it, or one ended there that others go beyond
    is_proven: bool = False  # whether a lookup has ended there
    label: int = dataclasses.field(default_factory=_new_label)

    @property
    def is_hollow(self) -> bool:
        """Tells whether it has no contents, only its place in a chain."""
        return not any(self.blocks) and not any(x is not None for x in self.host)

    def has(self, group: int) -> bool:
        """Tells whether its keys and values are on the device or the host."""
        return self.blocks[group] != NULL_BLOCK or self.host[group] is not None

    def back(self) -> "Iterator[Node]":
        """Yields the nodes of its chain, from itself to the first."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    @property
    def chain(self) -> "list[Node]":
        """Returns all nodes up to it."""
        return list(self.back())[::-1]

    def block(self, group: int) -> SavedBlock:
        """Returns the description of its file."""
        assert self.parent is not None
        return SavedBlock(self.digest, self.parent.digest, self.tokens, group, self.depth, self.identity)
