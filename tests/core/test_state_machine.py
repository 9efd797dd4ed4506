"""Random operations on a cache, failures included, against the oracle.

Every request goes in as data of a jitted function that donates the cache, as in a decode loop. What no row holds
and no index keeps is NaN before each one. By day 10,000 operations, as many of each of three configs; by night a
million, of all of them.
"""

import collections
import dataclasses
import functools
import os
import tempfile

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from nightly import NIGHTLY
from oracle import Oracle
from steps import model_step, on_device

import jaxkv
from jaxkv.testing import poison

EXAMPLES, STEPS = (1400 if NIGHTLY else 40), 80  # of each config
# What rows and the index hold is compared after each. What is out of order in the state otherwise stays out of order,
# and is looked for after some by day.
INVARIANTS_EVERY, SAVED_EVERY = (1, 16) if NIGHTLY else (4, 32)

ROWS = 4
PLACES = 5  # T of padded steps
PACKED_PLACES = 9  # N of packed steps
HUGE = 2**31 - 1


def wide(window=None, **fields):
    return jaxkv.LayerConfig(num_kv_heads=2, head_dim=4, window=window, **fields)


def narrow(window=None, **fields):
    return jaxkv.LayerConfig(num_kv_heads=1, head_dim=6, window=window, **fields)


def latent(window=None, **fields):
    return jaxkv.LayerConfig.latent(4, 2, window=window, **fields)


def query_heads(layer):
    return {2: 4, 1: 3}[layer.num_kv_heads]


def make_config(*layers, **fields) -> jaxkv.CacheConfig:
    return jaxkv.CacheConfig(layers=layers, max_seqs=ROWS, dtype="float32", **fields)


# Fewer blocks than all rows could fill, most of the last block of the longest row past max_seq_len, and in some groups
# so few that blocks run out in one of them only.
CONFIGS = {
    "block_size=1": make_config(wide(), narrow(), block_size=1, max_seq_len=11, num_blocks=20),
    "block_size=4": make_config(
        latent(bounds=True), narrow(), block_size=4, max_seq_len=20, num_blocks=9, head_dim_multiple=8
    ),
    "block_size=16 above its window": make_config(
        wide(), narrow(3, bounds=True), block_size=16, max_seq_len=41, group_blocks=(6, 5)
    ),
    "windows of 1 and 2": make_config(
        wide(1), narrow(2, bounds=True, index_dim=3), block_size=1, max_seq_len=11, group_blocks=(12, 13)
    ),
    "windows of a block and more, nothing global": make_config(
        wide(7), narrow(3), block_size=3, max_seq_len=31, group_blocks=(11, 9)
    ),
    "five local layers to a global one, stacked": make_config(
        *[narrow(5)] * 5, latent(), block_size=2, max_seq_len=21, group_blocks=(13, 22), stacked=True
    ),
    "layers that share, stacked": make_config(
        wide(bounds=True, index_dim=3), narrow(6), narrow(3, shares_with=1), wide(bounds=True, index_dim=3),
        block_size=4, max_seq_len=24, group_blocks=(11, 8), head_dim_multiple=8, join_kv=True, stacked=True,
    ),
    "contiguous": make_config(
        wide(index_dim=2), narrow(6), wide(3, shares_with=0), layout="contiguous", max_seq_len=13
    ),
    "three groups": make_config(
        wide(), narrow(1), narrow(2), wide(2, shares_with=0), block_size=1, max_seq_len=11, group_blocks=(20, 12, 13)
    ),
}  # fmt: skip
# Each config takes long to compile. These have every layout, rows packed and padded, and blocks of one place and more.
BY_DAY = ("windows of 1 and 2", "layers that share, stacked", "contiguous")


def step(cache, q, k, v, counts):
    outs, cache = model_step(cache, q, k, v, counts)
    return outs, jaxkv.positions(cache, q[0].shape[:-2]), put_index(cache, k)


