"""`python -m jaxkv generate`: continues prompts, streams the text, and prints a report."""

import argparse
import pathlib
import sys
import time
from typing import Any

from jaxkv._cli.text import ByteTokenizer, TextCodec, TextStream
from jaxkv._cli.units import parse_bytes
from jaxkv._core.cache.checks import stats
from jaxkv._core.cache.inspection import format_bytes
from jaxkv._core.config.validation import MOST_INDEX, integer
from jaxkv._engine.requests.eviction_policy import SCORES, Eviction
from jaxkv._files.hub import find_model
from pallas_kernels.common.quantization import FORMATS

# Long enough to show what a byte-level decoder has learned, and of very different lengths.
DEMO_PROMPTS = (
    "import os\nimport sys\n\ndef main(",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "for i in range(",
    'def read_file(path):\n    """Read a file and return its contents."""\n    with open(path) as f:\n        ',
    "try:\n    ",
)


def add_generate(commands: Any) -> None:
    parser = commands.add_parser("generate", help="continue prompts", description="Continue prompts, all at once.")
    parser.set_defaults(run=generate)
    add = parser.add_argument
    add(
        "--model",
        type=pathlib.Path,
        help="a Hugging Face folder or owner/name; default: a small model of Python source, built in",
    )
    add("--prompt", action="append", default=[], help="a prompt; may be given several times")
    add("--prompts", type=pathlib.Path, help="a text file with one prompt per line")
    add("--max-new-tokens", type=int, default=96, help="default: %(default)s")
    add("--temperature", type=float, default=0.7, help="0: always the likeliest token; default: %(default)s")
    add("--top-k", type=int, default=0, help="sample among so many likeliest tokens; 0, the default: all")
    add("--top-p", type=float, default=1.0, help="sample among the likeliest tokens of this probability; default: 1")
    add("--min-p", type=float, default=0.0, help="sample among tokens of this share of the likeliest one; default: 0")
    add("--seed", type=int, default=0, help="of the random draws; default: %(default)s")
    add("--max-seqs", type=int, default=8, help="sequences computed at the same time; default: %(default)s")
    add("--max-seq-len", type=int, help="the most tokens of a sequence; default: what the prompts need")
    add(
        "--memory",
        type=parse_bytes,
        help="what the cache may take, for example 512MiB or 2GB; default: what all rows need",
    )
    add("--block-size", type=int, help="tokens per block; default: what the kernels of the platform take, 16 on a CPU")
    add(
        "--dtype",
        help="compute and cache in this dtype; default: float32 for the built-in model, else the checkpoint's",
    )
    add("--cache-dtype", choices=sorted(FORMATS), help="store keys and values in this; default: what is computed in")
    add("--evict", choices=SCORES, help="after the prompt keep the tokens of each row that this score finds best")
    add("--keep", type=_share, help="with --evict: a share, or a number of tokens; default: 0.5")
    add(
        "--budget",
        choices=("uniform", "pyramid", "ada"),
        help="with --evict: the same for all, more for first layers, or heads compete; default: uniform",
    )
    add("--every", type=int, help="with --evict: keep no more than that after every so many tokens, too")
    add("--prefix-disk", type=pathlib.Path, help="a folder that keeps the blocks of prompts for the next call")
    add(
        "--prefix-disk-bytes",
        type=parse_bytes,
        help="what it may take, and host memory on the way, for example 2GB; default: 1GiB",
    )
    add("--devices", type=int, default=1, help="divide model and cache over so many devices; default: %(default)s")
    add("--no-check", action="store_true", help="do not compare the output with a recomputation without any cache")


