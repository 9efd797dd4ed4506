"""A step that is compiled takes what every function makes of its cache, without being compiled again."""

import functools

import jax
import numpy as np
import pytest
from nightly import NIGHTLY
from support.compiled import compiled

import jaxkv
import jaxkv.convert

LAYERS = (
    jaxkv.LayerConfig(num_kv_heads=2, head_dim=8, evict="layer"),
    jaxkv.LayerConfig(num_kv_heads=2, head_dim=8, index_dim=4),
)
CONFIG = jaxkv.CacheConfig(layers=LAYERS, max_seqs=3, max_seq_len=64, num_blocks=32, block_size=4, dtype="float32")
KV, Q = np.ones((2, 3, 9, 2, 8), np.float32), np.ones((3, 1, 4, 8), np.float32)


def there_and_back(cache, tmp_path):
    cache, host = jaxkv.swap_out(cache, [0])
    return jaxkv.swap_in(cache, [0], host)


def there_and_back_compiled(cache, tmp_path):
    cache, host = jaxkv.swap_out(cache, [0])
    return jax.jit(jaxkv.swap_in)(cache, [0], host)


def saved(cache, tmp_path, **into):
    jaxkv.save(tmp_path / "rows", cache, rows=[0, 1])
    return jaxkv.load(tmp_path / "rows", **into)


def like(cache):
    """An empty cache where another one lies."""
    if cache.pools[0].heads is not None:
        return jaxkv.init(cache.config, mesh=cache.pools[0].kv.sharding.mesh)
    empty = jaxkv.init(cache.config)
    return jax.tree.map(lambda x, old: jax.device_put(x, old.sharding) if old.committed else x, empty, cache)


def through_prefix_cache(cache, tmp_path):
    prefix = jaxkv.PrefixCache(cache.config)
    cache = prefix.insert(cache, 0, range(9))
    cache = prefix.adopt(cache, 2, prefix.match(range(9)))
    return prefix.make_room(cache, 30)


def through_prefix_on_host(cache, tmp_path):
    prefix = jaxkv.PrefixCache(cache.config, spill_bytes=1 << 20)
    cache = prefix.insert(cache, 0, range(9))
    cache = prefix.make_room(jaxkv.free(cache, [0]), 32)  # what was kept goes to the host
    return prefix.adopt(cache, 2, prefix.match(range(9)))


CALLS = {
    "append": lambda cache, _: jaxkv.append(cache, KV, KV, [1, 2, 0]),
    "attention": lambda cache, _: jaxkv.attention(
        Q, KV[0, :, :1], KV[0, :, :1], jaxkv.extend(cache, [1, 1, 1]), layer=1
    )[1],
    "evict": lambda cache, _: jaxkv.evict(cache, scores=np.ones((3, 64), np.float32), budget=3, layer=0),
    "extend": lambda cache, _: jaxkv.extend(cache, [1, 2, 3]),
    "fork": lambda cache, _: jaxkv.fork(cache, 0, [2]),
    "free": lambda cache, _: jaxkv.free(cache, [True, False, False]),
    "keep": lambda cache, _: jaxkv.keep(jaxkv.extend(cache, [3, 0, 0]), [[0, 2], [-1, -1], [-1, -1]]),
    "load": lambda cache, tmp_path: saved(cache, tmp_path, into=like(cache)),
    "reorder": lambda cache, _: jaxkv.reorder(cache, [1, 0, 2]),
    "reserve": lambda cache, _: jaxkv.reserve(cache, [20, 20, 4]),
    "send": lambda cache, _: jaxkv.send(cache, [0, 1], to=like(cache)),
    "swap_in": there_and_back,
    "swap_in compiled": there_and_back_compiled,
    "swap_out": lambda cache, _: jaxkv.swap_out(cache, [1])[0],
    "truncate": lambda cache, _: jaxkv.truncate(cache, [3, 3, 0]),
    "write_index": lambda cache, _: jaxkv.write_index(
        jaxkv.extend(cache, [1, 1, 1]), np.ones((3, 1, 4), np.float32), layer=1
    ),
    "write": lambda cache, _: jaxkv.write(jaxkv.extend(cache, [1, 1, 1]), KV[1, :, :1], KV[1, :, :1], layer=1),
    "PrefixCache": through_prefix_cache,
    "PrefixCache, host": through_prefix_on_host,
    "with_layers": lambda cache, _: cache.with_layers(list(cache.layers)),
    "store": lambda cache, _: cache.store(1, 0, 0, 1, np.ones(8, np.float32), np.ones(8, np.float32)),
    "init": lambda cache, _: like(cache),
}  # fmt: skip
NEW = {  # caches that are made of nothing that lies anywhere are like those that `init` makes
    "load": lambda cache, tmp_path: saved(cache, tmp_path),
    "from_dense": lambda cache, _: jaxkv.convert.from_dense(
        KV, KV, [9, 5, 3], max_seq_len=64, num_blocks=32, block_size=4
    ),
    "init": lambda cache, _: jaxkv.init(CONFIG),
}  # fmt: skip
# Take or return no cache, or only look at one, or do both halves of what is tried above.
OTHERS = {
    "Beams", "BlockBounds", "Cache", "CacheConfig", "CacheError", "CacheFileError", "DamagedFile", "Engine",
    "EngineFull", "Eviction",
    "HostBlocks", "LayerConfig", "Match", "OutOfBlocks", "OutOfWindow", "PrefixEvent", "Request",
    "RowShards", "SequenceTooLong",
    "Step", "attend", "beam_search", "block_bounds", "by_rows", "check", "check_invariants", "counts", "describe",
    "dot_product_attention", "explain", "gather", "generate", "jax_attention", "last", "left_align",
    "merge_attention", "Model", "partition_specs", "plan_step", "positions", "right_align", "save", "stats",
    "snapshots",
    "receive",  # puts rows as `load(into=)` does; it needs a process that sends them
    # Tried below, for they need layers that keep a state, or entries.
    "causal_conv", "compress", "gated_delta_rule", "read_states", "state_space", "write_states",
}  # fmt: skip

