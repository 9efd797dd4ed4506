"""A Flax NNX decoder that reads Hugging Face checkpoints. Import it by name: `import jaxkv.models`.

- `load(folder)`: loads the model in a folder with config.json and *.safetensors, or in a GGUF file;
  `save(model, folder)` writes it.
- `small()`: a small model that ships with jaxkv, a byte-level decoder trained on Python's standard library.
- `recaller()`: a tiny model that recalls pairs anywhere in 1,024 tokens, to test a cache that evicts or reads less.
- `Decoder`: one module for all families, configured by `DecoderConfig`, `LatentConfig`, `IndexConfig`,
  `ExpertsConfig` and `Rope`. A call takes tokens and a cache, and returns logits and the cache:

    model = jaxkv.models.load("path/to/folder", dtype="bfloat16")
    config = jaxkv.CacheConfig.from_model(model, max_seqs=8, max_seq_len=4096, memory_bytes=8e9)
    logits, cache = model(tokens, cache=jaxkv.extend(jaxkv.init(config), num_tokens))

`jaxkv.generate(model, prompts)` and `jaxkv.Engine(model)` run such steps. To be served by them, your own model only
needs `layer_configs`, `dtype` and such a call.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxkv.models.config import (
        DecoderConfig as DecoderConfig,
        ExpertsConfig as ExpertsConfig,
        IndexConfig as IndexConfig,
        LatentConfig as LatentConfig,
    )
    from jaxkv.models.decoder import Decoder as Decoder
    from jaxkv.models.loader import load as load, recaller as recaller, save as save, small as small
    from jaxkv.models.rope import Rope as Rope

__all__ = [
    "Decoder",
    "DecoderConfig",
    "ExpertsConfig",
    "IndexConfig",
    "LatentConfig",
    "Rope",
    "load",
    "recaller",
    "save",
    "small",
]

# Where each name lives. Most need Flax, which takes a second to import: `plan` reads configurations without it.
_HOMES = {
    "config": ("DecoderConfig", "ExpertsConfig", "IndexConfig", "LatentConfig"),
    "decoder": ("Decoder",),
    "loader": ("load", "recaller", "save", "small"),
    "rope": ("Rope",),
}


def __getattr__(name: str):
    if name in _HOMES:
        return importlib.import_module(f"jaxkv.models.{name}")
    for home, names in _HOMES.items():
        if name in names:
            globals()[name] = found = getattr(importlib.import_module(f"jaxkv.models.{home}"), name)
            return found
    raise AttributeError(f"module 'jaxkv.models' has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *__all__})
