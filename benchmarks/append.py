"""What it costs to store a step's tokens, as the pool grows: nothing more, if no step copies it.

    python benchmarks/append.py

Each contender appends tokens to a cache of its own, jitted and donated, in pools that differ only in num_blocks.
"""

import argparse

import jax
import jax.numpy as jnp
from _harness import save, table, time_side_by_side

import jaxkv

ROWS = 8
LAYERS = (jaxkv.LayerConfig(num_kv_heads=4, head_dim=64),) * 2
# Token axes, and how many tokens each row adds.
STEPS = {
    "decode": ((ROWS, 1), [1] * ROWS),
    "padded": ((ROWS, 16), [16] * ROWS),
    "packed": ((40,), [1] * (ROWS - 1) + [33]),
}


def contender(num_blocks: int, step: str, steps_per_run: int):
    """What appends to a cache of its own, and what makes sure at the end that every step did write."""
    axes, new = STEPS[step]
    config = jaxkv.CacheConfig(layers=LAYERS, max_seqs=ROWS, max_seq_len=4096, num_blocks=num_blocks)
    k = v = [jnp.ones((*axes, layer.num_kv_heads, layer.head_dim), config.dtype) for layer in LAYERS]
    num_tokens = jnp.array(new, jnp.int32)
    append = jax.jit(jaxkv.append, donate_argnames="cache")
    cache = jaxkv.init(config)

    def run():
        nonlocal cache
        for _ in range(steps_per_run):
            cache = append(cache, k, v, num_tokens)
        return cache

    def finish():
        jaxkv.check(cache)  # raises if a step was refused
        return config.bytes

    return run, finish


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-blocks", type=int, default=1024, help="of the smallest pool")
    parser.add_argument("--growth", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--steps-per-run", type=int, default=4)
    arguments = parser.parse_args()
    rows = []
    for step in STEPS:
        sizes = {growth: arguments.num_blocks * growth for growth in arguments.growth}
        made = {str(growth): contender(size, step, arguments.steps_per_run) for growth, size in sizes.items()}
        seconds = time_side_by_side({name: run for name, (run, _) in made.items()}, arguments.repeats)
        smallest = seconds[str(arguments.growth[0])]
        for growth, size in sizes.items():
            rows.append({
                "step": step, "blocks": size, "pool MiB": made[str(growth)][1]() / 2**20,
                "us per step": seconds[str(growth)] / arguments.steps_per_run * 1e6,
                "x smallest": seconds[str(growth)] / smallest,
            })  # fmt: skip
    table(rows)
    save("append", rows, rows_per_step=ROWS, layers=len(LAYERS), repeats=arguments.repeats)


if __name__ == "__main__":
    main()