MOVES = ["load", "send", "swap_in", "swap_in compiled", "swap_out", "PrefixCache, host"]
PLACES = {
    "anywhere": lambda: None,
    "a device": lambda: jax.devices()[0],
    "a mesh": lambda: jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,)),
}
COMMITTED = ("a device", "a mesh")


@functools.cache
def begun(place):
    where = PLACES[place]()
    cache = jaxkv.init(CONFIG, mesh=where if place == "a mesh" else None)
    cache = jaxkv.append(cache, KV, KV, [9, 5, 0])
    return jax.device_put(cache, where) if place == "a device" else cache


@functools.cache
def compiled_step(place):
    step = jax.jit(lambda cache: jax.tree.map(lambda x: x, cache))
    step(begun(place))
    assert compiled(lambda: step(begun(place))) == 0
    return step


@pytest.mark.parametrize(
    "place, name",
    [("anywhere", name) for name in CALLS]
    + [(place, name) for place in COMMITTED for name in (MOVES if NIGHTLY else MOVES[:2])],
)
def test_a_step_is_not_compiled_again(name, place, tmp_path):
    step, cache = compiled_step(place), CALLS[name](begun(place), tmp_path)
    assert {x.committed for x in jax.tree.leaves(cache)} == {place != "anywhere"}
    assert compiled(lambda: step(cache)) == 0


@pytest.mark.parametrize("name", NEW)
def test_new_caches_lie_where_init_puts_them(name, tmp_path):
    cache = NEW[name](begun("anywhere"), tmp_path)
    assert {x.committed for x in jax.tree.leaves(cache)} == {False}


def test_every_public_name_is_tried():
    assert {name for name in jaxkv.__all__ if name not in OTHERS} <= set(CALLS) and set(jaxkv.__all__) >= OTHERS


@pytest.mark.parametrize("is_committed", [False, True])
def test_states_stay_where_they_are(is_committed):
    arrays = {"conv": ((6, 2), "float32"), "state": ((2, 3, 4), "float32"), "space": ((2, 4, 3), "float32")}
    layer = jaxkv.LayerConfig.recurrent(**arrays)
    config = jaxkv.CacheConfig(layers=(LAYERS[1], layer), max_seqs=3, max_seq_len=64, num_blocks=32, dtype="float32")
    cache = jaxkv.init(config)
    cache = jaxkv.extend(jax.device_put(cache, jax.devices()[0]) if is_committed else cache, [1, 1, 0])
    ones = lambda *shape: np.ones((3, 1, *shape), np.float32)  # noqa: E731
    _, conv = jaxkv.causal_conv(ones(6), np.ones((6, 3), np.float32), cache, layer=1, name="conv")
    _, delta = jaxkv.gated_delta_rule(
        ones(2, 3), ones(2, 3), ones(2, 4), -ones(2), ones(2), cache, layer=1, name="state"
    )
    _, space = jaxkv.state_space(
        ones(2, 4), ones(2), -np.ones(2, np.float32), ones(2, 3), ones(2, 3), cache, layer=1, name="space"
    )
    written = jaxkv.write_states(cache, jaxkv.read_states(cache, layer=1), layer=1)
    for found in (conv, delta, space, written):
        assert {x.committed for x in jax.tree.leaves(found)} == {is_committed}


@pytest.mark.parametrize("is_committed", [False, True])
def test_entries_stay_where_they_are(is_committed):
    layers = (jaxkv.LayerConfig(num_kv_heads=2, head_dim=8, compress_ratio=2), LAYERS[0].replace(evict=None, window=2))
    cache = jaxkv.init(jaxkv.CacheConfig(layers=layers, max_seqs=3, max_seq_len=64, num_blocks=32, dtype="float32"))
    cache = jaxkv.extend(jax.device_put(cache, jax.devices()[0]) if is_committed else cache, [2, 2, 0])
    found = jaxkv.compress(
        cache, lambda k, v, *_: (k[:, 0], v[:, 0]), layer=0, inputs=1, step=jaxkv.plan_step(cache, (3, 2))
    )
    assert {x.committed for x in jax.tree.leaves(found)} == {is_committed}


def test_caches_on_other_devices_stay_where_they_are(tmp_path):
    there = jax.devices()[1]
    cache = jax.device_put(begun("anywhere"), there)
    for to in (like(cache), jaxkv.init(CONFIG)):
        sent = jaxkv.send(cache, [0, 1], to=to)
        assert {x.sharding for x in jax.tree.leaves(sent)} == {x.sharding for x in jax.tree.leaves(to)}
        assert {x.committed for x in jax.tree.leaves(sent)} == {to.pools[0].kv.committed}
        np.testing.assert_array_equal(sent.read(1, 0, np.arange(9))[0], cache.read(1, 0, np.arange(9))[0])
    _, host = jaxkv.swap_out(cache, [0])
    back = jaxkv.swap_in(jaxkv.init(CONFIG), [0], host)
    assert {x.committed for x in jax.tree.leaves(back)} == {False}
