"""The README and the pages of docs, for tests: their code blocks, and a folder with a model as they name it."""

import dataclasses
import functools
import json
import pathlib
import re

import bundled
import jax
import pytest
from flax import nnx
from nightly import NIGHTLY

import jaxkv

ROOT = pathlib.Path(jaxkv.__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}>"


def blocks(text, language):
    """The code blocks of a page in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def write_model_folder(folder):
    """The bundled model as a folder of Hugging Face's, with a tokenizer of bytes and a chat template."""
    tokenizers = pytest.importorskip("tokenizers", reason="the extra 'hf' is not installed")
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).symlink_to(bundled.FOLDER / name)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))


@functools.cache
def make_model():
    """The bundled model's first layer and no more: the same program for all pages, and a fifth to compile."""
    whole = bundled.small()
    config = dataclasses.replace(whole.config, layers=whole.config.layers[:1], ropes=whole.config.ropes[:1])
    return jaxkv.models.Decoder(config, dtype="float32", rngs=nnx.Rngs(0))


def run_blocks(text, tmp_path, monkeypatch):
    """Runs a page's Python, one block after another as in a session; returns its names."""
    write_model_folder(tmp_path / "my-model")
    monkeypatch.chdir(tmp_path)
    if not NIGHTLY:
        model = make_model()
        monkeypatch.setattr(jaxkv.models, "load", lambda folder, **options: model)
        monkeypatch.setattr(jaxkv.models, "small", lambda: model)
    compiled, names = jax.config.jax_compilation_cache_dir, {"__name__": "page"}
    try:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            for block in blocks(text, "python"):
                exec(compile(block, "page", "exec"), names)
    finally:
        jax.config.update("jax_compilation_cache_dir", compiled)
    return names