def append(cache, k, v, counts):
    return put_index(jaxkv.append(cache, k, v, counts), k)


def put_index(cache, k):
    """Stores index keys that are the first numbers of the first head's keys, wherever a layer keeps any."""
    for i, layer in enumerate(cache.config.layers):
        if layer.index_dim is not None:
            cache = jaxkv.write_index(cache, k[i][..., 0, : layer.index_dim], layer=i)
    return cache


def count_strayed(cache):
    """How many held tokens have index keys that are not those of their keys."""
    count = jnp.int32(0)
    row, position = jnp.arange(ROWS)[:, None], jnp.arange(cache.config.max_seq_len)[None]
    for i, layer in enumerate(cache.config.layers):
        if layer.index_dim is not None:
            block, offset = cache.slots(row, position, layer=i)
            index = cache.pool(i).index.keys[block, 0, 0, offset, : layer.index_dim]
            keys = cache.read(i, row, position)[0][..., 0, : layer.index_dim]
            count += jnp.sum((index != keys).any(axis=-1) & (block != 0), dtype=jnp.int32)
    return count


# Compiled once for each config and shape, without optimisation, and used in all examples.
donating = functools.partial(jax.jit, donate_argnames="cache", compiler_options={"xla_backend_optimization_level": 0})
PROGRAMS = {
    f: donating(f)
    for f in (
        step, append, jaxkv.reserve, jaxkv.fork, jaxkv.truncate, jaxkv.reorder, jaxkv.free, jaxkv.swap_in,
    )
}  # fmt: skip


@donating
def look(cache):
    """What is in every layer and the cache, in one array for each kind of number; and the cache as it goes on."""
    packed = {}
    for x in jax.tree.leaves(seen(cache)):
        kind = "float32" if x.dtype == "float32" else "int32"
        packed.setdefault(kind, []).append(x.ravel().astype(kind))
    packed = {kind: jnp.concatenate(parts) for kind, parts in packed.items()}
    return packed | {"strayed": count_strayed(cache)}, poison(cache)


def seen(cache):
    return [cache.combined(layer) for layer in range(cache.num_layers)], cache


@functools.cache
def places_seen(config):
    """For each array of `seen` where `look` puts it: kind, place, shape and dtype; and how they belong together."""
    leaves, structure = jax.tree.flatten(jax.eval_shape(lambda: seen(jaxkv.init(config))))
    places, end = [], {"float32": 0, "int32": 0}
    for x in leaves:
        kind = "float32" if x.dtype == "float32" else "int32"
        places.append((kind, slice(end[kind], end[kind] + x.size), x.shape, x.dtype))
        end[kind] += x.size
    return places, structure


def on_host(config, packed):
    """What `look` has seen, as NumPy arrays."""
    packed = jax.device_get(packed)
    places, structure = places_seen(config)
    return structure.unflatten([packed[kind][at].reshape(shape).astype(dtype) for kind, at, shape, dtype in places])


def per_row(*numbers):
    return st.tuples(*[st.sampled_from(numbers)] * ROWS)


# 0 and small numbers most of the time; else more than the arrays have places for, and nonsense.
COUNTS = per_row(0, 0, 0, 1, 1, 1, 2, 3, 4, 5, 5, 6, 7, -1, HUGE, -HUGE)
LENGTHS = per_row(*[0] * 20, *range(21), 41, 42, 100, 100, 100, -1, HUGE, -HUGE)
NONSENSE = (-1, HUGE, -HUGE)
DROPPED = per_row(0, 0, 0, 0, 1, 1, 2, 3, 4, 5, 7, 10, 100, *NONSENSE)  # tokens to truncate from each row
SALTS = st.sampled_from(("a", "b"))
ROWS_IN_ANY_ORDER = st.permutations(range(ROWS))
ANY_ROW = st.sampled_from((*range(ROWS), *range(ROWS), *range(ROWS), -1, ROWS, HUGE))


