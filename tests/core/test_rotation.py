"""Heads rotated before they are stored: nobody sees it but those who look at the stored numbers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nightly import NIGHTLY
from steps import on_device

import jaxkv
from pallas_kernels.common.rotation import rotate

HEAD_DIM = 80  # no power of two

quickly_compiled = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def make(rotate, dtype="int8", **fields):
    layer = jaxkv.LayerConfig(num_kv_heads=2, head_dim=HEAD_DIM, rotate=rotate)
    fields = dict(layers=(layer,), max_seqs=2, max_seq_len=64, num_blocks=20, block_size=4, dtype=dtype) | fields
    return jaxkv.CacheConfig(**fields)


def tokens():
    """Two rows of 30 tokens; 5 % of the channels of keys and values ten times larger."""
    rng = np.random.default_rng(0)
    k, v = rng.normal(size=(2, 2, 30, 2, HEAD_DIM)).astype(np.float32)
    large = rng.choice(HEAD_DIM, round(0.05 * HEAD_DIM), replace=False)
    k[..., large] *= 10
    v[..., large] *= 10
    return rng.normal(size=(2, 30, 4, HEAD_DIM)).astype(np.float32), k, v


@pytest.mark.parametrize("head_dim", [1, 7, 64, 80, 96])
def test_the_matrix_is_orthogonal_and_its_own_inverse(head_dim):
    matrix = np.asarray(rotate(jnp.eye(head_dim)), np.float64)
    np.testing.assert_allclose(matrix @ matrix, np.eye(head_dim), atol=1e-5)
    np.testing.assert_allclose(matrix, matrix.T, atol=1e-6)
    if head_dim >= 64:
        assert np.abs(matrix).max() < 0.25  # no channel keeps to itself


@pytest.mark.parametrize("head_dim", [7, 32, 80])
def test_one_order_of_sums(head_dim):
    """Rows alone, in pairs and all at once have the same bits."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(30, 4, head_dim)), jnp.float32)
    in_order = jax.jit(functools.partial(rotate, deterministic=True))
    np.testing.assert_allclose(in_order(x), rotate(x), atol=2e-6)
    for count in (1, 2, 3):
        parts = [in_order(x[i : i + count]) for i in range(0, 30, count)]
        np.testing.assert_array_equal(jnp.concatenate(parts), in_order(x))


def test_pieces_of_a_prompt_are_read_as_the_whole():
    """With `deterministic`, to the bit. A CPU's product of few rows with a matrix of 32 x 32 adds in another order than
    that of many."""
    layer, (q, k, v) = jaxkv.LayerConfig(num_kv_heads=2, head_dim=32), (x[:, :12, :, :32] for x in tokens())

    @jax.jit
    def step(cache, q, k, v):
        cache = jaxkv.extend(cache, jnp.full(2, q.shape[1]))
        return jaxkv.attention(q, k, v, cache, layer=0, deterministic=True)

    outs = []
    for ends in ((12,), (10, 12)):
        cache, start, found = jaxkv.init(make(True, "int4", layers=(layer,))), 0, []
        for end in ends:
            out, cache = step(cache, *(x[:, start:end] for x in (q, k, v)))
            found.append(out)
            start = end
        outs.append(np.concatenate(found, axis=1))
    np.testing.assert_array_equal(*outs)


@functools.cache
def play(config):
    q, k, v = tokens()

    @quickly_compiled
    def run(cache, q, k, v):
        cache = jaxkv.extend(cache, jnp.array([30, 17], jnp.int32))
        return jaxkv.attention(q, k, v, cache, layer=0, return_lse=True)

    (out, lse), cache = run(on_device(jaxkv.init(config)), q, k, v)
    return np.asarray(out), np.asarray(lse), cache


def error(got, wanted):
    return np.linalg.norm(got - wanted) / np.linalg.norm(wanted)


@pytest.mark.skipif(not NIGHTLY, reason="by day what is seen is not rotated, and what is stored is")
def test_outliers_cost_less():
    exact, exact_lse, _ = play(make(None, "float32"))
    plain, turned = (play(make(how)) for how in (False, True))
    assert error(turned[0], exact) < 0.017 < 0.02 < error(plain[0], exact)
    assert np.abs(turned[1][0] - exact_lse[0]).max() < 0.5
    assert not turned[0][1, 17:].any()  # padding


def test_what_is_seen_is_not_rotated_and_what_is_stored_is(tmp_path):
    """gather, one token, another cache's arrays, files, and the host."""
    config = make(True)
    _, k, v = tokens()
    cache = play(config)[2]
    for row, length in ((0, 30), (1, 17)):
        got = jaxkv.gather(cache, row, layer=0)
        for x, wanted in zip(got, (k, v), strict=True):
            assert error(np.asarray(x), wanted[row, :length]) < 0.017
    stored, _, scale, _ = jaxkv.gather(cache, 1, layer=0, raw=True)
    raw = np.asarray(stored, np.float32) * np.asarray(scale)[..., None]
    assert error(raw, np.asarray(rotate(jnp.asarray(k[1, :17])))) < 0.017 and error(raw, k[1, :17]) > 1
    put = cache.store(0, 1, 1, 3, k[0, 0, 0], v[0, 0, 0])
    assert error(np.asarray(put.load(0, 1, 1, 3)[0]), k[0, 0, 0]) < 0.03

    jaxkv.save(tmp_path / "file", cache)
    loaded = jaxkv.load(tmp_path / "file")
    assert loaded.config.rotates(0)
    np.testing.assert_array_equal(jaxkv.gather(loaded, 0, layer=0)[0], jaxkv.gather(cache, 0, layer=0)[0])
    out, host = jaxkv.swap_out(cache, 0)
    back = jaxkv.swap_in(out, 0, host)
    np.testing.assert_array_equal(jaxkv.gather(back, 0, layer=0)[0], jaxkv.gather(cache, 0, layer=0)[0])


def test_refusals(tmp_path):
    cache = play(make(True))[2]
    _, host = jaxkv.swap_out(cache, 0)
    plain = jaxkv.init(make(False))
    with pytest.raises(ValueError, match="have rotate=True, but the cache's have False: swap them"):
        jaxkv.swap_in(plain, 0, host)
    jaxkv.save(tmp_path / "file", cache)
    with pytest.raises(ValueError, match="rotate"):
        jaxkv.load(tmp_path / "file", config=make(False))
    with pytest.raises(ValueError, match=r"LayerConfig.rotate must be True, False or None, not 'yes'"):
        make("yes")
    with pytest.raises(ValueError, match=r"layers\[0\].rotate is for heads in a quantized format, but .* in bfloat16"):
        make(True, dtype="bfloat16")
    shared = dataclasses.replace(make(True).layers[0], shares_with=0)
    with pytest.raises(ValueError, match="no dtype or rotate of its own"):
        make(True, layers=(make(True).layers[0], shared))
