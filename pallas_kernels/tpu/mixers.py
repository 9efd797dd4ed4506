"""Mixers as TPU kernels: see `pallas_kernels/api/mixer_dispatch.py`."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.common.channel_groups import SUBLANES, has_channel_tiles
from pallas_kernels.common.ragged_layout import locate
from pallas_kernels.common.state_batch import MixerCall, StateBatch, hide_padding, merge_rows, share_rows
from pallas_kernels.tpu.pages import LANES, VMEM_BYTES, sublanes, vector_bytes
from pallas_kernels.tpu.recurrence.products import CHUNK, LEAST_GATE
from pallas_kernels.tpu.recurrence.state_decode import (
    StateTokens,
    decode_states,
    heads_of_item,
    make_masks,
    update_conv,
    update_delta,
    update_space,
)
from pallas_kernels.tpu.recurrence.state_prefill import (
    list_chunks,
    prefill_states,
    state_prefill_bytes,
)

WINDOWS, WINDOW_BYTES = 8, 2**20  # of a convolution's rows: on their way in, and out; the most that one may have


def unsupported(call: MixerCall) -> str | None:
    """Returns why a call cannot run as a TPU kernel, and the way out; None: it can. Reads no values."""
    states, axes = call.arrays["states"], call.token_axes
    if states.dtype != jnp.float32 and call.op != "causal_conv":
        return (
            f"The TPU kernels of {call.op} keep states in float32, not {states.dtype}: choose that, or leave it to XLA."
        )
    for name, x in call.arrays.items():
        if x is not None and x.dtype not in (jnp.bfloat16, jnp.float32):
            return f"The TPU kernels of {call.op} read bfloat16 or float32, but {name} is {x.dtype}: cast it."
    if call.op == "causal_conv":
        return _refuse_windows(states, axes)
    rows, lanes = states.shape[2:]
    if lanes % LANES or rows % sublanes(states.dtype):
        return (
            f"States of {rows} x {lanes} fill no whole register tiles of {sublanes(states.dtype)} x {LANES}, and a TPU "
            f"would copy the whole pool: leave it to XLA, or choose widths in these multiples."
        )
    if len(axes) == 2 and axes[1] == 1:
        return None
    if call.batch.every is not None and call.batch.every % CHUNK:
        return (
            f"The TPU kernels take snapshots at the ends of chunks of {CHUNK} tokens, not after every "
            f"{call.batch.every}: choose a multiple, or leave it to XLA."
        )
    keys, values = (call.arrays[x] for x in (("k", "v") if call.op == "gated_delta_rule" else ("B", "x")))
    by_channel = call.op == "gated_delta_rule" and call.arrays["g"].ndim == values.ndim
    if by_channel and keys.shape[-1] != LANES:  # a row of registers of tokens eight apart is one strided load
        return (
            f"With gates by channel the TPU kernel of many tokens takes {LANES} keys a head, not {keys.shape[-1]}: "
            f"choose that width, or leave it to XLA."
        )
    need = state_prefill_bytes(keys.shape[-2:], values.shape[-2:], states.shape[1:], _is_wide(values), by_channel)
    if need > VMEM_BYTES:
        return (
            f"{states.shape[1]} states of a row take {need / 2**20:.0f} MiB of vector memory: a kernel may have "
            f"{VMEM_BYTES / 2**20:.0f}: divide heads among devices, or leave it to XLA."
        )
    return None


def _refuse_windows(states: Any, axes: tuple[int, ...]) -> str | None:
    """Returns why no kernel can run a convolution over these last inputs, and the way out."""
    if len(axes) == 1 or axes[1] > 1:
        return "There is no TPU kernel of causal_conv for more than a token of each row; XLA runs it."
    *_, taps, lanes = states.shape
    if states.ndim == 3 or lanes != LANES or states.shape[1] % SUBLANES:
        return (
            f"States of {list(states.shape[1:])} are no whole register tiles of {SUBLANES} x {LANES} channels for each "
            f"input: keep [{SUBLANES} n, width - 1, {LANES}], or leave it to XLA."
        )
    if not has_channel_tiles(taps):
        return (
            f"XLA makes register tiles of {taps} inputs of {LANES} channels, which a TPU would turn into tiles of "
            f"channels by copying the whole pool: leave it to XLA."
        )
    if taps * vector_bytes((states.shape[1], LANES), states.dtype) > WINDOW_BYTES:
        return (
            f"{taps} inputs of {states.shape[1] * LANES} channels take more than the {WINDOW_BYTES / 2**20:.0f} MiB of "
            f"vector memory that a row may have: divide channels among devices, or leave it to XLA."
        )
    return None


def causal_conv(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    activation: str | None,
    states: jax.Array,
    batch: StateBatch,
    *,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Computes [`pallas_kernels.causal_conv`][]."""
    rows, groups, lanes = x.shape[0], states.shape[1], states.shape[3]
    fixed = tuple(array.reshape(-1, groups, lanes) for array in (weight.T, bias) if array is not None)
    tokens = StateTokens((x.reshape(rows, 1, groups, lanes),), fixed)
    update, out = functools.partial(update_conv, activation=activation), (groups, lanes)
    # XLA lays a slot out as whole tiles of channels, one for each tap: to have taps first is to say what there is.
    windows = jnp.swapaxes(states, 1, 2)
    y, windows = decode_states(update, tokens, windows, batch, out, x.dtype, depth=WINDOWS, interpret=interpret)
    return y.reshape(x.shape), jnp.swapaxes(windows, 1, 2)


