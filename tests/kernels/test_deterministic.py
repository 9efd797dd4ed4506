"""`deterministic=True`: a row's bits are its own, whoever else is in the batch and wherever its blocks lie."""

import functools
import random

import jax
import numpy as np
import pytest
from nightly import NIGHTLY

import pallas_kernels
from pallas_kernels import testing
from pallas_kernels.testing import Case

LENGTHS = (1, 5, 63, 64, 65, 150, 300, 301)
SIZES = dict(num_heads=10, num_kv_heads=2, head_dim=16, block_size=5)
STEPS = {"decode": (1,) * 8, "mixed": (1, 5, 9, 1, 2, 7, 33, 40)}


@functools.cache
def rows_of(step):
    """Each row's table, length, count and queries; and the pool. In NumPy: what is done to them compiles nothing."""
    case = Case(lengths=LENGTHS, new=STEPS[step], **SIZES)
    return jax.tree.map(np.asarray, testing.make_inputs(case))


@functools.cache
def attend(deterministic):
    return jax.jit(functools.partial(
        pallas_kernels.paged_attention, return_lse=True, implementation="xla", deterministic=deterministic
    ))  # fmt: skip


def batch(step, rows, width, tokens, seed, deterministic=True):
    """The bits of some rows, computed together, with their blocks in other places and wider tables."""
    inputs, rows = rows_of(step), list(rows)
    order = np.random.default_rng(seed).permutation(inputs.kv.shape[0])
    tables = np.argsort(order).astype(np.int32)[inputs.tables[rows]]
    tables = np.pad(tables, ((0, 0), (0, width - tables.shape[1])))
    q = np.pad(inputs.q, ((0, 0), (0, max(0, tokens - inputs.q.shape[1])), (0, 0), (0, 0)))[rows]
    out, lse = map(
        np.asarray, attend(deterministic)(q, inputs.kv[order], tables, inputs.lengths[rows], inputs.new[rows])
    )
    counts = [STEPS[step][row] for row in rows]
    return [(out[i, :n], lse[i, :n]) for i, n in enumerate(counts)]


def differing(step, deterministic, batches, width=61):
    """How many rows of random batches have other bits than alone."""
    draw, wrong = random.Random(step), 0
    tokens = max(STEPS[step])
    alone = {row: batch(step, (row,), width, tokens, 0, deterministic)[0] for row in range(8)}
    for seed in range(batches):
        rows = tuple(draw.sample(range(8), 8) if seed % 2 else draw.choices(range(8), k=8))
        wider, places = draw.choice([(0, tokens), (29, tokens), (0, tokens + (3 if tokens > 1 else 0))])
        for row, found in zip(rows, batch(step, rows, width + wider, places, seed, deterministic), strict=True):
            wrong += not all(np.array_equal(a, b) for a, b in zip(found, alone[row], strict=True))
    return wrong


@pytest.mark.parametrize("step", STEPS)
def test_a_rows_bits_do_not_depend_on_its_neighbours(step):
    assert differing(step, True, 200 if NIGHTLY else 8) == 0


@pytest.mark.skipif(not NIGHTLY, reason="it says that the others can fail")
def test_it_is_not_so_by_itself():
    """The negative control, over tables that are not read at once."""
    assert differing("mixed", False, 3, width=2000) > 0


def test_it_is_attention():
    inputs = rows_of("mixed")
    out, lse = attend(True)(*inputs)
    expected, expected_lse = attend(False)(*inputs)
    testing.assert_close(out, expected)
    testing.assert_close(lse, expected_lse)
