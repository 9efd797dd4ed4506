"""Rows over several devices: on each a cache of its own, which computes bit by bit what it would compute alone."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from nightly import NIGHTLY
from steps import gather_row
from test_shards import MOVES, assert_same, step, tokens

import jaxkv

LAYER, LOCAL = (jaxkv.LayerConfig(num_kv_heads=2, head_dim=8, window=window) for window in (None, 5))
# Four rows, two on each device, and four blocks for them.
CONFIG = jaxkv.CacheConfig(
    layers=(LAYER, LOCAL)[: 1 + NIGHTLY], max_seqs=4, max_seq_len=32, num_blocks=8, block_size=4, dtype="float32"
)
ONE = CONFIG.replace(max_seqs=2, num_blocks=4)
COUNTS = np.array([7, 2, 2, 15], np.int32)  # the last one finds too few blocks, though the other device has some


def make_mesh(axes="auto", **sizes):
    devices = jax.devices()[: math.prod(sizes.values())]
    if axes == "explicit":
        return jax.make_mesh(tuple(sizes.values()), tuple(sizes), devices=devices)
    return Mesh(np.array(devices).reshape(*sizes.values()), tuple(sizes))


def run(scale, cache, counts, *given):
    """A step, and a number; by night a fork of the device's first row too."""
    out, cache = step(cache, counts, *given, return_lse=True, scale=scale[0])
    return out, jaxkv.fork(cache, [0], [1]) if NIGHTLY else cache, cache.blocks_in_use


def assert_as_alone(mesh, axes_of_tokens, atol=0.0, **axes):
    parts = [tokens(CONFIG, axes_of_tokens, seed) for seed in range(2)]
    whole = jax.tree.map(lambda *x: jnp.concatenate(x), *parts)
    scale = jnp.full(1, 0.3)
    with jax.set_mesh(mesh):
        cache = jaxkv.init(CONFIG, mesh=mesh, rows="data", **axes)
        arguments = (scale, cache, jnp.asarray(COUNTS), *whole)
        compiled = jax.jit(jaxkv.by_rows(run, whole=(0,)), donate_argnums=1).lower(*arguments).compile()
        out, cache, used = compiled(*arguments)
    alone = jax.jit(run)
    for i, (part, shard) in enumerate(zip(parts, cache.shards, strict=True)):
        expected, one, in_use = alone(scale, jaxkv.init(ONE), COUNTS[2 * i : 2 * i + 2], *part)
        assert_same([np.split(np.asarray(x), 2)[i] for x in jax.tree.leaves(out)], expected, atol)
        assert_same(shard, one)
        assert repr(shard) == repr(one) and jax.device_get(used)[i] == in_use
        jaxkv.check_invariants(shard)
    return compiled, cache


def files(cache, mesh, path):
    """What is saved of all of them is loaded into one cache, and into others, row by row."""
    rows = [2, 0, 1]
    jaxkv.save(path, cache, rows)
    lengths = [len(held(cache, row)[0]) for row in rows]
    one = jaxkv.load(path, ONE.replace(max_seqs=3, num_blocks=8))
    assert jaxkv.describe(path).lengths == tuple(lengths) == tuple(one.lengths.tolist()) and sum(lengths) > 5
    empty = jaxkv.init(CONFIG, mesh=mesh, rows="data")
    back = jaxkv.load(path, into=empty, rows=[1, 3, 2])
    again = jaxkv.load(path, into=empty)  # where they have been
    for i, row in enumerate(rows):
        for x, *others in zip(held(cache, row), held(one, i), held(back, [1, 3, 2][i]), held(again, i), strict=True):
            assert all(np.array_equal(x, other) for other in others)
    for shard in (*back.shards, *again.shards):
        jaxkv.check_invariants(shard)
    assert {x.sharding for x in jax.tree.leaves(back)} == {x.sharding for x in jax.tree.leaves(empty)}
    full = empty.with_shards([jaxkv.extend(empty.shards[0], [15, 0])] * 2)  # the first one's is copied to the second
    assert {x.sharding for x in jax.tree.leaves(full)} == {x.sharding for x in jax.tree.leaves(empty)}
    with pytest.raises(jaxkv.CacheFileError, match=r"need 2 blocks of 4 tokens, but 0 are free: raise the cache's "):
        jaxkv.load(path, into=full, rows=[None, 3, None])
    with pytest.raises(ValueError, match=r"with_shards takes 2 caches of the config of cache\.shards"):
        cache.with_shards(cache.shards[:1])


