"""The contracts of five other systems that jaxkv meets: one test per promise, named by the system and the number.

S0: one layer's cache in two layouts (ferrum). S1: 16-token blocks, no allocation in the loop (cjc-runtime). S2: layers
that differ (TensorRT Edge-LLM). S3: what a kernel sees (Mojo). S4: one sequence's table and its allocator (ferrum).
"""

import copy
import dataclasses
import functools
import pickle
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import jaxkv
from jaxkv.testing import assert_no_copy, permute_blocks
from pallas_kernels import blocks

LAYERS = (jaxkv.LayerConfig(num_kv_heads=2, head_dim=8), jaxkv.LayerConfig(num_kv_heads=1, head_dim=16))
LAYOUTS = ("paged", "contiguous")
ROWS = 3


def make_config(layout="paged", **fields):
    sizes = {"num_blocks": 12, "block_size": 4} if layout == "paged" else {"layout": "contiguous"}
    fields = {"layers": LAYERS, "max_seqs": ROWS, "max_seq_len": 20, "dtype": "float32"} | sizes | fields
    return jaxkv.CacheConfig(**fields)


def random_kv(places, layers=LAYERS, seed=0, rows=ROWS):
    rng = np.random.default_rng(seed)
    return [
        [jnp.asarray(rng.standard_normal((rows, places, c.num_kv_heads, c.head_dim)), jnp.float32) for c in layers]
        for _ in range(2)
    ]


def counts(*numbers):
    return jnp.array(numbers, jnp.int32)


def filled(layout="paged", lengths=(9, 0, 4)):
    """A cache of rows of these lengths, and what was put into it."""
    k, v = random_kv(max(lengths))
    return jaxkv.append(jaxkv.init(make_config(layout)), k, v, counts(*lengths)), k, v


def step(cache, q, k, v, num_tokens):
    cache = jaxkv.extend(cache, num_tokens)
    return jaxkv.attention(q, k, v, cache, layer=0)


