"""One cache over several devices: the same results as on one, and no pool ever moved between them."""

import contextlib
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from nightly import NIGHTLY

import jaxkv
from jaxkv import testing

HEADS = 8
# Divided, in a window, divided and quantised; whole on each device with heads to pick from, latent, and shared.
LAYERS = (
    jaxkv.LayerConfig(num_kv_heads=4, head_dim=8, window=6),
    jaxkv.LayerConfig(num_kv_heads=4, head_dim=8, dtype="int8"),
    jaxkv.LayerConfig(num_kv_heads=2, head_dim=8, dtype="int4"),
    jaxkv.LayerConfig.latent(rank=6, rope_dim=2),
    jaxkv.LayerConfig(num_kv_heads=2, head_dim=8, shares_with=2),
)
CONFIG = jaxkv.CacheConfig(layers=LAYERS, max_seqs=3, max_seq_len=32, num_blocks=16, block_size=4, dtype="float32")
FOUR, TWO = (jaxkv.LayerConfig(num_kv_heads=heads, head_dim=8, bounds=heads == 4) for heads in (4, 2))
SMALL, ONE = CONFIG.replace(layers=(FOUR, TWO)), CONFIG.replace(layers=(TWO,))
# Explicit axes refuse what automatic ones would do in some way or other.
AXES = ["explicit", "auto"] if NIGHTLY else ["explicit"]


def make_mesh(axes, count=4):
    devices = jax.devices()[:count]
    return (
        Mesh(np.array(devices), ("model",)) if axes == "auto" else jax.make_mesh((count,), ("model",), devices=devices)
    )


@contextlib.contextmanager
def on_mesh(axes, count=4):
    """A mesh; with explicit axes, set for what is called outside jit."""
    mesh = make_mesh(axes, count)
    with jax.set_mesh(mesh) if axes == "explicit" else contextlib.nullcontext():
        yield mesh


def assert_same(actual, expected, atol=0.0):
    actual, expected = jax.tree.leaves(actual), jax.tree.leaves(expected)
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        one, other = (np.asarray(x).astype(np.float64) for x in (one, other))
        np.testing.assert_allclose(one, other, rtol=0, atol=atol)


def tokens(config, axes, seed=0):
    """Queries, keys and values of every layer."""
    rng = np.random.default_rng(seed)

    def normal(heads):
        return jnp.asarray(rng.normal(size=(*axes, heads, 8)), jnp.float32)

    q = [normal(HEADS) for _ in config.layers]
    k = [None if layer.shares_with is not None else normal(layer.num_kv_heads) for layer in config.layers]
    return q, k, [None if x is None or layer.rank else x + 1 for x, layer in zip(k, config.layers, strict=True)]


def step(cache, counts, q, k, v, planned=True, **options):
    cache, outs = jaxkv.extend(cache, counts), []
    plan = jaxkv.plan_step(cache, q[0].shape[:-2]) if planned else None
    for i, layer in enumerate(cache.config.layers):
        scale = {"scale": 0.3} if layer.rank else {}
        out, cache = jaxkv.attention(q[i], k[i], v[i], cache, layer=i, step=plan, **scale, **options)
        outs.append(out)
    return outs, cache


@jax.jit
def everything(cache):
    """What steps and functions of rows give, one after another."""
    config, slopes, last = cache.config, jnp.linspace(0.1, 1.0, HEADS), cache.num_layers - 1
    if NIGHTLY:
        outs, cache = step(cache, jnp.array([7, 2, 5]), *tokens(config, (3, 7)), alibi=slopes)
        more, cache = step(cache, jnp.array([1, 3, 1]), *tokens(config, (6,), 1), planned=False)
    else:
        outs = more = []
        cache = jaxkv.append(cache, *tokens(config, (3, 7))[1:], jnp.array([7, 2, 5]))
    decoded, cache = step(cache, jnp.array([1, 1, 1]), *tokens(config, (3,), 2), sinks=3 * slopes, return_lse=True)
    cache = jaxkv.truncate(jaxkv.fork(cache, [0], [2]), jnp.array([32, 2, 9]))
    q = tokens(config, (6,), 1)[0][last]
    read = jaxkv.attend(q, cache, layer=last, causal=False, num_tokens=jnp.array([1, 3, 2])) if NIGHTLY else []
    rows = [jaxkv.gather(cache, 0, layer=i, max_len=9) for i in range(cache.num_layers)]
    raw = jaxkv.gather(cache, 2, layer=1, max_len=9, raw=True) if config.num_layers > 2 else []
    return (outs, more, decoded, read, rows, cache.combined(0), raw), cache


