"""Layers that evict by heads over several devices: each has the blocks of its own heads, and gives them back itself."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from nightly import NIGHTLY

import jaxkv
from jaxkv.testing import permute_blocks, poison

ROWS, SIZE, HEADS = 3, 4, 4
skip_by_day = pytest.mark.skipif(not NIGHTLY, reason="many small programs")
LAYER = jaxkv.LayerConfig(num_kv_heads=HEADS, head_dim=8, evict="head")
CONFIG = jaxkv.CacheConfig(
    layers=(LAYER,), max_seqs=ROWS, max_seq_len=32, num_blocks=20, block_size=SIZE, dtype="float32"
)
MIXED = CONFIG.replace(
    layers=(
        jaxkv.LayerConfig(num_kv_heads=HEADS, head_dim=8, evict="layer"),
        jaxkv.LayerConfig(num_kv_heads=HEADS, head_dim=8, evict="head", dtype="int8"),
        jaxkv.LayerConfig(num_kv_heads=HEADS, head_dim=8, shares_with=1),
        jaxkv.LayerConfig(num_kv_heads=2, head_dim=8, evict="head"),
    ),
    head_dim_multiple=16,
    join_kv=True,
)


SPANS = jnp.array([[1, 1], [0, 0], [2, 0]])


def make_mesh(count=2, kind=jax.sharding.AxisType.Auto):
    return jax.make_mesh((count,), ("model",), devices=jax.devices()[:count], axis_types=(kind,))


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def keys(config, axes, seed=0):
    return [
        None if one.shares_with is not None else jnp.asarray(normal(seed + i, *axes, one.num_kv_heads, 8))
        for i, one in enumerate(config.layers)
    ]


def kept(config, layer, seed):
    one = config.layers[layer]
    shape = (ROWS, one.num_kv_heads, 32) if one.evict == "head" else (ROWS, 32)
    return jnp.asarray(np.random.default_rng(seed).random(shape) < 0.4)


def evict(cache, seed):
    for i, one in enumerate(cache.config.layers):
        if one.evict is not None:
            cache = jaxkv.evict(cache, kept(cache.config, i, seed), layer=i)
    return cache


def step(cache, counts, axes, seed, **options):
    cache, outs = jaxkv.extend(poison(cache), counts), []
    plan = jaxkv.plan_step(cache, axes)
    for i, k in enumerate(keys(cache.config, axes, seed)):
        q = jnp.asarray(normal(seed + 50 + i, *axes, 3 * HEADS, 8))
        out, cache = jaxkv.attention(
            q, k, None if k is None else k + 1, cache, layer=i, step=plan, return_lse=True, **options
        )
        outs.append(out)
    return outs, cache


@jax.jit
def everything(cache):
    """What steps give before and after evictions, and what rows hold after all kinds of changes."""
    k = keys(cache.config, (ROWS, 13))
    cache = jaxkv.append(cache, k, k, jnp.array([13, 5, 9]))
    cache = evict(cache, 1)
    padded, cache = step(cache, jnp.array([2, 1, 1]), (ROWS, 2), 20, spans=SPANS) if NIGHTLY else ([], cache)
    cache = jaxkv.free(cache, jnp.array([False, True, False]))
    cache = evict(jaxkv.fork(cache, [2], [1]), 2)  # of which some blocks are shared, and copied
    decoded, cache = step(cache, jnp.array([1, 1, 0]), (5,), 30)
    if NIGHTLY:
        cache = jaxkv.reorder(cache, jnp.array([1, 0, 2]))
        cache, _ = step(cache, jnp.array([0, 0, 6]), (6,), 40)[::-1]
        cache = jaxkv.truncate(cache, jnp.array([32, 32, 12]))
    held = [
        (cache.separate(i), cache.layers[i].held, jaxkv.gather(cache, 1, layer=i, max_len=9))
        for i in range(cache.num_layers)
    ]
    return padded, decoded, held, cache.lengths, cache.blocks_in_use, cache


@pytest.mark.parametrize(
    ("config", "count", "kind"),
    [
        (CONFIG, 2, "Explicit"),
        pytest.param(CONFIG, 4, "Auto", marks=skip_by_day),
        pytest.param(MIXED.replace(join_kv="head"), 4, "Auto", marks=skip_by_day),
        pytest.param(MIXED, 2, "Explicit", marks=skip_by_day),
    ],
    ids=["two", "four", "mixed over four", "mixed over two"],
)
def test_everything_is_as_on_one_device(config, count, kind):
    *expected, one = everything(jaxkv.init(config))
    with jax.set_mesh(mesh := make_mesh(count, jax.sharding.AxisType[kind])):
        specs, empty = jaxkv.partition_specs(config, mesh), jaxkv.init(config, mesh=mesh)
        *found, cache = everything(empty)
        for actual, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(np.asarray(actual), np.asarray(wanted), atol=2e-6)
        jaxkv.check(cache), jaxkv.check_invariants(cache)
        pool = cache.pools[-1 if config is CONFIG else 1]
        assert pool.num_shards == count and pool.kv.addressable_shards[0].data.nbytes * count == pool.kv.nbytes
        assert jax.tree.structure(specs) == jax.tree.structure(cache)
        for x, spec in zip(jax.tree.leaves(cache), jax.tree.leaves(specs), strict=True):
            assert x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim)
        stats, theirs = jaxkv.stats(cache), jaxkv.stats(one)
        for name in ("blocks_used", "blocks_free", "waste_per_row", "tokens_per_row"):
            assert stats[name] == theirs[name]


MOVES = re.compile(r"= .*? (all-gather|all-to-all|collective-permute|reduce-scatter|all-reduce)(?:-start)?\(")


def test_attention_write_and_evict_move_nothing():
    config = CONFIG.replace(num_blocks=512, block_size=16, max_seq_len=64)
    mesh = make_mesh()
    cache = jaxkv.init(config, mesh=mesh)
    heads = NamedSharding(mesh, P(None, None, "model"))
    q, k = (jax.ShapeDtypeStruct((ROWS, 1, n, 8), jnp.float32, sharding=heads) for n in (2 * HEADS, HEADS))

    def decode(cache, q, k):
        return jaxkv.attention(q, k, k, jaxkv.extend(cache, jnp.ones(ROWS, jnp.int32)), layer=0)

    own, keep = cache.pools[0].kv.nbytes // 2, jax.ShapeDtypeStruct((ROWS, HEADS, 64), jnp.bool_)
    for function, *arguments in ((decode, q, k), (lambda cache, keep: jaxkv.evict(cache, keep, layer=0), keep)):
        program = jax.jit(function, donate_argnums=0).lower(cache, *arguments).compile()
        assert not MOVES.search(program.as_text())
        assert program.memory_analysis().alias_size_in_bytes >= own > 8 * program.memory_analysis().temp_size_in_bytes


def test_a_row_takes_blocks_of_its_heads_devices_alone():
    """One device has blocks for no more, whatever the other has."""
    config = CONFIG.replace(num_blocks=3, group_blocks=(12,))  # 3 for each head, 6 for each device
    mesh = make_mesh()
    cache = jaxkv.extend(jaxkv.init(config, mesh=mesh), [9, 0, 0])
    keep = np.ones((ROWS, HEADS, 32), bool)
    keep[0, :2] = False  # the first device's heads give everything back
    cache = jaxkv.extend(jaxkv.evict(cache, keep, layer=0), [0, 1, 0])
    assert cache.tables[0].num_free.tolist() == [6, 0] and cache.failed.tolist() == [False, True, False]
    says = (
        r"Row 1 \(0 tokens, 0 blocks\) needs 2 more blocks for 1 token, but 0 of 6 blocks are free on one of 2 devices"
    )
    with pytest.raises(jaxkv.OutOfBlocks, match=says):
        jaxkv.check(cache)
    jaxkv.check_invariants(cache)
    with pytest.raises(ValueError, match=r"The 13 blocks of layer 0, .* among the 2 devices of the mesh axis 'model'"):
        jaxkv.init(config.replace(group_blocks=(13,)), mesh=mesh)
    with pytest.raises(ValueError, match="over the mesh axis 'model', and cannot be over 'rows' too: give these"):
        jaxkv.partition_specs(CONFIG.replace(max_seqs=2), jax.make_mesh((2, 2), ("rows", "model")), rows="rows")


@skip_by_day
def test_rows_that_go_elsewhere_and_come_back(tmp_path):
    """To the host, to files, to a cache on one device; and in other blocks."""
    mesh = make_mesh()
    one, many = (
        evict(jaxkv.append(cache, kv := keys(CONFIG, (ROWS, 13)), kv, jnp.array([13, 5, 9])), 1)
        for cache in (jaxkv.init(CONFIG), jaxkv.init(CONFIG, mesh=mesh))
    )

    def same(cache, like=one):
        jaxkv.check(cache), jaxkv.check_invariants(cache)
        np.testing.assert_array_equal(np.asarray(cache.separate(0)), np.asarray(like.separate(0)))
        assert cache.layers[0].held.tolist() == like.layers[0].held.tolist()

    emptied, host = jaxkv.swap_out(many, [2, 0])
    same(jaxkv.swap_in(emptied, [2, 0], host))
    same(jaxkv.swap_in(jaxkv.free(one, [0, 2]), [2, 0], host))
    full = jaxkv.init(CONFIG.replace(group_blocks=(4,)), mesh=mesh)
    assert jaxkv.swap_in(full, [2, 0], host).failed.tolist() == [False, False, True]
    jaxkv.save(tmp_path / "many", many), jaxkv.save(tmp_path / "one", one)
    same(jaxkv.load(tmp_path / "many"))
    same(jaxkv.load(tmp_path / "one", into=jaxkv.init(CONFIG, mesh=mesh)))
    same(jaxkv.load(tmp_path / "many", into=jaxkv.init(CONFIG.replace(block_size=2, num_blocks=40), mesh=mesh)))
    with pytest.raises(jaxkv.CacheFileError, match="blocks of 4 tokens, but 2 are free"):
        jaxkv.load(tmp_path / "one", into=full)
    for source, target in ((one, many), (many, one)):
        same(jaxkv.send(source, [0, 1, 2], to=jaxkv.free(target, [0, 1, 2])), source)
    same(permute_blocks(many))
    moved = jax.device_put(many, jax.sharding.SingleDeviceSharding(jax.devices()[3]))
    same(moved)
    axes, counts = (ROWS, 1), jnp.ones(ROWS, jnp.int32)
    for (out, _), (expected, _) in zip(step(moved, counts, axes, 20)[0], step(one, counts, axes, 20)[0], strict=True):
        np.testing.assert_allclose(out, expected, atol=2e-6)
    same(jaxkv.fork(moved, [0], [1]), jaxkv.fork(one, [0], [1]))
    np.testing.assert_array_equal(many.token(0, 1)[0], one.token(0, 1)[0])
    stored = many.store(0, 0, 3, 1, jnp.ones(8), jnp.zeros(8))
    np.testing.assert_array_equal(stored.load(0, 0, 3, 1)[0], np.ones(8))
    np.testing.assert_array_equal(stored.load(0, 0, 2, 1)[0], one.load(0, 0, 2, 1)[0])
    assert "row 0: 13 tokens" in many._repr_html_() and jaxkv.stats(many)["blocks_peak"] >= many.blocks_in_use


@skip_by_day
def test_of_a_tree_the_accepted_path_is_kept():
    def grow(cache):
        k = keys(CONFIG, (ROWS, 5), 60)
        cache = jaxkv.append(evict(cache, 1), k, k, jnp.array([5, 4, 0]))
        return jaxkv.keep(cache, jnp.array([[0, 3, 4], [1, -1, -1], [-1, -1, -1]]))

    grow = jax.jit(grow)
    one, many = grow(jaxkv.init(CONFIG)), grow(jaxkv.init(CONFIG, mesh=make_mesh()))
    np.testing.assert_array_equal(one.separate(0), many.separate(0))


@skip_by_day
@pytest.mark.parametrize("count", [2, 4])
def test_inside_a_shard_map(count):
    """With `check_vma`: k and v come divided as the heads are."""

    def run(cache, keep, q, k):
        cache = jaxkv.evict(jaxkv.append(cache, k, k, jnp.array([13, 5, 9])), keep, layer=0)
        cache = jaxkv.extend(cache, jnp.ones(ROWS, jnp.int32))
        return jaxkv.attention(q, k[0][:, :1], k[0][:, :1], cache, layer=0)

    q, k, keep = jnp.asarray(normal(5, ROWS, 1, 2 * HEADS, 8)), keys(CONFIG, (ROWS, 13)), kept(CONFIG, 0, 1)
    expected, one = jax.jit(run)(jaxkv.init(CONFIG), keep, q, k)
    mesh, heads = make_mesh(count), P(None, None, "model")
    specs = jaxkv.partition_specs(CONFIG, mesh)
    local = jax.shard_map(run, mesh=mesh, in_specs=(specs, P(), heads, [heads]), out_specs=(heads, specs))
    out, cache = jax.jit(local)(jaxkv.init(CONFIG, mesh=mesh), keep, q, k)
    np.testing.assert_allclose(out, expected, atol=2e-6)
    np.testing.assert_array_equal(cache.separate(0), one.separate(0))
