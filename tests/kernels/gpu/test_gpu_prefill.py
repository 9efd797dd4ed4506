"""Chunked and mixed steps against NumPy: interpreted with races detected, or natively on a GPU."""

import pytest
from nightly import NIGHTLY
from trials import PREFILL

BY_DAY = (
    "packed",
    "71 heads of two",
    "ring",
    "tails of wide tiles",
    "the window's first token",
    "first tokens, chunks",
    "head_dim 320",
)


@pytest.mark.parametrize("name", PREFILL if NIGHTLY else BY_DAY)
def test_against_numpy(name, interpret, monkeypatch):
    PREFILL[name].use_plans(monkeypatch)
    PREFILL[name].check(interpret)