@pytest.mark.timeout(1200 if NIGHTLY else 300)
@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize(
    "config", [CONFIG, SMALL] if NIGHTLY else [CONFIG.replace(layers=(FOUR,))], ids=lambda c: f"{c.num_layers} layers"
)
def test_every_function_gives_what_it_gives_on_one_device(axes, config):
    expected, expected_cache = everything(jaxkv.init(config))
    with on_mesh(axes) as mesh:
        outs, cache = everything(jaxkv.init(config, mesh=mesh))
        assert_same(outs, expected, atol=2e-6)
        assert_same(cache, expected_cache)
        specs = jaxkv.partition_specs(config, mesh)
        assert jax.tree.structure(specs) == jax.tree.structure(cache)
        for x, spec in zip(jax.tree.leaves(cache), jax.tree.leaves(specs), strict=True):
            assert x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim)
        jaxkv.check(cache), jaxkv.check_invariants(cache)
        assert jaxkv.stats(cache) == jaxkv.stats(expected_cache) and repr(cache) == repr(expected_cache)
        if NIGHTLY:
            emptied, host = jaxkv.swap_out(cache, 0)
            assert_same(jaxkv.gather(jaxkv.swap_in(emptied, 0, host), 0, layer=0), jaxkv.gather(cache, 0, layer=0))


@pytest.mark.skipif(not NIGHTLY, reason="many small programs")
@pytest.mark.parametrize("axes", AXES)
def test_outside_jit(axes, tmp_path):
    """Files, single tokens and a user's tests; what is saved from one cache is loaded into the other."""
    expected = jaxkv.append(jaxkv.init(SMALL), *tokens(SMALL, (3, 7))[1:], [7, 2, 5])
    jaxkv.save(tmp_path / "one", expected)
    with on_mesh(axes) as mesh:
        cache = jaxkv.load(tmp_path / "one", into=jaxkv.init(SMALL, mesh=mesh))
        assert cache.pools[0].kv.sharding.spec[2] == "model"
        assert_same(cache, jaxkv.load(tmp_path / "one"))
        jaxkv.save(tmp_path / "many", cache)
        assert (tmp_path / "one").read_bytes() == (tmp_path / "many").read_bytes()
        assert_same(cache.load(0, 0, 3, 6), expected.load(0, 0, 3, 6))
        changes = [lambda c: c.store(0, 0, 3, 6, jnp.ones(8), jnp.ones(8)), testing.poison, testing.permute_blocks]
        for change in changes if NIGHTLY else changes[:2]:
            assert_same(change(cache).pools, change(jaxkv.load(tmp_path / "one")).pools)


def test_scales_lie_where_their_numbers_lie():
    specs, divided = jaxkv.partition_specs(CONFIG, make_mesh("auto")), P(None, None, "model")
    places = [None if pool is None else (pool.kv, pool.scale) for pool in specs.pools]
    assert places == [(divided, None), (divided, divided), (P(), P()), (P(), None), None]


