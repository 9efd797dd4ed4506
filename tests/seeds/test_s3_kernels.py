"""S3: what a kernel sees, as Mojo has it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from seeds import ROWS, assert_same, counts, filled, make_config

import jaxkv
from pallas_kernels import blocks


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
