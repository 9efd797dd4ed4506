"""Holds the model of vector and scalar memory against the compiler: `python tpu_memory.py v5p 20` for 20 shapes.

Each shape is compiled as a caller would have it, and must be: the compiler itself refuses what takes too much of either
memory. What it gave each kernel stands in the compiled program. A line of JSON a shape.
"""

from tpu_programs import TOPOLOGIES, devices, vector_memory  # first of all, for it sets the environment up

# isort: split
import json
import math
import random
import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import pallas_kernels
from pallas_kernels.common.quantization import find_format

# KV heads, group, head_dim, dtype, block_size, rows, blocks per row, token axes of q, what else there is.
EDGES = [
    (32, 3, 256, "float32", 16, 8, 64, (3000,), {}),
    (8, 4, 128, "bfloat16", 16, 61, 4096, (131072,), {}),
    (16, 7, 256, "bfloat16", 16, 8, 64, (3000,), {}),
    (64, 8, 256, "float32", 16, 8, 64, (8, 5), {}),
    (8, 4, 128, "bfloat16", 16, 240, 1024, (240, 1), {}),
    (8, 4, 128, "bfloat16", 16, 120, 2070, (3000,), {}),
    (1, 128, 640, "bfloat16", 64, 32, 64, (32, 1), {"rank": 512}),
    (1, 128, 640, "bfloat16", 128, 32, 64, (600,), {"rank": 512, "kind": "int8"}),
]
OPTIONS = [{"soft_cap": 20.0}, {"window": 300}, {"tree": True}, {"sinks": True}, {"return_lse": True}]


def shapes(chip, count):
    """The edges, and then some that chance picks: for a chip always the same, for another chip others."""
    yield from EDGES[:count]
    rng = random.Random(chip)
    for _ in range(count - len(EDGES)):
        rows = rng.choice([1, 8, 40, 200])
        tokens = rng.choice([(rows, 1), (rows, 3), (rows, 40), (20,), (100,), (3000,)])
        heads, group = rng.choice([1, 2, 3, 4, 8, 16, 32]), rng.choice([1, 2, 3, 4, 5, 7, 8, 16])
        head_dim, dtype = rng.choice([128, 256]), rng.choice(["bfloat16", "float32"])
        block_size, options = rng.choice([16, 32, 48, 128, 256]), {}
        for option in rng.sample(OPTIONS, 2):
            options |= option
        if rng.random() < 0.3:
            options["kind"], block_size = rng.choice(["int8", "float8_e4m3fn"]), rng.choice([128, 256])
        if rng.random() < 0.2:
            heads, group, head_dim, options["rank"] = 1, rng.choice([16, 64, 128]), 640, 512
        elif rng.random() < 0.3:  # keys and values joined
            options["rank"] = head_dim // 2
        yield heads, group, head_dim, dtype, block_size, rows, rng.choice([4, 64, 512]), tokens, options


def main(chip, count):
    mesh = Mesh(np.array(devices(TOPOLOGIES[chip], (1, 1, 1))[:1]), ("x",))
    whole = NamedSharding(mesh, PartitionSpec())
    for num_kv_heads, group, head_dim, dtype, block_size, rows, blocks, tokens, options in shapes(chip, int(count)):
        static = dict(options)
        tree, sinks = static.pop("tree", False), static.pop("sinks", False)
        kind, rank = options.get("kind"), options.get("rank")

        def array(*axes, dtype=dtype):
            return jax.ShapeDtypeStruct(axes, dtype, sharding=whole)

        q, k = (array(*tokens, heads, head_dim) for heads in (group * num_kv_heads, num_kv_heads))
        block = (2 if rank is None else 1, num_kv_heads, block_size)
        joined = rank is not None and rank < 512  # then its scales are of keys and of values
        # A pool that is written beside one that is kept must fit into a chip's memory.
        pool = (min(2000, 2**30 // (4 * head_dim * math.prod(block))), *block)
        counts = array(rows, dtype="int32")
        scales = find_format(kind).scale_shape(pool, head_dim, rank, joined)
        arrays = {
            "q": q, "k": k, "v": k if rank is None else None, "tables": array(rows, blocks, dtype="int32"),
            "kv": array(*pool, head_dim, dtype=dtype if kind is None else find_format(kind).storage_dtype),
            "kv_scale": None if kind is None else array(*scales, dtype="float32"),
            "lengths": counts, "new": counts, "tree": array(*tokens, dtype="int32") if tree else None,
            "sinks": array(q.shape[-2], dtype="float32") if sinks else None,
        }  # fmt: skip
        static["scale"] = 0.1

        def step(arrays, static=static):
            return pallas_kernels.write_and_attend(**arrays, **static)

        jax.clear_caches()
        name = f"{num_kv_heads} x {group} x {head_dim}, {dtype}, {rows} x {blocks} blocks of {block_size}, {tokens}"
        with jax.set_mesh(mesh):
            chosen = pallas_kernels.explain("write_and_attend", **arrays, **static).implementation
            text = ""
            if chosen == "tpu" or tokens[-1] < 100:  # XLA's form of a long step is not what is tested
                text = jax.jit(step).lower(arrays).compile().as_text()
        kernels = vector_memory(text, q, arrays["kv"], arrays["tables"]) if chosen == "tpu" else []
        print(json.dumps({"name": f"{name}, {options}", "chosen": chosen, "kernels": kernels}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