def generate(arguments: argparse.Namespace) -> int:
    """Continues prompts, streams the text, and prints a report."""
    import jaxkv
    import jaxkv.text

    prompts = _prompts(arguments)
    max_new_tokens = integer("max_new_tokens", arguments.max_new_tokens, least=1, most=MOST_INDEX // 2)
    options = {} if arguments.dtype is None else {"dtype": arguments.dtype}
    options |= {} if arguments.devices == 1 else {"mesh": _mesh(arguments.devices)}
    tokenizer: TextCodec
    if arguments.model is None:
        model, tokenizer = jaxkv.models.small(**options), ByteTokenizer()
    else:
        arguments.model = find_model(arguments.model)
        model = jaxkv.models.load(arguments.model, **options)
        tokenizer = ByteTokenizer() if model.config.byte_tokens else jaxkv.text.Tokenizer(arguments.model)
    choice = {
        "temperature": arguments.temperature,
        "top_k": arguments.top_k,
        "top_p": arguments.top_p,
        "min_p": arguments.min_p,
        "seed": arguments.seed,
    }
    tokens = [tokenizer.encode(prompt) for prompt in prompts]
    with jaxkv.Engine(
        model, max_seqs=arguments.max_seqs, max_seq_len=arguments.max_seq_len, memory_bytes=arguments.memory,
        block_size=arguments.block_size, longest=max(map(len, tokens)) + max_new_tokens,
        cache_dtype=arguments.cache_dtype, evict=_eviction(arguments), **_prefix(arguments),
    ) as engine:  # fmt: skip
        return _continue(arguments, engine, tokenizer, prompts, tokens, max_new_tokens, choice, model)


def _continue(
    arguments: argparse.Namespace, engine: Any, tokenizer: TextCodec, prompts: list[str], tokens: list[list[int]],
    max_new_tokens: int, choice: dict[str, Any], model: Any,
) -> int:  # fmt: skip
    # A prompt that cannot be continued does not stop the others.
    problems = {i: why for i, t in enumerate(tokens) if (why := engine.problem(t, max_new_tokens))}
    for i, why in problems.items():
        print(f"jaxkv: prompt {i + 1} is left out: {why}.", file=sys.stderr)
    kept = [i for i in range(len(tokens)) if i not in problems]
    if not kept:
        return 2
    prompts, tokens = [prompts[i] for i in kept], [tokens[i] for i in kept]

    start = time.perf_counter()
    stream = engine.stream(tokens, max_new_tokens, eos=model.config.eos_ids, **choice)
    outputs: list[list[int]] = [[] for _ in tokens]
    times = []
    printer = _Printer([i + 1 for i in kept], prompts, [TextStream(tokenizer, prompt) for prompt in tokens])
    for index, token in stream:
        times.append(time.perf_counter() - start)
        outputs[index].append(token)
        printer.add(index, token)
    printer.finish()
    if engine.prefix is not None:
        engine.prefix.flush(engine.cache)
    # A cache that rounds more than the model, or evicts, leads to other tokens.
    checked = not arguments.no_check and arguments.evict is None and engine.config.kind(0).declared_dtype == model.dtype
    print(_report(engine, tokens, outputs, times, choice if checked else None))
    return 1 if problems else 0


def _share(text: str) -> float:
    """Parses a number of tokens, or a share of them."""
    return int(text) if text.strip().isdigit() else float(text)


def _eviction(arguments: argparse.Namespace) -> Eviction | None:
    given = {name: getattr(arguments, name) for name in ("keep", "budget", "every")}
    given = {name: value for name, value in given.items() if value is not None}
    if arguments.evict is not None:
        return Eviction(arguments.evict, **given)
    for name in given:
        raise ValueError(f"--{name} is for --evict, which says by what score tokens are kept: give both, or neither.")
    return None


def _prefix(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the options of an engine that keeps prompts' blocks for later prompts."""
    if arguments.prefix_disk is None:
        if arguments.prefix_disk_bytes is not None:
            raise ValueError("--prefix-disk-bytes is for --prefix-disk, the folder: give both, or neither.")
        return {}
    most = parse_bytes("1GiB") if arguments.prefix_disk_bytes is None else arguments.prefix_disk_bytes
    return {"prefix_cache": True, "spill_bytes": int(most), "disk": arguments.prefix_disk, "disk_bytes": most}


def _mesh(count: int) -> Any:
    import jax
    import numpy as np

    devices = jax.devices()
    if not 1 <= count <= len(devices):
        raise ValueError(f"--devices must be from 1 to {len(devices)}, the devices that there are, not {count}.")
    return jax.sharding.Mesh(np.array(devices[:count]), ("model",))


def _prompts(arguments: argparse.Namespace) -> list[str]:
    prompts = list(arguments.prompt)
    if arguments.prompts is not None:
        if not arguments.prompts.is_file():
            raise FileNotFoundError(
                f"{arguments.prompts} is not a file: --prompts takes a text file with one prompt per line."
            )
        try:
            text = arguments.prompts.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{arguments.prompts} is no text in UTF-8 ({error}): convert it first.") from error
        prompts += [line for line in text.splitlines() if line.strip()]
        if not prompts:
            raise ValueError(f"{arguments.prompts} has no prompts: write one per line.")
    return prompts or list(DEMO_PROMPTS)


class _Printer:
    """Prints text as it is generated: a single prompt's unchanged, several prompts' line by line with their numbers."""

    PROGRESS_FROM = 16  # prompts; the text of more would only scroll by

    def __init__(self, numbers: list[int], prompts: list[str], streams: list[TextStream]):
        self.numbers, self.streams = numbers, streams
        self.unprinted = list(prompts)
        self.alone = len(prompts) == 1
        self.bar: Any = _progress_bar() if len(prompts) >= self.PROGRESS_FROM else None
        for index in range(len(prompts)):
            self._show(index, "")

    def add(self, index: int, token: int) -> None:
        self._show(index, self.streams[index].add(token))
        if self.bar is not None:
            self.bar.update()

    def finish(self) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None
        for index, stream in enumerate(self.streams):
            self._show(index, f"{stream.finish()}\n")

    def _show(self, index: int, text: str) -> None:
        self.unprinted[index] += text
        if self.bar is not None:  # the text is printed at the end
            return
        if self.alone:
            print(self.unprinted[index], end="", flush=True)
            self.unprinted[index] = ""
            return
        *lines, self.unprinted[index] = self.unprinted[index].split("\n")
        for line in lines:
            print(f"{self.numbers[index]}> {line}", flush=True)


def _progress_bar() -> Any:
    try:
        from tqdm import tqdm
    except ImportError:
        return None  # then the text itself shows the progress
    return tqdm(unit=" tokens")


def _report(engine: Any, prompts: list, outputs: list, times: list[float], choice: dict | None) -> str:
    config, count = engine.config, len(times)
    first, last = (times[0], times[-1]) if times else (0.0, 0.0)
    rate = f", then {(count - 1) / (last - first):.0f} tokens/s" if last > first else ""
    held = stats(engine.cache)
    used, blocks = held["blocks_peak"], held["num_blocks"]
    shortest, longest = min(map(len, prompts)), max(map(len, prompts))
    plural, lengths = ("s", f"{shortest} to {longest}") if longest > shortest else ("s" * (len(prompts) > 1), longest)
    lines = [
        f"{len(prompts)} prompt{plural} of {lengths} tokens, "
        f"{count} new tokens in {last:.1f} s: the first after {first:.1f} s, compilation included{rate}.",
        f"{engine.steps} steps; {used} of {blocks} blocks of {config.block_size} tokens used at the most, "
        f"{blocks - used} free; {engine.set_back} sequences set back.",
        f"Used {format_bytes(held['bytes_peak'])}; a dense cache of {config.max_seqs} rows of "
        f"{config.max_seq_len} tokens takes {format_bytes(config.dense_bytes)}.",
    ]
    if engine.prefix is not None:
        saved = engine.stats()["tokens_saved"]
        lines.append(f"{saved} of the prompts' {sum(map(len, prompts))} tokens were known from before.")
    if choice is not None:
        same = [
            engine.recompute(prompt, output, index=i, **choice) == output
            for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
        ]
        verdict = "equals" if all(same) else f"DIFFERS in {same.count(False)} of {len(same)} prompts from"
        lines.append(f"The output {verdict} a recomputation without any cache.")
    return "\n" + "\n".join(lines)
