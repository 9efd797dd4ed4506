"""Decode steps of a cache that keeps less, and of one that reads less.

    python benchmarks/evict.py

Keeping less: rows of 2,048 tokens of which a quarter is kept, whole tokens (`layer`) or of each KV head its own, 5 to
45 % (`head`), beside the same rows in full and rows that never held more (`short`). Reading less: rows of 32,768 tokens
of which Quest reads 2,048, blocks chosen in the step by bounds that the caller keeps beside the cache, that the cache
keeps (`bounds=True`), or that are made of all keys anew. A step is `extend`, the write and
attention of one layer, 32/8 heads of 128 in float32, the cache donated. Times are of steps side by side; compiling is
in CPU seconds of this process; `short` has the program of what is read in full.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _harness import save, table, time_side_by_side

import jaxkv

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
ROOM = 64  # for the tokens of the steps


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


def filled(rows: int, tokens: int, places: int, evict: str | None = None, bounds: bool = False) -> jaxkv.Cache:
    """Rows of so many tokens, in a cache with room for `places`."""
    layer = jaxkv.LayerConfig(num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, evict=evict, bounds=bounds)
    sizes = dict(max_seqs=rows, max_seq_len=places + ROOM, max_tokens=rows * (places + ROOM), block_size=BLOCK_SIZE)
    cache = jaxkv.init(jaxkv.CacheConfig(layers=(layer,), **sizes, dtype="float32"))
    k, v = (normal(seed, 1, rows, tokens, KV_HEADS, HEAD_DIM) for seed in (0, 1))
    return jax.jit(jaxkv.append, donate_argnums=0)(cache, k, v, np.full(rows, tokens, np.int32))


def full_step(q, k, v, state):
    cache = jaxkv.extend(state[0], jnp.ones(q.shape[0], jnp.int32))
    out, cache = jaxkv.attention(q, k, v, cache, layer=0)
    return out, (cache,)


def quest_step(num_blocks: int, beside: bool = False) -> Callable:
    """A step that reads so many blocks. `beside`: the caller keeps the bounds, beside the cache."""

    def step(q, k, v, state):
        cache, *bounds = state
        cache = jaxkv.extend(cache, jnp.ones(q.shape[0], jnp.int32))
        cache = jaxkv.write(cache, k, v, layer=0)
        if beside:
            bounds = [jaxkv.block_bounds(cache, layer=0, bounds=bounds[0], last=2)]
        blocks = jaxkv.scores.quest(cache, layer=0, q=q, num_blocks=num_blocks, bounds=bounds[0] if beside else None)
        return jaxkv.attend(q, cache, layer=0, blocks=blocks), (cache, *bounds)

    return step


class Stepper:
    """A compiled step that goes on from where it was, and what compiling took."""

    def __init__(self, step: Callable, rows: int, *state: Any):
        self.inputs = (normal(2, rows, 1, HEADS, HEAD_DIM), *(normal(s, rows, 1, KV_HEADS, HEAD_DIM) for s in (3, 4)))
        self.state = state
        lowered = jax.jit(step, donate_argnums=3).lower(*self.inputs, state)
        began = time.process_time()
        self.program = lowered.compile()
        self.compile_seconds = time.process_time() - began

    def __call__(self) -> jax.Array:
        out, self.state = self.program(*self.inputs, self.state)
        return out


def thin(cache: jaxkv.Cache, keep: np.ndarray) -> tuple[jaxkv.Cache, float, float]:
    """The cache thinned, and what compiling and evicting took."""
    lowered = jax.jit(lambda cache, keep: jaxkv.evict(cache, keep, layer=0), donate_argnums=0).lower(cache, keep)
    began = time.process_time()
    program = lowered.compile()
    compiled = time.process_time() - began
    began = time.perf_counter()
    cache = jax.block_until_ready(program(cache, keep))
    return cache, compiled, time.perf_counter() - began


def keep_less(rows: int, tokens: int, repeats: int) -> list[dict[str, Any]]:
    draw = np.random.default_rng(5)
    shares = {
        "layer": np.full((rows, 1), 0.25),
        "head": np.stack([draw.permutation(np.linspace(0.05, 0.45, KV_HEADS)) for _ in range(rows)]),
    }
    caches = {"full": filled(rows, tokens, tokens), "short": filled(rows, tokens // 4, tokens)}
    facts: dict[str, dict[str, float]] = {name: {} for name in (*caches, *shares)}
    for kind, share in shares.items():
        rank = np.argsort(draw.random((*share.shape, tokens)), axis=-1)
        keep = rank < np.round(share * tokens)[..., None]
        caches[kind], compiled, seconds = thin(
            filled(rows, tokens, tokens, kind), keep[:, 0] if kind == "layer" else keep
        )
        facts[kind] = {"evict ms": seconds * 1e3, "evict: compile s": compiled}
    blocks = {name: cache.blocks_in_use / (KV_HEADS if name == "head" else 1) for name, cache in caches.items()}
    steppers = {name: Stepper(full_step, rows, cache) for name, cache in caches.items()}
    seconds = time_side_by_side(steppers, repeats)
    return [
        {
            "cache": name, "blocks, % of full": 100 * blocks[name] / blocks["full"], "step ms": seconds[name] * 1e3,
            "full / this": seconds["full"] / seconds[name], "this / short": seconds[name] / seconds["short"],
            "step: compile s": "" if name == "short" else steppers[name].compile_seconds,
            **{key: facts[name].get(key, "") for key in ("evict ms", "evict: compile s")},
        }
        for name in caches
    ]  # fmt: skip


def read_less(rows: int, tokens: int, read: int, repeats: int) -> list[dict[str, Any]]:
    steppers = {"all": Stepper(full_step, rows, filled(rows, tokens, tokens))}
    cache, number = filled(rows, tokens, tokens), read // BLOCK_SIZE
    bounds = jax.jit(lambda cache: jaxkv.block_bounds(cache, layer=0))(cache)
    steppers["quest, bounds beside"] = Stepper(quest_step(number, beside=True), rows, cache, bounds)
    steppers["quest, bounds=True"] = Stepper(quest_step(number), rows, filled(rows, tokens, tokens, bounds=True))
    steppers["quest, none kept"] = Stepper(quest_step(number), rows, filled(rows, tokens, tokens))
    short = filled(rows, read, tokens)
    steppers["short"] = Stepper(full_step, rows, short)
    seconds = time_side_by_side(steppers, repeats)
    return [
        {
            "reads": name, "step ms": seconds[name] * 1e3, "all / this": seconds["all"] / seconds[name],
            "step: compile s": "" if name == "short" else stepper.compile_seconds,
        }
        for name, stepper in steppers.items()
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--long", type=int, default=32768, help="tokens of each of two rows of which Quest reads 2,048")
    parser.add_argument("--repeats", type=int, default=41)
    arguments = parser.parse_args()
    kept = keep_less(arguments.rows, arguments.tokens, arguments.repeats)
    table(kept)
    read = read_less(2, arguments.long, 2048, arguments.repeats)
    table(read)
    save("evict", {"keep": kept, "read": read}, max_seqs=arguments.rows, tokens=arguments.tokens, long=arguments.long)


if __name__ == "__main__":
    main()
