"""What each further layer adds to the program of a step, and to the time to compile it.

    python benchmarks/layers.py

Nothing runs: the step of a cache of shapes alone is compiled, with layers one after another and in a scan. Operations
are those of the entry computation that move or compute something; lines are those of all optimised HLO. Times are CPU
seconds of this process.
"""

import argparse
import time
from typing import Any

import jax
import jax.numpy as jnp
from _harness import save, table

import jaxkv

ROWS, HEADS, KV_HEADS, HEAD_DIM = 8, 32, 8, 128
# Token axes, and the most tokens of one row where that is known.
STEPS: dict[str, tuple[tuple[int, ...], int | None]] = {
    "padded decode": ((ROWS, 1), None), "packed decode": ((ROWS,), 1), "packed chunk": ((64,), None),
}  # fmt: skip
FREE = ("parameter(", "get-tuple-element(", "bitcast(", "tuple(", "constant(")


def compile_step(num_layers: int, axes: tuple[int, ...], longest: int | None, *, scan: bool) -> dict[str, Any]:
    """Compile a step in which each layer attends to what the one before it gave."""
    layer = jaxkv.LayerConfig(num_kv_heads=KV_HEADS, head_dim=HEAD_DIM)
    config = jaxkv.CacheConfig(
        layers=(layer,) * num_layers, max_seqs=ROWS, max_seq_len=2048, num_blocks=1024, stacked=scan
    )
    cache = jax.eval_shape(lambda: jaxkv.init(config))

    def step(q, k, v, counts, cache):
        cache = jaxkv.extend(cache, counts)
        plan = jaxkv.plan_step(cache, axes, longest=longest)

        def one(carry, i):
            q, cache = carry
            return jaxkv.attention(q, k, v, cache, layer=i, step=plan), None

        if scan:
            return jax.lax.scan(one, (q, cache), jnp.arange(num_layers, dtype=jnp.int32))[0]
        for i in range(num_layers):
            (q, cache), _ = one((q, cache), i)
        return q, cache

    q, kv = (jax.ShapeDtypeStruct((*axes, heads, HEAD_DIM), jnp.bfloat16) for heads in (HEADS, KV_HEADS))
    counts = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
    lowered = jax.jit(step, donate_argnames="cache").lower(q, kv, kv, counts, cache)
    began = time.process_time()
    compiled = lowered.compile()
    seconds = time.process_time() - began
    lines = compiled.as_text().splitlines()
    entry = lines[next(i for i, line in enumerate(lines) if line.startswith("ENTRY")) + 1 :]
    operations = [line for line in entry if " = " in line and not any(f" {name}" in line for name in FREE)]
    return {
        "operations": len(operations), "HLO lines": len(lines), "compile s": seconds,
        "scratch MB": compiled.memory_analysis().temp_size_in_bytes / 1e6,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8, help="of the deeper of the two programs compared")
    parser.add_argument("--deep", type=int, default=28, help="layers of the scan")
    arguments = parser.parse_args()
    compile_step(2, *STEPS["padded decode"], scan=False)  # what is done once in a process
    rows = []
    for name, step in STEPS.items():
        few, many = (compile_step(n, *step, scan=False) for n in (2, arguments.layers))
        added = {
            f"{key} a layer": (many[key] - few[key]) / (arguments.layers - 2) for key in few if key != "scratch MB"
        }
        few, deep = (compile_step(n, *step, scan=True) for n in (2, arguments.deep))
        added |= {f"scan: {key}, x of 2 layers": deep[key] / few[key] for key in ("HLO lines", "compile s")}
        rows.append({"step": name, **added, "scan: scratch MB": deep["scratch MB"]})
    table(rows)
    save("layers", rows, layers=arguments.layers, deep=arguments.deep, shape=[ROWS, HEADS, KV_HEADS, HEAD_DIM])


if __name__ == "__main__":
    main()
