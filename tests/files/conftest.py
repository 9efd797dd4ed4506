"""The caches that are saved, made once for all files of tests, each when it is asked for."""

import pytest
from saved import CONFIGS, filled

import jaxkv


class Caches(dict):
    def __missing__(self, name):
        self[name] = filled(CONFIGS[name])
        return self[name]


@pytest.fixture(scope="session")
def caches():
    return Caches()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "saved.safetensors"


@pytest.fixture
def saved(caches, path):
    jaxkv.save(path, caches["blocks of 4"], model="llama")
    return path
