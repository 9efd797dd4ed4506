"""Layers that choose their tokens: the indexer against its definition, and attention to the tokens that are chosen."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from nightly import NIGHTLY

import jaxkv
import jaxkv.scores
from jaxkv import LayerConfig
from jaxkv.testing import poison
from pallas_kernels import reference_index

ROWS, H, K, D, HEADS, E, TOP, SIZE, MOST = 3, 4, 2, 8, 3, 16, 5, 4, 40
PLAIN = LayerConfig(num_kv_heads=K, head_dim=D, index_dim=E)
LATENT = LayerConfig.latent(rank=8, rope_dim=4, index_dim=E)


def make_cache(layer=PLAIN, **fields):
    sizes = dict(max_seqs=ROWS, max_seq_len=MOST, num_blocks=40, block_size=SIZE, dtype="float32")
    return jaxkv.init(jaxkv.CacheConfig(layers=(layer,), **sizes | fields))


def draw(rng, *shape, dtype=np.float32):
    return rng.standard_normal(shape, np.float32).astype(dtype)


def make_step(rng, layer, *axes):
    """What a layer is given in a step, by name."""
    heads = 1 if layer.rank else layer.num_kv_heads
    shapes = {"q": (H, layer.head_dim), "k": (heads, layer.head_dim), "v": (heads, layer.value_dim)}
    shapes |= {"index_k": (E,), "index_q": (HEADS, E), "weights": (HEADS,)}
    made = {name: draw(rng, *axes, *shape) for name, shape in shapes.items()}
    return made | ({"v": None} if layer.rank else {})


def write(cache, x, counts, **options):
    cache = jaxkv.write(jaxkv.extend(cache, counts), x["k"], x["v"], layer=0)
    return jaxkv.write_index(cache, x["index_k"], layer=0, **options)


def choose(cache, x, top_k=TOP, **options):
    return jaxkv.scores.indexer(cache, layer=0, q=x["index_q"], weights=x["weights"], top_k=top_k, **options)


compiled = {
    name: jax.jit(f, static_argnames=("top_k", "return_scores")) for name, f in (("write", write), ("choose", choose))
}

spoil = jax.jit(poison)


@jax.jit
def reference(cache, x):
    """The scores of all tokens of a float32 cache, by definition."""
    tables, keys = cache.tables[0], cache.pools[0].index.keys
    return reference_index.score_tokens(
        x["index_q"], x["weights"], keys, tables.tables, tables.lengths, tables.new, offsets=tables.offsets
    )


def assert_chosen(cache, x, top_k=TOP):
    found, scores = compiled["choose"](cache, x, top_k=top_k, return_scores=True)
    wanted = reference(cache, x)
    tokens = reference_index.choose_tokens(wanted, top_k)
    np.testing.assert_array_equal(found, tokens)
    own = jnp.where(tokens < 0, -jnp.inf, jnp.take_along_axis(wanted, jnp.maximum(tokens, 0), axis=-1))
    np.testing.assert_allclose(scores, own, rtol=1e-6, atol=1e-6)
    return found


def run_batch(seed):
    """A prompt, a step of one token, a step of several: ties in plenty, NaN wherever no token is."""
    rng = np.random.default_rng(seed)
    cache = make_cache()
    for most in (int(rng.integers(1, 20)), 1, 6):
        counts = rng.integers(0, most + 1, ROWS).astype(np.int32)
        packed = rng.random() < 0.5
        most = most if most in (1, 6) else 20
        x = make_step(rng, PLAIN, *((ROWS * most,) if packed else (ROWS, most)))
        if rng.random() < 0.5:  # few different keys, and weights of both signs: ties
            x["index_k"] = np.round(x["index_k"] * 0.6)
            x["index_q"], x["weights"] = np.round(x["index_q"]), np.round(x["weights"])
        cache = spoil(compiled["write"](cache, x, counts))
        assert_chosen(cache, x)


@pytest.mark.parametrize("seed", range(200 if NIGHTLY else 4))
def test_choices_are_those_of_the_definition(seed):
    run_batch(seed)


def test_equal_scores_go_to_the_earlier_and_short_rows_get_all():
    cache, rng = make_cache(), np.random.default_rng(0)
    x = make_step(rng, PLAIN, ROWS, 9)
    x["index_k"][:] = 1.0
    x["weights"], x["index_q"] = np.abs(x["weights"]), np.abs(x["index_q"])
    cache = compiled["write"](cache, x, [9, 3, 0])
    found = compiled["choose"](cache, x)
    for t in range(9):
        assert found[0, t].tolist() == [*range(min(t + 1, TOP)), *[-1] * (TOP - t - 1)]
    assert found[1, 2].tolist() == [0, 1, 2, -1, -1]
    assert (np.asarray(found[1, 3:]) == -1).all() and (np.asarray(found[2]) == -1).all(), "padding chooses nothing"
    assert compiled["choose"](cache, x, top_k=100).shape == (ROWS, 9, 100)


def test_long_contexts_are_streamed_in_pieces():
    """More than one piece of the context, and more queries than one tile of them has."""
    cache = make_cache(max_seq_len=1300, num_blocks=90, block_size=16, max_seqs=2)
    rng = np.random.default_rng(1)
    for counts in ([700, 1], [590, 40]):
        x = make_step(rng, PLAIN, 2, 700)
        x["index_k"] = np.round(x["index_k"])
        cache = compiled["write"](cache, x, counts)
    found = compiled["choose"](cache, x, top_k=600)
    wanted = reference_index.choose_tokens(reference(cache, x)[:, 550:590], 600)
    np.testing.assert_array_equal(found[:, 550:590], wanted)


def test_nothing_is_as_large_as_tokens_times_context():
    layer = LayerConfig(num_kv_heads=1, head_dim=64, index_dim=64)
    config = jaxkv.CacheConfig(layers=(layer,), max_seqs=1, max_seq_len=1 << 16, num_blocks=1 << 12, block_size=16)
    cache = jax.eval_shape(lambda: jaxkv.init(config))
    q, weights = jax.ShapeDtypeStruct((1, 1024, 8, 64), jnp.float32), jax.ShapeDtypeStruct((1, 1024, 8), jnp.float32)

    def run(cache, q, weights, heads):
        tokens = jaxkv.scores.indexer(cache, layer=0, q=q, weights=weights, top_k=256)
        return jaxkv.attend(heads, cache, layer=0, tokens=tokens)

    heads = jax.ShapeDtypeStruct((1, 1024, 8, 64), jnp.bfloat16)
    memory = jax.jit(run).lower(cache, q, weights, heads).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 64 << 20 < 1024 * (1 << 16) * 4


LAYERS = {
    "plain": (PLAIN, "float32", 1e-5), "latent": (LATENT, "float32", 1e-5), "int8": (PLAIN, "int8", 0.03),
    "latent int8": (LATENT, "int8", 0.03), "float8": (PLAIN, "float8_e4m3fn", 0.03), "int4": (PLAIN, "int4", 0.03),
    "k5v3": (PLAIN, "k5v3", 0.03),
    "bfloat16": (PLAIN, "bfloat16", 0.03), "windows": (dataclasses.replace(PLAIN, window=7), "float32", 1e-5),
    "chunks": (dataclasses.replace(PLAIN, chunk=6), "float32", 1e-5),
    "two widths": (dataclasses.replace(PLAIN, v_head_dim=6), "float32", 1e-5),
}  # fmt: skip
BY_DAY = ["plain", "latent int8", "int4", "k5v3", "windows"]


@functools.partial(jax.jit, static_argnames="scale")
def attend_all(x, cache, tokens, mask, scale=None):
    """Attention to chosen tokens, attention with a mask of them, and attention that writes before."""
    options = {"layer": 0, "scale": scale, "return_lse": True}
    chosen, masked = (jaxkv.attend(x["q"], cache, **options, **o) for o in ({"tokens": tokens}, {"mask": mask}))
    return chosen, masked, jaxkv.attention(x["q"], x["k"], x["v"], cache, tokens=tokens, **options)[0]


def make_mask(tokens):
    return (np.asarray(tokens)[..., None] == np.arange(MOST)).any(axis=-2)


@pytest.mark.parametrize("name", LAYERS if NIGHTLY else BY_DAY)
def test_attention_reads_the_chosen_tokens_of_every_storage(name):
    layer, dtype, atol = LAYERS[name]
    rng, cache = np.random.default_rng(3), make_cache(layer, dtype=dtype)
    scale = 0.3 if layer.rank else None
    for counts, axes in (([9, 0, 6], (ROWS, 9)), ([1, 1, 1], (ROWS, 1)), ([7, 2, 1], (12,))):
        x = make_step(rng, layer, *axes)
        cache = spoil(compiled["write"](cache, x, np.array(counts, np.int32)))
        tokens = np.asarray(compiled["choose"](cache, x)).copy()
        tokens[..., 0] = tokens[..., 1]  # twice, which counts once
        tokens[..., 2] += 3  # some ahead of the query, some not held
        for chosen, masked, at_once in zip(*attend_all(x, cache, tokens, make_mask(tokens), scale=scale), strict=True):
            np.testing.assert_allclose(chosen, masked, atol=atol, rtol=atol)
            np.testing.assert_allclose(chosen, at_once, atol=1e-6)


def test_only_chosen_tokens_are_read():
    """NaN in every other token, of the row itself too."""
    rng, cache = np.random.default_rng(4), make_cache()
    x = make_step(rng, PLAIN, ROWS, 12)
    cache = compiled["write"](cache, x, [12, 5, 0])
    only = np.broadcast_to(np.array([1, 3, -1], np.int32), (ROWS, 12, 3))
    kept = cache.slots(np.arange(ROWS)[:, None], np.array([[1, 3]]), layer=0)
    spoilt = jnp.full_like(cache.pools[0].kv, jnp.nan).at[0].set(0)
    spoilt = spoilt.at[kept[0], :, :, kept[1]].set(cache.pools[0].kv[kept[0], :, :, kept[1]])
    bad = cache.replace(pools=(dataclasses.replace(cache.pools[0], kv=spoilt),))
    good, found = (jaxkv.attend(x["q"], c, layer=0, tokens=only) for c in (cache, bad))
    np.testing.assert_array_equal(good, found)
    assert np.isfinite(good).all() and np.asarray(good[0, 3:]).any()
    assert not np.asarray(good[0, 0]).any(), "a token that has chosen nothing before it"


def test_packed_decode_slid_rows_and_layer_handles():
    layer = dataclasses.replace(PLAIN, window=6)
    rng, cache = np.random.default_rng(5), make_cache(layer, max_seq_len=12, num_blocks=12)
    for _ in range(12):  # rows outgrow their tables
        x = make_step(rng, layer, ROWS, 3)
        cache = compiled["write"](cache, x, [3, 2, 0])
    assert int(cache.tables[0].skipped.max()) > 0
    x = make_step(rng, layer, 3)
    cache = spoil(compiled["write"](cache, x, [1, 1, 0]))
    found = compiled["choose"](cache, x)
    length = np.asarray(cache.lengths)
    for i in (0, 1):
        assert sorted(set(np.asarray(found[i]).tolist())) >= [length[i] - 6] and found[i].max() < length[i]
    assert (np.asarray(found[2]) == -1).all()
    step = jaxkv.plan_step(cache, (3,))
    np.testing.assert_array_equal(choose(cache, x, step=step), found)
    handle = jaxkv.scores.indexer(cache.layers[0], q=x["index_q"], weights=x["weights"], top_k=TOP)
    np.testing.assert_array_equal(handle, found)
    found = np.asarray(found)
    whole = np.concatenate([found, np.maximum(found.max(axis=1, keepdims=True) - np.arange(6)[None], -1)], axis=1)
    for options in ({}, {"step": step}):
        out = jaxkv.attend(x["q"], cache, layer=0, tokens=whole.astype(np.int32), **options)
        np.testing.assert_allclose(out, jaxkv.attend(x["q"], cache, layer=0, **options), atol=1e-6)


@pytest.mark.parametrize("axes", [{"heads": "model"}, {"heads": None, "context": "model"}], ids=["heads", "context"])
def test_over_a_mesh(axes):
    mesh = Mesh(np.array(jax.devices()[:2]), ("model",))
    rng, caches = np.random.default_rng(6), [make_cache(), jaxkv.init(make_cache().config, mesh=mesh, **axes)]
    for counts, size in (([9, 4, 0], 9), ([1, 1, 0], 1)):
        x = make_step(rng, PLAIN, ROWS, size)
        x["index_k"] = np.round(x["index_k"])
        caches = [compiled["write"](cache, x, counts) for cache in caches]
        tokens, other = (compiled["choose"](cache, x) for cache in caches)
        np.testing.assert_array_equal(tokens, other)
        a, b = (jax.jit(functools.partial(jaxkv.attend, layer=0))(x["q"], cache, tokens=tokens) for cache in caches)
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_gradients_are_those_of_a_mask():
    rng, cache = np.random.default_rng(7), make_cache()
    x = make_step(rng, PLAIN, ROWS, 9)
    cache = compiled["write"](cache, x, [9, 4, 0])
    tokens = compiled["choose"](cache, x)
    mask = make_mask(tokens)

    def loss(q, kv, **options):
        changed = cache.replace(pools=(dataclasses.replace(cache.pools[0], kv=kv),))
        return (jaxkv.attend(q, changed, layer=0, **options) ** 2).sum()

    a, b = (
        jax.jit(jax.grad(functools.partial(loss, **options), (0, 1)))(x["q"], cache.pools[0].kv)
        for options in ({"tokens": tokens}, {"mask": mask})
    )
    for got, wanted in zip(a, b, strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-5)


def test_it_is_said_what_is_read():
    layer = LayerConfig(num_kv_heads=2, head_dim=8, index_dim=16)
    cache = make_cache(layer, max_seq_len=400, num_blocks=300, dtype="bfloat16", head_dim_multiple=1)
    kv = np.ones((1, ROWS, 200, 2, 8), np.float32)
    cache = jax.jit(lambda c: jaxkv.extend(jaxkv.append(c, kv, kv, [200, 100, 3]), [1, 1, 1]))(cache)
    whole, chosen = (jaxkv.plan_step(cache, (ROWS, 1), top_k=top_k).bytes_read for top_k in (None, 8))
    assert chosen == (8 + 8 + 4) * 2 * 2 * 8 * 2 + (201 + 101 + 4) * 16 * 2 < whole
    traced = jax.jit(lambda cache: jaxkv.plan_step(cache, (ROWS, 1), top_k=8).bytes_read)(cache)
    assert float(traced) == chosen
    q, tokens = jax.ShapeDtypeStruct((ROWS, 1, 4, 8), jnp.bfloat16), jax.ShapeDtypeStruct((ROWS, 1, 8), jnp.int32)
    for platform, runs, why in (("cpu", "xla", "no kernels"), ("cuda", "gpu", "supports"), ("tpu", "tpu", "supports")):
        choice = jaxkv.explain(q, cache, layer=0, tokens=tokens, platform=platform)
        assert choice.implementation == runs and why in choice.reason
        assert "Each query reads at most 8 tokens, by their positions" in choice.reason


def test_what_is_not_possible_is_said():
    rng = np.random.default_rng(8)
    x = make_step(rng, PLAIN, ROWS, 2)
    cache = compiled["write"](make_cache(), x, [2, 2, 0])
    tokens = np.zeros((ROWS, 2, 3), np.int32)
    beside = {
        "tree": np.full((ROWS, 2), -1, np.int32), "spans": np.zeros((ROWS, 2), np.int32),
        "mask": np.ones((ROWS, 2, 8), bool), "blocks": np.zeros((ROWS, 1), np.int32),
    }  # fmt: skip
    for name, option in beside.items():
        with pytest.raises(ValueError, match=f"tokens says by itself what each token sees.*with {name}: leave one out"):
            jaxkv.attend(x["q"], cache, layer=0, tokens=tokens, **{name: option})
    step = jaxkv.plan_step(cache, (ROWS, 2), tree=beside["tree"])
    with pytest.raises(ValueError, match="cannot be combined with tree"):
        jaxkv.attend(x["q"], cache, layer=0, tokens=tokens, step=step)
    for bad in (tokens[0], tokens[..., 0], tokens[:, :1]):
        with pytest.raises(ValueError, match=r"tokens must be i32\[3, 2, n\], the positions"):
            jaxkv.attend(x["q"], cache, layer=0, tokens=bad)
    for bad in (1.5, "a", np.ones((ROWS, 2, 3)), object()):
        with pytest.raises(ValueError, match="tokens"):
            jaxkv.attend(x["q"], cache, layer=0, tokens=bad)
    evicting = jaxkv.extend(make_cache(dataclasses.replace(PLAIN, evict="layer")), [2, 2, 0])
    with pytest.raises(ValueError, match=r'has evict="layer".*cannot take tokens'):
        jaxkv.attend(x["q"], evicting, layer=0, tokens=tokens)
    with pytest.raises(ValueError, match=r'has evict="layer".*no positions can be chosen'):
        choose(evicting, x)
    with pytest.raises(ValueError, match="Layer 0 keeps no index keys"):
        choose(make_cache(LayerConfig(num_kv_heads=2, head_dim=8)), x)
    for name, bad in {"q": x["index_q"][..., :3], "weights": x["weights"][..., :1]}.items():
        given = {"q": x["index_q"], "weights": x["weights"]} | {name: bad}
        with pytest.raises(ValueError, match=f"{name} must be"):
            jaxkv.scores.indexer(cache, layer=0, top_k=2, **given)
    for bad in (0, -1, 1.5, None, "a", True, 2**40):
        with pytest.raises(ValueError, match="top_k"):
            choose(cache, x, top_k=bad)
    with pytest.raises(ValueError, match="return_scores"):
        choose(cache, x, return_scores=3)
    with pytest.raises(ValueError, match="top_k"):
        jaxkv.plan_step(cache, (ROWS, 2), top_k=0)
