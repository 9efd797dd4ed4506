"""Rows from one cache to another: the next token sees the same, whatever the blocks and wherever the devices are."""

import contextlib
import functools

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from steps import gather_row

import jaxkv
from jaxkv import LayerConfig, testing
from jaxkv._tiers import send as sending

LAYERS = (
    LayerConfig(num_kv_heads=2, head_dim=8),
    LayerConfig(num_kv_heads=2, head_dim=8, window=5, dtype="int8"),
    LayerConfig(num_kv_heads=2, head_dim=8, shares_with=0),
)
ALIKE = (LAYERS[0],) * 2
ROWS, LENGTHS = 3, (9, 0, 14)  # 9 is a block of 4 and 3 more than two of 3


def config(layers=LAYERS, **fields):
    default = {"max_seqs": ROWS, "max_seq_len": 24, "dtype": "float32"}
    sizes = {} if "layout" in fields else {"block_size": 4, "num_blocks": 12}
    return jaxkv.CacheConfig(layers=layers, **(default | sizes | fields))


@jax.jit
def append(cache, *new):
    """Tokens are stored, and what fell out of windows is given back."""
    return jaxkv.extend(jaxkv.append(cache, *new), np.zeros(ROWS, np.int32))


def fill(cache, lengths=LENGTHS):
    """Rows of random tokens; the same for every cache."""
    keys, values = [], []
    for layer, one in enumerate(cache.config.layers):
        rng = np.random.default_rng(layer)
        k, v = rng.standard_normal((2, ROWS, max(LENGTHS), 2, 8)).astype(np.float32)
        keys.append(None if one.shares_with is not None else k)
        values.append(None if one.shares_with is not None else v)
    return testing.poison(append(cache, keys, values, np.array(lengths, np.int32)))


@functools.cache
def filled(lengths=LENGTHS, **fields):
    return fill(jaxkv.init(config(**fields)), lengths)


def tokens(cache, row):
    """What the next token of a row sees in each layer."""
    seen = []
    for layer, one in enumerate(cache.config.layers):
        first = 0 if one.window is None else max(0, int(cache.lengths[row]) - one.window + 1)
        seen += [x[first:] for x in gather_row(cache, row, layer)]
    return seen


def assert_sent(old, sent, pairs):
    jaxkv.check_invariants(sent)
    sent = testing.poison(sent)
    for row, at in pairs:
        assert int(sent.lengths[at]) == int(old.lengths[row])
        for one, other in zip(tokens(sent, at), tokens(old, row), strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ({}, {"num_blocks": 9, "max_seq_len": 20, "head_dim_multiple": 16}),  # 16 lanes for 8 numbers
        ({"head_dim_multiple": 16}, {"block_size": 2, "num_blocks": 16}),
        ({"head_dim_multiple": 16, "join_kv": True}, {"block_size": 2, "num_blocks": 16}),
        ({}, {"head_dim_multiple": 32, "join_kv": True}),
        (
            {"head_dim_multiple": 16, "join_kv": "head"},
            {"head_dim_multiple": 32, "join_kv": True, "block_size": 2, "num_blocks": 16},
        ),
        ({"layers": ALIKE}, {"layers": ALIKE, "block_size": 3, "stacked": True}),
        ({"layers": ALIKE, "stacked": True}, {"layers": ALIKE, "layout": "contiguous"}),
    ],
)
def test_the_next_token_sees_the_same(source, target):
    old = filled(**source)
    sent = jaxkv.send(old, [2, 0], to=jaxkv.init(config(**target)), at=[0, 1])
    assert sent.lengths.tolist() == [14, 9, 0]
    assert_sent(old, sent, [(2, 0), (0, 1)])
    assert old.lengths.tolist() == list(LENGTHS)


def test_from_contiguous_rows_into_blocks_beside_others():
    old = filled(layers=ALIKE, layout="contiguous")
    to = filled((0, 7, 0), layers=ALIKE)
    sent = jaxkv.send(old, 2, to=to)
    assert sent.lengths.tolist() == [0, 7, 14]
    assert_sent(old, sent, [(2, 2)])
    assert_sent(to, sent, [(1, 1)])


def test_full_blocks_that_rows_share_they_share_afterwards():
    old = jaxkv.fork(filled(), [2], [1])
    sent = jaxkv.send(old, [1, 2], to=jaxkv.init(config()))
    assert jaxkv.stats(sent)["blocks_shared"] == 3 + 1  # the full ones, of all and of the window
    assert_sent(old, sent, [(1, 1), (2, 2)])


@pytest.mark.parametrize("explicit", [False, True])
def test_from_one_mesh_to_another(explicit):
    """Each divides its heads over its own two devices; the blocks have other sizes, and rows other forms."""

    def mesh(devices):
        if explicit:
            return jax.make_mesh((2,), ("model",), devices=devices)
        return Mesh(np.array(devices), ("model",))

    def under(mesh):
        return jax.set_mesh(mesh) if explicit else contextlib.nullcontext()

    first, second = mesh(jax.devices()[:2]), mesh(jax.devices()[2:4])
    with under(first):
        old = fill(jaxkv.init(config(ALIKE, head_dim_multiple=16, join_kv="head"), mesh=first))
    with under(second):
        to = jaxkv.init(config(ALIKE, block_size=2, num_blocks=20), mesh=second)
    sent = jaxkv.send(old, [0, 2], to=to)
    specs = jaxkv.partition_specs(sent.config, second)
    for pool, spec in zip(sent.pools, specs.pools, strict=True):
        assert pool.kv.sharding.is_equivalent_to(NamedSharding(second, spec.kv), pool.kv.ndim)
    one = filled(layers=ALIKE)
    expected = [tokens(one, row) for row in (0, 2)]
    with under(second):
        jaxkv.check_invariants(sent)
        for row, seen in zip((0, 2), expected, strict=True):
            np.testing.assert_array_equal(tokens(sent, row), seen)
    pairs = config(ALIKE, head_dim_multiple=16, join_kv=True)
    home = jaxkv.send(sent, [0, 2], to=jaxkv.init(pairs))  # and back to one device
    assert_sent(one, home, [(0, 0), (2, 2)])


