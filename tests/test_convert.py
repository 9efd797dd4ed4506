"""Conversions, against dense caches: plain ones, Hugging Face's, and those of real Flax layers that decode."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from steps import gather_row

import jaxkv

LENGTHS = [9, 0, 12, 5]
SHAPES = ((2, 8), (1, 5))  # K and D of each layer


def arrays(shapes=SHAPES, rows=4, places=12, seed=0):
    """Junk past each row's length must not matter, so all is random."""
    random = np.random.default_rng(seed)
    return [[random.normal(size=(rows, places, *shape)).astype(np.float32) for shape in shapes] for _ in "kv"]


def assert_holds(cache, k, v, lengths):
    jaxkv.check_invariants(cache)
    assert cache.lengths.tolist() == list(lengths)
    for layer in range(len(k)):
        for row, length in enumerate(lengths[: len(k[layer])]):
            ours = gather_row(cache, row, layer)
            np.testing.assert_array_equal(ours[0], k[layer][row, :length])
            np.testing.assert_array_equal(ours[1], v[layer][row, :length])


@pytest.mark.parametrize(
    "fields",
    [
        dict(block_size=4),
        dict(block_size=5, max_seq_len=30, max_seqs=6, head_dim_multiple=16),
        dict(block_size=3, head_dim_multiple=32, join_kv=True),
        dict(layout="contiguous", max_seq_len=13),
        dict(num_blocks=3),
    ],
)
def test_dense_arrays(fields):
    k, v = arrays()
    cache = jaxkv.convert.from_dense(k, v, LENGTHS, **fields)
    assert_holds(cache, k, v, LENGTHS + [0] * (cache.config.max_seqs - 4))
    assert cache.config.dtype == np.float32
    for name, value in fields.items():
        assert getattr(cache.config, name) == value


def test_dense_arrays_in_one_and_other_dtypes():
    k, v = arrays(shapes=SHAPES[:1] * 2)
    half = [np.asarray(x, jnp.bfloat16) for x in (np.stack(k), np.stack(v))]
    assert_holds(jaxkv.convert.from_dense(*half, LENGTHS), *half, LENGTHS)
    cast = jaxkv.convert.from_dense(k, v, LENGTHS, dtype="bfloat16")
    assert_holds(cast, *half, LENGTHS)


def test_every_row_can_reach_max_seq_len_by_default():
    k, v = arrays()
    cache = jaxkv.convert.from_dense(k, v, 1, max_seq_len=17)
    cache = jaxkv.extend(cache, [16] * 4)
    jaxkv.check(cache)


class Tensor:
    """As much of a PyTorch tensor as matters: it must be detached, and knows no bfloat16 in NumPy."""

    def __init__(self, x, dtype="torch.float32", detached=False):
        self.x, self.dtype, self.shape, self.detached = x, dtype, x.shape, detached

    def detach(self):
        return Tensor(self.x, self.dtype, detached=True)

    def cpu(self):
        return self

    def float(self):
        return Tensor(self.x, detached=self.detached)

    def __array__(self, dtype=None, copy=None):
        if self.dtype == "torch.bfloat16" or not self.detached:
            raise TypeError("Got unsupported ScalarType BFloat16, or a tensor that requires grad")
        return self.x


def as_hugging_face(x, padding):
    """`[B, K, T, D]`, each row's tokens at the side where padding is not."""
    places = x.shape[1]
    rows = [np.roll(row, places - length if padding == "left" else 0, axis=0)
            for row, length in zip(x, LENGTHS, strict=True)]  # fmt: skip
    return np.stack(rows).transpose(0, 2, 1, 3)


@pytest.mark.parametrize("padding", ["left", "right"])
def test_hugging_face_there_and_back(padding):
    k, v = arrays()
    theirs = [tuple(as_hugging_face(x, padding) for x in pair) for pair in zip(k, v, strict=True)]
    cache = jaxkv.convert.from_hugging_face(theirs, LENGTHS, padding=padding, block_size=4)
    assert_holds(cache, k, v, LENGTHS)
    back, mask = jaxkv.convert.to_hugging_face(cache, padding=padding)
    np.testing.assert_array_equal(mask.sum(axis=1), LENGTHS)
    assert bool(mask[0, 0]) == (padding == "right")
    for (key, value), (their_key, their_value) in zip(back, theirs, strict=True):
        there = np.asarray(mask, bool)[:, None, :, None]
        np.testing.assert_array_equal(key, np.where(there, their_key, 0))
        np.testing.assert_array_equal(value, np.where(there, their_value, 0))
    some, mask = jaxkv.convert.to_hugging_face(cache, rows=[3, 0], padding=padding)
    assert some[0][0].shape == (2, 2, 9, 8) and mask.sum(axis=1).tolist() == [5, 9]
    again = jaxkv.convert.from_hugging_face(some, [5, 9], padding=padding)
    assert_holds(again, [x[[3, 0]] for x in k], [x[[3, 0]] for x in v], [5, 9])


