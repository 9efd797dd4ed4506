"""What thread blocks that update states are told of each row: its slots, its tokens, and whose turn is when."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.common.state_batch import StateBatch, find_meetings

CHUNK = 64  # tokens
# The columns of `plan_rows`.
SOURCE, TARGET, BEGIN, COUNT, BEGINS, POSITION, TURNS, NEXT = range(8)


def plan_rows(batch: StateBatch, num_slots: int, num_tokens: int) -> jax.Array:
    """Returns `i32[S, 8]`: the slot that a row reads and the one that it writes, -1 for none; its first token among the
    `num_tokens` flat ones and how many it has; whether it begins; the position of its first token; and the turns that
    its thread blocks take, and which row has the turn after its own.

    Rows run at once, but where one writes a slot that others read: these go one after another in the thread blocks of
    the first, and the others' do nothing, as those of rows without tokens.
    """
    assert batch.query_starts is not None
    begin = jnp.clip(batch.query_starts, 0, num_tokens)
    count = jnp.clip(batch.query_lens, 0, num_tokens - begin)
    batch = batch._replace(kv_lens=batch.starts + count, query_lens=count)
    written = batch.targets(num_slots)
    target = jnp.where(written < num_slots, written, -1)
    source = jnp.clip(batch.slots, 0, num_slots - 1)
    turns, following = (count > 0).astype(jnp.int32), jnp.zeros_like(count)
    if batch.may_meet:
        turns, following = plan_turns(batch.reads(num_slots), batch.writes(num_slots), turns)
    columns = (source, target, begin, count, batch.begins, batch.starts, turns, following)
    return jnp.stack([x.astype(jnp.int32) for x in columns], axis=1)


def plan_turns(read: jax.Array, writes: jax.Array, turns: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns how many turns each row's thread blocks take, `i32[S]`, and the row after it, `i32[S]`.

    Args:
      read: `i32[S]`, the slot that a row reads; -1: none.
      writes: `i32[S, n]`, the slots that it writes; -1: none.
      turns: `i32[S]`, 1 for rows that have any tokens.
    """
    count, largest = read.shape[0], jnp.iinfo(jnp.int32).max
    row = jnp.arange(count, dtype=jnp.int32)
    earlier = row[None, :] < row[:, None]
    meets = find_meetings(read, writes)  # [reader, writer]: of which slot they must agree; -1: of none
    slot = jnp.where(meets, read[:, None], -1)
    most = jnp.maximum(slot.max(axis=1), slot.max(axis=0))
    slot = jnp.where(meets, read[:, None], largest)
    least = jnp.minimum(slot.min(axis=1), slot.min(axis=0))
    # Rows that meet at one slot make one queue. Should one meet others at two, all make one.
    together = jnp.any((most >= 0) & (most != least))
    queue = jnp.where(most < 0, -1, jnp.where(together, 0, most))
    same = (queue[:, None] == queue[None, :]) & (queue >= 0)[:, None]
    is_first = ~jnp.any(same & earlier, axis=1)
    length = jnp.where(queue < 0, turns, jnp.where(is_first, jnp.sum(same, axis=1, dtype=jnp.int32), 0))
    behind = jnp.where(same & earlier.T, row[None, :], count - 1)
    return length, behind.min(axis=1)


def count_chunks(position: Any, count: Any) -> tuple[Any, Any]:
    """Returns how many places of a row's first chunk are not of this step, and how many chunks its tokens are in."""
    before = lax.rem(position, jnp.int32(CHUNK))
    return before, lax.div(before + count + (CHUNK - 1), jnp.int32(CHUNK))


def find_edge(number: Any, before: Any, count: Any) -> Any:
    """Returns how many of a row's tokens stand before a chunk."""
    return jnp.clip(number * CHUNK - before, 0, count)


def plan_chunks(rows: jax.Array, num_tokens: int) -> tuple[jax.Array, jax.Array]:
    """Returns the chunks of all rows, one row's after another's, `i32[C, 2]`: the first token of each among the
    `num_tokens` flat ones, and how many it has, 0 beyond the last chunk; and the number of each row's first, `i32[S]`.

    A row's first chunk and its last may have few tokens: so there are two more for each row.
    """
    begin, count, position = (rows[:, i] for i in (BEGIN, COUNT, POSITION))
    before, chunks = count_chunks(position, count)
    chunks = jnp.where(count > 0, chunks, 0)
    stop = jnp.cumsum(chunks, dtype=jnp.int32)
    number = jnp.arange(min(num_tokens, num_tokens // CHUNK + 2 * rows.shape[0]), dtype=jnp.int32)
    row = jnp.minimum(jnp.sum(stop[None, :] <= number[:, None], axis=1, dtype=jnp.int32), rows.shape[0] - 1)
    of_row = number - (stop - chunks)[row]
    first, last = (begin[row] + find_edge(of_row + i, before[row], count[row]) for i in (0, 1))
    return jnp.stack([first, last - first], axis=1), stop - chunks


def write_snapshot(
    snapshots_ref: Any, row: Any, position: Any, after: Any, every: int, num_slots: int, write: Callable[[Any], Any]
) -> None:
    """Calls `write(slot)` in a kernel if the state of a row behind position `after` is to stay in a slot.

    Args:
      snapshots_ref: `i32[S, n]`, the slots of a row's snapshots of this step; -1: none.
      position: that of the row's first token in this step.
    """
    number = lax.div(after, jnp.int32(every)) - lax.div(position, jnp.int32(every)) - 1
    taken = (lax.rem(after, jnp.int32(every)) == 0) & (number < snapshots_ref.shape[1])

    @pl.when(taken)
    def write_if_named():
        slot = snapshots_ref[row, number]
        pl.when((slot >= 0) & (slot < num_slots))(lambda: write(slot))
