"""What it costs to choose tokens, and what the chosen hold of attention: DeepSeek V3.2's sizes, and SmolLM2's weights.

    python benchmarks/chosen_tokens.py [decode prefill mass]

decode: a step of one row of 32k tokens, 128 heads over latent rows of 512 + 64, an indexer of 64 heads of 128, top_k
2,048, beside a step that reads all; prefill: the scratch of 1,024 tokens on a context of 16k, as the compiler says.
mass: of attention at the last 16 tokens of 1,024 of English, the share that is on what is read, at the same number of
tokens read: Quest's blocks, the best blocks, and the best tokens, for all heads of a layer together.
"""

import argparse
import pydoc_data.topics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _harness import save, table, time_side_by_side
from _models import load_smollm2, unroll

import jaxkv
import jaxkv.scores
from jaxkv._core.attention.query_capture import capture_queries

LAYER = jaxkv.LayerConfig.latent(512, 64, index_dim=128)
HEADS, INDEX_HEADS, TOP_K, SCALE = 128, 64, 2048, 192**-0.5
CONTEXT, PREFILLED, NEW = 1 << 15, 1 << 14, 1024
TEXT, ASKED, SHARES = 1024, 16, (0.5, 0.25, 0.125, 0.0625)


def make_config(context: int) -> jaxkv.CacheConfig:
    sizes = dict(max_seqs=1, max_seq_len=context, max_tokens=context, block_size=64, head_dim_multiple=1)
    return jaxkv.CacheConfig(layers=(LAYER,), dtype="bfloat16", **sizes)


def choose_and_attend(cache: jaxkv.Cache, q: Any, index_q: Any, weights: Any, top_k: int = TOP_K) -> jax.Array:
    tokens = jaxkv.scores.indexer(cache, layer=0, q=index_q, weights=weights, top_k=top_k)
    return jaxkv.attend(q, cache, layer=0, tokens=tokens, scale=SCALE)


