"""Whole models generating on an NVIDIA GPU, by `jaxkv.Engine` and `jaxkv.generate`, with random weights.

    python benchmarks/gpu_generate.py             most important first, in at most 100 seconds, compilation included;
                                                  writes results/gpu_generate.json as it goes
    python benchmarks/gpu_generate.py --only X    what a row says matches a regular expression, such as "llama.*rows=8"
    python benchmarks/gpu_generate.py --dry-run   tiny models on any machine, and whether steps of true size lower for
                                                  a GPU; writes nothing

A step of decode reads the weights and the rows' keys and values once: its share is that many bytes, over the time, of
what the best program reads that does nothing else. Of a step the host's time is what its thread does not wait for the
device; what the device does is the profiler's sum of kernels. The models are computed as `jaxkv.models.load` has them
on a GPU.
"""

import argparse
import functools
import importlib.metadata
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
from _harness import RESULTS, commit, table
from gpu import STARTED, yardsticks
from gpu_book import Book, run_worker
from gpu_engines import Runs, Sizes, generate_once
from gpu_models import (
    MODELS,
    TINY_MODELS,
    cast_float32,
    choice_of,
    first_layers,
    logits_of,
    lowered,
    random_model,
    use_xla,
)

SECONDS = 100
LONGEST = 50  # seconds of a row, its compilation included
SOME_LAYERS = 6
LEAST = 6  # seconds without which nothing is begun
SHOWN = ("what", "model", "rows", "by", "tokens_per_second", "step_ms", "share", "host_ms", "busy", "first_token_ms",
         "first_seconds", "equal", "off", "error")  # fmt: skip


def compare_tokens(ours: list[list[int]] | None, others: list[list[int]] | None) -> dict[str, Any]:
    """Random weights give logits that lie close together: where rounding once decides otherwise, all that follows is
    another text. So the tokens until then are counted, too, and how many rows agree in the first decode step."""
    if ours is None or others is None:
        raise RuntimeError("There are no tokens of this process to compare.")
    same = np.array(ours) == np.array(others)
    return {"equal": float(same.mean()), "equal_until_first": float(np.cumprod(same, axis=1).sum(axis=1).mean()),
            "rows_equal_in_2_tokens": int(same[:, :2].all(axis=1).sum())}  # fmt: skip


class Logits:
    """Logits after prompts and after one more token, by each way to compute them."""

    def __init__(self, model: Any, rows: int, sizes: Sizes):
        rng = np.random.default_rng(1)
        self.prompts = rng.integers(0, model.vocab_size, (rows, sizes.prompt)).astype(np.int32)
        self.following = self.prompts[:, 0]
        self.ways = {
            "ours": lambda: model,
            "xla": lambda: use_xla(model),
            "float32": lambda: cast_float32(model),
        }

    @functools.cache  # noqa: B019 (there is one object)
    def of(self, way: str) -> np.ndarray:
        return logits_of(self.ways[way](), self.prompts, self.following)

    def compare(self, way: str, right: str) -> dict[str, Any]:
        x, y = self.of(way), self.of(right)
        off, same = np.abs(x - y), x.argmax(-1) == y.argmax(-1)
        (prefill, decode), (equal, equal_decode) = off.max(axis=(1, 2)), same.mean(axis=1)
        why = {} if right == "xla" else {"why_xla": choice_of(self.ways[right]()).reason}
        return why | {"off": float(prefill), "off_decode": float(decode), "mean_off": float(off[0].mean()),
                "mean_off_decode": float(off[1].mean()), "largest": float(np.abs(y).max()), "equal": float(equal),
                "equal_decode": float(equal_decode), "finite": bool(np.isfinite(x).all())}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="REGEX", help="what a row says, or a part of it")
    parser.add_argument("--dry-run", action="store_true", help="tiny models on any machine; writes nothing")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time for all of it; default: %(default)s")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS, help="the folder that gets gpu_generate.json")
    parser.add_argument("--commit", help="of the sources, where they were copied without their history")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    until = options.until or STARTED + options.seconds
    if options.dry_run:
        with tempfile.TemporaryDirectory() as folder:
            options.results = pathlib.Path(folder)
            raise SystemExit(run(options, time.time() + 3600))
    raise SystemExit(run_worker(sys.argv[1:], until) if options.worker is None else run(options, until))


