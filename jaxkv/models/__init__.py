"""A Flax NNX decoder that reads Hugging Face checkpoints. Import it by name: `import jaxkv.models`.

- `load(folder)`: the model in a folder with config.json and *.safetensors; `save(model, folder)` is the way back.
- `small()`: the little model that comes with jaxkv, a decoder of bytes that has read Python's standard library.
- `recaller()`: a tiny one that recalls pairs anywhere in 1,024 tokens, to try a cache with that keeps or reads less.
- `Decoder`: what both are, one module for all families; `DecoderConfig`, `LatentConfig`, `ExpertsConfig` and `Rope` say
  which. It takes tokens and a cache, and gives logits and the cache:

    model = jaxkv.models.load("path/to/folder", dtype="bfloat16")
    config = jaxkv.CacheConfig.from_model(model, max_seqs=8, max_seq_len=4096, memory_bytes=8e9)
    logits, cache = model(tokens, cache=jaxkv.extend(jaxkv.init(config), num_tokens))

`jaxkv.generate(model, prompts)` and `jaxkv.Engine(model)` do that step by step. A model of your own needs no more than
`layer_configs`, `dtype` and such a call to be served by them.
"""

from jaxkv.models.config import (
    DecoderConfig as DecoderConfig,
    ExpertsConfig as ExpertsConfig,
    LatentConfig as LatentConfig,
)
from jaxkv.models.decoder import Decoder as Decoder
from jaxkv.models.loader import load as load, recaller as recaller, save as save, small as small
from jaxkv.models.rope import Rope as Rope

__all__ = ["Decoder", "DecoderConfig", "ExpertsConfig", "LatentConfig", "Rope", "load", "recaller", "save", "small"]
