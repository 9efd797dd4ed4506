"""Rows that two kernels share: each reads what it would have read if all had been served in order."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from planting import Plant, Sources, plant_in_copy

from pallas_kernels import common
from pallas_kernels.common import state_batch
from pallas_kernels.common.state_batch import StateBatch

ROWS, SLOTS, LEAST = 6, 24, 16
SOURCES = Sources(pathlib.Path(common.__file__).parent, common.__name__)


def batch_of(new, lengths=None, slots=None, **rest):
    lengths, slots = lengths or [n + 5 for n in new], slots or range(len(new))
    arrays = (slots, lengths, new, np.cumsum(new) - new)
    return StateBatch(*(jnp.asarray(list(x), jnp.int32) for x in arrays), **rest)


def draw_batch(seed):
    """A step of any rows, of which some write what others read, in any way that doors allow."""
    draw = np.random.default_rng(seed)
    new, snapshots = draw.choice((0, 1, 2, 15, 16, 40), ROWS), -np.ones((ROWS, 2), np.int32)
    slots, to, free, written = [], [], list(draw.permutation(SLOTS)), set()
    for row in range(ROWS):  # a row may read and write what earlier rows have read, and not what they have written
        known = [slot for slot in slots if slot not in written]
        slots.append(int(draw.choice(known)) if known and draw.random() < 0.4 else int(free.pop()))
        known = [slot for slot in slots if slot not in written]
        to.append(int(draw.choice(known[-3:])) if known and draw.random() < 0.6 else int(free.pop()))
        written.add(to[-1])
        known = [slot for slot in slots if slot not in written]
        if known and draw.random() < 0.2:
            snapshots[row, draw.integers(2)] = known[0]
            written.add(known[0])
    lengths = [int(n + draw.choice((0, 3, 3))) for n in new]
    arrays = {"to_slots": jnp.asarray(to, jnp.int32), "snapshot_slots": jnp.asarray(snapshots)}
    return batch_of(new, lengths, slots, every=64, **arrays)


def serve(*batches):
    """Returns what each row reads, where each writes its number in all of its slots, one after another."""
    pool, read = {}, {}
    for batch in batches:
        for row in np.flatnonzero(np.asarray(batch.query_lens)):
            if batch.kv_lens[row] > batch.query_lens[row]:
                read[row] = pool.get(int(batch.slots[row]), -1)
            for slot in (int(batch.to_slots[row]), *np.asarray(batch.snapshot_slots[row]).tolist()):
                if slot >= 0:
                    pool[slot] = row
    return read, pool


def check(share_rows, seeds=150):
    share = jax.jit(lambda batch: share_rows(batch._replace(every=64), LEAST, SLOTS)[:2])
    for seed in range(seeds):
        batch = jax.tree.map(np.asarray, draw_batch(seed)._replace(every=None))
        few, many = jax.tree.map(np.asarray, share(batch))
        assert (few.query_lens + many.query_lens == batch.query_lens).all()
        assert not (few.query_lens * many.query_lens).any() and few.query_lens.max() < LEAST
        assert serve(few, many) == serve(batch), seed


def test_rows_read_what_they_would_in_order():
    check(state_batch.share_rows)


def test_rows_go_by_their_tokens():
    few, many, is_many = state_batch.share_rows(batch_of([0, 1, 15, 16, 17]), LEAST, SLOTS)
    assert is_many.tolist() == [False, False, False, True, True]
    assert few.query_lens.tolist() == [0, 1, 15, 0, 0] and many.query_lens.tolist() == [0, 0, 0, 16, 17]


def test_forks_of_few_tokens_stay_there():
    """Of three that share a state the last goes on in place; a prompt beside them is in nobody's way."""
    to = jnp.array([7, 8, 2, 9])
    *_, is_many = state_batch.share_rows(batch_of([1, 1, 1, 40], slots=[2, 2, 2, 3], to_slots=to), LEAST, SLOTS)
    assert is_many.tolist() == [False, False, False, True]


MISTAKES = {
    "written before it is read": (Plant("share_rows", "batch.may_meet", "False"),),
    "a chain's first link alone": (Plant("share_rows", "meets.any(axis=0)", "(meets & is_many[:, None]).any(axis=0)"),),
    "who reads goes with many": (Plant("share_rows", "meets.any(axis=0)", "meets.any(axis=1)"),),
    "snapshots in nobody's way": (Plant("share_rows", "batch.writes(num_slots)", "batch.writes(num_slots)[:, :1]"),),
    "rows of the least in both": (Plant("share_rows", "(~is_many, is_many)", "(batch.query_lens <= least, is_many)"),),
    "readers and writers confused": (
        Plant("share_rows", "meets & is_many[:, None]", "meets & is_many[None, :]"),
        Plant("share_rows", "~is_many[None, :]", "~is_many[:, None]"),
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake(name):
    _, broken = plant_in_copy(SOURCES, *MISTAKES[name])
    with pytest.raises(AssertionError):
        check(broken.share_rows)
