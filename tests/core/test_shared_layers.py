"""Layers that read another layer's keys and values: they store none, and attend like that layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nightly import NIGHTLY

import jaxkv
from jaxkv import LayerConfig
from jaxkv.testing import assert_no_copy, permute_blocks, poison

ROWS, PLACES = 3, 9
WIDE, LOCAL = LayerConfig(num_kv_heads=2, head_dim=8), LayerConfig(num_kv_heads=2, head_dim=8, window=5)
# 0 and 1 store. 2 and 4 read 0, 4 less of it; 3 reads 1.
LAYERS = (
    WIDE,
    LOCAL,
    LayerConfig(num_kv_heads=2, head_dim=8, shares_with=0),
    LayerConfig(num_kv_heads=2, head_dim=8, window=5, shares_with=1),
    LayerConfig(num_kv_heads=2, head_dim=8, window=3, shares_with=0),
)
LAYOUTS = {"paged": {"num_blocks": 30, "block_size": 4}, "contiguous": {"layout": "contiguous"}}


def make_config(layers=LAYERS, layout="paged", **fields):
    fields = {"max_seqs": ROWS, "max_seq_len": 24, "dtype": "float32"} | LAYOUTS[layout] | fields
    return jaxkv.CacheConfig(layers=layers, **fields)


def random_step(places, seed):
    rng = np.random.default_rng(seed)
    return [
        [jnp.asarray(rng.standard_normal((ROWS, places, heads, 8)), jnp.float32) for _ in LAYERS] for heads in (4, 2, 2)
    ]


@jax.jit
def step(cache, q, k, v, num_tokens):
    """Layers that share get None, or, in a cache where nothing is shared, what their owners get."""
    cache = jaxkv.extend(cache, num_tokens)
    owners = make_config().owner
    outs = []
    for layer in range(cache.num_layers):
        shares = cache.config.owner(layer) != layer
        now = (None, None) if shares else (k[owners(layer)], v[owners(layer)])
        out, cache = jaxkv.attention(q[layer], *now, cache, layer=layer)
        outs.append(out)
    return outs, cache


@pytest.mark.parametrize("layout", LAYOUTS if NIGHTLY else ["paged"])
def test_the_same_as_layers_that_each_store(layout):
    apart = tuple(LayerConfig(num_kv_heads=2, head_dim=8, window=layer.window) for layer in LAYERS)
    caches = [jaxkv.init(make_config(layers, layout)) for layers in (LAYERS, apart)]
    for seed, num_tokens in enumerate([(6, 0, 3), (1, 1, 1), (6, 6, 0), (1, 0, 1), (3, 6, 2)]):
        places = max(num_tokens) if NIGHTLY and layout == "paged" else PLACES  # decode steps are other programs
        inputs = (*random_step(places, seed), jnp.array(num_tokens, jnp.int32))
        (shared_outs, caches[0]), (outs, caches[1]) = (step(cache, *inputs) for cache in caches)
        for out, other in zip(shared_outs, outs, strict=True):
            np.testing.assert_allclose(out, other, atol=1e-6)
        jaxkv.check_invariants(caches[0])
    for layer in (0, 1, 2, 3):  # layer 4 keeps more than its own window
        np.testing.assert_array_equal(caches[0].combined(layer), caches[1].combined(layer))
    assert (np.asarray(shared_outs[2]) != np.asarray(shared_outs[4])).any()


def test_it_takes_no_memory():
    config = make_config()
    assert config.groups == ((0,), (1,))
    assert [config.owner(layer) for layer in range(5)] == [0, 1, 0, 1, 0]
    assert [config.group(layer) for layer in range(5)] == [0, 1, 0, 1, 0]
    assert config.bytes == make_config(LAYERS[:2]).bytes
    cache = jaxkv.init(config)
    assert [pool is None for pool in cache.pools] == [False, False, True, True, True]
    assert cache.bytes == config.bytes and cache.pool(4) is cache.pools[0]
    pools = [x for x in jax.tree.leaves(cache) if x.ndim == 5]
    assert len(pools) == 2


def filled():
    cache = jaxkv.init(make_config())
    _, cache = step(cache, *random_step(PLACES, 0), jnp.array([9, 4, 0], jnp.int32))
    return cache


def test_reading_a_shared_layer_is_reading_its_owner():
    cache = filled()
    for layer, owner in ((2, 0), (3, 1), (4, 0)):
        for one, other in zip(jaxkv.gather(cache, 0, layer=layer), jaxkv.gather(cache, 0, layer=owner), strict=True):
            np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(cache.combined(layer), cache.combined(owner))
        np.testing.assert_array_equal(cache.token(1, 2, layer=layer), cache.token(1, 2, layer=owner))
        np.testing.assert_array_equal(cache.load(layer, 1, 1, 2), cache.load(owner, 1, 1, 2))
        assert cache.layer(layer).pool is cache.pools[owner]
    changed = cache.store(2, 0, 1, 3, jnp.ones(8), jnp.ones(8))
    np.testing.assert_array_equal(changed.load(0, 0, 1, 3), np.ones((2, 8)))


def test_append_takes_none_for_them():
    _, k, v = random_step(3, 1)
    kept = [[x[0], x[1], None, None, None] for x in (k, v)]
    cache = jax.jit(jaxkv.append)(filled(), *kept, jnp.array([3, 0, 1], jnp.int32))
    jaxkv.check_invariants(cache)
    assert cache.lengths.tolist() == [12, 4, 1]
    np.testing.assert_array_equal(jaxkv.gather(cache, 0, layer=4)[0][9:], k[0][0])


@pytest.mark.parametrize("change", [lambda c: permute_blocks(c, 1), poison, lambda c: jaxkv.free(c, [0])])
def test_other_functions_go_by_shared_layers(change):
    cache = filled()
    inputs = (*random_step(PLACES, 3), jnp.array([0, 1, 0], jnp.int32))
    expected, _ = step(cache, *inputs)
    actual, after = step(change(cache), *inputs)
    jaxkv.check_invariants(after)
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(one[1], other[1])


@pytest.mark.parametrize("stacked", [False, True])
def test_a_list_of_layers_does_not_show_what_an_owner_writes(stacked):
    """There a layer that reads another's is refused; once the owner is put back, it is as in the cache."""
    config = make_config(stacked=stacked)
    q, k, v = random_step(PLACES, 0)
    num_tokens = jnp.array([6, 0, 3], jnp.int32)
    expected, _ = step(jaxkv.init(config), q, k, v, num_tokens)
    cache = jaxkv.extend(jaxkv.init(config), num_tokens)
    layers = list(cache.layers)
    out, layers[0] = jaxkv.attention(q[0], k[0], v[0], layers[0])
    np.testing.assert_array_equal(out, expected[0])
    refused = r"Layer 2 reads what layer 0 keeps.* take cache.with_layer\(0, layers\[0\]\).layers\[2\]"
    for call in (
        lambda: jaxkv.attention(q[2], None, None, layers[2]),
        lambda: jaxkv.attend(q[2], layers[2]),
        lambda: jaxkv.explain(q[2], layers[2]),
        lambda: jax.jit(jaxkv.attend)(q[2], cache.layers[1:][1]),
    ):
        with pytest.raises(ValueError, match=refused):
            call()
    np.testing.assert_array_equal(jaxkv.positions(layers[2], (ROWS, PLACES)), jaxkv.positions(cache, (ROWS, PLACES)))
    with_keys = cache.with_layer(0, layers[0])
    out, layers[2] = jaxkv.attention(q[2], None, None, with_keys.layers[2])
    np.testing.assert_array_equal(out, expected[2])
    with pytest.raises(ValueError, match="Layer 2 reads what layer 0 keeps: it has nothing of its own to put back"):
        cache.with_layer(2, layers[2])
    layers[1] = jaxkv.write(layers[1], k[1], v[1])
    cache = cache.with_layers(layers)
    for layer in (3, 4):
        np.testing.assert_array_equal(jaxkv.attend(q[layer], cache, layer=layer), expected[layer])


