"""What managing the cache brings: prefix reuse in chats, windows that give memory back, swapping against recomputing;
and what short rows cost that may become long, see `long_rows.py`.

    python benchmarks/serving.py

Each table compares ways to compute the same requests; that they give the same tokens is asserted. All runs of a table
start with an empty cache, and after a run that compiled everything.

Prefix reuse: users chat in waves. At each turn all users of a wave send at once everything said so far and something
new, so the time to the first token includes waiting for a row. System prompts are shared by many chats.
"""

import argparse
import collections
import dataclasses
import pathlib
import time
import types
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from _harness import save, table
from flax import nnx
from long_rows import long_rows

import jaxkv
from jaxkv.models import Decoder, DecoderConfig, Rope

TURNS, WAVE = 3, 25  # of a chat; chats at the same time
# Layers, KV heads, head_dim, window.
GEMMA_3 = {"Gemma 3 1B": (26, 1, 256, 512), "Gemma 3 4B": (34, 4, 256, 1024), "Gemma 3 27B": (62, 16, 128, 1024)}
SOURCE = pathlib.Path(argparse.__file__).read_bytes()


@dataclasses.dataclass(frozen=True)
class Chat:
    """What a user sends, turn by turn, and how many tokens are to be answered."""

    system: tuple[int, ...]
    texts: tuple[tuple[int, ...], ...]
    answers: tuple[int, ...]


@dataclasses.dataclass
class Trace:
    """What came out of chats, and when."""

    prompts: list[list[int]] = dataclasses.field(default_factory=list)
    outputs: list[list[int]] = dataclasses.field(default_factory=list)
    waits: list[float] = dataclasses.field(default_factory=list)  # seconds to the first token
    seconds: float = 0.0


def chats(count: int, systems: int = 6, seed: int = 0) -> list[Chat]:
    """Chats over Python source, a byte a token; every one begins with one of the system prompts."""
    rng = np.random.default_rng(seed)

    def text(least: int, most: int) -> tuple[int, ...]:
        length = int(rng.integers(least, most + 1))
        start = int(rng.integers(0, len(SOURCE) - length))
        return tuple(SOURCE[start : start + length])

    known = [text(128, 256) for _ in range(systems)]
    return [
        Chat(
            known[int(rng.integers(systems))], tuple(text(60, 220) for _ in range(TURNS)),
            tuple(int(n) for n in rng.integers(16, 49, TURNS)),
        )
        for _ in range(count)
    ]  # fmt: skip


def serve(engine: jaxkv.Engine, users: Sequence[Chat], tenants: Sequence[str | None] = (None,)) -> Trace:
    """Let all users chat, wave by wave; each belongs to one of the tenants, who share nothing."""
    trace = Trace()
    for start in range(0, len(users), WAVE):
        wave = users[start : start + WAVE]
        said = [list(user.system) for user in wave]
        for turn in range(TURNS):
            began = time.perf_counter()
            for number, tenant in enumerate(tenants):
                mine = range(number, len(wave), len(tenants))
                for i in mine:
                    said[i] += wave[i].texts[turn]
                prompts = [said[i].copy() for i in mine]
                outputs: list[list[int]] = [[] for _ in prompts]
                for i, token in engine.stream(prompts, [wave[i].answers[turn] for i in mine], salt=tenant):
                    if not outputs[i]:
                        trace.waits.append(time.perf_counter() - began)
                    outputs[i].append(token)
                for i, output in zip(mine, outputs, strict=True):
                    said[i] += output
                trace.prompts += prompts
                trace.outputs += outputs
            trace.seconds += time.perf_counter() - began
    return trace


def answer(engine: jaxkv.Engine, prompts: list[list[int]], limits: list[int]) -> tuple[list[list[int]], float]:
    """The tokens that follow each prompt, and the seconds that it took."""
    outputs: list[list[int]] = [[] for _ in prompts]
    began = time.perf_counter()
    for i, token in engine.stream(prompts, limits):
        outputs[i].append(token)
    return outputs, time.perf_counter() - began


def prefill(engine: jaxkv.Engine, outputs: Sequence[Sequence[int]]) -> int:
    """Tokens computed other than by decoding: a prompt gives the first token, and the last one is not computed."""
    return engine.stats()["tokens"] - sum(len(output) - 1 for output in outputs)


def seen_before(users: Sequence[Chat], trace: Trace) -> float:
    """The share of all prompts' tokens that were said before: system prompts and what stands before each new text."""
    new = sum(len(text) for user in users for text in user.texts) + sum(map(len, {user.system for user in users}))
    return 1 - new / sum(map(len, trace.prompts))


