"""A small model of layers that keep a state, and random operations on its cache beside the tokens of each row."""

import functools
import tempfile

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv.testing import poison

ROWS, PLACES, PACKED, VOCABULARY = 4, 5, 9, 17
ATTENTION = jaxkv.LayerConfig(num_kv_heads=1, head_dim=4)
# Channels in groups; models of so few have none.
DELTA = jaxkv.LayerConfig.recurrent(conv=((2, 2, 3), "float32"), state=((2, 3, 4), "float32"))
SPACE = jaxkv.LayerConfig.recurrent(state=((2, 4, 3), "float32"))


def make_config(*layers, **fields):
    sizes = dict(max_seqs=ROWS, max_seq_len=24, num_blocks=20, block_size=4, dtype="float32")
    return jaxkv.CacheConfig(layers=layers or (DELTA, ATTENTION, SPACE), **sizes | fields)


@functools.cache
def tables():
    """Returns what stands for each token of a vocabulary: inputs of the mixers."""
    random = np.random.default_rng(0)

    def draw(*shape):
        return random.standard_normal((VOCABULARY, *shape)).astype(np.float32)

    beta = 1 / (1 + np.exp(draw(2)))
    keys = {"x": draw(6), "q": draw(1, 3), "k": draw(1, 3) / 2, "v": draw(2, 4), "g": -np.abs(draw(2)), "beta": beta}
    return keys | {"y": draw(2, 4), "dt": np.abs(draw(2)), "B": draw(1, 3), "C": draw(1, 3), "kv": draw(1, 4)}


WEIGHT = np.random.default_rng(1).standard_normal((6, 3)).astype(np.float32)
A = np.array([-0.5, -1.0], np.float32)


def mix(cache, tokens, step=None):
    """Runs all layers of the default config on a step's tokens; returns their outputs and the cache."""
    t = {name: jnp.asarray(x)[tokens] for name, x in tables().items()}
    a, cache = jaxkv.causal_conv(t["x"], WEIGHT, cache, 0, activation="silu", step=step)
    b, cache = jaxkv.gated_delta_rule(t["q"], t["k"], t["v"], t["g"], t["beta"], cache, 0, step=step)
    c, cache = jaxkv.attention(t["kv"], t["kv"], t["kv"], cache, layer=1, step=step)
    d, cache = jaxkv.state_space(t["y"], t["dt"], A, t["B"], t["C"], cache, 2, step=step)
    axes = tokens.ndim
    return jnp.concatenate([x.reshape(*x.shape[:axes], -1) for x in (a, b, c, d)], axis=-1), cache


@functools.partial(jax.jit, donate_argnames="cache")
def padded_step(cache, tokens, counts):
    return mix(jaxkv.extend(cache, counts), tokens)


@functools.partial(jax.jit, donate_argnames="cache", static_argnames="longest")
def packed_step(cache, tokens, counts, longest=None):
    cache = jaxkv.extend(cache, counts)
    return mix(cache, tokens, jaxkv.plan_step(cache, tokens.shape, longest=longest))


@functools.partial(jax.jit, donate_argnames="cache")
def guess_step(cache, tokens, counts, guesses):
    cache = jaxkv.extend(cache, counts, guesses=guesses)
    return mix(cache, tokens, None if tokens.ndim == 2 else jaxkv.plan_step(cache, tokens.shape))


keep = jax.jit(jaxkv.keep)


@functools.cache
def expected(tokens):
    """Returns the outputs `[n, ...]` of a row that has these tokens, and its states behind them."""
    config = make_config(max_seqs=1, max_seq_len=24, num_blocks=6)
    cache = jaxkv.extend(jaxkv.init(config), [len(tokens)])
    padded = np.zeros((1, 24), np.int32)  # NumPy's, for that compiles nothing
    padded[0, : len(tokens)] = tokens
    y, cache = _whole(cache, jnp.asarray(padded))
    return np.asarray(y)[0, : len(tokens)], states_of(cache)


_whole = jax.jit(mix)


def states_of(cache):
    """Returns the present states of all rows, one vector a row; 0 of rows without tokens."""
    idle = jaxkv.extend(cache, [0] * cache.config.max_seqs)
    found = [jaxkv.read_states(idle, layer=i) for i in cache.config.recurrent_layers]
    rows = [np.asarray(x).reshape(cache.config.max_seqs, -1) for x in jax.tree.leaves(found)]
    return np.concatenate(rows, axis=1)


