"""`python -m jaxkv generate`: continues prompts, streams the text, and prints a report."""

import argparse
import itertools
import sys
import time
from typing import Any

import jaxkv
from jaxkv._cli.compiling import announce, keep_compiled
from jaxkv._cli.option_names import name_options
from jaxkv._cli.text import (
    TextModel,
    TextStream,
    TokenIds,
    describe_limit,
    is_cut,
    open_model,
    penalty_options,
    prefix_options,
)
from jaxkv._core.cache.checks import stats
from jaxkv._core.cache.inspection import format_bytes
from jaxkv._engine.requests.eviction_policy import Eviction
from jaxkv._files.packaged_model import smollm2
from jaxkv.text.tokenizer import Tokenizer

# Answered by a real model...
QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue? Answer in two sentences.",
    "Write a Python function that adds two numbers.",
    "Name three animals that can fly.",
    "Translate to Spanish: Good morning, my friend.",
)
# ... or continued by the built-in one: long enough to show what a byte-level decoder has learned, of many lengths.
DEMO_PROMPTS = (
    "import os\nimport sys\n\ndef main(",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "for i in range(",
    'def read_file(path):\n    """Read a file and return its contents."""\n    with open(path) as f:\n        ',
    "try:\n    ",
)


@keep_compiled()
def generate(arguments: argparse.Namespace) -> int:
    """Continues prompts, streams the text, and prints a report."""
    prompts = _prompts(arguments)
    max_new_tokens = arguments.max_new_tokens
    if arguments.system is not None and not arguments.chat:
        raise ValueError("--system is for --chat, where the model is told something before the question: give both.")
    if arguments.chat and arguments.token_ids:
        raise ValueError(
            "--token-ids gives tokens as they are, and --chat makes them of a question: give one of the two."
        )
    if arguments.token_ids and not (arguments.prompt or arguments.prompts):
        raise ValueError("--token-ids says how prompts are written: give some with --prompt or --prompts.")
    opened = open_model(arguments, TokenIds() if arguments.token_ids else None)
    tokens = _encode(arguments, opened, prompts)
    with jaxkv.Engine(
        opened.model,
        max_seqs=arguments.max_seqs,
        max_seq_len=arguments.max_seq_len,
        memory_bytes=arguments.memory,
        block_size=arguments.block_size,
        longest=max(map(len, tokens)) + max_new_tokens,
        seed=arguments.seed,
        cache_dtype=arguments.cache_dtype,
        residual_length=arguments.residual_length,
        evict=_eviction(arguments),
        **penalty_options(opened.penalties),
        **prefix_options(arguments),
    ) as engine:
        return _continue(arguments, engine, opened, prompts, tokens, max_new_tokens)


def demo(arguments: argparse.Namespace) -> int:
    """Answers five questions at once with a small real model; where it cannot be had, continues five texts."""
    try:
        path = smollm2()
    except (OSError, ValueError) as error:
        reason = str(error).rstrip(".")
        print(f"jaxkv: {reason}: the built-in model, which continues Python sources, takes its place.", file=sys.stderr)
        return arguments.generate([])
    options = ["--model", str(path), "--chat", "--temperature", "0", "--max-new-tokens", "64", "--no-check"]
    return arguments.generate([*options, *(word for question in QUESTIONS for word in ("--prompt", question))])


def _encode(arguments: argparse.Namespace, opened: TextModel, prompts: list[str]) -> list[list[int]]:
    if not arguments.chat:
        return [opened.text.encode(prompt) for prompt in prompts]
    system = [] if arguments.system is None else [{"role": "system", "content": arguments.system}]
    return [opened.chat.chat([*system, {"role": "user", "content": prompt}]) for prompt in prompts]


