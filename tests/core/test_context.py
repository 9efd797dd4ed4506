"""One row's tokens over several devices: the same results as on one, and no pool ever moved between them."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from nightly import NIGHTLY
from test_shards import HEADS, LAYERS, MOVES, assert_same, step, tokens

import jaxkv

# In a window; for all that is seen; and by night int8, int4, latent, and with heads over another axis.
LAYER, LOCAL = (jaxkv.LayerConfig(num_kv_heads=2, head_dim=8, window=window) for window in (None, 5))
# Runs of 2 tokens: a block goes once round the four devices.
CONFIG = jaxkv.CacheConfig(
    layers=(LAYER, LOCAL), max_seqs=3, max_seq_len=40, num_blocks=16, block_size=8, dtype="float32"
)
KINDS = CONFIG.replace(layers=(*LAYERS[1:4], jaxkv.LayerConfig(num_kv_heads=1, head_dim=8, dtype="float8_e4m3fn")))


def make_mesh(axes="auto", shape=(4,), names=("context",)):
    if axes == "explicit":
        return jax.make_mesh(shape, names, devices=jax.devices()[: math.prod(shape)])
    return Mesh(np.array(jax.devices()[: math.prod(shape)]).reshape(shape), names)


@jax.jit
def everything(cache):
    """Prompts, a mixed step, decoding, and what rows are told to do between."""
    config, slopes = cache.config, jnp.linspace(0.1, 1.0, HEADS)
    prompts, cache = step(cache, jnp.array([9, 2, 0]), *tokens(config, (3, 9)), sinks=3 * slopes, return_lse=True)
    mixed = decoded = rows = []
    if NIGHTLY:
        cache = jaxkv.truncate(jaxkv.fork(cache, [0], [2]), jnp.array([40, 1, 8]))
        mixed, cache = step(cache, jnp.array([1, 4, 0]), *tokens(config, (7,), 1), planned=False, alibi=slopes)
        decoded, cache = step(cache, jnp.array([1, 1, 1]), *tokens(config, (3,), 2), sinks=3 * slopes, return_lse=True)
        cache = jaxkv.free(cache, jnp.array([False, True, False]))
        rows = [jaxkv.gather(cache, 0, layer=i, max_len=12) for i in range(cache.num_layers)]
        rows.append(cache.combined(0))
    return (prompts, mixed, decoded, rows), cache


def assert_as_on_one_device(config, mesh, **axes):
    expected, expected_cache = everything(jaxkv.init(config))
    outs, cache = everything(jaxkv.init(config, mesh=mesh, **axes))
    assert_same(outs, expected, atol=3e-6)
    assert_same(cache, expected_cache)
    specs = jaxkv.partition_specs(config, mesh, **axes)
    assert jax.tree.structure(specs) == jax.tree.structure(cache)
    for x, spec in zip(jax.tree.leaves(cache), jax.tree.leaves(specs), strict=True):
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim)
    jaxkv.check(cache), jaxkv.check_invariants(cache)
    return cache


def test_every_function_gives_what_it_gives_on_one_device():
    cache = assert_as_on_one_device(CONFIG.replace(layers=(LOCAL,)), make_mesh(), context="context")
    pool = cache.pools[0].kv
    assert pool.addressable_shards[1].data.shape == (17, 2, 2, 2, 8)  # tokens 2 and 3 of each block
    assert pool.addressable_shards[1].data.nbytes * 4 == cache.config.bytes


@pytest.mark.skipif(not NIGHTLY, reason="its programs take long to compile")
@pytest.mark.parametrize(
    ("config", "axes", "shape"),
    [(CONFIG, "explicit", (4,)), (KINDS, "auto", (4,)), (CONFIG, "auto", (2, 2)), (KINDS, "explicit", (2, 2))],
)
def test_other_layers_and_meshes(config, axes, shape):
    mesh = make_mesh(axes, shape, ("model", "context")[-len(shape) :])
    with jax.set_mesh(mesh):
        cache = assert_as_on_one_device(config, mesh, context="context")
    if len(shape) == 2 and config is CONFIG:
        assert cache.pools[0].kv.sharding.spec == P(None, None, "model", "context")


@pytest.mark.skipif(not NIGHTLY, reason="its programs take long to compile")
def test_inside_a_shard_map():
    """With `check_vma`: every device has all heads, and what comes out is the same on all."""
    config = CONFIG.replace(layers=(LAYER,))
    given, counts, mesh = tokens(config, (3, 1)), jnp.array([1, 0, 1]), make_mesh()
    expected = jax.jit(step)(jaxkv.init(config), counts, *given)
    specs = jaxkv.partition_specs(config, mesh, context="context")
    local = jax.shard_map(step, mesh=mesh, in_specs=(specs, P(), P(), P(), P()), out_specs=(P(), specs))
    assert_same(jax.jit(local)(jaxkv.init(config, mesh=mesh, context="context"), counts, *given), expected, atol=2e-6)


@pytest.mark.skipif(not NIGHTLY, reason="many small programs")
def test_outside_jit(tmp_path):
    """Files, other caches, single tokens, trees, the host."""
    config, mesh = KINDS.replace(layers=KINDS.layers[:3]), make_mesh()
    given = tokens(config, (3, 7))[1:]
    one = jaxkv.append(jaxkv.init(config), *given, [7, 2, 5])
    many = jaxkv.append(jaxkv.init(config, mesh=mesh, context="context"), *given, [7, 2, 5])
    assert_same(many, one)
    jaxkv.save(tmp_path / "one", one), jaxkv.save(tmp_path / "many", many)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "many").read_bytes()
    loaded = jaxkv.load(tmp_path / "one", into=jaxkv.init(config, mesh=mesh, context="context"))
    assert loaded.pools[0].kv.sharding.spec == P(None, None, None, "context")
    assert_same(loaded, jaxkv.load(tmp_path / "one"))
    for layer in range(3):
        assert_same(many.load(layer, 0, 0, 6), one.load(layer, 0, 0, 6))
        new = (jnp.ones(8), None if layer == 2 else jnp.ones(8))
        assert_same(many.store(layer, 0, 0, 3, *new).pools, one.store(layer, 0, 0, 3, *new).pools)
    assert_same(jaxkv.gather(many, 0, layer=0, raw=True), jaxkv.gather(one, 0, layer=0, raw=True))
    emptied, host = jaxkv.swap_out(many, 0)
    assert_same(jaxkv.gather(jaxkv.swap_in(emptied, 0, host), 0, layer=0), jaxkv.gather(one, 0, layer=0))
    path = [[0, 2, 5], [1, -1, -1], [4, -1, -1]]
    assert_same(jaxkv.keep(many, path), jaxkv.keep(one, path))
    for size in (8, 4):  # to blocks of other tokens, and back
        sent = jaxkv.send(many, [0, 2], to=jaxkv.init(config.replace(block_size=size, num_blocks=32)), at=[1, 0])
        assert_same(jaxkv.gather(sent, 1, layer=1), jaxkv.gather(one, 0, layer=1))
        back = jaxkv.send(sent, [1], to=jaxkv.init(config, mesh=mesh, context="context"))
        assert_same(jaxkv.gather(back, 1, layer=2), jaxkv.gather(one, 0, layer=2))


@pytest.mark.skipif(not NIGHTLY, reason="its programs take long to compile")
def test_gradients():
    """Of queries, new keys and values, the sinks among them."""
    config = CONFIG.replace(layers=(LOCAL,))
    (q,), (k,), _ = tokens(config, (3, 4))

    def loss(q, k, sinks, cache):
        cache = jaxkv.extend(cache, jnp.array([4, 1, 3]))
        out, _ = jaxkv.attention(q, k, k, cache, layer=0, sinks=sinks)
        return jnp.sum(out * jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape))

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    expected = gradient(q, k, jnp.ones(HEADS), jaxkv.init(config))
    actual = gradient(q, k, jnp.ones(HEADS), jaxkv.init(config, mesh=make_mesh(), context="context"))
    assert_same(actual, expected, atol=1e-5)


def compiled_decode(mesh, cache):
    """A decode step's program."""
    q = jax.ShapeDtypeStruct((4, 1, 8, 8), jnp.float32, sharding=NamedSharding(mesh, P()))
    k = jnp.ones((4, 1, 2, 8))

    def decode(cache, q, k):
        cache = jaxkv.extend(cache, jnp.ones(4, jnp.int32))
        for i in range(cache.num_layers):
            q, cache = jaxkv.attention(q, k, k, cache, layer=i)
        return q, cache

    return jax.jit(decode, donate_argnums=0).lower(cache, q, k).compile()


