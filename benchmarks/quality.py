"""What storing, keeping or reading less costs a real model on real text: SmolLM2-135M, English and Python source.

    python benchmarks/quality.py [kinds windows evict drafts]

The text comes with Python: the language reference and modules of the standard library, eight documents of 2,048 tokens.
Losses are mean negative log-likelihoods of each document's tokens, given those before it in a cache of the kind named;
what is evicted is so after the first 1,024, and the loss is of the next 256. A part that was not run keeps its rows.
"""

import argparse
import dataclasses
import datetime
import functools
import importlib.util
import json
import pathlib
import pydoc_data.topics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _harness import RESULTS, commit, save, table

import jaxkv
from jaxkv import scores
from jaxkv._files.packaged_model import smollm2

LENGTH, CHUNK = 2048, 256
SOURCES = ("argparse", "dataclasses", "textwrap", "statistics")
KINDS = ("float32", "bfloat16", "int8", "float8_e4m3fn", "float8_e5m2", "int4")
WINDOWS = ((1024, None), (1024, 4), (256, None), (256, 4))
PROMPT, AFTER, SHARES = 1024, 256, (0.5, 0.25)


def read_documents(text: Any) -> np.ndarray:
    """Returns `i32[8, LENGTH]`: four documents of English, four of source."""
    english = text.encode("\n".join(pydoc_data.topics.topics.values()), special=False)
    found = [english[i * LENGTH : (i + 1) * LENGTH] for i in range(4)]
    for name in SOURCES:
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None
        found.append(text.encode(pathlib.Path(spec.origin).read_text(), special=False)[:LENGTH])
    return np.array(found, np.int32)


@jax.jit
def run_chunk(model: Any, cache: Any, tokens: jax.Array, following: jax.Array) -> tuple[jax.Array, Any]:
    """Returns the sum of the losses of `following` i32[CHUNK] after each of a row's next tokens, and the cache."""
    cache = jaxkv.extend(cache, [tokens.shape[0]])
    logits, cache = model(tokens[None], cache=cache)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits[0]), following[:, None], axis=-1)[:, 0]
    return -jnp.sum(jnp.where(following >= 0, chosen, 0)), cache


def feed(model: Any, cache: Any, tokens: np.ndarray, following: np.ndarray) -> tuple[float, Any]:
    total = 0.0
    for begin in range(0, len(tokens), CHUNK):
        part, cache = run_chunk(model, cache, tokens[begin : begin + CHUNK], following[begin : begin + CHUNK])
        total += float(part)
    return total, cache


def measure_loss(model: Any, documents: np.ndarray, **fields: Any) -> dict[str, float]:
    """Mean losses of English and of source."""
    config = jaxkv.CacheConfig.from_model(model, max_seqs=1, max_seq_len=LENGTH, **{"dtype": "float32"} | fields)
    cache = jaxkv.init(config)
    losses = []
    for tokens in documents:
        following = np.append(tokens[1:], -1)
        total, cache = feed(model, cache, tokens, following)
        jaxkv.check(cache)
        losses.append(total / (len(tokens) - 1))
        cache = jaxkv.free(cache, [0])
    half = len(losses) // 2
    return {"English": float(np.mean(losses[:half])), "source": float(np.mean(losses[half:])),
            "both": float(np.mean(losses)), "bits a number": 8 * config.bytes_per_block / config.block_size
            / sum(2 * layer.dim for layer in config.layers)}  # fmt: skip


