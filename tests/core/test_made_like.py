"""`CacheConfig.uniform` and `CacheConfig.like`."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import jaxkv

SIZES = dict(num_layers=3, num_kv_heads=2, head_dim=8, max_seqs=4, max_seq_len=33)


def shape(*sizes, dtype="float16"):
    return jax.ShapeDtypeStruct(sizes, dtype)


def summary(config):
    heads = [(layer.num_kv_heads, layer.head_dim) for layer in config.layers]
    return heads, config.max_seqs, config.max_seq_len, config.dtype.name


def test_uniform_lets_every_row_be_full():
    config = jaxkv.CacheConfig.uniform(**SIZES)
    assert config.num_blocks == 4 * 3 and config.dtype == jnp.bfloat16
    cache = jaxkv.extend(jaxkv.init(config), [33] * 4)
    jaxkv.check(cache)
    same = jaxkv.CacheConfig(
        layers=[jaxkv.LayerConfig(num_kv_heads=2, head_dim=8)] * 3, max_seqs=4, max_seq_len=33, num_blocks=12
    )
    assert (config.layers, config.group_blocks, config.max_tokens) == (same.layers, same.group_blocks, same.max_tokens)


def test_uniform_windows_and_fields():
    def windows(x):
        return [layer.window for layer in jaxkv.CacheConfig.uniform(**SIZES, windows=x).layers]

    assert windows(None) == [None] * 3 and windows(9) == [9] * 3 and windows(np.array([1, 2, 3])) == [1, 2, 3]
    assert windows([None, 4, None]) == [None, 4, None]
    config = jaxkv.CacheConfig.uniform(**SIZES, num_blocks=5, block_size=8, dtype="int8", stacked=True)
    assert (config.num_blocks, config.block_size, config.dtype.name, config.stacked) == (5, 8, "int8", True)
    assert jaxkv.CacheConfig.uniform(**SIZES, memory_bytes=10_000).bytes <= 10_000


def test_bounds_of_all_layers():
    dense = {"k": shape(4, 33, 2, 8), "v": shape(4, 33, 2, 8)}
    for config in (jaxkv.CacheConfig.uniform(**SIZES, bounds=True), jaxkv.CacheConfig.like(dense, bounds=True)):
        assert all(layer.bounds for layer in config.layers) and config.bounds_shape(0) == (13, 2, 2, 8)
    assert not any(layer.bounds for layer in jaxkv.CacheConfig.like(dense).layers)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (dict(bounds="yes"), "LayerConfig.bounds must be True or False, not 'yes'"),
        (dict(bounds=True, layout="contiguous"), "LayerConfig.bounds tell a row's blocks apart"),
        (dict(num_layers=0), "num_layers must be at least 1, not 0"),
        (dict(num_layers=10**30), "num_layers must be at most"),
        (dict(num_layers="3"), "num_layers must be an integer, not '3'"),
        (dict(windows=[1, 2]), r"one entry for each of the 3 layers, not 2: \(1, 2\)"),
        (dict(windows="12"), "LayerConfig.window must be an integer, not '12'"),
        (dict(windows=0), "LayerConfig.window must be at least 1, not 0"),
        (dict(head_dim=float("nan")), "LayerConfig.head_dim must be an integer, not nan"),
        (dict(max_seqs=0), "max_seqs must be at least 1"),
    ],
)
def test_what_uniform_refuses(change, says):
    with pytest.raises(ValueError, match=says):
        jaxkv.CacheConfig.uniform(**SIZES | change)


# What others keep: rows 3, places 20, 2 KV heads of 8.


class Own(nnx.Module):  # as codebases write their own
    def __init__(self, name="k_cache"):
        self.k_cache, self.v_cache = (nnx.Cache(jnp.zeros((3, 20, 2, 8), "float16")) for _ in "kv")


def heads_first(layers=2):
    """As Hugging Face's cache class has them: objects with keys and values, which are tensors."""
    tensor = types.SimpleNamespace(shape=(3, 2, 20, 8), dtype="torch.float16")
    layer = types.SimpleNamespace(keys=tensor, values=tensor)
    return types.SimpleNamespace(layers=[layer] * layers)


