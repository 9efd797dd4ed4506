"""Keys and values of different width: stored in what they take, and read like keys and values apart."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from steps import gather_row

import jaxkv
import jaxkv.linen
import jaxkv.nnx
from jaxkv import LayerConfig
from jaxkv._layers import dense_attention
from jaxkv.models.checkpoints.parameter_counts import count_parameters
from pallas_kernels.common.quantization import find_format

ROWS, HEADS, K, DK, DV = 3, 4, 2, 6, 4
LAYERS = (
    LayerConfig(num_kv_heads=K, head_dim=DK, v_head_dim=DV),
    LayerConfig(num_kv_heads=K, head_dim=DK, v_head_dim=DV, window=5),
    LayerConfig(num_kv_heads=K, head_dim=DK),
    LayerConfig(num_kv_heads=K, head_dim=4, v_head_dim=10),  # wider values
)
LENGTHS = np.array([9, 5, 0], np.int32)
PLACES = 9


def config(**fields):
    sizes = {} if "layout" in fields else {"num_blocks": 24, "block_size": 4}
    return jaxkv.CacheConfig(
        **({"layers": LAYERS, "max_seqs": ROWS, "max_seq_len": 24, "dtype": "float32"} | sizes | fields)
    )


@functools.cache
def arrays(layers=LAYERS):
    rng = np.random.default_rng(0)

    def draw(heads, width):
        return jnp.asarray(rng.standard_normal((ROWS, PLACES, heads, width)), jnp.float32)

    return [(draw(HEADS, x.head_dim), draw(K, x.head_dim), draw(K, x.value_dim)) for x in layers]


def fill(cache):
    given = arrays(tuple(cache.config.layers))
    return jax.jit(jaxkv.append)(cache, [k for _, k, _ in given], [v for *_, v in given], LENGTHS)


@functools.cache
def filled(**fields):
    return fill(jaxkv.init(config(**fields)))


def assert_same_tokens(cache, rows=((0, 0), (1, 1)), atol=0.0):
    """Each row holds what was given for another one."""
    for layer, (_, k, v) in enumerate(arrays(tuple(cache.config.layers))):
        window = cache.config.layers[layer].window
        for row, of in rows:
            length = int(LENGTHS[of])
            first = 0 if window is None else max(0, length + 1 - window)
            for found, wanted in zip(gather_row(cache, row, layer), (k, v), strict=True):
                np.testing.assert_allclose(found[first:], wanted[of, first:length], atol=atol, rtol=0)


FORMATS = [{}, {"head_dim_multiple": 16}, {"layout": "contiguous"}, {"dtype": "int8"}, {"dtype": "int4"}]


@pytest.mark.parametrize("fields", FORMATS, ids=str)
def test_attention_is_that_of_keys_and_values_apart(fields):
    cache = jaxkv.extend(jaxkv.init(config(**fields)), LENGTHS)
    atol = {"int8": 0.05, "int4": 0.8}.get(fields.get("dtype"), 1e-5)
    for layer, (q, k, v) in enumerate(arrays()):
        out, cache = jax.jit(jaxkv.attention, static_argnames="layer")(q, k, v, cache, layer=layer)
        assert out.shape == (ROWS, PLACES, HEADS, LAYERS[layer].value_dim)
        wanted = dense_attention(q, k, v, window=LAYERS[layer].window)
        for row, length in enumerate(LENGTHS):
            np.testing.assert_allclose(out[row, :length], wanted[row, :length], atol=atol, rtol=0)
            assert not out[row, length:].any()
    jaxkv.check_invariants(cache)
    assert_same_tokens(cache, atol=atol)


def test_gradients_and_a_decode_step_of_packed_tokens():
    cache = filled()
    cache = jaxkv.extend(cache, [1, 1, 0])
    q, k, v = (x[:2, 0] for x in arrays()[0])

    def loss(q, k, v):
        return (jaxkv.attention(q, k, v, cache, layer=0)[0] ** 2).sum()

    def plain(q, k, v):
        total = 0.0
        for row in range(2):
            _, *before = (x[row, : LENGTHS[row]] for x in arrays()[0])
            ks, vs = (jnp.concatenate([x, y[row][None]]) for x, y in zip(before, (k, v), strict=True))
            total += (dense_attention(jnp.broadcast_to(q[row], (len(ks), HEADS, DK)), ks, vs)[-1] ** 2).sum()
        return total

    for a, b in zip(jax.grad(loss, (0, 1, 2))(q, k, v), jax.grad(plain, (0, 1, 2))(q, k, v), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_a_pool_has_the_bytes_of_both_widths_and_no_more():
    layer = LayerConfig(num_kv_heads=8, head_dim=192, v_head_dim=128)
    sizes = dict(max_seqs=1, max_seq_len=16, num_blocks=1, block_size=16, dtype="bfloat16", head_dim_multiple=1)
    config = jaxkv.CacheConfig(layers=(layer,), **sizes)
    assert config.bytes_per_block == 16 * 8 * (192 + 128) * 2
    assert jaxkv.init(config).pools[0].kv.nbytes == 2 * config.bytes_per_block
    assert jaxkv.CacheConfig(layers=(layer,), **sizes | {"dtype": "int8"}).bytes_per_block == 16 * 8 * (320 + 2 * 4)
    assert LayerConfig(num_kv_heads=1, head_dim=8, v_head_dim=8) == LayerConfig(num_kv_heads=1, head_dim=8)
    assert (layer.value_dim, layer.row_dim) == (128, 320)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_rows_travel(dtype, tmp_path):
    """Forks, the host, other caches, files and dense arrays: the tokens stay what they are."""
    cache, atol = filled(dtype=dtype), 0.05 if dtype == "int8" else 0.0
    forked = jaxkv.fork(cache, 0, 2)
    assert_same_tokens(forked, [(2, 0)], atol)
    away, host = jaxkv.swap_out(forked, [0, 2])
    assert_same_tokens(jaxkv.swap_in(away, [2, 0], host), [(0, 0), (2, 0)], atol)
    other = config(dtype=dtype, block_size=2, num_blocks=40, head_dim_multiple=16)
    turned = dataclasses.replace(LAYERS[0], head_dim=DV, v_head_dim=DK)  # blocks of the same shape
    with pytest.raises(ValueError, match=r"with values of 4 in .*with values of 6 in "):
        jaxkv.swap_in(jaxkv.init(config(layers=(turned, *LAYERS[1:]), dtype=dtype)), 0, host[0])
    sent = jaxkv.send(cache, [0, 1], to=jaxkv.init(other), at=[1, 2])
    assert_same_tokens(sent, [(1, 0), (2, 1)], atol)
    jaxkv.save(tmp_path / "a.safetensors", forked)
    assert jaxkv.describe(tmp_path / "a.safetensors").config == forked.config
    loaded = jaxkv.load(tmp_path / "a.safetensors")
    assert loaded.blocks_in_use <= forked.blocks_in_use
    assert_same_tokens(loaded, [(0, 0), (1, 1), (2, 0)], atol)
    with pytest.raises(ValueError, match="v_head_dim = 4"):
        other = (LayerConfig(num_kv_heads=K, head_dim=DK), *LAYERS[1:])
        jaxkv.load(tmp_path / "a.safetensors", config(layers=other, dtype=dtype))
    index = jaxkv.PrefixCache(cache.config)
    kept = jaxkv.free(index.insert(cache, 0, list(range(8))), 0)
    found = index.adopt(kept, 2, index.match([*range(8), 9]))
    for a, b in zip(jaxkv.gather(found, 2, layer=0), jaxkv.gather(cache, 0, layer=0), strict=True):
        np.testing.assert_array_equal(a, b[:8])


def test_dense_arrays_and_blocks_become_such_layers():
    _, k, v = arrays()[0]
    dense = jaxkv.convert.from_dense([k], [v], LENGTHS, block_size=4)
    assert dense.config.layers[0].v_head_dim == DV
    for row in (0, 1):
        for found, x in zip(jaxkv.gather(dense, row, layer=0), (k, v), strict=True):
            np.testing.assert_array_equal(found, x[row, : LENGTHS[row]])
    with pytest.raises(ValueError, match="v of layer 0 has heads of 4, but the layer of 6"):
        jaxkv.convert.from_dense([k], [v], LENGTHS, layers=[LayerConfig(num_kv_heads=K, head_dim=DK)])


def test_over_heads_of_a_mesh():
    mesh = jax.make_mesh((2,), ("model",), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        cache = fill(jaxkv.init(config(layers=LAYERS[:1]), mesh=mesh))
        cache = jaxkv.extend(cache, [1, 1, 0])
        q, k, v = (x[:, :1] for x in arrays()[0])
        out, cache = jaxkv.attention(q, k, v, cache, layer=0)
    alone = jaxkv.extend(filled(layers=LAYERS[:1]), [1, 1, 0])
    np.testing.assert_allclose(out, jaxkv.attention(q, k, v, alone, layer=0)[0], atol=1e-6)


def test_bounds_are_of_the_keys():
    cache = filled(layers=(dataclasses.replace(LAYERS[0], bounds=True),))
    jaxkv.check_invariants(cache)
    low, high = jaxkv.block_bounds(cache, layer=0)
    _, k, _ = arrays()[0]
    np.testing.assert_array_equal(low[0, 0], k[0, :4].min(axis=0))
    np.testing.assert_array_equal(high[0, 1], k[0, 4:8].max(axis=0))


def test_what_is_not_possible_is_said():
    with pytest.raises(ValueError, match="leave v_head_dim out"):
        LayerConfig(num_kv_heads=1, head_dim=8, rank=4, v_head_dim=2)
    with pytest.raises(ValueError, match=r"must have the same num_kv_heads and head_dim .v_head_dim too"):
        config(layers=(LAYERS[0], LayerConfig(num_kv_heads=K, head_dim=DK, shares_with=0)))
    with pytest.raises(ValueError, match="rotate is for heads"):
        config(layers=(LayerConfig(num_kv_heads=K, head_dim=DK, v_head_dim=DV, rotate=True),), dtype="int8")
    cache = jaxkv.extend(jaxkv.init(config()), LENGTHS)
    q, k, v = arrays()[0]
    with pytest.raises(ValueError, match="v has head_dim 6, but layer 0 of the cache has 4 for values"):
        jaxkv.attention(q, k, k, cache, layer=0)
    with pytest.raises(ValueError, match="v must be an array"):
        jaxkv.attention(q, k, None, cache, layer=0)
    with pytest.raises(ValueError, match="alike but for their width"):
        jaxkv.attention(q, k, v[:, :, :1], cache, layer=0)
    q = jax.ShapeDtypeStruct((ROWS, 1, HEADS, DK), jnp.float32)
    wide = LayerConfig(num_kv_heads=2, head_dim=192, v_head_dim=128)
    sizes = dict(max_seqs=2, max_seq_len=64, num_blocks=2, block_size=16, head_dim_multiple=128)
    heads = jax.ShapeDtypeStruct((2, 1, 8, 192), jnp.bfloat16)
    abstract = jax.eval_shape(lambda: jaxkv.init(jaxkv.CacheConfig(layers=(wide,), **sizes)))
    on_gpu, on_tpu = (jaxkv.explain(heads, abstract, layer=0, platform=p) for p in ("cuda", "tpu"))
    assert on_gpu.implementation == "xla" and "not for having different widths" in on_gpu.reason
    assert on_tpu.implementation == "tpu"
    assert "Values of 4 and keys of 6 are stored in one row of 10." in jaxkv.explain(q, cache, layer=0).reason


def test_modules_and_configs_have_such_layers():
    """The layers of NNX and Linen, a decoder, `uniform` and `like`: each with a cache gives what it gives without."""
    x = jnp.asarray(np.random.default_rng(2).standard_normal((2, 5, 16)), jnp.float32)
    sizes = dict(num_heads=HEADS, num_kv_heads=K, head_dim=DK, v_head_dim=DV, use_bias=True)
    cache = jaxkv.init(
        jaxkv.CacheConfig.uniform(
            num_layers=1, num_kv_heads=K, head_dim=DK, v_head_dim=DV, max_seqs=2, max_seq_len=8, dtype="float32"
        )
    )
    module = jaxkv.linen.Attention(**sizes)
    variables = jax.jit(module.init)(jax.random.key(0), x)
    layers = {
        "nnx": jaxkv.nnx.Attention(16, **sizes, rngs=nnx.Rngs(0)),
        "linen": jax.jit(functools.partial(module.apply, variables)),
    }
    for name, layer in layers.items():
        y, _ = layer(x, jaxkv.extend(cache, [5, 5]))
        np.testing.assert_allclose(y, layer(x)[0], atol=1e-6, err_msg=name)
    dense = {"k": np.zeros((2, 8, K, DK), np.float32), "v": np.zeros((2, 8, K, DV), np.float32)}
    assert jaxkv.CacheConfig.like(dense).layers == cache.config.layers


def test_a_decoder_has_such_layers():
    layer = LayerConfig(num_kv_heads=K, head_dim=DK, v_head_dim=DV)
    config = jaxkv.models.DecoderConfig(
        family="llama",
        layers=(layer, layer),
        num_heads=HEADS,
        embed_dim=16,
        mlp_dim=24,
        vocab_size=31,
        max_seq_len=8,
        ropes=(jaxkv.models.Rope(), jaxkv.models.Rope()),
        attention_scale=DK**-0.5,
    )
    model = jaxkv.models.Decoder(config, rngs=nnx.Rngs(0))
    assert count_parameters(config) == sum(x.size for x in jax.tree.leaves(nnx.state(model)))
    cache = jaxkv.init(jaxkv.CacheConfig.from_model(model, max_seqs=1, max_seq_len=8))
    tokens = jnp.arange(5)[None]
    step = jax.jit(lambda tokens, cache: model(tokens, cache))
    logits, _ = step(tokens, jaxkv.extend(cache, [5]))
    by_one = []
    for i in range(5):
        one, cache = step(tokens[:, i : i + 1], jaxkv.extend(cache, [1]))
        by_one.append(one)
    np.testing.assert_allclose(jnp.concatenate(by_one, axis=1), logits, atol=1e-5)


@pytest.mark.parametrize(("dtype", "value_dim"), [("int8", 4), ("float8_e4m3fn", 4), ("int4", 32), ("int4", 6)])
def test_stored_keys_and_values_can_be_read(dtype, value_dim):
    """As they are stored, each with its scales: together they are the numbers that are read."""
    layer = LayerConfig(num_kv_heads=2, head_dim=40, v_head_dim=value_dim)
    cache = jaxkv.init(jaxkv.CacheConfig(layers=(layer,), max_seqs=2, max_seq_len=16, num_blocks=8, dtype=dtype))
    rng = np.random.default_rng(0)
    given = (jnp.asarray(rng.standard_normal((2, 5, 2, width)), jnp.float32) for width in (40, value_dim))
    cache = jaxkv.append(cache, *([x] for x in given), [3, 5])
    k, v, k_scale, v_scale = jaxkv.gather(cache, 1, layer=0, raw=True)
    kind, dense = find_format(dtype), jaxkv.gather(cache, 1, layer=0)
    before = jnp.zeros((*k.shape[:-1], value_dim % (kind.group_size or 1)))  # which groups of keys begin with
    numbers = kind.from_bits(k).astype(jnp.float32)
    padded = jnp.concatenate([before, numbers], axis=-1)
    keys = (padded * kind.spread_scales(k_scale, padded.shape[-1]))[..., before.shape[-1] :]
    np.testing.assert_array_equal(keys, dense[0])
    np.testing.assert_array_equal(kind.decode(v, v_scale, value_dim), dense[1])
    assert k.dtype == v.dtype == cache.pools[0].kv.dtype
    traced = jax.jit(lambda cache: jaxkv.gather(cache, 1, layer=0, raw=True, max_len=6))(cache)
    for whole, part in zip(traced, (k, v, k_scale, v_scale), strict=True):
        np.testing.assert_array_equal(whole[:5], part)
        assert not np.asarray(whole[5:], np.float32).any()
