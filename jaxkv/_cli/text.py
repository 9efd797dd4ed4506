"""The model that a command is given: loaded, with its text, and with the sampling that its makers recommend."""

import argparse
import dataclasses
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from jaxkv._cli.units import parse_bytes
from jaxkv._core.config.validation import MOST_INDEX, integer, real, show
from jaxkv._engine.requests.sampling import SamplingParams
from jaxkv._files.hub import find_model
from jaxkv.text.tokenizer import TextStream as TextStream, Tokenizer

SAMPLING: dict[str, Any] = {"temperature": 0.7, "top_k": 0, "top_p": 1.0, "min_p": 0.0}  # if nothing else is said
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
MOST_PENALTY = 2  # of presence and frequency
# Fields of a generation_config.json that choose tokens in ways that are not known here, with what switches them off.
OTHERS: dict[str, tuple[Any, ...]] = {
    "encoder_repetition_penalty": (1,), "no_repeat_ngram_size": (0,), "typical_p": (1,), "epsilon_cutoff": (0,),
    "eta_cutoff": (0,), "penalty_alpha": (0,), "num_beams": (1,), "min_length": (0,), "min_new_tokens": (0,),
    "bad_words_ids": (), "suppress_tokens": (), "begin_suppress_tokens": (), "forced_bos_token_id": (),
    "forced_eos_token_id": (), "sequence_bias": (), "guidance_scale": (1,), "dola_layers": (), "top_h": (),
    "watermarking_config": (), "stop_strings": (),
}  # fmt: skip


class TextCodec(Protocol):
    def encode(self, text: str) -> list[int]: ...
    def decode(self, tokens: Iterable[int]) -> str: ...


class ByteTokenizer:
    """A tokenizer for which every byte of UTF-8 is a token."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Iterable[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")


class TokenIds:
    """Text that is numbers of tokens, for a model without a tokenizer or a reader who wants to see them."""

    def encode(self, text: str) -> list[int]:
        words = text.replace(",", " ").strip("[] \n").split()
        if wrong := [word for word in words if not word.isdecimal()]:
            raise ValueError(
                f"With --token-ids a prompt is numbers such as 1,15043,29892, but it has {show(wrong[0])}."
            )
        return [int(word) for word in words]

    def decode(self, tokens: Iterable[int]) -> str:
        return " ".join(map(str, tokens))


@dataclasses.dataclass(frozen=True)
class TextModel:
    """A model with its text.

    Fields:
      model: what `jaxkv.Engine` takes.
      text: its tokenizer.
      sampling: how tokens are chosen: temperature, top_k, top_p, min_p and seed.
      penalties: what `jaxkv.hooks.penalties` takes, if an option or the model's makers say anything of it.
      eos: the tokens that end an answer.
    """

    model: Any
    text: TextCodec
    sampling: dict[str, Any]
    penalties: dict[str, Any] | None
    eos: tuple[int, ...]

    @property
    def chat(self) -> Tokenizer:
        """The tokenizer, if it has a chat template. Raises ValueError if not."""
        if not isinstance(self.text, Tokenizer):
            raise ValueError("The model reads bytes and has no chat template: give it a text to continue, by generate.")
        return self.text


def penalty_options(penalties: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the options of an engine that penalizes, by these numbers where a request gives none; None: of one that
    does not."""
    import jaxkv.hooks

    if penalties is None:
        return {}
    return {"logits_hook": jaxkv.hooks.penalize, "hook_args": jaxkv.hooks.penalties(**penalties)}


def open_model(arguments: argparse.Namespace, text: TextCodec | None = None) -> TextModel:
    """Loads the model that the options name, and says on stderr what its generation_config.json chooses.

    Args:
      text: what stands for the model's own tokenizer, which is then not looked for.
    """
    import jaxkv.models
    from jaxkv.models.checkpoints import open_checkpoint

    check_answers(arguments)
    options = {} if arguments.dtype is None else {"dtype": arguments.dtype}
    options |= {} if arguments.devices == 1 else {"mesh": _mesh(arguments.devices)}
    if arguments.model is None:
        model = jaxkv.models.small(**options)
        return TextModel(model, text or ByteTokenizer(), *read_sampling(arguments, {}, ""), model.config.eos_ids)
    path = find_model(arguments.model)
    model = jaxkv.models.load(path, **options)
    where = f"{path / 'generation_config.json'}"
    sampling = read_sampling(arguments, open_checkpoint(path).read_generation() if path.is_dir() else {}, where)
    if text is None and not model.config.byte_tokens:
        own = Tokenizer(path)
        return TextModel(model, own, *sampling, tuple(dict.fromkeys((*model.config.eos_ids, *own.eos_ids))))
    return TextModel(model, text or ByteTokenizer(), *sampling, model.config.eos_ids)


