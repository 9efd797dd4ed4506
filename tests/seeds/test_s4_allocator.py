"""S4: one sequence's table and its allocator, as ferrum has them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from seeds import ROWS, assert_same, filled, make_config, random_kv, step

import jaxkv


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
    twice = jax.jit(jaxkv.free)(cache, np.array([0, 0, 0]))  # where nobody can tell: no block is given back twice
    jaxkv.check_invariants(twice)
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
