"""What stands in for Flax's and JAX's own attention: the same parameters and arguments, and a cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from nightly import NIGHTLY

import jaxkv
import jaxkv.linen
import jaxkv.nnx
from jaxkv import testing

ROWS, HEADS, KV_HEADS, HEAD_DIM, WIDTH = 3, 4, 2, 8, 24
COUNTS = np.array([5, 0, 2], np.int32)  # of the first step; then every row that has any gets one more
SIZES = dict(num_layers=1, head_dim=HEAD_DIM, max_seqs=ROWS, max_seq_len=32, block_size=4, dtype="float32")


def new_cache(num_kv_heads=KV_HEADS, **fields):
    return jaxkv.init(jaxkv.CacheConfig.uniform(num_kv_heads=num_kv_heads, **SIZES | fields))


def inputs(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


@jax.jit
def extended(cache, counts):
    return jaxkv.extend(cache, counts)


# The layers.


def nnx_pair(**options):
    """Flax's layer and ours with the same random parameters, each as `f(x, **arguments)`."""
    make = dict(num_heads=HEADS, in_features=WIDTH, qkv_features=HEADS * HEAD_DIM, out_features=9) | options
    theirs, ours = (m(**make, rngs=nnx.Rngs(0)) for m in (nnx.MultiHeadAttention, jaxkv.nnx.MultiHeadAttention))
    state = jax.tree.map(lambda x: inputs(*x.shape, seed=x.size) * 0.3, nnx.state(theirs, nnx.Param))
    nnx.update(theirs, state)
    nnx.update(ours, state)  # a checkpoint of theirs fits
    return theirs, ours


def linen_pair(**options):
    make = dict(num_heads=HEADS, qkv_features=HEADS * HEAD_DIM, out_features=9) | options
    theirs = linen.MultiHeadDotProductAttention(**{n: x for n, x in make.items() if n != "decode"})
    ours = jaxkv.linen.MultiHeadDotProductAttention(**make)
    variables = jax.jit(lambda key: theirs.init(key, jnp.ones((1, 2, WIDTH)), deterministic=True))(jax.random.key(0))
    variables = jax.tree.map(lambda x: inputs(*x.shape, seed=x.size) * 0.3, variables)
    return (lambda *x, **a: theirs.apply(variables, *x, **a)), (lambda *x, **a: ours.apply(variables, *x, **a))


PAIRS = [(nnx_pair, dict(num_kv_heads=KV_HEADS, decode=True)), (linen_pair, dict(normalize_qk=True, use_bias=False))]
if NIGHTLY:
    PAIRS += [(nnx_pair, dict(normalize_qk=True, use_bias=False)), (linen_pair, dict(decode=True))]


