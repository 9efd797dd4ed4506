"""Rows of two heads, or of a head's keys and values: half the memory where padding would take it, else all the same."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nightly import NIGHTLY, skip_by_day

import jaxkv
from jaxkv._core.config.kv_packing import Apart, Nibbles, OneRow, Pairs
from jaxkv.testing import assert_no_copy, permute_blocks, poison

ROWS, BLOCK, HEADS = 3, 4, 4
LAYERS = (
    jaxkv.LayerConfig(num_kv_heads=2, head_dim=8),
    jaxkv.LayerConfig(num_kv_heads=2, head_dim=5, window=6),
    jaxkv.LayerConfig(num_kv_heads=2, head_dim=8, bounds=True),
    jaxkv.LayerConfig(num_kv_heads=1, head_dim=9),  # two of which fill no fewer lanes
    jaxkv.LayerConfig(num_kv_heads=2, head_dim=8, dtype="int8"),
    jaxkv.LayerConfig.latent(5, 2),
    jaxkv.LayerConfig(num_kv_heads=2, head_dim=8, shares_with=0),
    jaxkv.LayerConfig(num_kv_heads=1, head_dim=7, dtype="float8_e4m3fn", rotate=True, window=6),
    jaxkv.LayerConfig(num_kv_heads=4, head_dim=7),  # two pairs, and one query head for each head
    jaxkv.LayerConfig(num_kv_heads=1, head_dim=6),
)
PAIRS, ONE_ROW = (0, 1, 2, 6, 8), (4, 7, 9)
JOINED = (True, *["head"] * NIGHTLY, False)  # by day only layers 4, 7 and 9 have keys and values in one row

quickly_compiled = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def make_config(join_kv=True, layers=LAYERS, **fields):
    fields = dict(num_blocks=30, block_size=BLOCK, max_seq_len=40, head_dim_multiple=16, dtype="float32") | fields
    return jaxkv.CacheConfig(layers=layers, max_seqs=ROWS, join_kv=join_kv, **fields)


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_which_layers_join():
    def forms(config, *kinds):
        return tuple(i for i in range(config.num_layers) if type(config.form(i)) in kinds)

    config, by_head, apart = make_config(), make_config("head"), make_config(False)
    assert forms(config, Pairs) == PAIRS and forms(config, OneRow) == ONE_ROW
    assert forms(by_head, OneRow) == tuple(sorted(PAIRS + ONE_ROW)) and not forms(apart, OneRow, Pairs)
    shapes = {0: (31, 2, 1, BLOCK, 16), 1: (31, 2, 1, BLOCK, 16), 3: (31, 2, 1, BLOCK, 16), 4: (31, 1, 2, BLOCK, 16)}
    shapes |= {8: (31, 2, 2, BLOCK, 16), 9: (31, 1, 1, BLOCK, 16)}
    assert {i: config.pool_shape(i) for i in shapes} == shapes
    assert by_head.pool_shape(8) == (31, 1, 4, BLOCK, 16)
    assert config.scale_shape(4) == (31, 2, 2, BLOCK)
    for one in (config, by_head):
        assert all(2 * one.bytes_per_layer_block(i) == apart.bytes_per_layer_block(i) for i in (0, 1, 8, 9))
    assert apart.bytes_per_layer_block(4) - config.bytes_per_layer_block(4) == 2 * BLOCK * 16
    # Four bits as a TPU's kernels read them, where their scales divide a head. Blocks of one head have no pairs.
    four_bits = jaxkv.LayerConfig(num_kv_heads=2, head_dim=96, dtype="int4")
    for dim, multiple, form in ((96, 128, Nibbles), (96, 64, Apart), (80, 128, Apart), (128, 128, Nibbles)):
        layers = (dataclasses.replace(four_bits, head_dim=dim),)
        assert forms(make_config(layers=layers, head_dim_multiple=multiple), form) == (0,)
        assert forms(make_config(False, layers=layers, head_dim_multiple=multiple), Apart) == (0,)
    for dim, form in ((96, Apart), (64, Nibbles), (128, Nibbles)):
        layers = (dataclasses.replace(four_bits, head_dim=dim, dtype="k5v3"),)
        assert forms(make_config(layers=layers, head_dim_multiple=128), form) == (0,)
    narrow = make_config(layers=(dataclasses.replace(four_bits, head_dim=64),), head_dim_multiple=128)
    assert narrow.pool_shape(0) == (31, 1, 2, BLOCK, 128)
    stored = make_config(layers=(four_bits,), head_dim_multiple=128)
    assert stored.pool_shape(0) == (31, 1, 2, BLOCK, 128) and stored.scale_shape(0) == (31, 2, 2, BLOCK, 3)
    assert forms(make_config(layers=(dataclasses.replace(LAYERS[0], evict="head"),)), OneRow) == (0,)
    # Where nothing is padded there is nothing to spare.
    assert not forms(make_config(head_dim_multiple=1), OneRow, Pairs)
    # Of 192 numbers 64 lanes of 256 would be padding; two of them fill three registers.
    wide = make_config(layers=(jaxkv.LayerConfig(num_kv_heads=1, head_dim=192),), head_dim_multiple=128)
    assert wide.pool_shape(0) == (31, 1, 1, BLOCK, 384)


@pytest.mark.parametrize(
    ("platform", "stored"), [("tpu", (2, 1, 16, 128)), ("gpu", (2, 2, 16, 64)), ("cpu", (2, 2, 16, 64))]
)
def test_what_a_platform_has_by_default(platform, stored, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    layers = (jaxkv.LayerConfig(num_kv_heads=2, head_dim=64),)
    config = jaxkv.CacheConfig(layers=layers, max_seqs=1, max_tokens=16)
    assert config.pool_shape(0) == (2, *stored)
    assert config.join_kv == (platform == "tpu")


def step_of(config, axes, seed):
    """For each layer queries, keys and values."""
    found = []
    for i, one in enumerate(config.layers):
        heads = one.num_kv_heads
        q, k, v = (normal(seed + 10 * i + j, *axes, h, one.head_dim) for j, h in enumerate((HEADS, heads, heads)))
        found.append((q, None if one.shares_with is not None else k, None if i in (5, 6) else v))
    return found


@quickly_compiled
def play(cache, steps, counts, options):
    outs = []
    for step, count in zip(steps, counts, strict=True):
        cache = jaxkv.extend(cache, count)
        for i, (q, k, v) in enumerate(step):
            # Without a scale it is that of the head_dim, not of the row.
            given = {"scale": 0.3} if cache.config.layers[i].rank else options
            out, cache = jaxkv.attention(q, k, v, cache, layer=i, return_lse=True, **given)
            outs.append(out)
    return outs, poison(cache)


@pytest.mark.parametrize("fields", [{}, *[{"stacked": True}, {"layout": "contiguous"}] * NIGHTLY], ids=str)
def test_everything_is_the_same_as_apart(fields):
    """A packed prefill over ends of blocks, a decode step, and a padded chunk, with options that go by heads."""
    whole = "layout" in fields
    sizes = dict(num_blocks=None, block_size=None) if whole else {}
    layers = tuple(dataclasses.replace(x, bounds=x.bounds and not whole) for x in LAYERS)
    axes, counts = ((11,), (ROWS, 1), (ROWS, 5)), ((5, 4, 2), (1, 1, 0), (5, 0, 3))
    options = {"sinks": jnp.arange(HEADS, dtype=jnp.float32), "soft_cap": 2.0}
    found = []
    for join_kv in JOINED:
        config = make_config(join_kv, layers, **fields, **sizes)
        steps = [step_of(config, a, 100 * s) for s, a in enumerate(axes)]
        outs, cache = play(jaxkv.init(config), steps, [np.array(c, np.int32) for c in counts], options)
        jaxkv.check_invariants(cache)
        cache = cache if whole else permute_blocks(cache)
        q = normal(7, ROWS, 2, HEADS, 8)
        outs.append(jaxkv.attend(q, cache, layer=0, causal=False))
        for i in range(cache.num_layers):
            outs += [*jaxkv.gather(cache, 0, layer=i), *cache.separate(i), cache.combined(i)]
            if config.kind(i).is_quantized:
                outs += jaxkv.gather(cache, 0, layer=i, raw=True)
        for layer, head in ((0, 1), (8, 2), (9, 0)):
            outs += cache.load(layer, 0, head, 3)
            k, v = normal(8, 2, layers[layer].head_dim)
            outs += jaxkv.gather(cache.store(layer, 0, head, 3, k, v), 0, layer=layer)
        found.append(jax.device_get(outs))
    *joined, apart = found
    for one in joined:
        jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=2e-6), one, apart)


def test_gradients_go_to_what_was_stored():
    q, k, v = (normal(i, ROWS, 5, h, 8) for i, h in enumerate((HEADS, 2, 2)))

    def loss(q, k, v, join_kv):
        cache = jaxkv.extend(jaxkv.init(make_config(join_kv, LAYERS[:1])), [5, 3, 0])
        return (jaxkv.attention(q, k, v, cache, layer=0)[0] ** 2).sum()

    *joined, apart = (jax.grad(loss, (0, 1, 2))(q, k, v, join_kv) for join_kv in JOINED)
    for ours in joined:
        for one, other in zip(ours, apart, strict=True):
            assert np.abs(other).max() > 0.1
            np.testing.assert_allclose(one, other, atol=1e-5)


def test_a_head_dim_that_leaves_padding_behind_the_row():
    """Two times 5 of 16: what pads stays 0, and is not read as values."""
    k, v = normal(1, 1, ROWS, 9, 2, 5), normal(2, 1, ROWS, 9, 2, 5)
    heads_k, heads_v = (x[0, 1, :4].swapaxes(0, 1) for x in (k, v))  # [K, 4, D] of row 1
    halves = {
        "head": (heads_v[None], heads_k[None]),
        True: [np.stack([heads_k[i], heads_v[i]])[:, None] for i in (0, 1)],
    }
    for join_kv, (left, right) in halves.items():
        cache = poison(jaxkv.append(jaxkv.init(make_config(join_kv, LAYERS[1:2])), k, v, [9, 4, 0]))
        stored = np.asarray(cache.pools[0].kv)
        assert (stored[..., 10:] == 0).all() and np.isnan(stored[-1, ..., :10]).all()  # of a free block
        block = int(cache.tables[0].tables[1, 0])
        np.testing.assert_array_equal(stored[block, :, :, :4, :5], left)
        np.testing.assert_array_equal(stored[block, :, :, :4, 5:10], right)


@pytest.mark.parametrize("join_kv", [True, "head"])
def test_a_step_copies_no_pool(join_kv):
    layers = (jaxkv.LayerConfig(num_kv_heads=2, head_dim=64),) * 2
    cache = jaxkv.init(make_config(join_kv, layers=layers, num_blocks=4096, head_dim_multiple=128))

    def step(cache, q, k, v):
        cache = jaxkv.extend(cache, jnp.ones(ROWS, jnp.int32))
        for layer in range(2):
            q, cache = jaxkv.attention(q, k, v, cache, layer=layer)
        return q, cache

    q, k, v = (jnp.zeros((ROWS, 1, heads, 64)) for heads in (HEADS, 2, 2))
    assert_no_copy(jax.jit(step, donate_argnums=0), cache, q, k, v)


@pytest.mark.parametrize("platform", ["cpu", "tpu", "cuda"])
def test_which_kernels_read_it(platform):
    """A TPU's own do. To a GPU's a pair of heads is one of 128; of a head's keys and values they say why not."""
    layers = (jaxkv.LayerConfig(num_kv_heads=2, head_dim=64),)
    config = make_config("head", layers, head_dim_multiple=128, block_size=16, dtype="bfloat16")
    q = jax.ShapeDtypeStruct((ROWS, 1, HEADS, 64), jnp.bfloat16)
    in_pairs = jaxkv.explain(q, jaxkv.init(config.replace(join_kv=True)), platform=platform)
    assert in_pairs.implementation == {"tpu": "tpu", "cuda": "gpu"}.get(platform, "xla"), in_pairs.reason
    assert "Two heads of 64 are stored in one row of 128." in in_pairs.reason
    choice = jaxkv.explain(q, jaxkv.init(config), platform=platform)
    int8 = config.replace(dtype="int8", block_size=128, max_seq_len=128)
    assert jaxkv.explain(q, jaxkv.init(int8), platform=platform).implementation == choice.implementation
    assert choice.implementation == {"tpu": "tpu"}.get(platform, "xla"), choice.reason
    assert platform != "cuda" or "join_kv=False" in choice.reason
    assert "Keys and values of 64 are stored in one row of 128." in choice.reason
    int4 = int8.replace(dtype="int4")
    four_bits = jaxkv.explain(q, jaxkv.init(int4), platform=platform)
    assert four_bits.implementation == choice.implementation
    assert "Keys and values of 64 in four bits are stored in one row of 128." in four_bits.reason
    unread = jaxkv.explain(q, jaxkv.init(int4.replace(join_kv=False)), platform=platform)
    assert unread.implementation == {"cuda": "gpu"}.get(platform, "xla"), unread.reason
    assert platform != "tpu" or "give the cache join_kv=True" in unread.reason
    odd = (jaxkv.LayerConfig(num_kv_heads=2, head_dim=96, dtype="k5v3"),)
    unread = jaxkv.explain(
        jax.ShapeDtypeStruct((ROWS, 1, HEADS, 96), jnp.bfloat16),
        jaxkv.init(int4.replace(layers=odd, join_kv=platform == "tpu")),
        platform=platform,
    )
    assert unread.implementation == {"cuda": "gpu"}.get(platform, "xla"), unread.reason
    assert platform != "tpu" or ("read k5v3 where" in unread.reason and "multiples of 64" in unread.reason)
    apart = jaxkv.explain(q, jaxkv.init(config.replace(join_kv=False)), platform=platform)
    assert "A head_dim of 64 is stored as 128." in apart.reason
    exact = jaxkv.explain(q, jaxkv.init(config.replace(head_dim_multiple=1)), platform="cpu")
    assert "stored as" not in exact.reason and "row" not in exact.reason


