"""The cache in plain Python: rows are lists of tokens, blocks are objects, and the free ones are only counted.

Which physical block a row gets is not part of the contract, so the oracle has no block numbers: it is compared with a
cache by what the rows hold, by which places of the tables share a block, and by how many blocks are in use.
"""

import math

import numpy as np

import jaxkv


class Block:
    """Some rows' block. All that counts is which other places of the tables hold the same one."""


class Row:
    def __init__(self):
        self.tokens = []  # one entry per token: a list over layers of (k, v), [K, D] each
        self.blocks = []
        self.new = 0
        self.offset = 0
        self.failed = False

    def become(self, other, blocks):
        """Hold what another row holds, its failure included, in `blocks`."""
        self.tokens, self.blocks, self.new, self.failed = list(other.tokens), blocks, 0, other.failed


class Oracle:
    def __init__(self, config: jaxkv.CacheConfig):
        self.config = config
        self.rows = [Row() for _ in range(config.max_seqs)]
        self.contiguous = config.layout == "contiguous"
        for row in self.rows:
            row.blocks = [Block()] if self.contiguous else []
        self.peak = self.used

    # Blocks.

    @property
    def used(self) -> int:
        return len({id(block) for row in self.rows for block in row.blocks})

    @property
    def free_blocks(self) -> int:
        return self.config.num_blocks - self.used

    def owners(self, block) -> int:
        return sum(block is b for row in self.rows for b in row.blocks)

    def blocks_for(self, length) -> int:
        return math.ceil(length / self.config.block_size)

    def partial(self, length) -> bool:
        """Whether the last block of so many tokens can still be written, so that it cannot be shared."""
        return length % self.config.block_size > 0 and not self.contiguous

    def grow(self, row, length) -> bool:
        """Give a row the blocks for `length` tokens, or leave it alone and say no."""
        more = max(0, self.blocks_for(length) - len(row.blocks))
        if length > self.config.max_seq_len or more > self.free_blocks:
            return False
        row.blocks += [Block() for _ in range(more)]
        self.peak = max(self.peak, self.used)
        return True

    # The functions of the library.

    def extend(self, counts):
        offset = 0
        for row, count in zip(self.rows, counts, strict=True):
            row.new, row.offset = 0, offset
            offset += max(0, count)
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
        """`k[layer]` is `[S, T, K, D]` padded or `[N, K, D]` packed."""
        packed = k[0].ndim == 3
        self.drop_unfit(k[0].shape[-3], packed)
        for i, row in enumerate(self.rows):
            for t, place in enumerate(self.places(i, row, packed)):
                row.tokens[len(row.tokens) - row.new + t] = [
                    (k[layer][place].copy(), v[layer][place].copy()) for layer in range(self.config.num_layers)
                ]

    def positions(self, shape):
        out = np.zeros(shape, np.int32)
        for i, row in enumerate(self.rows):
            for t, place in enumerate(self.places(i, row, len(shape) == 1)):
                out[place] = len(row.tokens) - row.new + t
        return out

    def attend(self, q, layer):
        out = np.zeros(q.shape, np.float64)
        num_heads, head_dim = q.shape[-2:]
        for i, row in enumerate(self.rows):
            if not row.new:
                continue
            k, v = (np.stack([token[layer][half] for token in row.tokens]).astype(np.float64) for half in (0, 1))
            k, v = (np.repeat(x, num_heads // x.shape[1], axis=1) for x in (k, v))  # [C, H, D]
            for t, place in enumerate(self.places(i, row, q.ndim == 3)):
                seen = len(row.tokens) - row.new + t + 1
                logits = np.einsum("hd,chd->hc", q[place], k[:seen]) * head_dim**-0.5
                weights = np.exp(logits - logits.max(axis=1, keepdims=True))
                weights /= weights.sum(axis=1, keepdims=True)
                out[place] = np.einsum("hc,chd->hd", weights, v[:seen])
        return out

    def reserve(self, targets):
        for row, target in zip(self.rows, targets, strict=True):
            if target < 0 or not self.grow(row, target):
                row.failed = True

    def fork(self, src, dst):
        count = len(self.rows)
        source = list(range(count))
        for s, d in zip(src, dst, strict=True):
            if 0 <= d < count:
                source[d] = s
        moved = [source[r] != r for r in range(count)]
        free = self.free_blocks  # what the dst rows held is not counted on
        before = [(row.blocks, len(row.tokens)) for row in self.rows]
        for r, row in enumerate(self.rows):
            if not moved[r]:
                continue
            if not 0 <= source[r] < count or moved[source[r]]:
                row.failed = True
                continue
            blocks, length = before[source[r]]
            copies = int(self.partial(length))
            if copies > free:
                row.failed = True
                continue
            free -= copies
            row.become(self.rows[source[r]], self.share(row, blocks, length))
        self.peak = max(self.peak, self.used)

    def share(self, row, blocks, length):
        """The blocks of a row that becomes a fork of one with `blocks` and `length`."""
        if self.contiguous:
            return row.blocks
        full = length // self.config.block_size
        return blocks[:full] + [Block() for _ in range(self.partial(length))]

    def reorder(self, order):
        count = len(self.rows)
        moved = [order[r] != r for r in range(count)]
        before = [(row.blocks, len(row.tokens)) for row in self.rows]
        old = [Row() for _ in self.rows]
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
                        blocks[r][-1] = source[len(blocks[r]) - 1]
            sensible = len({id(b) for held in blocks for b in held}) <= self.config.num_blocks
        for r, row in enumerate(self.rows):
            if moved[r] and sensible:
                row.become(old[order[r]], blocks[r])
            elif moved[r]:
                row.failed = True
        self.peak = max(self.peak, self.used)

    def truncate(self, targets):
        free = self.free_blocks  # what the rows give back is not counted on
        shared = {id(b) for row in self.rows for b in row.blocks if self.owners(b) > 1}
        for row, target in zip(self.rows, targets, strict=True):
            if target < 0:
                row.failed = True
            if not 0 <= target < len(row.tokens):
                continue
            keep = self.blocks_for(target)
            copies = int(self.partial(target) and id(row.blocks[keep - 1]) in shared)
            if copies > free:
                row.failed = True
                continue
            free -= copies
            del row.tokens[target:]
            row.new = 0
            if not self.contiguous:
                row.blocks = row.blocks[: keep - copies] + [Block() for _ in range(copies)]
        self.peak = max(self.peak, self.used)

    def free(self, rows):
        for r in set(rows):
            if 0 <= r < len(self.rows):
                row, kept = self.rows[r], self.rows[r].blocks if self.contiguous else []
                row.become(Row(), kept)

    # Comparison.

    def assert_matches(self, cache: jaxkv.Cache, dense) -> None:
        """`dense[layer]` is `cache.combined(layer)`."""
        tables = cache.tables[0]
        lengths, new, failed, entries, free, peak = (
            np.asarray(x)
            for x in (tables.lengths, tables.new, tables.failed, tables.tables, tables.num_free, tables.peak)
        )
        assert lengths.tolist() == [len(row.tokens) for row in self.rows]
        assert new.tolist() == [row.new for row in self.rows]
        assert failed.tolist() == [row.failed for row in self.rows]
        assert free == self.free_blocks
        assert peak == self.peak
        held = [entries[r][entries[r] != 0].tolist() for r in range(len(self.rows))]
        assert pattern(held) == pattern([[id(b) for b in row.blocks] for row in self.rows])
        for layer, actual in enumerate(dense):
            expected = np.zeros(actual.shape, actual.dtype)
            for r, row in enumerate(self.rows):
                for position, token in enumerate(row.tokens):
                    expected[r, 0, :, position], expected[r, 1, :, position] = token[layer]
            np.testing.assert_array_equal(actual, expected)


def pattern(held):
    """The same lists with every block replaced by the order in which it first appears."""
    seen = {}
    return [[seen.setdefault(block, len(seen)) for block in row] for row in held]