@pytest.mark.parametrize(("pair", "options"), PAIRS)
def test_a_layer_with_flaxs_parameters_computes_what_flaxs_does(pair, options):
    theirs, ours = pair(**options)
    x = inputs(ROWS, 6, WIDTH)
    causal = nnx.make_causal_mask(jnp.ones((ROWS, 6)))
    wanted = jax.jit(lambda x: theirs(x, mask=causal, **({"decode": False} if pair is nnx_pair else {})))(x)

    @jax.jit
    def step(x, counts, cache):
        cache = jaxkv.extend(cache, counts)
        y, layer = ours(x, cache=cache.layers[0])
        return y, cache.with_layer(0, layer)

    cache = new_cache(options.get("num_kv_heads", HEADS))
    y, cache = step(jnp.where(np.arange(5)[None, :, None] < COUNTS[:, None, None], x[:, :5], 1e9), COUNTS, cache)
    more, _ = step(x[jnp.arange(ROWS), COUNTS][:, None], np.minimum(COUNTS, 1), cache)
    for row, n in enumerate(COUNTS):
        np.testing.assert_allclose(y[row, :n], wanted[row, :n], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(more[row, 0], wanted[row, n] if n else y[1, 0], rtol=1e-4, atol=1e-5)


def test_without_a_cache_a_layer_is_flaxs():
    x = inputs(ROWS, 4, WIDTH)
    theirs, ours = nnx_pair(decode=True)
    np.testing.assert_array_equal(ours(x, decode=False)[0], theirs(x, decode=False))
    for layer in (theirs, ours):
        layer.init_cache((ROWS, 4, WIDTH))
    y, none = ours(x[:, :1])
    # On a CPU a product of one token is summed in another order.
    np.testing.assert_allclose(y, theirs(x[:, :1]), rtol=1e-4, atol=1e-6)
    assert none is None and int(ours.cache_index[...]) == 1
    theirs, ours = linen_pair()
    y, none = ours(x, inputs_k=x + 1)
    np.testing.assert_array_equal(y, theirs(x, inputs_k=x + 1))
    assert none is None


def test_keys_and_values_of_other_inputs():
    for pair in (nnx_pair, linen_pair):
        theirs, ours = pair()
        x, others = inputs(ROWS, 1, WIDTH), inputs(ROWS, 1, WIDTH, seed=1)
        cache = extended(new_cache(HEADS), np.ones(ROWS, np.int32))
        more = {"decode": False} if pair is nnx_pair else {}
        y, _ = jax.jit(lambda *x, ours=ours, **cache: ours(*x, **cache))(x, others, x, cache=cache.layers[0])
        np.testing.assert_allclose(y, theirs(x, others, x, **more), rtol=1e-4, atol=1e-5)
        with pytest.raises(ValueError, match="inputs_v needs inputs_k"):
            ours(x, inputs_v=x, cache=cache, layer=0)


def test_what_a_layer_cannot_do_with_a_cache():
    x, layer = inputs(ROWS, 1, WIDTH), jaxkv.extend(new_cache(HEADS), [1] * ROWS).layers[0]
    for pair in (nnx_pair, linen_pair):
        with pytest.raises(ValueError, match=r"dropout_rate: give deterministic=True, as model\.eval\(\) does"):
            pair(dropout_rate=0.5)[1](x, cache=layer)
        pair(dropout_rate=0.5)[1](x, cache=layer, deterministic=True)
        with pytest.raises(ValueError, match="attention_fn"):
            pair(attention_fn=functools.partial(nnx.dot_product_attention))[1](x, cache=layer)
        with pytest.raises(ValueError, match=r"takes no module \(sow_weights\)"):
            pair()[1](x, cache=layer, sow_weights=True)
    with pytest.raises(ValueError, match="With a cache input_positions is not called"):
        nnx_pair()[1](x, cache=layer, input_positions=jnp.zeros((ROWS, 1), jnp.int32))


# The functions.

Q, K, V = (inputs(ROWS, 6, heads, HEAD_DIM, seed=i) for i, heads in enumerate((HEADS, KV_HEADS, KV_HEADS)))


def through(function, mask=None, **options):
    """What a function makes of the first five tokens and of one more; `[ROWS, 6, ...]`, and the cache."""

    @jax.jit
    def both(cache, mask):
        cache = jaxkv.extend(cache, COUNTS)
        out, layer = function(*(x[:, :5] for x in (Q, K, V)), mask=mask, cache=cache.layers[0], **options)
        cache = jaxkv.extend(cache.with_layer(0, layer), np.minimum(COUNTS, 1))
        last = None if mask is None else mask[:, :, -1:]
        more, cache = function(
            *(x[jnp.arange(ROWS), COUNTS][:, None] for x in (Q, K, V)), mask=last, cache=cache, layer=0, **options
        )
        return jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), out, more), cache

    return both(new_cache(), mask)