def test_tensors_of_pytorch():
    k, v = (x[0].transpose(0, 2, 1, 3) for x in arrays(SHAPES[:1]))
    rounded = np.asarray(k, jnp.bfloat16).astype(np.float32)
    cache = jaxkv.convert.from_hugging_face([(Tensor(rounded, "torch.bfloat16"), Tensor(v))])
    assert cache.config.dtype == jnp.bfloat16 and cache.lengths.tolist() == [12] * 4
    np.testing.assert_array_equal(jaxkv.gather(cache, 1, layer=0)[0], rounded[1].transpose(1, 0, 2))


# Flax.

HEADS, WIDTH, BATCH, PLACES = 2, 8, 3, 12
NAMES = ("query", "key", "value", "out")


class LinenModel(nn.Module):
    """Two layers whose names sort the wrong way round."""

    @nn.compact
    def __call__(self, x):
        for name in ("attention_2", "attention_10"):
            x = x + nn.MultiHeadDotProductAttention(num_heads=HEADS, decode=True, name=name)(x)
        return x


def ours(weights, x, cache):
    """The same layers around our cache. `weights[layer][name]` is (kernel, bias)."""
    cache = jaxkv.extend(cache, [x.shape[1]] * BATCH)
    for layer, names in enumerate(weights):
        q, k, v = (
            jnp.einsum("ste,ehd->sthd", x, names[n][0]) + names[n][1][None, None] for n in ("query", "key", "value")
        )
        out, cache = jaxkv.attention(q, k, v, cache, layer=layer)
        kernel, bias = names["out"]
        x = x + jnp.einsum("sthd,hde->ste", out, kernel) + bias[None, None]
    return x, cache


def steps(seed, count):
    random = np.random.default_rng(seed)
    return [jnp.asarray(random.normal(size=(BATCH, 1, WIDTH)), jnp.float32) for _ in range(count)]


def check_both_ways(decode, start, as_collection, as_theirs, weights):
    """`decode(x, state) -> (y, state)` is theirs; ours goes on where it stops, and it goes on where ours stops."""
    state = start
    for x in steps(0, 5):
        _, state = decode(x, state)
    cache = jaxkv.convert.from_flax(as_collection(state), block_size=4)
    assert cache.lengths.tolist() == [5] * BATCH and cache.config.max_seq_len == PLACES
    for x in steps(1, 3):
        expected, state = decode(x, state)
        y, cache = ours(weights, x, cache)
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    returned = as_theirs(jaxkv.convert.to_flax(cache, as_collection(start)))
    for x in steps(2, 2):
        expected, state = decode(x, state)
        y, returned = decode(x, returned)
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    # Rows in another order, which a wrong row would not survive.
    turned = as_collection(as_theirs(jaxkv.convert.to_flax(cache, as_collection(start), rows=[2, 0, 1])))
    assert jax.tree.structure(turned) == jax.tree.structure(as_collection(start))
    again = jaxkv.convert.from_flax(turned, 8)
    np.testing.assert_array_equal(jaxkv.gather(again, 1, layer=1)[0], jaxkv.gather(cache, 0, layer=1)[0])


def test_linen_goes_on_with_our_cache_and_we_with_its():
    model = LinenModel()
    with jax.numpy_rank_promotion("allow"):
        variables = model.init(jax.random.key(0), jnp.ones((BATCH, PLACES, WIDTH)))
        random = np.random.default_rng(3)
        params = jax.tree.map(lambda x: jnp.asarray(random.normal(0, 0.3, x.shape), x.dtype), variables["params"])

        def decode(x, collection):
            y, changed = model.apply({"params": params, "cache": collection}, x, mutable=["cache"])
            return y, changed["cache"]

        weights = [
            {name: (params[layer][name]["kernel"], params[layer][name]["bias"]) for name in params[layer]}
            for layer in ("attention_2", "attention_10")
        ]
        start = jax.tree.map(lambda x: x, variables["cache"])  # as through jit: names in sorted order
        assert list(start) == ["attention_10", "attention_2"]
        check_both_ways(decode, start, lambda x: x, lambda x: x, weights)


