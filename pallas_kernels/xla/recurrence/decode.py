"""Steps of one token of each row."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.common.state_batch import StateBatch, expand, read_slots
from pallas_kernels.xla.recurrence.formulas import TokenInputs, TokenTerms, make_terms, mask_tokens, run_token
from pallas_kernels.xla.recurrence.slots import HeadPlace, put_state, read_state

AT_ONCE = 1 << 16  # bytes of states that a CPU works on at once


def run_decode(
    inputs: TokenInputs, states: jax.Array, batch: StateBatch, *, transposed: bool
) -> tuple[jax.Array, jax.Array]:
    """Runs one token of each row: on a CPU a few heads of a row after another, which stay in a core's own cache."""
    valid, num_slots = batch.query_lens > 0, states.shape[0]
    targets = [batch.targets(num_slots)]
    if batch.snapshot_slots is not None:
        assert batch.every is not None
        taken = valid & (batch.kv_lens % batch.every == 0)
        targets.append(batch.snapshot_targets(jnp.zeros_like(batch.slots), taken, num_slots))
    terms = make_terms(mask_tokens(inputs, valid))

    def update_all_heads(terms: TokenTerms, states: jax.Array, batch: StateBatch, targets: list[jax.Array]) -> Any:
        y, state = run_token(terms, read_slots(states, batch), transposed=transposed)
        for slots in targets:
            states = states.at[slots].set(state.astype(states.dtype), mode="drop")
        return y, states

    def update_some_heads(terms: TokenTerms, states: jax.Array, batch: StateBatch, targets: list[jax.Array]) -> Any:
        rows, heads, count = batch.slots.shape[0], states.shape[1], _count_heads(states)

        def body(states: jax.Array, part: Any) -> tuple[jax.Array, jax.Array]:
            terms, (slot, begins, targets), head = part
            at = HeadPlace(slot, head, count)
            before = read_state(states, at, begins)
            terms = jax.tree.map(lambda x: x[None], terms)
            y, state = run_token(terms, before[None], transposed=transposed, by_vectors=True)
            return put_state(states, state[0], at, targets, before), y[0]

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


def _count_heads(states: jax.Array) -> int:
    """Returns how many heads of a row are computed at once: operations on more than a few pages of memory are divided
    over cores, which takes longer than the work."""
    heads, size = states.shape[1], 4 * math.prod(states.shape[2:])
    if not jax.typeof(states).sharding.mesh.empty:  # a part of heads that lie on several devices would be gathered
        return heads
    return max(count for count in range(1, heads + 1) if not heads % count and count * size <= max(size, AT_ONCE))
