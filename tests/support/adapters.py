"""What the NNX and the Linen attention layer must both do; `tests/test_nnx.py` and `tests/test_linen.py` run it.

A layer is a pytree of parameters and a function `apply(params, x, cache=None, layer=0) -> (y, cache)`.
"""

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv.models import Rope

WIDTH, HEADS, KV_HEADS, HEAD_DIM = 24, 4, 2, 16
COUNTS = (7, 0, 1, 17)  # tokens of each row's prompt; one row stays empty
OPTIONS = dict(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, position_fn=Rope(theta=100.0))
# Everything that a layer can be told to do differently.
VARIANTS = {
    "plain": {},
    "biases": dict(use_bias=True, use_out_bias=False),
    "window": dict(window=5),
    "soft cap and scale": dict(soft_cap=2.0, scale=0.7),
    "sinks": dict(use_sinks=True),
}


def randomise(params, seed=0):
    """Every leaf random: zeros would hide a bias or a sink that is never used."""
    leaves, tree = jax.tree.flatten(params)
    random = np.random.default_rng(seed)
    return jax.tree.unflatten(tree, [jnp.asarray(random.normal(0, 0.3, x.shape), x.dtype) for x in leaves])


def check_options_matter(make):
    """An option that reached neither path would make both agree; `make(**options)` gives `(apply, params)`."""
    x = sequences()[0]
    outputs = []
    for options in ({}, dict(window=5), dict(soft_cap=2.0), dict(scale=0.7), dict(position_fn=None)):
        apply, params = make(**options)
        outputs.append(np.asarray(apply(params, x)[0]))
    for i, y in enumerate(outputs):
        assert all(np.abs(y - other).max() > 1e-2 for other in outputs[:i])


def new_cache(num_layers=1, dtype="float32"):
    layer = jaxkv.LayerConfig(num_kv_heads=KV_HEADS, head_dim=HEAD_DIM)
    return jaxkv.init(
        jaxkv.CacheConfig(
            layers=(layer,) * num_layers, max_seqs=len(COUNTS), max_seq_len=64, num_blocks=20, block_size=4, dtype=dtype
        )
    )


def sequences(num_more=4, seed=1):
    """Each row's inputs `[tokens, WIDTH]`: a prompt and `num_more` steps; an empty row stays empty."""
    random = np.random.default_rng(seed)
    return [random.normal(size=(n + num_more if n else 0, WIDTH)).astype(np.float32) for n in COUNTS]


def padded(pieces):
    """Rows of different length as one array `[S, T, WIDTH]`, padded with junk that must not matter."""
    out = np.full((len(pieces), max(len(p) for p in pieces), WIDTH), 1e9, np.float32)
    for row, piece in zip(out, pieces, strict=True):
        row[: len(piece)] = piece
    return out


def packed(pieces, places):
    """Rows one after another `[places, WIDTH]`, padded with junk at the end."""
    out = np.full((places, WIDTH), 1e9, np.float32)
    joined = np.concatenate(pieces)
    out[: len(joined)] = joined
    return out


def expected(apply, params):
    """The dense path's output of each sequence; what stands behind one's end is junk that it cannot see."""
    y = jax.jit(lambda params, x: apply(params, x)[0])(params, padded(sequences()))
    return [np.asarray(row[: len(x)]) for row, x in zip(y, sequences(), strict=True)]


def check_padded(apply, params, jit=jax.jit):
    """A ragged prompt, then one step after another, give what the dense path gives."""
    whole, wanted = sequences(), expected(apply, params)

    @jit
    def step(params, x, counts, cache):
        cache = jaxkv.extend(cache, counts)
        return apply(params, x, cache=cache, layer=0)

    counts = np.array(COUNTS, np.int32)
    y, cache = step(params, padded([x[:n] for x, n in zip(whole, COUNTS, strict=True)]), counts, new_cache())
    for row, n in enumerate(COUNTS):
        np.testing.assert_allclose(y[row, :n], wanted[row][:n], rtol=1e-4, atol=1e-5)
    for t in range(4):
        more = [x[n + t : n + t + 1] for x, n in zip(whole, COUNTS, strict=True)]
        y, cache = step(params, padded(more), (counts > 0).astype(np.int32), cache)
        for row, n in enumerate(COUNTS):
            if n:
                np.testing.assert_allclose(y[row, 0], wanted[row][n + t], rtol=1e-4, atol=1e-5)
    jaxkv.check(cache)
    assert cache.lengths.tolist() == [11, 0, 5, 21]


def check_packed(apply, params):
    """Prompts in two chunks, packed, beside rows that are further on."""
    whole, wanted = sequences(), expected(apply, params)

    @jax.jit
    def step(params, x, counts, cache):
        cache = jaxkv.extend(cache, counts)
        return apply(params, x, cache=cache)

    cache, done = new_cache(), [0] * len(COUNTS)
    for counts in ((7, 0, 1, 4), (1, 0, 0, 9), (0, 0, 2, 6), (3, 0, 2, 2)):
        pieces = [x[d : d + n] for x, d, n in zip(whole, done, counts, strict=True)]
        y, cache = step(params, packed(pieces, places=16), np.array(counts, np.int32), cache)
        start = 0
        for row, n in enumerate(counts):
            np.testing.assert_allclose(
                y[start : start + n], wanted[row][done[row] : done[row] + n], rtol=1e-4, atol=1e-5
            )
            start, done[row] = start + n, done[row] + n
    jaxkv.check(cache)
    assert done == [11, 0, 5, 21]


def check_scan(apply, params):
    """Decode steps inside `lax.scan`, the cache carried."""
    whole, wanted = sequences(), expected(apply, params)
    counts = np.array(COUNTS, np.int32)

    @jax.jit
    def run(params, prompts, steps, cache):
        _, cache = apply(params, prompts, cache=jaxkv.extend(cache, counts))

        def step(cache, x):
            y, cache = apply(params, x, cache=jaxkv.extend(cache, (counts > 0).astype(np.int32)))
            return cache, y

        return jax.lax.scan(step, cache, steps)

    prompts = padded([x[:n] for x, n in zip(whole, COUNTS, strict=True)])
    steps = np.stack([padded([x[n + t : n + t + 1] for x, n in zip(whole, COUNTS, strict=True)]) for t in range(4)])
    cache, ys = run(params, prompts, steps, new_cache())
    for row, n in enumerate(COUNTS):
        if n:
            np.testing.assert_allclose(ys[:, row, 0], wanted[row][n:], rtol=1e-4, atol=1e-5)
    jaxkv.check(cache)
