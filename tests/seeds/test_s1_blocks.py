"""S1: 16-token blocks and no allocation in the loop, as cjc-runtime has it."""

import copy
import dataclasses
import pickle
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from seeds import LAYERS, LAYOUTS, ROWS, assert_same, counts, filled, make_config, random_kv, step

import jaxkv
from jaxkv.testing import assert_no_copy, permute_blocks


@pytest.mark.parametrize("max_tokens, num_blocks", [(1, 1), (16, 1), (17, 2), (100, 7)])
def test_s1_1_blocks_for_max_tokens(max_tokens, num_blocks):
    config = jaxkv.CacheConfig(layers=LAYERS, max_seqs=1, max_tokens=max_tokens)
    assert (config.block_size, config.num_blocks, config.max_seq_len) == (16, num_blocks, max_tokens)
    assert jaxkv.init(config).num_blocks == num_blocks


def test_s1_2_sizes_in_use():
    config = jaxkv.CacheConfig(layers=LAYERS, max_seqs=2, max_tokens=100)
    cache = jaxkv.init(config)
    assert (cache.max_tokens, cache.num_blocks, cache.blocks_in_use, cache.num_tokens) == (100, 7, 0, 0)
    assert cache.is_empty and LAYERS[0].dim == 16
    cache = jaxkv.extend(cache, [17, 1])
    assert (cache.blocks_in_use, cache.num_tokens, cache.is_empty) == (3, 18, False)


def test_s1_3_append_one_token():
    config = make_config(max_seqs=1, max_seq_len=5)
    append = jax.jit(jaxkv.append, donate_argnames="cache")
    cache, (k, v) = jaxkv.init(config), random_kv(6, rows=1)
    pointers = [pool.kv.unsafe_buffer_pointer() for pool in cache.pools]
    for t in range(6):
        cache = append(cache, [x[:, t : t + 1] for x in k], [x[:, t : t + 1] for x in v])
        assert cache.lengths.tolist() == [min(t + 1, 5)]
        assert [pool.kv.unsafe_buffer_pointer() for pool in cache.pools] == pointers
    assert_same(jaxkv.gather(cache, 0, layer=0), (k[0][0, :5], v[0][0, :5]))
    with pytest.raises(jaxkv.SequenceTooLong, match=r"max_seq_len = 5 .* \(it holds 5\)"):
        jaxkv.check(cache)
    with pytest.raises(ValueError, match="k has head_dim 9"):
        jaxkv.append(cache, [jnp.ones((1, 1, 2, 9))] * 2, [jnp.ones((1, 1, 2, 9))] * 2)


def test_s1_4_append_many_tokens_all_or_nothing():
    cache, _, _ = filled()
    k, v = random_kv(12, seed=1)
    after = jaxkv.append(cache, k, v, [12, 8, 0])  # 9 + 12 > 20
    assert after.lengths.tolist() == [9, 8, 4] and after.failed.tolist() == [True, False, False]
    for row in (0, 2):
        assert_same(jaxkv.gather(after, row, layer=1), jaxkv.gather(cache, row, layer=1))
    assert_same(jaxkv.gather(after, 1, layer=1), (k[1][1, :8], v[1][1, :8]))
    nothing = jaxkv.append(cache, k, v, [0, 0, 0])
    assert_same((nothing.pools, nothing.lengths), (cache.pools, cache.lengths))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_s1_5_the_stored_tokens_dense(layout):
    cache, k, v = filled(layout)
    for layer, c in enumerate(LAYERS):
        assert_same(jaxkv.gather(cache, 0, layer=layer), (k[layer][0, :9], v[layer][0, :9]))
        assert jaxkv.gather(cache, 1, layer=layer)[0].shape == (0, c.num_kv_heads, c.head_dim)
        padded = jax.jit(lambda cache, row, i=layer: jaxkv.gather(cache, row, layer=i, max_len=7)[0])(
            cache, counts(2)[0]
        )
        assert_same(padded, k[layer][2, :7] * (jnp.arange(7) < 4).astype(jnp.float32)[:, None, None])


def test_s1_6_one_token():
    cache, k, v = filled()
    assert_same(cache.token(0, 8, layer=1), (k[1][0, 8], v[1][0, 8]))
    with pytest.raises(IndexError, match="Row 0 holds 9 tokens, so it has no token at position 9"):
        cache.token(0, 9)


def test_s1_7_clear():
    cache, k, v = filled()
    pointers = [pool.kv.unsafe_buffer_pointer() for pool in cache.pools]
    cache = jax.jit(jaxkv.free, donate_argnames="cache")(cache, jnp.ones(ROWS, bool))
    assert cache.is_empty and cache.blocks_in_use == 0
    assert [pool.kv.unsafe_buffer_pointer() for pool in cache.pools] == pointers
    assert jaxkv.append(cache, k, v, [9, 9, 9]).lengths.tolist() == [9, 9, 9]


def test_s1_8_a_value_like_any_other():
    cache, k, v = filled()
    before = jax.tree.map(np.array, cache)
    for clone in (copy.copy(cache), copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert_same(clone, cache)
        assert clone.config == cache.config
    with pytest.raises(ValueError):
        jaxkv.extend(cache, [-1, 0, 0])
    with pytest.raises(dataclasses.FrozenInstanceError):
        cache.config = None
    threads = [threading.Thread(target=jaxkv.append, args=(cache, k, v)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_same(cache, before)
    assert repr(cache) == "Cache(4 of 12 blocks used, 13 tokens in 2 of 3 rows, 2 layers, 13.0 KiB)"
    assert jax.jit(lambda cache: repr(cache) and cache.lengths)(cache).tolist() == [9, 0, 4]


def test_s1_9_memory():
    cache, _, _ = filled()
    config = jaxkv.CacheConfig(layers=LAYERS, max_seqs=ROWS, max_seq_len=1000, num_blocks=4000)
    assert len({pool.kv.unsafe_buffer_pointer() for pool in cache.pools}) == len(LAYERS)  # a buffer of its own each
    kv = [jax.ShapeDtypeStruct((ROWS, 1, c.num_kv_heads, c.head_dim), "bfloat16") for c in LAYERS]
    assert_no_copy(jax.jit(jaxkv.append, donate_argnames="cache"), jax.eval_shape(lambda: jaxkv.init(config)), kv, kv)
    q, (k, v) = jnp.ones((ROWS, 2, 4, 8)), random_kv(2, seed=1)
    out, _ = step(permute_blocks(cache), q, k[0], v[0], [2, 1, 1])
    assert_same(out, step(cache, q, k[0], v[0], [2, 1, 1])[0])
    kv = np.asarray(cache.pools[0].kv)
    assert kv[1].flags.c_contiguous and kv.flags.c_contiguous
