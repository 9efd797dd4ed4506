"""Rows that have given tokens up, in every kernel: dense attention under the same mask."""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from nightly import NIGHTLY

import jaxkv
from jaxkv._core.state.head_rows import join_heads, split_heads
from jaxkv.testing import poison
from pallas_kernels import gpu, tpu, xla

LENGTHS, HEADS, DIM, PLACES = (41, 17, 25), 2, 128, 64


def thinned(evict, dtype, kept):
    """Queries, pool, tables, lengths and new of a decode step, what joins the output's heads, and what it must be.

    NaN is in all that is not held.
    """
    layer = jaxkv.LayerConfig(num_kv_heads=HEADS, head_dim=DIM, evict=evict)
    config = jaxkv.CacheConfig(
        layers=(layer,), max_seqs=3, max_seq_len=PLACES, num_blocks=24, block_size=8, dtype=dtype
    )
    rng = np.random.default_rng(1)
    q, (k, v) = rng.normal(size=(3, 1, 3 * HEADS, DIM)), rng.normal(size=(2, 3, max(LENGTHS) + 1, HEADS, DIM))
    q, k, v = (jnp.asarray(x, dtype) for x in (q, k, v))
    keep = rng.random((3, HEADS, PLACES)) < kept
    keep = keep if evict == "head" else np.repeat(keep[:, :1], HEADS, axis=1)
    cache = jaxkv.append(jaxkv.init(config), [k], [v], list(LENGTHS))
    cache = jaxkv.evict(cache, keep if evict == "head" else keep[:, 0], layer=0)
    new = [x[np.arange(3), np.array(LENGTHS)][:, None] for x in (k, v)]
    cache = jaxkv.write(jaxkv.extend(poison(cache), [1, 1, 1]), *new, layer=0)
    keep[np.arange(3), :, np.array(LENGTHS)] = True
    seen = keep[..., : max(LENGTHS) + 1] & (np.arange(max(LENGTHS) + 1) <= np.array(LENGTHS)[:, None, None])
    one, t = cache.layer(0), cache.tables[0]
    arguments = split_heads(one, q), one.pool.kv, t.tables, t.lengths, t.new
    return arguments, lambda out: join_heads(one, out, out.ndim - 2), dense(q[:, 0], k, v, seen)[:, None]


def dense(q, k, v, seen):
    """`f64[S, H, D]`: queries `[S, H, D]` over keys `[S, C, K, D]`, of which each of K heads sees bool[S, K, C]."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v, seen = (np.repeat(x, q.shape[1] // HEADS, axis=axis) for x, axis in ((k, 2), (v, 2), (seen, 1)))
    logits = np.where(seen, np.einsum("shd,schd->shc", q, k) * DIM**-0.5, -np.inf)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.einsum("shc,schd->shd", weights / weights.sum(axis=-1, keepdims=True), v)


INTERPRETED = {
    "tpu": (tpu, pltpu.InterpretParams(uninitialized_memory="nan", out_of_bounds_reads="raise")),
    "gpu": (gpu, plgpu.InterpretGPUParams(num_tma_threads_per_device=64)),
    "xla": (xla, None),
}
# The kernels for GPU multiply in 16 bits, and keep weights in them.
STORED = {"tpu": ("float32", 1e-5), "gpu": ("bfloat16", 2e-2), "xla": ("float32", 1e-5)}


@pytest.mark.skipif(not NIGHTLY, reason="by day XLA is held against dense attention, in test_evict.py")
@pytest.mark.parametrize("kernels", STORED)
@pytest.mark.parametrize("evict", ["layer", "head"])
def test_what_is_kept_is_attended_to(kernels, evict):
    dtype, within = STORED[kernels]
    backend, interpreter = INTERPRETED[kernels]
    arguments, joined, expected = thinned(evict, dtype, 0.4)
    options = {} if interpreter is None else {"interpret": interpreter}
    out = jax.jit(lambda *x: backend.paged_attention(*x, **options))(*arguments)
    np.testing.assert_allclose(np.asarray(joined(out), np.float64), expected, atol=within)