def shapes(tokens: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Queries of attention and of the indexer, and its weights."""
    kinds = ((HEADS, 576), jnp.bfloat16), ((INDEX_HEADS, 128), jnp.bfloat16), ((INDEX_HEADS,), jnp.float32)
    return tuple(jax.ShapeDtypeStruct((1, tokens, *shape), dtype) for shape, dtype in kinds)


def decode(repeats: int) -> list[dict[str, Any]]:
    """Milliseconds of a step, and the bytes that it reads of the cache beside what has to be read."""
    keys = jax.random.split(jax.random.key(0), 5)
    cache = jaxkv.init(make_config(CONTEXT))
    kv = jax.random.normal(keys[0], (1, CONTEXT, 1, 576), jnp.bfloat16)

    @jax.jit
    def fill(cache: jaxkv.Cache, kv: jax.Array, index_k: jax.Array) -> jaxkv.Cache:
        cache = jaxkv.extend(cache, [CONTEXT - 1])
        cache = jaxkv.write_index(jaxkv.write(cache, kv, None, layer=0), index_k, layer=0)
        return jaxkv.extend(cache, [1])

    cache = fill(cache, kv, jax.random.normal(keys[1], (1, CONTEXT, 128), jnp.bfloat16))
    given = [jax.random.normal(key, x.shape, x.dtype) for key, x in zip(keys[2:], shapes(1), strict=True)]
    whole = jax.jit(lambda cache, q: jaxkv.attend(q, cache, layer=0, scale=SCALE))
    chosen, index = (
        jax.jit(choose_and_attend),
        jax.jit(lambda cache, q, w: jaxkv.scores.indexer(cache, layer=0, q=q, weights=w, top_k=TOP_K)),
    )
    seconds = time_side_by_side(
        {
            "reads all": lambda: whole(cache, given[0]), "chooses and reads": lambda: chosen(cache, *given),
            "chooses": lambda: index(cache, *given[1:]),
        },
        repeats,
    )  # fmt: skip
    step, every = (jaxkv.plan_step(cache, (1, 1), top_k=top_k).bytes_read for top_k in (TOP_K, None))
    least = 2 * (TOP_K * 576 + CONTEXT * 128)
    rows = [{"step": name, "ms": 1e3 * s, "times faster": seconds["reads all"] / s} for name, s in seconds.items()]
    for row, size in zip(rows, (every, step, CONTEXT * 128 * 2), strict=True):
        row |= {"bytes read": size, "of chosen rows and index keys": size / least}
    return rows


def prefill() -> list[dict[str, Any]]:
    """MiB of scratch."""
    cache = jax.eval_shape(lambda: jaxkv.extend(jaxkv.init(make_config(PREFILLED)), [NEW]))
    memory = jax.jit(choose_and_attend).lower(cache, *shapes(NEW)).compile().memory_analysis()
    return [{"tokens": NEW, "context": PREFILLED, "scratch, MiB": memory.temp_size_in_bytes / 2**20,
             "array of tokens x context, MiB": NEW * PREFILLED * 4 / 2**20}]  # fmt: skip


def mass() -> list[dict[str, Any]]:
    """Mean shares of attention, over layers, heads and the last tokens."""
    model, text = load_smollm2()
    model = unroll(model)
    tokens = text.encode("\n".join(pydoc_data.topics.topics.values()), special=False)[:TEXT]
    config = jaxkv.CacheConfig.from_model(model, max_seqs=1, max_seq_len=TEXT, dtype="float32", block_size=16)

    @jax.jit
    def step(model: Any, cache: jaxkv.Cache, tokens: jax.Array) -> Any:
        cache = jaxkv.extend(cache, [tokens.shape[0]])
        with capture_queries() as found:
            _, cache = model(tokens[None], cache=cache, logits_at=jnp.zeros(1, jnp.int32))
        return cache, {layer: one.q for layer, one in found.items()}

    @jax.jit
    def shares(cache: jaxkv.Cache, queries: Any) -> jax.Array:
        """`f32[layers, SHARES, 3]` of the step's only token."""
        found = []
        for layer, q in queries.items():
            k, _ = jaxkv.gather(cache, 0, layer=layer, max_len=TEXT)
            heads, width = q.shape[-2:]
            k = jnp.repeat(k, heads // k.shape[1], axis=1)
            logits = jnp.einsum("hd,chd->hc", q[0, 0], k) * width**-0.5
            held = jnp.arange(TEXT)[None] < cache.lengths[0]
            weights = jax.nn.softmax(jnp.where(held, logits, -jnp.inf), axis=-1).mean(axis=0)  # of all heads together
            blocks = weights.reshape(-1, 16).sum(axis=-1)
            for share in SHARES:
                count = int(TEXT * share) // 16
                quest = jaxkv.scores.quest(cache, layer=layer, q=q, num_blocks=count)[0]
                by_quest = jnp.where(quest >= 0, blocks[jnp.maximum(quest, 0)], 0).sum()
                best = [jax.lax.top_k(x, n)[0].sum() for x, n in ((blocks, count), (weights, count * 16))]
                found.append(jnp.stack([by_quest, *best]))
        return jnp.stack(found).reshape(len(queries), len(SHARES), 3)

    cache, _ = step(model, jaxkv.init(config), jnp.array(tokens[:-ASKED]))
    taken = []
    for token in tokens[-ASKED:]:
        cache, queries = step(model, cache, jnp.array([token]))
        taken.append(np.asarray(shares(cache, queries)))
    mean = np.mean(taken, axis=(0, 1))
    names = ("Quest's blocks", "best blocks", "best tokens")
    return [
        {"read": share} | dict(zip(names, row.tolist(), strict=True)) for share, row in zip(SHARES, mean, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=("decode", "prefill", "mass"), help="all, if none is named")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    made = {"decode": lambda: decode(args.repeats), "prefill": prefill, "mass": mass}
    rows = {}
    for part in args.parts or made:
        rows[part] = made[part]()
        print(f"\n{part}")
        table(rows[part])
    if len(rows) == len(made):
        save("chosen_tokens", rows)


if __name__ == "__main__":
    main()
