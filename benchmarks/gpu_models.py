"""Whole models of random weights for `gpu_generate.py`: real ones' shapes, made on the device and nowhere else."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxkv
import jaxkv.nnx
from jaxkv.models import Decoder, DecoderConfig, Rope

# HuggingFaceTB/SmolLM2-135M and meta-llama/Llama-3.1-8B, as their config.json has them.
SMALL = DecoderConfig(
    vocab_size=49_152, embed_dim=576, mlp_dim=1536, num_heads=9, num_kv_heads=3, head_dim=64, max_seq_len=8192,
    windows=(None,) * 30, ropes=(Rope(theta=100_000.0),) * 30, attention_scale=64**-0.5, norm_eps=1e-5,
    tie_embeddings=True,
)  # fmt: skip
LLAMA_ROPE = Rope(theta=500_000.0, scaling="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA = DecoderConfig(
    vocab_size=128_256, embed_dim=4096, mlp_dim=14_336, num_heads=32, num_kv_heads=8, head_dim=128,
    max_seq_len=131_072, windows=(None,) * 32, ropes=(LLAMA_ROPE,) * 32, attention_scale=128**-0.5, norm_eps=1e-5,
)  # fmt: skip
TINY = DecoderConfig(
    vocab_size=300, embed_dim=48, mlp_dim=64, num_heads=6, num_kv_heads=2, head_dim=8, max_seq_len=512,
    windows=(None,) * 2, ropes=(Rope(),) * 2, attention_scale=8**-0.5, tie_embeddings=True,
)  # fmt: skip
MODELS = {"smollm2-135m": SMALL, "llama-3.1-8b": LLAMA}
TINY_MODELS = {"smollm2-135m": TINY, "llama-3.1-8b": dataclasses.replace(TINY, tie_embeddings=False)}


def abstract(config: DecoderConfig, dtype: Any = jnp.bfloat16) -> Decoder:
    """Returns a model of shapes, whose layers are computed one by one, as `jaxkv.models.load` has them on a GPU."""
    return nnx.eval_shape(lambda: Decoder(config, dtype=dtype, scan=False, rngs=nnx.Rngs(0)))


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def draw(key: jax.Array, deviation: jax.Array, *, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return (jax.random.normal(key, shape, dtype) * deviation).astype(dtype)


def random_model(config: DecoderConfig) -> Decoder:
    """Returns a model in bfloat16 whose activations are as large as a trained one's. A program makes all arrays of one
    shape, one after another."""
    graph, state = nnx.split(abstract(config))
    key = jax.random.key(0, impl="rbg")  # the fastest to compile and to run
    made = []
    for i, (path, param) in enumerate(nnx.to_flat_state(state)):
        if len(param.shape) == 1:  # of a norm
            made.append((path, param.replace(jnp.ones(param.shape, param.dtype))))
            continue
        inputs = math.prod(param.shape[:-1]) if path[-1] == "out" else param.shape[-1]
        deviation = jnp.asarray(inputs**-0.5, jnp.bfloat16)
        x = draw(jax.random.fold_in(key, i), deviation, shape=param.shape, dtype=param.dtype)
        made.append((path, param.replace(x)))
    model = nnx.merge(graph, nnx.from_flat_state(made))
    jax.block_until_ready(jax.tree.leaves(model))
    return model


class XlaAttention(jaxkv.nnx.Attention):
    """Attention by XLA, whatever kernels the platform has."""

    def attend(
        self, inputs: tuple, cache: Any, layer: Any, step: Any, deterministic: bool = False
    ) -> tuple[jax.Array, Any]:
        q, k, v, _ = inputs
        return jaxkv.attention(q, k, v, cache, layer=layer, step=step, scale=self.scale, implementation="xla")


def use_xla(model: Decoder) -> Decoder:
    """Returns the model with attention by XLA; it shares the parameters."""
    model = nnx.merge(*nnx.split(model))
    for block in model.layers:
        block.attention.__class__ = XlaAttention
    return model


def first_layers(model: Decoder, count: int) -> Decoder:
    """Returns the first layers of a model, with its embedding and norm; it shares the parameters."""
    config = dataclasses.replace(model.config, layers=model.config.layers[:count], ropes=model.config.ropes[:count])
    model = nnx.merge(*nnx.split(model))
    model.config, model.layers = config, nnx.List(list(model.layers)[:count])
    return model


def cast_float32(model: Decoder) -> Decoder:
    """Returns the same numbers in float32, which no kernel takes: attention is XLA's."""
    return jax.tree.map(lambda x: x.astype(jnp.float32), model)