def compare(name: str, rows: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, each with what it costs beside the first, in percent of the loss."""
    found: list[dict[str, Any]] = []
    for row in rows:
        row["cost, %"] = 100 * (row["both"] / found[0]["both"] - 1) if found else 0.0
        found.append(row)
        print(name, row, flush=True)
    return found


def kinds(model: Any, documents: np.ndarray) -> Iterator[dict[str, Any]]:
    for kind in KINDS:
        yield {"stored as": kind} | measure_loss(model, documents, dtype=kind)


def windows(model: Any, documents: np.ndarray) -> Iterator[dict[str, Any]]:
    yield {"window": "all"} | measure_loss(model, documents)
    for window, sinks in WINDOWS:
        layers = [dataclasses.replace(x, window=window, sink_tokens=sinks) for x in model.layer_configs]
        yield {"window": window, "sink tokens": sinks or 0} | measure_loss(
            Windowed(model, tuple(layers)), documents, step_tokens=CHUNK
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Windowed:
    """A model whose layers keep less than they were trained for."""

    model: Any
    layer_configs: tuple[jaxkv.LayerConfig, ...] = dataclasses.field(metadata={"static": True})

    @property
    def dtype(self) -> Any:
        return self.model.dtype

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.model(*arguments, **options)


def look(model: Any, cache: Any, tokens: jax.Array) -> tuple[Any, dict[str, list[jax.Array]]]:
    """Runs the prompt's last chunk, and scores each layer's tokens by each method."""
    asked: list[tuple[jax.Array, jax.Array]] = []

    def note(rope: Callable[..., Any], q: jax.Array, k: jax.Array, positions: jax.Array) -> Any:
        found = rope(q, k, positions)
        asked.append((q, found[0]))
        return found

    ropes = [block.attention.position_fn for block in model.layers]
    for block, rope in zip(model.layers, ropes, strict=True):
        block.attention.position_fn = functools.partial(note, rope)
    try:
        cache = jaxkv.extend(cache, [tokens.shape[0]])
        _, cache = model(tokens[None], cache=cache)
    finally:
        for block, rope in zip(model.layers, ropes, strict=True):
            block.attention.position_fn = rope
    worth: dict[str, list[jax.Array]] = {}
    for i, (plain, q) in enumerate(asked):

        def rotate(x: jax.Array, positions: jax.Array, rope: Any = ropes[i]) -> jax.Array:
            return rope(x, x, positions)[0]

        for name, score in {
            "streaming_llm": scores.streaming_llm(cache, layer=i), "knorm": scores.knorm(cache, layer=i),
            "keydiff": scores.keydiff(cache, layer=i), "snapkv": scores.snapkv(cache, layer=i, q=q),
            "tova": scores.tova(cache, layer=i, q=q),
            "expected_attention": scores.expected_attention(cache, layer=i, q=plain, rotate=rotate),
        }.items():  # fmt: skip
            worth.setdefault(name, []).append(score)
    return cache, worth


@jax.jit
def thin(cache: Any, worth: list[jax.Array], budget: jax.Array) -> Any:
    for i, score in enumerate(worth):
        cache = jaxkv.evict(cache, scores=score, budget=budget, layer=i)
    return cache


def evictions(model: Any, documents: np.ndarray) -> Iterator[dict[str, Any]]:
    layers = tuple(dataclasses.replace(layer, evict="head") for layer in model.layer_configs)
    config = jaxkv.CacheConfig(layers=layers, max_seqs=1, max_seq_len=PROMPT + AFTER, dtype="float32",
                               max_tokens=PROMPT + AFTER + 16)  # fmt: skip
    total: dict[tuple[str, float], float] = {}
    looked = jax.jit(look)
    for tokens in documents:
        cache = jaxkv.init(config)
        _, cache = feed(model, cache, tokens[: PROMPT - CHUNK], tokens[1 : PROMPT - CHUNK + 1])
        cache, worth = looked(model, cache, tokens[PROMPT - CHUNK : PROMPT])
        rest, following = tokens[PROMPT : PROMPT + AFTER], tokens[PROMPT + 1 : PROMPT + AFTER + 1]
        for name, share in [("everything", 1.0), *((name, share) for name in worth for share in SHARES)]:
            thinned = cache if share == 1 else thin(cache, worth[name], jnp.int32(PROMPT * share))
            loss, _ = feed(model, thinned, rest, following)
            total[name, share] = total.get((name, share), 0.0) + loss / AFTER / len(documents)
    for (name, share), loss in total.items():
        yield {"score": name, "kept": share, "both": loss}


def drafts(model: Any, documents: np.ndarray) -> Iterator[dict[str, Any]]:
    """Acceptance of guesses from the text itself, greedy, 96 tokens after 256 of each document."""
    for branches, tokens in ((1, 4), (8, 32)):
        options = dict(max_seqs=8, max_seq_len=512, draft="ngram", draft_tokens=tokens, draft_branches=branches)
        with jaxkv.Engine(model, **options) as engine:
            for document in documents:
                engine.submit(document[:256].tolist(), 96, eos=())
            began = time.perf_counter()
            steps = engine.steps
            for _ in engine.run():
                pass
            yield {"draft": f"ngram, {tokens} tokens, {branches} branches", "acceptance": engine.stats()["acceptance"],
                   "tokens a step of a row": 96 / (engine.steps - steps), "seconds": time.perf_counter() - began,
                   "both": 1.0}  # fmt: skip


PARTS = {"kinds": kinds, "windows": windows, "evict": evictions, "drafts": drafts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--length", type=int, default=LENGTH, help="tokens of a document that are read")
    arguments = parser.parse_args()
    path = smollm2()
    model, text = jaxkv.models.load(path), jaxkv.text.Tokenizer(path)
    documents = read_documents(text)[:, : arguments.length]
    file = RESULTS / "quality.json"
    before = json.loads(file.read_text()) if file.exists() else {"rows": {}, "runs": {}}
    tables, runs = before["rows"], before["runs"]
    for name in arguments.parts:
        began = time.process_time()
        tables[name] = compare(name, PARTS[name](model, documents))
        table(tables[name])
        runs[name] = {"commit": commit(), "date": datetime.date.today().isoformat(), "jax": jax.__version__,
                      "CPU s": round(time.process_time() - began)}  # fmt: skip
        save("quality", tables, documents=len(documents), tokens=int(documents.size), runs=runs)


if __name__ == "__main__":
    main()
