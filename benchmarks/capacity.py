"""How many sequences fit, and how many token places are wasted: block sizes against a contiguous cache of equal bytes.

    python benchmarks/capacity.py

Sequences come with lengths like those of served chats (see `chat_lengths`) and are put into a real cache, one row each,
until its pool is full. Bytes are those of a Llama 3 8B's keys and values in bfloat16. Needs no accelerator.
"""

import argparse

import numpy as np
from _harness import save, table

import jaxkv
from pallas_kernels import SHAPES

MAX_SEQ_LEN = 2048
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


def chat_lengths(count: int, seed: int = 0) -> np.ndarray:
    """Prompt plus answer tokens of chats: log-normal parts with the means that the vLLM paper reports for ShareGPT, 161
    in and 338 out (https://arxiv.org/abs/2309.06180, figure 11), cut at `MAX_SEQ_LEN`."""
    rng = np.random.default_rng(seed)

    def part(mean: float, sigma: float) -> np.ndarray:
        return rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count)

    return np.clip(part(161, 1.2) + part(338, 0.9), 2, MAX_SEQ_LEN).astype(np.int32)


def fill(num_tokens: int, block_size: int, lengths: np.ndarray) -> dict:
    """Put sequences into a pool of `num_tokens` places until one does not fit."""
    layer = jaxkv.LayerConfig(num_kv_heads=1, head_dim=1)  # the tables do not know how large a token is
    config = jaxkv.CacheConfig(
        layers=(layer,),
        max_seqs=len(lengths),
        max_seq_len=MAX_SEQ_LEN,
        num_blocks=num_tokens // block_size,
        block_size=block_size,
    )
    cache = jaxkv.extend(jaxkv.init(config), lengths)
    fits = int(np.argmax(np.asarray(cache.failed)))  # rows are served in order
    cache = jaxkv.free(cache, np.arange(len(lengths)) >= fits)
    stats = jaxkv.stats(cache)
    held = stats["tokens"] + stats["waste"]
    return {"block_size": block_size, "sequences": fits, "tokens": stats["tokens"], "wasted": stats["waste"] / held}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=16, help="memory for the cache; default: %(default)s")
    arguments = parser.parse_args()
    shape = SHAPES["llama3-8b"]
    token_bytes = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * 2
    num_tokens = int(arguments.gigabytes * 2**30) // token_bytes
    lengths = chat_lengths(4 * num_tokens // 400)

    rows = num_tokens // MAX_SEQ_LEN  # contiguous: every sequence takes the longest one's room
    held = int(lengths[:rows].sum())
    results = [
        {"block_size": "contiguous", "sequences": rows, "tokens": held, "wasted": 1 - held / (rows * MAX_SEQ_LEN)}
    ]
    results += [fill(num_tokens, block_size, lengths) for block_size in BLOCK_SIZES]
    for result in results:
        result["times_contiguous"] = result["sequences"] / rows
    print(
        f"{arguments.gigabytes:g} GiB = {num_tokens} tokens of {token_bytes} bytes; "
        f"sequences of {lengths.mean():.0f} tokens in the mean\n"
    )
    table(results)
    save("capacity", results, gigabytes=arguments.gigabytes, max_seq_len=MAX_SEQ_LEN, mean_length=float(lengths.mean()))


if __name__ == "__main__":
    main()
