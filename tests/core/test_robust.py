"""Caches that callers come by in ways of their own, and failed rows: nothing ends in another library's words."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv

LAYER = jaxkv.LayerConfig(num_kv_heads=2, head_dim=8, window=3)
CONFIG = jaxkv.CacheConfig(layers=(LAYER,), max_seqs=2, max_seq_len=64, num_blocks=8, dtype="float32")


def filled():
    kv = jnp.ones((1, 2, 20, 2, 8))
    return jaxkv.append(jaxkv.init(CONFIG), kv, kv, [20, 3])


def test_eager_functions_take_numpy_arrays():
    cache = filled()
    held = jax.tree.map(np.asarray, cache)
    for function in (
        lambda c: jaxkv.extend(c, [1, 1]),
        lambda c: jaxkv.free(c, [0]),
        lambda c: jaxkv.truncate(c, [19, 1]),
        lambda c: jaxkv.fork(c, 0, 1),
        lambda c: jaxkv.reorder(c, [1, 0]),
        lambda c: jaxkv.swap_out(c, 0),
        lambda c: c.store(0, 1, 0, 1, np.ones(8), np.ones(8)),
    ):
        jax.tree.map(np.testing.assert_array_equal, function(held), function(cache))


@pytest.mark.parametrize("leaf", [object(), None, 0, "a", 1.5, jax.ShapeDtypeStruct((2,), "int32")])
def test_a_cache_of_what_are_no_arrays_has_a_portrait(leaf):
    strange = jax.tree.map(lambda _: leaf, filled())
    assert repr(strange).startswith("Cache(") and strange._repr_html_().startswith("Cache(")


def test_what_reads_numbers_is_no_part_of_jit(tmp_path):
    jaxkv.save(tmp_path / "rows", filled())
    for question in (jaxkv.check, jaxkv.check_invariants, jaxkv.stats, lambda c: jaxkv.save(tmp_path / "a", c),
                     lambda c: jaxkv.load(tmp_path / "rows", into=c)):  # fmt: skip
        with pytest.raises(ValueError, match=r"(check|check_invariants|stats|save|load) cannot be part of jit"):
            jax.jit(question)(filled())


def test_a_stack_of_caches_is_asked_one_by_one():
    stack = jax.tree.map(lambda x: jnp.stack([x, x, x]), jaxkv.extend(filled(), [100, 1]))
    assert repr(stack).startswith("Cache(a stack of [3] caches")
    assert stack._repr_html_() == repr(stack)
    for question in (jaxkv.check, jaxkv.check_invariants, jaxkv.stats):
        with pytest.raises(ValueError, match=r"a stack of \[3\] caches"):
            question(stack)
    with pytest.raises(jaxkv.SequenceTooLong, match="row 0"):
        jaxkv.check(jax.tree.map(lambda x: x[1], stack))


@pytest.mark.parametrize("request_of", [jaxkv.extend, jaxkv.reserve])
def test_a_failed_row_takes_part_in_nothing_until_it_is_freed(request_of):
    failed = jaxkv.extend(filled(), [100, 1])
    again = request_of(failed, [21, 20])
    assert (again.lengths[0], again.new[0], again.failed.tolist()) == (20, 0, [True, False])
    assert (np.asarray(again.tables[0].tables[0]) == np.asarray(failed.tables[0].tables[0])).all()
    with pytest.raises(jaxkv.SequenceTooLong, match="The limit of max_seq_len"):
        jaxkv.check(again)
    out, _ = jaxkv.attention(*[jnp.ones((2, 20, 2, 8))] * 3, jaxkv.extend(failed, [1, 1]), layer=0)
    assert not np.asarray(out[0]).any() and np.asarray(out[1, 0]).any()
    assert jaxkv.extend(jaxkv.free(again, 0), [5, 0]).lengths[0] == 5


def test_the_last_free_block_is_given_away_and_no_other():
    cache = jaxkv.init(CONFIG.replace(num_blocks=4))
    for counts, failed in [([64, 0], [False, False]), ([48, 16], [False, False]), ([48, 17], [False, True])]:
        after = jaxkv.extend(cache, counts)
        jaxkv.check_invariants(after)
        assert after.failed.tolist() == failed


def test_no_window_is_the_layers_own():
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((2, 4, 2, 8)), jnp.float32) for _ in range(3))
    cache = jaxkv.extend(filled(), [4, 4])
    own, _ = jaxkv.attention(q, k, v, cache, layer=0)
    for window, same in [(None, True), (3, True), (2, False)]:
        out, _ = jaxkv.attention(q, k, v, cache, layer=0, window=window)
        assert bool((out == own).all()) == same


def test_what_a_config_settled_gives_way_and_what_was_said_does_not():
    assert dataclasses.replace(CONFIG, num_blocks=9).max_tokens == 144
    assert dataclasses.replace(CONFIG, max_seqs=9).num_blocks == 8
    contiguous = CONFIG.replace(layout="contiguous")
    assert dataclasses.replace(contiguous, max_seqs=5).num_blocks == 5
    by_tokens = jaxkv.CacheConfig(layers=(LAYER,), max_seqs=2, max_tokens=100)
    assert (
        jaxkv.CacheConfig(layers=(LAYER,), max_seqs=2, max_seq_len=9, num_blocks=by_tokens.num_blocks).num_blocks == 7
    )
    with pytest.raises(ValueError, match="name one of the two"):
        dataclasses.replace(CONFIG, max_tokens=99)


def test_a_cache_larger_than_the_memory_is_refused_with_both_figures():
    config = CONFIG.replace(block_size=64).with_memory(1e15 / 2**20 * 1e3)
    needed = config.bytes + 4 * config.max_seqs * sum(config.table_widths)
    with pytest.raises(ValueError, match=rf"would take {needed} bytes, but .* has \d+ bytes of memory"):
        jaxkv.init(config)
    assert jax.eval_shape(lambda: jaxkv.init(config)).pools[0].kv.shape[0] == config.num_blocks + 1


def test_a_failed_row_is_no_place_to_load_into(tmp_path):
    jaxkv.save(tmp_path / "rows", jaxkv.free(filled(), 1))
    failed = jaxkv.extend(jaxkv.init(CONFIG), [100, 0])
    loaded = jaxkv.load(tmp_path / "rows", into=failed)
    assert (loaded.lengths.tolist(), loaded.failed.tolist()) == ([0, 20], [True, False])
    with pytest.raises(ValueError, match="Row 0 of the cache is not empty"):
        jaxkv.load(tmp_path / "rows", into=failed, rows=[0, None])


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint32, np.int64, np.uint64])
def test_counts_and_rows_of_every_integer_type(dtype):
    cache = jaxkv.extend(filled(), np.array([3, 0], dtype))
    assert cache.new.tolist() == [3, 0]
    assert jaxkv.truncate(cache, np.array([22, 3], dtype)).lengths.tolist() == [22, 3]
    assert jaxkv.reorder(cache, np.array([1, 1], dtype)).lengths.tolist() == [3, 3]
    assert jaxkv.free(cache, np.array([1], dtype)).lengths.tolist() == [23, 0]


def test_a_count_of_64_bits_does_not_wrap_on_the_device():
    with jax.enable_x64(True):
        for wrong in (2**32 + 1, -(2**32) + 1, 2**63 - 1):
            for counts in (jnp.array([wrong, 1]), np.array([max(wrong, 2**32 + 1), 1])):
                cache = jaxkv.extend(filled(), counts)
                assert (cache.new.tolist(), cache.failed.tolist()) == ([0, 1], [True, False])
        cache = jaxkv.extend(filled(), jnp.array([2**32 + 1, 1], jnp.uint64))
        assert cache.failed.tolist() == [True, False]
