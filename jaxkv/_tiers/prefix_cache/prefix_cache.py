"""Prefix caching: sequences reuse the keys and values of earlier sequences with the same prefix."""

import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxkv._core.blocks.block_copy import put
from jaxkv._core.cache.cache import Cache, check_cache
from jaxkv._core.cache.inspection import format_bytes
from jaxkv._core.cache.row_checks import check_row
from jaxkv._core.config.cache_config import CacheConfig, check_config
from jaxkv._core.config.validation import flag, integer, real, show
from jaxkv._core.state.columns import row_entries
from jaxkv._core.state.head_rows import refuse_evicting
from jaxkv._core.state.multihost import put_local_shards
from jaxkv._files.blocks import BlockFiles, SavedBlock, fingerprint
from jaxkv._files.paths import check_model_name
from jaxkv._tiers.prefix_cache.arguments import read_identity, read_tokens
from jaxkv._tiers.prefix_cache.disk import flush, open_disk, recall
from jaxkv._tiers.prefix_cache.donation_guard import Landing
from jaxkv._tiers.prefix_cache.ends import find_needed
from jaxkv._tiers.prefix_cache.events import Place, PrefixEvent, differences, holdings
from jaxkv._tiers.prefix_cache.index import PrefixIndex, digest_of
from jaxkv._tiers.prefix_cache.match import Match
from jaxkv._tiers.prefix_cache.node import Node
from jaxkv._tiers.prefix_cache.retained_blocks import count_unused, keep
from jaxkv._tiers.prefix_cache.snapshots import Snapshots, find_snapshots, put_states
from jaxkv._tiers.prefix_cache.transaction import Change


