"""Transactions on a cache and the index of a `PrefixCache`, computed before either is changed."""

import collections
from collections.abc import Callable, Collection, Sequence

import jax
import numpy as np

from jaxkv._core.blocks.block_copy import pad_size, put_group
from jaxkv._core.cache.cache import Cache
from jaxkv._core.state.columns import columns_for
from jaxkv._core.state.errors import OutOfBlocks
from jaxkv._core.state.multihost import put_local_shards
from jaxkv._core.state.state import NULL_BLOCK, Pool
from jaxkv._tiers.prefix_cache.index import PrefixIndex
from jaxkv._tiers.prefix_cache.node import Node
from jaxkv._tiers.prefix_cache.retained_blocks import attach, claim, keep, read_contents


class Change:
    """A new cache, and the new contents of the index.

    All is computed here first; `PrefixIndex.hold` is the last step. A call interrupted before it has changed nothing;
    after an interrupt in or behind it, the index follows the next cache that it gets.

    Args:
      index: the index to change.
      cache: the caller's cache: the one that the last call returned, or an older one.
    """

    def __init__(self, index: PrefixIndex, cache: Cache):
        self.index, self.config = index, cache.config
        # The new label of each group's blocks.
        self.kept = index.follow(jax.device_get([tables.kept for tables in cache.tables]))
        self.spilled: list[tuple[Node, int, list[Pool]]] = []  # contents that go to the host, by node and group
        self.restored: dict[tuple[Node, int], int] = {}  # the block of each node and group that comes back
        self.counts: collections.Counter[str] = collections.Counter()
        self.cache = cache
        self._keep()  # drops blocks that the index does not know

    def offer(self, chain: Sequence[Node], row_blocks: Sequence[np.ndarray]) -> None:
        """Keeps the blocks of a row, for each group `i32[blocks]` from its first on, for the nodes of its tokens that
        have none."""
        for group, (blocks, kept) in enumerate(zip(row_blocks, self.kept, strict=True)):
            for node, block in zip(chain, blocks.tolist(), strict=False):
                # A block that is kept already is another node's, of another salt: it stays that one's alone.
                if node.blocks[group] == NULL_BLOCK and block != NULL_BLOCK and not kept[block]:
                    kept[block] = node.label
        self._keep()

    def evict(self, wanted: Sequence[int], spared: Collection[Node] = ()) -> None:
        """Evicts kept blocks, in each group the least needed first, until `wanted[g]` are free or no more can be
        freed."""
        sizes = jax.device_get([(tables.num_free, tables.refcounts) for tables in self.cache.tables])
        whole = [(g, sizes[g][1]) for g in self.index.ends.whole]

        def is_running(node: Node) -> bool:
            """Tells whether a row holds a chain to its end: it will offer a longer one as it goes on."""
            blocks = [(node.blocks[g], refcounts) for g, refcounts in whole]
            return not node.is_fork and any(block != NULL_BLOCK and refcounts[block] > 1 for block, refcounts in blocks)

        for group, (num_free, refcounts) in enumerate(sizes):
            pinned = self.index.pinned[group]
            victims: list[Node] = []
            least_needed = self.index.ends.least_needed([group], is_running)
            for node, _ in least_needed if num_free < wanted[group] else ():
                block = node.blocks[group]
                if block != NULL_BLOCK and refcounts[block] == 1 and node not in pinned and node not in spared:
                    victims.append(node)
                    if num_free + len(victims) == wanted[group]:
                        break
            if victims:
                self._spill(group, victims)
        self._keep()

    def restore(self, chain: Sequence[Node], needed: Sequence[np.ndarray], put: Callable[..., Pool]) -> None:
        """Restores the blocks of a chain's nodes `needed[g]` from the host by `put`, called as for `put_group`."""
        missing = [
            [chain[i] for i in columns.tolist() if chain[i].blocks[group] == NULL_BLOCK]
            for group, columns in enumerate(needed)
        ]
        if not any(missing):
            return
        self.evict([len(nodes) for nodes in missing], spared=set(chain))
        cache, groups = self.cache, list(self.cache.tables)
        for nodes, tables in zip(missing, groups, strict=True):
            if len(nodes) > (num_free := int(tables.num_free)):
                raise OutOfBlocks(
                    f"{len(nodes)} blocks of this match are in host memory, and there is room for {num_free}: free "
                    "rows, or compute the prompt without the match."
                )
        for group, nodes in enumerate(missing):
            if not nodes:
                continue
            padding = pad_size(len(nodes)) - len(nodes)
            labels = np.array([node.label for node in nodes] + [0] * padding, np.int32)
            groups[group], target = claim(groups[group], labels)

            def read(layer: int, group: int = group, nodes: list[Node] = nodes + padding * nodes[:1]) -> Pool:
                index = self.config.groups[group].index(layer)
                blocks = jax.tree.map(lambda *x: np.stack(x), *(node.host[group][index] for node in nodes))
                return put_local_shards(blocks, self.cache.layer(layer).pool)

            cache = put_group(cache, group, read, target, put)
            for node, block in zip(nodes, np.asarray(target).tolist(), strict=False):
                self.kept[group][block], self.restored[node, group] = node.label, block
            self.counts["blocks_restored"] += len(nodes)
        self.cache = cache.replace(tables=tuple(groups))

    def attach(self, row: int, chain: Sequence[Node], needed: Sequence[np.ndarray]) -> None:
        """Attaches the blocks of a chain's nodes `needed[g]` to an empty row."""
        length, groups = np.int32(len(chain) * self.config.block_size), []
        for group, (tables, columns) in enumerate(zip(self.cache.tables, needed, strict=True)):
            entries = np.full(len(chain), NULL_BLOCK, np.int32)
            nodes = [chain[i] for i in columns.tolist()]
            entries[columns] = [node.blocks[group] or self.restored[node, group] for node in nodes]
            placed, skipped = columns_for(entries[None], self.config, group)
            groups.append(attach(tables, np.int32(row), placed[0], length, skipped[0]))
        self.cache = self.cache.replace(tables=tuple(groups))

    def _spill(self, group: int, victims: list[Node]) -> None:
        self.kept[group][[node.blocks[group] for node in victims]] = 0
        self.counts["blocks_evicted"] += len(victims)
        if self.index.spill_bytes >= self.index.block_bytes[group]:
            contents = read_contents(self.cache, group, victims)
            self.spilled += [(node, group, pools) for node, pools in zip(victims, contents, strict=True)]
            self.counts["blocks_spilled"] += len(victims)

    def _keep(self) -> None:
        """Updates the blocks that the cache keeps: blocks that rows hold, or that it kept before."""
        pairs = zip(self.cache.tables, self.kept, strict=True)
        tables = tuple(
            group_tables if np.array_equal(group_tables.kept, kept) else keep(group_tables, kept)
            for group_tables, kept in pairs
        )
        self.cache = self.cache.replace(tables=tables)