def held(cache, row):
    """A row's keys and values, layer by layer."""
    if isinstance(cache, jaxkv.RowShards):
        cache, row = cache.shards[row // ONE.max_seqs], row % ONE.max_seqs
    return [x for layer in range(CONFIG.num_layers) for x in gather_row(cache, row, layer)]


def test_each_device_computes_as_if_it_were_alone(tmp_path):
    mesh = make_mesh(data=2)
    compiled, cache = assert_as_alone(mesh, (2, 15))
    assert not MOVES.search(compiled.as_text())
    assert compiled.memory_analysis().alias_size_in_bytes >= ONE.bytes
    if not NIGHTLY:  # then that row has become what the one beside it is
        assert [shard.failed.tolist() for shard in cache.shards] == [[False, False], [False, True]]
        with pytest.raises(jaxkv.OutOfBlocks):
            jaxkv.check(cache.shards[1])
    held = sum(x.addressable_shards[1].data.nbytes for x in jax.tree.leaves(cache.pools))
    assert held == ONE.bytes
    specs = jaxkv.partition_specs(CONFIG, mesh, rows="data")
    assert jax.tree.structure(specs) == jax.tree.structure(cache)
    assert {spec[0] for spec in jax.tree.leaves(specs)} == {"data"}
    files(cache, mesh, tmp_path / "rows")
    # One cache is not another, and says what to do.
    with pytest.raises(ValueError, match=r"the rows of this one are divided over a mesh axis: call .* inside"):
        jaxkv.extend(cache, [1] * 4)
    with pytest.raises(ValueError, match=r"Argument 1 .* shape \(3,\), whose first axis cannot .* name .* in whole="):
        jaxkv.by_rows(jaxkv.extend)(cache, jnp.ones(3, jnp.int32))


@pytest.mark.parametrize("axes", ["auto", "explicit"])
def test_files_where_a_mesh_is_set(axes, tmp_path):
    mesh, path = make_mesh(axes, data=2), tmp_path / "rows"
    with jax.set_mesh(mesh):
        cache = jaxkv.init(CONFIG, mesh=mesh, rows="data")
        cache = jax.jit(jaxkv.by_rows(jaxkv.extend))(cache, np.array([7, 2, 2, 4], np.int32))
        jaxkv.save(path, cache)
        back = jaxkv.load(path, into=jaxkv.init(CONFIG, mesh=mesh, rows="data"))
        assert jax.sharding.get_abstract_mesh().axis_names == ("data",)
    assert [shard.lengths.tolist() for shard in back.shards] == [[7, 2], [2, 4]]


@pytest.mark.skipif(not NIGHTLY, reason="its programs take long to compile")
@pytest.mark.parametrize(
    ("axes", "other"),
    [
        ("auto", "none"),
        ("explicit", "none"),
        ("auto", "model"),
        ("auto", "context"),
        ("explicit", "model"),
        ("explicit", "context"),
    ],
)
def test_packed_tokens_and_other_axes(axes, other):
    sizes = {"data": 2} | ({} if other == "none" else {other: 2})
    mesh = make_mesh(axes, **sizes)
    named = {"context": "context"} if other == "context" else {}
    _, cache = assert_as_alone(mesh, (17,), 0.0 if other == "none" else 2e-6, **named)
    with jax.set_mesh(mesh):
        assert len(cache.shards) == 2
    assert cache.pools[0].kv.sharding.shard_shape(cache.pools[0].kv.shape)[0] == 5


def test_bad_meshes():
    mesh = make_mesh(data=2)
    with pytest.raises(ValueError, match="max_seqs=3 cannot be divided among the 2 devices of the mesh axis 'data'"):
        jaxkv.init(CONFIG.replace(max_seqs=3), mesh=mesh, rows="data")
    with pytest.raises(ValueError, match="num_blocks=7 cannot be divided among the 2 devices"):
        jaxkv.partition_specs(CONFIG.replace(num_blocks=7), mesh, rows="data")
    with pytest.raises(
        ValueError, match="rows='model' is no axis of the mesh, which has 'data': say rows='data' to divide rows"
    ):
        jaxkv.init(CONFIG, mesh=mesh, rows="model")
    with pytest.raises(ValueError, match="rows needs mesh=, the devices that it names an axis of"):
        jaxkv.init(CONFIG, rows="data")
    with pytest.raises(ValueError, match=r"by_rows needs a cache whose rows are divided.*, but there are \['Cache'"):
        jaxkv.by_rows(jaxkv.extend)(jaxkv.init(ONE), jnp.ones(2, jnp.int32))
    cache = jaxkv.init(CONFIG, mesh=mesh, rows="data")
    with pytest.raises(ValueError, match=r"Argument 1 .* single number, .* make an array of a list of numbers"):
        jaxkv.by_rows(jaxkv.extend)(cache, [1] * CONFIG.max_seqs)
    with pytest.raises(TypeError, match="by position, but num_tokens came by name"):
        jaxkv.by_rows(jaxkv.extend)(cache, num_tokens=jnp.ones(CONFIG.max_seqs, jnp.int32))
