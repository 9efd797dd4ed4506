"""Bounds that lie beside the blocks, `LayerConfig(bounds=True)`: the same as reading all keys, whatever is done.

Random operations, evictions among them, are in `test_evict_machine.py` and `test_state_machine.py`, the tiers of a
prefix in `tests/tiers`, several devices in `test_shards.py`: each has a layer that keeps them.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nightly import NIGHTLY

import jaxkv
import jaxkv.convert
from jaxkv._core.cache.pool_access import decode_kv
from jaxkv.testing import assert_no_copy, permute_blocks, poison

ROWS, SIZE, PLACES = 3, 4, 9
sizes = dict(max_seqs=ROWS, max_seq_len=40, num_blocks=30, block_size=SIZE, dtype="float32")
kept = functools.partial(jaxkv.LayerConfig, num_kv_heads=2, head_dim=6, bounds=True)
LAYER = kept()


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def make(layers=(LAYER,), **fields):
    return jaxkv.init(jaxkv.CacheConfig(layers=layers, **sizes | fields))


append, spoilt = jax.jit(jaxkv.append), jax.jit(poison)
keep, swap_in = jax.jit(jaxkv.keep), jax.jit(jaxkv.swap_in)


def filled(cache, *steps):
    """Rows of random tokens, in steps; NaN is wherever none is, in bounds of blocks that nobody holds too."""
    for seed, counts in enumerate(steps):
        kv = normal(seed, cache.config.num_layers, ROWS, PLACES, 2, 6)
        cache = spoilt(append(cache, kv, kv, np.array(counts, np.int32)))
    return cache


def wider(cache):
    """`bool[S, M]`: blocks of rows whose bounds are not those of the keys that they hold; they always contain them."""
    jaxkv.check_invariants(cache)
    config, found = cache.config, np.zeros(cache.tables[0].tables.shape, bool)
    for layer in range(cache.num_layers):
        table, lengths = (np.asarray(x) for x in (cache.layer(layer).tables.tables, cache.layer(layer).tables.lengths))
        pool = cache.pool(layer)
        keys, bounds = (np.asarray(x, np.float32) for x in (decode_kv(pool, config, layer)[:, 0], pool.bounds))
        for row, column in np.argwhere(table * (np.arange(table.shape[1]) * config.block_size < lengths[:, None])):
            held = keys[table[row, column], :, : lengths[row] - column * config.block_size]
            found[row, column] |= (np.stack([held.min(axis=1), held.max(axis=1)]) != bounds[table[row, column]]).any()
    return found


def assert_exact(cache):
    assert not wider(cache).any()
    return cache


SCANNED = {
    "int8 in a window": kept(window=6, dtype="int8"), "bfloat16, padded": kept(dtype="bfloat16"),
    "int4": kept(dtype="int4"), "latent": jaxkv.LayerConfig.latent(rank=4, rope_dim=2, bounds=True),
}  # fmt: skip


@pytest.mark.parametrize("kind", SCANNED if NIGHTLY else ["int8 in a window"])
def test_a_scan_over_layers_of_any_kind_keeps_them(kind):
    one = SCANNED[kind]
    cache = make((one,) * 2, stacked=True, head_dim_multiple=8)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(cache, x, counts):
        cache = jaxkv.extend(cache, counts)

        def layer(cache, i):
            k = x[..., : one.num_kv_heads, :] + i.astype(x.dtype)
            return jaxkv.write(cache, k, None if one.rank else k, layer=i), None

        return jax.lax.scan(layer, cache, jnp.arange(2, dtype=jnp.int32))[0]

    for seed, counts in enumerate(([7, 0, 6], [0, 13, 0], [1, 2, 1])):
        cache = assert_exact(spoilt(step(cache, normal(seed, 13, 2, 6), jnp.array(counts))))
    bounds, read = looked_up_and_read(cache)
    np.testing.assert_array_equal(bounds, read)
    held = np.asarray(cache.tables[0].tables) > 0
    width = bounds.shape[2]  # of max_seq_len; a table may have a column more for rows that slide along it
    assert np.asarray(bounds).any(axis=(0, 3, 4)).tolist() == held[:, :width].tolist() and not held[:, width:].any()
    if NIGHTLY:
        assert_exact(permute_blocks(cache))


@jax.jit
def looked_up_and_read(cache):
    """The second layer's bounds, and what reading all keys says."""
    bounds = jaxkv.block_bounds(cache, layer=1)
    return jnp.stack(bounds), jnp.stack(jaxkv.block_bounds(cache, layer=1, bounds=bounds))


