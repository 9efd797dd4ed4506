"""What rows share stays shared when they leave and come back: moved once, in one call or in several."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nightly import NIGHTLY, skip_by_day
from steps import gather_row, on_device

import jaxkv
from jaxkv import LayerConfig
from jaxkv._tiers.host_tier import swap_in_beside
from jaxkv.testing import poison

SIZE, ROWS = 4, 4
WIDE = LayerConfig(num_kv_heads=2, head_dim=8)
CONFIGS = {
    "two groups": dict(layers=(WIDE, LayerConfig(num_kv_heads=1, head_dim=4, window=9), WIDE)),
    "int8, stacked": dict(layers=(WIDE, WIDE), dtype="int8", stacked=True),
    "int4": dict(layers=(WIDE,), dtype="int4"),
    "float8": dict(layers=(WIDE,), dtype="float8_e4m3fn"),
    "first tokens": dict(layers=(LayerConfig(num_kv_heads=2, head_dim=8, window=6, sink_tokens=4),)),
    "bounds": dict(layers=(LayerConfig(num_kv_heads=2, head_dim=8, bounds=True),), dtype="bfloat16"),
    "latent": dict(layers=(LayerConfig.latent(8, 4),)),
    "evicts": dict(layers=(LayerConfig(num_kv_heads=2, head_dim=8, evict="layer"),)),
    "evicts by heads": dict(layers=(LayerConfig(num_kv_heads=2, head_dim=8, evict="head"), WIDE)),
    "padding": dict(layers=(WIDE,), head_dim_multiple=128, join_kv=True),
}


def make_cache(name, num_blocks=40, **fields):
    given = CONFIGS[name] if isinstance(name, str) else name
    default = {"max_seqs": ROWS, "max_seq_len": 48, "num_blocks": num_blocks, "block_size": SIZE, "dtype": "float32"}
    return on_device(jaxkv.init(jaxkv.CacheConfig(**(default | given | fields))))


append, swap_in = jax.jit(jaxkv.append), jax.jit(jaxkv.swap_in)


def add(cache, counts, seed=0):
    """A cache after a step of so many random tokens for each row."""
    rng, num_tokens = np.random.default_rng(seed), 24
    shapes = [(cache.config.max_seqs, num_tokens, x.num_kv_heads, x.head_dim) for x in cache.config.layers]
    k, v = ([rng.standard_normal(shape).astype(np.float32) for shape in shapes] for _ in range(2))
    v = [None if layer.rank is not None else x for layer, x in zip(cache.config.layers, v, strict=True)]
    dtype = "bfloat16" if cache.config.dtype == "bfloat16" else "float32"
    k, v = jax.tree.map(lambda x: jnp.asarray(x, dtype), (k, v))
    return append(cache, k, v, jnp.array(counts, jnp.int32))


def forks(name, length=22, **fields):
    """Four rows: three forks of `length` tokens, which differ in one token more, and another row."""
    cache = jaxkv.fork(add(make_cache(name, **fields), [length, 0, 0, 9]), 0, [1, 2])
    return add(cache, [1, 1, 1, 1], seed=1)


def contents(cache, row):
    return [gather_row(cache, row, i) for i in range(cache.num_layers)]


def assert_same(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def shared_tables(cache):
    """For each group which entries of the tables name the same block."""
    found = []
    for t in cache.tables:
        numbers = itertools.count(1)
        names = {0: 0}
        found.append([[names.setdefault(b, b and next(numbers)) for b in row] for row in np.asarray(t.tables).tolist()])
    return found


def bytes_of(host):
    return sum(x.nbytes for x in jax.tree.leaves(host.pools))


@pytest.mark.parametrize("name", CONFIGS if NIGHTLY else ["two groups"])
def test_siblings_travel_together(name):
    cache = forks(name)
    rows = [contents(cache, row) for row in range(ROWS)]
    away, host = jaxkv.swap_out(cache, [2, 0, 1, 3])
    assert away.blocks_in_use == 0
    moved = [len(np.unique(t.tables)) - 1 for t in map(jax.device_get, cache.tables)]
    for group, layers in enumerate(cache.config.groups):
        assert host.blocks[layers[0]].shape[0] == 1 << (moved[group] - 1).bit_length(), "each block is moved once"
    back = swap_in(away, [2, 0, 1, 3], host)
    jaxkv.check_invariants(back)
    jaxkv.check(back)
    assert shared_tables(back) == shared_tables(cache) and back.blocks_in_use == cache.blocks_in_use
    assert_same([contents(back, row) for row in range(ROWS)], rows)
    # They go on each for itself.
    more, stayed = (add(x, [3, 2, 1, 0], seed=2) for x in (back, cache))
    assert_same(contents(more, 1), contents(stayed, 1))
    jaxkv.check_invariants(more)


@skip_by_day("by day they travel together, and rows thinned by heads in test_thinned_rows")
@pytest.mark.parametrize("name", CONFIGS)
def test_one_by_one(name):
    """Each moved by a call of its own, to where others hold the same: no block more is taken than there were."""
    cache = forks(name)
    rows, before, hosts = [contents(cache, row) for row in range(ROWS)], cache.blocks_in_use, []
    for row in range(ROWS):
        cache, host = jaxkv.swap_out(cache, row)
        hosts.append(host)
    for row in (1, 3, 0, 2):
        cache = swap_in(cache, [row], hosts[row])
        jaxkv.check_invariants(cache)
    jaxkv.check(cache)
    assert cache.blocks_in_use == before
    assert_same([contents(cache, row) for row in range(ROWS)], rows)


def test_beside_a_sibling_that_has_gone_on():
    """A window layer of it holds some of what both have in common, and the host brings the rest."""
    cache = forks("two groups")
    row = contents(cache, 0)
    cache, host = jaxkv.swap_out(cache, 0)
    cache = poison(add(cache, [0, 4, 0, 0], seed=2))
    first_retained = [cache.config.first_retained_block(group, 27) for group in range(2)]
    own, dropped = host.drop_shared(22 // SIZE, first_retained, cache.config.group_sink_blocks)
    assert first_retained == [0, 4] and dropped == [5, 1] and bytes_of(own) < bytes_of(host)
    back = jax.jit(swap_in_beside)(cache, 0, own, 1, 22 // SIZE)
    jaxkv.check_invariants(back)
    assert_same(contents(back, 0), row)


@pytest.mark.parametrize("name", CONFIGS if NIGHTLY else ["two groups"])
def test_sent_one_by_one(name):
    """To where siblings are: no block more is taken than there were, and nothing that is not equal is shared."""
    cache = forks(name)
    rows, to = [contents(cache, row) for row in range(ROWS)], make_cache(name, num_blocks=cache.config.num_blocks)
    for row in (2, 0, 3, 1):
        to = jaxkv.send(cache, row, to=to)
        jaxkv.check_invariants(to)
    jaxkv.check(to)
    assert to.blocks_in_use == cache.blocks_in_use
    assert_same([contents(to, row) for row in range(ROWS)], rows)
    # A group of heads' own rows has several blocks for each of the config's.
    shares = [blocks // cache.config.num_blocks for blocks in cache.config.group_blocks]
    held = [len(np.unique(tables.tables)) - 1 for tables in cache.tables]
    few = make_cache(name, num_blocks=max(-(-n // share) for n, share in zip(held, shares, strict=True)) - 1)
    with pytest.raises(jaxkv.OutOfBlocks, match="beside those that they share"):
        for row in (0, 3, 1, 2):
            few = jaxkv.send(cache, row, to=few)
    jaxkv.check(few)


def test_some_of_them_and_the_rest_later():
    """The first brings the blocks; who comes later, also from among them, shares those that are still there."""
    cache = forks("two groups")
    rows = [contents(cache, row) for row in range(ROWS)]
    cache, host = jaxkv.swap_out(cache, [0, 1, 2])
    assert bytes_of(host[1]) < bytes_of(host)
    cache = jaxkv.swap_in(cache, 2, host[2])
    alone = cache.blocks_in_use
    cache = jaxkv.swap_in(cache, 0, host[0])
    assert cache.blocks_in_use - alone <= 3, "only what is its own"
    cache = jaxkv.free(cache, [0, 2])
    cache = jaxkv.swap_in(cache, 1, host[1])
    jaxkv.check_invariants(cache)
    assert_same([contents(cache, row) for row in (1, 3)], [rows[1], rows[3]])


def test_there_is_room_for_siblings_but_not_for_copies():
    """Eight forks of 25 blocks, as many as fit."""
    fields = dict(layers=(WIDE,), max_seqs=8, max_seq_len=200)
    cache = add(make_cache(fields, num_blocks=8), [20, *[0] * 7])
    cache = jaxkv.fork(cache, [0] * 7, range(1, 8))
    for rows in (range(8), *[[row] for row in range(8)]):
        away, host = jaxkv.swap_out(cache, list(rows))
        cache = jaxkv.swap_in(away, list(rows), host)
        assert not cache.failed.any() and cache.blocks_in_use == 5
        jaxkv.check_invariants(cache)


def test_a_row_that_is_refused_leaves_its_share_to_the_next():
    fields = dict(layers=(WIDE,))
    cache = forks(fields)  # 5 shared, 1 of each of three, and 3
    _, host = jaxkv.swap_out(cache, [0, 1, 2, 3])
    sizes = ((10, [3]), (6, [1, 2, 3]), *NIGHTLY * ((11, []), (8, [3]), (7, [2, 3]), (5, [0, 1, 2])))
    for num_blocks, failed in sizes:
        back = swap_in(make_cache(fields, num_blocks=num_blocks), [0, 1, 2, 3], host)
        jaxkv.check_invariants(back)
        assert np.flatnonzero(back.failed).tolist() == failed
    occupied = add(make_cache(fields, num_blocks=12), [1, 0, 0, 0])  # the first that shares is not let in
    back = swap_in(occupied, [0, 1, 2, 3], host)
    jaxkv.check_invariants(back)
    assert back.failed.tolist() == [True, False, False, False]
    assert_same([contents(back, row) for row in (1, 2, 3)], [contents(cache, row) for row in (1, 2, 3)])


def test_what_can_still_be_written_is_not_shared():
    """Neither a block of this step, nor one that is not full, even if it happens to hold the same numbers."""
    fields = dict(layers=(WIDE,))
    cache = add(make_cache(fields), [8, 0, 0, 0])
    rows = contents(cache, 0)
    cache, host = jaxkv.swap_out(cache, 0)
    cache = jaxkv.extend(cache, [0, 8, 0, 0])  # takes the blocks that were given back, and has not written them yet
    back = jaxkv.swap_in(cache, 0, host)
    assert back.blocks_in_use == 4
    assert_same(contents(back, 0), rows)
    partial, host = jaxkv.swap_out(jaxkv.fork(add(make_cache(fields), [6, 0, 0, 0]), 0, 1), 0)
    back = jaxkv.swap_in(partial, 0, host)
    assert back.blocks_in_use == 3
    jaxkv.check_invariants(back)


def test_others_with_the_same_beginning_in_the_deepest_layer_only():
    """Blocks are shared if all layers agree, bit by bit."""
    fields = dict(layers=(WIDE, WIDE), stacked=True)
    cache = add(make_cache(fields), [8, 0, 0, 0])
    before = contents(cache, 0)
    away, host = jaxkv.swap_out(jaxkv.fork(cache, 0, 1), 0)
    pool = away.pools[0]
    changed = away.replace(pools=(pool.__class__(pool.kv.at[: pool.kv.shape[0] // 2].multiply(2)), *away.pools[1:]))
    back = jaxkv.swap_in(changed, 0, host)
    assert back.blocks_in_use == 4
    assert_same(contents(back, 0), before)


def test_pickled_and_sliced():
    import pickle

    _, host = jaxkv.swap_out(forks("two groups"), [0, 1, 2])
    host = pickle.loads(pickle.dumps(jax.tree.map(np.asarray, host)))
    cache = make_cache("two groups")
    for row in (2, 1, 0):
        cache = jaxkv.swap_in(cache, row, host[row])
    together = jaxkv.swap_in(make_cache("two groups"), [0, 1, 2], host)
    assert cache.blocks_in_use == together.blocks_in_use
    assert_same([contents(cache, r) for r in range(3)], [contents(together, r) for r in range(3)])


@skip_by_day("by day rows travel over devices in test_send")
@pytest.mark.parametrize("by_heads", [False, True])
def test_over_devices(by_heads):
    mesh = jax.make_mesh((2,), ("heads",), devices=jax.devices()[:2])
    layer = LayerConfig(num_kv_heads=2, head_dim=8, evict="head" if by_heads else None)
    config = jaxkv.CacheConfig(
        layers=(layer,), max_seqs=ROWS, max_seq_len=48, num_blocks=40, block_size=SIZE, dtype="float32"
    )
    whole = forks(dict(layers=(layer,)))
    with jax.set_mesh(mesh):
        cache = jaxkv.init(config, mesh=mesh, heads="heads")
        cache = add(jaxkv.fork(add(cache, [22, 0, 0, 9]), 0, [1, 2]), [1, 1, 1, 1], seed=1)
        before = cache.blocks_in_use
        away, host = jaxkv.swap_out(cache, [0, 1, 2])
        back = jaxkv.swap_in(away, [0, 1, 2], host)
        assert back.blocks_in_use == before
        for row in (0, 2):
            back, host = jaxkv.swap_out(back, row)
            back = jaxkv.swap_in(back, row, host)
            jaxkv.check_invariants(back)
        assert back.blocks_in_use == before
        found = [contents(back, r) for r in range(ROWS)]
    assert_same(found, [contents(whole, r) for r in range(ROWS)])
