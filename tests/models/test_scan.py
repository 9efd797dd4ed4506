"""A decoder that scans over its layers gives what one that computes them one by one gives."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures import DATA
from flax import nnx
from nightly import NIGHTLY

import jaxkv
import jaxkv.testing
from jaxkv.models import Decoder, DecoderConfig, ExpertsConfig, Rope, load, save
from jaxkv.models.blocks.block import stack_blocks
from jaxkv.models.loader import read_config

NEAR, FAR = Rope(theta=100.0), Rope(theta=10_000.0)
LOCAL = 2 if NIGHTLY else 1  # such layers in a period
CONFIG = DecoderConfig(
    family="gemma3_text", vocab_size=50, embed_dim=16, mlp_dim=24, num_heads=4, num_kv_heads=2, head_dim=8,
    max_seq_len=64, windows=((4,) * LOCAL + (None,)) * 2 + (4,), ropes=((NEAR,) * LOCAL + (FAR,)) * 2 + (NEAR,),
    norm_offset=1.0, attention_scale=8**-0.5, qk_norm=True, post_norms=True, activation="gelu_tanh", embed_scale=4.0,
    tie_embeddings=True,
)  # fmt: skip


def both(folder, scan):
    """The same random model, layer by layer and scanned, by way of a checkpoint."""
    model = Decoder(CONFIG, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    model = jax.tree.map(lambda x: x + jnp.asarray(rng.normal(0, 0.1, x.shape), x.dtype), model)
    save(model, folder)
    return load(folder), load(folder, scan=scan)


@jax.jit
def step(model, tokens, counts, cache):
    return model(tokens, cache=jaxkv.extend(cache, counts))


def steps(model, **fields):
    """Logits of a ragged prompt, a packed chunk, by night, and of one more token; by day as another padded step, which
    takes no program of its own."""
    cache = jaxkv.init(jaxkv.CacheConfig.from_model(model, max_seqs=3, max_seq_len=40, block_size=4, **fields))
    for axes, counts in (((3, 9), (9, 4, 0)), *[((8,), (1, 2, 5))] * NIGHTLY, ((3, 1 if NIGHTLY else 9), (1, 0, 1))):
        tokens = np.random.default_rng(len(axes)).integers(0, model.vocab_size, axes).astype(np.int32)
        logits, cache = step(model, tokens, np.array(counts, np.int32), cache)
        valid = np.arange(axes[-1]) < (np.sum(counts) if len(axes) == 1 else np.array(counts)[:, None])
        yield np.where(valid[..., None], logits, 0)
    jaxkv.check(cache)
    jaxkv.check_invariants(cache)


@pytest.mark.parametrize("scan", ["stacked", "apart"])
def test_two_periods_and_a_rest(tmp_path, scan):
    plain, scanned = both(tmp_path, scan)
    assert scanned.scan and (scanned.periods, scanned.num_scanned) == (2, 2 * LOCAL + 2)
    assert len(scanned.layers) == (1 if scan == "stacked" else 2 * LOCAL + 3)
    assert jaxkv.CacheConfig.from_model(scanned, max_seqs=1, max_seq_len=8).stacked
    wanted = list(steps(plain))
    # Of what is stacked, tests/core/test_stacked.py has more.
    for fields in ({}, {"stacked": False}) if NIGHTLY or scan == "apart" else ({},):
        for logits, expected in zip(steps(scanned, **fields), wanted, strict=True):
            np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)
    if not NIGHTLY:  # dense, by day, in the next tests
        return
    tokens = jnp.arange(12, dtype=jnp.int32)[None]
    dense = jax.jit(lambda model: model(tokens)[0])
    np.testing.assert_allclose(dense(scanned), dense(plain), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scan", ["stacked", "apart"])
def test_saved_and_loaded_again(tmp_path, scan):
    plain, scanned = both(tmp_path / "a", scan)
    save(scanned, tmp_path / "b")
    again = load(tmp_path / "b")
    jax.tree.map(np.testing.assert_array_equal, again, plain)


@pytest.mark.parametrize("scan", ["stacked", "apart"])
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
@pytest.mark.skipif(not NIGHTLY, reason="by day experts are one by one")
def test_experts_in_scanned_layers(family, scan, tmp_path):
    """Two periods of two layers; of the second only every other layer has experts."""
    oss = family == "gpt_oss"
    experts = ExpertsConfig(count=3, per_token=2, mlp_dim=8, bias=oss, limit=2.0 if oss else None,
                            scores="softmax_of_chosen" if oss else "softmax")  # fmt: skip
    config = DecoderConfig(
        family=family, vocab_size=50, embed_dim=16, mlp_dim=8, num_heads=2, num_kv_heads=1, head_dim=8, max_seq_len=64,
        windows=(4, None) * 2 if oss else (None,) * 4, ropes=(NEAR,) * 4, attention_scale=8**-0.5, sinks=oss,
        qkv_bias=oss, out_bias=oss, qk_norm=not oss, experts=experts,
        expert_layers=(True,) * 4 if oss else (False, True) * 2,
    )  # fmt: skip
    save(Decoder(config, rngs=nnx.Rngs(0)), tmp_path)
    plain, scanned = load(tmp_path), load(tmp_path, scan=scan)
    assert plain.config == config and (scanned.periods, scanned.num_scanned) == (2, 4)
    tokens = jnp.arange(9, dtype=jnp.int32)[None]
    dense = jax.jit(lambda model: model(tokens)[0])
    np.testing.assert_allclose(dense(scanned), dense(plain), rtol=1e-4, atol=1e-5)


def deepen(config, periods, rest):
    """A config of so many periods and blocks behind them."""
    blocks, layers = periods * config.period + rest, periods * config.first_layer(config.period)
    repeat = lambda fields, count: (fields * count)[:count]  # noqa: E731 (of a tuple)
    size = config.period
    return dataclasses.replace(
        config,
        blocks=repeat(config.blocks[:size], blocks),
        layers=repeat(config.layers[: config.first_layer(size)], layers + config.first_layer(rest)),
        ropes=repeat(config.ropes[:size], blocks),
        expert_layers=repeat(config.expert_layers[:size], blocks if config.experts else 0),
    )


@pytest.mark.parametrize("name", ["falcon_h1", "nemotron_h", "qwen3_next", "granitemoehybrid"] if NIGHTLY else ["lfm2"])
def test_layers_that_keep_a_state(name):
    """Blocks with a mixer, with attention and a mixer side by side, or with neither."""
    config = deepen(read_config(DATA / name), 2, 1)
    plain, scanned = Decoder(config, rngs=nnx.Rngs(0)), Decoder(config, scan="stacked", rngs=nnx.Rngs(0))
    assert scanned.scan and len(scanned.layers) == config.num_layers % config.period
    assert not Decoder(config, scan="apart", rngs=nnx.Rngs(0)).scan, "their parameters act within"
    rng = np.random.default_rng(0)
    plain = jax.tree.map(lambda x: x + jnp.asarray(rng.normal(0, 0.05, x.shape), x.dtype), plain)
    for name in ("embed", "norm", "head"):
        setattr(scanned, name, getattr(plain, name))
    scanned.layers = plain.layers[scanned.num_stacked :]
    for j in range(config.period):
        scanned.stacks[j] = stack_blocks(plain.layers[j : scanned.num_stacked : config.period])
    for logits, expected in zip(steps(scanned), steps(plain), strict=True):
        np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)
    if not NIGHTLY:
        return
    tokens = jnp.arange(12, dtype=jnp.int32)[None]
    dense = jax.jit(lambda model: model(tokens)[0])
    np.testing.assert_allclose(dense(scanned), dense(plain), rtol=1e-4, atol=1e-5)
    outputs = [jaxkv.generate(model, [[3, 1, 4], [1, 5]], max_new_tokens=6, longest=16) for model in (plain, scanned)]
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("scan", [True, False, "stacked", "apart"])
def test_which_parameters_are_stacked(monkeypatch, scan):
    config = dataclasses.replace(CONFIG, windows=(None,) * 3, ropes=(FAR,) * 3)
    stacked = {}
    for platform in ("cpu", "tpu"):
        monkeypatch.setattr(jax, "default_backend", lambda platform=platform: platform)
        model = nnx.eval_shape(lambda: Decoder(config, scan=scan, rngs=nnx.Rngs(0)))
        assert model.scan == bool(scan) and len(model.layers) == 3 - model.num_stacked
        stacked[platform] = model.num_stacked
    assert stacked == {True: {"cpu": 0, "tpu": 3}, "stacked": {"cpu": 3, "tpu": 3}}.get(scan, {"cpu": 0, "tpu": 0})


def test_what_is_loaded_is_scanned_on_a_cpu(monkeypatch):
    scanned = {}
    for platform in ("cpu", "gpu"):
        with monkeypatch.context() as patch:
            patch.setattr(jax, "default_backend", lambda platform=platform: platform)
            model = load(DATA / "llama")
        scanned[platform] = (model.scan, model.num_stacked)
    assert scanned == {"cpu": (True, 0), "gpu": (False, 0)}
    assert not load(DATA / "llama", mesh=jax.make_mesh((1,), ("model",), devices=jax.devices()[:1])).scan


def test_no_pool_and_no_parameter_is_copied():
    """Of stacked ones a layer's parameters are, on a CPU."""
    config = dataclasses.replace(CONFIG, embed_dim=256, mlp_dim=1024, windows=(None,) * 3, ropes=(FAR,) * 3)
    donating, scratch = jax.jit(step.__wrapped__, donate_argnames="cache"), {}
    for scan in ("stacked", "apart"):
        model = Decoder(config, scan=scan, rngs=nnx.Rngs(0))
        sizes = jaxkv.CacheConfig.from_model(model, max_seqs=3, max_seq_len=40, num_blocks=4000)
        cache = jax.eval_shape(lambda sizes=sizes: jaxkv.init(sizes))
        arguments = model, np.zeros((3, 1), np.int32), np.ones(3, np.int32), cache
        jaxkv.testing.assert_no_copy(donating, *arguments)
        scratch[scan] = donating.lower(*arguments).compile().memory_analysis().temp_size_in_bytes
    assert scratch["apart"] < 4 * config.embed_dim * config.mlp_dim < scratch["stacked"]


@pytest.mark.parametrize("scan", [None, "yes", 2])
def test_a_scan_of_another_kind_is_refused(scan):
    with pytest.raises(ValueError, match=rf'scan must be True, False, "stacked" or "apart", not {scan!r}'):
        Decoder(CONFIG, scan=scan, rngs=nnx.Rngs(0))


def test_one_period_is_not_scanned(tmp_path):
    model = Decoder(dataclasses.replace(CONFIG, windows=(4, None), ropes=(NEAR, FAR)), scan=True, rngs=nnx.Rngs(0))
    assert not model.scan and len(model.layers) == 2


@pytest.mark.skipif(not NIGHTLY, reason="two engines to compile")
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_published_shapes_give_equal_tokens(name):
    prompts = [[1, 2, 3, 4, 5, 6, 7], [8, 9]]
    models = [load(DATA / name, dtype="float32", scan=scan) for scan in (False, "stacked", "apart")]
    plain, *scanned = (jaxkv.generate(model, prompts, max_new_tokens=6) for model in models)
    assert scanned == [plain] * 2