class Trial:
    """Random operations on a cache, beside the tokens of its rows."""

    def __init__(self, seed):
        self.random = np.random.default_rng(seed)
        # The same steps with snapshots compile other programs: every second seed has them.
        self.every = 4 if seed % 2 else None
        self.cache, self.rows, self.failed = jaxkv.init(self.config()), [()] * ROWS, [False] * ROWS
        self.marks = [set() for _ in range(ROWS)]  # the lengths of each row's snapshots

    def config(self, **fields):
        return make_config(snapshot_every=self.every, **fields)

    def run(self, steps):
        names = (
            "padded",
            "packed",
            "decode",
            "fork",
            "reorder",
            "free",
            "truncate",
            "swap",
            "save",
            "send",
            "keep",
            "guess",
        )
        for _ in range(steps):
            self.cache = poison(self.cache)
            name = self.random.choice(names, p=(0.15, 0.15, 0.2, 0.1, 0.05, 0.05, 0.05, 0.05, 0.02, 0.03, 0.05, 0.1))
            getattr(self, name)()
            jaxkv.check_invariants(self.cache)
            assert self.cache.lengths.tolist() == list(map(len, self.rows))
            assert self.cache.failed.tolist() == self.failed
            assert jaxkv.snapshots(self.cache) == list(map(sorted, self.marks))
            wanted = [expected(row)[1][0] if row else 0 * expected((1,))[1][0] for row in self.rows]
            np.testing.assert_allclose(states_of(self.cache), wanted, rtol=2e-4, atol=2e-4, err_msg=name)

    def step(self, counts, run, axes):
        """Draws tokens, runs a step, and compares its outputs."""
        counts = [0 if failed else n for n, failed in zip(counts, self.failed, strict=True)]
        told, tokens = np.zeros(axes, np.int32), [self.random.integers(VOCABULARY, size=n) for n in counts]
        starts = np.cumsum(counts) - counts
        at = [slice(start, start + n) for start, n in zip(starts, counts, strict=True)]
        if len(axes) == 2:
            at = [(row, slice(0, n)) for row, n in enumerate(counts)]
        for place, own in zip(at, tokens, strict=True):
            told[place] = own
        y, self.cache = run(self.cache, jnp.asarray(told), jnp.asarray(counts, jnp.int32))
        for row, (own, failed) in enumerate(zip(tokens, self.cache.failed.tolist(), strict=True)):
            if failed:
                self.failed[row] = True
            elif len(own):
                before = len(self.rows[row])
                self.rows[row] += tuple(own.tolist())
                if self.every:
                    self.marks[row] |= {n for n in range(before + 1, len(self.rows[row]) + 1) if n % self.every == 0}
                wanted = expected(self.rows[row])[0][-len(own) :]
                np.testing.assert_allclose(np.asarray(y)[at[row]], wanted, rtol=2e-4, atol=2e-4)

    def padded(self):
        self.step(self.random.integers(0, PLACES + 1, ROWS), padded_step, (ROWS, PLACES))

    def packed(self):
        counts = self.random.multinomial(PACKED - self.random.integers(3), [1 / ROWS] * ROWS)
        self.step(counts, packed_step, (PACKED,))

    def decode(self):
        self.step(self.random.integers(0, 2, ROWS), functools.partial(packed_step, longest=1), (ROWS,))

    def fork(self):
        src, *dst = self.random.permutation(ROWS)[: self.random.integers(2, ROWS + 1)].tolist()
        self.cache = jaxkv.fork(self.cache, src, dst)
        for row in dst:
            if self.rows[row] != self.rows[src] and self.cache.failed[row] and not self.failed[src]:
                self.failed[row] = True  # no block for its copy
            elif not self.failed[row] or not self.cache.failed[row] or self.failed[src]:
                self.rows[row], self.failed[row] = self.rows[src], self.failed[src]
                self.marks[row] = set(self.marks[src])

    def reorder(self):
        order = self.random.permutation(ROWS)
        self.cache = jaxkv.reorder(self.cache, order)
        self.rows, self.failed = [self.rows[i] for i in order], [self.failed[i] for i in order]
        self.marks = [set(self.marks[i]) for i in order]

    def free(self):
        rows = self.random.random(ROWS) < 0.4
        self.cache = jaxkv.free(self.cache, rows)
        for row in np.flatnonzero(rows):
            self.rows[row], self.failed[row], self.marks[row] = (), False, set()

    def truncate(self):
        """To 0, to a snapshot and to the present length; to another length the row fails."""
        lengths = [len(row) for row in self.rows]
        marks = [self.random.choice([0, *own]) for own in map(sorted, self.marks)]
        pairs = zip(lengths, marks, strict=True)
        targets = [self.random.choice([m, n, n + 3, max(n - 1, 0)], p=(0.4, 0.25, 0.25, 0.1)) for n, m in pairs]
        self.cache = jaxkv.truncate(self.cache, np.array(targets, np.int32))
        for row, (n, target) in enumerate(zip(lengths, targets, strict=True)):
            if target < n and target not in {0} | self.marks[row]:
                self.failed[row] = True
            elif target < n:
                self.rows[row] = self.rows[row][:target]
                self.marks[row] = {mark for mark in self.marks[row] if mark <= target}

    def keep(self):
        """Keeps all tokens of a step, which goes, and one less, which fails but at a snapshot."""
        new = self.cache.new.tolist()
        path = np.full((ROWS, max(new, default=0) or 1), -1, np.int32)
        row = int(self.random.integers(ROWS))
        for r, n in enumerate(new):
            path[r, : n - (r == row and n > 0)] = np.arange(n - (r == row and n > 0))
        self.cache = jaxkv.keep(self.cache, path)
        end = len(self.rows[row]) - 1
        if new[row] and end in self.marks[row] and not self.failed[row]:
            self.rows[row], self.marks[row] = self.rows[row][:end], {n for n in self.marks[row] if n <= end}
        else:
            self.failed[row] |= new[row] > 0

    def guess(self):
        """Keeps some tokens of rows that guess, and all of the others."""
        before = list(self.rows)
        guesses = self.random.random(ROWS) < 0.7
        run = functools.partial(guess_step, guesses=jnp.asarray(guesses))
        if self.every:
            self.step(self.random.multinomial(PACKED, [1 / ROWS] * ROWS).clip(max=PLACES), run, (PACKED,))
        else:
            self.step(self.random.integers(0, PLACES + 1, ROWS), run, (ROWS, PLACES))
        path = np.full((ROWS, PLACES), -1, np.int32)
        for row, n in enumerate(self.cache.new.tolist()):
            kept = int(self.random.integers(n + 1)) if guesses[row] else n
            path[row, :kept] = np.arange(kept)
            if n and not self.failed[row]:
                self.rows[row] = self.rows[row][: len(before[row]) + kept]
                self.marks[row] = {mark for mark in self.marks[row] if mark <= len(self.rows[row])}
        self.cache = keep(self.cache, path)

    def swap(self):
        held = [r for r in range(ROWS) if self.rows[r] and not self.failed[r]]
        if held:
            own = self.random.permutation(held)[: self.random.integers(1, len(held) + 1)]
            self.cache, host = jaxkv.swap_out(self.cache, own)
            jaxkv.check_invariants(self.cache)
            self.cache = jaxkv.swap_in(poison(self.cache), own, host)

    def save(self):
        with tempfile.TemporaryDirectory() as folder:
            rows = [r for r in range(ROWS) if not self.failed[r]]
            jaxkv.save(f"{folder}/x.safetensors", self.cache, rows=rows)
            config = make_config(max_seqs=ROWS + 1, block_size=8, num_blocks=20, snapshot_every=self.every and 16)
            loaded = jaxkv.load(f"{folder}/x.safetensors", config, rows=[ROWS - i for i in range(len(rows))])
        jaxkv.check_invariants(loaded)
        marks = [sorted(mark for mark in self.marks[r] if mark % 16 == 0) for r in rows]
        assert jaxkv.snapshots(loaded)[::-1][: len(rows)] == marks
        np.testing.assert_array_equal(states_of(loaded)[::-1][: len(rows)], states_of(self.cache)[rows])

    def send(self):
        rows = [r for r in range(ROWS) if not self.failed[r]]
        other = jaxkv.init(make_config(block_size=8, snapshot_every=self.every and 8))
        other = jaxkv.send(self.cache, rows, to=other, at=rows)
        jaxkv.check_invariants(other)
        marks = [sorted(mark for mark in self.marks[r] if mark % 8 == 0) for r in rows]
        assert [jaxkv.snapshots(other)[r] for r in rows] == marks
        np.testing.assert_array_equal(states_of(other)[rows], states_of(self.cache)[rows])
