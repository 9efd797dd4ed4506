"""Speculation: tokens per step and per second with guesses from n-grams and from a draft of half depth, and without.

    python benchmarks/speculative.py

The small model continues Python sources, which repeat themselves, within the 256 bytes that it was trained on. Every
way must give the same tokens.
"""

import argparse
import pathlib
import sysconfig
import time

import numpy as np
from _harness import save, table
from _models import first_layers

import jaxkv


def prompts_of(files: int, places: int, length: int) -> list[list[int]]:
    """So many places of each of the largest sources of the standard library."""
    sources = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"), key=lambda f: -f.stat().st_size)[:files]
    texts = [source.read_bytes() for source in sources]
    return [list(text[len(text) * (i + 1) // (places + 1) :][:length]) for text in texts for i in range(places)]


def measure(name: str, model, draft, prompts, arguments, **guesses) -> tuple[dict, list[list[int]]]:
    engine = jaxkv.Engine(
        model, max_seqs=arguments.rows, max_seq_len=arguments.prompt + arguments.tokens, draft=draft,
        **{"draft_tokens": arguments.draft_tokens} | guesses,
    )  # fmt: skip
    list(engine.stream(prompts[: arguments.rows], 8))  # compiles
    steps, begun, start = engine.steps, time.process_time(), time.perf_counter()
    requests, times = [engine.submit(prompt, arguments.tokens) for prompt in prompts], 0
    while not all(request.done for request in requests):
        times += len(
            {request for request, token in engine.step() if token is not None}
        )  # a row's steps are those that gave it tokens
    seconds, count = time.perf_counter() - start, sum(len(request.tokens) for request in requests)
    row = {
        "guesses": name,
        "acceptance": engine.stats()["acceptance"],
        "steps": engine.steps - steps,
        "tokens / step and row": count / times,
        "tokens / s": count / seconds,
        "CPU s": time.process_time() - begun,
    }
    return row, [request.tokens for request in requests]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--files", type=int, default=20)
    parser.add_argument("--places", type=int, default=4, help="prompts of each file")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens of each")
    parser.add_argument("--draft-tokens", type=int, default=4)
    parser.add_argument("--tree-tokens", type=int, default=32)
    parser.add_argument("--branches", type=int, default=8)
    arguments = parser.parse_args()
    model = jaxkv.models.small()
    prompts = prompts_of(arguments.files, arguments.places, arguments.prompt)
    half = first_layers(model, len(model.layers) // 2)
    drafts = {"none": None, "n-grams": "ngram", "half the layers": half, "itself": model}
    found = {name: measure(name, model, draft, prompts, arguments) for name, draft in drafts.items()}
    tree = {"draft_tokens": arguments.tree_tokens, "draft_branches": arguments.branches}
    found["n-grams, a tree"] = measure("n-grams, a tree", model, "ngram", prompts, arguments, **tree)
    results = [row for row, _ in found.values()]
    for row, outputs in found.values():
        pairs = zip(outputs, found["none"][1], strict=True)
        same = [np.argmin(np.array([*(a == b for a, b in zip(x, y, strict=True)), False])) for x, y in pairs]
        row["first tokens that are equal"] = int(sum(same))
        row["speed-up"] = row["tokens / s"] / results[0]["tokens / s"]
    table(results)
    facts = vars(arguments)
    save("speculative", results, max_seqs=facts.pop("rows"), **facts)


if __name__ == "__main__":
    main()
