"""What storing, keeping or reading less costs real models on real text: English and Python source.

    python benchmarks/quality.py [kinds windows evict quest drafts needles] [--stored int4]

The text comes with Python: the language reference and modules of the standard library, eight documents of 2,048 tokens.
Losses are SmolLM2-135M's mean negative log-likelihoods of each document's tokens, given those before it in a cache of
the kind named; what is evicted is so after the first 1,024, and the loss is of the next 256. Needles are numbers that
Gemma 3 270M finds again in English of 1k, 4k and 8k tokens. A part that was not run keeps its rows, and so do
the kinds that `--stored` does not name: its costs are beside the float32 of before.
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

import _thinning
import jax
import jax.numpy as jnp
import numpy as np
from _harness import RESULTS, commit, save, table
from _models import Windowed, first_layers, load_gemma3, load_smollm2, read_chosen_blocks, unroll
from _needles import KINDS, Search

import jaxkv

LENGTH, CHUNK = 2048, 256
SOURCES = ("argparse", "dataclasses", "textwrap", "statistics")
WINDOWS = ((1024, None), (1024, 4), (256, None), (256, 4))
PROMPT, AFTER, SHARES = 1024, 256, (0.5, 0.25)
DRAFTED, NEW = 256, 96


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
            "both": float(np.mean(losses)), "bits a number": count_bits(config)}  # fmt: skip


def count_bits(config: jaxkv.CacheConfig) -> float:
    """Returns the bits of a number of a row's keys and values: those of the model's layers, and a share of those that
    residual layers hold of LENGTH tokens."""
    residual, every = set(config.residual_layers.values()), LENGTH // config.block_size
    held = [
        config.row_blocks(g, LENGTH) / every if residual & {*layers} else 1 for g, layers in enumerate(config.groups)
    ]
    block = sum(share * config.bytes_per_group_block(g) for g, share in enumerate(held))
    return 8 * block / config.block_size / sum(2 * layer.dim for layer in config.layers[: config.num_layers])


def compare(name: str, rows: Iterator[dict[str, Any]], keep: Callable[[list[dict[str, Any]]], Any]) -> None:
    """Keeps the rows so far, whenever one comes, each with what it costs beside the first, in percent of the loss."""
    found: list[dict[str, Any]] = []
    for row in rows:
        if "both" in row:
            row["cost, %"] = 100 * (row["both"] / found[0]["both"] - 1) if found else 0.0
        found.append(row)
        print(name, row, flush=True)
        keep(found)
    table(found)


def kinds(model: Any, documents: np.ndarray) -> Iterator[dict[str, Any]]:
    for kind, stored in KINDS.items():
        yield {"stored as": kind} | measure_loss(model, documents, **stored)


def replace_kind(kind: str, model: Any, documents: np.ndarray) -> None:
    """Measures one kind anew, its loss and its needles, beside the others' rows."""
    began, saved = time.process_time(), json.loads((RESULTS / "quality.json").read_text())
    rows = saved["rows"]["kinds"]
    if saved["tokens"] != documents.size:
        raise SystemExit(f"The rows of before are of {saved['tokens']} tokens: leave --length out.")
    row = {"stored as": kind} | measure_loss(model, documents, **KINDS[kind])
    row["cost, %"] = 100 * (row["both"] / rows[0]["both"] - 1)
    place, others = list(KINDS).index(kind), [x for x in rows if x["stored as"] != kind]
    save_part("kinds", documents, began, [*others[:place], row, *others[place:]], f"kinds, {kind}")
    table([row])
    began, way = time.process_time(), f"stored as {kind}"
    (found,) = search_needles().find_stored(way)
    others = [x for x in saved["rows"]["needles"] if x["way"] != way]
    save_part("needles", documents, began, [*others[:place], found, *others[place:]], f"needles, {kind}")
    table([found])


