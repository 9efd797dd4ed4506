"""Prefix reuse: keys and values that one sequence computed, found and shared by the next that begins alike."""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._core.allocator import replace_entries
from jaxkv._core.cache import Cache
from jaxkv._core.config import CacheConfig
from jaxkv._core.errors import OutOfBlocks
from jaxkv._core.pools import put_blocks
from jaxkv._core.state import NULL_BLOCK, BlockTables
from jaxkv._core.tables import mark_failed
from jaxkv._core.views import check_row
from jaxkv._tiers.host import padded_size, read_blocks
from jaxkv._tiers.prefix_tree import Node, PrefixTree


@dataclasses.dataclass(frozen=True)
class Match:
    """What a `PrefixCache` has of a prompt: its first `num_tokens` tokens, whole blocks."""

    num_tokens: int
    nodes: tuple[Node, ...] = dataclasses.field(repr=False)


class PrefixCache:
    """An index over the full blocks of a cache, kept on the host, so that equal beginnings are computed once.

    `match` says how much of a prompt is there, `adopt` attaches it to an empty row without a copy, `insert` offers a
    row's blocks. Indexed blocks stay when their rows are freed, and `make_room` gives back those that no row uses, the
    least recently used first: call it before a step that may need more blocks than are free. (`jaxkv.Engine` does.)

    The index follows one line of caches: go on with the cache that each of its methods returns. An older one stays
    valid as a cache, and adopting into it marks the row as failed if its blocks are not the index's.

    Args:
      config: of the caches to come.
      spill_bytes: host memory for blocks that `make_room` takes from the device; they come back when adopted.
      max_pinned: the largest share of a group's blocks that may be pinned.
      hash_function: from a (hash, tokens) pair to a hash, for tests.

    Chaining block hashes is vLLM's idea (automatic prefix caching); comparing the tokens on every hit is what keeps it
    safe. Every method takes `salt`, a str or bytes: sequences with different salts share nothing, for example those of
    two tenants; and `adapter`, a str that names what else the keys and values depend on, such as a LoRA.

    >>> import jax.numpy as jnp, jaxkv
    >>> layer = jaxkv.LayerConfig(num_kv_heads=2, head_dim=8)
    >>> config = jaxkv.CacheConfig(layers=(layer,), max_seqs=2, max_seq_len=64, num_blocks=8)
    >>> cache, prefix = jaxkv.init(config), jaxkv.PrefixCache(config)
    >>> prompt, kv = list(range(40)), jnp.ones((1, 2, 40, 2, 8))
    >>> cache = jaxkv.append(cache, kv, kv, [40, 0])
    >>> cache = prefix.insert(cache, 0, prompt)
    >>> match = prefix.match([*prompt[:35], 99])
    >>> cache = prefix.adopt(cache, 1, match)
    >>> match, cache.lengths.tolist(), cache.blocks_in_use
    (Match(num_tokens=32), [40, 32], 3)
    """

    def __init__(
        self, config: CacheConfig, *, spill_bytes: int = 0, max_pinned: float = 0.5,
        hash_function: Callable[[Any], Hashable] = hash,
    ):  # fmt: skip
        if config.contiguous:
            raise ValueError('A PrefixCache needs layout="paged": in the contiguous layout rows share no blocks.')
        if not 0 <= max_pinned <= 1:
            raise ValueError(f"max_pinned is a share of the blocks, from 0 to 1, not {max_pinned}.")
        self.config, self.spill_bytes, self.max_pinned = config, int(spill_bytes), max_pinned
        self._tree = PrefixTree(config.block_size, len(config.groups), hash_function)
        self._host_bytes = 0
        self._pinned: set[Node] = set()
        self._counts = dict.fromkeys(
            ("lookups", "hits", "tokens_asked", "tokens_saved", "blocks_evicted", "blocks_spilled", "blocks_restored"),
            0,
        )

    # Using it.

    def match(self, tokens: Sequence[int], *, salt: str | bytes | None = None, adapter: str | None = None) -> Match:
        """How many of a prompt's first tokens are there: whole blocks, and never the prompt's last token.

        Of layers with a window, only what the next token would see has to be there.
        """
        tokens = _as_tokens(tokens)
        chain = self._tree.walk(self._root(salt, adapter), tokens[: max(len(tokens) - 1, 0)])
        length = self._usable(chain)
        self._tree.touch(chain[:length])
        self._counts["lookups"] += 1
        self._counts["tokens_asked"] += len(tokens)
        return Match(length * self.config.block_size, tuple(chain[:length]))

    def adopt(self, cache: Cache, row: int, match: Match, *, donate: bool = False) -> Cache:
        """The cache in which an empty row holds what was matched. Blocks on the device are shared, not copied.

        Args:
          donate: update the pools in place where blocks come back from the host; then the given cache is used up.

        Raises:
          IndexError: no such row. ValueError: the row is not empty, or something has been evicted since the match.
          OutOfBlocks: there is no room for the blocks that come back from the host.
        """
        self._check(cache, row)
        length, held = jax.device_get((cache.lengths, [t.held for t in cache.tables]))
        if length[row] or any(h[row] for h in held):
            raise ValueError(
                f"Row {row} holds {length[row]} tokens in {max(int(h[row]) for h in held)} blocks: adopt into an empty "
                "row, or free it first."
            )
        if not match.num_tokens:
            return cache
        if self._usable(match.nodes) < len(match.nodes) or any(node not in self._tree.nodes for node in match.nodes):
            raise ValueError("Blocks of this match have been evicted since: match the prompt again.")
        cache = self._restore(cache, match.nodes, donate)
        entries = []
        for group, first in enumerate(self._first_columns(len(match.nodes))):
            columns = np.full(self.config.max_blocks_per_seq, NULL_BLOCK, np.int32)
            columns[first : len(match.nodes)] = [node.blocks[group] for node in match.nodes[first:]]
            entries.append(columns)
        self._tree.touch(match.nodes)
        self._counts["hits"] += 1
        self._counts["tokens_saved"] += match.num_tokens
        tables = tuple(
            _attach(t, np.int32(row), columns, np.int32(match.num_tokens))
            for t, columns in zip(cache.tables, entries, strict=True)
        )
        return cache.replace(tables=tables)

    def insert(
        self, cache: Cache, row: int, tokens: Sequence[int], *, salt: str | bytes | None = None,
        adapter: str | None = None,
    ) -> Cache:  # fmt: skip
        """Index a row's full blocks.

        Args:
          tokens: what the row holds, from its first token on. If there are fewer than in the row, only those are
            indexed; tokens that the row does not hold yet are ignored. Blocks that are indexed with another salt or
            adapter already are left out.

        Returns:
          The cache, in which these blocks stay when the row is freed.

        Raises:
          IndexError: no such row. ValueError: tokens that are not integers, or a salt of the wrong type.
        """
        self._check(cache, row)
        tokens = _as_tokens(tokens)
        held = [(t.tables[row], t.kept[t.tables[row]]) for t in cache.tables]
        columns, lengths = jax.device_get((held, cache.lengths))
        chain = self._tree.extend(self._root(salt, adapter), tokens[: lengths[row]])
        groups = []
        for group, (t, (blocks, kept)) in enumerate(zip(cache.tables, columns, strict=True)):
            new = np.full(self.config.max_blocks_per_seq, NULL_BLOCK, np.int32)
            for column, node in enumerate(chain):
                # A block that is kept already is another node's, of another salt: it stays that one's alone.
                if node.blocks[group] == NULL_BLOCK and blocks[column] != NULL_BLOCK and not kept[column]:
                    new[column] = node.blocks[group] = int(blocks[column])
                    self._drop_host(node, group)
            groups.append(_keep(t, new) if new.any() else t)
        self._tree.touch(chain)
        for node in reversed(chain):
            self._tree.prune(node)
        return cache.replace(tables=tuple(groups))

    # Keeping it small.

    def make_room(self, cache: Cache, num_blocks: int | Sequence[int]) -> Cache:
        """Give indexed blocks back until `num_blocks` are free in every group of layers, or no more can be given.

        Those that a row uses or that are pinned stay. With `spill_bytes`, what goes is kept in host memory.
        """
        self._check(cache)
        wanted = [num_blocks] * len(cache.tables) if isinstance(num_blocks, int) else num_blocks
        missing = [w - int(t.num_free) for w, t in zip(wanted, cache.tables, strict=True)]
        if max(missing) <= 0:
            return cache
        refcounts = jax.device_get([t.refcounts for t in cache.tables])
        groups = list(cache.tables)
        for group, count in enumerate(missing):
            victims = []
            for node in self._tree.nodes if count > 0 else ():
                block = node.blocks[group]
                if block != NULL_BLOCK and not node.pins and refcounts[group][block] == 1:
                    victims.append(node)
                    if len(victims) == count:
                        break
            if victims:
                groups[group] = self._evict(cache, group, victims)
        return cache.replace(tables=tuple(groups))

    def pin(self, tokens: Sequence[int], *, salt: str | bytes | None = None, adapter: str | None = None) -> int:
        """Keep what is there of `tokens` from being evicted, until `unpin`. Returns how many tokens that is.

        Raises:
          ValueError: more blocks would be pinned than `max_pinned` allows; nothing is then.
        """
        chain = self._tree.walk(self._root(salt, adapter), _as_tokens(tokens))
        for group, num_blocks in enumerate(self.config.group_blocks):
            pinned = self.pinned(group) + sum(1 for node in chain if not node.pins and node.blocks[group])
            if pinned > (limit := int(self.max_pinned * num_blocks)):
                raise ValueError(
                    f"Pinning these {len(chain) * self.config.block_size} tokens would pin {pinned} of {num_blocks} "
                    f"blocks, more than the {limit} that max_pinned={self.max_pinned} allows: unpin others, or give "
                    "the cache more num_blocks."
                )
        for node in chain:
            self._pin(node)
        return len(chain) * self.config.block_size

    def unpin(self, tokens: Sequence[int], *, salt: str | bytes | None = None, adapter: str | None = None) -> None:
        """Take back one `pin` of the same tokens. Raises ValueError if they are not pinned."""
        chain = self._tree.walk(self._root(salt, adapter), _as_tokens(tokens))
        chain = [node for node in chain if node.pins]  # what has been inserted since is not pinned
        if not chain:
            raise ValueError("These tokens are not pinned: unpin takes what pin was given, once for each pin.")
        for node in chain:
            self._unpin(node)

    def reset(self, cache: Cache) -> Cache:
        """Forget everything, pinned blocks too; blocks that no row holds are free again."""
        self._check(cache)
        self._tree = PrefixTree(self.config.block_size, len(self.config.groups), self._tree.hash_function)
        self._host_bytes = 0
        self._pinned.clear()
        everything = [np.arange(t.num_blocks + 1) for t in cache.tables]
        return cache.replace(tables=tuple(_release(t, b) for t, b in zip(cache.tables, everything, strict=True)))

    # Looking at it.

    def available(self, cache: Cache) -> list[int]:
        """For each group of layers, blocks that are free or that `make_room` could free: at least so many."""
        counts = jax.device_get([(t.num_free, count_unused(t)) for t in cache.tables])
        return [int(free) + max(0, int(unused) - self.pinned(g)) for g, (free, unused) in enumerate(counts)]

    def pinned(self, group: int) -> int:
        """Blocks of a group that are pinned."""
        return sum(1 for node in self._pinned if node.blocks[group])

    def stats(self) -> dict[str, Any]:
        """What the index holds and what it has saved so far, as plain numbers.

        `tokens_saved` of `tokens_asked` did not have to be computed; `hit_rate` is their ratio.
        """
        nodes = self._tree.nodes
        return self._counts | {
            "hit_rate": self._counts["tokens_saved"] / max(self._counts["tokens_asked"], 1),
            "blocks": [sum(1 for node in nodes if node.blocks[g]) for g in range(len(self.config.groups))],
            "blocks_pinned": [self.pinned(g) for g in range(len(self.config.groups))],
            "host_bytes": self._host_bytes,
        }

    def check_invariants(self, cache: Cache) -> None:
        """Raise AssertionError unless index and cache agree on every block. For tests and debugging."""
        for group, t in enumerate(jax.device_get(cache.tables)):
            blocks = sorted(node.blocks[group] for node in self._tree.nodes if node.blocks[group])
            assert blocks == np.flatnonzero(t.kept).tolist(), f"group {group}: index {blocks}, cache {t.kept}"
        held = sum(self._bytes(g) for node in self._tree.nodes for g, x in enumerate(node.host) if x is not None)
        assert held == self._host_bytes <= self.spill_bytes, f"host memory: {held}, counted {self._host_bytes}"
        assert self._pinned == {node for node in self._tree.nodes if node.pins}, "pinned nodes are noted"
        assert not any(node.is_hollow and not node.num_children and not node.pins for node in self._tree.nodes)

    # The parts.

    def _check(self, cache: Cache, row: int | None = None) -> None:
        if cache.config != self.config:
            raise ValueError("This PrefixCache was made for caches of another config: make one from cache.config.")
        if row is not None:
            check_row(cache, row)

    def _root(self, salt: Any, adapter: Any) -> Node:
        if not isinstance(salt, str | bytes | None):
            raise ValueError(f"salt must be a str, bytes or None, not {type(salt).__name__}.")
        if not isinstance(adapter, str | None):
            raise ValueError(f"adapter must be a str or None, not {type(adapter).__name__}.")
        return self._tree.root((type(salt), salt, adapter))

    def _usable(self, chain: Sequence[Node]) -> int:
        """How many nodes of a chain a row can adopt: the most of which every group has what the next token sees."""
        present = [np.array([node.has(g) for node in chain], bool) for g in range(len(self.config.groups))]
        for count in range(len(chain), 0, -1):
            if all(p[first:count].all() for p, first in zip(present, self._first_columns(count), strict=True)):
                return count
        return 0

    def _first_columns(self, count: int) -> list[int]:
        """For each group the first of `count` blocks that the token behind them sees."""
        length = count * self.config.block_size
        return [self.config.first_seen(g, length) for g in range(len(self.config.groups))]

    def _bytes(self, group: int) -> int:
        return self.config.bytes_per_group_block(group)

    def _drop_host(self, node: Node, group: int) -> None:
        if node.host[group] is not None:
            node.host[group] = None
            self._host_bytes -= self._bytes(group)

    def _evict(self, cache: Cache, group: int, victims: list[Node]) -> BlockTables:
        blocks = np.zeros(padded_size(len(victims)), np.int32)
        blocks[: len(victims)] = [node.blocks[group] for node in victims]
        if self.spill_bytes >= self._bytes(group):
            kv = [np.asarray(read_blocks(cache.pool(layer).kv, blocks)) for layer in self.config.groups[group]]
            for i, node in enumerate(victims):
                node.host[group] = [x[i].copy() for x in kv]
            self._host_bytes += len(victims) * self._bytes(group)
            self._counts["blocks_spilled"] += len(victims)
        self._counts["blocks_evicted"] += len(victims)
        for node in victims:
            node.blocks[group] = NULL_BLOCK
        self._trim_host()
        for node in victims:
            self._tree.prune(node)
        return _release(cache.tables[group], blocks)

    def _trim_host(self) -> None:
        for node in list(self._tree.nodes) if self._host_bytes > self.spill_bytes else ():
            if node.pins:
                continue
            for group in range(len(node.host)):
                self._drop_host(node, group)
            self._tree.prune(node)
            if self._host_bytes <= self.spill_bytes:
                break

    def _restore(self, cache: Cache, chain: Sequence[Node], donate: bool) -> Cache:
        """Bring the blocks of a chain that are on the host back to the device."""
        firsts = self._first_columns(len(chain))
        missing = [[n for n in chain[first:] if not n.blocks[g]] for g, first in enumerate(firsts)]
        if not any(missing):
            return cache
        for node in chain:
            self._pin(node)  # no room is to be made with what is about to be used
        try:
            for nodes, available in zip(missing, self.available(cache), strict=True):
                if len(nodes) > available:
                    raise OutOfBlocks(
                        f"{len(nodes)} blocks of this match are in host memory, and there is room for {available}: "
                        "free rows, or compute the prompt without the match."
                    )
            cache = self.make_room(cache, [len(nodes) for nodes in missing])
        finally:
            for node in chain:
                self._unpin(node)
        pools, groups = list(cache.pools), list(cache.tables)
        for group, nodes in enumerate(missing):
            if not nodes:
                continue
            groups[group], blocks = _claim(groups[group], len(nodes))
            padded = padded_size(len(nodes))
            target = np.pad(blocks, (0, padded - len(nodes)))
            for i, layer in enumerate(self.config.groups[group]):
                kv = np.stack([node.host[group][i] for node in nodes])
                kv = np.pad(kv, [(0, padded - len(nodes))] + [(0, 0)] * (kv.ndim - 1))
                pools[layer] = (_put_donated if donate else _put)(cache.pool(layer), kv, target)
            for node, block in zip(nodes, blocks, strict=True):
                node.blocks[group] = int(block)
                self._drop_host(node, group)
            self._counts["blocks_restored"] += len(nodes)
        return cache.replace(tables=tuple(groups), pools=tuple(pools))

    def _pin(self, node: Node) -> None:
        node.pins += 1
        self._pinned.add(node)

    def _unpin(self, node: Node) -> None:
        node.pins -= 1
        if not node.pins:
            self._pinned.discard(node)


