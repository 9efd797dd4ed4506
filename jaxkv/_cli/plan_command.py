"""`python -m jaxkv plan`: how much a cache for a model holds in a given memory, before anything is loaded."""

import argparse
import json
import pathlib
import re
from typing import Any

import jax.numpy as jnp

from jaxkv._cli import plan_report
from jaxkv._cli.memory_plan import BLOCK_SIZES, plan
from jaxkv._cli.plan_devices import Devices
from jaxkv._cli.plan_report import Memory, Option, Report
from jaxkv._cli.units import parse_bytes
from jaxkv._core.layer import KINDS
from jaxkv._core.numbers import shown
from jaxkv._core.views import format_bytes

MOST_LENGTHS = 64 << 20  # bytes of a file of lengths


def add_plan(commands: Any) -> None:
    parser = commands.add_parser(
        "plan", help="what fits into memory", description="What a cache for a model holds in a given memory."
    )
    parser.set_defaults(run=run)
    add = parser.add_argument
    add("--model", type=pathlib.Path, required=True, help="a Hugging Face folder; its config.json is enough")
    add("--memory", type=parse_bytes, required=True,
        help="of the device, or the part you give: 80GB is 80e9 bytes, 80GiB or 80G is 80 * 2**30")  # fmt: skip
    add(
        "--weights",
        type=parse_bytes,
        help="what the whole model takes; default: its files' size, or what the config says",
    )
    add("--devices", type=int, default=1,
        help="over how many the heads and the weights are divided, each with so much memory; default: one")  # fmt: skip
    add("--rest", type=parse_bytes, help="what a step may take to compute in; default: a tenth of what weights leave")
    add("--max-seq-len", type=int, help="the most tokens of a sequence; default: the longest of --lengths, or the "
        "model's")  # fmt: skip
    add("--max-seqs", type=int, help="sequences at the same time; default: as many as fit, of the lengths to expect")
    add("--mean-len", type=float, help="tokens of a sequence on the average, prompt and output; default: half of the "
        "most, but no more than 2048")  # fmt: skip
    add("--lengths", type=pathlib.Path, help="or a file of the lengths that were seen: numbers, or a list in JSON")
    add("--step-tokens", type=int, default=256,
        help="tokens of one step, which layers with a window hold too; default: %(default)s, as generate")  # fmt: skip
    add("--block-size", type=int, action="append", help="only this; may be given several times")
    add("--dtype", choices=sorted(KINDS), action="append", help="only this; may be given several times")
    add("--head-dim-multiple", type=int, default=1, help="pad head_dim to a multiple of this: 128 on a TPU")
    add("--json", action="store_true", help="print all of it as JSON")


def run(arguments: argparse.Namespace) -> int:
    from jaxkv.models.loader import read_config

    config = read_config(arguments.model)
    devices = Devices(arguments.devices)
    layers = [devices.layer(layer) for layer in config.layer_configs]
    weights, source = (arguments.weights, "as told") if arguments.weights is not None else _weights(arguments.model)
    weights = devices.weights(config, weights)
    left = arguments.memory - weights
    rest = max(0, left) // 10 if arguments.rest is None else arguments.rest
    if left - rest <= 0:
        also = f" and {format_bytes(rest)} of rest" if arguments.rest else ""
        raise ValueError(
            f"{format_bytes(arguments.memory)} of memory do not hold {format_bytes(weights)} of weights ({source})"
            f"{also}: give more memory, or with --weights what they really take."
        )
    lengths = None if arguments.lengths is None else _lengths(arguments.lengths)
    max_seq_len = arguments.max_seq_len
    if max_seq_len is None:
        max_seq_len = config.max_seq_len if lengths is None else max(lengths)
    options, why = [], ""
    for dtypes in _kinds(arguments.dtype):
        for block_size in arguments.block_size or BLOCK_SIZES:
            try:
                found = plan(layers, left - rest, max_seq_len=max_seq_len, max_seqs=arguments.max_seqs,
                             mean_len=arguments.mean_len, lengths=lengths, step_tokens=arguments.step_tokens,
                             block_size=block_size, dtype=dtypes[0],
                             head_dim_multiple=arguments.head_dim_multiple)  # fmt: skip
            except ValueError as error:
                found, why = None, str(error)
            options.append(Option(block_size, dtypes, found))
    if not any(option.plan for option in options):
        raise ValueError(why)
    report = Report(
        model=config, memory=Memory(arguments.memory, weights, source, rest), max_seq_len=max_seq_len,
        step_tokens=arguments.step_tokens, is_told=arguments.mean_len is not None or lengths is not None,
        options=options, devices=devices,
    )  # fmt: skip
    print(json.dumps(plan_report.as_json(report), indent=1) if arguments.json else plan_report.as_text(report))
    return 0


def _lengths(file: pathlib.Path) -> list[int]:
    """The numbers in a file, however they are parted."""
    if not file.is_file():
        raise FileNotFoundError(f"{file} is not a file: --lengths takes one with the lengths of sequences.")
    if file.stat().st_size > MOST_LENGTHS:
        raise ValueError(f"{file} has {file.stat().st_size} bytes: a sample of the lengths, a few thousand, is enough.")
    words = [word for word in re.split(r"[\s,;\[\]]+", file.read_text(encoding="utf-8", errors="replace")) if word]
    wrong = next((word for word in words if not re.fullmatch(r"[0-9]{1,18}", word)), None)
    if wrong is not None or not words:
        what = f"has {shown(wrong)} in it" if wrong is not None else "is empty"
        raise ValueError(f"{file} must have whole numbers, the lengths of sequences in tokens, but {what}.")
    return [int(word) for word in words]


def _kinds(names: list[str] | None) -> list[list[str]]:
    """The dtypes, those that cost the same together."""
    kinds: dict[Any, list[str]] = {}
    for name in names or KINDS:
        kinds.setdefault(KINDS[name].bytes_per_element, []).append(name)
    return list(kinds.values())


def _weights(folder: pathlib.Path) -> tuple[int, str]:
    """Bytes of a model's weights, and where that is known from."""
    from jaxkv.models.loader import count_parameters, read_config, weight_files

    try:
        files = weight_files(folder)
        return sum(file.stat().st_size for file in files), f"{len(files)} file{'s' * (len(files) > 1)}"
    except FileNotFoundError:
        pass
    config, fields = read_config(folder), json.loads((folder / "config.json").read_text())
    dtype = fields.get("dtype") or fields.get("torch_dtype") or "bfloat16"
    try:
        element = jnp.dtype(dtype).itemsize
    except TypeError:
        raise ValueError(f"{folder} has weights of {dtype}, whose size is not known: say it with --weights.") from None
    count = count_parameters(config)
    return count * element, f"{count:,} parameters of {dtype}"
