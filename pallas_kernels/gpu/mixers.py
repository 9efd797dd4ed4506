"""Layers that keep a state on a GPU: their arrays as the kernel of all recurrences takes them.

It takes a row's tokens one after another, whether one or thousands: see `recurrence.tokens`. Rows of many tokens are
taken, when it has run the others, by `recurrence.space_chunks` of state spaces, by `delta_chunks` of delta rules with a
gate a head, behind another kernel, `delta_pairs`, and by `channel_chunks` of those with a gate a channel, behind
`channel_pairs`. Convolutions are XLA's.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.ragged_layout import locate
from pallas_kernels.common.state_batch import MixerCall, StateBatch, hide_padding, merge_rows, share_rows
from pallas_kernels.gpu import chips
from pallas_kernels.gpu.recurrence.channel_chunks import run_channel_chunks
from pallas_kernels.gpu.recurrence.channel_pairs import KEYS as KEYS_OF_CHANNELS
from pallas_kernels.gpu.recurrence.chunk_steps import CHUNK, MOST_KEYS as MOST_CHUNKED_KEYS, PIECE, WIDTH
from pallas_kernels.gpu.recurrence.delta_chunks import run_delta_chunks
from pallas_kernels.gpu.recurrence.rows import plan_rows
from pallas_kernels.gpu.recurrence.space_chunks import run_space_chunks
from pallas_kernels.gpu.recurrence.tokens import ELEMENTS, Recurrence, update_states
from pallas_kernels.gpu.support import FALLBACK, find_chip_refusal
from pallas_kernels.gpu.tiles import InterpretParams, varies

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
MOST_KEYS = 256  # of a head: a thread's registers hold no more of a state
LEAST_CHUNKED = 16  # tokens of a row
CHUNK_BYTES = 200_704  # of shared memory, what the largest kernel of chunks takes
VALUES = 64  # of a delta rule's head in a thread block


def unsupported(call: MixerCall) -> str | None:
    """Returns why the kernel cannot run a call, and the way out; None if it can."""
    states = call.arrays["states"]
    for name, x in call.arrays.items():
        if x is not None and x.dtype not in DTYPES:
            return (
                f"The gpu kernel of {call.op} takes float32, bfloat16 and float16, but {name} is {x.dtype}; cast it, "
                f"or {FALLBACK}."
            )
    keys, values, (key_step, value_step) = _sizes(call.op, states)
    if keys % key_step or keys > MOST_KEYS or values % value_step:
        return (
            f"The gpu kernel of {call.op} takes keys in multiples of {key_step} up to {MOST_KEYS} and values in "
            f"multiples of {value_step}, but states have {keys} and {values}; {FALLBACK}."
        )
    if isinstance(states, jax.Array) and varies(states):
        return (
            f"The gpu kernel of {call.op} updates states where they lie, which JAX refuses where they may differ among "
            f"devices; give jax.shard_map check_vma=False, or {FALLBACK}."
        )
    return find_chip_refusal()


def _sizes(op: str, states: Any) -> tuple[int, int, tuple[int, int]]:
    """Returns keys and values of a head, and the steps that the kernel takes of each."""
    *_, first, last = states.shape
    return (first, last, (8, VALUES)) if op == "gated_delta_rule" else (last, first, (32, 16))


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
    interpret: InterpretParams = None,
) -> tuple[jax.Array, jax.Array]:
    """Computes [`pallas_kernels.gated_delta_rule`][]."""
    arrays = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    fixed = {"scale": jnp.asarray(scale, jnp.float32).reshape(1)}
    return _run(_delta_rule(q, v, g), arrays, fixed, v, states, batch, interpret)


def _delta_rule(q: jax.Array, v: jax.Array, g: jax.Array) -> Recurrence:
    shared, has_channel_gates = v.shape[-2] // q.shape[-2], g.ndim == v.ndim

    def read(arrays, token, head, part):
        k, v, g, beta = (arrays[name] for name in ("k", "v", "g", "beta"))
        gate = rule.load_keys(g.at[token, head]) if has_channel_gates else g[token, head]
        k = rule.load_keys(k.at[token, lax.div(head, jnp.int32(shared))])
        return k, rule.load_values(v.at[token, head, rule.span(part)]), gate, beta[token, head]

    def update(arrays, token, head, part, vectors, state):
        k, v, g, beta = (x.astype(jnp.float32) for x in vectors)
        q = rule.load_keys(arrays["q"].at[token, lax.div(head, jnp.int32(shared))]).astype(jnp.float32)
        gate = jnp.exp(g)
        keys, values = (functools.partial(f, shape=state.shape) for f in (rule.wide_keys, rule.wide_values))
        state = state * (keys(gate) if has_channel_gates else gate)
        lacks = (v - (state * keys(k)).sum(axis=0)) * beta
        state = state + keys(k) * values(lacks)
        return (state * keys(q)).sum(axis=0) * arrays["scale"][0], state

    rule = Recurrence("gated_delta_rule", 0, VALUES, read, update)
    return rule


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
    interpret: InterpretParams = None,
) -> tuple[jax.Array, jax.Array]:
    """Computes [`pallas_kernels.state_space`][]."""
    arrays = {"x": x, "dt": dt, "B": B, "C": C}
    fixed = {"A": A} if D is None else {"A": A, "D": D}
    return _run(_state_space(x, B, D), arrays, fixed, x, states, batch, interpret)


def _state_space(x: jax.Array, B: jax.Array, D: jax.Array | None) -> Recurrence:
    (heads, values), (groups, keys) = x.shape[-2:], B.shape[-2:]

    def keys_of(x, token, head):
        return space.load_keys(x.at[token, lax.div(head, jnp.int32(heads // groups))])

    def read(arrays, token, head, part):
        x = space.load_values(arrays["x"].at[token, head, space.span(part)])
        return keys_of(arrays["B"], token, head), x, arrays["dt"][token, head]

    def update(arrays, token, head, part, vectors, state):
        b, x, dt = (x.astype(jnp.float32) for x in vectors)
        c = keys_of(arrays["C"], token, head).astype(jnp.float32)
        gate = jnp.exp(dt * arrays["A"][head].astype(jnp.float32))
        state = state * gate + space.wide_values(x * dt, state.shape) * space.wide_keys(b, state.shape)
        y = (state * space.wide_keys(c, state.shape)).sum(axis=1)
        if D is None:
            return y, state
        skip = arrays["D"][head] if D.ndim == 1 else space.load_values(arrays["D"].at[head, space.span(part)])
        return y + x * skip.astype(jnp.float32), state

    space = Recurrence("state_space", 1, values_at_once(values, keys), read, update)
    return space


def values_at_once(values: int, keys: int) -> int:
    """Values of a state space that a thread block takes."""
    return next((n for n in (64, 32, 16) if not values % n and n * keys <= ELEMENTS), 16)


def can_chunk(tokens: dict[str, jax.Array], states: jax.Array, every: int | None, most_tokens: int) -> bool:
    """Tells whether a step may have chunks: rows of many tokens, whose inputs have 16 bits, on a chip with memory."""
    is_delta = "beta" in tokens
    if any(tokens[name].dtype != jnp.bfloat16 for name in (("q", "k", "v") if is_delta else ("x", "B", "C"))):
        return False
    keys, values, _ = _sizes("gated_delta_rule" if is_delta else "state_space", states)
    if is_delta and tokens["g"].ndim > 2 and keys != KEYS_OF_CHANNELS:
        return False
    if values % WIDTH or keys % PIECE or keys > MOST_CHUNKED_KEYS:
        return False
    if chips.find_chip().shared_memory < CHUNK_BYTES:
        return False
    return most_tokens >= LEAST_CHUNKED and (every is None or not every % CHUNK)


def _run(
    recurrence: Recurrence,
    tokens: dict[str, jax.Array],
    fixed: dict[str, jax.Array],
    values: jax.Array,
    states: jax.Array,
    batch: StateBatch,
    interpret: InterpretParams,
) -> Any:
    """Runs a recurrence on tokens padded or packed."""
    token_axes = values.shape[:-2]
    if not values.size or not batch.slots.size:
        return jnp.zeros_like(values), states
    every, flat_batch = batch.every, batch.flatten(token_axes)
    flat = {name: x.reshape(-1, *x.shape[len(token_axes) :]) for name, x in tokens.items()}
    out = jax.ShapeDtypeStruct((flat["v" if "v" in flat else "x"].shape), values.dtype)
    num_slots, most_tokens = states.shape[0], token_axes[-1]

    def run(kernel, states, batch, **options):
        rows = plan_rows(batch, num_slots, out.shape[0])
        return kernel(flat | fixed, out, states, rows, batch.snapshot_slots, every, interpret=interpret, **options)

    run_tokens = functools.partial(run, functools.partial(update_states, recurrence), most_tokens=most_tokens)
    if recurrence.name == "state_space":
        run_chunks = functools.partial(run, run_space_chunks)
    else:
        run_chunks = functools.partial(run, run_delta_chunks if flat["g"].ndim == 2 else run_channel_chunks)
    if not can_chunk(flat, states, every, most_tokens):
        y, states = run_tokens(states, flat_batch)
    elif batch.slots.shape[0] == 1:
        y, states = run_chunks(states, flat_batch)
    else:
        few, many, is_many = share_rows(flat_batch, LEAST_CHUNKED, num_slots)
        of_few, states = run_tokens(states, few)
        y, states = run_chunks(states, many)
        row = locate(token_axes, batch.kv_lens, batch.query_lens, batch.query_starts).row
        y = merge_rows(of_few, y, is_many, row.reshape(-1))
    return hide_padding(y.reshape(values.shape), values, batch), states