def gated_delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    scale: float | jax.Array,
    states: jax.Array,
    batch: StateBatch,
    *,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Computes [`pallas_kernels.gated_delta_rule`][]."""
    if v.ndim == 3 or v.shape[1] > 1:

        def decode(tokens, states, batch):
            return gated_delta_rule(**tokens, scale=scale, states=states, batch=batch, interpret=interpret)

        def prefill(tokens, states, batch):
            q, k, v, g, beta = tokens.values()
            g = g.astype(jnp.float32)
            keys, numbers = ((q, k, g), [beta]) if g.ndim == v.ndim else ((q, k), [jnp.maximum(g, LEAST_GATE), beta])
            return _prefill(keys, v, numbers, scale, states, batch, v.dtype, _is_wide(v), interpret)

        return _share(decode, prefill, dict(q=q, k=k, v=v, g=g, beta=beta), v, states, batch)
    groups = states.shape[1] // heads_of_item(states)
    q = q.astype(jnp.float32) * scale
    g = jnp.maximum(g.astype(jnp.float32), LEAST_GATE)
    by_channel = g.ndim == v.ndim
    rows = tuple(_group(x, groups) for x in ((q, k, v, g) if by_channel else (q, k, v)))
    numbers = _stack([beta] if by_channel else [g, beta], groups)
    masks = [make_masks(x.shape[2]) for x in (rows[1], *rows[3:])]
    out, tokens = rows[2].shape[2:], StateTokens((*rows, numbers), tuple(masks))
    y, states = decode_states(update_delta, tokens, states, batch, out, v.dtype, interpret=interpret)
    return y.reshape(v.shape), states


def state_space(
    x: jax.Array,
    dt: jax.Array,
    A: jax.Array,
    B: jax.Array,
    C: jax.Array,
    D: jax.Array | None,
    states: jax.Array,
    batch: StateBatch,
    *,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Computes [`pallas_kernels.state_space`][]."""
    if x.ndim == 3 or x.shape[1] > 1:

        def decode(tokens, states, batch):
            return state_space(**tokens, A=A, D=D, states=states, batch=batch, interpret=interpret)

        def prefill(tokens, states, batch):
            x, dt, B, C = tokens.values()
            dt = dt.astype(jnp.float32)
            values = x.astype(jnp.float32) * dt[..., None]
            y, states = _prefill(
                (C, B), values, [_gates(dt, A)], None, states, batch, jnp.float32, _is_wide(x), interpret
            )
            return _skip(y, x, D).astype(x.dtype), states

        return _share(decode, prefill, dict(x=x, dt=dt, B=B, C=C), x, states, batch)
    dt = dt.astype(jnp.float32)
    groups = states.shape[1] // heads_of_item(states)
    numbers = _stack([_gates(dt, A), dt], groups)
    tokens = StateTokens((*(_group(array, groups) for array in (x, B, C)), numbers))
    shared = tokens.arrays[1].shape[2]
    out = shared, states.shape[1] // groups // shared * x.shape[-1]
    y, states = decode_states(update_space, tokens, states, batch, out, jnp.float32, interpret=interpret)
    return hide_padding(_skip(y.reshape(x.shape), x, D), x, batch), states


