"""The caches that are saved, made once for all files of tests."""

import pytest
from saved import CONFIGS, filled

import jaxkv


@pytest.fixture(scope="session")
def caches():
    return {name: filled(config) for name, config in CONFIGS.items()}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "saved.safetensors"


@pytest.fixture
def saved(caches, path):
    jaxkv.save(path, caches["blocks of 4"], model="llama")
    return path
