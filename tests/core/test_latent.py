"""Latent layers: a token is one row, stored once, whose first numbers are its values; all of a cache works on them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nightly import NIGHTLY
from steps import gather_row, on_device

import jaxkv
from jaxkv.testing import assert_no_copy, permute_blocks, poison

ROWS, BLOCK, HEADS = 3, 4, 6
RANK, ROPE = 12, 4
LATENT = jaxkv.LayerConfig.latent(RANK, ROPE)
LAYERS = (LATENT, jaxkv.LayerConfig.latent(RANK, ROPE, window=5), LATENT, jaxkv.LayerConfig(num_kv_heads=2, head_dim=8))
SCALE = 0.3
# The largest error of a number of normal data.
ERRORS = {"float32": 0.0, "int8": 0.02, "float8_e4m3fn": 0.2, "int4": 0.4}

quickly_compiled = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def make_config(kind="float32", layers=LAYERS, **fields):
    fields = dict(num_blocks=30, head_dim_multiple=8, max_seq_len=40) | fields
    return jaxkv.CacheConfig(layers=layers, max_seqs=ROWS, block_size=BLOCK, dtype=kind, **fields)


def random_step(axes, seed=0, heads=False):
    """For each layer keys and values; or queries."""
    rng = np.random.default_rng(seed)

    def normal(layer, count):
        return rng.normal(size=(*axes, count, layer.head_dim)).astype(np.float32)

    if heads:
        return [normal(layer, HEADS) for layer in LAYERS]
    return (
        [normal(layer, layer.num_kv_heads) for layer in LAYERS],
        [normal(layer, 2) if layer.rank is None else None for layer in LAYERS],
    )


@functools.cache
def filled(kind, stacked=False):
    """Rows of 9 and 4 tokens; NaN in all that is not theirs."""
    k, v = random_step((ROWS, 9))
    fill = quickly_compiled(lambda cache: poison(jaxkv.append(cache, k, v, jnp.array([9, 4, 0], jnp.int32))))
    return fill(on_device(jaxkv.init(make_config(kind, stacked=stacked))))


def equal(a, b):
    np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@pytest.mark.parametrize("kind", ERRORS)
def test_a_token_is_stored_once(kind):
    cache = filled(kind)
    jaxkv.check_invariants(cache)
    assert cache.bytes == cache.config.bytes == sum(x.nbytes for x in jax.tree.leaves(cache.pools))
    assert cache.pools[0].kv.shape == (31, 1, 1, BLOCK, 8 if kind == "int4" else 16)
    if kind != "float32":
        assert cache.pools[0].scale.shape == (31, 1, 1, BLOCK, 1 if kind == "int4" else 2)
    wanted = random_step((ROWS, 9))[0]
    for layer, held in ((0, slice(0, 9)), (1, slice(4, 9))):
        k, v = jaxkv.gather(cache, 0, layer=layer)
        assert (k.shape, v.shape) == ((9, 1, RANK + ROPE), (9, 1, RANK))
        equal(v, k[..., :RANK])
        assert np.abs(np.asarray(k)[held] - wanted[layer][0][held]).max() <= ERRORS[kind]
    if kind == "int8":
        k, v, k_scale, v_scale = jaxkv.gather(cache, 1, layer=0, raw=True)
        assert (v, v_scale, k_scale.shape) == (None, None, (4, 1, 2))
        of_each = np.repeat(np.asarray(k_scale), (RANK, ROPE), axis=-1)
        equal(np.asarray(k, np.float32) * of_each, jaxkv.gather(cache, 1, layer=0)[0])


def test_the_two_parts_have_scales_of_their_own():
    k = np.ones((1, ROWS, 1, 1, RANK + ROPE), np.float32)
    k[..., RANK:] *= 1000
    cache = jaxkv.init(make_config("int8", (LATENT,)))
    stored, _ = jaxkv.gather(jaxkv.append(cache, k, None), 0, layer=0)
    np.testing.assert_allclose(stored[0, 0], k[0, 0, 0, 0], rtol=1e-6)


def attend_by_hand(q, k, length, new, window, soft_cap):
    """Float64, one row: `q [new, H, D]`, `k [length, D]`."""
    outs = []
    for t, query in enumerate(q.astype(np.float64)):
        end = length - new + t + 1
        seen = k[0 if window is None else max(0, end - window) : end].astype(np.float64)
        logits = query @ seen.T * SCALE
        logits = logits if soft_cap is None else soft_cap * np.tanh(logits / soft_cap)
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
        outs.append(weights / weights.sum(axis=-1, keepdims=True) @ seen[:, :RANK])
    return np.array(outs)


@quickly_compiled
def play(cache, steps, counts):
    outs = []
    for (q, k, v), count in zip(steps, counts, strict=True):
        cache = jaxkv.extend(cache, count)
        step = jaxkv.plan_step(cache, q[0].shape[:-2])
        for i, layer in enumerate(LAYERS):
            options = {"soft_cap": 2.0} if i == 2 else {}
            out, cache = jaxkv.attention(q[i], k[i], v[i], cache, layer=i, step=step, scale=SCALE, **options)
            assert out.shape == (*q[i].shape[:-1], layer.rank or layer.head_dim)
            outs.append(out)
    return outs, cache


@pytest.mark.parametrize("kind", ["float32", "int8"] if NIGHTLY else ["int8"])
def test_attention_of_a_step(kind):
    """A packed prefill, also to the last place of a block, then a decode step; the same stacked."""
    axes, counts = ((9,), (ROWS, 1)), ((3, 4, 2), (1, 1, 0))
    steps = [(random_step(a, s + 10, heads=True), *random_step(a, s + 20)) for s, a in enumerate(axes)]
    counts = [np.array(c, np.int32) for c in counts]
    outs, cache = play(filled(kind), steps, counts)
    jaxkv.check_invariants(cache)
    for layer in range(3):
        config, cap = LAYERS[layer], 2.0 if layer == 2 else None
        wanted = np.zeros((9, HEADS, RANK))
        starts, before = (0, 3, 7), (9, 4, 0)
        for row in range(ROWS):
            held = random_step((ROWS, 9))[0][layer][row, : before[row], 0]
            place = slice(starts[row], starts[row] + counts[0][row])
            q, k = steps[0][0][layer][place], np.concatenate([held, steps[0][1][layer][place, 0]])
            wanted[place] = attend_by_hand(q, k, len(k), len(q), config.window, cap)
            if counts[1][row]:
                k = np.concatenate([k, steps[1][1][layer][row, :, 0]])
                decoded = attend_by_hand(steps[1][0][layer][row], k, len(k), 1, config.window, cap)
                error = np.linalg.norm(outs[len(LAYERS) + layer][row] - decoded) / np.linalg.norm(decoded)
                assert error < (1e-5 if kind == "float32" else 0.03)
        error = np.linalg.norm(outs[layer] - wanted) / np.linalg.norm(wanted)
        assert error < (1e-5 if kind == "float32" else 0.03)
    assert not np.asarray(outs[len(LAYERS)][2]).any()
    if kind == "float32" or not NIGHTLY:  # by day what is stacked: tests/core/test_quantised.py
        return
    again, _ = play(filled(kind, stacked=True), steps, counts)
    for out, same in zip(outs, again, strict=True):
        np.testing.assert_allclose(same, out, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["float32", "int8"] if NIGHTLY else ["int8"])
@pytest.mark.skipif(not NIGHTLY, reason="by day other kinds of layer go there, in every file of these functions")
def test_rows_go_wherever_others_go(kind, tmp_path):
    """Fork, truncate, swap, the prefix index by way of the host, save and load in other blocks, other block numbers."""
    cache = filled(kind)
    rows = {row: [gather_row(cache, row, layer)[0] for layer in (0, 2)] for row in (0, 1)}

    def holds(cache, row, source, length):
        jaxkv.check(cache)
        jaxkv.check_invariants(cache)
        for layer in (0, 2):
            equal(gather_row(cache, row, layer)[0], rows[source][layer // 2][:length])

    forked = jaxkv.truncate(jaxkv.fork(cache, 0, 2), [9, 4, 7])
    holds(forked, 2, 0, 7)
    holds(jaxkv.reorder(cache, [1, 0, 0]), 1, 0, 9)
    out, host = jaxkv.swap_out(forked, [0, 2])
    holds(jaxkv.swap_in(out, [2, 0], host), 2, 0, 9)
    jaxkv.save(tmp_path / "file", forked)
    for config in (None, cache.config.replace(block_size=3, num_blocks=60, stacked=True, head_dim_multiple=1)):
        loaded = jaxkv.load(tmp_path / "file", config=config, partial_windows=True)
        holds(loaded, 0, 0, 9)
        holds(loaded, 2, 0, 7)
    other = cache.config.replace(layers=(jaxkv.LayerConfig.latent(RANK - 1, ROPE + 1), *LAYERS[1:]))
    with pytest.raises(ValueError, match=r"has layer 0 with rank = 12, but the cache has 11"):
        jaxkv.load(tmp_path / "file", config=other)
    index = jaxkv.PrefixCache(cache.config, spill_bytes=10**6)
    kept = jaxkv.free(index.insert(cache, 0, list(range(9))), [0])
    kept = index.make_room(kept, 30)
    holds(index.adopt(kept, 2, index.match(list(range(9)))), 2, 0, 8)
    holds(permute_blocks(cache), 0, 0, 9)


def test_conversions():
    k = np.random.default_rng(0).normal(size=(4, 1, BLOCK, RANK + ROPE)).astype(np.float32)
    from_blocks = functools.partial(jaxkv.convert.from_blocks, tables=[[2, 0], [1, 3]], lengths=[7, 3])
    cache = from_blocks(k=[k], v=[None], layers=[LATENT])
    jaxkv.check_invariants(cache)
    equal(jaxkv.gather(cache, 0, layer=0)[0][:, 0], np.concatenate([k[2, 0], k[0, 0]])[:7])
    dense = np.moveaxis(k, 1, 2)
    cache = jaxkv.convert.from_dense([dense], [None], 3, layers=[LATENT])
    equal(jaxkv.gather(cache, 2, layer=0)[1], dense[2, :3, :, :RANK])
    with pytest.raises(ValueError, match="v must have None for layer 0, which stores no values"):
        from_blocks(k=[k], v=[k], layers=[LATENT])
    with pytest.raises(ValueError, match="v must have an array for layer 0, which stores values"):
        from_blocks(k=[k], v=[None])
    with pytest.raises(ValueError, match=r"A Hugging Face model keeps .* but layer 0 keeps latent rows"):
        jaxkv.convert.to_hugging_face(cache)
    with pytest.raises(ValueError, match=r"A Flax model keeps .* but layer 0 keeps latent rows"):
        jaxkv.convert.to_flax(cache, {})


def test_layers_that_share_and_single_tokens():
    layers = (LATENT, jaxkv.LayerConfig.latent(RANK, ROPE, shares_with=0))
    cache = jaxkv.init(make_config("float32", layers))
    (k, *_), _ = random_step((ROWS, 2))
    cache = jaxkv.append(cache, [k, None], None)
    q = random_step((ROWS, 2), 5, heads=True)[0]
    out, _ = jaxkv.attention(q, None, None, cache, layer=1, scale=SCALE)
    equal(out, jaxkv.attend(q, cache, layer=0, scale=SCALE))
    ones = np.ones(RANK + ROPE, np.float32)
    changed = cache.store(1, 0, 0, 1, ones, None)
    equal(changed.load(0, 0, 0, 1)[1], ones[:RANK])
    equal(changed.separate(0)[1][0, 0, :2], np.stack([k[0, 0, 0, :RANK], ones[:RANK]]))
    assert changed.combined(0).shape == (ROWS, 1, 1, 40, RANK + ROPE)
    with pytest.raises(ValueError, match=r"k and v must be \[16\] and None, one token of a latent layer"):
        cache.store(0, 0, 0, 1, ones, ones)


def test_no_pool_is_copied_and_what_it_takes():
    layer = jaxkv.LayerConfig.latent()
    config = jaxkv.CacheConfig(layers=(layer,) * 2, max_seqs=4, max_seq_len=1024, num_blocks=4096, head_dim_multiple=1)
    assert config.bytes_per_block == 2 * 16 * 576 * 2
    assert config.replace(head_dim_multiple=128).pool_shape(0) == (4097, 1, 1, 16, 640)
    assert config.with_memory(10**9).num_blocks == 10**9 // config.bytes_per_block - 1
    cache = jax.eval_shape(lambda: jaxkv.init(config))
    q, k = (jax.ShapeDtypeStruct((4, 1, heads, 576), jnp.bfloat16) for heads in (16, 1))

    def step(cache, q, k, counts):
        cache = jaxkv.extend(cache, counts)
        for i in range(2):
            _, cache = jaxkv.attention(q, k, None, cache, layer=i, scale=0.1)
        return cache

    assert_no_copy(jax.jit(step, donate_argnames="cache"), cache, q, k, jax.ShapeDtypeStruct((4,), jnp.int32))
    choice = jaxkv.explain(q, cache, platform="cuda", scale=0.1)
    assert choice.implementation == "gpu", choice
    choice = jaxkv.explain(q, cache, platform="tpu", scale=0.1)
    assert choice.implementation == "xla" and "head_dim of 576 is not a multiple of 128" in choice.reason
    padded = config.replace(head_dim_multiple=128)
    for kind, block_size, chosen in (("bfloat16", 16, "tpu"), ("int8", 128, "tpu"), ("int8", 16, "xla")):
        of_kind = padded.replace(dtype=kind, block_size=block_size)
        cache = jax.eval_shape(lambda of_kind=of_kind: jaxkv.init(of_kind))
        choice = jaxkv.explain(q, cache, platform="tpu", scale=0.1)
        assert choice.implementation == chosen, choice
    assert "block_size of 16 is not a multiple of 128" in choice.reason


K, V = np.ones((ROWS, 1, 1, RANK + ROPE), np.float32), np.ones((ROWS, 1, 1, RANK), np.float32)
Q = np.ones((ROWS, 1, HEADS, RANK + ROPE), np.float32)
BAD = {
    "values": (
        lambda cache: jaxkv.attention(Q, K, V, cache, layer=0, scale=1.0),
        "Layer 0 is latent, its values are the first 12 numbers of its keys: give it None for v",
    ),
    "values to write": (lambda cache: jaxkv.write(cache, K, K, layer=0), "Layer 0 is latent"),
    "values to append": (lambda cache: jaxkv.append(cache, [K] * 4, [K] * 4), "Layer 0 is latent"),
    "no scale": (lambda cache: jaxkv.attention(Q, K, None, cache, layer=0), r"Layer 0 is latent, so scale= must be"),
    "no scale to attend": (lambda cache: jaxkv.attend(Q, cache, layer=0), r"Layer 0 is latent, so scale= must be"),
    "queries that are not absorbed": (
        lambda cache: jaxkv.attend(Q[..., :-1], cache, layer=0, scale=1.0),
        r"q has 15 numbers a head, but layer 0 is latent, with 12 \+ 4",
    ),
    "narrow keys": (lambda cache: jaxkv.write(cache, V, None, layer=0), "k has 12 numbers a head, but layer 0 is"),
    "keys of several heads": (
        lambda cache: jaxkv.write(cache, Q, None, layer=0), "k has 6 heads, but the pool has 1 KV heads",
    ),
    "no keys": (lambda cache: jaxkv.write(cache, None, None, layer=0), "k must be an array, not NoneType"),
    "no values of another layer": (
        lambda cache: jaxkv.write(cache, K[..., :8], None, layer=3), "v must be an array, not NoneType",
    ),
    "rank 0": (lambda _: jaxkv.LayerConfig.latent(0, 4), "rank must be at least 1, not 0"),
    "less than no rope": (lambda _: jaxkv.LayerConfig.latent(8, -1), "rope_dim must be at least 0, not -1"),
    "a rank beyond the row": (
        lambda _: jaxkv.LayerConfig(num_kv_heads=1, head_dim=8, rank=9), "no narrower than it, but rank is 9",
    ),
    "a rank alone": (
        lambda _: jaxkv.LayerConfig(num_kv_heads=2, head_dim=8, rank=4), "make it with LayerConfig.latent",
    ),
    "odd in int4": (
        lambda _: make_config("int4", (jaxkv.LayerConfig.latent(8, 5),), head_dim_multiple=1), "must be even",
    ),
    "shares with another rank": (
        lambda _: make_config(layers=(LATENT, jaxkv.LayerConfig.latent(13, 3, shares_with=0))),
        "if latent, rank and rope_dim",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", ERRORS)
def test_keys_that_are_the_values(kind):
    """Rows of a rank as wide as they are: stored once, and attended to as keys and values of one head."""
    shared, plain = jaxkv.LayerConfig.latent(16, 0, window=5), jaxkv.LayerConfig(num_kv_heads=1, head_dim=16, window=5)
    assert (shared.head_dim, shared.rank, shared.value_dim) == (16, 16, 16)
    cache = jaxkv.init(make_config(kind, (shared, plain.replace(rotate=False)), join_kv=False))
    assert cache.pools[0].kv.size * 2 == cache.pools[1].kv.size
    rng, sinks = np.random.default_rng(0), jnp.linspace(-1, 1, HEADS)
    for count in (9, 1):
        q, k = (rng.normal(size=(ROWS, count, heads, 16)).astype(np.float32) for heads in (HEADS, 1))
        cache = jaxkv.extend(cache, [count, count, 0])
        out, cache = jaxkv.attention(q, k, None, cache, layer=0, scale=SCALE, sinks=sinks)
        wanted, cache = jaxkv.attention(q, k, k, cache, layer=1, scale=SCALE, sinks=sinks)
        np.testing.assert_allclose(out[:2], wanted[:2], atol=1e-5)
    keys, values = jaxkv.gather(cache, 0, layer=0)
    equal(keys, values)


@pytest.mark.parametrize("name", BAD)
def test_what_is_refused(name):
    call, says = BAD[name]
    with pytest.raises(ValueError, match=says) as caught:
        call(filled("float32"))
    assert str(caught.value).endswith(".") and "\n" not in str(caught.value)
