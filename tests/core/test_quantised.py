"""A quantised cache: near what a plain one gives, and its scales go wherever its numbers go."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nightly import NIGHTLY
from steps import on_device

import jaxkv
from jaxkv.testing import assert_no_copy, permute_blocks, poison
from pallas_kernels.common.quantization import FORMATS

ROWS, BLOCK = 3, 4
LAYERS = (
    jaxkv.LayerConfig(num_kv_heads=2, head_dim=16),
    jaxkv.LayerConfig(num_kv_heads=2, head_dim=16),
    jaxkv.LayerConfig(num_kv_heads=1, head_dim=36, window=5),
)
KINDS = ("int8", "float8_e4m3fn", "float8_e5m2", "int4", "k5v3")
# The largest error of a number of normal data.
ERRORS = {"int8": 0.02, "float8_e4m3fn": 0.2, "float8_e5m2": 0.4, "int4": 0.4, "k5v3": 0.4}

quickly_compiled = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def make_config(kind, layers=LAYERS, **fields):
    fields = dict(num_blocks=30, head_dim_multiple=8, max_seq_len=40) | fields
    return jaxkv.CacheConfig(layers=layers, max_seqs=ROWS, block_size=BLOCK, dtype=kind, **fields)


def tokens(seed=0):
    return [
        np.random.default_rng(seed + i).normal(size=(ROWS, 9, layer.num_kv_heads, layer.head_dim)).astype(np.float32)
        for i, layer in enumerate(LAYERS)
    ]


@functools.cache
def filled(kind, stacked=False):
    """Rows of 9 and 4 tokens; NaN scales and any numbers in all that is not theirs."""
    kv = tokens()
    fill = quickly_compiled(lambda cache: poison(jaxkv.append(cache, kv, kv, jnp.array([9, 4, 0], jnp.int32))))
    return fill(on_device(jaxkv.init(make_config(kind, stacked=stacked))))


def equal(a, b):
    np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@pytest.mark.parametrize("kind", KINDS if NIGHTLY else ("int8", "int4"))
def test_what_is_gathered(kind):
    cache = filled(kind)
    jaxkv.check_invariants(cache)
    assert cache.bytes == cache.config.bytes == sum(x.nbytes for x in jax.tree.leaves(cache.pools))
    for layer, kv in enumerate(tokens()):
        k, v = jaxkv.gather(cache, 0, layer=layer)
        assert k.dtype == jnp.float32
        held = slice(4, 9) if layer == 2 else slice(0, 9)
        for got in (k, v):
            assert np.abs(np.asarray(got)[held] - kv[0][held]).max() < ERRORS[kind]
    k, v, k_scale, v_scale = jaxkv.gather(cache, 1, layer=0, raw=True)
    dense, _ = jaxkv.gather(cache, 1, layer=0)
    assert k.shape[2] == FORMATS[kind].stored_dim(16) and k.dtype == cache.pools[0].kv.dtype and v.shape == k.shape
    if kind == "int8":
        equal(np.asarray(k, np.float32) * np.asarray(k_scale)[..., None], dense)
    traced = jax.jit(lambda cache: jaxkv.gather(cache, 1, layer=0, raw=True, max_len=6))(cache)
    for whole, part in zip(traced, (k, v, k_scale, v_scale), strict=True):
        equal(whole[:4], part)
        assert not np.asarray(whole[4:], np.float32).any()


@quickly_compiled
def seen(cache, row):
    """Keys of a row in the two layers without a window; 0 behind its last token."""
    return [jaxkv.gather(cache, row, layer=layer, max_len=12)[0] for layer in (0, 1)]


@pytest.mark.parametrize(
    ("kind", "stacked"), [("int4", True), *[("int8", False), ("int8", True), ("int4", False)] * NIGHTLY]
)
def test_scales_go_where_the_numbers_go(kind, stacked, tmp_path):
    """Fork, truncate, swap, save and load in other blocks, the prefix index by way of the host, other block numbers."""
    cache = filled(kind, stacked)
    rows = {row: seen(cache, row) for row in (0, 1)}

    def holds(cache, row, source, length):
        jaxkv.check(cache)
        jaxkv.check_invariants(cache)
        assert cache.lengths[row] == length
        for got, wanted in zip(seen(cache, row), rows[source], strict=True):
            equal(got[:length], wanted[:length])

    forked = jaxkv.truncate(jaxkv.fork(cache, 0, 2), [9, 4, 7])
    holds(forked, 2, 0, 7)
    out, host = jaxkv.swap_out(forked, [0, 2])
    back = jaxkv.swap_in(out, [2, 0], host)
    holds(back, 2, 0, 9)
    holds(jaxkv.swap_in(out, 0, host[1]), 0, 0, 7)

    jaxkv.save(tmp_path / "file", forked)
    for config in (None, cache.config.replace(block_size=2, num_blocks=60, stacked=not stacked)):
        loaded = jaxkv.load(tmp_path / "file", config=config)
        holds(loaded, 0, 0, 9)
        holds(loaded, 2, 0, 7)

    index = jaxkv.PrefixCache(cache.config, spill_bytes=10**6)
    kept = jaxkv.free(index.insert(cache, 0, list(range(9))), [0])
    kept = index.make_room(kept, 30)  # to the host
    holds(index.adopt(kept, 2, index.match(list(range(9)))), 2, 0, 8)
    moved = permute_blocks(cache)
    holds(moved, 0, 0, 9)


@pytest.mark.parametrize("join_kv", [*[False] * NIGHTLY, True])
def test_groups_of_64_go_where_the_numbers_go(join_kv, tmp_path):
    """A prompt in pieces, fork, swap, save and load, send: the same bits under the same two scales of a head."""
    layer = jaxkv.LayerConfig(num_kv_heads=2, head_dim=128, dtype="k5v3")
    sizes = dict(max_seqs=ROWS, block_size=BLOCK, num_blocks=30, max_seq_len=40, head_dim_multiple=128)
    config = jaxkv.CacheConfig(layers=(layer,), **sizes, join_kv=join_kv)
    kv = np.random.default_rng(0).normal(size=(2, 1, ROWS, 9, 2, 128)).astype(np.float32)
    add = quickly_compiled(lambda cache, kv, count: jaxkv.append(cache, *kv, [count, 0, 0]))
    whole, pieces = add(jaxkv.init(config), kv, 9), jaxkv.init(config)
    for begin, end in ((0, 1), (1, 4), (4, 9)):
        piece = np.pad(kv[:, :, :, begin:end], [(0, 0)] * 3 + [(0, 9 - end + begin)] + [(0, 0)] * 2)
        pieces = add(pieces, piece, end - begin)
    wanted = jaxkv.gather(whole, 0, layer=0, raw=True)
    assert [x.shape for x in wanted] == [(9, 2, 64)] * 2 + [(9, 2, 2)] * 2
    jaxkv.save(tmp_path / "rows", whole)
    forked = jaxkv.fork(whole, 0, 2)
    back = jaxkv.swap_in(*jaxkv.swap_out(forked, 0)[:1], 0, jaxkv.swap_out(forked, 0)[1])
    other = config.replace(join_kv=not join_kv, block_size=2, num_blocks=60)
    found = [(pieces, 0), (forked, 2), (back, 0), (permute_blocks(whole), 0), (jaxkv.load(tmp_path / "rows"), 0)]
    found += [(jaxkv.load(tmp_path / "rows", other), 0), (jaxkv.send(whole, [0], to=jaxkv.init(other)), 0)]
    read = whole.read(0, jnp.zeros(9, jnp.int32), jnp.arange(9))
    for cache, row in found:
        jaxkv.check_invariants(cache)
        for got, same in zip(jaxkv.gather(cache, row, layer=0, raw=True), wanted, strict=True):
            equal(got, same)
        for got, same in zip(cache.read(0, jnp.full(9, row), jnp.arange(9)), read, strict=True):
            equal(got, same)
    assert np.abs(np.asarray(read[0]) - kv[0, 0, 0]).max() < ERRORS["k5v3"]


@quickly_compiled
def play(cache):
    """Prefill of rows and a decode step, packed."""
    outs = []
    for axes, counts in (((9,), (2, 0, 7)), ((ROWS, 1), (1, 1, 1))):
        cache = jaxkv.extend(cache, jnp.array(counts, jnp.int32))
        step = jaxkv.plan_step(cache, axes)
        for i in range(len(LAYERS)) if NIGHTLY else (0, 2):  # layer 1 is as layer 0
            layer, rng = LAYERS[i], np.random.default_rng(i)
            q, k, v = (
                jnp.asarray(rng.normal(size=(*axes, heads, layer.head_dim)), jnp.float32)
                for heads in (4, layer.num_kv_heads, layer.num_kv_heads)
            )
            out, cache = jaxkv.attention(q, k, v, cache, layer=i, step=step)
            outs.append(out)
    return outs, cache


# By day none of the two float8s, which differ from int8 in what a byte means alone: tests/kernels/test_kinds.py.
@pytest.mark.parametrize("kind", KINDS if NIGHTLY else ("int8",))
def test_attention_of_a_step(kind):
    """Near what a cache of float32 gives."""
    outs, cache = play(filled(kind))
    jaxkv.check_invariants(cache)
    wanted, _ = play(filled("float32"))
    for out, near in zip(outs, wanted, strict=True):
        assert np.isfinite(out).all()
        assert np.linalg.norm(out - near) < ERRORS[kind] * np.linalg.norm(near)


@pytest.mark.parametrize("kind", KINDS if NIGHTLY else ("int4",))
@pytest.mark.skipif(not NIGHTLY, reason="by day stacked layers are plain, and quantised ones are not stacked")
def test_attention_of_a_stacked_step(kind):
    """The same: int4 has scales of another rank than the rest."""
    for out, same in zip(play(filled(kind))[0], play(filled(kind, stacked=True))[0], strict=True):
        np.testing.assert_allclose(same, out, rtol=1e-5, atol=1e-5)


def test_no_pool_is_copied():
    layer = jaxkv.LayerConfig(num_kv_heads=8, head_dim=128)
    for kind in KINDS if NIGHTLY else ("int8", "int4"):
        config = jaxkv.CacheConfig(layers=(layer,) * 2, max_seqs=4, max_seq_len=1024, num_blocks=8192, dtype=kind)
        cache = jax.eval_shape(lambda config=config: jaxkv.init(config))
        q, kv = (jax.ShapeDtypeStruct((4, 1, heads, 128), jnp.bfloat16) for heads in (32, 8))

        def step(cache, q, kv, counts):
            cache = jaxkv.extend(cache, counts)
            for i in range(2):
                q, cache = jaxkv.attention(q, kv, kv, cache, layer=i)
            return q, cache

        assert_no_copy(jax.jit(step, donate_argnames="cache"), cache, q, kv, jax.ShapeDtypeStruct((4,), jnp.int32))


def test_capacity_at_equal_bytes():
    """Tokens in the bytes of a bfloat16 cache, scales and null blocks counted."""
    layer = jaxkv.LayerConfig(num_kv_heads=8, head_dim=128)

    def tokens(kind):
        return jaxkv.CacheConfig(
            layers=(layer,) * 4, max_seqs=8, max_seq_len=8192, num_blocks=1, dtype=kind
        ).with_memory(10**9).max_tokens  # fmt: skip

    plain = tokens("bfloat16")
    assert tokens("int8") > 1.93 * plain and tokens("float8_e4m3fn") > 1.93 * plain
    assert tokens("int4") > 3.5 * plain and tokens("k5v3") > 3.75 * plain


def test_layers_of_several_kinds_and_what_is_refused():
    layers = (LAYERS[0], jaxkv.LayerConfig(num_kv_heads=2, head_dim=16, dtype="int4"))
    cache = jaxkv.init(make_config("bfloat16", layers))
    assert [x.dtype.name for x in jax.tree.leaves(cache.pools)] == ["bfloat16", "uint8", "bfloat16"]
    with pytest.raises(ValueError, match="raw=True is for quantized layers, and layer 0 is stored in bfloat16"):
        jaxkv.gather(cache, 0, layer=0, raw=True)
    with pytest.raises(ValueError, match=r"int4 stores two numbers to a byte, .* but layer 0 has 15"):
        make_config("int4", (jaxkv.LayerConfig(num_kv_heads=1, head_dim=15),), head_dim_multiple=1)
    for layer, rows in ((dict(rank=32), "latent"), (dict(v_head_dim=32), "one with v_head_dim")):
        with pytest.raises(ValueError, match=rf"k5v3 stores .* of one width, but layer 0 is {rows}, .* \"int4\" or"):
            make_config("k5v3", (jaxkv.LayerConfig(num_kv_heads=1, head_dim=64, **layer),))
    with pytest.raises(ValueError, match=r"one of bfloat16, .*, not fp8: did you mean float8_e4m3fn\?$"):
        jaxkv.CacheConfig.uniform(num_layers=1, num_kv_heads=2, head_dim=8, max_seqs=2, max_seq_len=64, dtype="fp8")
    with pytest.raises(ValueError, match=r"CacheConfig.dtype must be one of bfloat16, .*int4, k5v3, not int16"):
        make_config("int16")
    _, host = jaxkv.swap_out(filled("int8"), 0)
    with pytest.raises(ValueError, match=r"are int8.* with scales float32.*, but the cache's are bfloat16"):
        jaxkv.swap_in(jaxkv.init(make_config("bfloat16")), 0, host)
