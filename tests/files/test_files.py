"""`save`, `load` and `describe`: what comes back is what went in, bit by bit."""

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nightly import NIGHTLY
from saved import CONFIGS, LAYERS, append, assert_same, config, contiguous, filled, shared

import jaxkv
from jaxkv._core.config import cache_config
from jaxkv._files import safetensors

# By day each is written once, and each is read once.
NEXT = [*zip(CONFIGS, [*list(CONFIGS)[1:], *list(CONFIGS)[:1]], strict=True)]


@pytest.mark.parametrize(("old", "new"), [*itertools.product(CONFIGS, CONFIGS)] if NIGHTLY else NEXT)
def test_every_layout_and_block_size_comes_back_in_every_other(caches, path, old, new):
    cache = caches[old]
    jaxkv.save(path, cache)
    target = dataclasses.replace(CONFIGS[new], dtype=CONFIGS[old].dtype)
    loaded = jaxkv.load(path, target, partial_windows=True)
    assert loaded.config == target
    assert_same(cache, loaded)
    more = [1, 3, 0, 9, 2]  # the copy lives on like the original
    assert_same(append(cache, more, seed=2), append(loaded, more, seed=2))


@pytest.mark.parametrize("name", CONFIGS)
def test_the_same_config_by_itself(caches, path, name):
    jaxkv.save(path, caches[name], model="m", metadata={"of": "chat"})
    saved = jaxkv.describe(path)
    assert saved.config == caches[name].config and saved.lengths == (25, 0, 13, 1, 26)
    assert (saved.model, saved.metadata) == ("m", {"of": "chat"})
    loaded = jaxkv.load(path, model="m")
    assert loaded.config == caches[name].config
    assert_same(caches[name], loaded)
    assert shared(loaded) == shared(caches[name])
    for new, old in zip(jax.tree.leaves(loaded), jax.tree.leaves(caches[name]), strict=True):
        assert (new.shape, new.dtype, new.weak_type) == (old.shape, old.dtype, old.weak_type)


@pytest.mark.parametrize("join_kv", [False, True, "head"])
def test_a_file_says_whether_keys_and_values_are_joined_and_an_older_one_that_they_are_not(path, monkeypatch, join_kv):
    cache = jaxkv.init(config(head_dim_multiple=32, join_kv=join_kv))
    jaxkv.save(path, cache)
    _, fields, _ = safetensors.read_all(path)
    assert json.loads(fields["cache"])["config"].get("join_kv", False) == join_kv
    monkeypatch.setattr(cache_config, "JOINING", ("cpu",))  # where they would be, unless it is said
    assert jaxkv.describe(path).config == cache.config


def test_sharing_survives_another_block_size(caches, path):
    cache = caches["blocks of 4"]  # rows 0 and 4 share 5 blocks, 20 tokens, of which those from 20 on see none
    assert shared(cache) == [5, 0]
    jaxkv.save(path, cache)
    for block_size, expected in ((2, 10), (1, 20), (8, 2), (5, 4), (32, 0)):
        loaded = jaxkv.load(path, config(block_size=block_size, num_blocks=100), partial_windows=True)
        assert shared(loaded) == [expected, 0]
        assert_same(cache, loaded)


def test_a_larger_block_that_can_still_be_written_is_not_shared(path):
    cache = append(jaxkv.init(config()), [4, 0, 0, 0, 0])
    cache = jax.jit(jaxkv.fork)(cache, jnp.array(0), jnp.array(4))
    assert shared(cache) == [1, 1]
    jaxkv.save(path, cache)
    loaded = jaxkv.load(path, config(block_size=8))
    assert shared(loaded) == [0, 0]
    assert_same(cache, loaded)


def test_a_shared_block_is_stored_once_and_nothing_but_tokens_is(caches, path):
    cache = caches["blocks of 4"]
    assert cache.blocks_in_use == (7 + 4 + 1 + 7 - 5) + (3 + 4 + 1 + 3 - 1)
    cache = jaxkv.reserve(jaxkv.testing.poison(cache), [40, 0, 0, 0, 0])  # reserved blocks are not stored
    jaxkv.save(path, cache)
    tensors = safetensors.read(path)
    assert tensors["layer.0"].shape == (14, 2, 2, 4, 8)
    assert tensors["layer.1"].shape == (2 + 2 + 1 + 2, 2, 1, 4, 5)  # what fell out of the window of 6 is not stored
    assert "layer.3" not in tensors  # it shares layer 1's
    assert not any(np.isnan(x.astype(np.float32)).any() for x in tensors.values())
    official = pytest.importorskip("safetensors.numpy", reason="needs the safetensors package")
    assert official.load_file(path).keys() == tensors.keys()


def test_chosen_rows_show_nothing_of_the_others(caches, path):
    cache = caches["blocks of 4"]
    jaxkv.save(path, cache, rows=[4, 3])
    assert safetensors.read(path)["layer.0"].shape[0] == 7 + 1
    loaded = jaxkv.load(path)
    assert loaded.lengths.tolist() == [26, 1, 0, 0, 0]
    assert_same(cache, loaded, [None, None, None, 1, 0])


@pytest.mark.parametrize("layout", ["paged", "contiguous"])
def test_into_the_empty_rows_of_another_cache(caches, path, layout):
    old = caches["blocks of 4"]
    jaxkv.save(path, old)
    target = config(max_seqs=7, block_size=3) if layout == "paged" else contiguous(max_seqs=7)
    busy = append(jaxkv.init(target), [0, 9, 0, 0, 0, 0, 2], seed=5)
    before = [np.asarray(x).tobytes() for x in jax.tree.leaves(busy)]
    both = jaxkv.load(path, into=busy, partial_windows=True)
    assert both.lengths.tolist() == [25, 9, 13, 1, 26, 0, 2]
    assert_same(old, both, [0, None, 2, 3, 4])
    assert_same(busy, both, [None, 1, None, None, None, None, 6])
    chosen = jaxkv.load(path, into=busy, rows=[5, None, None, 0, None], partial_windows=True)
    assert chosen.lengths.tolist() == [1, 9, 0, 0, 0, 25, 2]
    assert_same(old, chosen, [5, None, None, 0, None])
    assert [np.asarray(x).tobytes() for x in jax.tree.leaves(busy)] == before  # a new cache, the old one as it was
    assert_same(chosen, jaxkv.free(both, [0, 2, 3, 4]), [None, 1, None, None, None, None, 6])


def test_windows(path):
    """Rows that have given blocks back, and a prompt of which the next step will give most back."""
    small = config(num_blocks=None, group_blocks=(30, 12))
    cache = append(jaxkv.init(small), [9, 0, 8, 0, 0])
    cache = append(append(cache, [9, 0, 0, 1, 0], seed=1), [1, 0, 0, 0, 17], seed=2)
    jaxkv.check(cache)
    jaxkv.save(path, cache)
    for target in (
        small,
        small.replace(block_size=2, group_blocks=(60, 24)),
        small.replace(block_size=1, group_blocks=(99, 40)),
    ):
        loaded = jaxkv.load(path, target)
        assert_same(cache, loaded)
        assert_same(append(cache, [3, 1, 9, 0, 2], seed=3), append(loaded, [3, 1, 9, 0, 2], seed=3))
    with pytest.raises(jaxkv.OutOfWindow):  # what is gone is still gone
        jaxkv.check(jaxkv.truncate(jaxkv.load(path), [10, 0, 0, 0, 0]))
    # From position 14 on row 0's window is seen: in blocks of 8 it begins at 8, but the row holds layer 1 from 12 on.
    eights = small.replace(block_size=8, group_blocks=(20, 9))
    says = "holds the tokens of layer 1 from 12 on, .* blocks of 8 begin at 8: load it with a block_size that divides 4"
    with pytest.raises(jaxkv.CacheFileError, match=says):
        jaxkv.load(path, eights)
    with pytest.raises(jaxkv.CacheFileError, match="if it will not be truncated to fewer than its 19 tokens"):
        jaxkv.load(path, contiguous())
    for target in (eights, contiguous()):
        loaded = jaxkv.load(path, target, partial_windows=True)
        assert_same(append(cache, [3, 1, 9, 0, 2], seed=3), append(loaded, [3, 1, 9, 0, 2], seed=3))
    # Out of a contiguous cache, which keeps all, a window's group takes only what it needs.
    jaxkv.save(path, append(jaxkv.init(contiguous()), [40, 0, 0, 0, 40]))
    loaded = jaxkv.load(path, small)
    assert [g["blocks_used"] for g in jaxkv.stats(loaded)["groups"]] == [20, 4]


def test_blocks_that_a_prefix_cache_keeps_stay_its_own(caches, path):
    old = caches["blocks of 4"]
    jaxkv.save(path, old)
    six = config(max_seqs=6)
    prefix, busy = jaxkv.PrefixCache(six), append(jaxkv.init(six), [0, 0, 0, 0, 0, 12])
    busy = jaxkv.free(prefix.insert(busy, 5, list(range(12))), [5])
    both = jaxkv.load(path, into=busy)
    assert_same(old, both)
    assert jaxkv.stats(both)["blocks_kept"] == jaxkv.stats(busy)["blocks_kept"] > 0
    again = prefix.adopt(both, 5, prefix.match(list(range(12))))
    jaxkv.check_invariants(again)
    assert int(again.lengths[5]) == 8


def test_fewer_rows_than_were_saved(caches, path):
    jaxkv.save(path, caches["blocks of 4"])
    loaded = jaxkv.load(path, config(max_seqs=4))  # one of the five is empty
    assert_same(caches["blocks of 4"], loaded, [0, None, 1, 2, 3])


def test_empty_caches_and_rows(path):
    for empty in (config(), contiguous()):
        cache = jaxkv.init(empty)
        jaxkv.save(path, cache)
        assert_same(cache, jaxkv.load(path))
        jaxkv.save(path, cache, rows=[])
        assert jaxkv.describe(path).lengths == ()
        assert_same(jaxkv.init(empty), jaxkv.load(path))
        assert_same(cache, jaxkv.load(path, into=cache))


@pytest.mark.parametrize("evict", ["layer", "head"])
def test_no_rows_where_every_layer_evicts(path, evict):
    layer = jaxkv.LayerConfig(num_kv_heads=2, head_dim=8, evict=evict)
    cache = jaxkv.init(jaxkv.CacheConfig(layers=(layer,), max_seqs=2, max_seq_len=64, num_blocks=8))
    jaxkv.save(path, cache)
    assert jaxkv.load(path).lengths.tolist() == [0, 0]
    jaxkv.save(path, jaxkv.extend(cache, [3, 0]))
    assert jaxkv.load(path, into=cache, rows=[None, None]).lengths.tolist() == [0, 0]
    assert jaxkv.send(cache, [], to=cache).lengths.tolist() == [0, 0]


def test_a_full_cache(path):
    full = config(max_seqs=2, num_blocks=6, max_seq_len=12)
    cache = append(jaxkv.init(full), [12, 12])
    jaxkv.save(path, cache)
    assert_same(cache, jaxkv.load(path))


def test_a_failed_row_comes_back_without_its_failure(path):
    cache = jaxkv.extend(append(jaxkv.init(config()), [3, 0, 0, 0, 0]), [60, 0, 0, 0, 0])
    assert cache.failed[0]
    jaxkv.save(path, cache)
    assert_same(cache, jaxkv.load(path))


def test_a_compiled_step_takes_what_was_loaded(caches, path):
    cache = caches["blocks of 4"]
    jaxkv.save(path, cache)
    step = jax.jit(lambda *args: jaxkv.extend(*args))  # a function of its own has a cache of its own
    step(jax.block_until_ready(jaxkv.init(CONFIGS["blocks of 4"])), jnp.ones(5, jnp.int32))
    step(jaxkv.load(path), jnp.ones(5, jnp.int32))
    step(jaxkv.load(path, into=jaxkv.init(CONFIGS["blocks of 4"])), jnp.ones(5, jnp.int32))
    assert step._cache_size() == 1


def test_sharded_pools_stay_sharded(caches, path):
    cache = caches["blocks of 4"]
    jaxkv.save(path, cache)
    heads = jax.sharding.Mesh(np.array(jax.devices()[:2]), "h")
    two_heads = CONFIGS["blocks of 4"].replace(layers=LAYERS[:1])
    cache = filled(two_heads)
    jaxkv.save(path, cache)
    sharding = jax.sharding.NamedSharding(heads, jax.sharding.PartitionSpec(None, None, "h"))
    everywhere = jax.sharding.NamedSharding(heads, jax.sharding.PartitionSpec())
    empty = jaxkv.init(two_heads)
    empty = jax.device_put(empty, jax.tree.map(lambda x: sharding if x.ndim == 5 else everywhere, empty))
    loaded = jaxkv.load(path, into=empty)
    assert_same(cache, loaded)
    assert loaded.pools[0].kv.sharding.is_equivalent_to(sharding, 5)
    assert loaded.lengths.sharding.is_equivalent_to(everywhere, 1)
    jaxkv.save(path, loaded)
    assert_same(cache, jaxkv.load(path))


# Orbax.


def test_the_whole_state_goes_through_orbax(caches, tmp_path):
    import orbax.checkpoint

    for name in ("blocks of 7, padded", "contiguous"):
        cache, folder = caches[name], tmp_path / name
        with orbax.checkpoint.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder, cache)
            checkpointer.wait_until_finished()
            restored = checkpointer.restore(folder, jax.eval_shape(lambda c=cache.config: jaxkv.init(c)))
        assert isinstance(restored, jaxkv.Cache) and restored.config == cache.config
        for old, new in zip(jax.tree.leaves(cache), jax.tree.leaves(restored), strict=True):
            assert old.dtype == new.dtype and np.asarray(old).tobytes() == np.asarray(new).tobytes()
        assert_same(append(cache, [1, 2, 0, 0, 1], seed=3), append(restored, [1, 2, 0, 0, 1], seed=3))


def test_the_header_is_json_for_everyone(saved):
    _, fields, header = safetensors.read_all(saved)
    assert json.loads(header)["__metadata__"] == fields
    assert json.loads(fields["cache"])["config"]["layers"][1]["window"] == 6
