"""The ends of a `PrefixCache`: where prompts may go on, and which blocks each end needs.

A row can go on after `n` blocks of a chain if every group of layers has the blocks that the next token sees: all blocks
of a full-attention layer, the last window, chunk and first tokens of the others. Such a node is an *end* if a prompt is
likely to go on there: where a computation stopped, where prompts part, or where one was found before. A block ranks
with the last used of the ends that need it, in its own group; a block that no end needs is evicted first.

So the middle of a window layer's blocks is evicted before its last ones, and no group keeps what another cannot serve.
"""

import collections
import dataclasses
import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from jaxkv._core.config.cache_config import CacheConfig
from jaxkv._tiers.prefix_cache.node import Node


@dataclasses.dataclass(eq=False)
class End:
    """A node after which a prompt may go on; or, if the next blocks are on disk alone, one that leads there."""

    node: Node
    windows: dict[int, list[Node]]  # the nodes it needs by group, except of full attention; the last first
    used: int  # time of the last use


class Ends:
    """The ends among the nodes of an index, the least recently used first.

    The durable state is `order`, each change of which is one instruction; `rebuild` recomputes the rest.

    Args:
      config: the config of the caches.
      is_on_disk: tells whether a node's block of a group has a file. Then it is found without being in memory.
    """

    def __init__(self, config: CacheConfig, is_on_disk: Callable[[Node, int], bool]):
        self.config, self._is_on_disk = config, is_on_disk
        self.groups = range(len(config.groups))
        self.windows = [g for g in self.groups if config.group_visible_tokens[g] is not None]
        self.whole = [g for g in self.groups if config.group_visible_tokens[g] is None]
        self.order: collections.OrderedDict[int, End] = collections.OrderedDict()  # by the node's label
        self.clock = 0
        self._clear()

    def _clear(self) -> None:
        self.num_ends: dict[int, int] = {}  # by a node's label: ends at it or behind it
        self.users: list[dict[int, set[int]]] = [{} for _ in self.groups]  # of windows: which ends need a node
        # For each group the nodes with blocks that no end needs, in the order in which they became unneeded.
        self.spare: list[collections.OrderedDict[int, Node]] = [collections.OrderedDict() for _ in self.groups]

    def can_serve(self, chain: Sequence[Node]) -> np.ndarray:
        """Returns `bool[n + 1]`: after how many of a chain's n nodes a row can go on, disk blocks included."""
        return can_serve(self.config, [np.array([self.holds(n, g) for n in chain], bool) for g in self.groups])

    def holds(self, node: Node, group: int) -> bool:
        """Tells whether a node's keys and values are in any tier."""
        return node.has(group) or self._is_on_disk(node, group)

    # What happens to them.

    def use(self, chain: Sequence[Node]) -> list[tuple[Node, int]]:
        """Records the use of a chain, as far as it can be served. Nodes that it passes are no ends any more, except
        where prompts part.

        Returns:
          `(node, group)` of window layers that no end needs any more.
        """
        can = self.can_serve(chain)
        count = int(np.flatnonzero(can)[-1])
        passed = list(enumerate(chain[: max(count - 1, 0)], 1))
        for number in [number for number, node in passed if node.is_fork and can[number]]:
            self._add(chain[:number])
        if count:
            self._add(chain[:count])
            self.order.move_to_end(chain[count - 1].label)
            self.order[chain[count - 1].label].used = self.clock
        ends = [self.order[node.label] for _, node in passed if node.label in self.order and not node.is_fork]
        for end in ends:
            chain[count - 1].is_proven |= end.node.is_proven
            self._remove(end)
        needed_no_more = ((node, g) for end in ends for g, nodes in end.windows.items() for node in nodes)
        return [(node, g) for node, g in needed_no_more if not self.is_needed(node, g)]

    def use_more(self, start: Node, more: Sequence[Node]) -> list[tuple[Node, int]] | None:
        """Does `use` for the chain of `start` and nodes after it, in time that follows `more` alone. `start` must be an
        end. None: it cannot, since there is another end or a fork among them; nothing has changed then."""
        end = self.order.get(start.label)
        if end is None or not self.windows or len(end.windows) < len(self.windows):
            return None
        if not more:
            self.order.move_to_end(start.label)
            end.used = self.clock
            return []
        if start.is_fork or any(node.is_fork or node.label in self.order for node in more):
            return None
        before = start.depth + 1
        # What an end needs is there; no later node needs a block of a window before that.
        present = [np.ones(before + len(more), bool) for _ in self.groups]
        for group, there in enumerate(present):
            there[before:] = [self.holds(node, group) for node in more]
        count = int(np.flatnonzero(can_serve(self.config, present))[-1])
        if count <= before:
            return None
        node = more[count - before - 1]
        windows = self._needed_after(end, node)
        if windows is None:
            return None
        node.is_proven |= start.is_proven
        del self.order[start.label]
        moved = self.order[node.label] = End(node, windows, self.clock)
        self._note_users(moved)
        self._forget_users(end)
        self._count(node, start, 1)
        gone = ((node, g) for g, nodes in end.windows.items() for node in nodes)
        return [(node, g) for node, g in gone if not self.is_needed(node, g)]

    def settle(self, changed: Iterable[Node]) -> None:
        """Follows changes of nodes: an end that lacks a block moves back to where its chain can be served."""
        changed = list(dict.fromkeys(changed))
        lacking: set[int] = set()
        for node, g in itertools.product(changed, self.groups):
            if not self.holds(node, g):
                lacking |= self.users[g].get(node.label, set())
                lacking |= {node.label} & self.order.keys()
        for end in sorted((self.order[label] for label in lacking), key=lambda end: end.used, reverse=True):
            self._move_back(end)
        if any(node.label in self.num_ends and not self.holds(node, g) for node in changed for g in self.whole):
            self.rebuild(())  # a chain was broken before its end
        for node in changed:
            self._sort(node)

    def forget(self, node: Node) -> None:
        """Forgets a node without blocks in memory. If it is an end, the node before leads there."""
        end = self.order.get(node.label)
        if end is not None:
            self._replace(end, node.parent, {})

    def rebuild(self, nodes: Iterable[Node]) -> None:
        """Recomputes everything that follows from `order` and from the nodes' blocks; `nodes`: all of them, or those
        that may have changed."""
        ends, spare = list(self.order.values()), [node for by_label in self.spare for node in by_label.values()]
        nodes = list(nodes)
        self.order = collections.OrderedDict()
        self._clear()
        leaves = [node for node in nodes if not node.num_children]
        for node, used in [*((leaf, 0) for leaf in leaves), *((end.node, end.used) for end in ends)]:
            chain = node.chain
            if count := int(np.flatnonzero(self.can_serve(chain))[-1]):
                self._add(chain[:count])
                self.order.move_to_end(chain[count - 1].label)
                self.order[chain[count - 1].label].used = used
        for node in dict.fromkeys([*spare, *nodes, *(n for end in ends for n in end.node.chain)]):
            self._sort(node)

    # What they say.

    def least_needed(
        self, groups: Sequence[int], go_first: Callable[[Node], bool] | None = None
    ) -> Iterator[tuple[Node, int]]:
        """Yields `(node, group)` for all blocks of groups, in the order of eviction, ends of chains first.

        Args:
          go_first: tells whether an end's node ranks below the others, regardless of its last use.
        """
        for g in groups:
            yield from ((node, g) for node in self.spare[g].values())
        passed: list[collections.Counter[int]] = [collections.Counter() for _ in self.groups]
        for end in self._sort_by_worth(go_first) if set(groups) & set(self.windows) else self.order.values():
            for g in groups:
                yield from ((node, g) for node in self._list_freed(end, g, passed[g]))

    def _sort_by_worth(self, go_first: Callable[[Node], bool] | None) -> Iterator[End]:
        """Yields all ends, the least valuable to windows first. An end found by a lookup before counts as used later
        by one lookup per end: so prompts that come once do not evict their common prefix."""
        ends, lesser = self.order.values(), set()
        if go_first is not None:
            lesser = {end.node.label for end in ends if go_first(end.node)}
            yield from (end for end in ends if end.node.label in lesser)
        more = len(ends)
        others, proven = ((end for end in ends if not end.node.is_proven), (end for end in ends if end.node.is_proven))
        merged = heapq.merge(others, proven, key=lambda end: end.used + more * end.node.is_proven)
        yield from (end for end in merged if end.node.label not in lesser)

    def _list_freed(self, end: End, group: int, passed: collections.Counter[int]) -> Iterator[Node]:
        """Yields a group's nodes that an end needs, and no other except those passed."""
        if group in self.windows:
            for node in end.windows.get(group, ()):
                passed[node.label] += 1
                if passed[node.label] == len(self.users[group][node.label]):
                    yield node
            return
        node, count = end.node, 1
        while node.parent is not None:
            passed[node.label] += count
            if (count := passed[node.label]) < self.num_ends[node.label]:
                return
            yield node
            node = node.parent

    def check(self, nodes: Iterable[Node]) -> None:
        """Raises AssertionError unless the derived state follows from `order`."""
        nodes = list(nodes)
        by_label = {node.label: node for node in nodes}
        num_ends: collections.Counter[int] = collections.Counter()
        users: list[dict[int, set[int]]] = [{} for _ in self.groups]
        for label, end in self.order.items():
            assert by_label[label] is end.node, "every end is a node"
            chain = end.node.chain
            num_ends.update(node.label for node in chain)
            assert self.can_serve(chain)[-1] or not end.windows or self._is_on_disk is not no_disk, "it can be served"
            for g, needed in end.windows.items():
                assert needed == self._find_needed(chain)[g], "what it needs is noted"
                for node in needed:
                    users[g].setdefault(node.label, set()).add(label)
        found = [(node.label, g) for node, g in self.least_needed(self.groups)]
        assert len(found) == len(set(found)), "nothing is let go twice"
        assert num_ends == self.num_ends and users == self.users, "what ends need is noted"
        for g in self.groups:
            spare = {n.label for n in nodes if n.has(g) and not self.is_needed(n, g)}
            assert spare == self.spare[g].keys(), f"group {g}: what no end needs is noted"

    # The parts.

    def _find_needed(self, chain: Sequence[Node]) -> dict[int, list[Node]]:
        if not self.windows:
            return {}
        columns = find_needed(self.config, len(chain))
        return {g: [chain[i] for i in columns[g][::-1].tolist()] for g in self.windows}

    def _needed_after(self, end: End, node: Node) -> dict[int, list[Node]] | None:
        """Returns what an end at `node` needs, behind an end on the same chain; None: that one lacks first blocks."""
        found, length = {}, (node.depth + 1) * self.config.block_size
        for g in self.windows:
            sink_blocks, first = (int(x) for x in self.config.retained_blocks(g, length))
            found[g] = list(itertools.islice(node.back(), node.depth + 1 - first))
            if sink_blocks > len(end.windows[g]):
                return None
            if sink_blocks:
                found[g] += end.windows[g][-sink_blocks:]
        return found

    def is_needed(self, node: Node, group: int) -> bool:
        """Tells whether an end needs a node's block of a group."""
        return node.label in (self.num_ends if group in self.whole else self.users[group])

    def _sort(self, node: Node) -> None:
        for g in self.groups:
            if node.has(g) and not self.is_needed(node, g):
                self.spare[g].setdefault(node.label, node)
            else:
                self.spare[g].pop(node.label, None)

    def _add(self, chain: Sequence[Node]) -> None:
        node = chain[-1]
        if node.label in self.order and len(self.order[node.label].windows) < len(self.windows):
            self._remove(self.order[node.label])  # it led to blocks on disk alone
        if node.label not in self.order:
            end = self.order[node.label] = End(node, self._find_needed(chain), self.clock)
            self._count(node, None, 1)
            self._note_users(end)

    def _remove(self, end: End) -> None:
        del self.order[end.node.label]
        self._forget_users(end)
        self._count(end.node, None, -1)

    def _move_back(self, end: End) -> None:
        """Moves an end to where its chain can still be served, if anywhere, as the least recently used."""
        node = end.node
        while node.parent is not None and not all(self.holds(node, g) for g in self.groups):
            node = node.parent
        chain: Sequence[Node] = ()
        if node.parent is not None:
            chain = node.chain if self.windows else [node]
            chain = chain[: int(np.flatnonzero(self.can_serve(chain))[-1])] if self.windows else chain
        self._replace(end, chain[-1] if chain else None, self._find_needed(chain) if chain else {})

    def _replace(self, end: End, node: Node | None, windows: dict[int, list[Node]]) -> None:
        """Makes an earlier node the end instead, as the least recently used; unless there is none, or it is one."""
        if node is None or node.parent is None or node.label in self.order:
            self._remove(end)
            return
        del self.order[end.node.label]
        moved = self.order[node.label] = End(node, windows, end.used)
        self.order.move_to_end(node.label, last=False)
        self._note_users(moved)
        self._forget_users(end)
        self._count(end.node, node, -1)

    def _count(self, node: Node, until: Node | None, by: int) -> None:
        """Counts an end at a node, for it and the nodes before it, down to but excluding `until`."""
        while node.parent is not None and node is not until:
            count = self.num_ends[node.label] = self.num_ends.get(node.label, 0) + by
            if not count:
                del self.num_ends[node.label]
            if count in (0, by):
                self._sort(node)
            node = node.parent

    def _note_users(self, end: End) -> None:
        for g, nodes in end.windows.items():
            for node in nodes:
                self.users[g].setdefault(node.label, set()).add(end.node.label)
                self.spare[g].pop(node.label, None)

    def _forget_users(self, end: End) -> None:
        for g, nodes in end.windows.items():
            for node in nodes:
                users = self.users[g][node.label]
                users.discard(end.node.label)
                if not users:
                    del self.users[g][node.label]
                    self._sort(node)


def no_disk(node: Node, group: int) -> bool:
    """Tells that no block is on disk, for an index without a folder."""
    return False


def can_serve(config: CacheConfig, present: Sequence[np.ndarray]) -> np.ndarray:
    """Returns `bool[n + 1]`: after how many of n blocks a row can go on, if groups have `present[g]` bool[n]."""
    counts = np.arange(len(present[0]) + 1)
    found = np.ones(counts.size, bool)
    for group, there in enumerate(present):
        total = np.concatenate([[0], np.cumsum(there)])
        sink_blocks, first = config.retained_blocks(group, counts * config.block_size)
        found &= (total[counts] - total[first] == counts - first) & (total[sink_blocks] == sink_blocks)
    return found


def find_needed(config: CacheConfig, count: int) -> list[np.ndarray]:
    """Returns, for each group, which of `count` blocks the next token sees: leading ones that stay, and the last."""
    length = count * config.block_size
    kept = (config.retained_blocks(group, length) for group in range(len(config.groups)))
    return [np.r_[:sink_blocks, first:count] for sink_blocks, first in kept]
