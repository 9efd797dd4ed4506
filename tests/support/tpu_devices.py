"""Compiles a decode step of a cache over four TPUs that are not there, and prints what the compiler says as JSON.

A script of its own, like tpu_programs.py: `python tpu_devices.py`.
"""

from tpu_programs import devices  # first of all, for it sets the environment up

# isort: split
import json
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import jaxkv

ROWS, LAYERS, HEADS = 8, 2, 32


def program(chips, num_blocks, num_kv_heads=8, axes=AxisType.Auto, context=None, block_size=16, head_dim=128,
            **fields):  # fmt: skip
    mesh = Mesh(np.array(chips), (context or "model",), axis_types=(axes,))
    layer = jaxkv.LayerConfig(num_kv_heads=num_kv_heads, head_dim=head_dim, **fields)
    config = jaxkv.CacheConfig(
        layers=(layer,) * LAYERS, max_seqs=ROWS, max_seq_len=2048, num_blocks=num_blocks, head_dim_multiple=128,
        block_size=block_size, join_kv=True,
    )  # fmt: skip
    specs = jaxkv.partition_specs(config, mesh, context=context)
    shapes = jax.eval_shape(lambda: jaxkv.init(config, mesh=mesh, context=context))
    cache = jax.tree.map(lambda x, spec: array(mesh, x.shape, x.dtype, spec), shapes, specs)
    heads = P(None, None, "model") if context is None else P()
    q = array(mesh, (ROWS, 1, HEADS, head_dim), jnp.bfloat16, heads)
    k = array(mesh, (ROWS, 1, num_kv_heads, head_dim), jnp.bfloat16, heads if num_kv_heads >= len(chips) else P())

    def decode(cache, q, k):
        cache = jaxkv.extend(cache, jnp.ones(ROWS, jnp.int32))
        step = jaxkv.plan_step(cache, (ROWS, 1))
        for i in range(LAYERS):
            q, cache = jaxkv.attention(q, k, k, cache, layer=i, step=step)
        return q, cache

    with jax.set_mesh(mesh):
        compiled = jax.jit(decode, donate_argnums=0).lower(cache, q, k).compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    return {
        "pool": config.bytes // (len(chips) if num_kv_heads >= len(chips) or context else 1),
        "alias": memory.alias_size_in_bytes,
        "temp": memory.temp_size_in_bytes,
        "kernels": text.count('custom_call_target="tpu_custom_call"'),
        "context": context,
        "plain": context is None and not fields,
        "collectives": re.findall(
            r"= .*? ((?:all|reduce|collective)-(?:gather|reduce|to-all|scatter|permute))(?:-start)?\(", text
        ),
    }


def array(mesh, shape, dtype, spec):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


if __name__ == "__main__":
    chips = devices("v6e:2x2", (2, 2, 1))
    programs = [
        {"num_blocks": 32_768},
        {"num_blocks": 65_536},
        {"num_blocks": 32_768, "axes": AxisType.Explicit},
        {"num_blocks": 32_768, "num_kv_heads": 2},
        {"num_blocks": 32_768, "bounds": True},
        {"num_blocks": 32_768, "evict": "head"},
        # Keys and values joined.
        {"num_blocks": 65_536, "head_dim": 64, "bounds": True},
        {"num_blocks": 65_536, "head_dim": 64, "evict": "head"},
        {"num_blocks": 32_768, "head_dim": 64, "context": "context", "block_size": 64},
        {"num_blocks": 8_192, "context": "context", "block_size": 64},
        {"num_blocks": 16_384, "context": "context", "block_size": 64, "axes": AxisType.Explicit},
    ]
    two_hosts = devices("v6e:2x4", (2, 2, 1))  # neither of which is this one
    if not sys.argv[1:]:
        print(json.dumps(program(two_hosts, num_blocks=65_536)), flush=True)
    for options in programs[-2:] if sys.argv[1:] == ["context"] else programs:
        print(json.dumps(program(chips, **options)), flush=True)