def _continue(
    arguments: argparse.Namespace,
    engine: Any,
    opened: TextModel,
    prompts: list[str],
    tokens: list[list[int]],
    max_new_tokens: int,
) -> int:
    # A prompt that cannot be continued does not stop the others.
    problems = {i: why for i, t in enumerate(tokens) if (why := engine.problem(t, max_new_tokens))}
    for i, why in problems.items():
        print(f"jaxkv: prompt {i + 1} is left out: {name_options(why, arguments.options)}.", file=sys.stderr)
    kept = [i for i in range(len(tokens)) if i not in problems]
    if not kept:
        return 2
    prompts, tokens = [prompts[i] for i in kept], [tokens[i] for i in kept]

    start = time.perf_counter()
    draw = {name: value for name, value in opened.sampling.items() if name != "seed"}  # the engine has the seed
    requests = [engine.submit(prompt, max_new_tokens, eos=opened.eos, **draw) for prompt in tokens]
    indices = {request: index for index, request in enumerate(requests)}
    outputs: list[list[int]] = [[] for _ in tokens]
    times = []
    shown = [f"{prompt}\n" for prompt in prompts] if arguments.chat else prompts
    printer = _Printer([i + 1 for i in kept], shown, [TextStream(opened.text, prompt) for prompt in tokens])
    for request, token in announce(engine.run()):
        index = indices[request]
        if token is None:
            printer.end(index)
            continue
        times.append(time.perf_counter() - start)
        outputs[index].append(token)
        printer.add(index, token)
    printer.finish()
    for request in requests:
        request.result()  # raises the error of one that could not go on
    pairs = {i + 1: pair for i, *pair in zip(kept, tokens, outputs, strict=True)}
    _say_what_is_cut(engine, opened, pairs, max_new_tokens)
    if engine.prefix is not None:
        engine.prefix.flush(engine.cache)
    # A cache that rounds more than the model, or evicts, leads to other tokens.
    own = engine.config.kind(0).declared_dtype == opened.model.dtype
    checked = not arguments.no_check and arguments.evict is None and own
    print(_report(engine, tokens, outputs, times, opened.sampling if checked else None))
    if not arguments.chat and isinstance(opened.text, Tokenizer) and opened.text.has_template:
        empty = sum(not opened.text.decode(output).strip() for output in outputs)
        if empty:
            print(
                f"jaxkv: {empty} of {len(outputs)} prompts were answered with nothing: the model is made for chats, "
                "so give --chat.",
                file=sys.stderr,
            )
    return 1 if problems else 0


def _say_what_is_cut(engine: Any, opened: TextModel, pairs: dict[int, list[list[int]]], max_new_tokens: int) -> None:
    """Says on stderr which outputs end because the context is full, and not as was asked.

    Args:
      pairs: a prompt and its output, by the prompt's number.
    """
    cut = {number: len(output) for number, (p, output) in pairs.items() if is_cut(engine, p, output, max_new_tokens)}
    if not cut:
        return
    shortest, longest = min(cut.values()), max(cut.values())
    plural = "s" * (longest > 1)
    after = f"{longest} token{plural}" if shortest == longest else f"{shortest} to {longest} tokens"
    whose = f"prompt {next(iter(cut))} " if len(cut) == 1 else f"{len(cut)} of {len(pairs)} prompts "
    print(
        f"jaxkv: {whose if len(pairs) > 1 else ''}stopped after {after}: {describe_limit(engine, opened)}.",
        file=sys.stderr,
    )


