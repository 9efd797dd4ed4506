"""Causal convolutions of a step's tokens, each channel by itself, behind the last inputs of their rows."""

import jax
import jax.numpy as jnp

from pallas_kernels.common.ragged_layout import locate
from pallas_kernels.common.state_batch import StateBatch, read_slots


def causal_conv(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    activation: str | None,
    states: jax.Array,
    batch: StateBatch,
) -> tuple[jax.Array, jax.Array]:
    """Computes [`pallas_kernels.causal_conv`][]: `width` gathers of the tokens, whatever their layout."""
    token_axes, (channels, width) = x.shape[:-1], weight.shape
    token = locate(token_axes, batch.kv_lens, batch.query_lens, batch.query_starts)
    row, valid = token.row.reshape(-1), token.valid.reshape(-1)
    batch, rows = batch.flatten(token_axes), batch.query_lens.shape[0]
    assert batch.query_starts is not None
    before = jnp.swapaxes(read_slots(states, batch), 1, 2).reshape(rows * (width - 1), channels)
    flat = jnp.where(valid[:, None], x.reshape(-1, channels), jnp.zeros((), x.dtype)).astype(jnp.float32)
    inputs = jnp.concatenate([before, flat])  # each row's last inputs, then all tokens

    def place(row: jax.Array, index: jax.Array) -> jax.Array:
        """Returns where the input `index` of a row's step is; negative: before the step."""
        assert batch.query_starts is not None
        old, new = row * (width - 1) + width - 1 + index, rows * (width - 1) + batch.query_starts[row] + index
        return jnp.clip(jnp.where(index < 0, old, new), 0, inputs.shape[0] - 1)

    index = jnp.arange(flat.shape[0], dtype=jnp.int32) - batch.query_starts[row]
    y = jnp.zeros_like(flat) if bias is None else jnp.broadcast_to(bias.astype(jnp.float32), flat.shape)
    for distance in range(width):
        y = y + inputs[place(row, index - distance)] * weight[:, width - 1 - distance].astype(jnp.float32)[None]
    y = jax.nn.silu(y) if activation == "silu" else y
    y = jnp.where(valid[:, None], y, 0.0).astype(x.dtype).reshape(x.shape)
    if width == 1:
        return y, states

    def last_inputs(end: jax.Array) -> jax.Array:
        """Returns the state after the first `end` i32[S, m] tokens of each row's step, `[S, m, ...]`."""
        index = end[..., None] + jnp.arange(1 - width, 0, dtype=jnp.int32)[None, None]
        each = jnp.arange(rows, dtype=jnp.int32)[:, None, None]
        last = inputs[place(each, index)]
        return jnp.swapaxes(last.reshape(*last.shape[:3], *states.shape[1:2], *states.shape[3:]), 2, 3)

    num_slots = states.shape[0]
    ends, targets = batch.query_lens[:, None], batch.targets(num_slots)[:, None]
    if batch.snapshot_slots is not None:
        assert batch.every is not None
        number = jnp.broadcast_to(
            jnp.arange(batch.snapshot_slots.shape[1], dtype=jnp.int32), (rows, 1 * batch.snapshot_slots.shape[1])
        )
        reached = (batch.starts[:, None] // batch.every + 1 + number) * batch.every - batch.starts[:, None]
        taken = reached <= batch.query_lens[:, None]
        ends = jnp.concatenate([ends, jnp.where(taken, reached, 0)], axis=1)
        targets = jnp.concatenate([targets, batch.snapshot_targets(number, taken, num_slots)], axis=1)
    last = last_inputs(ends).reshape(-1, *states.shape[1:]).astype(states.dtype)
    return y, states.at[targets.reshape(-1)].set(last, mode="drop")
