"""Who is served when, and what the host does for it: long prompts that wait, that begin alike, and short ones beside
them.

    python benchmarks/serving_order.py

The model attends to nothing, so what is counted and measured is the engine's own work.
"""

import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
from _harness import save, table

import jaxkv

WAITING = (1024, 8192, 32768)  # tokens that one who waits has in common with one who decodes


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Next:
    """Says token + 1, and attends to nothing."""

    dtype = "float32"
    layer_configs = (jaxkv.LayerConfig(num_kv_heads=1, head_dim=2),)

    def __call__(self, tokens: jax.Array, cache: Any, logits_at: jax.Array) -> tuple[jax.Array, Any]:
        kv = jnp.broadcast_to(tokens.astype(jnp.float32)[..., None, None], (*tokens.shape, 1, 2))
        cache, logits = jaxkv.write(cache, kv, kv, layer=0), jax.nn.one_hot((tokens + 1) % 97, 97)
        return (logits[:, 0] if tokens.ndim == 2 else logits[logits_at]), cache


def count_steps(engine: jaxkv.Engine, request: Any, tokens: int = 1) -> int:
    steps = 0
    while len(request.tokens) < tokens:
        engine.step()
        steps += 1
    return steps


def measure_step(engine: jaxkv.Engine, count: int = 30) -> float:
    """ms."""
    began = time.perf_counter()
    for _ in range(count):
        engine.step()
    return (time.perf_counter() - began) / count * 1e3


def waiting() -> list[dict[str, Any]]:
    """Host time of a step while a prompt waits that begins like one that decodes."""
    rows = []
    for length in WAITING:
        blocks = 2 * length // 16 + 40
        engine = jaxkv.Engine(
            Next(), max_seqs=4, max_seq_len=131072, num_blocks=blocks, prefix_cache=True, step_tokens=8192
        )
        known = [i % 97 for i in range(length)]
        running = [engine.submit(known, 300), engine.submit([7] * 480, 300)]
        while not all(request.tokens for request in running):
            engine.step()
        alone = measure_step(engine)
        engine.submit(known + [5] * (length + 480), 10)
        measure_step(engine, 3)
        rows.append({
            "tokens in common": length, "ms a step, alone": alone, "ms a step, one waits": measure_step(engine),
        })  # fmt: skip
        assert not any(request.done for request in running)
    return rows


def beginning_alike() -> list[dict[str, Any]]:
    """Eight prompts of 98 tokens, of which 96 are the same, submitted at once."""
    rows = []
    for step_tokens in (32, 128, 1024):
        engine = jaxkv.Engine(
            Next(), max_seqs=8, max_seq_len=128, block_size=4, prefix_cache=True, step_tokens=step_tokens
        )
        for i in range(8):
            engine.submit([*range(96), i, 5], 1)
        list(engine.run())
        rows.append({"step_tokens": step_tokens, "computed": engine.tokens, "shared": 112, "not shared": 784})
    return rows


def fairness() -> list[dict[str, Any]]:
    """Steps until a small request is served behind large ones."""
    rows = []
    for share in (None, 32):
        engine = jaxkv.Engine(
            Next(), max_seqs=4, max_seq_len=2048, num_blocks=256, step_tokens=32, long_prefill_tokens=share
        )
        engine.submit([9] * 4, 100)
        long, short = engine.submit([5] * 1500, 4), engine.submit([6] * 8, 4)
        steps = count_steps(engine, short)
        rows.append({
            "behind": "a prompt of 1,500", "long_prefill_tokens": share or "default", "to the first token of 8": steps,
            "to the long one's": steps + count_steps(engine, long),
        })  # fmt: skip
    engine = jaxkv.Engine(Next(), max_seqs=4, max_seq_len=128, block_size=4, num_blocks=40)
    engine.submit([1] * 60, 60)
    for _ in range(4):
        engine.step()
    long, short = engine.submit([2] * 100, 4), engine.submit([3] * 8, 4)
    steps = count_steps(engine, short, 4)
    rows.append({
        "behind": "26 blocks, for which there is no room", "long_prefill_tokens": "default",
        "to the first token of 8": steps, "to the long one's": steps + count_steps(engine, long),
    })  # fmt: skip
    return rows


def main() -> None:
    tables = {}
    for part in (waiting, beginning_alike, fairness):
        tables[part.__name__] = part()
        print(f"\n{part.__name__}\n")
        table(tables[part.__name__])
    save("serving_order", tables)


if __name__ == "__main__":
    main()
