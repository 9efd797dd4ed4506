"""Masks, segment ids and positions to counts; left pads to right pads and back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv

WIDTH = 9


def naive_runs(positions):
    """The runs of a row that rise by one, -1 left out."""
    runs, before = [], None
    for p in positions:
        if p != -1:
            if before is None or p != before + 1:
                runs.append(0)
            runs[-1] += 1
        before = None if p == -1 else p
    return runs


def batches(seed):
    """`(counts, start of each row's tokens, offsets of their positions)`: empty rows, full ones, any padding."""
    rng = np.random.default_rng(seed)
    n = rng.integers(0, WIDTH + 1, 6)
    n[:2] = 0, WIDTH
    return n, rng.integers(0, WIDTH + 1 - n), rng.integers(0, 50, 6)


@pytest.mark.parametrize("seed", range(5))
def test_padded_on_any_side(seed):
    n, start, first = batches(seed)
    index = np.arange(WIDTH)[None] - start[:, None]
    held = (index >= 0) & (index < n[:, None])
    positions = np.where(held, index + first[:, None], -1)
    for given in ({"mask": held}, {"mask": held.astype(np.int32)}, {"segment_ids": held * 3}, {"positions": positions}):
        assert jaxkv.counts(**given, check=True).tolist() == n.tolist()
    zeros = np.where(held, index, 0)  # what many models pad positions with
    assert jaxkv.counts(positions=zeros).tolist() == [max(naive_runs(row)) for row in zeros]


@pytest.mark.parametrize("seed", range(5))
def test_packed(seed):
    n, _, _ = batches(seed)
    ids = np.repeat(np.arange(6), n) + 1
    ids = np.pad(ids, (0, 3))
    assert jaxkv.counts(segment_ids=ids, max_seqs=6, check=True).tolist() == n.tolist()
    assert jax.jit(lambda ids: jaxkv.counts(segment_ids=ids, max_seqs=8))(ids).tolist() == [*n.tolist(), 0, 0]
    n = n[n > 0]  # positions cannot tell of rows without tokens
    positions = np.concatenate([np.arange(k) + 100 * i for i, k in enumerate(n)] + [[-1, -1]])
    assert jaxkv.counts(positions=positions.astype(np.int32), max_seqs=len(n)).tolist() == n.tolist()


def test_aligned_and_back():
    rng = np.random.default_rng(0)
    n = np.array([0, 3, 7, 5])
    right_padded = rng.normal(size=(4, 7, 2)).astype(np.float32)
    left_padded = np.stack([np.roll(row, 7 - k, axis=0) for row, k in zip(right_padded, n, strict=True)])
    np.testing.assert_array_equal(jax.jit(jaxkv.left_align)(left_padded, n), right_padded)
    np.testing.assert_array_equal(jaxkv.right_align(right_padded, jnp.asarray(n)), left_padded)
    wanted = [row[k - 1] if k else np.zeros(2) for row, k in zip(right_padded, n, strict=True)]
    np.testing.assert_array_equal(jaxkv.last(right_padded, n), wanted)


HOLES = {
    "mask": [[1, 0, 1]],
    "segment_ids": [[1, 1, 2]],
    "positions": [[0, 1, 5]],
}


@pytest.mark.parametrize("name", HOLES)
def test_holes_are_found(name):
    jaxkv.counts(**{name: HOLES[name]})  # as data they are none of its business
    with pytest.raises(ValueError, match=f"Row 0 of {name} has holes"):
        jaxkv.counts(**{name: HOLES[name]}, check=True)


BAD = {
    "one of mask": lambda: jaxkv.counts(),
    "but mask, positions were given": lambda: jaxkv.counts(mask=[[1]], positions=[[0]]),
    "mask must be [S, T], but": lambda: jaxkv.counts(mask=[1, 0]),
    "need max_seqs, the number of rows": lambda: jaxkv.counts(segment_ids=[1, 1]),
    "max_seqs must be at least 1": lambda: jaxkv.counts(segment_ids=[1, 1], max_seqs=0),
    "max_seqs is for packed tokens": lambda: jaxkv.counts(mask=[[1]], max_seqs=3),
    "mask must be integers, not float32": lambda: jaxkv.counts(mask=np.ones((1, 2), np.float32)),
    "must rise from row to row": lambda: jaxkv.counts(segment_ids=[2, 1], max_seqs=2, check=True),
    "and end in padding": lambda: jaxkv.counts(segment_ids=[1, 0, 2], max_seqs=2, check=True),
    "go up to 3, but max_seqs is 2": lambda: jaxkv.counts(segment_ids=[1, 3], max_seqs=2, check=True),
    "x must be [S, T, ...] and counts [S]": lambda: jaxkv.left_align([[1, 2]], [1, 1]),
    "of packed tokens, x[cumsum(counts) - 1] are the last ones": lambda: jaxkv.last([[1, 2]], [1, 1]),
    "counts must be integers, not float32": lambda: jaxkv.last([[1, 2]], np.ones(1, np.float32)),
}


@pytest.mark.parametrize("text", BAD)
def test_refusals(text):
    with pytest.raises(ValueError) as error:
        BAD[text]()
    assert text in str(error.value)