def assert_same(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


# S0: one layer's cache, two layouts.


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


# S1: blocks of 16 tokens, no allocation in the loop.


@pytest.mark.parametrize("max_tokens, num_blocks", [(1, 1), (16, 1), (17, 2), (100, 7)])
def test_s1_1_blocks_for_max_tokens(max_tokens, num_blocks):
    config = jaxkv.CacheConfig(layers=LAYERS, max_seqs=1, max_tokens=max_tokens)
    assert (config.block_size, config.num_blocks, config.max_seq_len) == (16, num_blocks, max_tokens)
    assert jaxkv.init(config).num_blocks == num_blocks


def test_s1_2_sizes_in_use():
    config = jaxkv.CacheConfig(layers=LAYERS, max_seqs=2, max_tokens=100)
    cache = jaxkv.init(config)
    assert (cache.max_tokens, cache.num_blocks, cache.blocks_in_use, cache.num_tokens) == (100, 7, 0, 0)
    assert cache.is_empty and LAYERS[0].dim == 16
    cache = jaxkv.extend(cache, [17, 1])
    assert (cache.blocks_in_use, cache.num_tokens, cache.is_empty) == (3, 18, False)


def test_s1_3_append_one_token():
    config = make_config(max_seqs=1, max_seq_len=5)
    append = jax.jit(jaxkv.append, donate_argnames="cache")
    cache, (k, v) = jaxkv.init(config), random_kv(6, rows=1)
    pointers = [pool.kv.unsafe_buffer_pointer() for pool in cache.pools]
    for t in range(6):
        cache = append(cache, [x[:, t : t + 1] for x in k], [x[:, t : t + 1] for x in v])
        assert cache.lengths.tolist() == [min(t + 1, 5)]
        assert [pool.kv.unsafe_buffer_pointer() for pool in cache.pools] == pointers
    assert_same(jaxkv.gather(cache, 0, layer=0), (k[0][0, :5], v[0][0, :5]))
    with pytest.raises(jaxkv.SequenceTooLong, match=r"max_seq_len = 5 .* \(it holds 5\)"):
        jaxkv.check(cache)
    with pytest.raises(ValueError, match="k has head_dim 9"):
        jaxkv.append(cache, [jnp.ones((1, 1, 2, 9))] * 2, [jnp.ones((1, 1, 2, 9))] * 2)


def test_s1_4_append_many_tokens_all_or_nothing():
    cache, _, _ = filled()
    k, v = random_kv(12, seed=1)
    after = jaxkv.append(cache, k, v, [12, 8, 0])  # 9 + 12 > 20
    assert after.lengths.tolist() == [9, 8, 4] and after.failed.tolist() == [True, False, False]
    for row in (0, 2):
        assert_same(jaxkv.gather(after, row, layer=1), jaxkv.gather(cache, row, layer=1))
    assert_same(jaxkv.gather(after, 1, layer=1), (k[1][1, :8], v[1][1, :8]))
    nothing = jaxkv.append(cache, k, v, [0, 0, 0])
    assert_same((nothing.pools, nothing.lengths), (cache.pools, cache.lengths))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_s1_5_the_stored_tokens_dense(layout):
    cache, k, v = filled(layout)
    for layer, c in enumerate(LAYERS):
        assert_same(jaxkv.gather(cache, 0, layer=layer), (k[layer][0, :9], v[layer][0, :9]))
        assert jaxkv.gather(cache, 1, layer=layer)[0].shape == (0, c.num_kv_heads, c.head_dim)
        padded = jax.jit(lambda cache, row, i=layer: jaxkv.gather(cache, row, layer=i, max_len=7)[0])(
            cache, counts(2)[0]
        )
        assert_same(padded, k[layer][2, :7] * (jnp.arange(7) < 4).astype(jnp.float32)[:, None, None])


def test_s1_6_one_token():
    cache, k, v = filled()
    assert_same(cache.token(0, 8, layer=1), (k[1][0, 8], v[1][0, 8]))
    with pytest.raises(IndexError, match="Row 0 holds 9 tokens, so it has no token at position 9"):
        cache.token(0, 9)


def test_s1_7_clear():
    cache, k, v = filled()
    pointers = [pool.kv.unsafe_buffer_pointer() for pool in cache.pools]
    cache = jax.jit(jaxkv.free, donate_argnames="cache")(cache, jnp.ones(ROWS, bool))
    assert cache.is_empty and cache.blocks_in_use == 0
    assert [pool.kv.unsafe_buffer_pointer() for pool in cache.pools] == pointers
    assert jaxkv.append(cache, k, v, [9, 9, 9]).lengths.tolist() == [9, 9, 9]


def test_s1_8_a_value_like_any_other():
    cache, k, v = filled()
    before = jax.tree.map(np.array, cache)
    for clone in (copy.copy(cache), copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert_same(clone, cache)
        assert clone.config == cache.config
    with pytest.raises(ValueError):
        jaxkv.extend(cache, [-1, 0, 0])
    with pytest.raises(dataclasses.FrozenInstanceError):
        cache.config = None
    threads = [threading.Thread(target=jaxkv.append, args=(cache, k, v)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_same(cache, before)
    assert repr(cache) == "Cache(4 of 12 blocks used, 13 tokens in 2 of 3 rows, 2 layers, 13.0 KiB)"
    assert jax.jit(lambda cache: repr(cache) and cache.lengths)(cache).tolist() == [9, 0, 4]


def test_s1_9_memory():
    cache, _, _ = filled()
    config = jaxkv.CacheConfig(layers=LAYERS, max_seqs=ROWS, max_seq_len=1000, num_blocks=4000)
    assert len({pool.kv.unsafe_buffer_pointer() for pool in cache.pools}) == len(LAYERS)  # a buffer of its own each
    kv = [jax.ShapeDtypeStruct((ROWS, 1, c.num_kv_heads, c.head_dim), "bfloat16") for c in LAYERS]
    assert_no_copy(jax.jit(jaxkv.append, donate_argnames="cache"), jax.eval_shape(lambda: jaxkv.init(config)), kv, kv)
    q, (k, v) = jnp.ones((ROWS, 2, 4, 8)), random_kv(2, seed=1)
    out, _ = step(permute_blocks(cache), q, k[0], v[0], [2, 1, 1])
    assert_same(out, step(cache, q, k[0], v[0], [2, 1, 1])[0])
    kv = np.asarray(cache.pools[0].kv)
    assert kv[1].flags.c_contiguous and kv.flags.c_contiguous


# S2: layers may differ.


def test_s2_1_layers_differ():
    cache, k, v = filled()
    assert [pool.kv.shape[2:] for pool in cache.pools] == [(2, 4, 8), (1, 4, 16)]
    for layer in range(2):
        assert_same(jaxkv.gather(cache, 0, layer=layer), (k[layer][0, :9], v[layer][0, :9]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_s2_2_keys_and_values_combined(layout):
    cache, k, v = filled(layout)
    for layer, c in enumerate(LAYERS):
        combined = cache.combined(layer)
        assert combined.shape == (ROWS, 2, c.num_kv_heads, 20, c.head_dim)
        for row, length in enumerate(cache.lengths.tolist()):
            for half, stored in enumerate((k, v)):
                assert_same(combined[row, half, :, :length], stored[layer][row, :length].swapaxes(0, 1))
            assert not combined[row, :, :, length:].any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_s2_3_keys_and_values_separate(layout):
    cache, _, _ = filled(layout)
    for layer, c in enumerate(LAYERS):
        k, v = cache.separate(layer)
        assert k.shape == v.shape == (ROWS, c.num_kv_heads, 20, c.head_dim)
        assert_same(jnp.stack([k, v], axis=1), cache.combined(layer))


def test_s2_3_the_contiguous_layout_moves_no_data():
    """What is read through the view is read from the pool; no dense copy of it is ever in memory."""
    config = make_config("contiguous", max_seq_len=4096)
    read = jax.jit(lambda cache: [2 * x[:, :, 8:24] for x in cache.separate(0)])
    memory = read.lower(jax.eval_shape(lambda: jaxkv.init(config))).compile().memory_analysis()
    assert memory.temp_size_in_bytes < config.bytes / 100


def test_s2_4_configuration():
    cache = jaxkv.init(make_config())
    assert cache.layer_config(1) == LAYERS[1] and cache.num_layers == 2 and cache.config == make_config()
    assert not cache.is_uniform and jaxkv.init(make_config(layers=LAYERS[:1] * 3)).is_uniform
    for index in (2, -1):
        with pytest.raises(IndexError, match="layer must be an integer from 0 to 1"):
            cache.layer_config(index)


def test_s2_5_allocated_once():
    cache, k, v = filled()
    donated = jax.jit(jaxkv.append, donate_argnames="cache")(cache, k, v, counts(1, 1, 1))
    assert all(pool.kv.is_deleted() for pool in cache.pools)  # donation is a move
    assert donated.lengths.tolist() == [10, 1, 5]
    large = jax.eval_shape(lambda: jaxkv.init(make_config(num_blocks=4000)))
    kv = [jax.ShapeDtypeStruct((ROWS, 1, c.num_kv_heads, c.head_dim), "float32") for c in LAYERS]
    with pytest.raises(AssertionError, match="donate the cache"):
        assert_no_copy(jax.jit(jaxkv.append), large, kv, kv)


@pytest.mark.parametrize(
    "field, value", [("block_size", 0), ("num_blocks", -1), ("dtype", "int64"), ("layout", "odd"), ("layers", ())]
)
def test_s2_6_invalid_configurations(field, value):
    with pytest.raises(ValueError, match=rf"CacheConfig\.{field} must .*({value}|empty)"):
        dataclasses.replace(make_config(), **{field: value})


# S3: what a kernel sees.


def test_s3_1_one_layer_is_a_pytree():
    cache, _, _ = filled()
    view = cache.layer(1)
    assert len(jax.tree.leaves(view)) == len(jax.tree.leaves(cache)) - 1  # without the other pool

    def total(view):
        return view.pool.k.sum() + view.tables.lengths.sum().astype(jnp.float32)

    expected = float(total(view))
    assert float(jax.jit(total)(view)) == pytest.approx(expected, rel=1e-5)
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), view)
    assert jax.vmap(total)(stacked).tolist() == pytest.approx([expected] * 2, rel=1e-5)
    _, scanned = jax.lax.scan(lambda carry, view: (carry, total(view)), 0, stacked)
    assert scanned.tolist() == pytest.approx([expected] * 2, rel=1e-5)


@pytest.mark.parametrize("layout", ["head_major", "token_major"])
def test_s3_2_built_from_blocks(layout):
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 5, 2, 4, 8)).astype(np.float32)
    parts = [x.swapaxes(1, 2) if layout == "token_major" else x for x in (k, v)]
    cache = jaxkv.convert.from_blocks(
        k=parts[:1], v=parts[1:], tables=[[4, 1, -7], [4, 0, 2], [99, 99, 99]], lengths=[6, 12, 0], layout=layout
    )
    jaxkv.check_invariants(cache)
    assert cache.lengths.tolist() == [6, 12, 0] and cache.blocks_in_use == 4
    for row, table in enumerate([[4, 1], [4, 0, 2], []]):
        keys, values = jaxkv.gather(cache, row, layer=0)
        for stored, original in ((keys, k), (values, v)):
            dense = [token for block in table for token in original[block].swapaxes(0, 1)][: len(stored)]
            assert_same(stored, np.array(dense).reshape(stored.shape))
    grown = jaxkv.extend(cache, [0, 0, 3])
    jaxkv.check_invariants(grown)
    assert grown.blocks_in_use == 5 and jaxkv.free(grown, [0, 1, 2]).blocks_in_use == 0


def test_s3_3_sizes_of_a_step():
    cache, _, _ = filled()
    cache = jaxkv.extend(cache, [2, 3, 0])
    assert (cache.max_seq_length, cache.max_prompt_length, cache.max_context_length) == (20, 3, 11)
    assert [cache.cache_length(row) for row in range(ROWS)] == [9, 0, 4] and not cache.empty_cache
    assert jaxkv.extend(jaxkv.init(make_config()), [2, 3, 0]).empty_cache is True
    traced = jax.jit(lambda c: (c.max_prompt_length, c.max_context_length, c.cache_length(0), c.empty_cache))(cache)
    assert [x.tolist() for x in traced] == [3, 11, 9, False]
    assert all(type(x) is int for x in (cache.max_prompt_length, cache.max_context_length, cache.cache_length(0)))


def test_s3_4_lengths_before_the_step():
    cache, _, _ = filled()
    after = jaxkv.extend(cache, [2, 3, 0])
    assert_same(after.lengths - after.new, cache.lengths)


def test_s3_5_where_each_token_lies():
    cache, k, _ = filled()
    row, position = jnp.array([[0], [2]]), jnp.arange(4)[None]
    block, offset = cache.slots(row, position)
    assert block.shape == offset.shape == (2, 4)
    assert_same(cache.pools[0].k[block, :, offset], k[0][jnp.array([0, 2]), :4])
    block, _ = cache.slots(jnp.array([0, 0, 1, -1, 3]), jnp.array([9, -1, 0, 0, 0]))  # no such tokens
    assert block.tolist() == [0] * 5


def test_s3_6_load_and_store():
    cache, k, v = filled()
    assert_same(cache.load(0, 2, 1, 3), (k[0][2, 3, 1], v[0][2, 3, 1]))
    changed = cache.store(0, 2, 1, 3, jnp.zeros(8), jnp.ones(8))
    assert_same(changed.load(0, 2, 1, 3), (jnp.zeros(8), jnp.ones(8)))
    assert (np.asarray(changed.pools[0].kv) != np.asarray(cache.pools[0].kv)).sum() == 16
    jaxkv.check_invariants(jax.jit(lambda c, p: c.store(0, 1, 0, p, jnp.ones(8), jnp.ones(8)))(cache, counts(0)[0]))


@pytest.mark.parametrize("at_most", [1, 2, 3, 64])
def test_s3_7_a_kernel_reads_tiles_that_stay_in_a_block(at_most):
    """A kernel that copies one row's keys, one tile at a time, straight through the block table."""
    cache, k, _ = filled()
    view, length = cache.layer(0), 8
    tile = blocks.largest_tile(4, at_most)

    def copy_tile(tables, kv, out):
        position = pl.program_id(1) * tile
        index = blocks.tile_index(
            tables, 0, position, which=blocks.KEYS, head=pl.program_id(0), tile=tile, block_size=4
        )
        out[pl.program_id(0), pl.ds(position, tile)] = kv[index]

    out = jax.ShapeDtypeStruct((2, length, 8), jnp.float32)
    run = pl.pallas_call(copy_tile, out, grid=(2, length // tile), interpret=True)
    assert_same(run(view.tables.tables, view.pool.kv), k[0][0, :length].swapaxes(0, 1))


def test_s3_7_tiles_and_bulk_copies():
    assert [blocks.largest_tile(16, n) for n in (1, 7, 16, 128)] == [1, 4, 16, 16]
    with pytest.raises(ValueError, match="A tile of 3 tokens crosses blocks of 4: use 2"):
        blocks.tile_index(None, 0, 0, which=blocks.KEYS, head=0, tile=3, block_size=4)
    for head_dim, dtype, tiling, swizzle in (
        (128, "bfloat16", (8, 64), 128), (64, "float32", (8, 32), 128), (32, "bfloat16", (8, 32), 64),
        (80, "bfloat16", (8, 16), 32),
    ):  # fmt: skip
        tiles, swizzled = blocks.tma_transforms(head_dim, dtype)
        assert (tiles.tiling, swizzled.swizzle) == (tiling, swizzle)
    with pytest.raises(ValueError, match="20 elements of 2 bytes are not a multiple of 32 bytes"):
        blocks.tma_transforms(20, "bfloat16")


def test_s3_8_sizes_are_part_of_the_jit_key():
    traces = []

    @jax.jit
    def lengths(cache):
        traces.append(cache.config)
        return cache.lengths

    for config in (make_config(), make_config(), make_config(block_size=5), make_config(dtype="bfloat16")):
        lengths(jaxkv.init(config))
    assert traces == [make_config(), make_config(block_size=5), make_config(dtype="bfloat16")]


# S4: one sequence's table, and the allocator.


def test_s4_1_a_new_cache_takes_no_block():
    cache = jaxkv.init(make_config())
    assert cache.blocks_in_use == 0 and jaxkv.stats(cache)["blocks_free"] == 12


def test_s4_2_capacity():
    cache, _, _ = filled()
    reserved = jaxkv.reserve(cache, [17, 1, 4])
    assert reserved.lengths.tolist() == [9, 0, 4] and reserved.blocks_in_use == 5 + 1 + 1
    assert_same(jaxkv.reserve(reserved, [17, 1, 4]), reserved)
    assert jaxkv.extend(reserved, [8, 1, 0]).blocks_in_use == 7
    too_much = jaxkv.reserve(reserved, [20, 20, 20])  # 9 more blocks, of 5; the row's own 5 do, and row 1 gets 4
    assert too_much.failed.tolist() == [False, False, True]
    assert_same(too_much.tables[0].tables[2], reserved.tables[0].tables[2])
    with pytest.raises(jaxkv.OutOfBlocks, match="needs 4 more blocks for 20 tokens, but 1 of 12 blocks is free"):
        jaxkv.check(too_much)
    with pytest.raises(jaxkv.SequenceTooLong):
        jaxkv.check(jaxkv.reserve(cache, [21, 0, 0]))


def test_s4_3_lengths_are_never_out_of_date():
    cache, _, _ = filled()
    q, (k, v) = jnp.ones((ROWS, 1, 4, 8)), random_kv(1, seed=1)
    out, after = step(cache, q, k[0], v[0], [1, 0, 1])
    written = jaxkv.write(jaxkv.extend(cache, [1, 0, 1]), k[0], v[0], layer=0)
    np.testing.assert_allclose(jaxkv.attend(q, written, layer=0), out, atol=1e-6)
    assert after.lengths.tolist() == [10, 0, 5] and out[0].any() and not out[1].any()


def test_s4_4_release_and_use_again():
    cache, k, v = filled()
    released = jaxkv.free(cache, [0])
    assert released.lengths.tolist() == [0, 0, 4] and released.blocks_in_use == 1
    again = jaxkv.append(released, k, v, [5, 0, 0])
    assert_same(jaxkv.gather(again, 0, layer=0), (k[0][0, :5], v[0][0, :5]))


def test_s4_5_the_allocator():
    cache, _, _ = filled()
    freed = jaxkv.free(cache, 0)
    released = set(cache.tables[0].tables[0].tolist()) - {0}
    taken = jaxkv.extend(freed, [0, 12, 0]).tables[0].tables[1]
    assert set(taken.tolist()) - {0} == released  # last in, first out
    assert_same(jaxkv.free(freed, 0), freed)  # an empty row has nothing to free
    jaxkv.check_invariants(jaxkv.free(cache, [0, 0, 0]))  # nor has a row named twice
    shared = jaxkv.fork(cache, 0, 1)
    counts_of_shared = np.asarray(shared.tables[0].refcounts)[np.asarray(shared.tables[0].tables[0, :3])]
    assert counts_of_shared.tolist() == [2, 2, 1] and jaxkv.stats(shared)["blocks_shared"] == 2
    assert jaxkv.free(shared, 0).blocks_in_use == 1 + 3
    assert jaxkv.stats(freed)["blocks_peak"] == 4 and freed.blocks_in_use == 1
    nothing = jaxkv.extend(cache, [0, 20, 20])  # 5 + 5 of 8: the first gets all, the second none
    assert nothing.lengths.tolist() == [9, 20, 4] and nothing.blocks_in_use == 4 + 5
    with pytest.raises(jaxkv.OutOfBlocks, match="3 of 12 blocks are free"):
        jaxkv.check(jaxkv.extend(cache, [0, 20, 16]))


def test_s4_5_a_permutation_copies_nothing():
    cache, _, _ = filled(lengths=(9, 3, 4))
    order = jnp.array([2, 0, 1])
    permuted = jaxkv.reorder(cache, order)
    assert_same(permuted.tables[0].tables, cache.tables[0].tables[order])
    assert_same(permuted.pools, cache.pools)


def test_every_promise_has_a_test():
    promised = {"s0": range(1, 11), "s1": range(1, 10), "s2": range(1, 7), "s3": range(1, 9), "s4": range(1, 6)}
    names = [name for name in globals() if name.startswith("test_s")]
    for system, numbers in promised.items():
        for number in numbers:
            assert any(name.startswith(f"test_{system}_{number}_") for name in names), f"{system}.{number}"
    assert functools.reduce(lambda total, numbers: total + len(numbers), promised.values(), 0) == 38
