"""Pairs of heads over several devices: divided as heads are where they are enough, else refused, or avoided."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from nightly import NIGHTLY
from test_shards import HEADS, assert_same, step, tokens

import jaxkv
from jaxkv._core.config import cache_config


def layers(*heads):
    return tuple(jaxkv.LayerConfig(num_kv_heads=n, head_dim=8, bounds=n == 8) for n in heads)


def config(*heads, **fields):
    return jaxkv.CacheConfig(
        layers=layers(*heads), max_seqs=3, max_seq_len=32, num_blocks=16, block_size=4, dtype="float32",
        **{"head_dim_multiple": 16, "join_kv": True} | fields,
    )  # fmt: skip


def make_mesh(shape, names=("model",)):
    return Mesh(np.array(jax.devices()[: np.prod(shape)]).reshape(shape), names)


@jax.jit
def everything(cache):
    """A prompt and a decode step, with options that go by heads, and what rows hold."""
    slopes = jnp.linspace(0.1, 1.0, HEADS)
    given = tokens(cache.config, (3, 5))
    prompts, cache = step(cache, jnp.array([5, 2, 0]), *given, sinks=3 * slopes, return_lse=True)
    decoded, cache = step(cache, jnp.array([1, 1, 1]), *tokens(cache.config, (3,), 2), alibi=slopes)
    rows = [jaxkv.gather(cache, 0, layer=i, max_len=6) for i in range(cache.num_layers)]
    return prompts, decoded, rows, cache


# A pair for each device, a pair that all have, and that over the tokens of blocks, too.
@pytest.mark.parametrize(("one", "shape"), [(config(8, 2), (4,)), *[(config(4, 1), (2, 2))] * NIGHTLY])
def test_pairs_are_divided_as_heads_are(one, shape):
    mesh, context = make_mesh(shape, ("model", "context")[: len(shape)]), None if len(shape) == 1 else "context"
    *expected, expected_cache = everything(jaxkv.init(one))
    *found, cache = everything(jaxkv.init(one, mesh=mesh, context=context))
    assert_same(found, expected, atol=3e-6)
    assert_same(cache, expected_cache)
    specs = jaxkv.partition_specs(one, mesh, context=context)
    for x, spec in zip(jax.tree.leaves(cache), jax.tree.leaves(specs), strict=True):
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim)
    assert cache.pools[0].kv.addressable_shards[0].data.shape[2] == 1
    head = one.layers[0].num_kv_heads - 3  # the second of its pair
    changed, alone = (x.store(0, 1, head, 2, jnp.ones(8), 2 * jnp.ones(8)) for x in (cache, expected_cache))
    assert_same(changed, alone)
    assert_same(changed.load(0, 1, head, 2), (jnp.ones(8), 2 * jnp.ones(8)))
    assert_same(changed.load(0, 1, head - 1, 2), expected_cache.load(0, 1, head - 1, 2))
    jaxkv.check_invariants(changed)
    sent = jaxkv.send(cache, 0, to=jaxkv.init(one.replace(join_kv="head")))
    for layer in range(2):
        assert_same(jaxkv.gather(sent, 0, layer=layer), jaxkv.gather(expected_cache, 0, layer=layer))


def test_heads_that_are_one_to_a_device_are_no_pairs():
    mesh = make_mesh((4,))
    with pytest.raises(ValueError, match=r"its 4 KV heads in pairs, 2 in all.* the 4 devices .*join_kv=\"head\""):
        jaxkv.init(config(4), mesh=mesh)
    cache = jaxkv.init(config(4, join_kv="head"), mesh=mesh)
    assert cache.pools[0].kv.addressable_shards[0].data.shape == (17, 1, 1, 4, 16)
    with pytest.raises(ValueError, match="6 KV heads cannot be divided among the 4 devices"):
        jaxkv.init(config(6), mesh=mesh)
    # Three pairs for two devices are too few, and six heads enough.
    with pytest.raises(ValueError, match="pairs, 3 in all"):
        jaxkv.init(config(6), mesh=make_mesh((2,)))
    jaxkv.partition_specs(config(6, join_kv="head"), make_mesh((2,)))
    jaxkv.partition_specs(config(4), mesh, heads=None)


def test_a_config_for_a_model_follows_where_it_lies(monkeypatch):
    monkeypatch.setattr(cache_config, "JOINING", ("cpu",))
    sizes = {"max_seqs": 1, "max_seq_len": 8, "head_dim_multiple": 16}
    model = types.SimpleNamespace(layer_configs=layers(4), dtype="float32")

    def chosen(**fields):
        return jaxkv.CacheConfig.from_model(model, **sizes, **fields).join_kv

    assert chosen() is True and chosen(mesh=make_mesh((2,))) is True and chosen(mesh=make_mesh((4,))) == "head"
    assert chosen(mesh=make_mesh((4,), ("data",))) is True
    assert chosen(mesh=make_mesh((4,)), join_kv=True) is True and chosen(mesh=make_mesh((4,)), join_kv=False) is False
    assert jaxkv.CacheConfig.uniform(
        num_layers=1, num_kv_heads=4, head_dim=8, mesh=make_mesh((4,)), **sizes
    ).join_kv == "head"  # fmt: skip
    # A model's own mesh, in an engine, with layers that evict and without; two heads are whole on each of four devices.
    for count, joined in ((2, "head"), (4, True)):
        model = jaxkv.models.small(mesh=make_mesh((count,)))
        assert {one.num_kv_heads for one in model.layer_configs} == {2}
        for evict in (None, jaxkv.Eviction("tova", keep=0.5)):
            engine = jaxkv.Engine(model, max_seqs=1, max_seq_len=16, head_dim_multiple=128, evict=evict)
            assert engine.config.join_kv == joined and engine.cache.pools[0].kv.shape[1] == (2 if joined is True else 1)


@pytest.mark.parametrize("join_kv", [True, "head"])
def test_what_does_not_fit_is_said_of_heads(join_kv):
    """Not of rows, which nobody sees."""
    cache = jaxkv.extend(jaxkv.init(config(4, join_kv=join_kv)), [1, 1, 1])
    q, k = jnp.ones((3, 1, 8, 8)), jnp.ones((3, 1, 4, 8))
    for arguments, message in (
        ((q[:, :, :6], k, k), "6 query heads cannot be shared among 4 KV heads"),
        ((q, k[:, :, :2], k[:, :, :2]), "k has 2 heads, but the pool has 4 KV heads"),
        ((q, k[:, :, :3], k[:, :, :3]), "k has 3 heads, but the pool has 4 KV heads"),
        ((q, k, k[:, :, :2]), "k and v must be alike"),
    ):
        with pytest.raises(ValueError, match=message):
            jaxkv.attention(*arguments, cache, layer=0)
    with pytest.raises(ValueError, match="6 query heads cannot be shared among 4 KV heads"):
        jaxkv.attend(q[:, :, :6], cache, layer=0)