def count_unused(tables: BlockTables) -> jax.Array:
    """`i32[]`: kept blocks that no row holds."""
    return jnp.sum(tables.kept & (tables.refcounts == 1), dtype=jnp.int32)


def _as_tokens(tokens: Any) -> list[int]:
    tokens = np.asarray(tokens)
    if tokens.ndim != 1 or not (np.issubdtype(tokens.dtype, np.integer) or not tokens.size):
        raise ValueError(f"tokens must be a list of integers, not {tokens.dtype}{list(tokens.shape)}.")
    return tokens.tolist()


@jax.jit
def _attach(tables: BlockTables, row: jax.Array, entries: jax.Array, length: jax.Array) -> BlockTables:
    """An empty row that holds kept blocks. Blocks that are not kept are another cache's: the row is marked."""
    ours = jnp.all(tables.kept[entries] | (entries == NULL_BLOCK))
    here = jnp.arange(tables.lengths.shape[0]) == row
    tables = mark_failed(tables, here & ~ours, jnp.full_like(tables.wanted, -1), 0)
    here &= ours
    tables = replace_entries(tables, jnp.where(here[:, None], entries[None], tables.tables))
    return dataclasses.replace(
        tables, lengths=jnp.where(here, length, tables.lengths), new=jnp.where(here, 0, tables.new)
    )