def _eviction(arguments: argparse.Namespace) -> Eviction | None:
    given = {name: getattr(arguments, name) for name in ("keep", "budget", "every")}
    given = {name: value for name, value in given.items() if value is not None}
    if arguments.evict is not None:
        return Eviction(arguments.evict, **given)
    for name in given:
        raise ValueError(f"--{name} is for --evict, which says by what score tokens are kept: give both, or neither.")
    return None


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
    """Prints text as it is generated: a single prompt's unchanged, several prompts' in one block each, whose lines
    begin with its number. The first block that is not finished grows as its tokens come; those behind it wait."""

    PROGRESS_FROM = 16  # prompts; the text of more would only scroll by

    def __init__(self, numbers: list[int], prompts: list[str], streams: list[TextStream]):
        self.numbers, self.streams = numbers, streams
        self.unprinted = list(prompts)
        self.is_done = [False] * len(prompts)
        self.current, self.in_line = 0, False  # the block that grows, and whether its last line has begun
        self.bar: Any = _progress_bar() if len(prompts) >= self.PROGRESS_FROM else None
        self._print()

    def add(self, index: int, token: int) -> None:
        self.unprinted[index] += self.streams[index].add(token)
        self._print()
        if self.bar is not None:
            self.bar.update()

    def end(self, index: int) -> None:
        """Ends a prompt's block, so that the next one can be printed."""
        self.is_done[index] = True
        self.unprinted[index] += f"{self.streams[index].finish()}\n"
        self._print()

    def finish(self) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None
        self._print()

    def _print(self) -> None:
        while self.bar is None and self.current < len(self.streams):  # beside a bar the text is printed at the end
            text, self.unprinted[self.current] = self.unprinted[self.current], ""
            print(self._number_lines(text) if len(self.streams) > 1 else text, end="", flush=True)
            if not self.is_done[self.current]:
                return
            self.current += 1

    def _number_lines(self, text: str) -> str:
        """Puts the current block's number before each line that begins in a text."""
        if not text:
            return ""
        number = f"{self.numbers[self.current]}> "
        first, self.in_line = "" if self.in_line else number, not text.endswith("\n")
        return first + text[:-1].replace("\n", f"\n{number}") + text[-1]


def _progress_bar() -> Any:
    try:
        from tqdm import tqdm
    except ImportError:
        return None  # then the text itself shows the progress
    return tqdm(unit=" tokens")


def _tokens_per_second(times: list[float]) -> float | None:
    """Returns the rate of tokens behind the longest pause, in which the program of decode steps is compiled."""
    pauses = [after - before for before, after in itertools.pairwise(times)]
    if len(pauses) < 2:
        return None
    begin = pauses.index(max(pauses)) + 1
    seconds = times[-1] - times[begin]
    return (len(times) - 1 - begin) / seconds if seconds else None


def _check(engine: Any, prompts: list, outputs: list, choice: dict) -> str:
    """Says whether the outputs equal what is computed without any cache."""
    wrong = [
        sum(a != b for a, b in zip(engine.recompute(prompt, output, index=i, **choice), output, strict=True))
        for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
    ]
    if not any(wrong):
        return "The output equals a recomputation without any cache."
    where = f" in {sum(map(bool, wrong))} of {len(wrong)} prompts" if len(wrong) > 1 else ""
    found = (
        f"The output DIFFERS{where} from a recomputation without any cache, in {sum(wrong)} of "
        f"{sum(map(len, outputs))} tokens."
    )
    stored = engine.config.kind(0)
    if stored.bytes_per_element == 2:
        found += f" Rounding in {stored.name} can do that: --dtype float32 compares exactly."
    return found


def _report(engine: Any, prompts: list, outputs: list, times: list[float], choice: dict | None) -> str:
    config, count = engine.config, len(times)
    first = times[0] if times else 0.0
    rate = f", then {found:.0f} tokens/s" if (found := _tokens_per_second(times)) else ""
    usage = stats(engine.cache)
    used, blocks = usage["blocks_peak"], usage["num_blocks"]
    shortest, longest = min(map(len, prompts)), max(map(len, prompts))
    plural, lengths = ("s", f"{shortest} to {longest}") if longest > shortest else ("s" * (len(prompts) > 1), longest)
    last = times[-1] if times else 0.0
    lines = [
        f"{len(prompts)} prompt{plural} of {lengths} tokens, "
        f"{count} new tokens in {last:.1f} s: the first after {first:.1f} s, compilation included{rate}.",
        f"{engine.steps} steps; {used} of {blocks} blocks of {config.block_size} tokens used at the most, "
        f"{blocks - used} free; {engine.set_back} sequences preempted.",
        f"Used {format_bytes(usage['bytes_peak'])}; a dense cache of {config.max_seqs} rows of "
        f"{config.max_seq_len} tokens takes {format_bytes(config.dense_bytes)}.",
    ]
    if engine.prefix is not None:
        saved = engine.stats()["tokens_saved"]
        lines.append(f"{saved} of the prompts' {sum(map(len, prompts))} tokens were known from before.")
    if choice is not None:
        lines.append(_check(engine, prompts, outputs, choice))
    return "\n" + "\n".join(lines)
