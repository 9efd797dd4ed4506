"""Layers that keep a state, by XLA: their inputs as the common recurrence takes them."""

import jax
import jax.numpy as jnp

from pallas_kernels.common.state_batch import StateBatch, hide_padding
from pallas_kernels.xla.recurrence.convolution import causal_conv as causal_conv
from pallas_kernels.xla.recurrence.formulas import TokenInputs
from pallas_kernels.xla.recurrence.steps import recur

__all__ = ["causal_conv", "gated_delta_rule", "state_space"]


def gated_delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    scale: float | jax.Array,
    states: jax.Array,
    batch: StateBatch,
) -> tuple[jax.Array, jax.Array]:
    """Computes [`pallas_kernels.gated_delta_rule`][]."""
    token_axes, heads = v.shape[:-2], v.shape[-2]
    q, k = (repeat_heads(x, heads) for x in (q, k))
    q, k, u, g, beta = (_flatten(x, token_axes) for x in (q, k, v, g, beta))
    y, states = recur(TokenInputs(q * scale, k, u, g, beta), states, batch, token_axes)
    return hide_padding(y, v, batch), states


def state_space(
    x: jax.Array,
    dt: jax.Array,
    A: jax.Array,
    B: jax.Array,
    C: jax.Array,
    D: jax.Array | None,
    states: jax.Array,
    batch: StateBatch,
) -> tuple[jax.Array, jax.Array]:
    """Computes [`pallas_kernels.state_space`][]."""
    token_axes, heads = x.shape[:-2], x.shape[-2]
    B, C = (repeat_heads(b, heads) for b in (B, C))
    u, dt, B, C = (_flatten(x, token_axes) for x in (x, dt, B, C))
    inputs = TokenInputs(C, B, u * dt[..., None], dt * A.astype(jnp.float32)[None])
    y, states = recur(inputs, states, batch, token_axes, transposed=True)
    if D is not None:
        D = D.astype(jnp.float32)
        y = y + (u * (D[:, None] if D.ndim == 1 else D)[None]).reshape(y.shape)
    return hide_padding(y, x, batch), states


def repeat_heads(x: jax.Array, heads: int) -> jax.Array:
    """Returns `[..., heads, D]`, each head repeated for the heads that share it."""
    return x if x.shape[-2] == heads else jnp.repeat(x, heads // x.shape[-2], axis=-2)


def _flatten(x: jax.Array, token_axes: tuple[int, ...]) -> jax.Array:
    return x.reshape(-1, *x.shape[len(token_axes) :]).astype(jnp.float32)
