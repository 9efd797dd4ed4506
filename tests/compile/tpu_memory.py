"""Holds the model of vector and scalar memory against the compiler: `python tpu_memory.py v5p 20` for 20 shapes.

Each shape is compiled as a caller would have it, and must be; and its kernels once more with no vector memory allowed,
for then the compiler says how much they want. A line of JSON a kernel.
"""

from tpu_programs import TOPOLOGIES, devices  # first of all, for it sets the environment up

# isort: split
import importlib
import json
import random
import re
import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import pallas_kernels
from pallas_kernels.tpu import support

KERNELS = {name: importlib.import_module(f"pallas_kernels.tpu.{name}") for name in ("decode", "prefill", "write")}
# KV heads, group, head_dim, dtype, block_size, rows, blocks per row, token axes of q.
EDGES = [
    (32, 3, 256, "float32", 16, 8, 64, (3000,)),
    (8, 4, 128, "bfloat16", 16, 61, 4096, (131072,)),
    (16, 7, 256, "bfloat16", 16, 8, 64, (3000,)),
    (64, 8, 256, "float32", 16, 8, 64, (8, 5)),
    (8, 4, 128, "bfloat16", 16, 240, 1024, (240, 1)),
]


def shapes(count):
    """The edges, and then some that chance picks: always the same."""
    yield from EDGES[:count]
    rng = random.Random(0)
    for _ in range(count - len(EDGES)):
        rows = rng.choice([1, 8, 40, 200])
        tokens = rng.choice([(rows, 1), (rows, 3), (rows, 40), (20,), (100,), (3000,)])
        yield (
            rng.choice([1, 2, 3, 4, 8, 16, 32]), rng.choice([1, 2, 3, 4, 5, 7, 8, 16]), rng.choice([128, 256]),
            rng.choice(["bfloat16", "float32"]), rng.choice([16, 32, 48, 128, 256]), rows, rng.choice([4, 64, 512]),
            tokens,
        )  # fmt: skip


def main(chip, count):
    mesh = Mesh(np.array(devices(TOPOLOGIES[chip], (1, 1, 1))[:1]), ("x",))
    whole = NamedSharding(mesh, PartitionSpec())
    limits = {name: kernel.VMEM_BYTES for name, kernel in KERNELS.items()}
    for num_kv_heads, group, head_dim, dtype, block_size, rows, blocks, tokens in shapes(int(count)):

        def array(*axes, dtype=dtype):
            return jax.ShapeDtypeStruct(axes, dtype, sharding=whole)

        q, k = (array(*tokens, heads, head_dim) for heads in (group * num_kv_heads, num_kv_heads))
        kv, tables = array(2000, 2, num_kv_heads, block_size, head_dim), array(rows, blocks, dtype="int32")
        counts = array(rows, dtype="int32")

        def step(q, k, kv, *rest):
            return pallas_kernels.write_and_attend(q, k, k, kv, *rest)

        def compile_it(step=step, arguments=(q, k, kv, tables, counts, counts)):
            jax.clear_caches()
            with jax.set_mesh(mesh):
                jax.jit(step, donate_argnums=2).lower(*arguments).compile()

        name = f"{num_kv_heads} x {group} x {head_dim}, {dtype}, {rows} x {blocks} blocks of {block_size}, {tokens}"
        with jax.set_mesh(mesh):
            chosen = pallas_kernels.explain("write_and_attend", q=q, k=k, v=k, kv=kv, tables=tables).implementation
        if chosen == "tpu" or tokens[-1] < 100:  # XLA's form of a long step is not what is tested
            compile_it()
        if chosen != "tpu":
            print(json.dumps({"name": name, "chosen": chosen}), flush=True)
            continue
        models = {
            "decode": KERNELS["decode"].decode_bytes(rows, group * num_kv_heads, kv, tables),
            "prefill": support.vector_memory(q, kv, tables),
            "write": KERNELS["write"].write_bytes(kv),
        }
        for kernel, model in models.items():
            for other, limit in limits.items():
                KERNELS[other].VMEM_BYTES = 1 if other == kernel else limit
            try:
                compile_it()
            except jax.errors.JaxRuntimeError as error:
                number, unit = re.search(r"Scoped allocation with size ([\d.]+)([BKMG])", str(error)).groups()
                used = float(number) * 1024 ** "BKMG".index(unit)
                facts = {"kernel": kernel, "model": model, "used": int(used), "limit": limits[kernel]}
                print(json.dumps({"name": name, "chosen": chosen, **facts}), flush=True)
            finally:
                for other, limit in limits.items():
                    KERNELS[other].VMEM_BYTES = limit


if __name__ == "__main__":
    main(*sys.argv[1:])
