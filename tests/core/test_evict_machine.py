"""Random operations with evictions among them, against a host model of lists: 400, and 100,000 by night.

The model has a list of tokens for each line (a row, or a row's head), and a list of block objects: of them it counts
which line shares one with which, and whether tokens were cut off, so that the bounds of its keys may be too wide.
"""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nightly import NIGHTLY

import jaxkv
from jaxkv import LayerConfig

OPERATIONS, SEEDS = 200, (range(500) if NIGHTLY else range(2))
ROWS, PLACES, SIZE, LONGEST = 3, 6, 3, 20
LAYERS = (
    LayerConfig(num_kv_heads=2, head_dim=2, evict="layer", bounds=True),
    LayerConfig(num_kv_heads=1, head_dim=2, bounds=True),
    LayerConfig(num_kv_heads=2, head_dim=2, evict="head"),
)  # fmt: skip
CONFIG = jaxkv.CacheConfig(
    layers=LAYERS, max_seqs=ROWS, max_seq_len=LONGEST, block_size=SIZE, group_blocks=(13, 17, 24), dtype="float32"
)
HEADS = CONFIG.group_heads  # lines of a row, group by group: each layer is one here
GROUPS, BOUNDED = range(len(LAYERS)), range(2)


class Block:
    """A line's block. All that counts is which other lines hold the same one, and whether it was cut."""

    def __init__(self, cut=False):
        self.cut = cut


class Line:
    def __init__(self):
        self.tokens, self.blocks, self.thinned = [], [], 0

    def copy(self):
        other = Line()
        other.tokens, other.blocks, other.thinned = list(self.tokens), list(self.blocks), self.thinned
        return other


class Row:
    def __init__(self):
        self.seen, self.failed = 0, False
        self.lines = [[Line() for _ in range(heads)] for heads in HEADS]


def blocks_for(tokens):
    return math.ceil(tokens / SIZE)