def _gates(dt: jax.Array, A: jax.Array) -> jax.Array:
    """Returns logarithms of a state space's gates `[.., H]`."""
    return jnp.maximum(dt * jnp.expand_dims(A.astype(jnp.float32), tuple(range(dt.ndim - 1))), LEAST_GATE)


def _skip(y: jax.Array, x: jax.Array, D: jax.Array | None) -> jax.Array:
    """Returns y and what goes by the states."""
    if D is None:
        return y
    D = D.astype(jnp.float32)
    return y + x.astype(jnp.float32) * jnp.expand_dims(D[:, None] if D.ndim == 1 else D, tuple(range(x.ndim - 2)))


def _is_wide(values: Any) -> bool:
    """Returns whether values have more digits than a product of 16 bits keeps."""
    return values.dtype == jnp.float32


def _share(
    decode: Callable[..., Any],
    prefill: Callable[..., Any],
    tokens: dict[str, jax.Array],
    values: jax.Array,
    states: jax.Array,
    batch: StateBatch,
) -> tuple[jax.Array, jax.Array]:
    """Returns outputs like `values`, 0 for padding, and the pool, of a step of which rows of one token are decoded, and
    others prefilled.

    Args:
      decode, prefill: `(tokens, states, batch) -> (y, states)`, of tokens `[S, 1, ...]`, and of others; there
        padding may be anything.
      tokens: arrays, with the token axes of `values` first.
    """
    if batch.slots.shape[0] == 1:
        y, states = prefill(tokens, states, batch)
        return hide_padding(y, values, batch), states
    axes = values.shape[:-2]
    flat = batch.flatten(axes)
    assert flat.query_starts is not None
    few, many, is_many = share_rows(flat, 2, states.shape[0])
    starts = jnp.clip(flat.query_starts, 0, math.prod(axes) - 1)
    first = {name: x.reshape(-1, *x.shape[len(axes) :])[starts][:, None] for name, x in tokens.items()}
    of_few, states = decode(first, states, few)
    y, states = prefill(tokens, states, many)
    row = locate(axes, batch.kv_lens, batch.query_lens, batch.query_starts).row
    return hide_padding(merge_rows(of_few[row, 0], y, is_many, row), values, batch), states


def _prefill(
    keys: tuple[jax.Array, ...],
    values: jax.Array,
    numbers: list[jax.Array],
    scale: float | jax.Array | None,
    states: jax.Array,
    batch: StateBatch,
    dtype: Any,
    exact: bool,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """Returns outputs like `values`, with anything for padding, and the pool, of a step of any tokens; see
    `prefill_states`."""
    axes = values.shape[:-2]
    chunks = list_chunks(batch.flatten(axes), math.prod(axes), states.shape[0])
    keys, (v, *numbers) = (
        [x.reshape(math.prod(axes), *x.shape[len(axes) :]) for x in arrays] for arrays in (keys, (values, *numbers))
    )
    has_delta = len(keys) + len(numbers) > 3
    y, states = prefill_states(
        has_delta, tuple(keys), v, numbers, scale, states, chunks, dtype, exact=exact, interpret=interpret
    )
    return y.reshape(values.shape), states


def _group(x: jax.Array, groups: int) -> jax.Array:
    """Returns `[S, groups, heads of a group, D]` of `[S, 1, heads, D]`, where few heads are shared by all groups."""
    rows, _, heads, width = x.shape
    if heads % groups:
        x, heads = jnp.repeat(x, groups // heads, axis=2), groups
    return x.reshape(rows, groups, heads // groups, width)


def _stack(numbers: list[jax.Array], groups: int) -> jax.Array:
    """Returns f32 `[S, groups, n, heads of a group]` of n arrays `[S, 1, heads]`."""
    stacked = jnp.stack([x[:, 0].astype(jnp.float32).reshape(x.shape[0], groups, -1) for x in numbers], axis=2)
    return stacked
