"""What tables hold and what programs compute on them goes by what rows can hold, not by how long they may become."""

import math
import re

import jax
import jax.numpy as jnp
import pytest

import jaxkv

SHORT, LONG = 4096, 1 << 20
WHOLE = 1 << 18  # of layers that keep everything: more than tables may have columns for in any case
ROWS, BLOCKS = 4, 80


def make(max_seq_len, **fields):
    layer = jaxkv.LayerConfig(num_kv_heads=1, head_dim=8, **fields)
    return jaxkv.init(
        jaxkv.CacheConfig(layers=(layer,), max_seqs=ROWS, max_seq_len=max_seq_len, num_blocks=BLOCKS, dtype="float32")
    )


def largest(function, *arguments):
    """Elements of the largest array that a program computes with, and of all that it names together."""
    text = jax.jit(function).lower(*arguments).as_text()
    sizes = [math.prod(map(int, dims.split("x"))) for dims in re.findall(r"tensor<((?:\d+x)*\d+)x[a-z]", text)]
    return max(sizes), sum(sizes)


def attend(cache):
    q, kv = jnp.ones((ROWS, 1, 2, 8)), jnp.ones((ROWS, 1, 1, 8))
    return jaxkv.attention(q, kv, kv, jaxkv.extend(cache, jnp.ones(ROWS, jnp.int32)), layer=0)


def thin(cache):
    scores = jaxkv.scores.streaming_llm(cache, layer=0)
    return jaxkv.evict(cache, layer=0, scores=scores, budget=jnp.int32(8))


def extend(cache):
    return jaxkv.extend(cache, jnp.ones(ROWS, jnp.int32))


def rest(cache):
    lengths = jnp.full(ROWS, 3, jnp.int32)
    cache = jaxkv.free(jaxkv.truncate(cache, lengths), jnp.arange(ROWS) == 1)
    cache = jaxkv.reserve(jaxkv.fork(cache, jnp.array([0]), jnp.array([1])), lengths)
    return jaxkv.keep(cache, jnp.zeros((ROWS, 1), jnp.int32))


@pytest.mark.parametrize(
    ("function", "fields"),
    [
        (attend, {"window": 32}),
        (attend, {"window": 32, "sink_tokens": 4}),
        (attend, {"chunk": 48}),
        (attend, {}),
        (extend, {}),
        (rest, {}),
        (rest, {"window": 32}),
        (thin, {"evict": "layer"}),
        (thin, {"evict": "head"}),
    ],
)
def test_no_array_goes_by_max_seq_len(function, fields):
    short, long = make(SHORT if fields else WHOLE, **fields), make(LONG, **fields)
    assert largest(function, short) == largest(function, long)


@pytest.mark.parametrize("fields", [{"window": 32, "sink_tokens": 4}, {"chunk": 48}, {"evict": "layer"}, {}])
def test_tables_are_as_wide_as_what_rows_can_hold(fields):
    short, long = make(SHORT if fields else WHOLE, **fields), make(LONG, **fields)
    assert [x.nbytes for x in jax.tree.leaves(short.tables)] == [x.nbytes for x in jax.tree.leaves(long.tables)]
    assert long.config.table_widths[0] <= (BLOCKS + 4 if fields else 2**15 // ROWS)


def test_rows_of_windows_go_on_beyond_max_seq_len():
    """The next token is computed as in a cache that could hold all of the row, at the position that it has."""
    layer = jaxkv.LayerConfig(num_kv_heads=1, head_dim=8, window=20, sink_tokens=4)
    sizes = dict(layers=(layer,), max_seqs=1, block_size=4, dtype="float32")
    ends, long = (jaxkv.init(jaxkv.CacheConfig(**sizes, max_seq_len=n, num_blocks=12)) for n in (40, 400))
    q, kv = (jax.random.normal(jax.random.key(i), (30, 1, 7, 2 - i, 8)) for i in range(2))

    @jax.jit
    def step(cache, q, kv):
        cache = jaxkv.extend(cache, jnp.array([7], jnp.int32))
        return jaxkv.positions(cache, (1, 7)), *jaxkv.attention(q, kv, kv, cache, layer=0)

    for i in range(30):
        at, out, ends = step(ends, q[i], kv[i])
        expected_at, expected, long = step(long, q[i], kv[i])
        assert at.tolist() == expected_at.tolist() == [[*range(7 * i, 7 * i + 7)]]
        assert jnp.allclose(out, expected, atol=1e-5)
    jaxkv.check(ends)
    jaxkv.check_invariants(ends)
    assert ends.lengths.tolist() == [210] and ends.blocks_in_use < 12
    with pytest.raises(jaxkv.SequenceTooLong, match="The limit of max_seq_len = 40 tokens at once"):
        jaxkv.check(jaxkv.extend(ends, [30]))


def test_an_evicted_row_goes_on_beyond_max_seq_len():
    cache = make(64, evict="layer")
    for _ in range(10):
        kv = jnp.ones((1, ROWS, 30, 1, 8))
        cache = jaxkv.append(cache, kv, kv)
        cache = jaxkv.evict(cache, layer=0, scores=jaxkv.scores.streaming_llm(cache, layer=0), budget=20)
    jaxkv.check(cache)
    assert cache.lengths.tolist() == [300] * ROWS and cache.layers[0].held.tolist() == [20] * ROWS
    with pytest.raises(jaxkv.SequenceTooLong):
        jaxkv.check(jaxkv.extend(cache, [45, 0, 0, 0]))


def test_a_row_ends_where_a_layer_keeps_all_of_it():
    layers = [jaxkv.LayerConfig(num_kv_heads=1, head_dim=8, window=window) for window in (8, None)]
    cache = jaxkv.init(jaxkv.CacheConfig(layers=layers, max_seqs=1, max_seq_len=64, num_blocks=8))
    cache = jaxkv.extend(cache, [64])
    with pytest.raises(jaxkv.SequenceTooLong, match="The limit of max_seq_len = 64 tokens would be exceeded"):
        jaxkv.check(jaxkv.extend(cache, [1]))