@skip_by_day("by day scales go where numbers go in test_quantised")
@pytest.mark.parametrize("join_kv", [False, True])
def test_quantised_rows_go_to_either_form(join_kv, tmp_path):
    """By a file, to another cache and back from the host: the same numbers, under the same scales."""
    layers = tuple(dataclasses.replace(LAYERS[i], window=None) for i in (4, 7))
    config = make_config(join_kv, layers)
    k, v = ([normal(7 * i + j, ROWS, 9, x.num_kv_heads, x.head_dim) for i, x in enumerate(layers)] for j in (0, 1))
    cache = jaxkv.append(jaxkv.init(config), k, v, [9, 4, 0])

    def raw(cache, row):
        return [x for i in range(len(layers)) for x in jax.device_get(jaxkv.gather(cache, row, layer=i, raw=True))]

    rows = [raw(cache, 0), raw(cache, 1)]
    assert [x.shape for x in rows[1]] == [(4, 2, 8)] * 2 + [(4, 2)] * 2 + [(4, 1, 7)] * 2 + [(4, 1)] * 2
    jaxkv.save(tmp_path / "rows", cache)
    found = [jaxkv.swap_in(*jaxkv.swap_out(cache, 0)[:1], 2, jaxkv.swap_out(cache, 0)[1])]
    for other in (make_config(not join_kv, layers, block_size=2, num_blocks=60), config):
        found += [jaxkv.load(tmp_path / "rows", other), jaxkv.send(cache, [0, 1], to=jaxkv.init(other))]
    for one, places in zip(found, [(2, 1), *[(0, 1)] * 4], strict=True):
        jaxkv.check_invariants(one)
        for row, place in enumerate(places):
            for actual, expected in zip(raw(one, place), rows[row], strict=True):
                np.testing.assert_array_equal(actual, expected)


