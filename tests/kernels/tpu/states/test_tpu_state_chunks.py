"""States by the TPU kernels, interpreted, chunks of tokens: against the reference, with NaN in all that must not be
read."""

import interpreter
import jax.numpy as jnp
import numpy as np
import pytest
from interpreter import PLAIN, RACES
from nightly import NIGHTLY
from state_kernels import Mixing
from tpu_state_cases import (
    CHAIN,
    CHANNEL_CHUNKS,
    CHUNKS,
    EMPTIED,
    IN_CHUNKS,
    LONG,
    MIXED,
    ONE_ROW,
    OWN_KEYS,
    SHORT,
    check_strong_gates,
    run,
)

from pallas_kernels.common.state_batch import StateBatch
from pallas_kernels.tpu.recurrence import chunk_tokens, state_prefill

pytestmark = pytest.mark.timeout(240, method="thread")
EVERY_COUNT = MIXED._replace(
    before=(3, 5, 49, 0, 40, 1, 0, 64, 30), new=(0, 1, 15, 16, 17, 63, 64, 65, 200), slots=tuple(range(9)),
    to_slots=tuple(range(9)), snapshots=(-1,) * 7 + (9, -1),
)  # fmt: skip


@pytest.mark.parametrize("mode", interpreter.MODES)
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", IN_CHUNKS)
def test_chunks_of_tokens(name, packed, mode):
    by_day = ("delta", True, "races"), ("channels", True, "races"), ("space", False, "plain")
    if not NIGHTLY and (name, packed, mode) not in by_day:
        pytest.skip("by day each mixer runs in one layout and mode")
    run(IN_CHUNKS[name]._replace(packed=packed), interpreter.MODES[mode])


@pytest.mark.skipif(not NIGHTLY, reason="many chunks")
def test_rows_of_all_lengths_with_gates_by_channel():
    """About the ends of chunks, and of the blocks within them; the last row shares what the one before read."""
    new = 0, 1, 15, 16, 17, 127, 128, 129, 300
    case = Mixing(
        by_channel=True, before=(5, 0, 1, 64, 63, 2, 0, 100, 100), new=new, slots=(0, 1, 2, 3, 4, 5, 6, 7, 7),
        to_slots=(0, 1, 2, 3, 4, 5, 6, 8, 7), snapshots=(-1,) * 7 + (9, 10), packed=True, every=128, heads=2,
    )  # fmt: skip
    run(case, RACES, tolerance=2e-5)


@pytest.mark.parametrize(
    "case",
    [
        MIXED,
        *[case._replace(packed=packed, op=op) for case in (MIXED, CHAIN, EVERY_COUNT) for packed in (True, False)
          for op in ("gated_delta_rule", "state_space")] * NIGHTLY,
        *[MIXED._replace(by_channel=True)] * NIGHTLY,
    ],
)  # fmt: skip
def test_rows_of_one_token_beside_others(case):
    run(case, RACES, tolerance=2e-5)


@pytest.mark.parametrize("heads", [4, *[3, 2] * NIGHTLY])
def test_chunks_of_values_of_16_bits(heads):
    """Two heads are one word where they are even."""
    case = SHORT if NIGHTLY else SHORT._replace(**ONE_ROW)
    run(case._replace(heads=heads), PLAIN)


@pytest.mark.parametrize(
    ("case", "most"),
    [
        (LONG, 16),
        (OWN_KEYS._replace(**ONE_ROW), 2),  # heads of a grid step, at most: an item follows another of the same chunk
        *[
            (OWN_KEYS, 2),
            (LONG._replace(heads=4), 2),
            (OWN_KEYS._replace(by_channel=True), 2),
            (CHANNEL_CHUNKS, 1),
            (SHORT._replace(by_channel=True), 16),
            (CHANNEL_CHUNKS._replace(new=(0,) * 4, to_slots=(-1,) * 4), 16),
            (CHUNKS, 1),  # two items read a key
            (EMPTIED, 2),
            (IN_CHUNKS["space"], 2),
            (CHUNKS._replace(heads=10, **ONE_ROW), 16),
            (CHUNKS._replace(new=(0,) * 4, to_slots=(-1,) * 4), 16),
        ]
        * NIGHTLY,
    ],
)
def test_heads_of_chunks(case, most, monkeypatch):
    """Few heads a grid step, and more than a register has rows; no token at all."""
    monkeypatch.setattr(state_prefill, "HEADS", most)
    if case.before == ONE_ROW["before"]:  # of heads as they lie, not divided by XLA
        monkeypatch.setattr(chunk_tokens, "SUBLANES", 2)
    run(case, RACES)


def test_sums_of_strong_gates():
    check_strong_gates()


def test_strong_gates_by_channel():
    """A channel forgets all between two tokens, or nothing, whatever it does between others."""
    check_strong_gates(by_channel=True)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_steady_steps_meet_only_the_middle_of_rows(groups):
    """Each chunk that a step has to do with, from the one whose outputs it awaits to the one that follows, is whole, is
    neither a row's first nor its last, and has no snapshot behind it; and of a long row most steps are so."""
    rng, size, steady = np.random.default_rng(0), state_prefill.CHUNK, 0
    for _ in range(50):
        before, new = rng.integers(0, 200, 4), rng.choice([0, 1, 63, 64, 65, 300, 1500], 4)
        rows = np.arange(4, dtype=np.int32)
        snapshots = rng.choice([-1, -1, -1, 9], (4, 24)).astype(np.int32)
        starts = np.cumsum(new) - new
        batch = StateBatch(
            *(jnp.asarray(x, jnp.int32) for x in (rows, before + new, new, starts, rows, snapshots)), 128
        )
        flags = np.asarray(state_prefill.find_steady_steps(state_prefill.list_chunks(batch, 6000, 10), groups))
        middle = []
        for row in range(4):
            first, last = before[row] // size, (before[row] + new[row] - 1) // size
            for number in range(first, last + 1) if new[row] else ():
                end, taken = (number + 1) * size, (number + 1) * size // 128 - before[row] // 128 - 1
                is_taken = end % 128 == 0 and end <= before[row] + new[row] and snapshots[row, taken] >= 0
                middle.append(first < number < last and not is_taken)
        behind = -(-(state_prefill.STAGES + 1) // groups)
        for step in range(len(middle) + -(-(state_prefill.STAGES - 1) // groups)):
            wanted = all(0 <= at < len(middle) and middle[at] for at in range(step - behind, step + 2))
            assert flags[step] == wanted, (before, new, step)
            steady += wanted
    assert steady > 20
