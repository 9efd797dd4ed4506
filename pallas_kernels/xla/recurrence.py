"""Linear recurrences over states: chunks of tokens as matrix products, single tokens in one pass.

A row's state is a matrix of each head, `[K, V]`. A token multiplies it by its gate (a number a head, or one for each
key channel), then adds `k u^T`, where u is the value, or with the delta rule what the state lacks of the value; its
output is `q` times the state. Within a chunk that is a triangular system and a few products (the parallel forms of
https://arxiv.org/abs/2412.06464 and https://arxiv.org/abs/2405.21060); a scan carries states from chunk to chunk.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.common.platforms import is_for_gpu
from pallas_kernels.common.state_batch import StateBatch, expand, read_slots

# Tokens of a chunk. In longer ones products among tokens cost more than is saved; on a GPU half the launches are.
CHUNK, GPU_CHUNK = 32, 64
CHUNK_BY_CHANNEL, GPU_CHUNK_BY_CHANNEL = 16, 32  # products of gates are [chunk, chunk, K] there
AT_ONCE = 1 << 16  # bytes of states that a CPU works on at once in decode
LEAST_GATE = -100.0  # its exponential is 0 in float32

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
    token, chunk = (functools.partial(f, transposed=transposed) for f in (run_token, run_chunk))
    if len(token_axes) == 2 and token_axes[1] == 1:
        y, states = _decode(inputs, states, batch, token)
    else:
        sizes = (CHUNK_BY_CHANNEL, GPU_CHUNK_BY_CHANNEL) if inputs.has_channel_gates else (CHUNK, GPU_CHUNK)
        size = min(sizes[is_for_gpu()], 1 << (token_axes[-1] - 1).bit_length())
        longest = token_axes[1] if len(token_axes) == 2 and batch.snapshot_slots is None else None
        y, states = _prefill(inputs, states, batch, longest, math.gcd(size, batch.every or size), token, chunk)
    return y.reshape(*token_axes, *y.shape[1:]), states


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


Step = Callable[..., tuple[jax.Array, jax.Array]]


def _decode(inputs: TokenInputs, states: jax.Array, batch: StateBatch, token: Step) -> tuple[jax.Array, jax.Array]:
    """Runs one token of each row: on a CPU a few heads of a row after another, which stay in a core's own cache."""
    valid, num_slots = batch.query_lens > 0, states.shape[0]
    targets = [batch.targets(num_slots)]
    if batch.snapshot_slots is not None:
        assert batch.every is not None
        taken = valid & (batch.kv_lens % batch.every == 0)
        targets.append(batch.snapshot_targets(jnp.zeros_like(batch.slots), taken, num_slots))
    terms = make_terms(_mask(inputs, valid))

    def update_all_heads(terms: TokenTerms, states: jax.Array, batch: StateBatch, targets: list[jax.Array]) -> Any:
        y, state = token(terms, read_slots(states, batch))
        for slots in targets:
            states = states.at[slots].set(state.astype(states.dtype), mode="drop")
        return y, states

    def update_some_heads(terms: TokenTerms, states: jax.Array, batch: StateBatch, targets: list[jax.Array]) -> Any:
        rows, heads, count = batch.slots.shape[0], states.shape[1], _count_heads(states)

        def body(states: jax.Array, part: Any) -> tuple[jax.Array, jax.Array]:
            terms, (slot, begins, targets), head = part
            at = _Place(slot, head, count)
            before = _read(states, at, begins)
            y, state = token(jax.tree.map(lambda x: x[None], terms), before[None], by_vectors=True)
            return _put(states, state[0], at, targets, before), y[0]

        # A row without tokens does not begin: it writes what it reads.
        own = (jnp.clip(batch.slots, 0, num_slots - 1), batch.begins & (batch.query_lens > 0), targets)
        parts = (
            jax.tree.map(lambda x: x.reshape(-1, count, *x.shape[2:]), terms),
            jax.tree.map(lambda x: jnp.repeat(x, heads // count), own),
            jnp.tile(jnp.arange(0, heads, count, dtype=jnp.int32), rows),
        )
        states, y = jax.lax.scan(body, states, parts)
        return y.reshape(rows, heads, -1), states

    arrays = batch._replace(every=None)
    y, states = jax.lax.platform_dependent(
        terms, states, arrays, targets, cpu=update_some_heads, default=update_all_heads
    )
    return jnp.where(expand(valid, y.ndim), y, 0.0), states


class _Chunks(NamedTuple):
    """Chunks of rows in lanes `[n, L]`: a lane's chunks run one after another, all lanes at once."""

    row: jax.Array
    begin: jax.Array  # the first token's place in the flattened tokens
    tokens: jax.Array  # how many; 0: there is no such chunk
    is_first: jax.Array
    is_last: jax.Array
    end: jax.Array  # the position after the last token


def _plan_chunks(batch: StateBatch, num_tokens: int, size: int, longest: int | None) -> _Chunks:
    """Cuts rows at multiples of `size` of their positions, so that snapshots are at the ends of chunks.

    Each row has a lane if the most tokens of a row are known; else all are in one, one row after another.
    """
    rows = batch.query_lens.shape[0]
    first, last = batch.starts // size, (batch.kv_lens - 1) // size
    counts = jnp.where(batch.query_lens > 0, last - first + 1, 0)
    if longest is not None:
        number = jnp.arange((longest + size - 2) // size + 1, dtype=jnp.int32)[:, None]
        row = jnp.broadcast_to(jnp.arange(rows, dtype=jnp.int32), (number.shape[0], rows))
    else:
        most = min(num_tokens, num_tokens // size + 2 * rows)
        chunk, ends = jnp.arange(most, dtype=jnp.int32)[:, None], jnp.cumsum(counts, dtype=jnp.int32)
        row = jnp.searchsorted(ends, chunk, side="right", method="compare_all").astype(jnp.int32)
        row = jnp.minimum(row, rows - 1)
        number = chunk - (ends - counts)[row]
    there = (number >= 0) & (number < counts[row])
    begin = jnp.maximum((first[row] + number) * size, batch.starts[row])
    end = jnp.minimum((first[row] + number + 1) * size, batch.kv_lens[row])
    assert batch.query_starts is not None
    return _Chunks(
        row=row,
        begin=batch.query_starts[row] + begin - batch.starts[row],
        tokens=jnp.where(there, end - begin, 0),
        is_first=there & (number == 0),
        is_last=there & (number == counts[row] - 1),
        end=end,
    )


def _prefill(
    inputs: TokenInputs, states: jax.Array, batch: StateBatch, longest: int | None, size: int, token: Step, chunk: Step
) -> tuple[jax.Array, jax.Array]:
    """Runs chunks of tokens: all rows at once if their most tokens are known, else one after another."""
    num_tokens, num_slots = inputs.v.shape[0], states.shape[0]
    place = jnp.arange(size, dtype=jnp.int32)

    def tokens_of(c: _Chunks, width: int) -> TokenInputs:
        index = jnp.minimum(c.begin[:, None] + place[None, :width], num_tokens - 1)  # [L, width]
        return _mask(jax.tree.map(lambda x: x[index], inputs), place[None, :width] < c.tokens[:, None])

    def run_whole(c: _Chunks, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        return chunk(tokens_of(c, size), state)

    def run_one(c: _Chunks, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        y, state = token(make_terms(jax.tree.map(lambda x: x[:, 0], tokens_of(c, 1))), state)
        return jnp.pad(y[:, None], ((0, 0), (0, size - 1), (0, 0), (0, 0))), state

    def skip(c: _Chunks, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.zeros((c.tokens.shape[0], size, *inputs.v.shape[1:]), jnp.float32), state

    def run(c: _Chunks, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.lax.switch(jnp.minimum(c.tokens.max(), 2), (skip, run_one, run_whole), c, state)

    def run_rows(state: jax.Array, c: _Chunks) -> Any:
        y, state = run(c, state)
        return state, y

    def run_row(carry: tuple[jax.Array, jax.Array], c: _Chunks) -> Any:
        state, states = carry
        row = c.row[0]
        slot = _Place(jnp.clip(batch.slots[row], 0, num_slots - 1), jnp.int32(0), states.shape[1])
        state = jnp.where(c.is_first[0], _read(states, slot, batch.begins[row]), state)
        y, after = run(c, state[None])
        targets = [jnp.where(c.is_last[0], batch.targets(num_slots)[row], num_slots)]
        if batch.snapshot_slots is not None:
            assert batch.every is not None
            number = c.end // batch.every - batch.starts[row] // batch.every - 1
            own = batch._replace(snapshot_slots=batch.snapshot_slots[c.row])
            taken = (c.tokens > 0) & (c.end % batch.every == 0)
            targets.append(own.snapshot_targets(number, taken, num_slots)[0])
        return (after[0], _put(states, after[0], slot, targets)), y

    chunks = _plan_chunks(batch, num_tokens, size, longest)
    if longest is None:
        state = jnp.zeros(states.shape[1:], jnp.float32)
        (_, states), y = jax.lax.scan(jax.checkpoint(run_row, prevent_cse=False), (state, states), chunks)
    else:
        state, y = jax.lax.scan(jax.checkpoint(run_rows, prevent_cse=False), read_slots(states, batch), chunks)
        states = states.at[batch.targets(num_slots)].set(state.astype(states.dtype), mode="drop")
    # y: [n, L, size, H, V]. Places are scattered, not outputs: these are written once.
    y = y.reshape(-1, *y.shape[3:])
    at = jnp.where(
        place[None, None] < chunks.tokens[..., None], chunks.begin[..., None] + place[None, None], num_tokens
    )
    found = (
        jnp.full(num_tokens, -1, jnp.int32).at[at.reshape(-1)].set(jnp.arange(y.shape[0], dtype=jnp.int32), mode="drop")
    )
    return jnp.where(expand(found >= 0, y.ndim), y.at[found].get(mode="clip"), 0.0), states


class _Place(NamedTuple):
    """Some heads of a slot in a pool."""

    slot: jax.Array
    head: jax.Array  # the first
    heads: int

    def read(self, states: jax.Array) -> jax.Array:
        """Returns the heads' states, as they are stored."""
        start = (self.slot, self.head, *[jnp.int32(0)] * (states.ndim - 2))
        return jax.lax.dynamic_slice(states, start, (1, self.heads, *states.shape[2:]))[0]

    def write(self, states: jax.Array, new: jax.Array) -> jax.Array:
        """Returns the pool with other states of the heads."""
        start = (self.slot, self.head, *[jnp.int32(0)] * (states.ndim - 2))
        return jax.lax.dynamic_update_slice(states, new[None], start)


def _count_heads(states: jax.Array) -> int:
    """Returns how many heads of a row are computed at once: operations on more than a few pages of memory are divided
    over cores, which takes longer than the work."""
    heads, size = states.shape[1], 4 * math.prod(states.shape[2:])
    if not jax.typeof(states).sharding.mesh.empty:  # a part of heads that lie on several devices would be gathered
        return heads
    return max(count for count in range(1, heads + 1) if not heads % count and count * size <= max(size, AT_ONCE))


def _read(states: jax.Array, place: _Place, begins: jax.Array) -> jax.Array:
    # The barrier keeps XLA from reading the pool once more after it was written, which would take a copy of the pool.
    return jax.lax.optimization_barrier(jnp.where(begins, 0.0, place.read(states).astype(jnp.float32)))


def _put(
    states: jax.Array, state: jax.Array, place: _Place, targets: list[jax.Array], held: jax.Array | None = None
) -> jax.Array:
    """Writes states to the slots of `targets` that there are. Where there is none, writes what the row's slot holds,
    `held` if that was read just now: a scatter, which can skip, copies the pool on a CPU, and so does a read between
    two writes."""
    new, at = state.astype(states.dtype), place.slot
    value = place.read(states) if held is None else held.astype(states.dtype)
    if len(targets) > 1:  # else XLA may compute both once more for the second write
        new, value = jax.lax.optimization_barrier((new, value))
    for target in targets:
        there = target < states.shape[0]
        at, value = jnp.where(there, target, at), jnp.where(there, new, value)
        states = place._replace(slot=at).write(states, value)
    return states


def _mask(inputs: TokenInputs, valid: jax.Array) -> TokenInputs:
    return jax.tree.map(lambda x: jnp.where(expand(valid, x.ndim), x, 0.0), inputs)