def test_four_bits_in_one_row_are_those_of_two(tmp_path):
    """What is attended to and read is the same to the bit, and goes to either form, by a file and to another cache."""
    layers = (jaxkv.LayerConfig(num_kv_heads=2, head_dim=32, dtype="int4"),)
    fields = {"layers": layers, "head_dim_multiple": 128, "num_blocks": 6, "block_size": 8}
    configs = [make_config(join_kv, **fields) for join_kv in (True, False)]
    k, v, q = (normal(seed, ROWS, 12, heads, 32) for seed, heads in ((1, 2), (2, 2), (3, HEADS)))

    @jax.jit
    def attend(cache):
        cache = jaxkv.extend(jaxkv.append(cache, k[None, :, :9], v[None, :, :9], [9, 4, 0]), [3, 1, 0])
        return jaxkv.attention(q[:, 9:], k[:, 9:], v[:, 9:], cache, layer=0)

    def raw(cache):
        return jax.device_get(jaxkv.gather(cache, 0, layer=0, raw=True))

    (out, together), (expected, apart) = (attend(jaxkv.init(config)) for config in configs)
    assert together.pools[0].kv.shape[1] == 1 and apart.pools[0].kv.shape[1] == 2
    np.testing.assert_allclose(out, expected, atol=1e-6)
    found = [together]
    for cache, other in ((together, configs[1]), (apart, configs[0])):
        jaxkv.save(tmp_path / "rows", cache)
        found += [jaxkv.load(tmp_path / "rows", other), jaxkv.send(cache, [0], to=jaxkv.init(other))]
    for one in found:
        for actual, wanted in zip(raw(one), raw(apart), strict=True):
            np.testing.assert_array_equal(actual, wanted)


@skip_by_day("by day test_kinds computes gradients of scales in groups")
def test_gradients_of_four_bits_in_one_row():
    layers = (jaxkv.LayerConfig(num_kv_heads=2, head_dim=32, dtype="int4"),)
    k, v, q = (normal(seed, ROWS, 5, heads, 32) for seed, heads in ((1, 2), (2, 2), (3, HEADS)))

    def loss(q, join_kv):
        config = make_config(join_kv, layers=layers, head_dim_multiple=128)
        cache = jaxkv.extend(jaxkv.init(config), [5, 3, 0])
        return (jaxkv.attention(q, k, v, cache, layer=0)[0] ** 2).sum()

    together, apart = (jax.grad(loss)(q, join_kv) for join_kv in (True, False))
    assert np.abs(apart).max() > 0.1
    np.testing.assert_allclose(together, apart, atol=1e-5)
