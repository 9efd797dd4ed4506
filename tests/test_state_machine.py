"""Random operations on a cache, failures included, against the oracle.

Every request goes in as data of a jitted function that donates the cache, as in a decode loop. JAXKV_EXAMPLES=1000
makes it a soak.
"""

import functools
import os

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from oracle import Oracle

import jaxkv

ROWS = 4
PLACES = 5  # T of padded steps
PACKED_PLACES = 9  # N of packed steps
HUGE = 2**31 - 1
LAYERS = (
    jaxkv.LayerConfig(num_kv_heads=2, head_dim=4),
    jaxkv.LayerConfig(num_kv_heads=1, head_dim=6),
)
QUERY_HEADS = (4, 3)


def make_config(**fields) -> jaxkv.CacheConfig:
    return jaxkv.CacheConfig(layers=LAYERS, max_seqs=ROWS, dtype="float32", **fields)


# Fewer blocks than all rows could fill, and most of the last block of the longest row past max_seq_len.
CONFIGS = {
    "block_size=1": make_config(block_size=1, max_seq_len=11, num_blocks=20),
    "block_size=3": make_config(block_size=3, max_seq_len=16, num_blocks=10),
    "block_size=4": make_config(block_size=4, max_seq_len=20, num_blocks=9, head_dim_multiple=8),
    "block_size=16": make_config(block_size=16, max_seq_len=41, num_blocks=6),
    "contiguous": make_config(layout="contiguous", max_seq_len=13),
}


@functools.cache
def programs(name):
    """The functions, each compiled once for a config and used in all examples. Each returns (output, cache, dense)."""

    def jit(function):
        def program(cache, *args):
            out, cache = function(cache, *args)
            return out, cache, [cache.combined(i) for i in range(cache.num_layers)]

        return jax.jit(program, donate_argnums=0)

    def step(cache, q, k, v, counts):
        cache = jaxkv.extend(cache, counts)
        outs = []
        for layer in range(cache.num_layers):
            out, cache = jaxkv.attention(q[layer], k[layer], v[layer], cache, layer=layer)
            outs.append(out)
        return (outs, jaxkv.positions(cache, q[0].shape[:-2])), cache

    def silent(function):
        return jit(lambda cache, *args: (None, function(cache, *args)))

    return {"step": jit(step)} | {
        f.__name__: silent(f)
        for f in (jaxkv.append, jaxkv.reserve, jaxkv.fork, jaxkv.truncate, jaxkv.reorder, jaxkv.free)
    }


def per_row(*numbers):
    return st.tuples(*[st.sampled_from(numbers)] * ROWS)


# 0 and small numbers most of the time; else more than the arrays have places for, and nonsense.
COUNTS = per_row(0, 0, 0, 1, 1, 1, 2, 3, 4, 5, 5, 6, 7, -1, HUGE, -HUGE)
LENGTHS = per_row(*range(21), 41, 42, 100, 100, 100, -1, HUGE, -HUGE)
ANY_ROW = st.sampled_from((*range(ROWS), *range(ROWS), *range(ROWS), -1, ROWS, HUGE))


class Machine(RuleBasedStateMachine):
    name: str

    def __init__(self):
        super().__init__()
        self.config = CONFIGS[self.name]
        self.programs = programs(self.name)
        self.cache = jaxkv.init(self.config)
        self.oracle = Oracle(self.config)
        self.rng = np.random.default_rng(0)

    def run(self, name, *args):
        args = jax.tree.map(lambda x: jnp.asarray(x, jnp.int32 if np.asarray(x).dtype.kind == "i" else None), args)
        out, self.cache, dense = jax.device_get(self.programs[name](self.cache, *args))
        self.oracle.assert_matches(self.cache, dense)
        jaxkv.check_invariants(self.cache)
        return out

    def random(self, packed, heads):
        shape = (PACKED_PLACES,) if packed else (ROWS, PLACES)
        return [
            self.rng.standard_normal((*shape, h, layer.head_dim)).astype(np.float32)
            for h, layer in zip(heads, LAYERS, strict=True)
        ]

    def kv(self, packed):
        """Random keys and values; NaN where the step has padding, so that it would show anywhere."""
        k, v = (self.random(packed, [layer.num_kv_heads for layer in LAYERS]) for _ in range(2))
        self.oracle.drop_unfit(k[0].shape[-3], packed)
        padding = np.ones(k[0].shape[:-2], bool)
        for i, row in enumerate(self.oracle.rows):
            for place in self.oracle.places(i, row, packed):
                padding[place] = False
        for x in (*k, *v):
            x[padding] = np.nan
        return k, v

    @rule(counts=COUNTS, packed=st.booleans())
    def append(self, counts, packed):
        self.oracle.extend_to_append(counts, PACKED_PLACES if packed else PLACES, packed)
        k, v = self.kv(packed)
        self.oracle.write(k, v)
        self.run("append", k, v, np.array(counts))

    @rule(counts=COUNTS, packed=st.booleans())
    def step(self, counts, packed):
        self.oracle.extend(counts)
        k, v = self.kv(packed)
        q = self.random(packed, QUERY_HEADS)
        self.oracle.write(k, v)
        outs, positions = self.run("step", q, k, v, np.array(counts))
        np.testing.assert_array_equal(positions, self.oracle.positions(positions.shape))
        for layer, out in enumerate(outs):
            np.testing.assert_allclose(out, self.oracle.attend(q[layer], layer), atol=2e-5, rtol=0)

    @rule(lengths=LENGTHS)
    def reserve(self, lengths):
        self.oracle.reserve(lengths)
        self.run("reserve", np.array(lengths))

    @rule(src=st.tuples(ANY_ROW, ANY_ROW), dst=st.lists(ANY_ROW, min_size=2, max_size=2, unique=True))
    def fork(self, src, dst):
        self.oracle.fork(src, dst)
        self.run("fork", np.array(src), np.array(dst))

    @rule(lengths=LENGTHS)
    def truncate(self, lengths):
        self.oracle.truncate(lengths)
        self.run("truncate", np.array(lengths))

    @rule(
        order=st.permutations(range(ROWS))
        | st.tuples(*[st.integers(0, ROWS - 1)] * ROWS)
        | st.tuples(*[ANY_ROW] * ROWS)
    )
    def reorder(self, order):
        self.oracle.reorder(order)
        self.run("reorder", np.array(order))

    @rule(rows=st.tuples(*[st.booleans()] * ROWS))
    def free_mask(self, rows):
        self.oracle.free(np.flatnonzero(rows))
        self.run("free", np.array(rows))

    @rule(rows=st.tuples(ANY_ROW, ANY_ROW))
    def free_indices(self, rows):
        self.oracle.free(rows)
        self.run("free", np.array(rows))


@pytest.mark.parametrize("name", CONFIGS)
def test_against_oracle(name):
    run_state_machine_as_test(
        type("Machine", (Machine,), {"name": name}),
        settings=settings(
            max_examples=int(os.environ.get("JAXKV_EXAMPLES", 60)), stateful_step_count=80, deadline=None,
            derandomize="CI" in os.environ, suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip
