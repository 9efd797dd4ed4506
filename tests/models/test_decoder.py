"""What every decoder does, whatever its family: dtypes, chosen logits, one compile, little Python per step."""

import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from nightly import NIGHTLY
from support import fixtures

import jaxkv
from jaxkv import models
from jaxkv.models import Decoder, DecoderConfig, Rope, config_reader

load = functools.cache(lambda name: models.load(fixtures.DATA / name))


def test_bfloat16():
    model = models.load(fixtures.DATA / "gemma3", dtype=jnp.bfloat16)
    assert model.dtype == jnp.bfloat16
    assert {x.dtype for x in jax.tree.leaves(model)} == {jnp.dtype(jnp.bfloat16)}
    config = jaxkv.CacheConfig.from_model(model, max_seqs=1, max_seq_len=32, num_blocks=4)
    assert config.dtype == jnp.bfloat16
    e = fixtures.expected("gemma3")[1]
    logits = jax.jit(lambda model, tokens: model(tokens)[0])(model, e.prompt[None])
    assert logits.dtype == jnp.float32
    wanted = e.logits[: len(e.prompt)]
    assert np.corrcoef(np.ravel(logits), np.ravel(wanted))[0, 1] > 0.99


def test_logits_at():
    model = load("llama")
    tokens = np.arange(12, dtype=np.int32).reshape(2, 6)

    @jax.jit
    def logits(model):
        some = (model(tokens, logits_at=jnp.array([5, 2]))[0], model(tokens[0], logits_at=jnp.array([3]))[0])
        return model(tokens)[0], *some

    every, some, packed = map(np.asarray, logits(model))
    np.testing.assert_allclose(some, every[np.arange(2), [5, 2]], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(packed, every[0, 3:4], rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not NIGHTLY, reason="by day gradients go through attention and the write")
def test_gradients_reach_every_parameter():
    """Nothing that is loaded is left out of the computation."""
    for name in ("llama", "gemma3"):
        tokens = fixtures.expected(name)[3].prompt
        grads = jax.jit(jax.grad(lambda model, tokens: jnp.sum(jnp.square(model(tokens)[0]))))(load(name), tokens)
        for path, grad in jax.tree.leaves_with_path(grads):
            assert float(jnp.abs(grad).max()) > 0, (name, jax.tree_util.keystr(path))


def test_scopes_are_named():
    """A profile shows which layer an operation belongs to."""
    scopes = {
        False: ("layer_0/attention", "layer_1/mlp"),
        "stacked": ("layer_0_of_1/attention", "layer_0_of_1/mlp"),
        "apart": ("layer_0_of_1/attention", "branch_1_fun/mlp"),
    }
    for scan, own in scopes.items():
        model = models.load(fixtures.DATA / "llama", scan=scan)
        lowered = jax.jit(lambda model, tokens: model(tokens)[0]).lower(model, np.zeros(3, np.int32))
        text = lowered.as_text(debug_info=True)
        for scope in ("embed", *own, "logits"):
            assert scope in text


def test_layer_configs():
    model = load("gemma2")
    assert model.layer_configs[0] == jaxkv.LayerConfig(num_kv_heads=2, head_dim=16, window=6)
    assert model.layer_configs[1] == jaxkv.LayerConfig(num_kv_heads=2, head_dim=16)
    assert (model.vocab_size, model.max_seq_len, len(model.layer_configs)) == (96, 128, 4)


def test_a_step_of_28_layers_spends_little_python():
    """The module is an argument of `jax.jit`: flattening it must not cost what a small step costs. Counted in calls,
    since a clock also sees what else the machine does."""
    layers = 28
    config = dataclasses.replace(load("llama").config, windows=(None,) * layers, ropes=(Rope(),) * layers)
    model = Decoder(config, rngs=nnx.Rngs(0))
    cache = jaxkv.init(jaxkv.CacheConfig.from_model(model, max_seqs=2, max_seq_len=32, num_blocks=4))
    compiles = []

    @functools.partial(jax.jit, donate_argnames="cache")
    def step(model, tokens, cache):  # what the loop pays for each step, without the decoder's own arithmetic
        compiles.append(tokens.shape)
        return tokens + 1, cache

    tokens, cache = step(model, jnp.zeros(2, jnp.int32), cache)
    calls = 0

    def count(frame, event, arg):
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        step(model, tokens, cache)
    finally:
        sys.setprofile(before)
    assert len(compiles) == 1
    leaves = len(jax.tree.leaves((model, cache)))
    assert calls <= 10 * leaves, f"{calls} calls of Python for {leaves} leaves"


@pytest.mark.parametrize("scaling", ["default", "linear", "llama3"])
def test_rope_turns_by_relative_position(scaling):
    """q . k depends on the distance of their positions alone."""
    rope = Rope(theta=50.0, scaling=scaling, factor=4.0, original_max_position=32)
    q, k = np.random.default_rng(0).normal(size=(2, 1, 1, 32)).astype(np.float32)

    def product(at_q, at_k):
        return float(jnp.sum(rope(q, k, jnp.array([at_q]))[0] * rope(q, k, jnp.array([at_k]))[1]))

    assert product(9, 4) == pytest.approx(product(25, 20), rel=1e-4)
    assert product(9, 4) != pytest.approx(product(9, 5), rel=1e-2)


def test_llama3_scaling_by_hand():
    rope = Rope(theta=10_000.0, scaling="llama3", factor=8.0, original_max_position=8192)
    plain, scaled = Rope(theta=10_000.0).frequencies(128), rope.frequencies(128)
    wavelength = 2 * np.pi / plain
    np.testing.assert_allclose(scaled[wavelength < 2048], plain[wavelength < 2048])
    np.testing.assert_allclose(scaled[wavelength > 8192], plain[wavelength > 8192] / 8, rtol=1e-6)
    between = (wavelength > 2048) & (wavelength < 8192)
    assert between.any()
    assert ((scaled[between] < plain[between]) & (scaled[between] > plain[between] / 8)).all()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (dict(num_heads=3), "3 query heads cannot be shared among 2 KV heads"),
        (dict(head_dim=15), "head_dim must be even"),
        (dict(windows=(None,)), "one entry per layer, but they have 1 and 2"),
        (dict(mlp_dim=0), "mlp_dim must be at least 1, not 0"),
    ],
)
def test_bad_configs(change, says):
    good = load("mistral").config
    assert isinstance(good, DecoderConfig)
    assert config_reader.parse(config_reader.render(good)) == good
    with pytest.raises(ValueError, match=says):
        dataclasses.replace(good, **change)
