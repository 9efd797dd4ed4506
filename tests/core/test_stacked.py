"""A stacked cache: layers that are alike lie in one array, and a scan over them carries it in place."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nightly import NIGHTLY

import jaxkv
from jaxkv.testing import assert_no_copy, permute_blocks, poison

ROWS, HEADS, KV_HEADS, HEAD_DIM = 3, 4, 2, 8
FULL = jaxkv.LayerConfig(num_kv_heads=KV_HEADS, head_dim=HEAD_DIM)
LOCAL = jaxkv.LayerConfig(num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, window=5)
PATTERNS = {"alike": (FULL,) * (3 if NIGHTLY else 2), "two periods and a rest": (LOCAL, FULL) * 2 + (LOCAL,)}
STEPS = (((12,), (2, 9, 1)), ((ROWS, 1), (1, 0, 1)))

quickly_compiled = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def make_config(layers, **fields):
    return jaxkv.CacheConfig(
        layers=layers, max_seqs=ROWS, max_seq_len=40, num_blocks=25, block_size=4, dtype="float32", **fields
    )


def normal(shape, seed):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def unrolled(cache, x, counts):
    """Each layer attends to what the one before it gave; keys and values are its queries'."""
    cache = jaxkv.extend(cache, counts)
    for i in range(cache.num_layers):
        x, cache = jaxkv.attention(x, x[..., :KV_HEADS, :], x[..., -KV_HEADS:, :] + i, cache, layer=i)
    return x, cache


def scanned(cache, x, counts, planned=True):
    cache = jaxkv.extend(cache, counts)
    step = jaxkv.plan_step(cache, x.shape[:-2]) if planned else None
    size = cache.config.period
    periods = cache.num_layers // size

    def attend(x, cache, layer, i):
        return jaxkv.attention(
            x, x[..., :KV_HEADS, :], x[..., -KV_HEADS:, :] + jnp.asarray(i, x.dtype), cache, layer=layer, step=step
        )

    def period(carry, number):
        x, cache = carry
        for j in range(size):
            layer = number if size == 1 else (j, number)
            x, cache = attend(x, cache, layer, number * size + j)
        return (x, cache), None

    (x, cache), _ = jax.lax.scan(period, (x, cache), jnp.arange(periods, dtype=jnp.int32))
    for i in range(periods * size, cache.num_layers):
        x, cache = attend(x, cache, i, i)
    return x, cache


def one_by_one(cache, x, counts):
    """As `scanned`, but for layers that are taken out and put back."""
    cache = jaxkv.extend(cache, counts)

    def one(carry, i):
        x, cache = carry
        layer = cache.layers[i]
        x, layer = jaxkv.attention(x, x[..., :KV_HEADS, :], x[..., -KV_HEADS:, :] + jnp.asarray(i, x.dtype), layer)
        return (x, cache.with_layer(i, layer)), None

    return jax.lax.scan(one, (x, cache), jnp.arange(cache.num_layers, dtype=jnp.int32))[0]


def listed(cache, x, counts):
    cache = jaxkv.extend(cache, counts)
    layers = list(cache.layers)
    for i, layer in enumerate(layers):
        x, layers[i] = jaxkv.attention(x, x[..., :KV_HEADS, :], x[..., -KV_HEADS:, :] + i, layer)
    return x, cache.with_layers(layers)


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def equal_caches(one, other):
    """Tables alike, and in every layer the same tokens, wherever their pools are."""
    equal(one.tables, other.tables)
    for i in range(one.num_layers):
        equal(one.combined(i), other.combined(i))


@pytest.mark.parametrize("name", PATTERNS if NIGHTLY else ["alike"])  # periods: tests/models/test_scan.py
def test_stacked_or_not_scanned_or_not(name):
    """The same tables to the bit; outputs and what is stored within what rounding in another order makes of them. The
    first step in every way, and a decode step after it in a scan."""
    ways = [scanned, unrolled, listed]
    if name == "alike":
        ways += [one_by_one, functools.partial(scanned, planned=False)]

    @quickly_compiled
    def all_ways(plain, stacked, x, counts):
        wanted, plain = unrolled(plain, x, counts)
        return wanted, plain, [way(poison(cache), x, counts) for way, cache in zip(ways, stacked, strict=False)]

    plain = jaxkv.init(make_config(PATTERNS[name]))
    stacked = [jaxkv.init(make_config(PATTERNS[name], stacked=True))] * len(ways)
    for axes, counts in STEPS:
        x = normal((*axes, HEADS, HEAD_DIM), len(axes))
        wanted, plain, got = all_ways(plain, stacked, x, jnp.array(counts, jnp.int32))
        for out, cache in got:
            np.testing.assert_allclose(out, wanted, rtol=2e-6, atol=2e-6)
            equal(plain.tables, cache.tables)
            jaxkv.check_invariants(cache)
            for i in range(plain.num_layers):
                np.testing.assert_allclose(cache.combined(i), plain.combined(i), rtol=2e-6, atol=2e-6)
        stacked = [got[0][1]]