@pytest.mark.parametrize("axes", AXES)
def test_inside_a_shard_map(axes):
    """With `check_vma`: k and v come divided as the pools are."""
    config, axes_of_tokens = (CONFIG.replace(layers=LAYERS[1:4]), (3, 5)) if NIGHTLY else (ONE, (3, 1))
    given, counts = tokens(config, axes_of_tokens), jnp.minimum(jnp.array([5, 2, 3]), axes_of_tokens[1])
    expected = jax.jit(step)(jaxkv.init(config), counts, *given)
    with on_mesh(axes) as mesh:
        specs, heads = jaxkv.partition_specs(config, mesh), P(None, None, "model")
        kv = [heads if layer.num_kv_heads == 4 else P() for layer in config.layers]
        local = jax.shard_map(step, mesh=mesh, in_specs=(specs, P(), heads, kv, kv), out_specs=(heads, specs))
        arguments = jax.device_put(given, on(mesh, ([heads] * config.num_layers, kv, kv)))
        actual = jax.jit(local)(jaxkv.init(config, mesh=mesh), counts, *arguments)
    assert_same(actual, expected, atol=2e-6)


def on(mesh, specs):
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


@pytest.mark.skipif(not NIGHTLY, reason="its programs take long to compile")
def test_one_program_for_all_steps_and_layers_in_a_scan():
    """Stacked pools are carried, and what a step returns lies as what it was given."""
    config = jaxkv.CacheConfig(
        layers=SMALL.layers[:1] * 3, max_seqs=3, max_seq_len=32, num_blocks=16, block_size=4, stacked=True
    )

    def decode(cache, q, kv):
        cache = jaxkv.extend(cache, jnp.ones(3, jnp.int32))
        plan = jaxkv.plan_step(cache, (3, 1))

        def layer(carry, i):
            x, cache = carry
            return jaxkv.attention(x, kv, kv, cache, layer=i, step=plan), None

        return jax.lax.scan(layer, (q, cache), jnp.arange(3))[0]

    q, k, _ = tokens(config, (3, 1))
    results, program = [], jax.jit(decode, donate_argnums=0)
    for number, mesh in enumerate((None, make_mesh("auto")), 1):
        cache = jaxkv.init(config, mesh=mesh)
        for _ in range(3):
            out, cache = program(cache, q[0], k[0])
        assert program._cache_size() == number
        results.append((out, cache))
    assert_same(*results, atol=2e-6)


MOVES = re.compile(r"= .*? (all-gather|all-to-all|collective-permute|reduce-scatter|all-reduce)(?:-start)?\(")


def compiled_decode(mesh, config, cache, layers=2):
    """The text of a decode step's program, and what it takes."""
    q = jax.ShapeDtypeStruct((4, 1, 8, 8), jnp.float32, sharding=NamedSharding(mesh, P(None, None, "model")))
    k = jnp.ones((4, 1, config.layers[0].num_kv_heads, 8))

    def decode(cache, q, k):
        cache = jaxkv.extend(cache, jnp.ones(4, jnp.int32))
        for i in range(layers):
            q, cache = jaxkv.attention(q, k, k, cache, layer=i)
        return q, cache

    return jax.jit(decode, donate_argnums=0).lower(cache, q, k).compile()


@pytest.mark.parametrize(("axes", "num_kv_heads"), [("auto", 4), *[("auto", 2), ("explicit", 4)] * NIGHTLY])
def test_no_pool_is_moved(axes, num_kv_heads):
    layer = jaxkv.LayerConfig(num_kv_heads=num_kv_heads, head_dim=8)
    config = jaxkv.CacheConfig(
        layers=(layer,) * 2, max_seqs=4, max_seq_len=64, num_blocks=1024, block_size=16, dtype="float32"
    )
    with on_mesh(axes) as mesh:
        cache = jaxkv.init(config, mesh=mesh)
        program = compiled_decode(mesh, config, cache)
    parts = 4 if num_kv_heads == 4 else 1
    assert not MOVES.search(program.as_text())
    assert program.memory_analysis().alias_size_in_bytes >= config.bytes // parts
    assert program.memory_analysis().temp_size_in_bytes < config.bytes // parts // 8


