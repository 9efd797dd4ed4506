"""The events of a `PrefixCache`: blocks stored and removed, by comparing its contents with the last ones."""

import dataclasses
from typing import Literal

from jaxkv._core.state.state import NULL_BLOCK
from jaxkv._files.blocks import SavedBlock
from jaxkv._tiers.prefix_cache.index import PrefixIndex

Tier = Literal["device", "host", "disk"]
Place = tuple[bytes, int, Tier]  # a chain's digest, a group of layers, and where


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefixEvent:
    """One block that a `PrefixCache` has stored in a tier, or removed from it; see `PrefixCache.events`.

    Fields:
      stored: True: stored; False: removed.
      hash: the hash of the chain of blocks up to this one, its salt and adapter, the config, and the model if named:
        the same in every process. `PrefixCache.hashes` returns those of a prompt's blocks.
      parent: the hash of the chain before it; None: it is the first.
      tokens: the tokens of this block. start: the number of tokens before it.
      tier: "device", "host" (its memory) or "disk". A block may be in several.
      group: the group of layers; each has its own blocks.
      salt, adapter: as given with the tokens.

    >>> import jaxkv
    >>> sizes = dict(num_layers=1, num_kv_heads=2, head_dim=8, max_seqs=2, max_seq_len=64)
    >>> config = jaxkv.CacheConfig.uniform(**sizes, num_blocks=4)
    >>> prefix, tokens = jaxkv.PrefixCache(config), [*range(40)]
    >>> cache = prefix.insert(jaxkv.extend(jaxkv.init(config), [40, 0]), 0, tokens)
    >>> first, second = prefix.events()
    >>> first.stored, first.tier, first.start, second.start, second.parent == first.hash
    (True, 'device', 0, 16, True)
    >>> [first.hash, second.hash] == prefix.hashes(tokens), prefix.events()
    (True, [])
    """

    stored: bool
    hash: str
    parent: str | None
    tokens: tuple[int, ...]
    start: int
    tier: Tier
    group: int
    salt: str | bytes | None
    adapter: str | None


def holdings(index: PrefixIndex) -> dict[Place, SavedBlock]:
    """Returns every block that an index holds, and on disk those that it has written or found."""
    found: dict[Place, SavedBlock] = {}
    for node in index.nodes.values():
        for group, (number, contents) in enumerate(zip(node.blocks, node.host, strict=True)):
            tiers: tuple[tuple[Tier, bool], ...] = (("device", number != NULL_BLOCK), ("host", contents is not None))
            found |= {(node.digest, group, tier): node.block(group) for tier, is_there in tiers if is_there}
    known = [] if index.disk is None else list(index.disk.known.values())
    on_disk = [block for block in known if block.group < len(index.kept)]  # others are states
    return found | {(block.hash, block.group, "disk"): block for block in on_disk}


def differences(before: dict[Place, SavedBlock], now: dict[Place, SavedBlock]) -> list[PrefixEvent]:
    """Returns the events: removals, ends of chains first, then stores, beginnings first."""
    removed = [(place, block, False) for place, block in before.items() if place not in now]
    stored = [(place, block, True) for place, block in now.items() if place not in before]
    ordered = [*sorted(removed, key=_depth, reverse=True), *sorted(stored, key=_depth)]
    return [
        PrefixEvent(
            stored=is_stored, hash=block.hash.hex(), parent=block.parent.hex() if block.depth else None,
            tokens=block.tokens, start=block.depth * len(block.tokens), tier=tier, group=group,
            salt=block.identity[1], adapter=block.identity[2],
        )
        for (_, group, tier), block, is_stored in ordered
    ]  # fmt: skip


def _depth(change: tuple[Place, SavedBlock, bool]) -> int:
    return change[1].depth