def test_nnx_goes_on_with_our_cache_and_we_with_its():
    class Model(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.layers = nnx.List(
                nnx.MultiHeadAttention(HEADS, WIDTH, decode=True, rngs=rngs, bias_init=nnx.initializers.normal(0.3))
                for _ in range(2)
            )

        def __call__(self, x):
            for layer in self.layers:
                x = x + layer(x)
            return x

    model = Model()
    for layer in model.layers:
        layer.init_cache((BATCH, PLACES, WIDTH))
    start = nnx.to_pure_dict(nnx.state(model, nnx.Cache))

    def decode(x, collection):
        nnx.update(model, collection)
        y = model(x)
        return y, nnx.to_pure_dict(nnx.state(model, nnx.Cache))

    weights = [
        {name: (getattr(layer, name).kernel[...], getattr(layer, name).bias[...]) for name in NAMES}
        for layer in model.layers
    ]
    with jax.numpy_rank_promotion("allow"):
        check_both_ways(decode, start, lambda x: x, lambda x: x, weights)


def test_paths_say_the_order():
    layer = [{"cached_key": x, "cached_value": x, "cache_index": 2} for x in arrays(SHAPES[:1] * 2)[0]]
    tree = {"a": {"b": layer[1]}, "c": layer[0]}
    cache = jaxkv.convert.from_flax(tree, paths=["c", "a/b"])
    assert_holds(cache, *[[x["cached_key"] for x in layer]] * 2, [2] * 4)
    back = jaxkv.convert.to_flax(cache, tree, paths=["c", "a/b"])
    np.testing.assert_array_equal(back["c"]["cached_key"][:, :2], layer[0]["cached_key"][:, :2])
    assert not back["c"]["cached_key"][:, 2:].any()


K, V = arrays()
HF = [(x.transpose(0, 2, 1, 3),) * 2 for x in K]
FLAX = {"cached_key": K[0], "cached_value": K[0], "cache_index": 3}


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda c: c.from_dense(K, V[:1], LENGTHS), "must have one array per layer each, but have 2 and 1"),
        (lambda c: c.from_dense([K[0], K[1][:2]], [V[0], V[1][:2]], LENGTHS), r"layer 1 has \(2, 12, 1, 5\)"),
        (lambda c: c.from_dense(K, V[::-1], LENGTHS), "layer 0 has"),
        (
            lambda c: c.from_dense(K[0], V[0], LENGTHS),
            r"\[layers, S, C, K, D\] in all, but k of layer 0 is \[\d+, \d+, \d+\]",
        ),
        (lambda c: c.from_dense(K, V, [13, 0, 0, 0]), "lengths must be from 0 to 12, but are"),
        (lambda c: c.from_dense(K, V, [-1, 0, 0, 0]), "lengths must be from 0 to 12, but are"),
        (lambda c: c.from_dense(K, V, [1, 2]), r"one integer for each of the 4 rows, not int64\[2\]"),
        (lambda c: c.from_dense(K, V, [1.0] * 4), "one integer for each of the 4 rows, not float64"),
        (lambda c: c.from_dense(K, V, LENGTHS, max_seqs=3), "have 4 rows, but max_seqs = 3: give at least as many"),
        (
            lambda c: c.from_dense(K, V, LENGTHS, num_blocks=2),
            "need 3 blocks of 16 tokens, but the cache has 2: raise num_blocks",
        ),
        (lambda c: c.from_dense(K, V, LENGTHS, layers=[jaxkv.LayerConfig(num_kv_heads=2, head_dim=8)]), "layers say"),
        (lambda c: c.from_hugging_face(HF, padding="top"), "padding must be 'left' or 'right', not 'top'"),
        (lambda c: c.from_hugging_face([]), "must have at least one layer"),
        (lambda c: c.from_hugging_face([(K[0], K[1])]), r"must have \[B, K, T, D\] in every layer, but layer 0"),
        (lambda c: c.from_flax({"a": {}}), r"a dict, has no cached_key: give variables\['cache'\]"),
        (lambda c: c.from_flax(nnx.Linear(1, 1, rngs=nnx.Rngs(0))), r"a Linear, has .*nnx.state\(model, nnx.Cache\)"),
        (lambda c: c.from_flax({"a": {"cached_key": K[0]}}), "a lacks cached_value, cache_index"),
        (lambda c: c.from_flax({"a": FLAX | {"cached_key": K[0][0]}}), r"must be \[B, T, K, D\], but is \(12, 2, 8\)"),
        (
            lambda c: c.from_flax({"a": FLAX, "b": FLAX | {"cache_index": 4}}),
            "they are at .*: name those of one decoder with paths",
        ),
        (
            lambda c: c.from_flax({"a": FLAX}, paths=["b"]),
            r"paths must name every layer once, \['a'\], but are \['b'\]",
        ),
        (lambda c: c.to_flax(c.from_dense(K[:1], V[:1], LENGTHS), {"a": FLAX}), "rows of one length"),
        (
            lambda c: c.to_flax(c.from_dense(K, V, 3), {"a": FLAX}),
            "has 1 layers, but the cache has 2: give the collection of the model",
        ),
        (
            lambda c: c.to_flax(c.from_dense(K[:1], V[:1], 3), {"a": FLAX}, rows=[1]),
            r"a is made for .* \[4, 12, 2, 8\]",
        ),
        (lambda c: c.to_hugging_face(c.from_dense(K, V, 3), rows=[4]), "rows must be rows from 0 to 3"),
    ],
)
def test_what_cannot_be_converted_is_one_sentence(call, says):
    with pytest.raises((ValueError, IndexError), match=says):
        call(jaxkv.convert)
