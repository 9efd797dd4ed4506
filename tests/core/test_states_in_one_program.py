"""Tens of thousands of random operations on states: a scan runs them in one program, a list of tokens says what is
right after each. Operations that go through the host are in `test_states`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from nightly import NIGHTLY

import jaxkv
from jaxkv._core.blocks.slot_allocator import find_snapshots

ROWS, PLACES, LONGEST, WIDTH = 4, 3, 16, 3
COUNT = 10_000  # operations of a run
ATTENTION = jaxkv.LayerConfig(num_kv_heads=1, head_dim=2)
SPACE, CONV = {"state": ((1, 1, 1), "float32")}, {"conv": ((1, WIDTH - 1), "float32")}
CONFIGS = {
    "one layer with both": ((SPACE | CONV, None), None),
    "snapshots": ((SPACE | CONV, None), 4),
    "two layers, packed, snapshots": ((None, SPACE, CONV), 8),
}
OPERATIONS = ("step", "decode", "guess", "fork", "reorder", "free", "truncate")
SHARES = (0.2, 0.2, 0.2, 0.15, 0.05, 0.1, 0.1)


def make_config(name):
    layers, every = CONFIGS[name]
    layers = [ATTENTION if states is None else jaxkv.LayerConfig.recurrent(**states) for states in layers]
    sizes = dict(max_seqs=ROWS, max_seq_len=LONGEST, num_blocks=2 * ROWS * LONGEST // 4, block_size=4, dtype="float32")
    return jaxkv.CacheConfig(layers=layers, snapshot_every=every, **sizes)


def find_layers(config):
    """Returns the layers that keep a state, and the last inputs."""
    names = [{array.name for array in layer.states or ()} for layer in config.layers]
    return [next(i for i, own in enumerate(names) if name in own) for name in ("state", "conv")]


def mix(cache, tokens, is_packed):
    """Has the rows' states take in tokens `[S, T]`: they sum them up, and keep the last."""
    state, conv = find_layers(cache.config)
    x = tokens.astype(jnp.float32)[..., None]
    if is_packed:  # the tokens of the rows one after another
        place = jnp.where(jnp.arange(tokens.shape[1])[None] < cache.new[:, None], 0, tokens.size)
        place = place + cache.tables[0].offsets[:, None] + jnp.arange(tokens.shape[1])[None]
        x = jnp.zeros((tokens.size, 1)).at[place].set(x, mode="drop")
    _, cache = jaxkv.causal_conv(x, jnp.ones((1, WIDTH)), cache, conv)
    ones = jnp.ones_like(x)[..., None]
    return jaxkv.state_space(x[..., None], ones[..., 0], jnp.zeros(1), ones, ones, cache, state)[1]


# Most of a run is compiling, so without optimisation.
@functools.partial(
    jax.jit, static_argnames="is_packed", donate_argnames="cache",
    compiler_options={"xla_backend_optimization_level": 0},
)  # fmt: skip
def run(cache, operations, is_packed):
    """Runs operations; returns the cache, and what is left of the rows after each."""

    def step(cache, numbers, mask, tokens):
        return mix(jaxkv.extend(cache, numbers), tokens[:, :PLACES], is_packed)

    def decode(cache, numbers, mask, tokens):
        return mix(jaxkv.extend(cache, jnp.minimum(numbers, 1)), tokens[:, :1], False)

    def guess(cache, numbers, mask, tokens):
        cache = mix(jaxkv.extend(cache, numbers, guesses=mask), tokens[:, :PLACES], is_packed)
        number = jnp.arange(PLACES, dtype=jnp.int32)[None]
        return jaxkv.keep(cache, jnp.where(number < tokens[:, PLACES:], number, -1))

    def apply(cache, operation):
        kind, *arguments = operation
        cache = jax.lax.switch(
            kind,
            [
                step, decode, guess,
                lambda cache, numbers, *_: jaxkv.fork(cache, numbers[0], numbers[1:2]),
                lambda cache, numbers, *_: jaxkv.reorder(cache, numbers),
                lambda cache, numbers, mask, _: jaxkv.free(cache, mask),
                lambda cache, numbers, *_: jaxkv.truncate(cache, numbers),
            ],
            cache, *arguments,
        )  # fmt: skip
        slots, held = cache.state_slots.slots, find_snapshots(cache)
        state, conv = (cache.states[i] for i in find_layers(cache.config))
        marks = jnp.zeros((ROWS, 0), bool) if held is None else held > 0
        return cache, (cache.lengths, cache.failed, state["state"][slots, 0, 0, 0], conv["conv"][slots, 0], marks)

    return jax.lax.scan(apply, cache, operations)


