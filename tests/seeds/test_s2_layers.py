"""S2: layers that differ, as TensorRT Edge-LLM has them."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from seeds import LAYERS, LAYOUTS, ROWS, assert_same, counts, filled, make_config

import jaxkv
from jaxkv.testing import assert_no_copy


def test_s2_1_layers_differ():
    cache, k, v = filled()
    assert [pool.kv.shape[2:] for pool in cache.pools] == [(2, 4, 8), (1, 4, 16)]
    for layer in range(2):
        assert_same(jaxkv.gather(cache, 0, layer=layer), (k[layer][0, :9], v[layer][0, :9]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_s2_2_keys_and_values_combined(layout):
    cache, k, v = filled(layout)
    for layer, c in enumerate(LAYERS):
        combined = cache.combined(layer)
        assert combined.shape == (ROWS, 2, c.num_kv_heads, 20, c.head_dim)
        for row, length in enumerate(cache.lengths.tolist()):
            for half, stored in enumerate((k, v)):
                assert_same(combined[row, half, :, :length], stored[layer][row, :length].swapaxes(0, 1))
            assert not combined[row, :, :, length:].any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_s2_3_keys_and_values_separate(layout):
    cache, _, _ = filled(layout)
    for layer, c in enumerate(LAYERS):
        k, v = cache.separate(layer)
        assert k.shape == v.shape == (ROWS, c.num_kv_heads, 20, c.head_dim)
        assert_same(jnp.stack([k, v], axis=1), cache.combined(layer))


def test_s2_3_the_contiguous_layout_moves_no_data():
    """What is read through the view is read from the pool; no dense copy of it is ever in memory."""
    config = make_config("contiguous", max_seq_len=4096)
    read = jax.jit(lambda cache: [2 * x[:, :, 8:24] for x in cache.separate(0)])
    memory = read.lower(jax.eval_shape(lambda: jaxkv.init(config))).compile().memory_analysis()
    assert memory.temp_size_in_bytes < config.bytes / 100


def test_s2_4_configuration():
    cache = jaxkv.init(make_config())
    assert cache.layer_config(1) == LAYERS[1] and cache.num_layers == 2 and cache.config == make_config()
    assert not cache.is_uniform and jaxkv.init(make_config(layers=LAYERS[:1] * 3)).is_uniform
    for index in (2, -1):
        with pytest.raises(IndexError, match="layer must be an integer from 0 to 1"):
            cache.layer_config(index)


def test_s2_5_allocated_once():
    cache, k, v = filled()
    donated = jax.jit(jaxkv.append, donate_argnames="cache")(cache, k, v, counts(1, 1, 1))
    assert all(pool.kv.is_deleted() for pool in cache.pools)  # donation is a move
    assert donated.lengths.tolist() == [10, 1, 5]
    large = jax.eval_shape(lambda: jaxkv.init(make_config(num_blocks=4000)))
    kv = [jax.ShapeDtypeStruct((ROWS, 1, c.num_kv_heads, c.head_dim), "float32") for c in LAYERS]
    with pytest.raises(AssertionError, match="donate the cache"):
        assert_no_copy(jax.jit(jaxkv.append), large, kv, kv)


@pytest.mark.parametrize(
    "field, value", [("block_size", 0), ("num_blocks", -1), ("dtype", "int64"), ("layout", "odd"), ("layers", ())]
)
def test_s2_6_invalid_configurations(field, value):
    with pytest.raises(ValueError, match=rf"CacheConfig\.{field} must .*({value}|empty)"):
        dataclasses.replace(make_config(), **{field: value})