def check_rows(got, wanted):
    for row, n in enumerate(COUNTS):
        if n:
            np.testing.assert_allclose(got[row, :n], wanted[row, :n], rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(got[row, 5], wanted[row, n], rtol=1e-4, atol=1e-5)


plainly = functools.cache(through)


@pytest.mark.parametrize("function", [jaxkv.dot_product_attention, jaxkv.jax_attention])
def test_a_function_equals_the_dense_one(function):
    got, cache = plainly(function)
    check_rows(got, jax.nn.dot_product_attention(Q, K, V, is_causal=True))
    assert cache.lengths.tolist() == [6, 0, 3]


@pytest.mark.skipif(not NIGHTLY, reason="by day masks of them")
def test_jaxs_arguments():
    (got, lse), _ = through(jaxkv.jax_attention, scale=0.7, local_window_size=2, return_residual=True, is_causal=True)
    wanted = jax.nn.dot_product_attention(Q, K, V, scale=0.7, local_window_size=(2, 0), return_residual=True)
    check_rows(got, wanted[0])
    check_rows(lse, wanted[1])
    one, _ = through(jaxkv.jax_attention, local_window_size=(1, 3), implementation="reference")
    check_rows(one, jax.nn.dot_product_attention(Q, K, V, local_window_size=(1, 0)))


@pytest.mark.parametrize("function", [jaxkv.dot_product_attention, *[jaxkv.jax_attention] * NIGHTLY])
def test_masks(function):
    first_unseen = jnp.ones((ROWS, 1, 1, 6), bool).at[0, ..., 0].set(False)  # by the first row alone
    causal = jnp.tril(jnp.ones((6, 6), bool))[None, None]
    got, _ = through(function, first_unseen)
    wanted = jax.nn.dot_product_attention(Q, K, V, mask=causal & first_unseen)
    for row, n, seen in ((0, 5, 1), (2, 2, 0)):
        np.testing.assert_allclose(got[row, seen:n], wanted[row, seen:n], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(got[row, 5], wanted[row, n], rtol=1e-4, atol=1e-5)
    assert not got[0, 0].any()  # a token that sees nothing
    one_column, _ = through(function, jnp.ones((ROWS, 1, 1, 1)))
    check_rows(one_column, jax.nn.dot_product_attention(Q, K, V, mask=causal))


def test_packed_tokens_and_their_masks():
    cache = extended(new_cache(), np.array([2, 0, 3], np.int32))
    packed = [jnp.concatenate([x[0, :2], x[2, :3]]) for x in (Q, K, V)]
    mask = jnp.ones((1, 5, 3), bool).at[0, :, 1].set(False)
    attend = jax.jit(functools.partial(jaxkv.dot_product_attention, layer=0))
    out, _ = attend(*packed, mask=mask, cache=cache)
    seen = jnp.tril(jnp.ones((3, 3), bool)).at[:, 1].set(False)[None, None]
    wanted = jax.nn.dot_product_attention(Q[:, :3], K[:, :3], V[:, :3], mask=seen)
    np.testing.assert_allclose(out, jnp.concatenate([wanted[0, :2], wanted[2, :3]]), rtol=1e-4, atol=1e-5)


def test_flaxs_dtype():
    (out, _), (half, _) = plainly(jaxkv.dot_product_attention), through(jaxkv.dot_product_attention, dtype="bfloat16")
    assert half.dtype == jnp.bfloat16
    np.testing.assert_allclose(half.astype(np.float32), out, rtol=0.05, atol=0.05)


def test_without_a_cache_the_functions_are_theirs():
    out, none = jaxkv.dot_product_attention(Q, Q, Q, is_causal=True)
    np.testing.assert_array_equal(out, nnx.dot_product_attention(Q, Q, Q, is_causal=True))
    assert none is None
    (out, lse), none = jaxkv.jax_attention(Q, K, V, is_causal=True, scale=0.7, return_residual=True)
    wanted = jax.nn.dot_product_attention(Q, K, V, is_causal=True, scale=0.7, return_residual=True)
    np.testing.assert_array_equal(out, wanted[0])
    np.testing.assert_array_equal(lse, wanted[1])
    assert none is None


@pytest.mark.parametrize(
    ("function", "arguments", "says"),
    [
        (
            "dot_product_attention",
            dict(bias=Q),
            r"with a cache takes no bias \(a slope by distance is alibi=, True and False mask=\): leave it out",
        ),
        ("dot_product_attention", dict(dropout_rate=0.1), "takes no dropout_rate"),
        ("dot_product_attention", dict(cache=None, sinks=Q), "without a cache takes no sinks"),
        ("dot_product_attention", dict(mask=jnp.ones((ROWS, HEADS, 6, 6))), "must broadcast to .S, 1, T, C., one for"),
        ("jax_attention", dict(bias=Q, key_value_seq_lengths=COUNTS), "no bias and no key_value_seq_lengths"),
        ("jax_attention", dict(implementation="cudnn"), "no implementation='cudnn'"),
        ("jax_attention", dict(cache=None, step=1), "without a cache takes no step"),
        ("jax_attention", dict(mask=jnp.ones((1, 1, 1, 1, 6))), "must broadcast to"),
        (
            "dot_product_attention",
            dict(mask=jnp.full((1, 1, 1, 6), -1e9)),
            "it has negative numbers, as if to be added",
        ),
    ],
)
def test_what_is_refused_is_named(function, arguments, says):
    with pytest.raises(ValueError, match=says):
        getattr(jaxkv, function)(Q, K, V, **{"cache": new_cache().layers[0]} | arguments)


# Mutable caches.


class InPlace(nnx.Module):
    def __init__(self, num_layers=2):
        self.scale = nnx.Param(jnp.full(1, 0.5))
        self.num_layers = num_layers
        self.cache = jaxkv.nnx.CacheVariable(new_cache(num_layers=num_layers, num_blocks=800))

    def __call__(self, q, kv, counts):
        self.cache.extend(counts)
        for layer in self.cache.layers:
            q = layer.attention(q, kv * self.scale[...][:, None, None, None], kv)
        return q + layer.positions(q.shape[:2])[..., None, None].astype(q.dtype)


def test_a_cache_in_a_variable_under_nnx_jit():
    model = InPlace()
    assert jax.tree.leaves(nnx.state(model, nnx.Cache))  # filters know it
    ones, first = np.ones(ROWS, np.int32), model.cache[...]
    step = nnx.jit(lambda model, *arguments: model(*arguments), donate_argnums=0)
    testing.assert_no_copy(step, model, Q[:, :1], K[:, :1], ones)
    step(model, Q[:, :1], K[:, :1], ones)
    out = step(model, Q[:, :1], K[:, :1], ones)
    assert first.pools[0].kv.is_deleted() and model.cache.lengths.tolist() == [2] * ROWS

    cache, one = new_cache(num_layers=2), jax.jit(jaxkv.attention, static_argnames="layer")  # without a variable
    for _ in range(2):
        q, cache = Q[:, :1], extended(cache, ones)
        for i in range(2):
            q, cache = one(q, K[:, :1] * 0.5, K[:, :1], cache, layer=i)
    np.testing.assert_allclose(out, q + 1, rtol=1e-5, atol=1e-6)  # the second token's position
    jaxkv.check_invariants(model.cache[...])


def test_layers_in_a_variable_compute_from_the_same_tables():
    """What does not depend on the layer is traced once: a variable hands on the very objects that it got."""

    def count(num_layers):
        graph, state = nnx.split(InPlace(num_layers))

        def step(state, q, kv, counts):
            model = nnx.merge(graph, state)
            return model(q, kv, counts), nnx.state(model)

        return len(jax.make_jaxpr(step)(state, Q[:, :1], K[:, :1], np.ones(ROWS, np.int32)).eqns)

    def plain(num_layers):
        def step(cache, q, kv, counts):
            cache = jaxkv.extend(cache, counts)
            for i in range(num_layers):
                q, cache = jaxkv.attention(q, kv, kv, cache, layer=i)
            return q, cache

        arguments = new_cache(num_layers=num_layers), Q[:, :1], K[:, :1], np.ones(ROWS, np.int32)
        return len(jax.make_jaxpr(step)(*arguments).eqns)

    assert count(3) - count(2) <= plain(3) - plain(2) + 4  # and the model's own scaling


def test_a_variable_as_a_whole():
    variable = jaxkv.nnx.CacheVariable(new_cache())
    assert variable.apply(extended, np.array([3, 0, 0], np.int32)) is None
    assert variable.lengths.tolist() == [3, 0, 0]
    variable[...] = extended(variable[...], np.array([0, 3, 0], np.int32))
    assert variable[...].lengths.tolist() == [3, 3, 0]
    assert variable.apply(lambda cache: (cache.lengths, cache)).tolist() == [3, 3, 0]
    for use in (lambda: variable[0], lambda: variable.__setitem__(0, 1)):
        with pytest.raises(IndexError, match="read and set as a whole"):
            use()
    with pytest.raises(ValueError, match=r"a function that returns a cache, or \(out, cache\), not list"):
        variable.apply(lambda cache: [cache])
