"""Inside jit only the data tells: a row is left alone and marked, the others go on, and `check` has the sentence."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from three_rows import LAYERS, filled, ones

import jaxkv


@pytest.fixture(scope="module")
def cache():
    return filled()


def extended(cache, numbers, places=5):
    kv = [ones(3, places, c.num_kv_heads, c.head_dim) for c in LAYERS]
    return jax.jit(jaxkv.append)(cache, kv, kv, jnp.array(numbers, jnp.int32))


def test_a_row_that_appends_more_than_there_is_takes_no_blocks(cache):
    after = extended(cache, [1, 12, 2], places=8)
    assert after.failed.tolist() == [False, True, False]
    assert after.tables[0].num_blocks_per_row[1] == cache.tables[0].num_blocks_per_row[1]
    kv = [ones(9, c.num_kv_heads, c.head_dim) for c in LAYERS]
    packed = jax.jit(jaxkv.append)(cache, kv, kv, jnp.array([3, 7, 0], jnp.int32))
    assert packed.failed.tolist() == [False, True, False]
    assert packed.tables[0].num_blocks_per_row[1] == cache.tables[0].num_blocks_per_row[1]


DATA = {
    "negative count": (
        lambda c: extended(c, [1, -1, 2]),
        [1],
        jaxkv.CacheError,
        "request for row 1 is invalid: it has a negative number",
    ),
    "more than T": (
        lambda c: extended(c, [1, 7, 2]),
        [1],
        jaxkv.CacheError,
        "request for row 1 is invalid: .* more tokens than the step's arrays have slots for",
    ),
    "too long": (
        lambda c: jax.jit(jaxkv.extend)(c, jnp.array([2**31 - 1, 1, 1], jnp.int32)),
        [0],
        jaxkv.SequenceTooLong,
        r"max_seq_len = 20 tokens would be exceeded by row 0 \(it holds 6\)\. .* truncate such rows",
    ),
    "no blocks": (
        lambda c: jax.jit(jaxkv.extend)(c, jnp.array([3, 18, 9])),
        [1],
        jaxkv.OutOfBlocks,
        r"Row 1 \(0 tokens, 0 blocks\) needs 5 more blocks for 18 tokens, but 2 of 8 blocks are free",
    ),
    "negative reserve": (lambda c: jax.jit(jaxkv.reserve)(c, jnp.array([0, -5, 0])), [1], jaxkv.CacheError, "row 1"),
    "long reserve": (
        lambda c: jax.jit(jaxkv.reserve)(c, jnp.array([0, 21, 0])),
        [1],
        jaxkv.SequenceTooLong,
        "row 1 .it holds 0.",
    ),
    "negative truncate": (lambda c: jax.jit(jaxkv.truncate)(c, jnp.array([-1, 0, 1])), [0], jaxkv.CacheError, "row 0"),
    "fork from nowhere": (
        lambda c: jax.jit(jaxkv.fork)(c, jnp.array([-1, 0]), jnp.array([1, 2])),
        [1],
        jaxkv.CacheError,
        "row 1 is invalid: .* a row index out of range",
    ),
    "reorder from nowhere": (
        lambda c: jax.jit(jaxkv.reorder)(c, jnp.array([0, 0, 7])),
        [1, 2],
        jaxkv.CacheError,
        "row 1 and row 2",
    ),
}


@pytest.mark.parametrize("name", DATA)
def test_failure_as_data(name, cache):
    call, rows, error, words = DATA[name]
    after = call(cache)
    jaxkv.check_invariants(after)
    assert np.flatnonzero(after.failed).tolist() == rows
    for row in rows:
        assert after.lengths[row] == cache.lengths[row]
        for layer in range(2):
            for actual, expected in zip(
                jaxkv.gather(after, row, layer=layer), jaxkv.gather(cache, row, layer=layer), strict=True
            ):
                np.testing.assert_array_equal(actual, expected)
    with pytest.raises(error, match=words) as raised:
        jaxkv.check(after)
    assert type(raised.value) is error and re.search(
        "keeps the tokens that it had|The row is unchanged", str(raised.value)
    )
    cleared = jaxkv.free(after, rows)
    jaxkv.check(cleared)
    jaxkv.check(cache)


def test_indices_out_of_range_on_the_device_are_ignored(cache):
    after = jax.jit(jaxkv.free)(cache, jnp.array([-1, 3, 2**31 - 1]))
    assert after.lengths.tolist() == [6, 0, 3] and not after.failed.any()
    padded = jax.jit(lambda cache, ended: jaxkv.free(cache, jnp.nonzero(ended, size=3, fill_value=3)[0]))
    after = padded(cache, jnp.array([False, False, True]))
    assert after.lengths.tolist() == [6, 0, 0] and not after.failed.any()
    assert jax.jit(jaxkv.fork)(cache, jnp.array([0]), jnp.array([-1])).lengths.tolist() == [6, 0, 3]
    k, v = jax.jit(lambda c, row: jaxkv.gather(c, row, layer=0, max_len=4))(cache, jnp.array(-1))
    assert not k.any() and not v.any()
    k, _ = jax.jit(lambda c, position: c.token(0, position))(cache, jnp.array(-1))
    assert not k.any()


def test_a_mask_of_integers_is_no_list_of_rows(cache):
    """[1, 0, 0] would free rows 1 and 0, and was meant to free row 0 alone."""
    for mask in ([1, 0, 0], np.array([1, 0, 1]), np.zeros(3, int)):
        with pytest.raises(
            ValueError, match=r"rows names a row twice: \[.*\]\. A mask must be bool\[3\], not integers"
        ):
            jaxkv.free(cache, mask)
    assert jaxkv.free(cache, [2, 0]).lengths.tolist() == [0, 0, 0]
    assert jaxkv.free(cache, np.array([1, 0, 0], bool)).lengths.tolist() == [0, 0, 3]


def test_several_failures_are_all_named(cache):
    after = jaxkv.extend(jaxkv.extend(cache, [20, 0, 0]), [0, 0, 100])
    with pytest.raises(jaxkv.SequenceTooLong, match=r"by row 0 \(it holds 6\) and row 2 \(it holds 3\)"):
        jaxkv.check(after)


def test_a_count_past_int32_does_not_wrap(cache):
    after = jaxkv.extend(cache, [2**32 + 1, 0, 1])
    assert after.lengths.tolist() == [6, 0, 4] and after.failed.tolist() == [True, False, False]


def test_behind_a_row_for_which_there_is_too_little_another_gets_the_last_block():
    layer = jaxkv.LayerConfig(num_kv_heads=1, head_dim=4)
    config = jaxkv.CacheConfig(layers=(layer,), max_seqs=4, max_seq_len=20, block_size=4, num_blocks=5)
    for counts, served in (
        ([8, 16, 12, 1], [8, 0, 12, 0]),
        ([8, 16, 13, 12], [8, 0, 0, 12]),
        ([20, 1, 0, 0], [20, 0, 0, 0]),
    ):
        cache = jaxkv.extend(jaxkv.init(config), counts)
        assert cache.lengths.tolist() == served and int(cache.tables[0].num_free) == 0
        assert cache.failed.tolist() == [n > 0 and not got for n, got in zip(counts, served, strict=True)]


def test_blocks_that_came_too_late_are_no_contradiction():
    layer = jaxkv.LayerConfig(num_kv_heads=1, head_dim=8)
    sizes = dict(max_seqs=2, max_seq_len=16, num_blocks=3, block_size=4)
    cache = jaxkv.extend(jaxkv.init(jaxkv.CacheConfig(layers=(layer,), **sizes)), [8, 4])
    failed = jaxkv.free(jaxkv.extend(cache, [1, 0]), [1])
    with pytest.raises(jaxkv.OutOfBlocks, match="needed 1 more block for 9 tokens, but only now 1 of 3 blocks is free"):
        jaxkv.check(failed)
    with pytest.raises(jaxkv.OutOfBlocks, match="steps leave it out until free empties it, or swap_out and swap_in"):
        jaxkv.check(jaxkv.truncate(failed, [7, 0]))
    again, host = jaxkv.swap_out(failed, [0])
    again = jaxkv.extend(jaxkv.swap_in(again, [0], host), [1, 0])
    jaxkv.check(again)
    assert again.lengths.tolist() == [9, 0]
