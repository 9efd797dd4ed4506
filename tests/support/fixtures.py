"""The tiny checkpoints that `tests/data/make_fixtures.py` has made."""

import pathlib
from typing import NamedTuple

import numpy as np

DATA = pathlib.Path(__file__).parent.parent / "data"
NAMES = sorted(folder.name for folder in DATA.iterdir() if (folder / "expected.npz").exists())
ROWS = 5


class Expected(NamedTuple):
    """What transformers made of a prompt: the greedy tokens after it, and the logits of all tokens but the last."""

    prompt: np.ndarray
    tokens: np.ndarray
    logits: np.ndarray

    @property
    def read(self) -> np.ndarray:
        """Every token that has logits."""
        return np.concatenate([self.prompt, self.tokens])[:-1]


def expected(name: str) -> list[Expected]:
    with np.load(DATA / name / "expected.npz") as file:
        return [Expected(*(file[f"{what}_{i}"] for what in Expected._fields)) for i in range(ROWS)]


def assert_close(logits, wanted) -> None:
    """Within 1e-4 of the largest logit."""
    assert logits.shape == wanted.shape
    np.testing.assert_allclose(logits, wanted, rtol=0, atol=1e-4 * np.abs(wanted).max())
