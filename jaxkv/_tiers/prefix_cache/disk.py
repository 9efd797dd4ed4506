"""The disk tier of a `PrefixCache`: blocks that leave the host are written to files, and read back on demand."""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxkv._core.cache.cache import Cache
from jaxkv._core.config.cache_config import CacheConfig
from jaxkv._core.state.state import NULL_BLOCK
from jaxkv._files.blocks import BlockFiles, SavedBlock
from jaxkv._files.paths import check_model_name
from jaxkv._tiers.prefix_cache.ends import can_serve, find_needed
from jaxkv._tiers.prefix_cache.index import PrefixIndex, digest_of
from jaxkv._tiers.prefix_cache.node import Node
from jaxkv._tiers.prefix_cache.retained_blocks import read_contents
from jaxkv._tiers.prefix_cache.snapshots import HOST_SHARE

AT_ONCE = 64  # blocks that `flush` reads from the device in one transfer


def open_disk(
    config: CacheConfig,
    spill_bytes: int,
    folder: str | os.PathLike | BlockFiles | None,
    disk_bytes: float | None,
    model: str | None,
) -> BlockFiles | None:
    """Opens the files for the options of a `PrefixCache`, or returns another one's, if given in place of a folder.
    Raises ValueError for invalid options."""
    if isinstance(folder, BlockFiles):
        return folder
    check_model_name(model)
    if folder is None and disk_bytes is None:
        return None
    if folder is None or disk_bytes is None:
        missing = "disk, a folder," if folder is None else "disk_bytes, how much may lie there,"
        raise ValueError(f"disk and disk_bytes go together, but {missing} is missing: give both, or neither.")
    largest = max(map(config.bytes_per_group_block, range(len(config.groups))))
    if spill_bytes < largest:
        raise ValueError(
            f"Blocks go to the disk through host memory, so spill_bytes must hold at least one, {largest} bytes, and "
            f"not {spill_bytes}: a prompt's blocks come back in one go if all of them fit."
        )
    if spill_bytes * HOST_SHARE < config.bytes_per_state:
        raise ValueError(
            f"States of recurrent layers go to the disk through host memory, so spill_bytes must be at least "
            f"{int(config.bytes_per_state / HOST_SHARE)} bytes, of which they may take {HOST_SHARE}, not {spill_bytes}."
        )
    return BlockFiles(folder, disk_bytes, config, model)


def recall(index: PrefixIndex, root: Node, tokens: Sequence[int]) -> tuple[list[Node], int]:
    """Returns the chain of a prefix of `tokens`, as far as a row can adopt it, and how many of its blocks are known;
    reads blocks on disk alone, and the states after the last, to the host.

    The host memory left by pinned blocks and this chain's own bounds the chain. Damaged or missing files are detected
    here, and treated as if they had never existed.
    """
    chain, disk = index.look(root, tokens), index.disk
    assert disk is not None
    if ahead := _count_ahead(index, disk, chain[-1] if chain else root, tokens):
        chain = index.extend(root, tokens[: (len(chain) + ahead) * index.block_size])
    groups = range(len(index.kept))
    there = [np.array([node.has(g) for node in chain], bool) for g in groups]
    on_disk = [
        np.array(
            [not is_there and disk.has(node.block(g)) for node, is_there in zip(chain, there[g], strict=True)], bool
        )
        for g in groups
    ]
    snapshots, room = index.snapshots, index.spill_bytes - index.count_pinned_bytes(chain)
    if snapshots is not None:
        room -= min(snapshots.host_bytes + snapshots.state_bytes, snapshots.most_hosted * snapshots.state_bytes)
    known = int(np.flatnonzero(_can_recall(index, there, on_disk, room))[-1])
    stateless: set[int] = set()  # counts of nodes whose states cannot be read

    def is_end(count: int) -> bool:
        """Tells whether recurrent layers can go on after so many nodes."""
        if not count or snapshots is None:
            return True
        node = chain[count - 1]
        return count not in stateless and (snapshots.has(node) or snapshots.is_on_disk(node))

    found: dict[tuple[int, int], Any] = {}  # by group and place in the chain
    while count := next(filter(is_end, np.flatnonzero(_can_recall(index, there, on_disk, room))[::-1].tolist())):
        columns = find_needed(index.config, count)
        wanted = [(g, i) for g, n in enumerate(columns) for i in n[on_disk[g][n]].tolist()]
        for g, i in wanted:
            if (g, i) not in found and (contents := disk.read(chain[i].block(g))) is not None:
                found[g, i] = contents
            on_disk[g][i] = (g, i) in found
        if not all(on_disk[g][i] for g, i in wanted):
            continue
        end = chain[count - 1]
        if snapshots is None or snapshots.has(end) or index.recall_states(end, chain[:count]):
            break
        stateless.add(count)
    hosted = [(chain[i], g, found[g, i]) for g, i in (wanted if count else ())]
    if count:
        chain[count - 1].is_proven = True
    if ahead or hosted:
        index.hold(index.kept, hosted=hosted, chain=chain[:count], pruned=chain)
    return chain[:count], known


def _can_recall(
    index: PrefixIndex, there: Sequence[np.ndarray], on_disk: Sequence[np.ndarray], room: int
) -> np.ndarray:
    """Returns `bool[n + 1]`: after how many nodes a row can go on, with disk blocks that fit on the host."""
    found = can_serve(index.config, [tables | d for tables, d in zip(there, on_disk, strict=True)])
    counts, taken = np.arange(found.size), np.zeros(found.size, np.int64)
    for group, (d, size) in enumerate(zip(on_disk, index.block_bytes, strict=True)):
        total = np.concatenate([[0], np.cumsum(d)])
        sink_blocks, first = index.config.retained_blocks(group, counts * index.block_size)
        taken += size * (total[counts] - total[first] + total[sink_blocks])
    return found & ((taken <= room) | (taken == 0))


def flush(index: PrefixIndex, cache: Cache) -> None:
    """Writes a file of every block that the index holds in a cache or in host memory."""
    disk = index.disk
    assert disk is not None
    if index.snapshots is not None:
        index.snapshots.flush()
    for group in range(len(index.kept)):
        missing = []
        for node, _ in index.ends.least_needed([group]):
            if node.host[group] is not None:
                disk.write(node.block(group), node.host[group])
            elif node.blocks[group] != NULL_BLOCK and not disk.keep(node.block(group)):
                missing.append(node)
        for start in range(0, len(missing), AT_ONCE):
            nodes = missing[start : start + AT_ONCE]
            for node, contents in zip(nodes, read_contents(cache, group, nodes), strict=True):
                disk.write(node.block(group), contents)


def _count_ahead(index: PrefixIndex, disk: BlockFiles, node: Node, tokens: Sequence[int]) -> int:
    """Returns the number of blocks of `tokens` after a node on disk, each for one group of layers at least."""
    digest, depth = node.digest, node.depth
    for block in list(index.split(tokens))[node.depth + 1 :]:
        parent, digest = digest, digest_of(digest, block)
        blocks = [
            SavedBlock(digest, parent, block, group, depth + 1, node.identity) for group in range(len(index.kept))
        ]
        if not any([disk.has(block) for block in blocks]):
            break
        depth += 1
    return depth - node.depth