def test_a_bad_spec_is_seen():
    """The same test, of pools that lie in another way."""
    layer = jaxkv.LayerConfig(num_kv_heads=4, head_dim=8)
    config = jaxkv.CacheConfig(
        layers=(layer,), max_seqs=4, max_seq_len=64, num_blocks=1023, block_size=16, dtype="float32"
    )
    mesh = make_mesh("auto")
    cache = jaxkv.init(config, mesh=mesh)
    kv = jax.device_put(cache.pools[0].kv, NamedSharding(mesh, P("model")))
    text = compiled_decode(
        mesh, config, cache.replace(pools=(dataclasses.replace(cache.pools[0], kv=kv),)), 1
    ).as_text()
    assert MOVES.search(text)


@pytest.mark.skipif(not NIGHTLY, reason="its programs take long to compile")
def test_gradients():
    """Of queries, new keys and values, with a scale that is an array."""
    config = SMALL.replace(layers=(jaxkv.LayerConfig(num_kv_heads=4, head_dim=8),))
    (q,), (k,), _ = tokens(config, (3, 4))

    def loss(q, k, scale, cache):
        cache = jaxkv.extend(cache, jnp.array([4, 1, 3]))
        out, _ = jaxkv.attention(q, k, k, cache, layer=0, scale=scale)
        return jnp.sum(out * jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape))

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    expected = gradient(q, k, jnp.float32(0.3), jaxkv.init(config))
    actual = gradient(q, k, jnp.float32(0.3), jaxkv.init(config, mesh=make_mesh("auto")))
    assert_same(actual, expected, atol=1e-5)


def test_bad_meshes():
    config, mesh = SMALL, make_mesh("auto")
    with pytest.raises(
        ValueError,
        match="heads='tensor' is no axis of the mesh, which has 'model': say heads='model' to divide KV heads",
    ):
        jaxkv.init(config, mesh=mesh, heads="tensor")
    with pytest.raises(ValueError, match=r"laid out over the devices of a .*Mesh, but there is none: give"):
        jaxkv.partition_specs(config)
    with pytest.raises(ValueError, match="but not 4: give mesh="):
        jaxkv.init(config, mesh=4)
    odd = config.replace(layers=(jaxkv.LayerConfig(num_kv_heads=6, head_dim=8),))
    with pytest.raises(ValueError, match="6 KV heads cannot be divided among the 4 devices of the mesh axis 'model'"):
        jaxkv.partition_specs(odd, mesh)
    cache, kv = jaxkv.init(config, mesh=mesh), jnp.ones((3, 1, 4, 8))
    moved = jax.device_put(cache, NamedSharding(Mesh(np.array(jax.devices()[:2]), ("rows",)), P()))
    write, attention, attend = (functools.partial(f, layer=0) for f in (jaxkv.write, jaxkv.attention, jaxkv.attend))
    with pytest.raises(ValueError, match="made for a mesh with the axis 'model', but its pools lie on one with 'rows'"):
        jax.jit(lambda cache: write(cache, kv, kv)).trace(moved)
    for heads, q_heads, match in ((3, 8, "k has 3 heads, but the pool"), (4, 6, "6 query heads cannot be shared")):
        kv = jnp.ones((3, 1, heads, 8))
        with pytest.raises(ValueError, match=match):
            jax.jit(lambda cache, kv=kv, h=q_heads: attention(jnp.ones((3, 1, h, 8)), kv, kv, cache)).trace(cache)
    with pytest.raises(ValueError, match="sinks must have one entry for each of the 8 query heads"):
        jax.jit(lambda cache: attend(jnp.ones((3, 1, 8, 8)), cache, sinks=jnp.ones(3))).trace(cache)


@pytest.mark.skipif(not NIGHTLY, reason="many small programs")
def test_a_cache_of_a_mesh_on_one_device():
    """Brought to one device, it is a cache like any other."""
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    cache = jax.device_put(jaxkv.init(SMALL, mesh=make_mesh("auto")), one)
    kv = tokens(SMALL, (3, 2))[1]
    assert_same(jaxkv.append(cache, kv, kv, [2, 1, 0]), jaxkv.append(jaxkv.init(SMALL), kv, kv, [2, 1, 0]))