def check_answers(arguments: argparse.Namespace) -> None:
    """Raises ValueError for options of answers that none can have: before a model is loaded, and not at each answer."""
    if arguments.max_new_tokens is not None:
        integer("max_new_tokens", arguments.max_new_tokens, least=1, most=MOST_INDEX // 2)
    SamplingParams.read(**SAMPLING | _list_given(arguments, SAMPLING), seed=arguments.seed)
    for name, value in _list_given(arguments, PENALTIES).items():
        check_penalty(name, name, value)


def _list_given(arguments: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(arguments, name)) is not None}


def read_sampling(
    arguments: argparse.Namespace, said: Mapping[str, Any], where: str
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Returns how tokens are chosen: by options, else by a generation_config.json, else by the command's defaults; and
    penalties, if either says anything of them.

    Args:
      said: the file's fields.
      where: its name in errors and on stderr, where it is said what is taken from it and what is not honoured.

    Raises:
      ValueError: the file has a value that no sampling can have.
    """
    recommended: dict[str, Any] = {}
    if said.get("do_sample") is False:
        recommended["temperature"] = 0.0
    elif said.get("do_sample") or any(said.get(name) is not None for name in SAMPLING):
        recommended = {name: said[name] for name in SAMPLING if said.get(name) is not None}
        recommended.setdefault("temperature", 1.0)
    recommended |= {name: said[name] for name, off in PENALTIES.items() if said.get(name) not in (None, off)}
    _check_sampling(recommended, where)
    given = _list_given(arguments, (*SAMPLING, *PENALTIES))
    taken = {name: value for name, value in recommended.items() if name not in given}
    others = {name: value for name, value in said.items() if name in OTHERS and value and value not in OTHERS[name]}
    if taken or others:
        settings = [f"{name} = {show(value)}" for name, value in taken.items()]
        line = f"sampling as {where} recommends: {', '.join(settings)}" if settings else f"of {where}"
        more = ", ".join(f"{name} = {show(value)}" for name, value in others.items())
        print(f"jaxkv: {line}{f'; not honoured: {more}' if more else ''}.", file=sys.stderr)
    chosen = recommended | given
    sampling = {name: chosen.get(name, default) for name, default in SAMPLING.items()} | {"seed": arguments.seed}
    penalties = {name: chosen.get(name, default) for name, default in PENALTIES.items()}
    return sampling, penalties if chosen.keys() & PENALTIES.keys() else None


def _check_sampling(fields: Mapping[str, Any], where: str) -> None:
    for name, value in fields.items():
        if name == "top_k":
            integer(f'"{name}" in {where}', value, least=0)
        elif name in PENALTIES:
            check_penalty(name, f'"{name}" in {where}', value)
        else:
            most = None if name == "temperature" else 1
            real(f'"{name}" in {where}', value, least=0, most=most, above=0 if name == "top_p" else None)


def check_penalty(name: str, said: str, value: Any) -> None:
    """Raises ValueError for what a penalty cannot be, as OpenAI's and vLLM's; `said` is what errors call it."""
    if name == "repetition_penalty":
        real(said, value, above=0)
    else:
        real(said, value, least=-MOST_PENALTY, most=MOST_PENALTY)


def prefix_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the options of an engine that keeps prompts' blocks for later prompts."""
    if arguments.prefix_disk is None:
        if arguments.prefix_disk_bytes is not None:
            raise ValueError("--prefix-disk-bytes is for --prefix-disk, the folder: give both, or neither.")
        return {}
    most = parse_bytes("1GiB") if arguments.prefix_disk_bytes is None else arguments.prefix_disk_bytes
    return {"prefix_cache": True, "spill_bytes": int(most), "disk": arguments.prefix_disk, "disk_bytes": most}


def is_cut(engine: Any, prompt: Sequence[int], output: Sequence[int], max_new_tokens: int) -> bool:
    """Tells whether an output ends because the context is full, and not as was asked. An end token is not part of it,
    so its last token does not tell."""
    is_full = len(prompt) + len(output) >= engine.config.max_seq_len and not engine.config.is_endless
    return is_full and 0 < len(output) < max_new_tokens


def describe_limit(engine: Any, opened: TextModel) -> str:
    """Returns what limits the tokens of a sequence in an engine."""
    most = engine.config.max_seq_len
    if most == opened.model.max_seq_len:
        return f"the model's max_seq_len is {most}"
    return f"max_seq_len is {most}, give more with --max-seq-len"


def _mesh(count: int) -> Any:
    import jax
    import numpy as np

    devices = jax.devices()
    if not 1 <= count <= len(devices):
        raise ValueError(f"--devices must be from 1 to {len(devices)}, the devices that there are, not {count}.")
    return jax.sharding.Mesh(np.array(devices[:count]), ("model",))
