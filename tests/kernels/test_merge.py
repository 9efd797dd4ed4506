"""Attention over parts of a context merges to attention over all of it."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import merge_attention, testing

HEADS, DIM = 3, 4


@functools.partial(jax.jit, static_argnames="edges")
def parts(logits, values, edges):
    """Dense attention of one query over each part of the context, `[P, H, D]` and `[P, H]`."""
    outs, lses = [], []
    for start, stop in itertools.pairwise(edges):
        some = logits[:, start:stop]
        if start == stop:
            outs.append(jnp.full((HEADS, DIM), jnp.nan))  # must not be read
            lses.append(jnp.full(HEADS, -jnp.inf))
            continue
        outs.append(jnp.einsum("hc,chd->hd", jax.nn.softmax(some), values[start:stop]))
        lses.append(jax.nn.logsumexp(some, axis=1))
    return jnp.stack(outs), jnp.stack(lses)


def random(seed=0, spread=1.0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(0, spread, (HEADS, 12)), jnp.float32), jnp.asarray(
        rng.normal(size=(12, HEADS, DIM)), jnp.float32
    )


@pytest.mark.parametrize("edges", [(0, 12), (0, 5, 12), (0, 0, 1, 11, 12, 12), (0, 3, 3, 12)])
@pytest.mark.parametrize("spread", [1.0, 60.0])
def test_parts_are_the_whole(edges, spread):
    logits, values = random(spread=spread)
    out, lse = merge_attention(*parts(logits, values, edges))
    (whole,), (whole_lse,) = parts(logits, values, (0, 12))
    np.testing.assert_allclose(out, whole, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse, whole_lse, rtol=1e-6, atol=1e-6)


def test_nothing_seen():
    out, lse = merge_attention(jnp.full((2, HEADS, DIM), jnp.nan, jnp.bfloat16), jnp.full((2, HEADS), -jnp.inf))
    assert out.dtype == jnp.bfloat16 and lse.dtype == jnp.float32
    np.testing.assert_array_equal(out.astype(jnp.float32), 0)
    assert jnp.isneginf(lse).all()
    out, lse = merge_attention(jnp.zeros((0, HEADS, DIM)), jnp.zeros((0, HEADS)))
    assert out.shape == (HEADS, DIM) and jnp.isneginf(lse).all()


def test_gradients():
    """Those of the whole, and finite beside parts that saw nothing."""
    logits, values = random()

    def loss(edges, logits, values):
        out, lse = merge_attention(*parts(logits, values, edges))
        return jnp.sum(out**2) + jnp.sum(lse)

    gradient = jax.jit(jax.grad(loss, (1, 2)), static_argnums=0)
    got = gradient((0, 4, 4, 12), logits, values)
    wanted = gradient((0, 12), logits, values)
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    outs, lses = parts(logits, values, (0, 4, 12))
    nothing = jnp.full_like(lses, -jnp.inf)
    for g in jax.jit(jax.grad(lambda outs, lses: merge_attention(outs, lses)[0].sum(), (0, 1)))(outs, nothing):
        assert jnp.isfinite(g).all()


def test_what_the_reference_gives_merges():
    case = testing.Case(lengths=(9, 16), new=(1, 1))
    q, kv, tables, lengths, new = testing.make_inputs(case)
    places = jnp.arange(tables.shape[1] * kv.shape[3])
    masks = [jnp.broadcast_to(half, (2, 1, *half.shape)) for half in (places < 7, places >= 7)]
    both = [pallas_kernels.paged_attention(q, kv, tables, lengths, new, mask=m, return_lse=True) for m in masks]
    out, _ = merge_attention(*(jnp.stack(x) for x in zip(*both, strict=True)))
    np.testing.assert_allclose(out, pallas_kernels.paged_attention(q, kv, tables, lengths, new), rtol=2e-5, atol=2e-5)


def test_refusals():
    with pytest.raises(ValueError, match=r"outs must be \[P, ..., H, D\]"):
        merge_attention(jnp.zeros((2, 3, 4)), jnp.zeros((2, 4)))
