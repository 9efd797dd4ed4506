"""S0: one layer's cache in two layouts, as ferrum has it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from seeds import LAYERS, LAYOUTS, ROWS, assert_same, filled, make_config, random_kv, step

import jaxkv


def test_s0_1_key_and_value_buffers():
    cache, k, v = filled()
    pool = cache.pools[0]
    assert_same((pool.k, pool.v), (pool.kv[:, 0], pool.kv[:, 1]))
    first_block = cache.tables[0].tables[0, 0]
    assert_same(pool.k[first_block], k[0][0, :4].swapaxes(0, 1))
    assert_same(pool.v[first_block], v[0][0, :4].swapaxes(0, 1))


def test_s0_2_length_and_capacity():
    for layout, capacity in (("paged", 48), ("contiguous", 60)):
        cache, _, _ = filled(layout)
        assert cache.lengths.tolist() == [9, 0, 4] and cache.lengths.dtype == jnp.int32
        assert cache.capacity == capacity and cache.max_seq_length == 20


def test_s0_3_sizes():
    config = make_config()
    assert (config.layers[1].num_kv_heads, config.layers[1].head_dim, config.block_size) == (1, 16, 4)
    assert jaxkv.CacheConfig(layers=LAYERS, max_seqs=1, max_seq_len=64, num_blocks=4).block_size == 16


def test_s0_4_contiguous_layout():
    cache, k, v = filled("contiguous")
    assert cache.pools[0].kv.shape == (ROWS + 1, 2, 2, 20, 8)
    dense_k, dense_v = cache.separate(0)
    assert dense_k.shape == (ROWS, 2, 20, 8)
    assert_same((dense_k[0, :, :9], dense_v[0, :, :9]), (k[0][0].swapaxes(0, 1), v[0][0].swapaxes(0, 1)))


def test_s0_5_paged_layout():
    cache, _, _ = filled()
    for layer, c in enumerate(LAYERS):
        assert cache.pools[layer].kv.shape == (12 + 1, 2, c.num_kv_heads, 4, c.head_dim)


def test_s0_6_the_layout_changes_nothing_for_the_caller():
    q = jnp.asarray(np.random.default_rng(3).standard_normal((ROWS, 2, 4, 8)), jnp.float32)
    k, v = random_kv(2, seed=1)
    results = []
    for layout in LAYOUTS:
        cache, _, _ = filled(layout)
        cache = jaxkv.truncate(jaxkv.fork(cache, 0, 1), [9, 6, 4])
        out, cache = step(cache, q, k[0], v[0], [1, 2, 0])
        cache = jaxkv.free(jaxkv.reorder(cache, [1, 2, 0]), [1])
        results.append((out, cache.lengths, cache.combined(0)))
    (out, *rest), (other_out, *other_rest) = results
    np.testing.assert_allclose(out, other_out, atol=1e-6)
    assert_same(rest, other_rest)


def test_s0_7_tables_and_lengths_change_together():
    cache, _, _ = filled()
    tables = cache.tables[0]
    assert tables.tables.shape == (ROWS, 5) and tables.tables.dtype == tables.lengths.dtype == jnp.int32
    for _ in range(8):
        cache = jaxkv.extend(cache, [1, 1, 1])
        held = np.count_nonzero(np.asarray(cache.tables[0].tables), axis=1)
        assert held.tolist() == [-(-n // 4) for n in cache.lengths.tolist()]


def test_s0_8_release_reads_nothing_back():
    cache, _, _ = filled()
    release = jax.jit(jaxkv.free)
    rows = jnp.array([True, False, True])
    release(cache, rows)
    with jax.transfer_guard("disallow"):
        freed = release(cache, rows)
    assert freed.blocks_in_use == 0


def test_s0_9_rows_share_every_pool():
    cache, _, _ = filled(lengths=(9, 8, 4))
    assert len(cache.pools) == len(LAYERS)
    held = [set(row.tolist()) - {0} for row in np.asarray(cache.tables[0].tables)]
    assert [len(blocks) for blocks in held] == [3, 2, 1] and len(set.union(*held)) == 6


@pytest.mark.parametrize("name, size", [("bfloat16", 2), ("float16", 2), ("float32", 4)])
def test_s0_10_kind_of_storage(name, size):
    config = make_config(dtype=name)
    assert (config.kind(0).name, config.kind(0).bytes_per_element) == (name, size)
    kv = jaxkv.init(config).pools[0].kv
    assert kv.dtype == name and kv.nbytes == kv.size * size  # the storage is what the name says
    traces = []
    append = jax.jit(lambda cache, k, v: traces.append(None) or jaxkv.append(cache, k, v))
    for _ in range(2):
        append(jaxkv.init(make_config(dtype=name)), *random_kv(1))
    assert len(traces) == 1 and hash(config) == hash(make_config(dtype=jnp.dtype(name)))
    default = jaxkv.CacheConfig(layers=LAYERS, max_seqs=1, max_seq_len=8, num_blocks=1)
    assert default.kind(0).name == "bfloat16"


@pytest.mark.parametrize(
    ("name", "stored"),
    [("float16", "float16"), ("bfloat16", "bfloat16"), ("int8", "int8"), ("float8_e4m3fn", "uint8"),
     ("float8_e5m2", "uint8"), ("float32", "float32")],
)  # fmt: skip
def test_s0_11_kinds(name, stored):
    """Each is stored in as many bytes as it says; another is refused when the config is built."""
    config = make_config(dtype=name)
    kv = jaxkv.init(config).pools[0].kv
    assert kv.dtype == stored and kv.dtype.itemsize == config.kind(0).bytes_per_element
    with pytest.raises(ValueError, match=r"must be one of .*int8.*, not int16"):
        make_config(dtype="int16")


def test_s0_11_scales_of_int8():
    """One for each token and head: its largest number over 127, and never below 1e-8 / 127."""
    k, v = random_kv(3)
    k[0] = k[0].at[0, 1].set(0)
    cache = jaxkv.append(jaxkv.init(make_config(dtype="int8")), k, v)
    _, _, k_scale, v_scale = jaxkv.gather(cache, 0, layer=0, raw=True)
    for scale, x in ((k_scale, k[0][0]), (v_scale, v[0][0])):
        largest = np.maximum(np.abs(x).max(axis=-1), 1e-8)
        np.testing.assert_allclose(scale, largest / 127, rtol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_s0_12_round_trip_and_layouts_agree(layout):
    """int8 comes back within 0.002 where the largest number is 0.1; both layouts store and give the same."""
    k, v = ([0.1 * x / jnp.abs(x).max() for x in layers] for layers in random_kv(3))
    got, _ = jaxkv.gather(jaxkv.append(jaxkv.init(make_config(layout, dtype="int8")), k, v), 0, layer=0)
    assert np.abs(got - k[0][0]).max() < 0.002
    paged = jaxkv.append(jaxkv.init(make_config(dtype="int8")), k, v)
    assert_same(got, jaxkv.gather(paged, 0, layer=0)[0])