@jax.jit
def _keep(tables: BlockTables, blocks: jax.Array) -> BlockTables:
    """Blocks that rows hold, null blocks among them ignored, stay from now on when the rows let them go."""
    return replace_entries(tables, tables.tables, tables.kept | _mask(tables, blocks))


@jax.jit
def _release(tables: BlockTables, blocks: jax.Array) -> BlockTables:
    """The opposite of `_keep`."""
    return replace_entries(tables, tables.tables, tables.kept & ~_mask(tables, blocks))


def _mask(tables: BlockTables, blocks: jax.Array) -> jax.Array:
    return jnp.zeros_like(tables.kept).at[blocks].set(True).at[NULL_BLOCK].set(False)


def _claim(tables: BlockTables, count: int) -> tuple[BlockTables, np.ndarray]:
    """Keep so many free blocks. There must be as many."""
    free_list, num_free = jax.device_get((tables.free_list, tables.num_free))
    blocks = free_list[len(free_list) - num_free :][:count]
    left = jnp.asarray(num_free - count, jnp.int32)
    return dataclasses.replace(
        tables, kept=tables.kept.at[blocks].set(True), num_free=left,
        peak=jnp.maximum(tables.peak, tables.num_blocks - left),
    ), blocks  # fmt: skip


_put = jax.jit(put_blocks)
_put_donated = jax.jit(put_blocks, donate_argnums=0)