def test_what_moves_blocks_moves_them_in_every_layer_of_a_stack():
    """Fork, reorder and truncate, over layers of two kinds, against a cache that is not stacked."""
    layers = PATTERNS["two periods and a rest"]

    append = quickly_compiled(jaxkv.append)

    @quickly_compiled
    def move(cache):
        cache = jaxkv.reorder(cache, jnp.array([2, 1, 2], jnp.int32))
        return jaxkv.truncate(cache, jnp.array([7, 9, 9], jnp.int32))

    def play(cache, kv):
        cache = append(cache, kv, kv, np.array([6, 3, 0], np.int32))
        cache = append(jaxkv.fork(cache, 0, 2), kv, kv, np.array([1, 0, 2], np.int32))
        return append(move(cache), kv, kv, np.array([1, 1, 1], np.int32))

    kv = normal((len(layers), ROWS, 6, KV_HEADS, HEAD_DIM), 0)
    plain, stacked = (play(jaxkv.init(make_config(layers, stacked=s)), kv) for s in (False, True))
    jaxkv.check(stacked)
    jaxkv.check_invariants(stacked)
    equal_caches(plain, stacked)
    assert stacked.bytes == plain.bytes == stacked.config.bytes
    k, _ = jaxkv.gather(stacked, 0, layer=3)
    equal(k, jaxkv.gather(plain, 0, layer=3)[0])
    stored = stacked.store(2, 0, 1, 7, np.ones(HEAD_DIM), np.zeros(HEAD_DIM))
    np.testing.assert_array_equal(stored.load(2, 0, 1, 7)[0], 1)
    equal(stored.combined(4), stacked.combined(4))


def test_permuted_blocks_read_the_same():
    layers = PATTERNS["alike"]
    cache = jaxkv.init(make_config(layers, stacked=True))
    kv = normal((len(layers), ROWS, 6, KV_HEADS, HEAD_DIM), 0)
    cache = jaxkv.append(cache, kv, kv, [6, 3, 0])
    moved = quickly_compiled(lambda cache: permute_blocks(poison(cache)))(cache)
    assert moved.tables[0].tables.tolist() != cache.tables[0].tables.tolist()
    for i in range(len(layers)):
        equal(moved.combined(i), cache.combined(i))


def big(num_layers, **fields):
    """A cache of shapes alone, large enough for a copy of it to show."""
    layer = jaxkv.LayerConfig(num_kv_heads=8, head_dim=128)
    config = jaxkv.CacheConfig(layers=(layer,) * num_layers, max_seqs=8, max_seq_len=1024, num_blocks=512, **fields)
    cache = jax.eval_shape(lambda: jaxkv.init(config))
    arrays = [jax.ShapeDtypeStruct((8, 1, n, 128), jnp.bfloat16) for n in (32, 8)]

    def step(cache, q, kv, counts):
        cache = jaxkv.extend(cache, counts)
        plan = jaxkv.plan_step(cache, q.shape[:-2])

        def one(carry, i):
            q, cache = carry
            return jaxkv.attention(q, kv, kv, cache, layer=i, step=plan), None

        return jax.lax.scan(one, (q, cache), jnp.arange(num_layers, dtype=jnp.int32))[0]

    return jax.jit(step, donate_argnames="cache"), (cache, *arrays, jax.ShapeDtypeStruct((8,), jnp.int32))


def test_a_scan_copies_no_pool_and_is_as_small_for_many_layers():
    sizes = []
    for num_layers in (2, 28):
        step, arguments = big(num_layers, stacked=True)
        assert_no_copy(step, *arguments, temp_fraction=0.5 if num_layers == 2 else 0.02)
        sizes.append(len(step.lower(*arguments).compile().as_text().splitlines()))
    assert sizes[1] <= 1.3 * sizes[0]


def test_refusals():
    def attend(cache, layer):
        x = jnp.ones((ROWS, 1, HEADS, HEAD_DIM))
        return jax.jit(lambda i: jaxkv.attend(x, cache, layer=layer(i)))(1)

    alike = jaxkv.init(make_config(PATTERNS["alike"]))
    with pytest.raises(ValueError, match=re.escape("make the cache with CacheConfig(stacked=True)")):
        attend(alike, lambda i: i)
    mixed = jaxkv.init(make_config(PATTERNS["two periods and a rest"], stacked=True))
    says = "they repeat with a period of 2. Scan over the repeats, and give layer=(index in the pattern, number of the "
    with pytest.raises(ValueError, match=re.escape(f"{says}repeat), such as layer=(1, i) in a scan over i;")):
        attend(mixed, lambda i: 2 * i)
    with pytest.raises(ValueError, match="the index in the pattern, must be at most 1, not 3"):
        attend(mixed, lambda i: (3, i))
    with pytest.raises(IndexError, match=r"layer\[1\], the number of the repeat, must be from 0 to 2, not 3"):
        mixed.layer((0, 3))
    with pytest.raises(ValueError, match="must be an integer"):
        attend(mixed, lambda i: (i, 0))
    shared = jaxkv.LayerConfig(num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, shares_with=0)
    sharing = jaxkv.init(make_config((FULL, shared), stacked=True))
    with pytest.raises(ValueError, match="Layer 1 shares another's keys and values"):
        attend(sharing, lambda i: (1, i))
    with pytest.raises(ValueError, match="stacked must be True or False, not 'yes'"):
        make_config((FULL,), stacked="yes")


def test_a_layer_of_a_list_goes_back_to_its_own_place_only():
    cache = jaxkv.init(make_config(PATTERNS["alike"], stacked=True))
    layers = list(cache.layers)
    for wrong in (lambda i: 1, lambda i: i):
        with pytest.raises(ValueError, match="Layer 0 stands in a list of its own"):
            jax.eval_shape(lambda i, wrong=wrong: cache.with_layer(wrong(i), layers[0]), jnp.int32(0))
    equal(cache.with_layer(0, layers[0]).pools, cache.pools)