class Model:
    def __init__(self):
        self.rows = [Row() for _ in range(ROWS)]
        self.next_token = 1

    def held(self, group):
        return [b for row in self.rows for line in row.lines[group] for b in line.blocks]

    def used(self):
        return [len(set(self.held(group))) for group in GROUPS]

    def free(self):
        return [n - used for n, used in zip(CONFIG.group_blocks, self.used(), strict=True)]

    def append(self, counts):
        """The tokens' numbers, [S, T], which are what is stored of them."""
        numbers = np.zeros((ROWS, PLACES), np.int64)
        for r, (row, count) in enumerate(zip(self.rows, counts, strict=True)):
            numbers[r] = self.next_token + np.arange(PLACES)
            self.next_token += PLACES
            if row.failed or not count:
                continue
            more = [[max(0, blocks_for(len(line.tokens) + count) - len(line.blocks)) for line in lines]
                    for lines in row.lines]  # fmt: skip
            if row.seen + count > LONGEST or any(sum(n) > f for n, f in zip(more, self.free(), strict=True)):
                row.failed = True
                continue
            row.seen += count
            for lines, wanted in zip(row.lines, more, strict=True):
                for line, n in zip(lines, wanted, strict=True):
                    line.blocks += [Block() for _ in range(n)]
                    for block in line.blocks[len(line.tokens) // SIZE :]:
                        block.cut = False
                    line.tokens += numbers[r, :count].tolist()
        return numbers

    def evict(self, group, keep):
        """Keep of each line the tokens under bool[S, K, C]."""
        held = self.held(group)
        free = self.free()[group]
        changed = []
        for row, flags in zip(self.rows, keep, strict=True):
            if row.failed:
                continue
            plans = []
            for line, flags_of_line in zip(row.lines[group], flags, strict=True):
                kept = [t for t, flag in zip(line.tokens, flags_of_line, strict=False) if flag]
                if len(kept) < len(line.tokens):
                    same = sum(1 for _ in itertools.takewhile(bool, flags_of_line[: len(line.tokens)])) // SIZE
                    written = line.blocks[same : blocks_for(len(kept))]
                    plans.append((line, kept, same, [held.count(block) > 1 for block in written]))
            if (need := sum(sum(copied) for *_, copied in plans)) > free:
                row.failed = True
                continue
            free -= need
            changed += plans
        for line, kept, same, copied in changed:
            new = [Block() if copy else block for block, copy in zip(line.blocks[same:], copied, strict=False)]
            line.tokens, line.blocks, line.thinned = kept, line.blocks[:same] + new, len(kept)
            for block in new:
                block.cut = False

    def fork(self, src, dst):
        source, lines = self.rows[src], [line for lines in self.rows[dst].lines for line in lines]
        new, enough = [], True
        for group, free in enumerate(self.free()):
            copies = [line.copy() for line in source.lines[group]]
            need = sum(len(line.tokens) % SIZE > 0 for line in copies)
            own = [b for line in self.rows[dst].lines[group] for b in line.blocks]
            freed = sum(self.held(group).count(b) == 1 for b in own)
            enough &= need <= free + freed
            for line in copies:
                line.blocks = line.blocks[: blocks_for(len(line.tokens))]
                if len(line.tokens) % SIZE:
                    line.blocks[-1] = Block(line.blocks[-1].cut)
            new.append(copies)
        if not enough:
            self.rows[dst].failed = True
            return
        assert lines
        self.rows[dst].lines, self.rows[dst].seen, self.rows[dst].failed = new, source.seen, source.failed

    def truncate(self, r, length):
        row, needs = self.rows[r], []
        if length >= row.seen:
            return
        cuts = [[max(0, length - (row.seen - len(line.tokens))) for line in lines] for lines in row.lines]
        pairs = [(line, cut, g) for g, (ls, cs) in enumerate(zip(row.lines, cuts, strict=True))
                 for line, cut in zip(ls, cs, strict=True)]  # fmt: skip
        if length and any(length < row.seen - len(line.tokens) + line.thinned for line, *_ in pairs):
            row.failed = True
            return
        plans = []
        for group, free in enumerate(self.free()):
            held, need, freed = self.held(group), 0, 0
            for line, cut, g in pairs:
                if g != group:
                    continue
                copied = cut % SIZE > 0 and held.count(line.blocks[cut // SIZE]) > 1
                need += copied
                gone = line.blocks[blocks_for(cut) :]
                freed += sum(held.count(b) == 1 for b in gone)
                plans.append((line, cut, copied))
            needs.append(need > free + freed)
        if any(needs):
            row.failed = True
            return
        row.seen = length
        for line, cut, copied in plans:
            line.tokens, line.blocks = line.tokens[:cut], line.blocks[: blocks_for(cut)]
            line.thinned = line.thinned if length else 0
            if copied:
                line.blocks[-1] = Block()
            if cut % SIZE:
                line.blocks[-1].cut = True


@jax.jit
def append(cache, numbers, counts):
    """Store of each token its number, and the head's."""
    kv = []
    for layer in LAYERS:
        heads = jnp.broadcast_to(
            jnp.arange(layer.num_kv_heads, dtype=jnp.float32), (*numbers.shape, layer.num_kv_heads)
        )
        kv.append(jnp.stack([jnp.broadcast_to(numbers[..., None], heads.shape), heads], -1))
    return jaxkv.append(cache, kv, [-x for x in kv], counts)


evict_layer = jax.jit(lambda cache, keep: jaxkv.evict(cache, keep, layer=0))
evict_heads = jax.jit(lambda cache, keep: jaxkv.evict(cache, keep, layer=2))
fork, truncate, free = jax.jit(jaxkv.fork), jax.jit(jaxkv.truncate), jax.jit(jaxkv.free)


@jax.jit
def look(cache):
    dense = [cache.separate(i) for i in GROUPS]
    used = [t.num_blocks - t.num_free for t in cache.tables]
    bounds = [jnp.stack(jaxkv.block_bounds(cache, layer=i)) for i in BOUNDED]
    return cache.lengths, cache.failed, [one.held for one in cache.layers], dense, used, bounds


def compare(cache, model):
    seen, failed, held, dense, used, bounds = jax.device_get(look(cache))
    assert seen.tolist() == [row.seen for row in model.rows]
    assert failed.tolist() == [row.failed for row in model.rows]
    assert [int(n) for n in used] == model.used()
    for group, (count, (k, v)) in enumerate(zip(held, dense, strict=True)):
        for r, row in enumerate(model.rows):
            of_head = [row.lines[group][h % HEADS[group]].tokens for h in range(LAYERS[group].num_kv_heads)]
            assert np.atleast_1d(count[r]).tolist() == [len(line.tokens) for line in row.lines[group]]
            for head, tokens in enumerate(of_head):
                expected = np.array([[t, head] for t in tokens], np.float32).reshape(-1, 2)
                np.testing.assert_array_equal(k[r, head, : len(tokens)], expected)
                np.testing.assert_array_equal(v[r, head, : len(tokens)], -expected)
        if group in BOUNDED:
            compare_bounds(bounds[group], [row.lines[group][0] for row in model.rows])
        shared = [(len(set(b)), len(b)) for b in [model.held(group)]]
        table = np.asarray(cache.tables[group].tables)
        entries = table[table != 0]
        assert shared == [(len(set(entries.tolist())), entries.size)]


def compare_bounds(bounds, lines):
    """Numbers grow along a line: the first and the last of a block are its bounds, but where some were cut off."""
    for (low, high), line in zip(np.moveaxis(bounds[..., 0, 0], 1, 0), lines, strict=True):
        parts = [line.tokens[i : i + SIZE] for i in range(0, len(line.tokens), SIZE)]
        for column, (part, block) in enumerate(zip(parts, line.blocks, strict=False)):
            is_wider = block.cut and high[column] >= part[-1]
            assert low[column] == part[0] and (high[column] == part[-1] or is_wider), (low, high, parts)
        assert not low[len(parts) :].any() and not high[len(parts) :].any()


@pytest.mark.timeout(7200 if NIGHTLY else 300)
def test_random_operations_against_a_model():
    entered = set()
    for seed in SEEDS:
        rng, model, cache = np.random.default_rng(seed), Model(), jaxkv.init(CONFIG)
        for number in range(OPERATIONS):
            before = [row.failed for row in model.rows]
            what = rng.choice(
                ["append", "layer", "head", "fork", "truncate", "free"], p=[0.4, 0.15, 0.2, 0.1, 0.1, 0.05]
            )
            row, other = (int(x) for x in rng.permutation(ROWS)[:2])
            if what == "append":
                counts = rng.integers(0, PLACES + 1, ROWS)
                numbers = model.append(counts.tolist())
                cache = append(cache, jnp.asarray(numbers, jnp.float32), jnp.asarray(counts, jnp.int32))
            elif what in ("layer", "head"):
                group = 0 if what == "layer" else 2
                keep = rng.random((ROWS, HEADS[group], LONGEST)) < rng.choice([0.0, 0.3, 0.7, 1.0], (ROWS, 1, 1))
                keep[..., : rng.integers(0, 8)] = True
                model.evict(group, keep.tolist())
                cache = (evict_heads if group else evict_layer)(cache, jnp.asarray(keep if group else keep[:, 0]))
            elif what == "fork":
                model.fork(row, other)
                cache = fork(cache, row, other)
            elif what == "truncate":
                lengths = np.full(ROWS, LONGEST)
                lengths[row] = rng.integers(0, model.rows[row].seen + 1)
                model.truncate(row, int(lengths[row]))
                cache = truncate(cache, jnp.asarray(lengths, jnp.int32))
            else:
                model.rows[row] = Row()
                cache = free(cache, jnp.arange(ROWS) == row)
            newly = any(row.failed for row in model.rows) and [row.failed for row in model.rows] != before
            entered.add((str(what), newly))
            compare(cache, model)
            if number % 10 == 0:
                jaxkv.check_invariants(cache)
            failed = [row.failed for row in model.rows]
            if any(failed) and rng.random() < 0.5:  # else rows stay failed
                cache = free(cache, jnp.asarray(failed))
                for r in np.flatnonzero(failed):
                    model.rows[r] = Row()
    assert {(what, True) for what in ("append", "layer", "head", "fork", "truncate")} <= entered
