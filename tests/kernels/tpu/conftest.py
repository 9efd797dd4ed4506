"""What all tests of the TPU kernels share."""

import pytest


@pytest.fixture(autouse=True)
def few_segments(monkeypatch):
    """Steps of decode so small that a row has several and several rows have one; the interpreter is slow with more."""
    monkeypatch.setattr("pallas_kernels.tpu.decode.SEGMENTS", 3)
