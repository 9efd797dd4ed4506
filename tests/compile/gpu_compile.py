"""Compile the GPU kernels for an H200 on a machine without one, and print what the compiler says about them as JSON.

Run in a process of its own, with the packages of the extra `compile` on PYTHONPATH and JAX_PLATFORMS=cpu:
    python gpu_compile.py JOB ...
"""

import functools
import itertools
import json
import os
import pathlib
import re
import sys
import tempfile

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental import topologies

import jaxkv
import pallas_kernels
from jaxkv.models import Decoder, DecoderConfig, Rope
from pallas_kernels import SHAPES, AttentionShape, gpu, xla
from pallas_kernels.kinds import storage_of

TARGET = pathlib.Path(__file__).with_name("gpu_h200.txtpb").read_text()
ROWS, MAX_BLOCKS, NUM_BLOCKS = 8, 128, 1024
HEAD_DIMS = (64, 96, 128, 256)


@functools.cache
def sharding():
    topology = topologies.get_topology_desc(platform="cuda", target_config=TARGET, topology="1x1x1")
    mesh = topologies.make_mesh(topo=topology, mesh_shape=(1,), axis_names=("x",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def array(shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding())


def compile_(f, *arguments, **options):
    """The compiled program, and per kernel: registers, spilled bytes, shared memory, and counts of instructions."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MOSAIC_GPU_DUMP_TO"] = folder
        try:
            compiled = jax.jit(f, **options).lower(*arguments).compile()
        finally:
            del os.environ["MOSAIC_GPU_DUMP_TO"]
        files = {path.name: path.read_text() for path in pathlib.Path(folder).iterdir()}
    kernels = {}
    for kind in ("paged_decode_split", "paged_decode_merge", "paged_prefill"):
        ptx, ptxas, resources = (
            "".join(text for name, text in files.items() if name.startswith(kind) and name.endswith(ending))
            for ending in (".ptx", ".ptxas", ".resources.txt")
        )
        if not ptx:
            continue
        kernels[kind] = {
            "target": re.search(r"\.target (\w+)", ptx).group(1),
            "registers": int(re.search(r"Used (\d+) registers", ptxas).group(1)),
            "spills": int(re.search(r"(\d+) bytes spill stores, \d+ bytes spill loads\n", ptxas).group(1)),
            "shared_memory": int(re.search(r"smem_scratch_bytes=(\d+)", resources).group(1)),
            "wgmma": len(re.findall(r"wgmma\.mma_async", ptx)),
            "bulk_copies": len(re.findall(r"cp\.async\.bulk\.tensor\.\dd\.shared", ptx)),
            "proxy_fences": len(re.findall(r"fence\.proxy\.async", ptx)),
            "early_launch": sorted(set(re.findall(r"griddepcontrol\.(\w+)", ptx))),
            # Registers of a thread after the warpgroups have traded them: by those that took more, and that gave.
            "traded": {k: int(n) for k, n in re.findall(r"setmaxnreg\.(\w+)\.sync\.aligned\.u32 (\d+)", ptx)},
        }
    return compiled, kernels


def attention(shape, *, tokens=1, packed=False, block_size=16, dtype=jnp.bfloat16, sinks=False, kind=None):
    """A step of one attention shape; head dims that fill no whole tile are stored padded."""
    stored = -(-shape.head_dim // 64) * 64
    heads = (shape.num_heads, shape.head_dim)
    q = array((tokens, *heads) if packed else (ROWS, tokens, *heads), dtype)
    pool = (NUM_BLOCKS, 2, shape.num_kv_heads, block_size)
    kv = array((*pool, stored), dtype if kind is None else storage_of(kind))
    scale = None if kind is None else array(pool, jnp.float32)
    row, sinks = array((ROWS,), jnp.int32), array((shape.num_heads,), jnp.float32) if sinks else None
    options = dict(window=shape.window, soft_cap=shape.soft_cap, return_lse=True)

    def f(q, kv, scale, tables, lengths, new, sinks):
        return gpu.paged_attention(q, kv, tables, lengths, new, sinks=sinks, kv_scale=scale, kind=kind, **options)

    return compile_(f, q, kv, scale, array((ROWS, MAX_BLOCKS), jnp.int32), row, row, sinks)[1]


def named(name, **options):
    return lambda: attention(SHAPES[name], **options)


def options(head_dim, *, window=None, soft_cap=None, sinks=False):
    """A mixed step, and so all kernels, with a combination of options."""
    heads = {64: (8, 2), 96: (4, 4), 128: (10, 2), 256: (16, 1)}[head_dim]
    shape = AttentionShape(*heads, head_dim, num_layers=1, window=window, soft_cap=soft_cap)
    return lambda: attention(shape, tokens=64, sinks=sinks, dtype=jnp.float16 if head_dim == 96 else jnp.bfloat16)


def changed(module, *changes, job):
    """Negative control: a job with a line of a module changed."""
    from mutants import mutant

    from pallas_kernels.gpu import step

    name = module.__name__.rpartition(".")[2]
    setattr(step, name, mutant(module, *changes))
    try:
        return JOBS[job]()
    finally:
        setattr(step, name, module)


def without_fence():
    """V's and P's writes are not published to the matrix unit."""
    fence = "                plgpu.commit_smem()\n                probe(interpret, v_s"
    return changed(gpu.decode, (fence, fence.replace("plgpu.commit_smem()", "pass")), job="llama3-8b")


def too_many_registers():
    """Consumers that ask for more registers than there are: they would wait for ever."""
    return changed(gpu.prefill, ("set_max_registers(232 if", "set_max_registers(240 if"), job="llama3-8b-prefill")


def launches():
    """What the device is given to do, by width of the table and new tokens of a row: in a layer, and once in a step."""
    shape, free = SHAPES["llama3-8b"], {"parameter", "constant", "bitcast", "tuple", "get-tuple-element"}

    def count(num_layers, blocks, tokens):
        heads = (shape.num_kv_heads, shape.head_dim)
        pools = tuple(array((NUM_BLOCKS, 2, shape.num_kv_heads, 16, shape.head_dim)) for _ in range(num_layers))
        new = tuple(array((ROWS, tokens, *heads)) for _ in pools)
        queries = tuple(array((ROWS, tokens, shape.num_heads, shape.head_dim)) for _ in pools)

        def layers(pools, queries, new, tables, lengths, counts):
            pools = [xla.write_kv(pool, kv, kv, tables, lengths, counts) for pool, kv in zip(pools, new, strict=True)]
            attend = [
                gpu.paged_attention(q, pool, tables, lengths, counts) for q, pool in zip(queries, pools, strict=True)
            ]
            return pools, attend

        row = array((ROWS,), jnp.int32)
        compiled = jax.jit(layers, donate_argnums=0).lower(
            pools, queries, new, array((ROWS, blocks), jnp.int32), row, row
        )
        entry = re.search(r"^ENTRY .*?^}", compiled.compile().as_text(), re.DOTALL | re.MULTILINE).group()
        return sum(name not in free for name in re.findall(r"^ .* = .*?[)\]}] ([\w-]+)\(", entry, re.MULTILINE))

    found = {}
    for blocks, tokens in ((128, 1), (16, 1), (128, 4)):
        one, three = (count(n, blocks, tokens) for n in (1, 3))
        layer = (three - one) / 2
        found[f"{blocks}, {tokens}"] = {"layer": layer, "step": one - layer}
    return found


def step(*, donate=True, unique=True):
    """A decode step of two layers: projections, write, attention. What the program does to the pools."""
    shape = SHAPES["llama3-8b"]
    model_dim, heads, kv_heads, head_dim = 4096, shape.num_heads, shape.num_kv_heads, shape.head_dim
    weights = {
        "q": array((model_dim, heads * head_dim)), "kv": array((model_dim, 2 * kv_heads * head_dim)),
        "o": array((heads * head_dim, model_dim)),
    }  # fmt: skip
    pools = tuple(array((NUM_BLOCKS, 2, kv_heads, 16, head_dim)) for _ in range(2))

    def decode_step(pools, weights, x, tables, lengths, new):
        written = []
        for pool, w in zip(pools, weights, strict=True):
            q = (x @ w["q"]).reshape(ROWS, 1, heads, head_dim)
            k, v = jnp.split((x @ w["kv"]).reshape(ROWS, 1, 2 * kv_heads, head_dim), 2, axis=2)
            if unique:
                pool = xla.write_kv(pool, k, v, tables, lengths, new)
            else:  # negative control
                block = jnp.take_along_axis(tables, ((lengths - 1) // 16)[:, None], axis=1)[:, 0]
                pool = pool.at[block, :, :, (lengths - 1) % 16].add(jnp.stack([k[:, 0], v[:, 0]], axis=1))
            out = pallas_kernels.paged_attention(q, pool, tables, lengths, new, implementation="gpu")
            x = x + out.reshape(ROWS, heads * head_dim) @ w["o"]
            written.append(pool)
        return x, tuple(written)

    row = array((ROWS,), jnp.int32)
    arguments = (pools, (weights, weights), array((ROWS, model_dim)), array((ROWS, MAX_BLOCKS), jnp.int32), row, row)
    compiled, _ = compile_(decode_step, *arguments, donate_argnums=(0,) if donate else ())
    return fate(compiled, pools)


def scanned(num_layers=8):
    """A whole decode step of a model whose layers are scanned: what it does to the one pool that all of them share."""
    shape = SHAPES["llama3-8b"]
    config = DecoderConfig(
        vocab_size=1024, embed_dim=4096, mlp_dim=1024, num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim, max_seq_len=8192, windows=(None,) * num_layers, ropes=(Rope(),) * num_layers,
        attention_scale=shape.head_dim**-0.5,
    )  # fmt: skip
    model = jax.eval_shape(lambda: Decoder(config, dtype=jnp.bfloat16, scan=True, rngs=nnx.Rngs(0)))
    cache_config = jaxkv.CacheConfig.from_model(model, max_seqs=ROWS, max_seq_len=8192, num_blocks=NUM_BLOCKS)
    cache = jax.eval_shape(lambda: jaxkv.init(cache_config))

    def decode_step(cache, model, tokens):
        cache = jaxkv.extend(cache, jnp.ones(ROWS, jnp.int32))
        logits, cache = model(tokens, cache=cache)
        return logits, cache

    arguments = jax.tree.map(lambda x: array(x.shape, x.dtype), (cache, model, array((ROWS, 1), jnp.int32)))
    with jax.set_mesh(sharding().mesh):  # which says whom the kernels are for
        compiled, _ = compile_(decode_step, *arguments, donate_argnums=0)
    weights = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(model.stacks)) // num_layers
    pools = [pool.kv for pool in cache.pools if pool is not None]
    return fate(compiled, pools) | {"weights of a layer": weights}


def fate(compiled, pools):
    """What a program does to its pools."""
    text, memory = compiled.as_text(), compiled.memory_analysis()
    pool_type = re.escape("bf16[" + ",".join(map(str, pools[0].shape)) + "]")
    return {
        "pool_bytes": sum(pool.size * 2 for pool in pools),
        "alias_bytes": memory.alias_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "pool_copies": len(re.findall(rf"= {pool_type}\S* copy(?:-start)?\(", text)),
        "scatters": len(re.findall(r" scatter\(", text)),
        "unique_scatters": len(re.findall(r" scatter\(.*unique_indices=true", text)),
        "kernels": len(re.findall(r'custom_call_target="mosaic_gpu', text)),
    }


JOBS = {
    "llama3-8b": named("llama3-8b"),
    "llama3-8b-contiguous": named("llama3-8b", block_size=4096),
    "llama3.2-1b": named("llama3.2-1b", block_size=8),
    "qwen2.5-14b": named("qwen2.5-14b", block_size=64),
    "llama2-7b": named("llama2-7b"),
    "phi2": named("phi2", block_size=32),
    "gemma2-2b": named("gemma2-2b", block_size=128),
    "one-kv-head": lambda: attention(AttentionShape(32, 1, 128, num_layers=1)),
    "two-kv-heads": lambda: attention(AttentionShape(48, 2, 128, num_layers=1)),
    "llama3-8b-4-tokens": named("llama3-8b", tokens=4),
    "llama3-8b-8-tokens": named("llama3-8b", tokens=8),
    "gemma2-2b-4-tokens": named("gemma2-2b", tokens=4, sinks=True),
    "llama3-8b-prefill": named("llama3-8b", tokens=2048, packed=True),
    "llama3.2-1b-prefill": named("llama3.2-1b", tokens=256),
    "qwen2.5-14b-prefill": named("qwen2.5-14b", tokens=256, block_size=64),
    "gemma2-2b-prefill": named("gemma2-2b", tokens=256),
    "phi2-prefill": named("phi2", tokens=256, block_size=8),
    **{f"{head_dim}-plain": options(head_dim) for head_dim in HEAD_DIMS},
    **{f"{head_dim}-window": options(head_dim, window=100) for head_dim in HEAD_DIMS},
    **{f"{head_dim}-soft-cap": options(head_dim, soft_cap=30.0) for head_dim in HEAD_DIMS},
    **{f"{head_dim}-all": options(head_dim, window=100, soft_cap=30.0, sinks=True) for head_dim in HEAD_DIMS},
    **{
        f"{name}-{kind}": named(name, tokens=64, block_size=32, kind=kind)
        for name, kind in itertools.product(("llama3-8b", "llama3.2-1b", "gemma2-2b"), gpu.KINDS)
    },
    "step": step,
    "scanned": scanned,
    "launches": launches,
    "control-no-fence": without_fence,
    "control-too-many-registers": too_many_registers,
    "control-not-donated": lambda: step(donate=False),
    "control-not-unique": lambda: step(unique=False),
}


if __name__ == "__main__":
    sys.path.append(str(pathlib.Path(__file__).parents[1] / "kernels" / "gpu"))  # for the mutants
    for job in sys.argv[1:]:
        print("JOB", json.dumps({job: JOBS[job]()}), flush=True)
