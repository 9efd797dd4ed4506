"""Compiles a decode step of a cache over the eight H200s of a box that is not there, and prints what the compiler says
as JSON. In a process of its own, like gpu_compile.py, with the same packages: `python gpu_devices.py`."""

import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jaxkv
from jaxkv._core.cache.init import _init_pools, _init_tables

TARGET = pathlib.Path(__file__).with_name("gpu_h200.txtpb").read_text()
DEVICES, ROWS, LAYERS, HEADS, KV_HEADS = 8, 8, 2, 64, 8
MOVES = r"= .*? ((?:all|reduce|collective)-(?:gather|reduce|to-all|scatter|permute))(?:-start)?\("


def program(devices, num_blocks):
    """A decode step of some layers, with a projection behind each that is divided as heads are."""
    mesh = Mesh(np.array(devices), ("model",))
    config = jaxkv.CacheConfig.uniform(
        num_layers=LAYERS, num_kv_heads=KV_HEADS, head_dim=128, max_seqs=ROWS, max_seq_len=2048, num_blocks=num_blocks,
        head_dim_multiple=64,
    )  # fmt: skip
    specs = jaxkv.partition_specs(config, mesh)
    shapes = jax.tree.leaves(jax.eval_shape(lambda: (_init_tables(config), _init_pools(config, None, None))))
    pairs = zip(shapes, jax.tree.leaves(specs), strict=True)
    cache = jax.tree.unflatten(jax.tree.structure(specs), [array(mesh, x.shape, spec, x.dtype) for x, spec in pairs])
    q = array(mesh, (ROWS, 1, HEADS, 128), P(None, None, "model"))
    k = array(mesh, (ROWS, 1, KV_HEADS, 128), P(None, None, "model"))
    out = array(mesh, (HEADS, 128, 512), P("model"))

    def decode(cache, q, k, out):
        cache = jaxkv.extend(cache, jnp.ones(ROWS, jnp.int32))
        step = jaxkv.plan_step(cache, (ROWS, 1))
        total = jnp.zeros((ROWS, 1, 512), jnp.bfloat16)
        for i in range(LAYERS):
            y, cache = jaxkv.attention(q, k, k, cache, layer=i, step=step, implementation="gpu")
            total = total + jnp.einsum("bthd,hde->bte", y, out)
            q = q + total[..., None, :128]  # so that each layer waits for the one before
        return total, cache

    compiled = jax.jit(decode, donate_argnums=0).lower(cache, q, k, out).compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    return {
        "pool": config.bytes // DEVICES, "alias": memory.alias_size_in_bytes, "temp": memory.temp_size_in_bytes,
        "kernels": len(re.findall(r'custom_call_target="mosaic_gpu', text)),
        "collectives": re.findall(MOVES, text),
    }  # fmt: skip


def array(mesh, shape, spec, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


if __name__ == "__main__":
    box = topologies.get_topology_desc(platform="cuda", target_config=TARGET, topology="1x1x8").devices
    print("JOB", json.dumps([program(box, num_blocks) for num_blocks in (8_192, 16_384)]), flush=True)