def windows(model: Any, documents: np.ndarray) -> Iterator[dict[str, Any]]:
    yield {"window": "all"} | measure_loss(model, documents)
    for window, sinks in WINDOWS:
        layers = [dataclasses.replace(x, window=window, sink_tokens=sinks) for x in model.layer_configs]
        yield {"window": window, "sink tokens": sinks or 0} | measure_loss(
            Windowed(model, tuple(layers)), documents, step_tokens=CHUNK
        )


def evictions(model: Any, documents: np.ndarray) -> Iterator[dict[str, Any]]:
    total: dict[tuple[str, float], float] = {}
    for how in ("head", "layer"):  # a mean over heads, TOVA's, is of layers alone
        config = jaxkv.CacheConfig(layers=_thinning.evicting(model.layer_configs, how), max_seqs=1, dtype="float32",
                                   max_seq_len=PROMPT + AFTER, max_tokens=PROMPT + AFTER + 16)  # fmt: skip
        score_step, unrolled = jax.jit(_thinning.score_step), unroll(model)
        for tokens in documents:
            _, cache = feed(model, jaxkv.init(config), tokens[: PROMPT - CHUNK], tokens[1 : PROMPT - CHUNK + 1])
            _, cache, worth = score_step(unrolled, cache, tokens[None, PROMPT - CHUNK : PROMPT], np.int32([CHUNK]))
            rest, following = tokens[PROMPT : PROMPT + AFTER], tokens[PROMPT + 1 : PROMPT + AFTER + 1]
            names = [name for name in worth if (name == "tova") == (how == "layer")]
            ways = [(name, share) for name in names for share in SHARES]
            for name, share in [("everything", 1.0), *ways] if how == "head" else ways:
                thinned = cache if share == 1 else _thinning.thin(cache, worth[name], jnp.int32(PROMPT * share))
                loss, after = feed(model, thinned, rest, following)
                jaxkv.check(after)
                total[name, share] = total.get((name, share), 0.0) + loss / AFTER / len(documents)
    for (name, share), loss in total.items():
        yield {"score": name, "kept": share, "both": loss}


@functools.partial(jax.jit, donate_argnames="cache")
def fill(model: Any, cache: jaxkv.Cache, tokens: jax.Array) -> jaxkv.Cache:
    """Feeds all rows with tokens i32[S, T]."""
    cache = jaxkv.extend(cache, jnp.full(tokens.shape[0], tokens.shape[1], jnp.int32))
    return model(tokens, cache=cache, logits_at=jnp.zeros(tokens.shape[0], jnp.int32))[1]


@jax.jit
def follow(model: Any, cache: jaxkv.Cache, tokens: jax.Array) -> tuple[jax.Array, jaxkv.Cache]:
    """Returns the mean loss of tokens i32[S, T + 1], one a step after the first, and the cache."""

    def step(cache: jaxkv.Cache, pair: jax.Array) -> tuple[jaxkv.Cache, jax.Array]:
        logits, cache = model(pair[0][:, None], cache=jaxkv.extend(cache, jnp.ones(len(pair[0]), jnp.int32)))
        losses = -jnp.take_along_axis(jax.nn.log_softmax(logits[:, 0]), pair[1][:, None], axis=-1)
        return cache, jnp.mean(losses)

    cache, losses = jax.lax.scan(step, cache, jnp.stack([tokens.T[:-1], tokens.T[1:]], axis=1))
    return jnp.mean(losses), cache


def quest(model: Any, documents: np.ndarray) -> Iterator[dict[str, Any]]:
    """Losses of what follows the prompts, decoded token by token, with so many blocks of 16 tokens read."""
    layers = tuple(dataclasses.replace(layer, bounds=True) for layer in model.layer_configs)
    config = jaxkv.CacheConfig(layers=layers, max_seqs=len(documents), max_seq_len=PROMPT + AFTER, dtype="float32",
                               max_tokens=len(documents) * (PROMPT + AFTER), block_size=16)  # fmt: skip
    cache = jaxkv.init(config)
    for begin in range(0, PROMPT, CHUNK):
        cache = fill(model, cache, documents[:, begin : begin + CHUNK])
    after = documents[:, PROMPT : PROMPT + AFTER + 1]
    for share in (1.0, *SHARES, 0.125):
        count = int(PROMPT * share) // 16
        less = model if share == 1 else read_chosen_blocks(model, count)
        loss, filled = follow(less, cache, after)
        jaxkv.check(filled)
        yield {"blocks read": "all" if share == 1 else count, "of the prompt": share, "both": float(loss)}


