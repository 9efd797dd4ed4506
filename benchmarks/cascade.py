"""A decode step of rows that begin with the same blocks: read once, and by every row.

    python benchmarks/cascade.py

`once` is a step planned with `cascade=True`, `alone` one without; `attend` of both, in XLA, is timed side by side, and
planning apart. Prefixes of 0 say what it costs where nothing is shared. Then what it adds to a layer's program.
"""

import argparse
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _harness import save, table, time_side_by_side

import jaxkv

KV_HEADS, HEAD_DIM = 4, 64
GROUP = 2


def forked(rows: int, prefix: int, tail: int, num_layers: int = 1) -> jaxkv.Cache:
    """Rows of a common prefix and a tail each, before their next token."""
    block_size, draw = 16, np.random.default_rng(0)
    tail_blocks = -(-(tail + 1) // block_size) + 1
    sizes = dict(num_layers=num_layers, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, max_seqs=rows, dtype="float32")
    num_blocks = prefix // block_size + rows * tail_blocks
    length = prefix + tail_blocks * block_size
    config = jaxkv.CacheConfig.uniform(**sizes, max_seq_len=length, num_blocks=num_blocks, block_size=block_size)

    def tokens(count: int) -> jax.Array:
        one = jnp.asarray(draw.standard_normal((1, count, KV_HEADS, HEAD_DIM), np.float32))
        return jnp.broadcast_to(one, (num_layers, *one.shape[1:]))

    cache, first = jaxkv.init(config), np.zeros(rows, np.int32)
    if prefix:
        first[0] = prefix
        cache = jaxkv.append(cache, tokens(prefix), tokens(prefix), first)
        cache = jaxkv.fork(cache, 0, list(range(1, rows)))
    cache = jaxkv.append(cache, tokens(rows * tail), tokens(rows * tail), np.full(rows, tail))
    return jaxkv.extend(cache, np.ones(rows, np.int32))


def measure(rows: int, prefix: int, tail: int, repeats: int) -> dict[str, Any]:
    """Times, and what they come to."""
    cache = forked(rows, prefix, tail)
    axes = (rows, 1)
    q = jnp.asarray(np.random.default_rng(1).standard_normal((*axes, GROUP * KV_HEADS, HEAD_DIM)), jnp.float32)
    plan = jax.jit(lambda cache, cascade: jaxkv.plan_step(cache, axes, cascade=cascade), static_argnums=1)
    once, alone = (plan(cache, cascade) for cascade in (True, False))
    attend = jax.jit(lambda q, cache, step: jaxkv.attend(q, cache, layer=0, step=step, implementation="xla"))
    seconds = time_side_by_side(
        {
            "once": lambda: attend(q, cache, once), "alone": lambda: attend(q, cache, alone),
            "plan": lambda: plan(cache, True), "plan alone": lambda: plan(cache, False),
        }, repeats,
    )  # fmt: skip
    error = jnp.abs(attend(q, cache, once) - attend(q, cache, alone)).max()
    return {
        "prefix": prefix, "tail": tail, "once ms": seconds["once"] * 1e3, "alone ms": seconds["alone"] * 1e3,
        "alone / once": seconds["alone"] / seconds["once"],
        "bytes, % of alone": 100 * once.bytes_read / alone.bytes_read,
        "plan ms more": (seconds["plan"] - seconds["plan alone"]) * 1e3, "largest difference": float(error),
    }  # fmt: skip


def compiled(num_layers: int, cascade: bool) -> dict[str, float]:
    """Lines of optimised HLO and CPU seconds of a step's program."""
    sizes = dict(num_layers=num_layers, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, max_seqs=64, dtype="float32")
    config = jaxkv.CacheConfig.uniform(**sizes, max_seq_len=2048, num_blocks=1024)
    cache = jax.eval_shape(lambda: jaxkv.init(config))

    def step(q, k, cache):
        cache = jaxkv.extend(cache, jnp.ones(64, jnp.int32))
        plan = jaxkv.plan_step(cache, (64, 1), cascade=cascade)
        for i in range(num_layers):
            q, cache = jaxkv.attention(q, k, k, cache, layer=i, step=plan)
        return q, cache

    q, k = (jax.ShapeDtypeStruct((64, 1, heads, HEAD_DIM), jnp.float32) for heads in (GROUP * KV_HEADS, KV_HEADS))
    lowered = jax.jit(step, donate_argnames="cache").lower(q, k, cache)
    began = time.process_time()
    program = lowered.compile()
    return {"compile s": time.process_time() - began, "HLO lines": len(program.as_text().splitlines())}


def added(cascade: bool) -> dict[str, Any]:
    """What each layer after the second adds."""
    few, many = (compiled(n, cascade) for n in (2, 6))
    return {"cascade": cascade} | {f"{key} a layer": (many[key] - few[key]) / 4 for key in few}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    points = [(0, 256), (0, 1024), (64, 256), (512, 256), (2048, 256), (8192, 256), (32768, 256)]
    results = [measure(arguments.rows, *point, arguments.repeats * (5 if not point[0] else 1)) for point in points]
    table(results)
    compiled(2, True)  # what is done once in a process
    programs = [added(cascade) for cascade in (False, True)]
    table(programs)
    save("cascade", {"steps": results, "programs": programs}, max_seqs=arguments.rows, repeats=arguments.repeats)


if __name__ == "__main__":
    main()
