"""A model over several devices: the tokens of one, each device with its part of the weights, and two sums a layer."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures import DATA, NAMES, expected
from flax import nnx
from jax.sharding import Mesh, PartitionSpec as P
from nightly import NIGHTLY

import jaxkv
import jaxkv.models
from jaxkv._cli.plan.decode_step import collectives
from jaxkv._cli.plan.devices import Devices
from jaxkv.models import DecoderConfig, Rope
from jaxkv.models.config import ExpertsConfig
from jaxkv.models.experts import Experts
from jaxkv.models.partition import sharding_of


def engine_with_the_same_tokens(model, name):
    rows = expected(name)[:2]
    engine = jaxkv.Engine(model, max_seqs=2, max_seq_len=64, step_tokens=32)
    requests = [engine.submit(row.prompt.tolist(), max_new_tokens=len(row.tokens)) for row in rows]
    for _ in engine.run():
        pass
    assert [request.tokens for request in requests] == [row.tokens.tolist() for row in rows]
    return engine


@pytest.mark.skipif(not NIGHTLY, reason="each engine has its programs to compile")
@pytest.mark.parametrize("count", [2, 4])  # as many as there are KV heads, and more
@pytest.mark.parametrize("name", NAMES)
def test_the_same_tokens_as_on_one_device(name, count):
    mesh = jax.make_mesh((count,), ("model",), devices=jax.devices()[:count])  # explicit, and taken for automatic
    model = jaxkv.models.load(DATA / name, mesh=mesh)
    one = jaxkv.models.load(DATA / name)
    for mine, whole in zip(jax.tree.leaves(model), jax.tree.leaves(one), strict=True):
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(whole))
    engine = engine_with_the_same_tokens(model, name)
    divided = {layer.num_kv_heads % count == 0 for layer in model.layer_configs if not layer.is_recurrent}
    assert {"model" in pool.kv.sharding.spec for pool in engine.cache.pools if pool is not None} == divided


@pytest.mark.skipif(not NIGHTLY, reason="each engine has its programs to compile")
@pytest.mark.parametrize("name", NAMES)
def test_the_same_tokens_with_contexts_over_devices(name):
    model = jaxkv.models.load(DATA / name, mesh=jax.make_mesh((1, 4), ("model", "context")))
    if any(layer.compress_ratio is not None for layer in model.layer_configs):
        with pytest.raises(ValueError, match="stores entries of 4 tokens, and its blocks cannot be divided"):
            engine_with_the_same_tokens(model, name)
        return
    engine = engine_with_the_same_tokens(model, name)
    for pool in engine.cache.pools:
        assert pool is None or pool.kv.addressable_shards[0].data.nbytes * 4 == pool.kv.nbytes


@pytest.mark.skipif(not NIGHTLY, reason="each engine has its programs to compile")
@pytest.mark.parametrize("sizes", [(2,), (2, 2)])
@pytest.mark.parametrize("name", NAMES)
def test_the_same_tokens_with_rows_over_devices(name, sizes):
    """Where nothing else is divided, the same bits as on one device with what was placed on one of these."""
    names, rows = ("data", "model")[: len(sizes)], expected(name)[:2]
    devices = np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes)
    model, one = (jaxkv.models.load(DATA / name, mesh=mesh, scan=False) for mesh in (Mesh(devices, names), None))
    requests = []
    for used, few in ((model, rows), (one, rows[:1])):
        engine = jaxkv.Engine(used, max_seqs=len(few), max_seq_len=64, step_tokens=32)
        requests.append([engine.submit(row.prompt.tolist(), len(row.tokens), logprobs=3) for row in few])
        for _ in engine.run():
            pass
        assert [r.tokens for r in requests[-1]] == [row.tokens.tolist() for row in few]
        if used is model:
            assert engine.steps == sum(core.runner.steps for core in engine._cores)
            assert all(core.runner.steps >= len(few[0].tokens) // 2 for core in engine._cores)
            held = [{d for x in jax.tree.leaves(core.cache) for d in x.devices()} for core in engine._cores]
            assert held == [set(row.flat) for row in devices.reshape(2, -1)]
    if len(sizes) == 1:
        assert requests[0][0].logprobs == requests[1][0].logprobs


@pytest.mark.skipif(not NIGHTLY, reason="each engine has its programs to compile")
@pytest.mark.parametrize("budget", ["ada", "pyramid"])
def test_the_same_tokens_of_rows_that_give_tokens_up(budget):
    """Heads are thinned where they lie. With "ada" those of one device may keep more than those of another."""
    tokens, sizes = [], dict(max_seqs=3, max_seq_len=64, num_blocks=12, block_size=4, step_tokens=32)
    snapkv = functools.partial(jaxkv.scores.snapkv, window_size=4, kernel_size=3)
    for mesh in (None, jax.make_mesh((2,), ("model",), devices=jax.devices()[:2])):
        model = jaxkv.models.load(DATA / "qwen2", mesh=mesh)
        engine = jaxkv.Engine(model, evict=jaxkv.Eviction(snapkv, 0.5, budget, every=4), **sizes)
        prompts = [row.prompt.tolist() for row in expected("qwen2")[:2]] * 2
        requests = [engine.submit(prompt, max_new_tokens=12) for prompt in prompts]
        for _ in engine.run():
            pass
        jaxkv.check_invariants(engine.cache)
        num_shards = max(t.num_shards for t in engine.cache.tables)
        assert engine.cache.blocks_in_use == 0 and num_shards == (1 if mesh is None else 2)
        tokens.append([request.tokens for request in requests])
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("name", ["qwen2", *["qwen3_moe", "gpt_oss"] * NIGHTLY])
def test_a_decode_step_has_two_sums_a_layer(name):
    mesh = Mesh(np.array(jax.devices()[:2]), ("model",))
    model = jaxkv.models.load(DATA / name, mesh=mesh)
    assert model.layers[0].attention.query[...].sharding.spec == P("model", None, None)
    weights = jax.tree.leaves(model)
    own = sum(x.addressable_shards[0].data.nbytes for x in weights)
    assert own < 0.53 * sum(x.nbytes for x in weights)  # but for norms, half of them
    config = jaxkv.CacheConfig.from_model(model, max_seqs=2, max_seq_len=64)

    def decode(model, tokens, cache):
        logits, cache = model(tokens, cache=jaxkv.extend(cache, jnp.ones(2, jnp.int32)))
        return logits, cache

    program = jax.jit(decode, donate_argnames="cache").lower(
        model, jnp.ones((2, 1), jnp.int32), cache=jaxkv.init(config, mesh=mesh)
    )
    text = program.compile().as_text()
    moves = re.findall(r"= .*? (all-[a-z]+|collective-permute|reduce-scatter)(?:-start)?\(", text)
    assert moves.count("all-reduce") <= 2 * config.num_layers + 1  # and one for the vocabulary's part of the embedding
    assert len(moves) <= 2 * config.num_layers + 2, moves
    # What `plan --devices` says of it, before anything is loaded.
    planned, shapes = Devices(2), re.findall(r"= f32\[([0-9,]+)\]\S* all-reduce\(", text)
    assert planned.weights(model.config, sum(x.nbytes for x in weights)) == own
    summed = 4 * sum(math.prod(map(int, shape.split(","))) for shape in shapes)
    gathered = 2 * model.config.vocab_size * 4 // 2  # each device sends its half of two rows of logits
    sent = sum(x.sent for x in collectives(model.config, planned, 2, 4))
    assert sent == summed + gathered  # 2 (n - 1) / n is 1 here


@pytest.mark.parametrize("mlp_bias", [False, True])  # with it, what all tokens go through has a sum of its own
def test_experts_with_biases(mlp_bias):
    """What is added behind the sum over devices is added once."""
    own = ExpertsConfig(count=3, per_token=2, mlp_dim=6, bias=True, choice_bias=True, shared_dim=4)
    config = DecoderConfig(
        vocab_size=8, embed_dim=5, mlp_dim=6, num_heads=2, num_kv_heads=1, head_dim=4, max_seq_len=16, windows=(None,),
        ropes=(Rope(),), attention_scale=0.5, mlp_bias=mlp_bias,
    )  # fmt: skip
    experts, random = Experts(config, own, "float32", nnx.Rngs(0)), np.random.default_rng(0)
    mesh = Mesh(np.array(jax.devices()[:2]), ("model",))
    graph, state = nnx.split(experts)
    flat = [(path, x[...] + random.standard_normal(x.shape).astype("float32")) for path, x in nnx.to_flat_state(state)]
    placed = [(path, jax.device_put(x, sharding_of(("experts", *path), x.shape, mesh))) for path, x in flat]
    assert sum(x.sharding.spec != P(*[None] * x.ndim) for _, x in placed) >= 8
    x = jnp.asarray(random.standard_normal((4, 5)).astype("float32"))

    @jax.jit
    def run(params):
        state = nnx.from_flat_state([(path, nnx.Param(params[path])) for path, _ in flat])
        return nnx.merge(graph, state)(x)

    np.testing.assert_allclose(run(dict(placed)), run(dict(flat)), rtol=2e-5, atol=2e-5)


def test_what_is_no_mesh():
    with pytest.raises(ValueError, match=r"mesh must be a jax.sharding.Mesh, as jax.make_mesh makes it, not 2"):
        jaxkv.models.small(mesh=2)
