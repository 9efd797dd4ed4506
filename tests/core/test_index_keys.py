"""Index keys lie in the blocks of their layer, and go with them wherever keys and values go."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from nightly import NIGHTLY

import jaxkv
import jaxkv.convert
from jaxkv import LayerConfig
from jaxkv.testing import assert_no_copy, permute_blocks, poison

ROWS, K, D, E, PLACES = 3, 2, 6, 5, 9
LAYERS = (
    LayerConfig(num_kv_heads=K, head_dim=D, index_dim=E),
    LayerConfig.latent(rank=4, rope_dim=2, index_dim=E),
    LayerConfig(num_kv_heads=K, head_dim=D),
    LayerConfig(num_kv_heads=K, head_dim=D, index_dim=3, window=6),
)
LENGTHS = np.array([9, 5, 0], np.int32)


def make_config(**fields):
    sizes = {} if "layout" in fields else {"num_blocks": 24, "block_size": 4}
    return jaxkv.CacheConfig(
        **({"layers": LAYERS, "max_seqs": ROWS, "max_seq_len": 24, "dtype": "float32"} | sizes | fields)
    )


def draw(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@functools.cache
def index_keys(layer, width):
    return draw(layer, ROWS, PLACES, width)


def put_index(cache, first=0, count=PLACES):
    for i, layer in enumerate(cache.config.layers):
        if layer.index_dim is not None and layer.shares_with is None:
            new = index_keys(i, layer.index_dim)[:, first : first + count]
            cache = jaxkv.write_index(cache, new, layer=i)
    return cache


def fill(cache):
    heads = [(1, x.head_dim) if x.rank else (K, x.head_dim) for x in cache.config.layers]
    k = [draw(9, ROWS, PLACES, *shape) for shape in heads]
    v = [None if x.rank else y for x, y in zip(cache.config.layers, k, strict=True)]
    return put_index(jaxkv.append(cache, k, v, LENGTHS))


filling = jax.jit(fill)


@functools.cache
def make_filled(**fields):
    return poison(filling(jaxkv.init(make_config(**fields))))


def read_index(cache, row, layer):
    """The index keys that a row holds, `[length, E]`; NaN of those that were given back."""
    count, pool = int(cache.layer(layer).held[row]), cache.pool(layer)
    block, offset = (np.asarray(x) for x in cache.slots(row, np.arange(count), layer=layer))
    keys, scale, kind = pool.index.keys, pool.index.scale, cache.config.index_kind(layer)
    found = np.asarray(kind.from_bits(keys[block, 0, 0, offset, : cache.config.index_dim(layer)]), np.float32)
    found = found if scale is None else found * np.asarray(scale[block, 0, 0, offset])[:, None]
    return np.where((block == 0)[:, None], np.nan, found)


def assert_same_keys(cache, rows=((0, 0), (1, 1)), atol=0.0, lengths=LENGTHS):
    """Each row holds the index keys that were given for another one."""
    for layer, found in enumerate(cache.config.layers):
        if found.index_dim is None:
            continue
        for row, of in rows:
            first = 0 if found.window is None else max(0, int(lengths[of]) + 1 - found.window)
            keys = read_index(cache, row, layer)
            assert len(keys) == lengths[of]
            wanted = index_keys(layer, found.index_dim)[of, first : len(keys)]
            np.testing.assert_allclose(keys[first:], wanted, atol=atol, rtol=0)


FORMATS = {
    "float32": 0.0, "bfloat16": 0.02, "int8": 0.02, "float8_e4m3fn": 0.2, "float8_e5m2": 0.4, "int4": 0.02,
    "k5v3": 0.02,
}  # fmt: skip


@pytest.mark.parametrize("dtype", FORMATS if NIGHTLY else ["bfloat16", "int8", "int4"])
def test_in_every_format(dtype):
    cache = make_filled(dtype=dtype)
    assert_same_keys(cache, atol=FORMATS[dtype])
    jaxkv.check_invariants(cache)
    index = cache.pools[0].index
    assert (index.scale is None) == (dtype in ("float32", "bfloat16"))
    assert index.scale is None or index.scale.shape == index.keys.shape[:-1], "one scale a token"


@pytest.mark.parametrize("fields", [{"head_dim_multiple": 16}, {"layout": "contiguous"}, {"join_kv": True}], ids=str)
def test_in_every_layout(fields):
    fields |= {"head_dim_multiple": 16} if "join_kv" in fields else {}
    cache = make_filled(**fields)
    assert_same_keys(cache)
    jaxkv.check_invariants(cache)


def test_bytes_are_counted():
    layer, sizes = LAYERS[0], dict(num_blocks=10, block_size=16, max_seqs=1, max_seq_len=64, head_dim_multiple=1)
    for dtype, wide, narrow in (("bfloat16", 2, 0), ("int8", 1, 4), ("int4", 1, 4)):
        with_index, without = (
            jaxkv.CacheConfig(layers=(dataclasses.replace(layer, index_dim=n),), dtype=dtype, **sizes)
            for n in (128, None)
        )
        assert with_index.bytes_per_block - without.bytes_per_block == 16 * (128 * wide + narrow)
        assert with_index.index_bytes_per_block(0) == 16 * (128 * wide + narrow)
        assert jaxkv.init(with_index).bytes == with_index.bytes
        assert jaxkv.stats(jaxkv.init(with_index))["bytes"] == with_index.bytes
        assert with_index.bytes_per_block_read(0) == without.bytes_per_block_read(0)
        assert with_index.dense_bytes > without.dense_bytes
        assert with_index.with_memory(100_000).bytes <= 100_000
    assert "index bfloat16[11, 1, 1, 16, 128]" in repr(jaxkv.init(with_index.replace(dtype="bfloat16")).pools[0])
    assert LayerConfig.latent(index_dim=128).index_dim == 128


def test_only_a_step_s_tokens_are_written_and_nothing_is_copied():
    cache = jaxkv.extend(make_filled(), [1, 2, 0])
    new = np.full((ROWS, 2, E), 7, np.float32)
    written = jaxkv.write_index(cache, new, layer=0)
    before, after = (np.asarray(x.pools[0].index.keys) for x in (cache, written))
    changed = np.argwhere(((before != after) & ~(np.isnan(before) & np.isnan(after))).any(axis=-1))[:, [0, 3]]
    wanted = [[int(x) for x in cache.slots(row, at, layer=0)] for row, at in ((0, 9), (1, 5), (1, 6))]
    assert sorted(changed.tolist()) == sorted(wanted)
    assert written.pools[0].kv is cache.pools[0].kv
    packed, step = np.concatenate([new[0, :1], new[1], new[0, :1]]), jaxkv.plan_step(cache, (4,))
    for same in (
        jaxkv.write_index(cache, packed, layer=0).pools[0],
        jaxkv.write_index(cache, packed, layer=0, step=step).pools[0],
        jaxkv.write_index(cache.layers[0], new).pool,
    ):
        np.testing.assert_array_equal(same.index.keys, after)

    def step_of(cache, new):
        return jaxkv.write_index(jaxkv.extend(cache, [1, 1, 1]), new, layer=0)

    assert_no_copy(jax.jit(step_of, donate_argnums=0), jaxkv.init(make_config()), jnp.ones((ROWS, 1, E)))


def test_a_row_that_fails_keeps_what_it_has():
    cache = jaxkv.extend(make_filled(num_blocks=7), [0, 40, 1])
    cache = jaxkv.write_index(cache, jnp.ones((ROWS, 1, E)), layer=0)
    assert cache.failed.tolist() == [False, True, False]
    assert_same_keys(dataclasses.replace(cache), rows=((0, 0), (1, 1)))


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_rows_travel(dtype, tmp_path):
    """Forks, truncation, the host, other caches, files and prefixes: index keys stay what they are."""
    layers = LAYERS if NIGHTLY else LAYERS[:1]
    config, filled = (functools.partial(x, layers=layers, dtype=dtype) for x in (make_config, make_filled))
    cache, atol = filled(), FORMATS[dtype]
    forked = jaxkv.fork(cache, 0, 2)
    assert_same_keys(forked, [(0, 0), (2, 0)], atol)
    longer = put_index(jaxkv.extend(forked, [1, 0, 0]), 0, 1)  # the shared tail block is row 0's own
    assert_same_keys(longer, [(2, 0)], atol)
    assert_same_keys(jaxkv.truncate(cache, [6, 5, 0]), atol=atol, lengths=[6, 5, 0])
    assert_same_keys(jaxkv.reorder(cache, [1, 0, 2]), [(0, 1), (1, 0)], atol)
    away, host = jaxkv.swap_out(forked, [0, 2])
    assert_same_keys(jaxkv.swap_in(away, [2, 0], host), [(0, 0), (2, 0)], atol)
    plain = tuple(dataclasses.replace(x, index_dim=None) for x in layers)
    with pytest.raises(ValueError, match="index keys"):
        jaxkv.swap_in(jaxkv.init(config(layers=plain)), 0, host[0])
    other = config(block_size=2, num_blocks=40, head_dim_multiple=16)
    assert_same_keys(jaxkv.send(cache, [0, 1], to=jaxkv.init(other), at=[1, 2]), [(1, 0), (2, 1)], atol)
    assert_same_keys(permute_blocks(cache), atol=atol)

    jaxkv.save(tmp_path / "a.safetensors", forked)
    assert jaxkv.describe(tmp_path / "a.safetensors").config == forked.config
    loaded = jaxkv.load(tmp_path / "a.safetensors")
    assert_same_keys(loaded, [(0, 0), (1, 1), (2, 0)], atol)
    assert_same_keys(jaxkv.load(tmp_path / "a.safetensors", other), [(0, 0), (1, 1), (2, 0)], atol)
    with pytest.raises(ValueError, match="index_dim = 5"):
        jaxkv.load(tmp_path / "a.safetensors", config(layers=plain))


def test_speculation_moves_them():
    cache = jaxkv.extend(make_filled(layers=LAYERS[:2]), [4, 4, 0])
    cache = put_index(cache, 0, 4)
    kept = jaxkv.keep(cache, [[0, 2, -1], [3, -1, -1], [-1, -1, -1]])
    for layer in (0, 1):
        new = np.asarray(index_keys(layer, E))
        np.testing.assert_array_equal(read_index(kept, 0, layer)[9:], new[0, [0, 2]])
        np.testing.assert_array_equal(read_index(kept, 1, layer)[5:], new[1, [3]])


def test_eviction_of_whole_tokens_moves_them():
    layer = dataclasses.replace(LAYERS[0], evict="layer")
    cache = make_filled(layers=(layer, LAYERS[2]))
    kept = np.zeros((ROWS, 24), bool)
    kept[0, [0, 3, 4, 8]] = kept[1, :5] = True
    cache = jaxkv.evict(cache, keep=kept, layer=0)
    np.testing.assert_array_equal(read_index(cache, 0, 0), np.asarray(index_keys(0, E))[0, [0, 3, 4, 8]])
    np.testing.assert_array_equal(read_index(cache, 1, 0), np.asarray(index_keys(0, E))[1, :5])


def test_prefixes_on_device_host_and_disk_have_them(tmp_path):
    tokens = list(range(8))
    on_disk = {"disk": tmp_path / "blocks", "disk_bytes": 1 << 20, "spill_bytes": 1400}
    for tiers in ({}, {"spill_bytes": 1 << 20}, on_disk):
        cache = make_filled(layers=LAYERS[:2])
        index = jaxkv.PrefixCache(cache.config, **tiers)
        kept = jaxkv.free(index.insert(index.insert(cache, 1, [5, *tokens[:3]]), 0, tokens), [0, 1])
        kept = index.make_room(kept, 24 if tiers else 1)  # what is kept goes down
        found = index.adopt(kept, 2, index.match([*tokens, 9]))
        assert int(found.lengths[2]) == 8
        assert "disk" not in tiers or index.stats()["disk_blocks_written"]
        assert_same_keys(found, [(2, 0)], lengths=[8])


def test_stacked_layers_in_a_scan():
    layers = (LAYERS[0],) * 2
    cache = jaxkv.init(make_config(layers=layers, stacked=True))
    new = jnp.stack([index_keys(0, E), index_keys(1, E)])

    def body(cache, given):
        i, keys = given
        return jaxkv.write_index(cache, keys, layer=i), None

    cache, _ = jax.lax.scan(body, jaxkv.extend(cache, LENGTHS), (jnp.arange(2), new))
    assert_same_keys(cache)
    cache, host = jaxkv.swap_out(cache, 0)
    assert_same_keys(jaxkv.swap_in(cache, 2, host), [(2, 0), (1, 1)])


@pytest.mark.parametrize("axes", [{"heads": "model"}, {"heads": None, "context": "model"}], ids=["heads", "context"])
def test_over_a_mesh(axes):
    """Index keys are whole on each device of heads; of contexts each has its runs."""
    mesh, layers = Mesh(np.array(jax.devices()[:2]), ("model",)), LAYERS[:1]
    cache = jaxkv.init(make_config(layers=layers), mesh=mesh, **axes)
    keys = cache.pools[0].index.keys
    assert keys.sharding.shard_shape(keys.shape) == (25, 1, 1, 2 if "context" in axes else 4, E)
    cache = filling(cache)
    assert_same_keys(jaxkv.send(cache, [0, 1], to=jaxkv.init(make_config(layers=layers))))
    away, host = jaxkv.swap_out(jaxkv.fork(cache, 0, 2), [0])
    back = jaxkv.swap_in(away, [0], host)
    assert_same_keys(
        jaxkv.send(back, [0, 2], to=jaxkv.init(make_config(layers=layers, block_size=2))), [(0, 0), (2, 0)]
    )
    specs = jaxkv.partition_specs(cache.config, mesh, **axes)
    assert jax.tree.structure(specs, is_leaf=lambda x: isinstance(x, jax.P)) == jax.tree.structure(cache)


def test_rows_over_a_mesh():
    mesh = Mesh(np.array(jax.devices()[:3]), ("data",))
    cache = jaxkv.init(make_config(layers=LAYERS[:1]), mesh=mesh, rows="data")
    step = jaxkv.by_rows(lambda cache, n, k: jaxkv.write_index(jaxkv.extend(cache, n), k, layer=0))
    cache = step(cache, LENGTHS, index_keys(0, E))
    for row, shard in enumerate(cache.shards):
        np.testing.assert_array_equal(read_index(shard, 0, 0), index_keys(0, E)[row, : LENGTHS[row]])


def test_exported_programs_take_them():
    program = jax.export.export(jax.jit(lambda cache: put_index(jaxkv.extend(cache, LENGTHS))))(
        jaxkv.init(make_config())
    )
    again = jax.export.deserialize(program.serialize())
    assert_same_keys(again.call(jaxkv.init(make_config())))


def test_what_is_not_possible_is_said():
    cache = jaxkv.extend(make_filled(), [1, 1, 0])
    with pytest.raises(ValueError, match='no head, and with evict="head"'):
        LayerConfig(num_kv_heads=2, head_dim=8, index_dim=4, evict="head")
    with pytest.raises(ValueError, match="index_dim must be"):
        LayerConfig(num_kv_heads=2, head_dim=8, index_dim=0)
    with pytest.raises(ValueError, match="nor evict, index_dim or bounds"):
        make_config(layers=(LAYERS[2], LayerConfig(num_kv_heads=K, head_dim=D, shares_with=0, index_dim=4)))
    with pytest.raises(ValueError, match="Layer 2 keeps no index keys: make it with LayerConfig"):
        jaxkv.write_index(cache, jnp.ones((ROWS, 1, E)), layer=2)
    for bad in (jnp.ones((ROWS, 1, E + 1)), jnp.ones((ROWS, 1, 1, E)), jnp.ones(E), None, 3, "a"):
        with pytest.raises(ValueError, match=r"index_k must be \[S, T, 5\] or packed \[N, 5\], not"):
            jaxkv.write_index(cache, bad, layer=0)
    with pytest.raises(ValueError, match="index_k must be floating point, not int32"):
        jaxkv.write_index(cache, jnp.ones((ROWS, 1, E), jnp.int32), layer=0)
    with pytest.raises(ValueError, match="index_k has 2 rows, but the cache has max_seqs = 3"):
        jaxkv.write_index(cache, jnp.ones((2, 1, E)), layer=0)
    with pytest.raises(ValueError, match=r"cache must be a jaxkv\.Cache"):
        jaxkv.write_index(None, jnp.ones((ROWS, 1, E)), layer=0)
    quantized = jaxkv.extend(jaxkv.init(make_config(dtype="int8")), [1, 1, 0])
    with pytest.raises(NotImplementedError, match="gpu backend has no kernel that writes index keys in int8; leave"):
        jaxkv.write_index(quantized, jnp.ones((ROWS, 1, E)), layer=0, implementation="gpu")
    with pytest.raises(ValueError, match="implementation must be None or one of xla, reference"):
        jaxkv.write_index(quantized, jnp.ones((ROWS, 1, E)), layer=0, implementation="nothing")
    write = jax.jit(jaxkv.write_index, static_argnames=("layer", "implementation"))
    write(quantized, jnp.ones((ROWS, 1, E)), layer=0, implementation="xla")
    readers = (LAYERS[0], LayerConfig(num_kv_heads=K, head_dim=D, shares_with=0))
    shared = jaxkv.extend(jaxkv.init(make_config(layers=readers)), [1, 1, 0])
    with pytest.raises(ValueError, match="Layer 1 reads the keys and values of layer 0"):
        jaxkv.write_index(shared, jnp.ones((ROWS, 1, E)), layer=1)
    kv = np.ones((1, ROWS, PLACES, K, D), np.float32)
    with pytest.raises(ValueError, match="from_dense takes no layers with index_dim, but layer 0 has it"):
        jaxkv.convert.from_dense(kv, kv, LENGTHS, layers=LAYERS[:1])
