"""The definition of layers that keep a state, in plain `jnp` and float32: one token after another.

Written to be checked by eye, not to be fast. Every other backend is tested against this file.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.common.channel_groups import join_groups, split_groups
from pallas_kernels.common.ragged_layout import locate
from pallas_kernels.common.state_batch import StateBatch

Update = Callable[[jax.Array, Any], tuple[jax.Array, jax.Array]]


def run_tokens(
    update: Update, tokens: Any, states: jax.Array, batch: StateBatch, token_axes: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    """Returns the outputs of `update(state, token) -> (output, state)`, token by token, and the pool after them."""
    token = locate(token_axes, batch.kv_lens, batch.query_lens, batch.query_starts)
    rows = jnp.arange(batch.slots.shape[0])
    begins = batch.begins.reshape(-1, *[1] * (states.ndim - 1))
    held = jnp.where(begins, 0.0, states[batch.slots].astype(jnp.float32))  # [S, ...]
    snapshots = jnp.zeros(
        (*(batch.snapshot_slots.shape if batch.snapshot_slots is not None else (rows.size, 0)), *held.shape[1:])
    )

    def step(carry: Any, entry: Any) -> Any:
        held, snapshots = carry
        row, position, valid, number = entry
        y, state = update(held[row], jax.tree.map(lambda x: x[number], tokens))
        held = jnp.where(valid & (rows == row).reshape(-1, *[1] * (held.ndim - 1)), state, held)
        if snapshots.shape[1]:
            assert batch.every is not None
            n = (position + 1) // batch.every - batch.starts[row] // batch.every - 1
            at = jnp.where(valid & ((position + 1) % batch.every == 0), n, snapshots.shape[1])
            snapshots = snapshots.at[row, at].set(state, mode="drop")
        return (held, snapshots), jnp.where(valid, y, 0.0)

    entries = (*(x.reshape(-1) for x in token), jnp.arange(token.row.size))
    (held, snapshots), y = jax.lax.scan(step, (held, snapshots), entries)
    states = states.at[batch.targets(states.shape[0])].set(held.astype(states.dtype), mode="drop")
    if batch.snapshot_slots is not None:
        assert batch.every is not None
        number = jnp.broadcast_to(jnp.arange(batch.snapshot_slots.shape[1]), batch.snapshot_slots.shape)
        reached = batch.kv_lens // batch.every - batch.starts // batch.every
        targets = batch.snapshot_targets(number, number < reached[:, None], states.shape[0])
        states = states.at[targets].set(snapshots.astype(states.dtype), mode="drop")
    return y.reshape(*token_axes, *y.shape[1:]), states


def causal_conv(x, weight, bias, activation, states, batch):
    """Computes [`pallas_kernels.causal_conv`][]: a row's state is its last `width - 1` inputs."""
    if states.ndim == 4:
        y, joined = causal_conv(x, weight, bias, activation, join_groups(states), batch)
        return y, split_groups(joined, states.shape[1:])

    def update(state, token):
        window = jnp.concatenate([state, token[:, None]], axis=1)  # [channels, width]
        y = (window * weight.astype(jnp.float32)).sum(axis=1) + (0.0 if bias is None else bias.astype(jnp.float32))
        return jax.nn.silu(y) if activation == "silu" else y, window[:, 1:]

    tokens = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    y, states = run_tokens(update, tokens, states, batch, x.shape[:-1])
    return y.astype(x.dtype), states


def gated_delta_rule(q, k, v, g, beta, scale, states, batch):
    """Computes [`pallas_kernels.gated_delta_rule`][]: the state forgets, then learns what it lacks of the value."""
    axes, heads = v.shape[:-2], v.shape[-2]
    q, k = (jnp.repeat(x, heads // x.shape[-2], axis=-2) for x in (q, k))

    def update(state, token):  # [H, K, V]
        q, k, v, g, beta = token
        state = state * jnp.exp(g if g.ndim == 2 else g[:, None])[..., None]
        lacks = v - (k[:, :, None] * state).sum(axis=1)
        state = state + k[:, :, None] * (beta[:, None] * lacks)[:, None]
        return (q[:, :, None] * state).sum(axis=1) * scale, state

    tokens = tuple(x.reshape(-1, *x.shape[len(axes) :]).astype(jnp.float32) for x in (q, k, v, g, beta))
    y, states = run_tokens(update, tokens, states, batch, axes)
    return y.astype(v.dtype), states


def state_space(x, dt, A, B, C, D, states, batch):
    """Computes [`pallas_kernels.state_space`][]: the state decays by time, and takes the input times `B`."""
    axes, heads = x.shape[:-2], x.shape[-2]
    B, C = (jnp.repeat(b, heads // b.shape[-2], axis=-2) for b in (B, C))
    A, D = A.astype(jnp.float32), 0.0 if D is None else D.astype(jnp.float32).reshape(heads, -1)

    def update(state, token):  # [H, P, n]
        x, dt, B, C = token
        state = state * jnp.exp(dt * A)[:, None, None] + (dt[:, None] * x)[:, :, None] * B[:, None]
        return (state * C[:, None]).sum(axis=2) + D * x, state

    tokens = tuple(x.reshape(-1, *x.shape[len(axes) :]).astype(jnp.float32) for x in (x, dt, B, C))
    y, states = run_tokens(update, tokens, states, batch, axes)
    return y.astype(x.dtype), states
