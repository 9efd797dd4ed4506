"""What layers that keep a state cost: a decode step beside a copy, a prompt beside a scan token by token, and what a
further layer adds to the program of a decode step, whatever the rows.

    python benchmarks/states.py

Shapes are Qwen3-Next's: 32 heads of 128 x 128 in float32; 32 rows in decode, 2048 tokens of one row in prefill. A
decode step reads and writes every state once, and so do both copies: one writes where it reads, one into new memory.
Seconds are medians of runs side by side; CPU seconds, of all cores, say what the work is on a machine that others use.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _harness import save, table

import jaxkv
from pallas_kernels import gated_delta_rule

FREE = ("parameter(", "get-tuple-element(", "bitcast(", "tuple(", "constant(")
ROWS, TOKENS, HEADS, DIM = 32, 2048, 32, 128


def draw(rows: int, tokens: int) -> tuple[jax.Array, ...]:
    """Returns q, k, v, g and beta."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((rows, tokens, HEADS, DIM), np.float32) for _ in range(3))
    g, beta = (rng.random((rows, tokens, HEADS), np.float32) for _ in range(2))
    return tuple(map(jnp.asarray, (q, k / DIM**0.5, v, -g, beta)))


def donating(step: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    """Returns a function that runs `step(states, *arguments)` on the states of the run before."""
    compiled, held = jax.jit(step, donate_argnums=0), [jnp.zeros((ROWS + 1, HEADS, DIM, DIM), jnp.float32)]

    def run() -> Any:
        out, held[0] = compiled(held[0], *arguments)
        return out, held[0]

    return run


def decode() -> dict[str, Callable[[], Any]]:
    """Returns the contenders of a decode step."""
    new, slots = jnp.ones(ROWS, jnp.int32), jnp.arange(1, ROWS + 1, dtype=jnp.int32)
    rows, copy = jnp.ones((ROWS, HEADS, DIM, DIM), jnp.float32), jax.jit(lambda x: x + 1)

    def step(states, q, k, v, g, beta):
        return gated_delta_rule(q, k, v, g, beta, states, slots, 50 * new, new)

    return {
        "copy in place": donating(lambda states: ((), states + 1)),
        "copy": lambda: copy(rows),
        "decode": donating(step, *draw(ROWS, 1)),
    }


def prefill() -> dict[str, Callable[[], Any]]:
    """Returns the contenders of a prompt."""
    inputs, slots, count = draw(1, TOKENS), jnp.zeros(1, jnp.int32), jnp.full(1, TOKENS, jnp.int32)
    states = jnp.zeros((1, HEADS, DIM, DIM), jnp.float32)
    chunks = jax.jit(lambda states, *inputs: gated_delta_rule(*inputs, states, slots, count, count))

    @jax.jit
    def scan(state, *inputs):
        def body(state, token):
            q, k, v, g, beta = token
            state = state * jnp.exp(g)[..., None, None]
            lacks = (v - jnp.einsum("hk,hkv->hv", k, state)) * beta[..., None]
            state = state + k[..., None] * lacks[..., None, :]
            return state, jnp.einsum("hk,hkv->hv", q, state)

        return jax.lax.scan(body, state[0], tuple(x[0] for x in inputs))

    return {"token by token": lambda: scan(states, *inputs), "chunks": lambda: chunks(states, *inputs)}


def measure(contenders: dict[str, Callable[[], Any]], repeats: int) -> list[dict[str, Any]]:
    """Returns a row of each contender, with its speed as a multiple of the first one's."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for run in contenders.values():
        jax.block_until_ready(run())  # compile
    for _ in range(repeats):
        for name, run in contenders.items():
            start = time.perf_counter(), time.process_time()
            jax.block_until_ready(run())
            seconds[name].append((time.perf_counter() - start[0], time.process_time() - start[1]))
    medians = {name: [statistics.median(x) for x in zip(*times, strict=True)] for name, times in seconds.items()}
    first = next(iter(medians.values()))
    return [
        {"name": name, "ms": 1e3 * wall, "speed": first[0] / wall, "CPU ms": 1e3 * cpu, "by CPU ms": first[1] / cpu}
        for name, (wall, cpu) in medians.items()
    ]


def compile_decode(num_layers: int, rows: int) -> dict[str, float]:
    """Returns the size of a decode step of attention and gated delta nets, and the CPU seconds to compile it."""
    states = {"conv": ((2 * 128 + 128, 3), "bfloat16"), "state": ((4, 32, 32), "float32")}
    layers = jaxkv.LayerConfig(num_kv_heads=1, head_dim=32), *[jaxkv.LayerConfig.recurrent(**states)] * num_layers
    config = jaxkv.CacheConfig(layers=layers, max_seqs=rows, max_seq_len=256, num_blocks=16 * rows)
    cache = jax.eval_shape(lambda: jaxkv.init(config))

    def step(cache, x, weight, g):
        cache = jaxkv.extend(cache, jnp.ones(rows, jnp.int32))
        for layer in range(1, num_layers + 1):
            x, cache = jaxkv.causal_conv(x, weight, cache, layer, activation="silu")
            q, k, v = (y.reshape(rows, 1, 4, 32) for y in jnp.split(x, 3, axis=-1))
            y, cache = jaxkv.gated_delta_rule(q, k, v, g, -g, cache, layer)
            x = jnp.concatenate([y.reshape(rows, 1, -1)] * 3, axis=-1)
        return x, cache

    x, g = (jax.ShapeDtypeStruct((rows, 1, n), jnp.float32) for n in (384, 4))
    lowered = jax.jit(step, donate_argnames="cache").lower(cache, x, jax.ShapeDtypeStruct((384, 4), jnp.float32), g)
    start = time.process_time()
    lines = lowered.compile().as_text().splitlines()
    seconds = time.process_time() - start
    entry = lines[next(i for i, line in enumerate(lines) if line.startswith("ENTRY")) + 1 :]
    operations = [line for line in entry if " = " in line and not any(f" {name}" in line for name in FREE)]
    return {"operations": len(operations), "HLO lines": len(lines), "compile s": seconds}


def further_layer() -> list[dict[str, Any]]:
    """Returns what each of four further layers adds, by the rows of the cache."""
    compile_decode(1, 4)  # what is done once in a process
    rows = []
    for count in (8, 64):
        few, many = compile_decode(1, count), compile_decode(5, count)
        rows.append({"rows": count} | {f"{name} a layer": (many[name] - few[name]) / 4 for name in few})
    return rows


def main() -> None:
    """Measures, prints and saves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    repeats = parser.parse_args().repeats
    rows = {"further layer": further_layer()}
    rows |= {"decode": measure(decode(), repeats), "prefill": measure(prefill(), max(3, repeats // 4))}
    for name, found in rows.items():
        print(f"\n{name}")
        table(found)
    save("states", rows, rows_at_once=ROWS, tokens=TOKENS, heads=HEADS, dim=DIM)


if __name__ == "__main__":
    main()