def run(options: argparse.Namespace, until: float) -> str | int:
    """Everything in this process; the status it should end with, or what to say."""
    dry = options.dry_run
    if not dry and jax.default_backend() != "gpu":
        return "JAX finds no GPU. Without one: --dry-run."
    book = Book(
        options.results / "gpu_generate.json", go_on=bool(options.worker), only=options.only,
        commit=options.commit or commit(), jaxlib=importlib.metadata.version("jaxlib"),
        memory=(jax.devices()[0].memory_stats() or {}).get("bytes_limit"),
    )  # fmt: skip
    measure(book, until, dry)
    table([{key: row[key] for key in SHOWN if key in row} for row in book.rows if row["what"] != "lowers"])
    wrong = [row for row in book.rows if "error" in row]
    wanted = "xla" if dry else "gpu"
    others = [row for row in book.rows if row.get("by") == "ours" and row.get("default_of_decode", wanted) != wanted]
    if wrong or others:
        return f"{len(wrong)} rows have errors; {len(others)} engines did not choose the {wanted} kernels by default."
    return 0


def measure(book: Book, until: float, dry: bool) -> None:
    """Every row in turn, most important first, until the time is up."""
    sizes, configs = Sizes(dry), TINY_MODELS if dry else MODELS
    few, *many = (5, 3, 8) if dry else (8, 64, 256)
    small, large = configs

    def attempt(what: dict[str, Any], found: Callable[[], dict[str, Any]], longest: float = LONGEST) -> None:
        left = until - time.time()
        if (what["what"] == "read" or book.wants(what)) and (dry or left > LEAST):
            book.attempt(what, found, 600 if dry else min(longest, left))

    @functools.cache
    def model(name: str) -> Any:
        return random_model(configs[name])

    outputs: dict[str, list[list[int]]] = {}

    def pieces(name: str, rows: int, *more: str, by: str = "ours", steps: int = 1) -> None:
        """Decodes with an engine, and does more with it: "kernels", and "long" prompts."""
        runs = functools.cache(lambda: Runs(model(name) if by == "ours" else use_xla(model(name)), rows, sizes, steps))
        row = {"model": name, "rows": rows, "by": by} | ({"steps_per_dispatch": steps} if steps > 1 else {})

        def decode() -> dict[str, Any]:
            found = runs().decode(rate)
            if (name, rows, steps) == (small, few, 1):
                outputs[by] = runs().tokens
            return found

        attempt({"what": "decode"} | row, decode)
        if "long" in more:
            attempt({"what": "first token"} | row, lambda: runs().first_token())
        if "kernels" in more:
            attempt({"what": "kernels of decode"} | row, lambda: runs().decode_kernels())
            if "long" in more:
                attempt({"what": "kernels of a prompt"} | row, lambda: runs().prefill_kernels())
        if runs.cache_info().currsize:
            runs().close()

    logits = functools.cache(lambda layers: Logits(first_layers(model(small), layers), few, sizes))

    def check_logits(layers: int) -> None:
        for by, right in (("ours", "xla"), ("ours", "float32"), ("xla", "float32")):
            row = {"what": "check logits", "model": small, "rows": few, "layers": layers, "by": by, "against": right}
            attempt(row, lambda by=by, right=right: logits(layers).compare(by, right))

    for name, by, bandwidth in yardsticks(1e6 if dry else 4e9):
        if name == "read":
            attempt({"what": name, "by": by}, bandwidth, longest=20)
    rate = max((row["bytes_per_second"] for row in book.rows if "of_datasheet" in row), default=None)
    attempt({"what": "weights", "model": small}, lambda: weigh(model, small))
    pieces(small, few, "long", "kernels")
    check_logits(min(SOME_LAYERS, configs[small].num_layers))  # fewer compile sooner
    attempt({"what": "weights", "model": large}, lambda: weigh(model, large))
    pieces(large, few, "long", "kernels")
    pieces(small, few, by="xla")
    attempt(
        {"what": "check tokens", "model": small, "rows": few, "by": "ours", "against": "xla"},
        lambda: compare_tokens(outputs.get("ours"), outputs.get("xla")),
    )
    pieces(large, many[0], "kernels")
    pieces(large, 1, "kernels")
    pieces(small, many[0], "kernels")
    pieces(small, few, steps=2 if dry else 8)
    pieces(small, 1)
    attempt({"what": "generate", "model": small, "rows": few}, lambda: generate_once(model(small), few, sizes))
    pieces(small, many[1])
    check_logits(configs[small].num_layers)
    if dry:
        for name, config in MODELS.items():
            for rows, tokens in ((8, None), (8, 2112), (64, None), (1, None)):
                row = {"what": "lowers", "model": name, "rows": rows, "packed": tokens}
                attempt(row, functools.partial(lowered, config, rows, tokens, 4096))


def weigh(model: Callable[[str], Any], name: str) -> dict[str, Any]:
    began = time.perf_counter()
    leaves = jax.tree.leaves(model(name))
    jax.block_until_ready(leaves)
    finite = all(bool(jnp.isfinite(x).all()) for x in leaves[:4])
    return {"seconds": time.perf_counter() - began, "bytes": sum(x.nbytes for x in leaves), "finite": finite}


if __name__ == "__main__":
    main()
