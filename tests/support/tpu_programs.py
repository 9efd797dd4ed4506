"""Compiles the TPU kernels for a chip that is not there, and prints what the compiler says as JSON.

A script of its own, for libtpu must not be near the tests' own process: `python tpu_programs.py v6e`, which compiles
all programs; for another chip, those whose kernels differ most from chip to chip, and all with one more argument.
"""

import functools
import json
import math
import os
import re
import sys

os.environ |= {
    "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0",
    "TPU_ACCELERATOR_TYPE": "v5litepod-1", "TPU_LOG_DIR": "disabled", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}  # fmt: skip

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from program_text import made_as_large

import pallas_kernels
from pallas_kernels import SHAPES
from pallas_kernels.common.quantization import find_format
from pallas_kernels.tpu.decode import decode_bytes
from pallas_kernels.tpu.pages import VMEM_BYTES
from pallas_kernels.tpu.prefill import prefill_bytes
from pallas_kernels.tpu.step import tile_tokens
from pallas_kernels.tpu.write import write_bytes

TOPOLOGIES = {"v5e": "v5e:1x1", "v5p": "v5p:1x1x1", "v6e": "v6e:1x1", "tpu7x": "tpu7x:1x1x1"}
ROWS, BLOCKS_PER_ROW, BLOCK_SIZE = 8, 1024, 16
INT8 = {"kind": "int8", "block_size": 128, "blocks_per_row": 128}
INT4 = INT8 | {"kind": "int4", "joined": True}
K5V3 = INT4 | {"kind": "k5v3"}


def devices(topology, bounds):
    return topologies.get_topology_desc(platform="tpu", topology_name=topology, chips_per_host_bounds=bounds).devices


def vector_memory(text, q, kv, tables, deterministic=False, groups=1, group_size=None):
    """Of each kernel in a compiled program the vector memory that it takes, by the compiler and by the model."""
    heads, rows = q.shape[-2], tables.shape[0]
    tile = tile_tokens(q.shape[-3], heads, kv, tables, q.dtype, deterministic, groups)
    models = {
        "decode": decode_bytes(rows, heads, kv, tables, q.dtype, deterministic=deterministic, groups=groups),
        "prefill": prefill_bytes(tile, heads, kv, tables, q.dtype, deterministic=deterministic, groups=groups),
        "write": write_bytes(kv, group_size),
    }
    found = re.findall(r'%paged_(\w+)[.\d]* = .*?"used_scoped_memory_configs":\[{[^]]*?"size":"(\d+)"}\]', text)
    return [
        {"kernel": kernel, "used": int(used), "model": models[kernel], "limit": VMEM_BYTES} for kernel, used in found
    ]


def tokens_in_vector_memory(text):
    """Which of the new tokens that the kernel for the write is handed XLA keeps there."""
    where = dict(re.findall(r"%([\w.-]+) = (\w+\[[^ ]*) ", text))
    given = re.findall(r"%paged_write[.\w]* = .*? custom-call\(([^)]*)\)", text)
    tokens = [where[name] for names in given for name in re.findall(r"%([\w.-]+)", names)]
    return [x for x in tokens if x.partition("]")[0].count(",") == 2 and "S(1)" in x]  # pools have more axes


def pools_in_vector_memory(text, pool):
    """Which of a pool's arrays XLA brings there, and back, for some kernel."""
    shapes = {name: f"[{','.join(map(str, x.shape))}]" for name, x in pool.items()}
    return [name for name, shape in shapes.items() if re.search(re.escape(shape) + r"\{[^}]*S\(1\)\}", text)]