def flax_state():
    class Model(nnx.Module):
        def __init__(self):
            make = dict(num_heads=4, in_features=6, qkv_features=32, num_kv_heads=2, decode=True, rngs=nnx.Rngs(0))
            self.blocks = nnx.List([nnx.MultiHeadAttention(**make) for _ in range(2)])

    model = Model()
    for block in model.blocks:
        block.init_cache((3, 20, 6), "float16")
    return nnx.state(model, nnx.Cache)


def linen_collection():
    attn = linen.MultiHeadDotProductAttention(num_heads=2, qkv_features=16, decode=True, dtype="float16")
    cache = jax.eval_shape(attn.init, jax.random.key(0), jnp.ones((3, 20, 6)))["cache"]
    return {"layer_0": {"attention": cache}, "layer_1": {"attention": cache}}


FLAX, HF = shape(3, 20, 2, 8), shape(3, 2, 20, 8)
CACHES = {
    "nnx": flax_state,
    "linen": linen_collection,
    "dicts by k and v": lambda: {f"layer_{i}": {"k": FLAX, "v": FLAX, "end_index": shape(3)} for i in range(2)},
    "a list of dicts": lambda: [{"key": FLAX, "value": FLAX}] * 2,
    "a scanned model": lambda: {"cached_key": shape(2, 3, 20, 2, 8), "cached_value": shape(2, 3, 20, 2, 8)},
    "a codebase's modules": lambda: [Own(), Own()],
    "pairs": lambda: ((HF, HF), (HF, HF)),
    "pairs and more": lambda: [(HF, HF, None)] * 2,
    "pairs of numpy": lambda: [(np.zeros(HF.shape, "float16"),) * 2] * 2,
    "a cache class": heads_first,
    "an older cache class": lambda: types.SimpleNamespace(key_cache=[HF, HF], value_cache=[HF, HF]),
}


@pytest.mark.parametrize("make", CACHES.values(), ids=CACHES.keys())
def test_like_a_dense_cache(make):
    config = jaxkv.CacheConfig.like(make())
    assert summary(config) == ([(2, 8)] * 2, 3, 20, "float16")
    assert config.num_blocks == 3 * 2


def test_like_says_more():
    cache = {f"layer_{i}": {"k": shape(3, 20, 1 + i, 8), "v": shape(3, 20, 1 + i, 8)} for i in range(11)}
    config = jaxkv.CacheConfig.like(cache)  # layer_10 comes after layer_9
    assert [layer.num_kv_heads for layer in config.layers] == [*range(1, 12)]
    cache = [(HF, HF), (shape(3, 2, 8, 8), shape(3, 2, 8, 8))]  # a local layer keeps fewer places
    config = jaxkv.CacheConfig.like(cache, windows=(None, 8), max_seqs=7, dtype="float32", block_size=4)
    assert summary(config) == ([(2, 8)] * 2, 7, 20, "float32")
    assert config.group_windows == (None, 8) and config.num_blocks == 7 * 5
    assert summary(jaxkv.CacheConfig.like([(FLAX, FLAX)], heads_first=False, max_seq_len=99)) == (
        [(2, 8)],
        3,
        99,
        "float16",
    )
    assert summary(jaxkv.CacheConfig.like({"k": HF, "v": HF}, heads_first=True))[0] == [(2, 8)]


@pytest.mark.parametrize(
    ("cache", "fields", "says"),
    [
        ({"a": 1}, {}, "There are no keys and values in {'a': 1}: give a Flax collection"),
        (None, {}, "There are no keys and values in None"),
        (FLAX, {}, "There are no keys and values in ShapeDtypeStruct"),
        ([(shape(3, 2, 8), shape(3, 2, 8))], {}, r"must be \[B, K, T, D\].*the cache.*|\[0\] has \[3, 2, 8\]"),
        ({"x": {"k": FLAX, "v": HF}}, {}, r"must be \[B, T, K, D\], .* but x has \[3, 20, 2, 8\] and \[3, 2, 20, 8\]"),
        ([(HF, HF), (shape(4, 2, 20, 8),) * 2], {}, r"The layers have \[3, 4\] rows: say max_seqs"),
        ([(HF, HF)], dict(windows=[1, 2]), "one entry for each of the 1 layers, not 2"),
        ([(shape(3, 2, 20, 8, dtype="int32"),) * 2], {}, "must be one of bfloat16, .*, not int32"),
    ],
)
def test_what_like_refuses(cache, fields, says):
    with pytest.raises(ValueError, match=says):
        jaxkv.CacheConfig.like(cache, **fields)
