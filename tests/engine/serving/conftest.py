"""A small model, an engine of it, and what a request gets by itself."""

import pytest
from checksum_model import Several
from nightly import NIGHTLY
from served import SIZES

import jaxkv


@pytest.fixture(scope="module")
def model():
    return Several((None, 7)[: 1 + NIGHTLY])  # by day one layer, which is half of what there is to compile


@pytest.fixture(scope="module")
def lone(model):
    """What a request gets by itself."""
    with jaxkv.Engine(model, **SIZES) as engine:
        yield lambda prompt, count: engine.submit(prompt, count).result(60)


@pytest.fixture
def engine(model):
    with jaxkv.Engine(model, **SIZES) as engine:
        yield engine
