"""Formulas of linear recurrences over states: a chunk of tokens as matrix products, a single token in one pass.

A row's state is a matrix of each head, `[K, V]`. A token multiplies it by its gate (a number a head, or one for each
key channel), then adds `k u^T`, where u is the value, or with the delta rule what the state lacks of the value; its
output is `q` times the state. Within a chunk that is a triangular system and a few products (the parallel forms of
https://arxiv.org/abs/2412.06464 and https://arxiv.org/abs/2405.21060); a scan carries states from chunk to chunk.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.common.state_batch import expand

_product = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


class TokenInputs(NamedTuple):
    """What the recurrence takes of each token, float32, in any leading axes; 0 leaves a state as it is."""

    q: jax.Array  # [..., H, K]
    k: jax.Array  # [..., H, K]
    v: jax.Array  # [..., H, V]
    gate: jax.Array  # [..., H] or [..., H, K]: logarithms, at most 0
    beta: jax.Array | None = None  # [..., H]; None: no delta rule

    @property
    def has_channel_gates(self) -> bool:
        """Whether each key channel has a gate of its own."""
        return self.gate.ndim == self.k.ndim


def mask_tokens(inputs: TokenInputs, valid: jax.Array) -> TokenInputs:
    """Returns tokens of which those that are not valid leave a state as it is."""
    return jax.tree.map(lambda x: jnp.where(expand(valid, x.ndim), x, 0.0), inputs)


class TokenTerms(NamedTuple):
    """What one token of each row brings to its states, besides the states themselves."""

    gate: jax.Array  # [..., H, K or 1]
    reads: tuple[jax.Array, ...]  # [..., H, K] each: what the states are multiplied by, gated: for the output, and k
    k: jax.Array  # [..., H, K]
    v: jax.Array  # [..., H, V]
    beta: jax.Array | None  # [..., H, 1]
    overlap: jax.Array  # [..., H, 1]: q times k


def make_terms(x: TokenInputs) -> TokenTerms:
    """Returns the terms of one token of each row."""
    gate = jnp.exp(x.gate) if x.has_channel_gates else jnp.exp(x.gate)[..., None]
    beta = None if x.beta is None else x.beta[..., None]
    reads = (x.q * gate,) if beta is None else (x.q * gate, x.k * gate)
    return TokenTerms(gate, reads, x.k, x.v, beta, (x.q * x.k).sum(-1, keepdims=True))


def run_token(
    x: TokenTerms, state: jax.Array, *, transposed: bool, by_vectors: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Returns the output of one token of each row `[L, H, V]` and the states after it.

    Args:
      x: of `L` rows.
      state: `[L, H, K, V]`; if `transposed`, `[L, H, V, K]`.
      by_vectors: multiplies the states by one vector after another, in place. XLA for CPUs packs a matrix that is
        multiplied by two, which takes longer. Can go when it packs no right operand of few rows.
    """
    at = "lhvk" if transposed else "lhkv"
    if by_vectors:
        found = [_product(f"lhk,{at}->lhv", read, state) for read in jax.lax.optimization_barrier(x.reads)]
    else:
        found = list(jnp.moveaxis(_product(f"lhak,{at}->lhav", jnp.stack(x.reads, axis=-2), state), -2, 0))
    u = x.v if x.beta is None else (x.v - found[1]) * x.beta
    y = found[0] + x.overlap * u
    if transposed:
        return y, state * x.gate[..., None, :] + u[..., :, None] * x.k[..., None, :]
    return y, state * x.gate[..., :, None] + x.k[..., :, None] * u[..., None, :]


def run_chunk(x: TokenInputs, state: jax.Array, *, transposed: bool) -> tuple[jax.Array, jax.Array]:
    """Returns the outputs of a chunk of each row `[L, C, H, V]` and the states after it."""
    has_channel_gates, size = x.has_channel_gates, x.k.shape[1]
    x = jax.tree.map(lambda array: jnp.moveaxis(array, 1, 2), x)  # heads first: products over them are batches
    state = jnp.swapaxes(state, -1, -2) if transposed else state
    later, seen = (jnp.tri(size, k=k, dtype=bool) for k in (-1, 0))
    till, gate = seen.astype(jnp.float32), x.gate if has_channel_gates else x.gate[..., None]
    since_start = jnp.exp(_product("ts,lhsk->lhtk", till, gate))
    # between[t, s]: the sum of the gates of tokens s + 1 to t, summed by itself: differences of sums lose digits.
    masked = jnp.where(later[None, None, ..., None], gate[..., None, :], 0.0)
    between = jnp.exp(_product("tr,lhrsk->lhtsk", till, masked))
    between = jnp.where(seen[None, None, ..., None], between, 0.0)
    till_end = between[..., -1, :, :]

    def multiply(a: jax.Array, b: jax.Array) -> jax.Array:
        """Returns the products of tokens t and s, of what lies between them."""
        if has_channel_gates:
            return (a[..., :, None, :] * b[..., None, :, :] * between).sum(-1)
        return _product("lhtk,lhsk->lhts", a, b) * between[..., 0]

    u = x.v
    if x.beta is not None:
        beta = x.beta[..., None]
        lower = jnp.where(later[None, None], multiply(x.k, x.k) * beta, 0.0)
        wanted = (x.v - _product("lhtk,lhkv->lhtv", x.k * since_start, state)) * beta
        u = _product("lhts,lhsv->lhtv", invert(lower), wanted)
    y = _product("lhtk,lhkv->lhtv", x.q * since_start, state) + _product("lhts,lhsv->lhtv", multiply(x.q, x.k), u)
    state = state * jnp.moveaxis(since_start[..., -1:, :], -1, -2)
    state = state + _product("lhsk,lhsv->lhkv", x.k * till_end, u)
    return jnp.moveaxis(y, 2, 1), jnp.swapaxes(state, -1, -2) if transposed else state


def invert(lower: jax.Array) -> jax.Array:
    """Returns the inverses of `I + lower`, strictly lower triangles `[..., C, C]`; C must be a power of 2.

    Blocks of the diagonal are inverted, then pairs of them joined, by products only: a solver from LAPACK would wait
    for its own threads. Powers of `lower`, which are as fast, overflow where keys repeat.
    """
    size, batch = lower.shape[-1], lower.shape[:-2]
    inverse, width = jnp.ones((*batch, size, 1, 1), lower.dtype), 1
    while width < size:
        pairs = size // (2 * width)
        blocks = lower.reshape(*batch, pairs, 2, width, pairs, 2, width)[..., 1, :, :, 0, :]
        between = jnp.moveaxis(jnp.diagonal(blocks, axis1=-4, axis2=-2), -1, -3)  # [..., pairs, width, width]
        inverse = inverse.reshape(*batch, pairs, 2, width, width)
        first, second = inverse[..., 0, :, :], inverse[..., 1, :, :]
        corner = -_product("...ab,...bc->...ac", second, _product("...ab,...bc->...ac", between, first))
        upper = jnp.concatenate([first, jnp.zeros_like(corner)], axis=-1)
        inverse, width = jnp.concatenate([upper, jnp.concatenate([corner, second], axis=-1)], axis=-2), 2 * width
    return inverse.reshape(lower.shape)