def test_no_pool_is_copied():
    config = make_config(num_blocks=2000, max_seq_len=400)
    cache = jax.eval_shape(lambda: jaxkv.init(config))
    donating = jax.jit(step.__wrapped__, donate_argnames="cache")
    assert_no_copy(donating, cache, *random_step(1, 0), jax.ShapeDtypeStruct((ROWS,), jnp.int32))


def layers(**fields):
    return make_config((WIDE, LOCAL, LayerConfig(**({"num_kv_heads": 2, "head_dim": 8, "shares_with": 0} | fields))))


Q, KV = jnp.ones((ROWS, 1, 4, 8)), jnp.ones((ROWS, 1, 2, 8))
CALLS = {
    "itself": (lambda: layers(shares_with=2), r"layers\[2\].shares_with must be an earlier layer .* not 2"),
    "a later one": (lambda: make_config((LAYERS[2], WIDE)), r"layers\[0\].shares_with must be an earlier layer"),
    "a negative one": (lambda: layers(shares_with=-1), "shares_with must be at least 0, not -1"),
    "one that shares": (
        lambda: make_config((WIDE, LAYERS[2], LayerConfig(num_kv_heads=2, head_dim=8, shares_with=1))),
        "an earlier layer that stores keys and values of its own, not 1",
    ),
    "other heads": (lambda: layers(num_kv_heads=1), "the same num_kv_heads and head_dim"),
    "other head_dim": (lambda: layers(head_dim=4), "the same num_kv_heads and head_dim"),
    "a dtype": (lambda: layers(dtype="float16"), "no dtype or rotate of its own"),
    "a wider window": (
        lambda: layers(shares_with=1, window=6), "which keeps a window of 5 tokens: its own window cannot be 6",
    ),
    "no window": (lambda: layers(shares_with=1), "its own window cannot be None"),
    "write": (
        lambda: jaxkv.write(filled(), KV, KV, layer=2), "Layer 2 reads the keys and values of layer 0 and stores none",
    ),
    "attention with keys": (lambda: jaxkv.attention(Q, KV, KV, filled(), layer=3), "Layer 3 reads .* of layer 1"),
    "attention with keys only": (
        lambda: jaxkv.attention(Q, KV, None, filled(), layer=3), "v must be an array, not NoneType",
    ),
    "no keys for a layer that stores": (
        lambda: jaxkv.attention(Q, None, None, filled(), layer=1), "k must be an array, not NoneType",
    ),
    "append": (lambda: jaxkv.append(filled(), [KV] * 5, [KV] * 5), "Layer 2 reads .* give it None in their place"),
    "append nothing": (
        lambda: jaxkv.append(filled(), [KV, None, None, None, None], [KV, None, None, None, None]),
        "k must be an array, not NoneType",
    ),
    "a wider window than its own": (
        lambda: jaxkv.attend(Q, filled(), layer=4, window=4), "window=4 is wider than what layer 4 keeps",
    ),
    "from_blocks": (
        lambda: jaxkv.convert.from_blocks(
            k=[np.ones((3, 2, 4, 8))] * 3, v=[np.ones((3, 2, 4, 8))] * 3, tables=[[0]], lengths=[1], layers=LAYERS[:3]
        ),
        "from_blocks takes layers that store keys and values of their own",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_bad_input_is_one_sentence(name):
    call, sentence = CALLS[name]
    with pytest.raises(ValueError, match=sentence) as raised:
        call()
    assert "\n" not in str(raised.value)
