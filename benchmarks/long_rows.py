"""What short rows cost by how long they may become: a step, `extend`, `free` and eviction, and the bytes of tables.

    python benchmarks/long_rows.py

All of it should be the same in each line of a table.
"""

from typing import Any

import jax
import jax.numpy as jnp
from _harness import save, table, time_side_by_side

import jaxkv

LENGTHS = (4096, 131_072, 1_048_576)
ROWS, MANY_ROWS = 16, 64


def make(max_seq_len: int, rows: int, **fields: Any) -> jaxkv.Cache:
    """A cache of short rows, with five blocks for each."""
    layer = jaxkv.LayerConfig(num_kv_heads=2, head_dim=16, **fields)
    return jaxkv.init(
        jaxkv.CacheConfig(layers=(layer,), max_seqs=rows, max_seq_len=max_seq_len, num_blocks=5 * rows, dtype="float32")
    )


def filled(cache: jaxkv.Cache, tokens: int) -> jaxkv.Cache:
    kv = jnp.ones((1, cache.config.max_seqs, tokens, 2, 16))
    return jaxkv.append(cache, kv, kv)


def measure(max_seq_len: int, repeats: int) -> dict[str, Any]:
    """Milliseconds of each function for rows that may have so many tokens."""
    window = filled(make(max_seq_len, ROWS, window=32, sink_tokens=4), 25)
    whole, evicts = make(max_seq_len, MANY_ROWS), filled(make(max_seq_len, ROWS, evict="layer"), 60)
    q, kv, one = jnp.ones((ROWS, 1, 4, 16)), jnp.ones((ROWS, 1, 2, 16)), jnp.ones(MANY_ROWS, jnp.int32)

    @jax.jit
    def step(cache: jaxkv.Cache) -> Any:
        return jaxkv.attention(q, kv, kv, jaxkv.extend(cache, one[:ROWS]), layer=0)

    @jax.jit
    def thin(cache: jaxkv.Cache) -> jaxkv.Cache:
        return jaxkv.evict(cache, scores=jaxkv.scores.keydiff(cache, layer=0), budget=20, layer=0)

    extend, free = jax.jit(jaxkv.extend), jax.jit(jaxkv.free)
    everyone, held = one > 0, extend(whole, one)
    seconds = time_side_by_side(
        {
            "step of a window": lambda: step(window), f"extend {MANY_ROWS} rows": lambda: extend(whole, one),
            "free them": lambda: free(held, everyone), "evict": lambda: thin(evicts),
        },
        repeats,
    )  # fmt: skip
    size = sum(x.nbytes for x in jax.tree.leaves(window.tables))
    return {f"{name}, ms": 1e3 * s for name, s in seconds.items()} | {"tables, bytes": size}


def long_rows(requests: int, facts: dict[str, Any]) -> list[dict[str, Any]]:
    """For `serving.py`."""
    return [{"max_seq_len": n} | measure(n, max(20, requests // 3)) for n in LENGTHS]


if __name__ == "__main__":
    found = long_rows(300, {})
    table(found)
    save("long_rows", found)