class PrefixCache:
    """An index on the host over the full blocks of a cache, so that common prefixes are computed once.

    `match` finds the cached prefix of a prompt, `adopt` attaches it to an empty row without a copy, `insert` offers a
    row's blocks. Indexed blocks stay when their rows are freed. `make_room` frees those that no row uses, the least
    recently used first: call it before a step that may need more blocks than are free. (`jaxkv.Engine` does.)

    Each group of layers keeps the blocks that a next prompt needs of it. Layers with a sliding window or chunk need
    only the last ones before a point where a prompt may go on: where one ended, or where prompts part. With recurrent
    layers a prompt is found up to a snapshot of their states: `insert` keeps those of `CacheConfig.snapshot_every`, and
    of the row's end where a block ends there. (`jaxkv.Engine` makes them where they pay.)

    Go on with the cache that each method returns. The cache itself records the contents of its kept blocks, so an older
    cache gets only blocks that it really has. An index whose call was interrupted, say by Ctrl-C, recovers with the
    next cache that it gets; blocks known to only one of the two are freed. Use it from one thread at a time.

    Args:
      config: the config of the caches.
      spill_bytes: host memory for blocks that `make_room` takes from the device; they come back when adopted.
      max_pinned: the largest share of a group's blocks that may be pinned.
      hash_function: from a (hash, tokens) pair to a hash, for tests.
      disk: a folder for blocks that leave host memory, one file each. Processes may share it, concurrently or one after
        another. Needs `spill_bytes` that hold a prompt's blocks, since they return through host memory. Damaged files
        and those of another config, model or salt are never used.
      disk_bytes: the limit of bytes of all blocks in the folder; the least recently used are deleted. Each further
        process that writes there at the same time may exceed it by an eighth.
      model: the name of the model, or a fingerprint. With `disk`, blocks of another model are not found.
      snapshot_bytes: device memory beside the cache for states of recurrent layers, one snapshot for each end of a
        prompt; those that save the fewest tokens go first, to up to half of `spill_bytes`, and to `disk`. Default: a
        tenth of the cache's bytes; in a small cache four snapshots a row, as far as they take no more than 64 MiB.

    Attributes:
      files: its files in the folder, or None. Pass them as `disk` to another index of the process, so that both count
        towards one `disk_bytes`.
      model: the name of the model, which the hashes of `events` follow from; an engine's has none without `disk`.

    Chaining block hashes is vLLM's idea (automatic prefix caching); comparing the tokens on every hit makes it safe.
    Every method takes `salt`, a str or bytes: sequences with different salts share nothing, for example those of two
    tenants; and `adapter`, a str that names another dependency of the keys and values, such as a LoRA.

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
        self,
        config: CacheConfig,
        *,
        spill_bytes: float = 0,
        max_pinned: float = 0.5,
        hash_function: Callable[[Any], Hashable] = hash,
        disk: str | os.PathLike | BlockFiles | None = None,
        disk_bytes: float | None = None,
        model: str | None = None,
        snapshot_bytes: float | None = None,
    ):
        check_config(config)
        if config.contiguous:
            raise ValueError('A PrefixCache needs layout="paged": in the contiguous layout rows share no blocks.')
        if snapshot_bytes is not None:
            snapshot_bytes = real("snapshot_bytes", snapshot_bytes, least=0)
        self.snapshot_bytes = snapshot_bytes
        refuse_evicting(config, "A PrefixCache takes", ("head",))
        if not callable(hash_function):
            raise ValueError(f"hash_function must be a function of a (hash, tokens) pair, not {show(hash_function)}.")
        self.config, self.max_pinned = config, real("max_pinned, a share of the blocks,", max_pinned, least=0, most=1)
        self.spill_bytes, self._hash_function = int(real("spill_bytes", spill_bytes, least=0)), hash_function
        self.files = open_disk(config, self.spill_bytes, disk, disk_bytes, model)
        self.model, self._owner = model, fingerprint(config, model)
        self._index = self._empty_index()
        self._told: dict[Place, SavedBlock] = {}  # blocks that `events` has reported
        self._landing = Landing()  # successors of the pools donated to `adopt`
        self._counts = dict.fromkeys(
            ("lookups", "hits", "tokens_asked", "tokens_saved", "blocks_evicted", "blocks_spilled", "blocks_restored"),
            0,
        )

    def __repr__(self) -> str:
        kept, counts = sum(int(np.count_nonzero(labels)) for labels in self._index.kept), self._counts
        host = f", {format_bytes(self._index.host_bytes)} in host memory" if self.spill_bytes else ""
        disk = "" if self.files is None else ", more on disk"
        return (
            f"PrefixCache({kept} of {sum(self.config.group_blocks)} blocks kept{host}{disk}, {counts['hits']} hits in "
            f"{counts['lookups']} lookups, {counts['tokens_saved']} of {counts['tokens_asked']} tokens saved)"
        )

    # Using it.

    def match(
        self,
        tokens: Sequence[int],
        *,
        salt: str | bytes | None = None,
        adapter: str | None = None,
        is_repeat: bool = False,
    ) -> Match:
        """Finds the cached prefix of a prompt: whole blocks, and never the prompt's last token.

        Layers with a sliding window need only the blocks that the next token sees, leading ones that they keep too.
        Blocks on disk alone are read into host memory, up to `spill_bytes`; other blocks there may move to the disk.

        Args:
          is_repeat: a request that has asked before asks again, and may find what it has left here itself: neither
            this lookup nor an `adopt` of what it finds counts in `stats`.
        """
        tokens, is_repeat = read_tokens(tokens), flag("is_repeat", is_repeat)
        root = self._root(salt, adapter)
        wanted = tokens[: max(len(tokens) - 1, 0)]
        if self.files is None:
            chain = self._index.look(root, wanted)
            known, chain = len(chain), chain[: self._index.usable(chain)]
        else:
            chain, known = recall(self._index, root, wanted)
        self._index.use(chain)
        if not is_repeat:
            self._counts["lookups"] += 1
            self._counts["tokens_asked"] += len(tokens)
        size = self.config.block_size
        return Match(len(chain) * size, tuple(chain), is_repeat, known * size)

    def known(self, tokens: Sequence[int], *, salt: str | bytes | None = None, adapter: str | None = None) -> int:
        """Returns how many tokens `match` would find without the disk; does not count as a lookup."""
        chain = self._index.walk(self._root(salt, adapter), read_tokens(tokens)[:-1])
        return self._index.usable(chain) * self.config.block_size

    def adopt(self, cache: Cache, row: int, match: Match, *, donate: bool = False) -> Cache:
        """Returns the cache with the matched prefix in an empty row. Blocks on the device are shared, not copied;
        states of recurrent layers are copied.

        Args:
          donate: update the pools in place where blocks come back from the host; the given cache is donated. If the
            call was interrupted, `recover` returns it.

        Raises:
          IndexError: no such row. ValueError: the row is not empty, or not all of the match is in this cache: some
            has been evicted since, or this is an older cache.
          OutOfBlocks: no room for the blocks that come back from the host.
        """
        cache, states = self.adopt_blocks(cache, row, match, donate=donate)
        return put_states(cache, row, states) if states else cache

    def adopt_blocks(self, cache: Cache, row: int, match: Match, *, donate: bool = False) -> tuple[Cache, Any]:
        """Does `adopt` without the states of recurrent layers. Returns the cache, and the states `[1, ...]` that the
        row is to have; none if there are no such layers, or no tokens."""
        cache = self._whole(cache)
        check_row(cache, row)
        if not isinstance(match, Match):
            raise ValueError(f"match must be what the method match returned, not {show(match)}.")
        length, counts = jax.device_get((cache.lengths, [tables.num_blocks_per_row for tables in cache.tables]))
        if length[row] or any(h[row] for h in counts):
            raise ValueError(
                f"Row {row} holds {length[row]} tokens in {max(int(h[row]) for h in counts)} blocks: adopt into an "
                "empty row, or free it first."
            )
        if not match.num_tokens:
            return cache, ()
        change, chain = Change(self._index, cache), match.nodes
        is_known = all(node.label in self._index.nodes for node in chain)
        if not is_known or self._index.usable(chain) < len(chain):
            raise ValueError(
                "Blocks of this match have been evicted since, or are not in this cache: match the prompt again, and "
                "adopt into the cache that the last call returned."
            )
        columns = find_needed(self.config, len(chain))
        change.restore(chain, columns, self._landing.put if donate else put)
        change.attach(row, chain, columns)
        saved = {} if match.is_repeat else {"hits": 1, "tokens_saved": match.num_tokens}
        snapshots = self._index.snapshots
        states = () if snapshots is None else put_local_shards(snapshots.use(chain[-1]), cache.states)
        return self._commit(change, chain, counts=saved), states

    def insert(
        self,
        cache: Cache,
        row: int,
        tokens: Sequence[int],
        *,
        salt: str | bytes | None = None,
        adapter: str | None = None,
    ) -> Cache:
        """Indexes a row's full blocks.

        Args:
          tokens: the tokens of the row, from its first on. If there are fewer than in the row, only those are indexed;
            tokens that the row does not hold yet are ignored. Blocks that are indexed with another salt or adapter
            already are left out.

        Returns:
          The cache, which keeps these blocks when the row is freed. A row with evicted tokens is not indexed: it
          is no prefix of another.

        Raises:
          IndexError: no such row. ValueError: tokens that are not integers, or a salt of the wrong type.
        """
        tokens = read_tokens(tokens)
        cache = self._whole(cache)
        check_row(cache, row)
        states = {n: read() for n, read in find_snapshots(cache, row, len(tokens)).items()}
        return self.insert_more(cache, row, tokens, len(tokens), None, salt=salt, adapter=adapter, states=states)[0]

    def insert_more(
        self,
        cache: Cache,
        row: int,
        tokens: list[int],
        count: int,
        after: Node | None,
        *,
        salt: str | bytes | None = None,
        adapter: str | None = None,
        states: Mapping[int, Any] | None = None,
    ) -> tuple[Cache, Node | None]:
        """Does `insert` of a row's first `count` tokens, for an engine whose rows grow: what was indexed is not looked
        at again.

        Args:
          after: the node that this method returned for the same row and tokens before, if any.
          states: of recurrent layers, by the number of tokens that they have taken in, full blocks.

        Returns:
          The cache, and the node of the last full block.
        """
        cache = self._whole(cache)
        check_row(cache, row)
        root = self._root(salt, adapter)
        thinned = [group_tables.evicted[row] for group_tables in cache.tables if group_tables.evicted is not None]
        tables = [
            (group_tables.tables[row], None if group_tables.skipped is None else group_tables.skipped[row])
            for group_tables in cache.tables
        ]
        tables, length, thinned = jax.device_get((tables, cache.lengths[row], thinned))
        length = 0 if any(thinned) else length
        change = Change(self._index, cache)
        count, size = min(count, int(length)), self.config.block_size
        if after is not None and (count < (after.depth + 1) * size or not self._index.can_go_on(after)):
            after = None
        first = 0 if after is None else after.depth + 1
        more = read_tokens(tokens[first * size : count])
        chain = self._index.extend(root if after is None else after, more)
        row_blocks = [row_entries(own, skipped, self.config, group) for group, (own, skipped) in enumerate(tables)]
        change.offer(chain, [blocks[first:] for blocks in row_blocks])
        last = chain[-1] if chain else after
        cache = self._commit(change, chain, after=after)
        self._keep_states(last, states or {})
        return cache, last

    def _keep_states(self, last: Node | None, states: Mapping[int, Any]) -> None:
        """Keeps states after tokens of the chain that ends at a node."""
        index, size = self._index, self.config.block_size
        if index.snapshots is None or last is None or not states:
            return
        nodes = {(node.depth + 1) * size: node for node in last.back() if node.label in index.nodes}
        found = {nodes[n]: x for n, x in sorted(states.items()) if n in nodes and not index.snapshots.has(nodes[n])}
        index.keep_states(found)

    # Keeping it small.

    def make_room(self, cache: Cache, num_blocks: int | Sequence[int]) -> Cache:
        """Frees indexed blocks until `num_blocks` are free in every group of layers, or no more can be freed.

        Blocks that a row uses or that are pinned stay. With `spill_bytes`, freed blocks are kept in host memory.

        Args:
          num_blocks: an integer, or one for each group of layers.
        """
        cache = self._whole(cache)
        given: Any = num_blocks if np.ndim(num_blocks) else [num_blocks] * len(cache.tables)
        wanted = [integer("num_blocks", n, least=0) for n in given]
        if len(wanted) != len(cache.tables):
            raise ValueError(f"num_blocks must have one integer for each of {len(cache.tables)} groups, not {wanted}.")
        if all(n <= int(tables.num_free) for n, tables in zip(wanted, cache.tables, strict=True)):
            return cache
        change = Change(self._index, cache)
        change.evict(wanted)
        return self._commit(change)

    def release_states(self) -> None:
        """Frees the device memory of snapshots, whose states go to host memory."""
        if self._index.snapshots is not None:
            self._index.snapshots.move_to_host(self._index.nodes)

    def pin(self, tokens: Sequence[int], *, salt: str | bytes | None = None, adapter: str | None = None) -> int:
        """Pins the cached prefix of `tokens` against eviction, until `unpin`. Returns its number of tokens: as many as
        `match` then finds of a prompt that goes on behind them.

        In layers with a sliding window it pins the blocks that the next token sees. Where those are gone, as they may
        be in the middle of a prompt, the prefix ends earlier; so it does where blocks are on disk alone.

        Raises:
          ValueError: more blocks would be pinned than `max_pinned` allows; none is pinned then.
        """
        tokens, root = read_tokens(tokens), self._root(salt, adapter)
        index = self._index
        chain = index.walk(root, tokens)
        chain = chain[: index.usable(chain)]
        for group, (own, num_blocks) in enumerate(zip(index.find_needed(chain), self.config.group_blocks, strict=True)):
            pinned = sum(1 for node in index.pinned[group].union(own) if node.blocks[group])
            if pinned > (limit := int(self.max_pinned * num_blocks)):
                raise ValueError(
                    f"Pinning these {len(chain) * self.config.block_size} tokens would pin {pinned} of {num_blocks} "
                    f"blocks, more than the {limit} that max_pinned={self.max_pinned} allows: unpin others, or "
                    f"raise {self.config.size_argument}."
                )
        if chain:
            index.pin(chain[-1], tokens)
        return len(chain) * self.config.block_size

    def unpin(self, tokens: Sequence[int], *, salt: str | bytes | None = None, adapter: str | None = None) -> None:
        """Undoes one `pin` of the same tokens: blocks that several pins share stay until the last one is undone.

        Raises:
          ValueError: the tokens are not pinned, as after a `pin` that returned 0. Pins of other tokens stay.
        """
        tokens, root = read_tokens(tokens), self._root(salt, adapter)
        if not self._index.unpin(root, tokens):
            raise ValueError("These tokens are not pinned: unpin takes what pin was given, once for each pin.")

    def reset(self, cache: Cache) -> Cache:
        """Drops all blocks, pinned ones and files of this config and model too; frees those that no row holds."""
        cache = self._whole(cache)
        index = self._empty_index()
        cache = cache.replace(tables=tuple(map(keep, cache.tables, index.kept)))
        if self.files is not None:
            self.files.clear()
        self._index = index
        return cache

    def rename(self, model: str | None) -> None:
        """Drops the files of the model so far, and goes on with another one's: `model` is its name or fingerprint. For
        weights that change; `reset` or `forget` before drops the other blocks. Raises ValueError for no such name."""
        check_model_name(model)
        if self.files is not None:
            self.files.clear()
            self.files.rename(model)
        self.model, self._owner = model, fingerprint(self.config, model)
        self._index = self._empty_index()

    def forget(self) -> None:
        """Frees the host memory, and forgets the blocks of any cache. Files stay: see `flush`."""
        self._index, self._landing, self._told = self._empty_index(), Landing(), {}

    def flush(self, cache: Cache) -> None:
        """Writes to `disk` the blocks that the index has on the device and in host memory, for the next process.

        >>> import jaxkv, tempfile
        >>> sizes = dict(num_layers=1, num_kv_heads=2, head_dim=8, max_seqs=2, max_seq_len=64)
        >>> config = jaxkv.CacheConfig.uniform(**sizes, num_blocks=4)
        >>> options = dict(spill_bytes=10**4, disk=tempfile.mkdtemp(), disk_bytes=10**5)
        >>> prefix, tokens = jaxkv.PrefixCache(config, **options), [*range(20)]
        >>> prefix.flush(prefix.insert(jaxkv.extend(jaxkv.init(config), [20, 0]), 0, tokens))
        >>> jaxkv.PrefixCache(config, **options).match(tokens).num_tokens
        16
        """
        change = Change(self._index, self._whole(cache))
        if self.files is not None:
            flush(self._index, change.cache)

    def recover(self, cache: Cache) -> Cache:
        """Returns the cache that was donated to an interrupted call of `adopt` with `donate=True`, as it was before
        that call, except for blocks that no row held and that were to make room. Returns any other cache as it is. All
        methods do this by themselves.

        Raises:
          CacheError: it was donated elsewhere, or the device failed.
        """
        return self._whole(cache)

    # Looking at it.

    def available(self, cache: Cache) -> list[int]:
        """Returns a lower bound, for each group of layers, on blocks free or that `make_room` could free."""
        cache = self._whole(cache)
        counts = jax.device_get([(tables.num_free, count_unused(tables)) for tables in cache.tables])
        return [int(free) + max(0, int(unused) - self.pinned(g)) for g, (free, unused) in enumerate(counts)]

    def pinned(self, group: int) -> int:
        """Returns the pinned blocks of a group. Raises ValueError for no such group."""
        group = integer("group", group, least=0, most=len(self.config.groups) - 1)
        return sum(1 for node in self._index.pinned[group] if node.blocks[group])

    def stats(self) -> dict[str, Any]:
        """Returns the contents of the index and its savings so far, as plain numbers.

        `tokens_saved` of `tokens_asked` did not have to be computed; `hit_rate` is their ratio. A request counts once:
        one that an `Engine` preempts and resumes finds its own blocks, which saves nothing.
        """
        self._index.mend()
        found = {
            "hit_rate": self._counts["tokens_saved"] / max(self._counts["tokens_asked"], 1),
            "blocks": [int(np.count_nonzero(labels)) for labels in self._index.kept],
            "blocks_pinned": [self.pinned(g) for g in range(len(self.config.groups))],
            "host_bytes": self._index.host_bytes,
        }
        snapshots = self._index.snapshots
        found["snapshots"] = 0 if snapshots is None else len(snapshots.on_device)
        found["snapshot_bytes"] = 0 if snapshots is None else snapshots.device_bytes
        found["snapshots_on_host"] = 0 if snapshots is None else len(snapshots.hosted)
        return self._counts | found | ({} if self.files is None else self.files.stats())

    def events(self) -> list[PrefixEvent]:
        """Returns the blocks stored or removed since the last call, on the device, on the host and on disk.

        A router of prompts to several processes can track their contents with it. Blocks that came and went in between
        are not reported. A folder's files are reported if this index has written or looked them up. It costs time and
        memory for each block that is held.
        """
        self._index.mend()
        now = holdings(self._index)
        events, self._told = differences(self._told, now), now
        return events

    def hashes(
        self, tokens: Sequence[int], *, salt: str | bytes | None = None, adapter: str | None = None
    ) -> list[str]:
        """Returns the hashes in `events` of the full blocks of `tokens`, whether or not they are cached."""
        digest, found = digest_of(self._owner, read_identity(salt, adapter)), []
        for block in self._index.split(read_tokens(tokens)):
            digest = digest_of(digest, block)
            found.append(digest.hex())
        return found

    def check_invariants(self, cache: Cache) -> None:
        """Raises AssertionError unless the index is sound, and follows the cache. For tests and debugging."""
        Change(self._index, self._whole(cache))
        self._index.check()

    # The parts.

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "A PrefixCache cannot be copied or pickled, for it follows one line of caches: make another one from its "
            "config, which fills again as rows are inserted."
        )

    def _whole(self, cache: Cache) -> Cache:
        check_cache(cache, may_be_donated=True)  # to this: then the successor is here
        if cache.config != self.config:
            raise ValueError("This PrefixCache was made for caches of another config: make one from cache.config.")
        if isinstance(cache.tables[0].lengths, jax.core.Tracer):
            raise ValueError("A PrefixCache cannot be used inside jit: what it has is known on the host alone.")
        if (whole := self._landing.whole(cache)) is cache:
            self._landing = Landing()  # successors are no longer needed
        return whole

    def _empty_index(self) -> PrefixIndex:
        snapshots = None
        if self.config.recurrent_layers:
            snapshots = Snapshots(self.config, self.snapshot_bytes, self.spill_bytes, self.files)
        return PrefixIndex(self.config, self.spill_bytes, self._hash_function, self.files, self._owner, snapshots)

    def _root(self, salt: Any, adapter: Any) -> Node:
        identity = read_identity(salt, adapter)
        self._index.mend()
        return self._index.root(identity)

    def _commit(
        self,
        change: Change,
        chain: Sequence[Node] = (),
        *,
        after: Node | None = None,
        counts: Mapping[str, int] | None = None,
    ) -> Cache:
        """Does the last step of every change."""
        self._index.hold(change.kept, hosted=change.spilled, chain=chain, after=after)
        for name, count in (change.counts | dict(counts or {})).items():
            self._counts[name] += count
        return change.cache
