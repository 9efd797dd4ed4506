"""Lowers steps for TPUs that are not there, and prints as JSON which kernels are chosen.

A script of its own, for libtpu must not be near the tests' process.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from tpu_programs import devices

import jaxkv
import jaxkv.models

FOUR = Mesh(np.array(devices("v6e:2x2", [2, 2, 1])), ("model",))
ONE = Mesh(FOUR.devices[:1], ("model",))


def describe(mesh, spec, shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def count_kernels(step, *arguments):
    lowered = jax.jit(step, donate_argnames="cache").trace(*arguments).lower(lowering_platforms=("tpu",))
    return lowered.as_text().count("tpu_custom_call")


def over_four():
    """Shapes that say where they lie choose the kernels."""
    layer = jaxkv.LayerConfig(num_kv_heads=8, head_dim=128)
    config = jaxkv.CacheConfig(layers=(layer,), max_seqs=4, max_seq_len=512, num_blocks=64, head_dim_multiple=128)
    cache = jax.eval_shape(lambda: jaxkv.init(config, mesh=FOUR))
    specs = jaxkv.partition_specs(config, FOUR)
    cache = jax.tree.map(lambda x, spec: describe(FOUR, spec, x.shape, x.dtype), cache, specs)

    def step(q, kv, counts, cache):
        return jaxkv.attention(q, kv, kv, jaxkv.extend(cache, counts), layer=0)

    q, kv = (describe(FOUR, P(None, None, "model"), (4, 1, heads, 128)) for heads in (32, 8))
    counts = describe(FOUR, P(), (4,), jnp.int32)
    return count_kernels(step, q, kv, counts, cache), jaxkv.explain(q, cache).implementation


def a_model():
    """So does a mesh that is set, where nothing else says it."""
    model = jaxkv.models.small(dtype="bfloat16")
    sizes = dict(max_seqs=4, max_seq_len=512, num_blocks=64, head_dim_multiple=128, join_kv=True)
    config = jaxkv.CacheConfig.from_model(model, **sizes)
    cache = jax.eval_shape(lambda: jaxkv.init(config))
    model, cache = jax.tree.map(lambda x: describe(ONE, P(), x.shape, x.dtype), (model, cache))
    tokens, counts = (describe(ONE, P(), shape, jnp.int32) for shape in ((4, 1), (4,)))

    def step(model, tokens, counts, cache):
        return model(tokens, cache=jaxkv.extend(cache, counts))

    with jax.set_mesh(ONE):
        kernels = count_kernels(step, model, tokens, counts, cache)
    head_dim = config.layers[0].head_dim
    return kernels, jaxkv.explain(jax.ShapeDtypeStruct((4, 1, 8, head_dim), jnp.bfloat16), cache).implementation


if __name__ == "__main__":
    for found in (over_four(), a_model()):
        print(json.dumps(found))
