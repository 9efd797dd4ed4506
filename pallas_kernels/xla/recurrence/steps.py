"""The recurrence of a step: as single tokens, or in chunks whose length the platform and the gates decide."""

import math

import jax
import jax.numpy as jnp

from pallas_kernels.common.platforms import is_for_gpu
from pallas_kernels.common.state_batch import StateBatch
from pallas_kernels.xla.recurrence.decode import run_decode
from pallas_kernels.xla.recurrence.formulas import TokenInputs
from pallas_kernels.xla.recurrence.prefill import run_prefill

# Tokens of a chunk. In longer ones products among tokens cost more than is saved; on a GPU half the launches are.
CHUNK, GPU_CHUNK = 32, 64
CHUNK_BY_CHANNEL, GPU_CHUNK_BY_CHANNEL = 16, 32  # products of gates are [chunk, chunk, K] there
LEAST_GATE = -100.0  # its exponential is 0 in float32


def recur(
    inputs: TokenInputs, states: jax.Array, batch: StateBatch, token_axes: tuple[int, ...], *, transposed: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Returns the outputs `f32[*token_axes, H, V]` and the pool of states after the step.

    Args:
      inputs: of all tokens, with `token_axes` flattened to one axis.
      states: `[slots, H, K, V]`; if `transposed`, `[slots, H, V, K]`.
      token_axes: `(S, T)` or `(N,)`.
    """
    inputs = inputs._replace(gate=jnp.maximum(inputs.gate, LEAST_GATE))
    batch = batch.flatten(token_axes)
    if len(token_axes) == 2 and token_axes[1] == 1:
        y, states = run_decode(inputs, states, batch, transposed=transposed)
    else:
        sizes = (CHUNK_BY_CHANNEL, GPU_CHUNK_BY_CHANNEL) if inputs.has_channel_gates else (CHUNK, GPU_CHUNK)
        size = min(sizes[is_for_gpu()], 1 << (token_axes[-1] - 1).bit_length())
        longest = token_axes[1] if len(token_axes) == 2 and batch.snapshot_slots is None else None
        size = math.gcd(size, batch.every or size)
        y, states = run_prefill(inputs, states, batch, longest, size, transposed=transposed)
    return y.reshape(*token_axes, *y.shape[1:]), states
