"""Layers with a window that keep their rows' first tokens: these stay and are seen, and what lies between is given
back."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nightly import NIGHTLY
from test_windows import LOCAL, PLACES, ROWS, WIDE, WINDOW, append, counts, extend, make_config, random_kv

import jaxkv
from jaxkv import LayerConfig
from jaxkv.testing import poison

FIRST = LayerConfig(num_kv_heads=2, head_dim=8, window=WINDOW, sink_tokens=5)  # two blocks, the second in part


@functools.cache
def first_and_window():
    """A layer that keeps its first tokens and a window, and one that keeps all of the same."""
    k, v = ([x[0]] * 2 for x in random_kv(make_config((FIRST, WIDE)), (ROWS, 65)))
    cache = jaxkv.init(make_config((FIRST, WIDE)))
    for start in range(0, 45, 9):
        more = [min(max(length - start, 0), 9) for length in (3, 17, 45)]
        cache = append(cache, *([x[:, start : start + PLACES] for x in xs] for xs in (k, v)), counts(*more))
    return cache


@jax.jit
def both(cache, q, k, num_tokens):
    """More tokens; what the one layer gives, and the other where it is told to see no more."""
    cache = jaxkv.extend(cache, num_tokens)
    out, cache = jaxkv.attention(q, k, k, cache, layer=0)
    expected, cache = jaxkv.attention(q, k, k, cache, layer=1, window=WINDOW, sink_tokens=5)
    return out, expected, cache


def assert_sees_the_same(cache, *num_tokens):
    jaxkv.check_invariants(cache)
    q, k = (np.random.default_rng(n).standard_normal((ROWS, 9, n, 8)).astype(np.float32) for n in (4, 2))
    out, expected, cache = both(poison(cache), q, k, counts(*num_tokens))
    np.testing.assert_allclose(out, expected, atol=1e-5)
    assert np.asarray(out)[np.asarray(num_tokens) > 0].any() and not cache.failed.any()
    jaxkv.check_invariants(cache)
    return cache


def test_first_tokens_stay_and_what_lies_between_is_given_back():
    cache = first_and_window()
    # Of 45 tokens two blocks of first ones, then the blocks of positions 40 to 44.
    assert extend(cache, counts(0, 0, 0)).tables[0].num_blocks_per_row.tolist() == [1, 4, 4]
    cache = assert_sees_the_same(cache, 1, 9, 1)
    cache = assert_sees_the_same(cache, 9, 0, 1)
    assert cache.tables[1].num_blocks_per_row.tolist() == [4, 7, 12]
    assert [cache.config.row_blocks(0, n) for n in (4, 12, 60)] == [1, 3, 5]
    (k, _), (whole, _) = (jaxkv.gather(cache, 2, layer=layer) for layer in range(2))
    assert not np.asarray(k[8:36]).any()
    for part in (slice(0, 8), slice(41, None)):
        np.testing.assert_array_equal(k[part], whole[part])


@pytest.mark.skipif(not NIGHTLY, reason="many small programs")
def test_rows_with_first_tokens_are_forked_cut_and_swapped():
    cache = first_and_window()
    assert_sees_the_same(jaxkv.fork(cache, 2, 0), 9, 1, 1)
    moved, host = jaxkv.swap_out(cache, [2, 0])
    back = jax.jit(jaxkv.swap_in)(poison(moved), jnp.array([0, 2]), host)
    assert back.lengths.tolist() == [45, 17, 3]
    assert_sees_the_same(back, 9, 1, 1)
    cut = jaxkv.truncate(cache, [2, 17, 44])
    assert_sees_the_same(cut, 9, 1, 1)
    gone = jaxkv.truncate(cache, [3, 17, 12])
    assert gone.failed.tolist() == [False, False, True] and gone.lengths.tolist() == [3, 17, 45]
    first = jaxkv.truncate(cache, [3, 17, 7])  # all of these are there
    assert first.lengths.tolist() == [3, 17, 7]
    assert_sees_the_same(first, 9, 1, 2)


@pytest.mark.skipif(not NIGHTLY, reason="many small programs")
@pytest.mark.parametrize("block_size", [4, 2, 1])
def test_rows_with_first_tokens_are_saved_and_sent(block_size, tmp_path):
    cache = first_and_window()
    jaxkv.save(tmp_path / "rows", cache)
    config = cache.config.replace(block_size=block_size, num_blocks=120)
    assert_sees_the_same(jaxkv.load(tmp_path / "rows", into=poison(jaxkv.init(config))), 9, 1, 1)
    assert_sees_the_same(jaxkv.send(cache, [0, 1, 2], to=poison(jaxkv.init(config)), at=[2, 0, 1]), 9, 1, 1)
    with pytest.raises(jaxkv.CacheFileError, match="fell out of its window"):  # block 1 of 3 would want tokens 8 to 11
        jaxkv.load(tmp_path / "rows", config.replace(block_size=12))
    partly = jaxkv.load(tmp_path / "rows", config.replace(block_size=12), partial_windows=True)
    assert_sees_the_same(partly, 9, 1, 1)


SINGLE = dict(num_kv_heads=2, head_dim=8)
FIRST_BAD = {
    "no window": (lambda: LayerConfig(**SINGLE, sink_tokens=4), "are seen beside a window, and there is none"),
    "none": (lambda: LayerConfig(**SINGLE, window=3, sink_tokens=0), "sink_tokens must be at least 1"),
    "more of a sharing layer": (
        lambda: make_config((FIRST, LayerConfig(**SINGLE, window=3, sink_tokens=6, shares_with=0))),
        "which keeps 5 sink tokens: its own sink_tokens cannot be 6",
    ),
    "a word": (
        lambda: jaxkv.attend(np.ones((ROWS, 1, 2, 8)), jaxkv.init(make_config((FIRST,))), layer=0, sink_tokens="a"),
        "sink_tokens must be an integer, not 'a'",
    ),
    "half of one": (
        lambda: jaxkv.attend(np.ones((ROWS, 1, 2, 8)), jaxkv.init(make_config((LOCAL,))), layer=0, sink_tokens=1.5),
        "sink_tokens must be an integer, not 1.5",
    ),
    "more than it keeps": (
        lambda: jaxkv.attend(np.ones((ROWS, 1, 2, 8)), jaxkv.init(make_config((FIRST,))), layer=0, sink_tokens=6),
        "except 5 sink tokens, and cannot take sink_tokens=6",
    ),
}


@pytest.mark.parametrize("name", FIRST_BAD)
def test_first_tokens_are_refused_in_one_sentence(name):
    function, why = FIRST_BAD[name]
    with pytest.raises(ValueError, match=why):
        function()


def test_first_tokens_are_seen_where_they_are_kept_and_refused_where_they_are_not():
    layers = (jaxkv.LayerConfig(num_kv_heads=1, head_dim=4), jaxkv.LayerConfig(num_kv_heads=1, head_dim=4, window=5))
    config = jaxkv.CacheConfig(layers=layers, max_seqs=1, max_seq_len=64, num_blocks=16, block_size=4, dtype="float32")
    kv = jnp.asarray(np.random.default_rng(0).standard_normal((2, 1, 40, 1, 4), np.float32))
    cache = jaxkv.append(
        jaxkv.append(jaxkv.init(config), kv[:, :, :39], kv[:, :, :39], [39]), kv[:, :, 39:], kv[:, :, 39:], [1]
    )
    q = jnp.ones((1, 1, 1, 4))
    out = jaxkv.attend(q, cache, layer=0, window=5, sink_tokens=3)
    seen = jnp.concatenate([kv[0, 0, :3, 0], kv[0, 0, 35:, 0]])
    expected = jax.nn.softmax(seen.sum(axis=1) / 2) @ seen
    np.testing.assert_allclose(out[0, 0, 0], expected, atol=1e-5)
    with pytest.raises(ValueError, match="Layer 1 frees the tokens that leave its window of 5"):
        jaxkv.attend(q, cache, layer=1, sink_tokens=3)
    with pytest.raises(ValueError, match="sink_tokens are seen beside a window, and there is none"):
        jaxkv.attend(q, cache, layer=0, sink_tokens=3)