def drafts(model: Any, documents: np.ndarray) -> Iterator[dict[str, Any]]:
    """Acceptance of guesses, greedy, 96 tokens after 256 of each document: SmolLM2's, then Gemma 3's."""
    prompts = [document[:DRAFTED].tolist() for document in documents]
    for tokens, branches in ((4, 1), (32, 8)):
        name = f"ngram, {tokens} tokens, {branches} branches"
        yield {"model": "SmolLM2-135M", "draft": name} | draft(model, prompts, "ngram", tokens, branches)
    model, text = load_gemma3()
    prompts = [[model.config.bos_id, *document[: DRAFTED - 1].tolist()] for document in read_documents(text)]
    name = "ngram, 4 tokens, 1 branches"
    yield {"model": "Gemma 3 270M", "draft": name} | draft(model, prompts, "ngram", 4, 1)
    for count in (6, 12, 15):
        name = f"its first {count} of {len(model.layers)} layers, 4 tokens"
        yield {"model": "Gemma 3 270M", "draft": name} | draft(model, prompts, first_layers(model, count), 4, 1)


def draft(model: Any, prompts: list[list[int]], by: Any, tokens: int, branches: int) -> dict[str, Any]:
    options = dict(max_seqs=8, max_seq_len=512, draft=by, draft_tokens=tokens, draft_branches=branches)
    times = 0
    with jaxkv.Engine(model, **options) as engine:
        requests = [engine.submit(prompt, NEW, eos=()) for prompt in prompts]
        while not all(request.done for request in requests):
            times += len({request for request, token in engine.step() if token is not None})
        return {"acceptance": engine.stats()["acceptance"], "tokens a step of a row": NEW * len(prompts) / times}


def needles(model: Any, documents: np.ndarray) -> Iterator[dict[str, Any]]:
    """Of 8 numbers hidden in English, how many Gemma 3 gives back, at each length."""
    search = search_needles()
    for rows in (search.find_stored(), search.find_chosen(), search.find_kept()):
        yield from rows


def search_needles() -> Search:
    model, text = load_gemma3()
    words = text.encode("\n".join(pydoc_data.topics.topics.values()), special=False)
    return Search(model, text, words)


def save_part(
    name: str, documents: np.ndarray, began: float, rows: list[dict[str, Any]], run_name: str | None = None
) -> None:
    """Writes the rows of a part beside those of others, which another process may have run meanwhile."""
    file = RESULTS / "quality.json"
    before = json.loads(file.read_text()) if file.exists() else {"rows": {}, "runs": {}}
    run = {"commit": commit(), "date": datetime.date.today().isoformat(), "jax": jax.__version__,
           "CPU s": round(time.process_time() - began)}  # fmt: skip
    save("quality", before["rows"] | {name: rows}, documents=len(documents), tokens=int(documents.size),
         runs=before["runs"] | {run_name or name: run})  # fmt: skip


PARTS = {"kinds": kinds, "windows": windows, "evict": evictions, "quest": quest, "drafts": drafts, "needles": needles}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=list(PARTS), help="all, if none is named")
    parser.add_argument("--length", type=int, default=LENGTH, help="tokens of a document that are read")
    parser.add_argument("--stored", choices=list(KINDS)[1:], help="measure this kind alone, and nothing else")
    arguments = parser.parse_args()
    model, text = load_smollm2()
    documents = read_documents(text)[:, : arguments.length]
    if arguments.stored is not None:
        return replace_kind(arguments.stored, model, documents)
    for name in arguments.parts or PARTS:
        keep = functools.partial(save_part, name, documents, time.process_time())
        compare(name, PARTS[name](model, documents), keep)


if __name__ == "__main__":
    main()