class Rows:
    """What rows hold, by lists of their tokens."""

    def __init__(self, every):
        self.every, self.tokens, self.failed = every, [()] * ROWS, [False] * ROWS

    def apply(self, name, numbers, mask, tokens, order, way):
        """Carries an operation out; `numbers` become its own."""
        if name in ("step", "decode", "guess"):
            for row, (n, own) in enumerate(zip(numbers.tolist(), tokens.tolist(), strict=True)):
                n = min(n, 1) if name == "decode" else n
                self.failed[row] |= n > 0 and len(self.tokens[row]) + n > LONGEST
                if not self.failed[row]:
                    self.tokens[row] += tuple(own[: own[PLACES] if name == "guess" else n])
        elif name == "fork":
            numbers[:] = order
            self._become([order[0] if row == order[1] else row for row in range(ROWS)])
        elif name == "reorder":
            numbers[:] = order
            self._become(order)
        elif name == "free":
            self.tokens = [() if gone else own for gone, own in zip(mask, self.tokens, strict=True)]
            self.failed = [failed and not gone for gone, failed in zip(mask, self.failed, strict=True)]
        else:
            for row, own in enumerate(self.tokens):
                ways = [0, len(own), len(own) + 3, *self.marks(own), max(len(own) - 1, 0)]
                numbers[row] = end = ways[int(way[row] * len(ways))]
                if end < len(own) and end and end not in self.marks(own):
                    self.failed[row] = True
                else:
                    self.tokens[row] = own[:end]

    def _become(self, source):
        self.tokens, self.failed = [self.tokens[i] for i in source], [self.failed[i] for i in source]

    def marks(self, own):
        """Returns the lengths of snapshots of a row with these tokens."""
        return range(self.every, len(own) + 1, self.every) if self.every else ()

    def expected(self):
        """Returns what `run` is to say."""
        last = [(0.0, 0.0, *own)[-2:] for own in self.tokens]
        count = LONGEST // self.every if self.every else 0
        marks = [[column < len(own) // (self.every or 1) for column in range(count)] for own in self.tokens]
        marks = np.array(marks, bool).reshape(ROWS, count)
        return list(map(len, self.tokens)), list(self.failed), list(map(float, map(sum, self.tokens))), last, marks


def test_random_operations_in_one_program():
    """30,000 by day, 300,000 by night, as many of each config."""
    for name in CONFIGS:
        try_operations(name, np.random.default_rng(len(name)), runs=10 if NIGHTLY else 1)


def try_operations(name, random, runs):
    config = make_config(name)
    cache, rows = jaxkv.init(config), Rows(config.snapshot_every)
    for _ in range(runs):
        kinds = random.choice(len(OPERATIONS), COUNT, p=SHARES).astype(np.int32)
        numbers, mask = random.integers(0, PLACES + 1, (COUNT, ROWS), np.int32), random.random((COUNT, ROWS)) < 0.4
        tokens = random.integers(1, 1000, (COUNT, ROWS, PLACES + 1), np.int32)  # the last: how many guesses are kept
        kept = np.minimum(random.integers(0, PLACES + 1, (COUNT, ROWS), np.int32), numbers)
        tokens[..., PLACES] = np.where(mask, kept, numbers)
        orders = random.permuted(np.tile(np.arange(ROWS, dtype=np.int32), (COUNT, 1)), axis=1)
        ways, wanted = random.random((COUNT, ROWS)), []
        for i, kind in enumerate(kinds.tolist()):
            rows.apply(OPERATIONS[kind], numbers[i], mask[i], tokens[i], orders[i], ways[i])
            wanted.append(rows.expected())
        cache, found = run(cache, (kinds, numbers, mask, tokens), is_packed="packed" in name)
        jaxkv.check_invariants(cache)
        found = [np.asarray(x) for x in found]
        wanted = [np.array(x) for x in zip(*wanted, strict=True)]
        empty = wanted[0] == 0
        found[2], found[3] = np.where(empty, 0, found[2]), np.where(empty[..., None], 0, found[3])
        for what, mine, right in zip(("lengths", "failed", "state", "conv", "marks"), found, wanted, strict=True):
            np.testing.assert_array_equal(mine, right, err_msg=f"{name}: {what}")
