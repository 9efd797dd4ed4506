"""The cache in plain Python: rows are lists of tokens, blocks are objects, and the free ones are only counted.

Which physical block a row gets is not part of the contract, so the oracle has no block numbers: it is compared with a
cache by what the rows hold, by which places of the tables share a block, and by how many blocks are in use.
"""

import itertools
import math

import numpy as np
from steps import scale_of

import jaxkv


class Block:
    """Some rows' block. All that counts is which other places of the tables hold the same one."""


class Row:
    def __init__(self, num_groups):
        self.tokens = []  # one `Token` for each
        self.blocks = [[] for _ in range(num_groups)]  # for each group, column by column; None: given back
        self.new = 0
        self.offset = 0
        self.failed = False

    def become(self, other, blocks):
        """Hold what another row holds, its failure included, in `blocks`."""
        self.tokens, self.blocks, self.new, self.failed = list(other.tokens), blocks, 0, other.failed


class Token(list):
    """A list over layers of keys and values [2, K, D], or [1, K, D] of a latent one. Its id stands for it and for
    whatever was before it."""

    ids = itertools.count()

    def __init__(self, values):
        super().__init__(values)
        self.id = next(self.ids)


class Indexed:
    """A full block that a prefix cache knows: for each group the block, or whether it is in host memory."""

    def __init__(self, num_groups):
        self.blocks = [None] * num_groups
        self.on_host = [False] * num_groups


class Stored:
    """A row in host memory: its tokens, and for each group the blocks that it had for them, column by column."""

    def __init__(self, row, num_columns):
        self.tokens = list(row.tokens)
        self.blocks = [held[:num_columns] for held in row.blocks]


