"""Steps of several tokens of a row, cut into chunks."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.common.state_batch import StateBatch, expand, read_slots
from pallas_kernels.xla.recurrence.formulas import TokenInputs, make_terms, mask_tokens, run_chunk, run_token
from pallas_kernels.xla.recurrence.slots import HeadPlace, put_state, read_state


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


def run_prefill(
    inputs: TokenInputs, states: jax.Array, batch: StateBatch, longest: int | None, size: int, *, transposed: bool
) -> tuple[jax.Array, jax.Array]:
    """Runs chunks of `size` tokens: all rows at once if their most tokens, `longest`, are known, else one after
    another."""
    num_tokens, num_slots = inputs.v.shape[0], states.shape[0]
    place = jnp.arange(size, dtype=jnp.int32)

    def tokens_of(c: _Chunks, width: int) -> TokenInputs:
        index = jnp.minimum(c.begin[:, None] + place[None, :width], num_tokens - 1)  # [L, width]
        return mask_tokens(jax.tree.map(lambda x: x[index], inputs), place[None, :width] < c.tokens[:, None])

    def run_whole(c: _Chunks, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        return run_chunk(tokens_of(c, size), state, transposed=transposed)

    def run_one(c: _Chunks, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        terms = make_terms(jax.tree.map(lambda x: x[:, 0], tokens_of(c, 1)))
        y, state = run_token(terms, state, transposed=transposed)
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
        slot = HeadPlace(jnp.clip(batch.slots[row], 0, num_slots - 1), jnp.int32(0), states.shape[1])
        state = jnp.where(c.is_first[0], read_state(states, slot, batch.begins[row]), state)
        y, after = run(c, state[None])
        targets = [jnp.where(c.is_last[0], batch.targets(num_slots)[row], num_slots)]
        if batch.snapshot_slots is not None:
            assert batch.every is not None
            number = c.end // batch.every - batch.starts[row] // batch.every - 1
            own = batch._replace(snapshot_slots=batch.snapshot_slots[c.row])
            taken = (c.tokens > 0) & (c.end % batch.every == 0)
            targets.append(own.snapshot_targets(number, taken, num_slots)[0])
        return (after[0], put_state(states, after[0], slot, targets)), y

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