def moved(program):
    """The names of what moves data between devices, and the most numbers that one of them brings."""
    lines = [line for line in program.as_text().splitlines() if MOVES.search(line)]
    sizes = [math.prod(map(int, re.search(r"= \(?\w+\[([0-9,]*)\]", line)[1].split(","))) for line in lines]
    return [MOVES.search(line)[1] for line in lines], max(sizes, default=0)


def test_one_small_gather_a_layer():
    config = CONFIG.replace(layers=(LAYER, LOCAL)[: 1 + NIGHTLY], max_seqs=4, max_seq_len=64, num_blocks=1024)
    mesh = make_mesh()
    cache = jaxkv.init(config, mesh=mesh, context="context")
    program = compiled_decode(mesh, cache)
    names, largest = moved(program)
    assert names == ["all-gather"] * config.num_layers
    assert largest == 4 * 4 * HEADS * (8 + 1)  # of four devices: rows, heads, what each found and its LSE
    assert program.memory_analysis().alias_size_in_bytes >= config.bytes // 4
    assert program.memory_analysis().temp_size_in_bytes < config.bytes // 4 // 8


def test_a_bad_spec_is_seen():
    """The same test, of pools that lie in another way."""
    config, mesh = CONFIG.replace(layers=(LAYER,), max_seqs=4, max_seq_len=64, num_blocks=1023), make_mesh()
    cache = jaxkv.init(config, mesh=mesh, context="context")
    kv = jax.device_put(cache.pools[0].kv, NamedSharding(mesh, P("context")))
    names, largest = moved(compiled_decode(mesh, cache.replace(pools=(dataclasses.replace(cache.pools[0], kv=kv),))))
    assert (
        names != ["all-gather"] and largest >= kv.size // 16
    )  # each device has a fourth, and gives away a fourth of that