class Machine(RuleBasedStateMachine):
    name: str

    def __init__(self):
        super().__init__()
        self.config = CONFIGS[self.name]
        self.cache = on_device(jaxkv.init(self.config))
        self.oracle = Oracle(self.config)
        self.rng = np.random.default_rng(0)
        self.swapped = collections.deque(maxlen=3)  # what swap_out gave, and what it should hold
        if not self.oracle.contiguous:
            self.prefix = jaxkv.PrefixCache(self.config, spill_bytes=2**20)
        self.inserted = collections.deque(maxlen=4)  # salts and tokens of what the index may have
        self.operations = self.saved_at = 0

    def run(self, function, *args):
        args = jax.tree.map(lambda x: x.astype(np.int32) if x.dtype == np.int64 else x, args)
        out = PROGRAMS[function](self.cache, *args)
        *out, self.cache = out if isinstance(out, tuple) else (out,)
        self.compare()
        return jax.device_get(out)

    def compare(self):
        self.operations += 1
        packed, self.cache = look(self.cache)
        assert not packed["strayed"], "index keys are those of their tokens"
        dense, cache = on_host(self.config, packed)
        self.oracle.assert_matches(cache, dense)
        if self.operations % INVARIANTS_EVERY == 0:
            jaxkv.check_invariants(cache)
            if not self.oracle.contiguous:
                self.prefix.check_invariants(cache)
                assert self.prefix.stats()["blocks"] == [np.count_nonzero(t.kept) for t in cache.tables]

    def random(self, packed, heads):
        """For each layer random numbers `[..., heads(layer), head_dim]`."""
        shape = (PACKED_PLACES,) if packed else (ROWS, PLACES)
        return [
            self.rng.standard_normal((*shape, heads(layer), layer.head_dim)).astype(np.float32)
            for layer in self.config.layers
        ]

    def kv(self, packed):
        """Random keys and values; NaN where the step has padding, so that it would show anywhere."""
        k, v = (self.random(packed, lambda layer: layer.num_kv_heads) for _ in range(2))
        self.oracle.drop_unfit(k[0].shape[-3], packed)
        padding = np.ones(k[0].shape[:-2], bool)
        for i, row in enumerate(self.oracle.rows):
            for place in self.oracle.places(i, row, packed):
                padding[place] = False
        for x in (*k, *v):
            x[padding] = np.nan
        stored = [layer.shares_with is None for layer in self.config.layers]
        k = [one if kept else None for one, kept in zip(k, stored, strict=True)]
        pairs = [kept and layer.rank is None for kept, layer in zip(stored, self.config.layers, strict=True)]
        return k, [one if pair else None for one, pair in zip(v, pairs, strict=True)]

    @rule(counts=COUNTS, packed=st.booleans())
    def append(self, counts, packed):
        self.oracle.extend_to_append(counts, PACKED_PLACES if packed else PLACES, packed)
        k, v = self.kv(packed)
        self.oracle.write(k, v)
        self.run(append, k, v, np.array(counts))

    @rule(counts=COUNTS)
    def step(self, counts):
        packed = list(CONFIGS).index(self.name) % 2 == 0  # one of the two: attention takes long to compile
        self.oracle.extend(counts)
        k, v = self.kv(packed)
        q = self.random(packed, query_heads)
        self.oracle.write(k, v)
        outs, positions = self.run(step, q, k, v, np.array(counts))
        np.testing.assert_array_equal(positions, self.oracle.positions(positions.shape))
        for layer, out in enumerate(outs):
            np.testing.assert_allclose(out, self.oracle.attend(q[layer], layer), atol=2e-5, rtol=0)

    @rule(lengths=LENGTHS)
    def reserve(self, lengths):
        self.oracle.reserve(lengths)
        self.run(jaxkv.reserve, np.array(lengths))

    @rule(src=st.tuples(ANY_ROW, ANY_ROW), dst=st.lists(ANY_ROW, min_size=2, max_size=2, unique=True))
    def fork(self, src, dst):
        self.oracle.fork(src, dst)
        self.run(jaxkv.fork, np.array(src), np.array(dst))

    @rule(dropped=DROPPED)
    def truncate(self, dropped):
        lengths = [len(row.tokens) for row in self.oracle.rows]
        lengths = [d if d in NONSENSE else max(0, n - d) for n, d in zip(lengths, dropped, strict=True)]
        self.oracle.truncate(lengths)
        self.run(jaxkv.truncate, np.array(lengths))

    @rule(
        order=st.permutations(range(ROWS))
        | st.tuples(*[st.integers(0, ROWS - 1)] * ROWS)
        | st.tuples(*[ANY_ROW] * ROWS)
    )
    def reorder(self, order):
        self.oracle.reorder(order)
        self.run(jaxkv.reorder, np.array(order))

    @rule(rows=st.tuples(ANY_ROW, st.just(-1) | ANY_ROW), as_mask=st.booleans())
    def free(self, rows, as_mask):
        self.oracle.free(rows)
        self.run(jaxkv.free, np.isin(np.arange(ROWS), rows) if as_mask else np.array(rows))

    def rows_that(self, hold_something, rows):
        """The same rows, first those that hold something, or first those that do not."""
        return sorted(rows, key=lambda r: self.oracle.is_empty(r) == hold_something)

    @rule(rows=ROWS_IN_ANY_ORDER)
    def swap_out(self, rows):
        rows = self.rows_that(True, rows)[:2]
        self.cache, host = jaxkv.swap_out(self.cache, rows)
        self.swapped.append((host, self.oracle.swap_out(rows)))
        self.compare()

    @precondition(lambda self: self.swapped)
    @rule(which=st.integers(0, 2), rows=ROWS_IN_ANY_ORDER)
    def swap_in(self, which, rows):
        """Both rows, into empty rows if there are any; what was swapped out once may come back often."""
        host, expected = self.swapped[which % len(self.swapped)]
        rows = self.rows_that(False, rows)[:2]
        self.oracle.swap_in(rows, expected)
        self.run(jaxkv.swap_in, np.array(rows), widen(host, self.config))

    @precondition(lambda self: self.swapped)
    @rule(
        which=st.integers(0, 2),
        i=st.integers(0, 1),
        rows=ROWS_IN_ANY_ORDER,
        other_row=st.sampled_from((None, None, None, 0, -1, ROWS, HUGE)),
    )
    def swap_in_one_of_several(self, which, i, rows, other_row):
        host, expected = self.swapped[which % len(self.swapped)]
        row = self.rows_that(False, rows)[0] if other_row is None else other_row
        self.oracle.swap_in([row], expected[i : i + 1])
        self.run(jaxkv.swap_in, np.array([row]), widen(host[i], self.config))

    # A block that the index has stays when its rows go, and is found by what its tokens are.

    def held(self):
        """The names of what the index has on the device, for each group."""
        nodes = self.prefix._index.nodes.values()
        names = {n: (n.identity[1], tuple(token for one in n.chain for token in one.tokens)) for n in nodes}
        return [{names[n] for n in nodes if n.blocks[g]} for g in range(len(self.config.groups))]

    def is_paged(self):
        return not self.oracle.contiguous

    @precondition(is_paged)
    @rule(rows=ROWS_IN_ANY_ORDER, salt=SALTS)
    def insert(self, rows, salt):
        row = self.rows_that(True, rows)[0]
        tokens = self.oracle.rows[row].tokens
        self.cache = self.prefix.insert(self.cache, row, ids(tokens), salt=salt)
        self.oracle.insert(row, salt)
        self.inserted.append((salt, list(tokens)))
        self.compare()

    @precondition(lambda self: self.inserted)
    @rule(which=st.integers(0, 3), rows=ROWS_IN_ANY_ORDER, cut=st.integers(0, 4), salt=st.none() | SALTS)
    def adopt(self, which, rows, cut, salt):
        """What begins like something that was inserted; into an empty row, if there is one."""
        own_salt, tokens = self.inserted[which % len(self.inserted)]
        salt = own_salt if salt is None else salt
        tokens = tokens[: max(0, len(tokens) - cut)]
        match = self.prefix.match([*ids(tokens), -1], salt=salt)
        keys = self.oracle.match(salt, tokens)
        assert match.num_tokens == len(keys) * self.config.block_size
        row = self.rows_that(False, rows)[0]
        if not self.oracle.is_empty(row):
            with pytest.raises(ValueError, match="adopt into an empty row"):
                self.prefix.adopt(self.cache, row, match)
        elif self.oracle.can_adopt(keys):
            self.cache = self.prefix.adopt(self.cache, row, match, donate=True)
            self.oracle.adopt(row, keys, tokens, self.held())
        else:
            with pytest.raises(jaxkv.OutOfBlocks, match="are in host memory"):
                self.prefix.adopt(self.cache, row, match)
        self.compare()

    @precondition(lambda self: self.inserted)
    @rule(wanted=st.integers(1, 9))
    def make_room(self, wanted):
        self.cache = self.prefix.make_room(self.cache, wanted)
        self.oracle.make_room([wanted] * len(self.oracle.groups), self.held())
        self.compare()

    @precondition(lambda self: len(self.inserted) > 3)
    @rule()
    def reset(self):
        self.cache = self.prefix.reset(self.cache)
        self.oracle.index.clear()
        self.inserted.clear()
        self.compare()

    @precondition(lambda self: self.operations >= self.saved_at + SAVED_EVERY)  # it takes as long as ten others
    @rule()
    def save_and_load(self):
        """What the next tokens see is in the file, row by row; the cache itself goes on."""
        self.saved_at = self.operations
        with tempfile.TemporaryDirectory() as folder:
            jaxkv.save(f"{folder}/cache.safetensors", self.cache)
            loaded = jaxkv.load(f"{folder}/cache.safetensors")
        jaxkv.check_invariants(loaded)
        packed, _ = look(loaded)
        assert not packed["strayed"], "index keys are those of their tokens"
        dense, _ = on_host(self.config, packed)
        for layer, actual in enumerate(dense):
            for r, row in enumerate(self.oracle.rows):
                held = row.blocks[self.oracle.group(layer)]
                for position, token in enumerate(row.tokens[: self.config.max_seq_len]):
                    column = position // self.config.block_size
                    if not self.oracle.out_of_window(self.oracle.group(layer), column, len(row.tokens)):
                        assert held[column] is not None
                        np.testing.assert_array_equal(actual[r, :, :, position], token[self.oracle.owner(layer)])


def ids(tokens):
    return [token.id for token in tokens]


def widen(host, config):
    """The same with as many places as two rows can take, so that one program serves all; NaN in those unused."""
    pools, orders, places = list(host.pools), [], 2 * config.max_blocks_per_seq
    for layers, count, order in zip(host.groups, host.count, host.order, strict=True):
        named = order[: count.sum()]
        orders.append(np.pad(named, (0, places - len(named))))
        wider = functools.partial(in_more_places, places=places, used=max(named, default=-1) + 1)
        for layer in layers:
            pools[layer] = jax.tree.map(wider, pools[layer])
    return dataclasses.replace(host, pools=tuple(pools), order=tuple(orders))


def in_more_places(held, places, used):
    wide = np.full((places, *held.shape[1:]), np.nan, held.dtype)
    wide[:used] = held[:used]
    return wide


@pytest.mark.timeout(7200 if NIGHTLY else 300)
@pytest.mark.parametrize("name", CONFIGS if NIGHTLY else BY_DAY)
def test_against_oracle(name):
    run_state_machine_as_test(
        type("Machine", (Machine,), {"name": name}),
        settings=settings(
            max_examples=EXAMPLES, stateful_step_count=STEPS, deadline=None,
            derandomize="CI" in os.environ, suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip
