"""`save`, `load` and `describe`: what comes back is what went in, bit by bit, or it is refused in one sentence."""

import dataclasses
import json
import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv._core.tables import leave_windows
from jaxkv._files import format as file_format, safetensors

LAYERS = (
    jaxkv.LayerConfig(num_kv_heads=2, head_dim=8),
    jaxkv.LayerConfig(num_kv_heads=1, head_dim=5, window=6, dtype="float32"),
    jaxkv.LayerConfig(num_kv_heads=2, head_dim=8),
    jaxkv.LayerConfig(num_kv_heads=1, head_dim=5, window=4, shares_with=1),
)


def config(**fields):
    fields = {"layers": LAYERS, "max_seqs": 5, "max_seq_len": 41, "num_blocks": 30, "block_size": 4} | fields
    return jaxkv.CacheConfig(**fields)


def contiguous(**fields):
    return config(layout="contiguous", num_blocks=None, block_size=None, **fields)


CONFIGS = {
    "blocks of 4": config(),
    "blocks of 1": config(block_size=1, num_blocks=120),
    "blocks of 7, padded": config(block_size=7, head_dim_multiple=16, dtype="float16"),
    "contiguous": contiguous(),
}


def append(cache, counts, seed=0):
    """Random tokens, different ones in every layer and row; of one shape, so that little is compiled."""
    random, places = np.random.default_rng(seed), max(24, *counts)
    kv = [
        [jnp.asarray(random.normal(size=(len(counts), places, c.num_kv_heads, c.head_dim)), jnp.float32)
         if c.shares_with is None else None for c in cache.config.layers] for _ in "kv"
    ]  # fmt: skip
    return jax.jit(jaxkv.append)(cache, *kv, jnp.asarray(counts))


def filled(config):
    """Prompts of odd lengths, an empty row, and forks that share blocks and then go on alone."""
    cache = append(jaxkv.init(config), [23, 0, 8, 1, 0])
    cache = append(jax.jit(jaxkv.fork)(cache, jnp.array(0), jnp.array(4)), [2, 0, 5, 0, 3], seed=1)
    jaxkv.check(cache)
    return cache  # 25, 0, 13, 1 and 26 tokens


def contents(cache, row):
    """The bytes that a row holds in each layer, read off tables and pools: with NumPy, for that compiles nothing."""
    for i, layer in enumerate(cache.config.layers):
        tables, kv = cache.layer(i).tables, np.asarray(cache.pool(i).kv)
        length, size = int(tables.lengths[row]), cache.config.block_size
        first = 0 if layer.window is None else max(0, length + 1 - layer.window)  # what later tokens see
        position = np.arange(first, length)
        yield kv[np.asarray(tables.tables)[row, position // size], :, :, position % size, : layer.head_dim].tobytes()


def assert_same(old, new, rows=None):
    """`rows[i]` of the new cache is row i of the old one, bit by bit; None: not there."""
    jaxkv.check_invariants(new)
    jaxkv.check(new)
    for row, other in enumerate(range(len(old.lengths)) if rows is None else rows):
        if other is not None:
            assert int(new.lengths[other]) == int(old.lengths[row])
            assert list(contents(old, row)) == list(contents(new, other))


def shared(cache):
    """Blocks that several rows share, in each group, of those that the next step will not give back."""
    return [group["blocks_shared"] for group in jaxkv.stats(leave_windows(cache))["groups"]]


@pytest.fixture(scope="module")
def caches():
    return {name: filled(config) for name, config in CONFIGS.items()}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "saved.safetensors"


@pytest.mark.parametrize("new", CONFIGS)
@pytest.mark.parametrize("old", CONFIGS)
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


def test_sharing_survives_another_block_size(caches, path):
    cache = caches["blocks of 4"]  # rows 0 and 4 share 5 blocks, 20 tokens, of which those from 20 on see none
    assert shared(cache) == [5, 0]
    jaxkv.save(path, cache)
    for block_size, expected in ((2, 10), (1, 20), (8, 2), (5, 4), (32, 0)):
        loaded = jaxkv.load(path, config(block_size=block_size, num_blocks=100), partial_windows=True)
        assert shared(loaded) == [expected, 0]
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


# What is refused.


@pytest.fixture
def saved(caches, path):
    jaxkv.save(path, caches["blocks of 4"], model="llama")
    return path


OTHER_HEADS = (dataclasses.replace(LAYERS[0], num_kv_heads=4), *LAYERS[1:])
OTHER_WINDOW = (LAYERS[0], dataclasses.replace(LAYERS[1], window=None), *LAYERS[2:])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (dict(model="gemma"), "is of the model 'llama', but 'gemma' was asked for"),
        (dict(config=config(layers=LAYERS[:2])), "has 4 layers, but the cache has 2"),
        (dict(config=config(layers=OTHER_HEADS)), "has layer 0 with num_kv_heads = 2, but the cache has 4"),
        (dict(config=config(layers=OTHER_WINDOW)), "has layer 1 with window = 6, but the cache has None"),
        (dict(config=config(dtype="float16")), "has layer 0 in bfloat16, but the cache has float16: load it into"),
        (dict(config=config(max_seq_len=25)), "Row 4 of .* has 26 tokens, but max_seq_len = 25"),
        (dict(config=config(num_blocks=13)), "need 14 blocks of 4 tokens, but 13 are free"),
        (dict(config=config(max_seqs=3)), "has 4 rows with tokens, but only 3 of the cache's 3 rows are empty"),
        (dict(rows=[0, 1]), "has 5 rows, but rows names 2: give each its row, or None"),
        (dict(rows=[0, 1, 2, 3, 3]), r"rows must be different rows from 0 to 4, not \[0, 1, 2, 3, 3\]"),
    ],
)
def test_what_does_not_fit_is_refused_by_one_sentence(saved, arguments, says):
    with pytest.raises(ValueError, match=says) as error:
        jaxkv.load(saved, **arguments)
    assert str(saved) in str(error.value) or "rows" in arguments


def test_what_does_not_fit_into_a_cache(saved):
    busy = append(jaxkv.init(config()), [0, 0, 0, 0, 7])
    with pytest.raises(ValueError, match="Row 4 of the cache is not empty: free it first"):
        jaxkv.load(saved, into=busy, rows=[0, 1, 2, 3, 4])
    with pytest.raises(ValueError, match="Row 1 of the cache is not empty"):  # reserved blocks would be lost
        jaxkv.load(saved, into=jaxkv.reserve(busy, [0, 9, 0, 0, 0]), rows=[0, 1, 2, 3, None])
    with pytest.raises(jaxkv.CacheFileError, match="need 14 blocks of 4 tokens, but 1 is free"):
        jaxkv.load(saved, into=append(jaxkv.init(config(max_seqs=6, num_blocks=11)), [40, 0, 0, 0, 0, 0]))
    with pytest.raises(ValueError, match="takes config, for a new cache, or into"):
        jaxkv.load(saved, config(), into=busy)


def test_a_nameless_file_is_of_no_model(caches, path):
    jaxkv.save(path, caches["blocks of 4"])
    with pytest.raises(jaxkv.CacheFileError, match="does not say of which model, but 'llama' was asked for"):
        jaxkv.load(path, model="llama")


def test_what_cannot_be_saved(caches, path):
    cache = caches["blocks of 4"]
    for arguments, error, says in (
        (dict(rows=[5]), IndexError, "rows must be rows from 0 to 4"),
        (dict(rows=[1, 1]), ValueError, "must be different rows"),
        (dict(model=7), ValueError, "model must be a name or a fingerprint, a string, not 7"),
        (dict(metadata={"x": np.ones(2)}), ValueError, "metadata must be a dict of what JSON can hold"),
        (dict(metadata={"x": float("nan")}), ValueError, "metadata must be a dict of what JSON can hold"),
    ):
        with pytest.raises(error, match=says):
            jaxkv.save(path, cache, **arguments)
    assert list(path.parent.iterdir()) == []


def test_other_files_and_newer_versions(saved):
    tensors, fields, _ = safetensors.read_all(saved)
    safetensors.write(saved, tensors, fields | {"version": "2"})
    with pytest.raises(jaxkv.CacheFileError, match="is in version 2 of the format, but this jaxkv knows version 1"):
        jaxkv.load(saved)
    safetensors.write(saved, tensors)
    with pytest.raises(jaxkv.CacheFileError, match="is a safetensors file, but not of a cache"):
        jaxkv.load(saved)
    with pytest.raises(FileNotFoundError):
        jaxkv.load(saved.parent / "nowhere")


def test_what_is_consistent_but_makes_no_sense(saved, monkeypatch):
    """As from another program that writes the format: the checksums are right."""
    description, tensors = file_format.open_saved(saved)
    for name, change in (
        ("tables.0", lambda x: x + 100),
        ("lengths", lambda x: x * 50),
        ("layer.0", lambda x: x.astype(np.float16)),
    ):
        changed = tensors | {name: change(tensors[name])}
        shapes = {n: x.shape for n, x in tensors.items()}
        with monkeypatch.context() as patch:
            dtypes = {n: x.dtype for n, x in changed.items()}
            patch.setattr(file_format, "_dtype", lambda config, name, dtypes=dtypes: dtypes[name])
            file_format.write_saved(saved, description, shapes, changed.values())
        with pytest.raises(jaxkv.CacheFileError, match="holds a cache that this version of jaxkv cannot make"):
            jaxkv.load(saved)


# Damage.


def refuse(path):
    with pytest.raises(jaxkv.CacheFileError, match=str(path)) as error:
        jaxkv.load(path)
    return str(error.value)


@pytest.fixture
def small(path):
    """A small file, and the bytes in it."""
    layers = (jaxkv.LayerConfig(num_kv_heads=1, head_dim=3),)
    cache = append(jaxkv.init(config(layers=layers, max_seqs=2, num_blocks=5)), [6, 3])
    jaxkv.save(path, cache, model="m")
    return path, path.read_bytes()


def test_every_flipped_byte_is_noticed(small):
    path, whole = small
    header = 8 + int.from_bytes(whole[:8], "little")
    says = []
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << (place % 8)
        path.write_bytes(damaged)
        says.append(refuse(path))
    assert any("header cannot be read" in s for s in says[8:header])
    assert any("header is not what its checksum says" in s for s in says[8:header])
    assert "tensor lengths is not what its checksum says" in says[header]
    assert "tensor layer.0 is not what its checksum says" in says[-20]
    assert "is not what its checksum says" in says[-1]  # the checksums themselves


def test_every_truncation_is_noticed(small):
    path, whole = small
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        assert "truncated" in refuse(path)
    path.write_bytes(whole + b"\0")
    assert "damaged" in refuse(path)


def test_files_are_verified_in_pieces(caches, path, monkeypatch):
    jaxkv.save(path, caches["blocks of 4"])
    monkeypatch.setattr(file_format, "CHUNK", 7)
    assert_same(caches["blocks of 4"], jaxkv.load(path))


# Crashes.


def test_a_failing_save_leaves_the_old_file_and_nothing_else(caches, saved, monkeypatch):
    before = saved.read_bytes()
    monkeypatch.setattr(safetensors, "as_bytes", lambda tensor: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        jaxkv.save(saved, caches["contiguous"])
    assert saved.read_bytes() == before and list(saved.parent.iterdir()) == [saved]


def test_a_link_stays_a_link(caches, saved):
    link = saved.with_name("link")
    link.symlink_to(saved)
    jaxkv.save(link, caches["contiguous"])
    assert link.is_symlink()
    assert_same(caches["contiguous"], jaxkv.load(saved))


# A process that saves all the time, killed at a random moment: fifty of them, forked from one that has imported all
# and started no thread. Its caches hold NumPy arrays, so that saving them needs no XLA.
KILLS = """
import os, pathlib, pickle, random, signal, sys, time
import jaxkv

folder = pathlib.Path(sys.argv[1])
caches, path = pickle.loads((folder / "caches").read_bytes()), folder / "saved"
wholes = []
for cache in caches:
    begin = time.perf_counter()
    jaxkv.save(path, cache)
    takes = time.perf_counter() - begin
    wholes.append(path.read_bytes())
unfinished = 0
for i in range(50):
    child = os.fork()
    if not child:
        while True:
            for cache in caches:
                jaxkv.save(path, cache)
    time.sleep(random.random() * 4 * takes)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert path.read_bytes() in wholes, f"kill {i} left a file that is neither the old one nor the new one"
    left = list(folder.glob(".saved.*.tmp"))
    assert len(left) <= 1, left
    unfinished += len(left)
jaxkv.save(path, caches[0])
print(unfinished, len(list(folder.glob(".saved.*.tmp"))))
"""


def test_kill_9_in_the_middle_of_a_save_leaves_the_old_file_or_the_new_one(tmp_path):
    size = config(layers=LAYERS[:1], max_seq_len=4000, num_blocks=8000)
    caches = [jax.device_get(append(jaxkv.init(size), [n, 0, 100, 0, 0], seed=n)) for n in (4000, 3500)]
    (tmp_path / "caches").write_bytes(pickle.dumps(caches))
    result = subprocess.run([sys.executable, "-c", KILLS, tmp_path], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    unfinished, left = map(int, result.stdout.split())
    assert unfinished >= 10, "too few of the kills hit a save that was writing"
    assert left == 0, "what dead writers left is removed"
    assert_same(jax.tree.map(jnp.asarray, caches[0]), jaxkv.load(tmp_path / "saved"))


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
