"""Rows that outgrow their table: work and tables go by what rows hold, not by how long they may become.

Where tables have few columns rows slide along them. What comes out is what comes out where every block has a column.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nightly import NIGHTLY

import jaxkv
import jaxkv.testing
from jaxkv import LayerConfig
from jaxkv._core.config import layer_groups as group_rules

ROWS, PLACES, SIZE, LONGEST = 3, 7, 2, 400
HEADS, HEAD_DIM = 2, 4
LAYERS = (
    LayerConfig(num_kv_heads=1, head_dim=HEAD_DIM, window=6, sink_tokens=3),
    LayerConfig(num_kv_heads=1, head_dim=HEAD_DIM, chunk=5, bounds=True),
    LayerConfig(num_kv_heads=1, head_dim=HEAD_DIM, window=4),
)
WHOLE = LayerConfig(num_kv_heads=1, head_dim=HEAD_DIM)


def make(layers, monkeypatch, few):
    """A config whose tables have at least so many columns."""
    monkeypatch.setattr(group_rules, "FEW_COLUMNS", few)
    monkeypatch.setattr(group_rules, "FEW_ENTRIES", few)
    blocks = [150 if layer == WHOLE else 40 for layer in layers]
    config = jaxkv.CacheConfig(
        layers=layers, max_seqs=ROWS, max_seq_len=LONGEST, block_size=SIZE, group_blocks=blocks, dtype="float32"
    )
    assert config.table_widths  # they are worked out now
    return config


fast_to_compile = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@fast_to_compile
def step(cache, q, kv, counts):
    cache = jaxkv.extend(cache, counts)
    outs = []
    for layer in range(cache.num_layers):
        out, cache = jaxkv.attention(q, kv[layer], -kv[layer], cache, layer=layer)
        outs.append(out)
    return outs, cache


@fast_to_compile
def look(cache):
    """What can be seen of a cache, whatever columns its tables have."""
    held = [(t.lengths, t.new, t.failed, t.num_free, t.num_blocks_per_row, t.kept) for t in cache.tables]
    return held, [cache.combined(layer) for layer in range(cache.num_layers)]


def assert_alike(few, many):
    jax.tree.map(np.testing.assert_array_equal, *jax.device_get((look(few), look(many))))


def swap(cache, row, *_):
    cache, host = jaxkv.swap_out(cache, row)
    return jaxkv.swap_in(cache, row, host)


@fast_to_compile
def truncate(cache, row, count):
    return jaxkv.truncate(cache, jnp.where(jnp.arange(ROWS) == row, cache.lengths - count // 2, 2**30))


fork, poison = fast_to_compile(jaxkv.fork), fast_to_compile(jaxkv.testing.poison)
# How often, and what is done with a row, another, and a number. The rest is in the state machine, where rows slide too.
OPERATIONS = {
    "step": (60, None),
    "free": (1, lambda cache, row, *_: jaxkv.free(cache, np.arange(ROWS) == row)),
    "truncate": (8, lambda cache, row, _, count: truncate(cache, row, count)),
    "fork": (5, lambda cache, row, other, _: fork(cache, np.array([row]), np.array([other]))),
    "swap": (4, swap),
    "poison": (4, lambda cache, *_: poison(cache)),
}


@pytest.mark.parametrize("layers", [(*LAYERS, WHOLE), *[LAYERS] * NIGHTLY])
def test_rows_that_slide_are_as_rows_with_all_columns(layers, monkeypatch):
    few, many = (jaxkv.init(make(layers, monkeypatch, n)) for n in (1, LONGEST))
    widths = [[t.tables.shape[1] for t in cache.tables] for cache in (few, many)]
    assert all(n < 60 for n in widths[0][:3]) and all(n >= LONGEST // SIZE for n in widths[1]), widths
    furthest = 0
    for seed in range(20 if NIGHTLY else 1):
        rng = np.random.default_rng(seed)
        few, many = (jaxkv.free(cache, np.ones(ROWS, bool)) for cache in (few, many))
        for number in range(300 if NIGHTLY else 40):
            row, other = (int(x) for x in rng.permutation(ROWS)[:2])
            weights = np.array([often for often, _ in OPERATIONS.values()])
            what = str(rng.choice([*OPERATIONS], p=weights / weights.sum()))
            if what == "step":
                q = rng.standard_normal((ROWS, PLACES, HEADS, HEAD_DIM)).astype(np.float32)
                kv = rng.standard_normal((len(layers), ROWS, PLACES, 1, HEAD_DIM)).astype(np.float32)
                counts = rng.integers(0, PLACES + 1, ROWS).astype(np.int32)
                (out, few), (expected, many) = (step(cache, q, kv, counts) for cache in (few, many))
                for x, y in zip(out, expected, strict=True):
                    np.testing.assert_allclose(x, y, atol=1e-5, rtol=0)
            else:
                count = int(rng.integers(0, 9))
                few, many = (OPERATIONS[what][1](cache, row, other, count) for cache in (few, many))
            assert_alike(few, many)
            if number % 4 == 0:
                jaxkv.check_invariants(few)
            furthest = max(furthest, *(int(t.skipped.max()) for t in few.tables[:3]))
            if (failed := np.asarray(few.failed)).any():
                few, many = (jaxkv.free(cache, failed) for cache in (few, many))
    assert furthest > 20, "rows slid far"
