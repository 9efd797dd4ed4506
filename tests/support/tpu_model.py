"""Compiles whole decode steps of models of real size for a TPU that is not there, and prints what the compiler says.

A script of its own, like tpu_programs.py: `python tpu_model.py v6e`, `python tpu_model.py v6e 4` for the first four
layers only, or `python tpu_model.py v6e scan` for layers that are scanned. `python tpu_model.py v6e 4 residual`: in
int4, with the newest tokens in bfloat16.
"""

from tpu_programs import TOPOLOGIES, devices  # first of all, for it sets the environment up

# isort: split
import dataclasses
import json
import math
import re
import sys

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxkv
from jaxkv.models import Decoder, DecoderConfig, Rope

ROWS, CONTEXT, BLOCK_SIZE = 8, 8192, 16
FOUR_BITS = {"dtype": "int4", "block_size": 128, "residual_length": 32, "step_tokens": 64}


def llama(num_layers, embed_dim, mlp_dim, num_heads, head_dim, tied):
    """A Llama 3, from its published configuration."""
    rope = Rope(theta=500_000.0, scaling="llama3", factor=8.0)
    return DecoderConfig(
        vocab_size=128256, embed_dim=embed_dim, mlp_dim=mlp_dim, num_heads=num_heads, num_kv_heads=8,
        head_dim=head_dim, max_seq_len=131072, windows=(None,) * num_layers, ropes=(rope,) * num_layers,
        attention_scale=head_dim**-0.5, tie_embeddings=tied,
    )  # fmt: skip


MODELS = {
    "Llama 3.2 1B, head_dim 64": llama(16, 2048, 8192, 32, 64, tied=True),
    "Llama 3.2 3B, head_dim 128": llama(28, 3072, 8192, 24, 128, tied=True),
    "Llama 3 8B, head_dim 128": llama(32, 4096, 14336, 32, 128, tied=False),
}


def decode_step(model, tokens, num_tokens, cache):
    cache = jaxkv.extend(cache, num_tokens)
    logits, cache = model(tokens, cache=cache)
    return logits[:, 0], cache


def size(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def compile_step(mesh, config, scan, stored):
    def on_chip(tree):
        whole = NamedSharding(mesh, PartitionSpec())
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), tree)

    model = jax.eval_shape(lambda: Decoder(config, dtype="bfloat16", scan=scan and "stacked", rngs=nnx.Rngs(0)))
    fields = {"block_size": BLOCK_SIZE, "head_dim_multiple": 128, "join_kv": True} | stored
    cache_config = jaxkv.CacheConfig.from_model(
        model, max_seqs=ROWS, max_seq_len=CONTEXT, max_tokens=ROWS * CONTEXT, **fields
    )
    cache = jax.eval_shape(lambda: jaxkv.init(cache_config))
    tokens = jax.ShapeDtypeStruct((ROWS, 1), "int32")
    counts = jax.ShapeDtypeStruct((ROWS,), "int32")
    with jax.set_mesh(mesh):
        step = jax.jit(decode_step, donate_argnames="cache")
        compiled = step.lower(*on_chip((model, tokens, counts, cache))).compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    copies = re.findall(r"%([\w.-]+) = \w+\[([\d,]+)\][^ ]* copy\(", text)
    return {
        "layers": config.num_layers,
        "parameters": size(model),
        "pools": size(cache.pools),
        "logits": 4 * ROWS * config.vocab_size,
        "cache": size(cache),
        "arrays": len(jax.tree.leaves(cache)),
        "unread": sum(size((t.new, t.offsets)) for t in cache.tables),
        "aliased arrays": len(re.findall(r"(?:may|must)-alias", text.splitlines()[0])),
        "alias": memory.alias_size_in_bytes,
        "temp": memory.temp_size_in_bytes,
        "kernels": text.count('custom_call_target="tpu_custom_call"'),
        "large copies": [name for name, axes in copies if math.prod(map(int, axes.split(","))) > 2**20],
    }


def main(chip, layers=None, residual=None):
    scan, num_layers = layers == "scan", int(layers) if layers and layers != "scan" else None
    mesh = Mesh(np.array(devices(TOPOLOGIES[chip], (1, 1, 1))[:1]), ("x",))
    names = list(MODELS)
    for name in [names[0], names[1 if chip == "v5e" else 2]]:  # 16 GB of parameters are all that a v5e holds
        config = MODELS[name]
        config = dataclasses.replace(config, windows=config.windows[:num_layers], ropes=config.ropes[:num_layers])
        stored = {} if residual is None else FOUR_BITS
        print(json.dumps({"name": name, **compile_step(mesh, config, scan, stored)}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