def bytes_of(model: Decoder) -> int:
    """Bytes of weights that a decode step reads: all but an embedding table of which it takes some rows."""
    size = sum(x.nbytes for x in jax.tree.leaves(model))
    return size if model.head is None else size - model.embed[...].nbytes


def kv_bytes(config: DecoderConfig) -> int:
    """Bytes of a token's keys and values in all layers, in bfloat16."""
    return sum(2 * 2 * layer.num_kv_heads * layer.head_dim for layer in config.layers)


@jax.jit
def first_logits(model: Decoder, cache: jaxkv.Cache, prompts: jax.Array, following: jax.Array) -> jax.Array:
    """Returns `f32[2, S, V]`: the logits after prompts `[S, T]`, and those after one more token of each row, `[S]`."""
    rows, length = prompts.shape
    cache = jaxkv.extend(cache, jnp.full(rows, length, jnp.int32))
    of_prompts, cache = model(prompts, cache=cache, logits_at=jnp.full(rows, length - 1, jnp.int32))
    cache = jaxkv.extend(cache, jnp.ones(rows, jnp.int32))
    decoded, _ = model(following[:, None], cache=cache, logits_at=jnp.zeros(rows, jnp.int32))
    return jnp.stack([of_prompts, decoded])


def logits_of(model: Decoder, prompts: np.ndarray, following: np.ndarray) -> np.ndarray:
    """Computes `first_logits` with a cache of its own, and true float32 where the model is in it."""
    rows, length = prompts.shape
    cache = jaxkv.init(jaxkv.CacheConfig.from_model(model, max_seqs=rows, max_seq_len=length + 16))
    with jax.default_matmul_precision("highest" if model.dtype == jnp.float32 else None):
        return np.asarray(first_logits(model, cache, prompts, following))


def choice_of(model: Decoder) -> Any:
    """Returns what `explain` says of a model's decode step."""
    cache = jaxkv.init(jaxkv.CacheConfig.from_model(model, max_seqs=1, max_seq_len=64))
    q = jax.ShapeDtypeStruct((1, 1, model.config.num_heads, model.config.head_dim), model.dtype)
    return jaxkv.explain(q, cache, layer=0)


def lowered(config: DecoderConfig, rows: int, tokens: int | None, max_seq_len: int) -> dict[str, Any]:
    """Lowers a step for an NVIDIA GPU, on a machine without one: the kernels' calls in it, by name. No array is made.

    Args:
      tokens: packed ones; None: a decode step.
    """
    model = abstract(config)
    sizes = jaxkv.CacheConfig.from_model(
        model, max_seqs=rows, max_seq_len=max_seq_len, num_blocks=rows * 41, head_dim_multiple=64
    )
    cache = jax.eval_shape(lambda: jaxkv.init(sizes))
    number = jax.ShapeDtypeStruct((rows,), jnp.int32)
    ids = jax.ShapeDtypeStruct((rows, 1) if tokens is None else (tokens,), jnp.int32)

    def step(model: Any, cache: Any, ids: Any, counts: Any, places: Any) -> Any:
        return model(ids, cache=jaxkv.extend(cache, counts), logits_at=places)

    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        program = jax.jit(step, donate_argnums=1).trace(model, cache, ids, number, number)
        text = program.lower(lowering_platforms=("cuda",)).as_text()
    return {"lines": text.count("\n"), "kernels": text.count("mosaic_gpu")}