def program(mesh, shape, op, tokens, *, layers=1, sharded=False, dtype="bfloat16", implementation="tpu",
            block_size=BLOCK_SIZE, blocks_per_row=BLOCKS_PER_ROW, kind=None, chunk=None, tree=False,
            sink_tokens=None, cascade=False, deterministic=False, joined=False, top_k=None):  # fmt: skip
    """Compile `op` of one or more layers, one after another, on a donated pool each; bytes per chip."""
    rows = tokens[0] if len(tokens) == 2 else ROWS
    heads = "x" if sharded else None
    head_dim = (2 if joined else 1) * shape.head_dim
    rank, format = shape.head_dim if joined else shape.rank, find_format(kind)
    stored = -(-format.stored_dim(head_dim) // 128) * 128

    def array(*axes, spec=(), dtype=dtype):
        return jax.ShapeDtypeStruct(axes, dtype, sharding=NamedSharding(mesh, P(*spec)))

    token_spec = (*(None for _ in tokens), heads)
    parts = 2 if rank is None else 1
    blocks = (max(rows, ROWS) * blocks_per_row + 1, parts, shape.num_kv_heads, block_size)
    storage = dtype if kind is None else format.storage_dtype
    pool = {"kv": array(*blocks, stored, spec=(None, None, heads), dtype=storage)}
    if kind is not None:
        scales = format.scale_shape(blocks, head_dim, rank, joined)
        pool["kv_scale"] = array(*scales, spec=(None, None, heads), dtype=format.scale_dtype)
    q = array(*tokens, shape.num_heads, head_dim, spec=token_spec)
    k = array(*tokens, shape.num_kv_heads, head_dim, spec=token_spec)
    tables = array(rows, blocks_per_row, dtype="int32")
    counts = array(rows, dtype="int32")
    options = {"window": shape.window, "soft_cap": shape.soft_cap, "implementation": implementation, "kind": kind}
    options |= {} if rank is None else {"rank": rank, "scale": 0.1}
    options |= {} if chunk is None else {"chunk": chunk}
    options |= {} if sink_tokens is None else {"sink_tokens": sink_tokens}
    options |= {"deterministic": True} if deterministic else {}
    parents = {"tree": array(*tokens, dtype="int32")} if tree else {}
    parents |= {} if top_k is None else {"tokens": array(*tokens, top_k, dtype="int32")}
    parents |= {"shared": array(4, rows, dtype="int32")} if cascade else {}

    def step(q, k, pools, tables, lengths, new, tree):
        v = k if rank is None else None
        if op == "paged_attention":
            return pallas_kernels.paged_attention(
                q, tables=tables, lengths=lengths, new=new, **pools[0], **tree, **options
            )
        if op == "write_kv":
            write = functools.partial(pallas_kernels.write_kv, implementation=implementation, kind=kind, rank=rank)
            return write(k=k, v=v, tables=tables, lengths=lengths, new=new, **pools[0])
        written = []
        for given in pools:  # as a model's layers: each attends with what the last one gave
            q = jnp.pad(q, [(0, 0)] * (q.ndim - 1) + [(0, head_dim - q.shape[-1])])  # of packed rows
            arguments = dict(tables=tables, lengths=lengths, new=new, **given, **tree, **options)
            q, pool = pallas_kernels.write_and_attend(q, k, v, **arguments)
            written.append(pool)
        return q, written

    if sharded:
        pool_spec, tokens_spec = P(None, None, "x"), P(*token_spec)
        step = jax.shard_map(
            step, mesh=mesh, in_specs=(tokens_spec, tokens_spec, [pool_spec] * layers, P(), P(), P(), P()),
            out_specs=(tokens_spec, [pool_spec] * layers),
        )  # fmt: skip
    arguments = (q, k, [pool] * layers, tables, counts, counts, parents)
    donated = () if op == "paged_attention" else 2
    with jax.set_mesh(mesh):
        compiled = jax.jit(step, donate_argnums=donated).lower(*arguments).compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    chips = mesh.size if sharded else 1
    pool_bytes = sum(x.size * x.dtype.itemsize for x in pool.values())
    return {
        "pool": layers * pool_bytes // chips,
        "alias": memory.alias_size_in_bytes,
        "temp": memory.temp_size_in_bytes,
        "queries": q.size // head_dim * stored * q.dtype.itemsize // chips,  # as the kernels have them
        "new": 2 * k.size * k.dtype.itemsize,  # the keys and values handed in
        "tokens in vector memory": tokens_in_vector_memory(text),
        # Of chosen rows, as they are brought together.
        "brought": (top_k or 0) * math.prod(tokens) * pool_bytes // (blocks[0] * block_size),
        "made as large": [] if top_k is None else made_as_large(text, pool),
        "pools in vector memory": pools_in_vector_memory(text, pool),
        "collectives": len(re.findall(r"\b(?:all|reduce|collective)-(?:gather|reduce|to-all|scatter|permute)", text)),
        "kernels": text.count('custom_call_target="tpu_custom_call"'),
        # Who reads for rows together, or chosen rows, sends other queries than these, and a device of several has fewer
        # heads.
        "vector memory": []
        if cascade or sharded or top_k is not None
        else vector_memory(
            text,
            q,
            pool["kv"],
            tables,
            deterministic,
            rank // format.group_size if format.group_size else 1,
            format.group_size,
        ),
    }


def main(chip, everything=""):
    if chip == "four":
        mesh = Mesh(np.array(devices("v6e:2x2", (2, 2, 1))), ("x",))
        tokens = {"decode": (ROWS, 1)} | ({"prefill": (ROWS, 32)} if everything else {})
        programs = {
            f"sharded heads, {name}": ("llama3-8b", "write_and_attend", axes, {"sharded": True, "layers": 2})
            for name, axes in tokens.items()
        }
    else:
        mesh = Mesh(np.array(devices(TOPOLOGIES[chip], (1, 1, 1))[:1]), ("x",))  # a tpu7x chip is two
        programs = {
            "fused, chosen by the platform, small pools": (
                "llama3-8b",
                "write_and_attend",
                (ROWS, 1),
                {"implementation": None, "layers": 2, "blocks_per_row": 64},
            ),
            "fused, head_dim 64, joined": ("llama3.2-1b", "write_and_attend", (ROWS, 1), {"joined": True}),
            "write of many tokens": ("llama3-8b", "write_kv", (ROWS, 256), {}),
            "write of many tokens, small pool": ("llama3-8b", "write_kv", (ROWS, 256), {"blocks_per_row": 256}),
            "mixed, small pools": ("qwen3-30b-a3b", "write_and_attend", (64,), {"layers": 2, "blocks_per_row": 64}),
            "fused, int8": ("llama3-8b", "write_and_attend", (ROWS, 1), INT8 | {"layers": 2}),
        }
        if everything or chip == "v6e":
            programs |= {"latent, fused, int8": ("deepseek-v3", "write_and_attend", (ROWS, 1), INT8)}
        if everything:
            programs |= {
                "latent, mixed": ("deepseek-v3", "write_and_attend", (64,), {}),
                "fused, joined, int8": ("llama3.2-1b", "write_and_attend", (ROWS, 1), INT8 | {"joined": True}),
                "write of many tokens, int8": ("llama3-8b", "write_kv", (ROWS, 256), INT8),
                "fused, int4": ("llama3-8b", "write_and_attend", (ROWS, 1), INT4 | {"layers": 2}),
                "mixed, int4": ("llama3-8b", "write_and_attend", (64,), INT4),
                "write of many tokens, int4": ("llama3-8b", "write_kv", (ROWS, 256), INT4),
                "fused, k5v3": ("llama3-8b", "write_and_attend", (ROWS, 1), K5V3 | {"layers": 2}),
                "fused, head_dim 64, k5v3": ("llama3.2-1b", "write_and_attend", (ROWS, 1), K5V3),
                "mixed, k5v3": ("llama3-8b", "write_and_attend", (64,), K5V3),
                "write of many tokens, k5v3": ("llama3-8b", "write_kv", (ROWS, 256), K5V3),
                "write of many tokens, head_dim 64, k5v3": ("llama3.2-1b", "write_kv", (ROWS, 256), K5V3),
            }
        if everything:
            programs |= {
                "latent, mixed, int8": ("deepseek-v3", "write_and_attend", (64,), INT8),
                "latent, write of many tokens, int8": ("deepseek-v3", "write_kv", (ROWS, 256), INT8),
                "latent, fused": ("deepseek-v3", "write_and_attend", (ROWS, 1), {}),
                "fused, window and soft cap": ("gemma2-2b", "write_and_attend", (ROWS, 1), {}),
                "decode": ("llama3-8b", "paged_attention", (ROWS, 1), {}),
                "write": ("llama3-8b", "write_kv", (64,), {}),
                "first tokens, fused": ("gemma2-2b", "write_and_attend", (ROWS, 1), {"sink_tokens": 4}),
                "first tokens, mixed": ("gemma2-2b", "write_and_attend", (64,), {"sink_tokens": 20}),
                "first tokens, tree": ("gemma2-2b", "paged_attention", (ROWS, 40), {"sink_tokens": 4, "tree": True}),
                "first tokens, int8": ("gemma2-2b", "write_and_attend", (ROWS, 1), INT8 | {"sink_tokens": 4}),
                "prefill": ("gemma3-1b", "paged_attention", (1, 128), {}),
                "fused, head_dim 64": ("llama3.2-1b", "write_and_attend", (ROWS, 1), {}),
                "mixed, head_dim 64": ("llama3.2-1b", "write_and_attend", (64,), {}),
                "mixed, head_dim 64, joined": ("llama3.2-1b", "write_and_attend", (64,), {"joined": True}),
                "write of many tokens, joined": ("llama3.2-1b", "write_kv", (ROWS, 256), {"joined": True}),
                "rows that share, joined": (
                    "llama3.2-1b",
                    "write_and_attend",
                    (64, 1),
                    {"joined": True, "cascade": True},
                ),
                "mixed, joined, int8": ("llama3.2-1b", "write_and_attend", (64,), INT8 | {"joined": True}),
                "write of many tokens, joined, int8": (
                    "llama3.2-1b",
                    "write_kv",
                    (ROWS, 256),
                    INT8 | {"joined": True},
                ),
                "rows that share, joined, int8": (
                    "llama3.2-1b",
                    "write_and_attend",
                    (16,),
                    INT8 | {"joined": True, "cascade": True, "blocks_per_row": 256},
                ),
                "write of many tokens where attention is refused": (
                    "llama3-8b",
                    "write_kv",
                    (ROWS, 256),
                    {"implementation": None, "block_size": 8},
                ),
                "chunk, fused": ("llama3-8b", "write_and_attend", (ROWS, 1), {"chunk": 3000}),
                "tree and chunk, mixed": ("llama3-8b", "write_and_attend", (64,), {"chunk": 3000, "tree": True}),
                "chunk, prefill": ("llama3.2-1b", "paged_attention", (1, 2048), {"chunk": 8192}),
                "tree and window": ("gemma2-2b", "paged_attention", (ROWS, 40), {"tree": True}),
                "rows that share": ("llama3-8b", "write_and_attend", (64, 1), {"cascade": True, "layers": 2}),
                "rows that share, int8": ("llama3-8b", "write_and_attend", (16,), INT8 | {"cascade": True}),
                "rows that share, latent": ("deepseek-v3", "write_and_attend", (64, 1), {"cascade": True}),
                "tree, int8": ("llama3-8b", "paged_attention", (ROWS, 8), INT8 | {"tree": True}),
                "prefill, int8": ("gemma3-1b", "paged_attention", (1, 128), INT8),
                **{
                    f"chosen tokens{name}": (shape, "paged_attention", (ROWS, 1), options | {"top_k": 2048})
                    for name, shape, options in (
                        ("", "llama3-8b", {}),
                        (", int8", "llama3-8b", INT8),
                        (", int8, blocks of 32", "llama3-8b", INT8 | {"block_size": 32, "blocks_per_row": 1024}),
                        (", latent", "deepseek-v3", {}),
                        (", latent, int8", "deepseek-v3", INT8),
                        (", latent, int8, large pool", "deepseek-v3", INT8 | {"blocks_per_row": 2048}),
                    )
                },
                "float32": ("llama3-8b", "write_and_attend", (ROWS, 1), {"dtype": "float32"}),
                "deterministic": ("llama3-8b", "write_and_attend", (64,), {"deterministic": True}),
                "decode step of 16 layers": ("llama3.2-1b", "write_and_attend", (ROWS, 1), {"layers": 16}),
            }
        if chip == "tpu7x":
            programs["fused, fp8"] = ("llama3-8b", "write_and_attend", (ROWS, 1), INT8 | {"kind": "float8_e4m3fn"})
    for name, (shape, op, tokens, options) in programs.items():
        print(json.dumps({"name": name, "op": op, **program(mesh, SHAPES[shape], op, tokens, **options)}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