def reuse(requests: int, facts: dict[str, Any]) -> list[dict[str, Any]]:
    model, users = jaxkv.models.small(), chats(max(1, requests // TURNS))
    ways: dict[str, tuple[bool, tuple[str | None, ...]]] = {
        "computed anew": (False, (None,)),
        "prefix reuse": (True, (None,)),
        "prefix reuse, 2 tenants": (True, ("a", "b")),
    }
    rows, outputs = [], {}
    for way, (prefix_cache, tenants) in ways.items():
        for some in (users[: 2 * WAVE], users):  # the first compile everything
            engine = jaxkv.Engine(model, max_seqs=16, max_seq_len=1024, num_blocks=1280, prefix_cache=prefix_cache)
            trace = serve(engine, some, tenants)
        said = zip(map(tuple, trace.prompts), map(tuple, trace.outputs), strict=True)
        outputs[way] = collections.Counter(said)  # tenants come in another order
        stats = engine.stats()
        rows.append({
            "way": way, "tokens computed": stats["tokens"], "of prompts": prefill(engine, trace.outputs),
            "hit rate": stats.get("hit_rate", 0.0), "blocks peak": stats["blocks_peak"],
            "evicted": stats.get("blocks_evicted", 0), "seconds": trace.seconds,
            "tokens/s": sum(map(len, trace.outputs)) / trace.seconds,
            "first token, median s": float(np.median(trace.waits)),
            "95 % s": float(np.quantile(trace.waits, 0.95)),
        })  # fmt: skip
    assert all(output == outputs["computed anew"] for output in outputs.values()), "reuse changed what comes out"
    for row in rows:
        row["less prefill"] = rows[0]["of prompts"] / row["of prompts"]
    facts |= {
        "requests": len(trace.prompts), "prompt_tokens": sum(map(len, trace.prompts)),
        "output_tokens": sum(map(len, trace.outputs)), "seen_before": seen_before(users, trace),
    }  # fmt: skip
    return rows


class KeepsAll(Decoder):
    """The same model, that masks what is outside of windows but keeps it."""

    @property
    def layer_configs(self):
        return tuple(dataclasses.replace(layer, window=None) for layer in super().layer_configs)


def local_and_global(num_layers: int, window: int) -> tuple[int | None, ...]:
    """Gemma 3's pattern: every sixth layer sees everything."""
    return tuple(None if i % 6 == 5 else window for i in range(num_layers))


def windows(requests: int, facts: dict[str, Any]) -> list[dict[str, Any]]:
    """A small model with random weights, run; and what CacheConfig says of Gemma 3's shapes."""
    shape = DecoderConfig(
        vocab_size=256, embed_dim=64, mlp_dim=128, num_heads=2, num_kv_heads=1, head_dim=32, max_seq_len=2048,
        windows=local_and_global(6, 128), ropes=(Rope(),) * 6, attention_scale=32**-0.5,
    )  # fmt: skip
    rng = np.random.default_rng(1)
    count = max(4, requests // 25)
    spans = zip(rng.integers(0, 50_000, count), rng.integers(1200, 1900, count), strict=True)
    prompts = [list(SOURCE[start : start + length]) for start, length in spans]
    rows, outputs = [], {}
    for way, kind in {"kept": KeepsAll, "given back": Decoder}.items():
        model = kind(shape, rngs=nnx.Rngs(0))
        for _ in range(2):
            engine = jaxkv.Engine(model, max_seqs=4, max_seq_len=2048)
            outputs[way], seconds = answer(engine, prompts, [64] * count)
        config = engine.config
        peaks = [int(t.peak) for t in engine.cache.tables]
        rows.append({
            "model": "6 layers, window 128, 4 rows of 2048", "measured": "peak of a run", "outside of windows": way,
            "blocks": "+".join(map(str, peaks)),
            "MB": sum(n * config.bytes_per_group_block(g) for g, n in enumerate(peaks)) / 1e6,
            "tokens/s": 64 * count / seconds,
        })  # fmt: skip
    assert outputs["kept"] == outputs["given back"], "giving memory back changed what comes out"
    for name, (num_layers, num_kv_heads, head_dim, window) in GEMMA_3.items():
        for way in ("kept", "given back"):
            model = types.SimpleNamespace(
                dtype=jnp.bfloat16,
                layer_configs=tuple(
                    jaxkv.LayerConfig(num_kv_heads=num_kv_heads, head_dim=head_dim, window=w if way != "kept" else None)
                    for w in local_and_global(num_layers, window)
                ),
            )
            config = jaxkv.CacheConfig.from_model(model, max_seqs=8, max_seq_len=32768, step_tokens=2048)
            rows.append({
                "model": f"{name}, 8 rows of 32768", "measured": "pools for all rows", "outside of windows": way,
                "blocks": "+".join(map(str, config.group_blocks)), "MB": config.bytes / 1e6, "tokens/s": "-",
            })  # fmt: skip
    for kept, given_back in zip(rows[::2], rows[1::2], strict=True):
        kept["share"], given_back["share"] = 1.0, given_back["MB"] / kept["MB"]
    return rows


def window_chats(requests: int, facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Chats in turn on a model with windows: what is found again, by how many blocks the windows get; and how many
    tokens fit into memory with a prefix cache and without."""
    window, block_size, count = 64, 8, 6
    shape = DecoderConfig(
        vocab_size=256, embed_dim=64, mlp_dim=128, num_heads=2, num_kv_heads=1, head_dim=32, max_seq_len=1024,
        windows=local_and_global(6, window), ropes=(Rope(),) * 6, attention_scale=32**-0.5,
    )  # fmt: skip
    model, rng = Decoder(shape, rngs=nnx.Rngs(0)), np.random.default_rng(3)
    texts = [[list(SOURCE[at : at + 80]) for at in rng.integers(0, 50_000, TURNS + 1)] for _ in range(count)]
    own = count * -(-(window - 1 + block_size - 1) // block_size)  # blocks of all windows
    rows: list[dict[str, Any]] = []
    for share in (1.5, 2.0, 4.0):
        engine = jaxkv.Engine(
            model, max_seqs=2, max_seq_len=1024, block_size=block_size, step_tokens=64, prefix_cache=True,
            group_blocks=(int(share * own), 400),
        )  # fmt: skip
        said: list[list[int]] = [[] for _ in texts]
        findable = found = 0
        for turn in range(TURNS + 1):
            for i, chat in enumerate(texts):
                findable += max(0, len(said[i]) - 1) // block_size * block_size
                said[i] += chat[turn]
                request = engine.submit(said[i], max_new_tokens=16)
                list(engine.run())
                said[i] += request.tokens
        found = engine.stats()["tokens_saved"]
        rows.append({
            "what": f"{count} chats of {TURNS + 1} turns, window {window}",
            "blocks of windows": f"{share:g} x their own",
            "findable": findable, "found": found, "share": found / findable,
        })  # fmt: skip
    for name, (num_layers, num_kv_heads, head_dim, window) in GEMMA_3.items():
        layers = tuple(
            jaxkv.LayerConfig(num_kv_heads=num_kv_heads, head_dim=head_dim, window=w)
            for w in local_and_global(num_layers, window)
        )
        gemma = types.SimpleNamespace(dtype=jnp.bfloat16, layer_configs=layers)
        sizes = {"max_seqs": 8, "max_seq_len": 32768, "memory_bytes": 16e9}
        ways = {
            "no prefix cache": {"step_tokens": 2048}, "as many blocks in every group": {},
            "by what is kept": {"step_tokens": 2048, "prefix_cache": True},
        }  # fmt: skip
        fits = {way: jaxkv.CacheConfig.from_model(gemma, **sizes, **options) for way, options in ways.items()}
        for way, config in fits.items():
            rows.append({
                "what": f"{name} in 16 GB", "blocks of windows": way, "tokens": config.max_tokens,
                "share": config.max_tokens / fits["no prefix cache"].max_tokens,
            })  # fmt: skip
    return rows


def swapping(requests: int, facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Too few blocks for all rows to reach their ends at once, so that sequences are set back."""
    model = jaxkv.models.small()
    rng = np.random.default_rng(2)
    count = max(16, requests // 6)
    spans = zip(rng.integers(0, 50_000, count), rng.integers(50, 300, count), strict=True)
    prompts = [list(SOURCE[start : start + length]) for start, length in spans]
    limits = [int(n) for n in rng.integers(100, 200, count)]
    rows, outputs = [], {}
    ways: dict[str, dict[str, Any]] = {
        "blocks for all": {}, "computed again": {"num_blocks": 160, "swap": "never"},
        "swapped": {"num_blocks": 160, "swap": "always"}, "chosen by estimate": {"num_blocks": 160, "swap": "auto"},
    }  # fmt: skip
    for way, options in ways.items():
        for _ in range(2):
            engine = jaxkv.Engine(model, max_seqs=16, max_seq_len=512, **options)
            outputs[way], seconds = answer(engine, prompts, limits)
        stats = engine.stats()
        rows.append({
            "set back": way, "blocks": engine.config.num_blocks, "times": stats["set_back"],
            "swapped out": stats["swapped_out"], "tokens computed": stats["tokens"], "seconds": seconds,
            "tokens/s": sum(limits) / seconds,
        })  # fmt: skip
    assert all(output == outputs["blocks for all"] for output in outputs.values()), "being set back changed a sequence"
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--requests", type=int, default=300, help="of the chats; the rest follows. default: %(default)s"
    )
    requests = parser.parse_args().requests
    tables, facts = {}, {}
    for part in (reuse, windows, window_chats, swapping, long_rows):
        tables[part.__name__] = part(requests, facts)
        if part is reuse:
            print(", ".join(f"{name} {value:.4g}" for name, value in facts.items()))
        print(f"\n{part.__name__}\n")
        table(tables[part.__name__])
    save("serving", tables, **facts)


if __name__ == "__main__":
    main()