def test_bad_meshes():
    config, mesh = CONFIG, make_mesh()
    with pytest.raises(ValueError, match="context='rows' is no axis of the mesh, which has 'context'"):
        jaxkv.init(config, mesh=mesh, context="rows")
    with pytest.raises(ValueError, match="heads='tensor' is no axis of the mesh, which has 'context'"):
        jaxkv.init(config, mesh=mesh, context="context", heads="tensor")
    with pytest.raises(
        ValueError, match="rows cannot be divided over the same axis of the mesh, but they name 'context', 'context'"
    ):
        jaxkv.init(config, mesh=mesh, context="context", heads="context")
    with pytest.raises(
        ValueError, match=r"Blocks of 6 tokens cannot be divided among the 4 devices .* multiple of it, 8, say"
    ):
        jaxkv.partition_specs(config.replace(block_size=6), mesh, context="context")
    evicting = config.replace(layers=(jaxkv.LayerConfig(num_kv_heads=2, head_dim=8, evict="layer"),))
    with pytest.raises(ValueError, match="Layer 0 has evict='layer', which moves tokens from block to block"):
        jaxkv.init(evicting, mesh=mesh, context="context")
    with pytest.raises(ValueError, match="context needs mesh=, the devices that it names an axis of"):
        jaxkv.init(config, context="context")
    cache, kv = jaxkv.init(config, mesh=mesh, context="context"), jnp.ones((3, 1, 2, 8))
    moved = jax.device_put(cache, NamedSharding(make_mesh(shape=(2,), names=("rows",)), P()))
    with pytest.raises(ValueError, match=r"with the axis 'context', but its pools lie on one with 'rows': .* context="):
        jax.jit(lambda cache: jaxkv.write(cache, kv, kv, layer=0)).trace(moved)