def test_into_a_cache_that_every_device_of_the_mesh_has_whole():
    """What `init` without `mesh=` makes where explicit axes are set."""
    mesh = jax.make_mesh((2,), ("model",))
    with jax.set_mesh(mesh):
        old, whole = fill(jaxkv.init(config(ALIKE), mesh=mesh)), jaxkv.init(config(ALIKE))
        sent = jaxkv.send(old, [0, 2], to=whole)
        back = jaxkv.swap_in(whole, [0, 2], jaxkv.swap_out(old, [0, 2])[1])
        for found in (sent, back):
            jaxkv.check_invariants(found)
            assert_sent(filled(layers=ALIKE), found, [(0, 0), (2, 2)])


def test_nothing_to_send():
    to = jaxkv.init(config())
    assert jaxkv.send(filled(), [], to=to) is to
    sent = jaxkv.send(filled(), [1], to=to)  # an empty row
    assert not sent.lengths.any() and jaxkv.stats(sent)["blocks_used"] == 0


def test_bad_calls_are_refused_and_nothing_is_lost():
    old, to = filled(), jaxkv.init(config())
    narrow = (LAYERS[0], LayerConfig(num_kv_heads=2, head_dim=8, window=5), LAYERS[2])
    busy = filled((3, 0, 0))
    for wrong, arguments, error, message in [
        (old, {"to": 5}, ValueError, "takes two caches, or one and an address, not int"),
        (None, {"to": to}, ValueError, "takes two caches, or one and an address, not NoneType"),
        (old, {"to": to, "rows": [0, 0]}, ValueError, "rows names a row twice"),
        (old, {"to": to, "rows": 3}, IndexError, "rows from 0 to 2"),
        (old, {"to": to, "rows": -1}, IndexError, "rows from 0 to 2"),
        (old, {"to": to, "rows": "a"}, ValueError, "must be a row index"),
        (old, {"to": to, "rows": [0, 2], "at": [1]}, ValueError, "at must name 2 rows, one for each that is sent"),
        (old, {"to": to, "at": 10**30}, ValueError, "must be a row index"),
        (old, {"to": jaxkv.init(config(max_seqs=1)), "rows": 2}, IndexError, "at must be rows from 0 to 0"),
        (old, {"to": jaxkv.init(config(ALIKE))}, ValueError, "Rows of 3 layers cannot be sent to a cache of 2"),
        (old, {"to": jaxkv.init(config(narrow))}, ValueError, "dtype = int8, but that of the cache sent to"),
        (old, {"to": busy}, ValueError, r"but \[0\] hold tokens or blocks: free them first"),
        (old, {"to": jaxkv.reserve(to, [1, 0, 0])}, ValueError, "hold tokens or blocks"),
        (old, {"to": jaxkv.extend(to, [99, 0, 0])}, ValueError, r"but \[0\] have failed: free them first"),
        (old, {"to": jaxkv.init(config(num_blocks=2))}, jaxkv.OutOfBlocks, "need 3 blocks of 4 .*, but .* 2 are free"),
        (old, {"to": jaxkv.init(config(max_seq_len=8))}, ValueError, "has 9 tokens, but the cache sent to takes 8"),
        (old, {"to": jaxkv.init(config(block_size=8))}, ValueError, "fell out of its window"),
    ]:  # fmt: skip
        with pytest.raises(error, match=message):
            jaxkv.send(wrong, **({"rows": 0} | arguments))
    with pytest.raises(ValueError, match="cannot be part of jit"):
        jax.jit(lambda cache: jaxkv.send(cache, 0, to=to))(old)
    with pytest.raises(ValueError, match="rows must be known on the host"):
        jax.jit(lambda rows: jaxkv.send(old, rows, to=to).lengths)(0)
    assert_sent(old, jaxkv.send(old, 0, to=to), [(0, 0)])


@pytest.mark.parametrize("target", [{}, {"block_size": 2, "num_blocks": 24}, {"head_dim_multiple": 16}])
def test_a_shared_block_travels_once(target, monkeypatch):
    """Five forks of one row are sent in the blocks, and the bytes, of one."""
    sizes = {"layers": ALIKE, "max_seqs": 6}
    one = fill(jaxkv.init(config(ALIKE)), (0, 0, 12))
    old = jaxkv.send(one, 2, to=jaxkv.init(config(**sizes)), at=0)
    old = jaxkv.fork(old, [0] * 5, range(1, 6))
    moved, brought = [], sending._bring_blocks
    monkeypatch.setattr(
        sending, "_bring_blocks", lambda blocks, to, layer: moved.append(blocks.kv.nbytes) or brought(blocks, to, layer)
    )
    sent = jaxkv.send(old, range(6), to=jaxkv.init(config(**sizes | target)))
    together = sum(moved)
    moved.clear()
    jaxkv.send(old, [3], to=jaxkv.init(config(**sizes | target)))
    assert together == sum(moved) and sent.blocks_in_use == 12 // sent.config.block_size
    assert jaxkv.stats(sent)["blocks_shared"] == sent.blocks_in_use
    assert_sent(old, sent, [(row, row) for row in range(6)])