def test_what_is_taken_back_leaves_bounds_that_contain_what_is_left():
    cache = filled(make(), (9, 4, 7), (6, 1, 0))
    less = spoilt(keep(cache, jnp.array([[1, 3], [0, -1], [-1, -1]])))
    assert np.argwhere(wider(less)).tolist() == [[0, 2]], "places 8, 9 and 10 are left, and 11 was there"
    assert_exact(filled(less, (1, 1, 1)))
    stored = assert_exact(cache.store(0, 0, 1, 2, np.full(6, 50.0), np.ones(6)))
    assert np.nanmax(stored.pools[0].bounds) == 50
    narrow = dataclasses.replace(cache.pools[0], bounds=cache.pools[0].bounds - 9)
    with pytest.raises(AssertionError, match="layer 0: no key is above its block's bounds"):
        jaxkv.check_invariants(cache.replace_pool(0, narrow))


def test_rows_that_come_from_elsewhere_bring_them_or_have_them_made(tmp_path):
    cache = filled(make(), (9, 4, 7), (6, 1, 0))
    away, host = jaxkv.swap_out(cache, [0, 2])
    assert host.bytes == 8 * cache.config.bytes_per_block, "6 blocks, padded"
    back = assert_exact(spoilt(swap_in(away, jnp.array([2, 0]), host)))
    without = make((kept(bounds=False),), max_seqs=2)
    assert cache.bytes == cache.config.bytes == without.bytes + 31 * 2 * 2 * 6 * 4
    assert cache.config.dense_bytes == 3 * without.config.dense_bytes // 2
    with pytest.raises(ValueError, match=r"are float32\[2, 2, 4, 6\] with bounds float32\[2, 2, 6\], but"):
        jaxkv.swap_in(without, 0, host[0])
    jaxkv.save(tmp_path / "rows", back)
    assert jaxkv.describe(tmp_path / "rows").config == back.config
    loaded = assert_exact(jaxkv.load(tmp_path / "rows", cache.config.replace(block_size=8)))
    bare = jaxkv.send(loaded, [0, 2], to=without, at=[0, 1])
    assert bare.pools[0].bounds is None
    if NIGHTLY:
        assert_exact(jaxkv.send(bare, [0, 1], to=make()))
    k = normal(9, 5, 2, 4, 6)
    tables = dict(tables=np.array([[3, 1], [0, 0], [3, 4]]), lengths=[6, 0, 8])
    assert_exact(jaxkv.convert.from_blocks(k=[k], v=[k], layers=(LAYER,), **tables))


def test_a_step_updates_them_in_place():
    cache = jax.eval_shape(lambda: make(num_blocks=4000, max_seq_len=400))
    kv = jax.ShapeDtypeStruct((1, ROWS, 1, 2, 6), "float32")
    step = jax.jit(jaxkv.append, donate_argnums=0)
    assert_no_copy(step, cache, kv, kv)
    memory = step.lower(cache, kv, kv).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= cache.config.bytes, "bounds, too"
    assert memory.temp_size_in_bytes < cache.pools[0].bounds.size


def test_what_cannot_keep_them_says_so():
    mesh = jax.make_mesh((2,), ("context",), devices=jax.devices()[:2])
    for text, call in {
        "LayerConfig.bounds must be True or False, not 'yes'": lambda: kept(bounds="yes"),
        'LayerConfig.bounds are of blocks that hold all heads, and with evict="head"': lambda: kept(evict="head"),
        'LayerConfig.bounds tell a row\'s blocks apart, and with layout="contiguous"': lambda: jaxkv.CacheConfig(
            layers=(kept(),), max_seqs=2, max_seq_len=8, layout="contiguous"
        ),
        "no dtype or rotate of its own, nor evict, index_dim or bounds": lambda: make((kept(), kept(shares_with=0))),
        "Layer 0 keeps bounds of whole blocks, which cannot be divided over the mesh axis 'context'": lambda: (
            jaxkv.init(make().config, mesh=mesh, context="context")
        ),
    }.items():
        with pytest.raises(ValueError, match=text):
            call()


def test_tokens_beyond_their_table_touch_no_bounds():
    """They have no slot, as in `pallas_kernels`: the last block of the row keeps the bounds of what it holds."""
    cache = filled(make(max_seq_len=8), [8, 3, 0])
    (tables,) = cache.tables
    lengths, new = np.int32([11, 4, 0]), np.int32([4, 1, 0])  # of row 0 one token has a slot, in its last block
    beyond = cache.replace(tables=(dataclasses.replace(tables, lengths=lengths, new=new),))
    kv = normal(9, ROWS, 4, 2, 6)
    written = jax.jit(functools.partial(jaxkv.write, layer=0))(beyond, kv, kv)
    held = written.replace(tables=(dataclasses.replace(tables, lengths=np.int32([8, 4, 0])),))
    assert_exact(held)
    assert not np.array_equal(held.pools[0].bounds, cache.pools[0].bounds)
