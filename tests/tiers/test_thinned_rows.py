"""Rows of which tokens were evicted, moved: to host memory and back, to a file and back, to another cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nightly import NIGHTLY

import jaxkv
from jaxkv import LayerConfig
from jaxkv.testing import poison

skip_by_day = pytest.mark.skipif(not NIGHTLY, reason="many small programs")
ROWS, LENGTHS = 3, (13, 5, 9)
LAYERS = (
    LayerConfig(num_kv_heads=2, head_dim=4, evict="head"),
    LayerConfig(num_kv_heads=2, head_dim=4, evict="layer", dtype="int8"),
)


def make_config(**fields):
    sizes = {"max_seqs": ROWS, "max_seq_len": 30, "num_blocks": 20, "block_size": 4, "dtype": "float32"}
    return jaxkv.CacheConfig(layers=LAYERS, **sizes | fields)


@functools.cache
def thinned():
    """Rows of which each head, or the layer, has kept its own part: nothing, some, or all."""
    draw = np.random.default_rng(0)
    cache = jaxkv.init(make_config())
    kv = [draw.normal(size=(2, ROWS, max(LENGTHS), 2, 4)).astype(np.float32) for _ in range(2)]
    cache = jax.jit(jaxkv.append)(cache, *kv, jnp.array(LENGTHS, jnp.int32))
    keep = draw.random((ROWS, 2, 13)) < 0.6
    keep[0, 1] = False  # a head that has kept nothing
    keep[1] = True  # a row that has kept everything
    cache = jaxkv.evict(jaxkv.evict(cache, keep, layer=0), keep[:, 0], layer=1)
    jaxkv.check_invariants(cache)
    return cache


def assert_moved(old, new, pairs):
    """Rows of one cache are what rows of the other were, and nothing else is read."""
    jaxkv.check_invariants(new)
    new = poison(new)
    for layer in range(len(LAYERS)):
        (ours, theirs), (held, others) = ([f(c) for c in (old, new)] for f in (
            lambda c: [np.asarray(x) for x in c.separate(layer)], lambda c: np.asarray(c.layers[layer].held)  # noqa: B023
        ))  # fmt: skip
        for a, b in pairs:
            for x, y in zip(ours, theirs, strict=True):
                np.testing.assert_array_equal(x[a], y[b])
            assert held[a].tolist() == others[b].tolist()
            for name in ("evicted", "thinned"):
                x, y = (getattr(c.layers[layer].tables, name).reshape(-1, c.config.max_seqs) for c in (old, new))
                assert x[:, a].tolist() == y[:, b].tolist()
    assert [int(old.lengths[a]) for a, _ in pairs] == [int(new.lengths[b]) for _, b in pairs]


def test_to_host_memory_and_back():
    cache = thinned()
    emptied, host = jaxkv.swap_out(cache, [2, 0])
    jaxkv.check_invariants(emptied)
    assert emptied.lengths.tolist() == [0, 5, 0] and host.lengths.tolist() == [9, 13]
    assert emptied.blocks_in_use == jaxkv.free(cache, [0, 2]).blocks_in_use
    assert_moved(cache, jax.jit(jaxkv.swap_in)(poison(emptied), jnp.array([0, 2]), host), [(2, 0), (0, 2), (1, 1)])
    if not NIGHTLY:
        return
    one = jax.jit(jaxkv.swap_in)(poison(emptied), jnp.array([2]), host[1])
    assert_moved(cache, one, [(0, 2), (1, 1)])
    assert one.blocks_in_use == jaxkv.free(cache, 2).blocks_in_use


@skip_by_day
def test_no_room_for_a_heads_blocks_leaves_the_row_empty():
    _, host = jaxkv.swap_out(thinned(), 0)
    needed = [int(count.sum()) for count in host.count]
    for group, enough in enumerate(needed):
        blocks = [n - (g == group) for g, n in enumerate(needed)]
        cache = jaxkv.swap_in(jaxkv.init(make_config(num_blocks=None, group_blocks=blocks)), 1, host)
        assert cache.lengths.tolist() == [0, 0, 0] and cache.failed.tolist() == [False, True, False], enough
        with pytest.raises(jaxkv.OutOfBlocks, match="1"):
            jaxkv.check(cache)
    cache = jaxkv.swap_in(jaxkv.init(make_config(num_blocks=None, group_blocks=needed)), 1, host)
    assert_moved(thinned(), cache, [(0, 1)])


@skip_by_day
@pytest.mark.parametrize("block_size", [4, 3])
def test_to_a_file_and_back(block_size, tmp_path):
    cache = thinned()
    jaxkv.save(tmp_path / "rows", cache)
    config = make_config(block_size=block_size, max_seqs=4, num_blocks=30)
    into = poison(jaxkv.init(config))
    assert_moved(
        cache, jaxkv.load(tmp_path / "rows", into=into, rows=[3, None, 0], partial_windows=True), [(0, 3), (2, 0)]
    )
    if block_size == 4:
        assert_moved(cache, jaxkv.load(tmp_path / "rows"), [(0, 0), (1, 1), (2, 2)])


@skip_by_day
@pytest.mark.parametrize("block_size", [4, 2])
def test_to_another_cache(block_size):
    cache = thinned()
    to = poison(jaxkv.init(make_config(block_size=block_size, max_seqs=4, num_blocks=30)))
    assert_moved(cache, jaxkv.send(cache, [0, 2], to=to, at=[3, 1]), [(0, 3), (2, 1)])


@skip_by_day
def test_a_row_that_came_back_goes_on():
    """The next token's position follows what was seen, and truncate still knows what is gone."""
    cache, host = jaxkv.swap_out(thinned(), 0)
    back = jaxkv.extend(jaxkv.swap_in(cache, 0, host), [1, 0, 0])
    assert jaxkv.positions(back, (ROWS, 1))[0].tolist() == [13]
    assert jaxkv.truncate(back, [13, 30, 30]).lengths.tolist()[0] == 13
    assert jaxkv.truncate(back, [12, 30, 30]).failed.tolist() == [True, False, False]


@skip_by_day
def test_rows_of_another_kind_are_refused(tmp_path):
    cache, host = jaxkv.swap_out(thinned(), 0)
    plain = jaxkv.init(make_config().replace(layers=[LayerConfig(num_kv_heads=2, head_dim=4)] * 2))
    with pytest.raises(ValueError, match="swap them into a cache like the one they come from"):
        jaxkv.swap_in(plain, 0, host)
    with pytest.raises(ValueError, match=r"has evict = head, .*but that of the cache sent to has evict = None"):
        jaxkv.send(thinned(), 0, to=plain)
    jaxkv.save(tmp_path / "rows", cache, rows=[1])
    with pytest.raises(jaxkv.CacheFileError, match=r"has layer 0 with .*evict = head"):
        jaxkv.load(tmp_path / "rows", into=plain)
