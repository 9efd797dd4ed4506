"""`python -m jaxkv plan`: how much a cache for a model holds in a given memory, before anything is loaded."""

import argparse
import json
import pathlib
from typing import Any

import jax.numpy as jnp

from jaxkv._cli.memory_plan import BLOCK_SIZES, Plan, plan
from jaxkv._cli.units import parse_bytes
from jaxkv._core.layer import KINDS, LayerConfig
from jaxkv._core.views import format_bytes


def add_plan(commands: Any) -> None:
    parser = commands.add_parser(
        "plan", help="what fits into memory", description="What a cache for a model holds in a given memory."
    )
    parser.set_defaults(run=run)
    add = parser.add_argument
    add("--model", type=pathlib.Path, required=True, help="a Hugging Face folder; its config.json is enough")
    add("--memory", type=parse_bytes, required=True,
        help="of the device, or the part you give: 80GB is 80e9 bytes, 80GiB or 80G is 80 * 2**30")  # fmt: skip
    add("--weights", type=parse_bytes, help="what the model takes; default: its files' size, or what the config says")
    add("--max-seq-len", type=int, help="the most tokens of a sequence; default: the model's")
    add("--max-seqs", type=int, help="sequences at the same time; default: as many as fit at that length")
    add("--mean-len", type=float, help="tokens of a sequence on the average, for the waste; default: half of the most")
    add("--step-tokens", type=int, default=256,
        help="tokens of one step, which layers with a window hold too; default: %(default)s, as generate")  # fmt: skip
    add("--block-size", type=int, action="append", help="only this; may be given several times")
    add("--dtype", choices=sorted(KINDS), action="append", help="only this; may be given several times")
    add("--head-dim-multiple", type=int, default=1, help="pad head_dim to a multiple of this: 128 on a TPU")


def run(arguments: argparse.Namespace) -> int:
    from jaxkv.models.loader import read_config

    config = read_config(arguments.model)
    layers = [
        LayerConfig(num_kv_heads=config.num_kv_heads, head_dim=config.head_dim, window=window)
        for window in config.windows
    ]
    weights, source = (arguments.weights, "as told") if arguments.weights is not None else _weights(arguments.model)
    memory = arguments.memory - weights
    if memory <= 0:
        raise ValueError(
            f"{format_bytes(arguments.memory)} of memory do not hold {format_bytes(weights)} of weights ({source}): "
            "give more memory, or with --weights what they really take."
        )
    max_seq_len = config.max_seq_len if arguments.max_seq_len is None else arguments.max_seq_len
    plans: list[tuple[int, str, Plan | None]] = []
    why = ""
    for dtypes in _kinds(arguments.dtype):
        for block_size in arguments.block_size or BLOCK_SIZES:
            try:
                found = plan(layers, memory, max_seq_len=max_seq_len, max_seqs=arguments.max_seqs,
                             mean_len=arguments.mean_len, step_tokens=arguments.step_tokens, block_size=block_size,
                             dtype=dtypes[0], head_dim_multiple=arguments.head_dim_multiple)  # fmt: skip
            except ValueError as error:
                found, why = None, str(error)
            plans.append((block_size, ", ".join(dtypes), found))
    if not any(found for *_, found in plans):
        raise ValueError(why)
    print(_head(config, arguments.memory, weights, source, memory, max_seq_len, arguments.mean_len))
    print(_table(plans))
    print(_tail(plans, max_seq_len, memory, arguments))
    return 0


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


def _head(
    config: Any, total: int, weights: int, source: str, memory: int, max_seq_len: int, mean_len: float | None
) -> str:
    windows = {w: config.windows.count(w) for w in dict.fromkeys(config.windows)}
    kinds = ", ".join(f"{n} without a window" if w is None else f"{n} of window {w}" for w, n in windows.items())
    beyond = f" The model knows {config.max_seq_len} positions only." if max_seq_len > config.max_seq_len else ""
    return (
        f"{config.family}: {config.num_layers} layers ({kinds}), {config.num_kv_heads} KV heads of {config.head_dim}.\n"
        f"{total / 1e9:.3g} GB, {format_bytes(total)}, of memory less {format_bytes(weights)} of weights ({source}) "
        f"leave {format_bytes(memory)} for the cache.\n"
        f"Rows of up to {max_seq_len} tokens, {mean_len or max_seq_len / 2:g} on the average.{beyond}\n"
    )


def _table(plans: list[tuple[int, str, Plan | None]]) -> str:
    header = ("block_size", "dtype", "bytes/token", "blocks", "tokens", "rows", "waste")
    lines = [header]
    for block_size, dtype, found in plans:
        if found is None:
            lines.append((str(block_size), dtype, "does not fit", "", "", "", ""))
            continue
        config = found.config
        blocks = " + ".join(f"{n:,}" for n in config.group_blocks)
        lines.append((str(block_size), dtype, format_bytes(found.bytes_per_token), blocks, f"{found.tokens:,}",
                      f"{found.rows:,}", f"{found.waste:.2%}"))  # fmt: skip
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    left = (1,)
    return "\n".join(
        "  ".join(x.ljust(w) if i in left else x.rjust(w) for i, (x, w) in enumerate(zip(line, widths, strict=True)))
        for line in lines
    )


def _tail(plans: list[tuple[int, str, Plan | None]], max_seq_len: int, memory: int, arguments: Any) -> str:
    fitting = [found for *_, found in plans if found]
    found = next((p for p in fitting if p.config.block_size == 16), fitting[0])
    several = len(found.config.groups) > 1
    fields = {
        "max_seqs": found.config.max_seqs,
        "max_seq_len": max_seq_len,
        "memory_bytes": memory,
        "block_size": found.config.block_size,
        "dtype": str(found.config.dtype),
    }
    if several:
        fields["step_tokens"] = max(arguments.step_tokens, found.config.max_seqs)
    if arguments.head_dim_multiple > 1:
        fields["head_dim_multiple"] = arguments.head_dim_multiple
    call = ", ".join(f"{name}={value!r}" for name, value in fields.items())
    groups = " + ".join("all tokens" if w is None else f"a window of {w}" for w in found.config.group_windows)
    notes = [
        "rows: how many can have all their tokens at once; shorter ones are more."
        + " Not one can: give max_seq_len less, or more memory." * (found.rows == 0),
        "waste: places that stay empty in the last blocks of rows, on the average.",
        f"blocks: in layers that keep {groups}. tokens: in those that keep most." * several,
        "What a step computes takes memory too: leave some for it.",
        f"\nFor the cache with blocks of {found.config.block_size}:\n  jaxkv.CacheConfig.from_model(model, {call})",
    ]
    return "\n" + "\n".join(note for note in notes if note)