class Oracle:
    def __init__(self, config: jaxkv.CacheConfig):
        self.config = config
        self.contiguous = config.layout == "contiguous"
        # Layers that store and have the same window share tables, in the order in which the windows first appear.
        stored = [layer.window for layer in config.layers if layer.shares_with is None]
        self.windows = [None] if self.contiguous else list(dict.fromkeys(stored))
        self.groups = range(len(self.windows))
        self.rows = [Row(len(self.windows)) for _ in range(config.max_seqs)]
        if self.contiguous:
            for row in self.rows:
                row.blocks = [[Block()]]
        self.index = {}  # (salt, ids of all tokens up to its last) -> Indexed, the least recently used first
        self.peak = [self.used(g) for g in self.groups]

    def is_empty(self, r) -> bool:
        return not self.rows[r].tokens and (self.contiguous or not any(self.rows[r].blocks))

    # Layers.

    def owner(self, layer):
        """The layer whose keys and values a layer reads."""
        shared = self.config.layers[layer].shares_with
        return layer if shared is None else shared

    def group(self, layer):
        return 0 if self.contiguous else self.windows.index(self.config.layers[self.owner(layer)].window)

    # Blocks.

    def held(self, g):
        """The blocks of a group, once for every holder: rows and the index."""
        indexed = [one.blocks[g] for one in self.index.values()]
        return [block for blocks in (*(row.blocks[g] for row in self.rows), indexed) for block in blocks if block]

    def used(self, g) -> int:
        return len({id(block) for block in self.held(g)})

    def free_blocks(self, g) -> int:
        return self.config.group_blocks[g] - self.used(g)

    def note_peak(self):
        self.peak = [max(peak, self.used(g)) for g, peak in enumerate(self.peak)]

    def blocks_for(self, length) -> int:
        return math.ceil(length / self.config.block_size)

    def partial(self, length) -> bool:
        """Whether the last block of so many tokens can still be written, so that it cannot be shared."""
        return length % self.config.block_size > 0 and not self.contiguous

    def out_of_window(self, g, column, length) -> bool:
        """Whether the token that follows `length` tokens sees nothing of a block, which is not their last either."""
        window, end = self.windows[g], (column + 1) * self.config.block_size
        return window is not None and end <= length - window + 1 and end < length

    def give_back(self):
        for row, g in itertools.product(self.rows, self.groups):
            for column in range(len(row.blocks[g])):
                if self.out_of_window(g, column, len(row.tokens)):
                    row.blocks[g][column] = None

    def too_long(self, row, length) -> bool:
        """Whether a row of so many tokens would hold more than `max_seq_len` at once in some group, or more blocks than
        a table has columns for."""
        if self.contiguous or None in self.windows:
            return length > self.config.max_seq_len
        for window, held, width in zip(self.windows, row.blocks, self.config.table_widths, strict=True):
            first = max(0, len(row.tokens) - max(window, 2) + 1)
            begin = next((column for column, block in enumerate(held) if block), 0)
            if length - first > self.config.max_seq_len or self.blocks_for(length) - begin > width:
                return True
        return False

    def grow(self, row, length) -> bool:
        """Give a row the blocks for `length` tokens in every group, or leave it alone and say no."""
        more = [max(0, self.blocks_for(length) - len(held)) for held in row.blocks]
        if self.too_long(row, length) or any(more[g] > self.free_blocks(g) for g in self.groups):
            return False
        for held, count in zip(row.blocks, more, strict=True):
            held += [Block() for _ in range(count)]
        self.note_peak()
        return True

    # The functions of the library.

    def extend(self, counts):
        self.give_back()
        offset = 0
        for row, count in zip(self.rows, counts, strict=True):
            row.new, row.offset = 0, offset
            offset += max(0, count)
            if row.failed:  # it takes part in nothing
                continue
            if count > 0 and self.grow(row, len(row.tokens) + count):
                row.new = count
                row.tokens += [[None] * self.config.num_layers for _ in range(count)]
            elif count != 0:
                row.failed = True

    def extend_to_append(self, counts, num_places, packed):
        """`append` knows how many places there are, and refuses what goes past them before it takes blocks."""
        ends = [sum(max(0, c) for c in counts[: r + 1]) if packed else counts[r] for r in range(len(counts))]
        self.extend([-1 if c > 0 and end > num_places else c for c, end in zip(counts, ends, strict=True)])

    def places(self, row_index, row, packed):
        """Where the tokens of a row's step stand in the step's arrays."""
        return [(row.offset + t,) if packed else (row_index, t) for t in range(row.new)]

    def drop_unfit(self, num_places, packed):
        for row in self.rows:
            if row.new and (row.offset + row.new if packed else row.new) > num_places:
                del row.tokens[-row.new :]
                row.new, row.failed = 0, True

    def write(self, k, v):
        """`k[layer]` is `[S, T, K, D]` padded or `[N, K, D]` packed; None for layers that share another's. So is
        `v[layer]`, but None for latent layers too."""
        packed = k[0].ndim == 3
        self.drop_unfit(k[0].shape[-3], packed)
        for i, row in enumerate(self.rows):
            for t, place in enumerate(self.places(i, row, packed)):
                row.tokens[len(row.tokens) - row.new + t] = Token(
                    None if parts[0] is None else np.array([x[place] for x in parts if x is not None])
                    for parts in zip(k, v, strict=True)
                )

    def positions(self, shape):
        out = np.zeros(shape, np.int32)
        for i, row in enumerate(self.rows):
            for t, place in enumerate(self.places(i, row, len(shape) == 1)):
                out[place] = len(row.tokens) - row.new + t
        return out

    def attend(self, q, layer):
        config, num_heads = self.config.layers[layer], q.shape[-2]
        out = np.zeros((*q.shape[:-1], config.rank or config.head_dim), np.float64)
        window, scale = config.window, scale_of(config)
        for i, row in enumerate(self.rows):
            if not row.new:
                continue
            stored = [token[self.owner(layer)] for token in row.tokens]
            k, v = (np.stack([token[half] for token in stored]).astype(np.float64) for half in (0, -1))
            v = v[..., : config.rank]
            k, v = (np.repeat(x, num_heads // x.shape[1], axis=1) for x in (k, v))  # [C, H, D]
            for t, place in enumerate(self.places(i, row, q.ndim == 3)):
                end = len(row.tokens) - row.new + t + 1
                seen = slice(0 if window is None else max(0, end - window), end)
                logits = np.einsum("hd,chd->hc", q[place], k[seen]) * scale
                weights = np.exp(logits - logits.max(axis=1, keepdims=True))
                weights /= weights.sum(axis=1, keepdims=True)
                out[place] = np.einsum("hc,chd->hd", weights, v[seen])
        return out

    def reserve(self, targets):
        for row, target in zip(self.rows, targets, strict=True):
            if not row.failed and (target < 0 or not self.grow(row, target)):
                row.failed = True

    def fork(self, src, dst):
        count = len(self.rows)
        source = list(range(count))
        for s, d in zip(src, dst, strict=True):
            if 0 <= d < count:
                source[d] = s
        moved = [source[r] != r for r in range(count)]
        before = [(row.blocks, len(row.tokens)) for row in self.rows]
        sensible = [moved[r] and 0 <= source[r] < count and not moved[source[r]] for r in range(count)]
        shared = {r: self.share(self.rows[r], *before[source[r]]) for r in range(count) if sensible[r]}
        # What the dst rows held counts if all copies can be met with it, else only what is free before.
        free = self.free_or_endless(shared)
        for r, row in enumerate(self.rows):
            if not moved[r]:
                continue
            copies = int(sensible[r] and self.partial(before[source[r]][1]))
            if not sensible[r] or copies > min(free):
                row.failed = True
                continue
            free = [n - copies for n in free]
            row.become(self.rows[source[r]], shared[r])
        self.note_peak()

    def free_or_endless(self, new_blocks):
        """The free blocks of each group; endless if rows can have `new_blocks` all at once."""
        rows = [new_blocks.get(r, row.blocks) for r, row in enumerate(self.rows)]
        for g in self.groups:
            indexed = [one.blocks[g] for one in self.index.values()]
            used = {id(block) for held in (*(blocks[g] for blocks in rows), indexed) for block in held if block}
            if len(used) > self.config.group_blocks[g]:
                return [self.free_blocks(g) for g in self.groups]
        return [math.inf] * len(self.groups)

    def share(self, row, blocks, length):
        """The blocks of a row that becomes a fork of one with `blocks` and `length`."""
        if self.contiguous:
            return row.blocks
        full = length // self.config.block_size
        return [held[:full] + [Block() for _ in range(self.partial(length))] for held in blocks]

    def reorder(self, order):
        count = len(self.rows)
        moved = [order[r] != r for r in range(count)]
        before = [(row.blocks, len(row.tokens)) for row in self.rows]
        old = [Row(len(self.groups)) for _ in self.rows]
        for copy, row in zip(old, self.rows, strict=True):
            copy.become(row, row.blocks)
        sensible = all(0 <= s < count for s in order)
        if sensible:
            blocks, inherited = [row.blocks for row in self.rows], set()
            for r in range(count):
                if moved[r]:
                    source, length = before[order[r]]
                    blocks[r] = self.share(self.rows[r], source, length)
                    # The partial block of a row that moves on itself goes to the first row that takes its place.
                    if self.partial(length) and moved[order[r]] and order[r] not in inherited:
                        inherited.add(order[r])
                        for held, before_held in zip(blocks[r], source, strict=True):
                            held[-1] = before_held[len(held) - 1]
            for g in self.groups:  # what the index keeps stays in use
                indexed = [one.blocks[g] for one in self.index.values()]
                needed = {id(block) for held in (*(b[g] for b in blocks), indexed) for block in held if block}
                sensible &= len(needed) <= self.config.group_blocks[g]
        for r, row in enumerate(self.rows):
            if moved[r] and sensible:
                row.become(old[order[r]], blocks[r])
            elif moved[r]:
                row.failed = True
        self.note_peak()

    def truncate(self, targets):
        held = [[id(block) for block in self.held(g)] for g in self.groups]
        plans = {}  # of each row that can be cut: the copies it needs in each group, and its blocks then
        for r, (row, target) in enumerate(zip(self.rows, targets, strict=True)):
            if target < 0:
                row.failed = True
            if not 0 <= target < len(row.tokens):
                continue
            keep = self.blocks_for(target)
            if any(
                row.blocks[g][column] is None and not self.out_of_window(g, column, target)
                for g, column in itertools.product(self.groups, range(keep))
            ):
                row.failed = True
                continue
            copies = [int(self.partial(target) and held[g].count(id(row.blocks[g][keep - 1])) > 1) for g in self.groups]
            blocks = [row.blocks[g][: keep - copies[g]] + [Block() for _ in range(copies[g])] for g in self.groups]
            plans[r] = copies, row.blocks if self.contiguous else blocks
        # What the rows give back counts if all copies can be met with it, else only what is free before.
        free = self.free_or_endless({r: blocks for r, (_, blocks) in plans.items()})
        for r, (copies, blocks) in plans.items():
            row = self.rows[r]
            if any(copies[g] > free[g] for g in self.groups):
                row.failed = True
                continue
            free = [n - c for n, c in zip(free, copies, strict=True)]
            del row.tokens[targets[r] :]
            row.new, row.blocks = 0, blocks
        self.note_peak()

    def free(self, rows):
        for r in set(rows):
            if 0 <= r < len(self.rows):
                row, kept = self.rows[r], self.rows[r].blocks if self.contiguous else [[] for _ in self.groups]
                row.become(Row(len(self.groups)), kept)

    def swap_out(self, rows):
        stored = [Stored(self.rows[r], self.blocks_for(len(self.rows[r].tokens))) for r in rows]
        self.free(rows)
        return stored

    def swap_in(self, rows, stored):
        """Blocks that rows shared are shared again, and full ones that a row has now, from the first on."""
        there = [{} for _ in self.groups]  # what stands for a block that was swapped out
        if not self.contiguous:
            for one, g in itertools.product(stored, self.groups):
                there[g] |= self.held_alike(g, one)
        for r, one in zip(rows, stored, strict=True):
            if not 0 <= r < len(self.rows):
                continue
            row, fresh = self.rows[r], [[] for _ in self.groups]
            if not self.contiguous:
                fresh = [[b for b in one.blocks[g] if b is not None and b not in there[g]] for g in self.groups]
            enough = all(len(blocks) <= self.free_blocks(g) for g, blocks in enumerate(fresh))
            if not self.is_empty(r) or not enough:
                row.failed = True
                continue
            row.tokens, row.new = list(one.tokens), 0
            if not self.contiguous:
                for g, blocks in enumerate(fresh):
                    there[g] |= {block: Block() for block in blocks}
                    row.blocks[g] = [None if block is None else there[g][block] for block in one.blocks[g]]
            self.note_peak()

    def held_alike(self, g, stored):
        """The blocks of the row that begins like a stored one for longest, by the blocks that they equal."""
        size, best = self.config.block_size, {}
        full = [c for c, b in enumerate(stored.blocks[g]) if b is not None and (c + 1) * size <= len(stored.tokens)]
        for row in self.rows:
            found = {}
            for column in full:
                end = (column + 1) * size
                own, other = ([token.id for token in x.tokens[column * size : end]] for x in (row, stored))
                if end > len(row.tokens) - row.new or row.blocks[g][column] is None or own != other:
                    break
                found[stored.blocks[g][column]] = row.blocks[g][column]
            best = max(best, found, key=len)
        return best

    # Prefix reuse.

    def keys(self, salt, tokens):
        """The names of the full blocks of tokens."""
        size, ids = self.config.block_size, [token.id for token in tokens]
        return [(salt, tuple(ids[:end])) for end in range(size, len(ids) + 1, size)]

    def insert(self, r, salt):
        row = self.rows[r]
        keys = self.keys(salt, row.tokens)
        for column, key in enumerate(keys):
            one = self.index.setdefault(key, Indexed(len(self.groups)))
            for g in self.groups:
                block = row.blocks[g][column]
                if (
                    one.blocks[g] is None
                    and block is not None
                    and all(o.blocks[g] is not block for o in self.index.values())
                ):
                    one.blocks[g], one.on_host[g] = row.blocks[g][column], False

    def needed(self, g, count):
        """The columns that the token behind `count` full blocks sees, or would write behind."""
        length = count * self.config.block_size
        return [column for column in range(count) if not self.out_of_window(g, column, length)]

    def match(self, salt, tokens):
        """The names of the most blocks of a prompt that are there; one more token is to follow."""
        keys = self.keys(salt, tokens)
        for count in range(len(keys), 0, -1):
            found = [self.index.get(key) for key in keys[:count]]
            if all(
                found[c] is not None and (found[c].blocks[g] is not None or found[c].on_host[g])
                for g in self.groups
                for c in self.needed(g, count)
            ):
                return keys[:count]
        return []

    def unused(self, g):
        """The names of indexed blocks that no row holds."""
        in_rows = {id(block) for row in self.rows for block in row.blocks[g]}
        return [key for key, one in self.index.items() if one.blocks[g] and id(one.blocks[g]) not in in_rows]

    def make_room(self, wanted, held, spared=()):
        """Which blocks go is the index's choice: `held` says what it has on the device afterwards, for each group."""
        for g in self.groups:
            missing = max(0, wanted[g] - self.free_blocks(g))
            could_go = [key for key in self.unused(g) if key not in spared]
            gone = [key for key in could_go if key not in held[g]]
            assert len(gone) == min(missing, len(could_go)), "as many go as must, and can"
            for key in gone:
                self.index[key].blocks[g], self.index[key].on_host[g] = None, True

    def can_adopt(self, keys) -> bool:
        """Whether there is room for what is on the host."""
        count = len(keys)
        absent = [[c for c in self.needed(g, count) if not self.index[keys[c]].blocks[g]] for g in self.groups]
        for g in self.groups:
            spared = sum(1 for key in keys if key in self.index and self.index[key].blocks[g])
            if any(absent) and len(absent[g]) > self.free_blocks(g) + max(0, len(self.unused(g)) - spared):
                return False
        return True

    def adopt(self, r, keys, tokens, held):
        count = len(keys)
        absent = [[c for c in self.needed(g, count) if not self.index[keys[c]].blocks[g]] for g in self.groups]
        self.make_room([len(columns) for columns in absent], held, keys)
        row = self.rows[r]
        for g in self.groups:
            for c in absent[g]:
                one = self.index[keys[c]]
                one.blocks[g], one.on_host[g] = Block(), False
            needed = self.needed(g, count)
            row.blocks[g] = [self.index[keys[c]].blocks[g] if c in needed else None for c in range(count)]
        row.tokens, row.new = list(tokens[: count * self.config.block_size]), 0
        self.note_peak()

    # Comparison.

    def assert_matches(self, cache: jaxkv.Cache, dense) -> None:
        """`dense[layer]` is `cache.combined(layer)`."""
        assert len(cache.tables) == len(self.groups)
        for g, tables in enumerate(cache.tables):
            assert np.asarray(tables.lengths).tolist() == [len(row.tokens) for row in self.rows]
            assert np.asarray(tables.new).tolist() == [row.new for row in self.rows]
            assert np.asarray(tables.failed).tolist() == [row.failed for row in self.rows]
            assert tables.num_free == self.free_blocks(g)
            assert tables.peak == self.peak[g]
            entries = in_order(tables)
            held = [row.blocks[g] + [None] * (entries.shape[1] - len(row.blocks[g])) for row in self.rows]
            assert pattern(entries.tolist(), 0) == pattern([[b and id(b) for b in row] for row in held], None)
        for layer, actual in enumerate(dense):
            expected, owner = np.zeros(actual.shape, actual.dtype), self.owner(layer)
            for r, row in enumerate(self.rows):
                held = np.array([block is not None for block in row.blocks[self.group(layer)]], bool)
                positions = np.flatnonzero(np.repeat(held, self.config.block_size)[: len(row.tokens)])
                positions = positions[positions < self.config.max_seq_len]  # as far as they are shown
                if positions.size:
                    tokens = np.array([row.tokens[p][owner] for p in positions.tolist()])  # [C, 2, K, D]
                    expected[r][:, :, positions] = np.moveaxis(tokens, 0, 2)
            if not np.array_equal(actual, expected):  # to say how takes long
                np.testing.assert_array_equal(actual, expected)


def in_order(tables):
    """The entries of tables without sinks, `[S, blocks]`: a column for each of a row's blocks, also where rows slid."""
    entries = np.asarray(tables.tables)
    if tables.skipped is None:
        return entries
    skipped = np.asarray(tables.skipped).tolist()
    return np.stack([np.pad(row, (n, max(skipped) - n)) for row, n in zip(entries, skipped, strict=True)])


def pattern(held, nothing):
    """The same lists with every block replaced by the order in which it first appears, and `nothing` by None."""
    seen = {}
    return [[None if b == nothing else seen.setdefault(b, len(seen)) for b in row] for row in held]
