"""The contract of a model family, and shared readers: sizes, layer types, windows."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxkv._core.config.validation import integer
from jaxkv.models.config import DecoderConfig, ExpertsConfig
from jaxkv.models.config_fields import FULL, MOST_DIM, MOST_HEADS, MOST_LAYERS, SLIDING, Fields
from jaxkv.models.rope import Rope
from jaxkv.models.rope_fields import parse_ropes, render_rope

ACTIVATIONS: dict[str, Literal["silu", "gelu_tanh", "relu2"]] = {
    "silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh",
    "relu2": "relu2",
}  # fmt: skip


class Columns(NamedTuple):
    """A parameter that is every `step`-th column of a checkpoint's tensor, from column `first` on."""

    name: str
    first: int
    step: int


class Rows(NamedTuple):
    """A parameter that is some rows of a checkpoint's tensor, which holds those of all `keys` one after another."""

    name: str
    keys: tuple[str, ...]


class AsStored(NamedTuple):
    """A parameter that the checkpoint stores as the decoder does, not transposed."""

    name: str


class Section(NamedTuple):
    """A parameter that is a slice of a checkpoint's tensor, of a shape that the config says.

    Fields:
      find: returns the tensor's shape, and of the tensor in axes of another shape the index of the slice.
      transposed: whether the slice's last two axes are exchanged.
    """

    name: str
    find: Callable[[DecoderConfig, tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...], Any]]
    transposed: bool = False


def half(name: str, number: int, *, transposed: bool = False) -> Section:
    """Returns the first or the second half of the outputs in a tensor of experts `[experts, inputs, outputs]`, or
    `transposed`, `[experts, outputs, inputs]`."""

    def find(config: DecoderConfig, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...], Any]:
        *front, inputs, outputs = shape
        own = slice(number * outputs, (number + 1) * outputs)
        whole = (*front, 2 * outputs, inputs) if transposed else (*front, inputs, 2 * outputs)
        return whole, whole, np.s_[..., own, :] if transposed else np.s_[..., own]

    return Section(name, find, transposed)


def transpose(name: str) -> Section:
    """Returns all of a tensor of experts `[experts, outputs, inputs]`."""

    def find(config: DecoderConfig, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...], Any]:
        *front, inputs, outputs = shape
        return (*front, outputs, inputs), (*front, outputs, inputs), np.s_[...]

    return Section(name, find, transposed=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """One model family: the fields of its config.json, and the parameter names in its checkpoints.

    Fields:
      parse: reads the fields of a config.json whose `model_type` is `fields.family`.
      render: writes the fields that `parse` reads; `render_common` has those of all families.
      architectures: the transformers classes of this family.
      tensors: names of parameters in checkpoints where they differ from Llama's (`checkpoint_names`); `{}` stands for
        the number of an expert.
      flatten: moves the fields of a nested text model to the top.
      name_tensor: returns a checkpoint tensor's name in the text model, given its config.json; None: skipped.
      constants: numbers that a layer of a checkpoint holds beside its parameters, by name; `name_tensor` skips them.
      repack: returns a checkpoint's tensors with those that it holds together, or apart, as `tensors` has them.
    """

    parse: Callable[[Fields], DecoderConfig]
    render: Callable[[DecoderConfig], dict[str, Any]]
    architectures: tuple[str, ...]
    tensors: Mapping[str, str | Columns | Rows | AsStored | Section] = dataclasses.field(default_factory=dict)
    flatten: Callable[[Mapping[str, Any], str], Mapping[str, Any]] = lambda config, where: config
    name_tensor: Callable[[str, Mapping[str, Any]], str | None] = lambda name, config: name
    constants: Mapping[str, float] = dataclasses.field(default_factory=dict)
    repack: Callable[[dict[str, Any]], dict[str, Any]] = lambda tensors: tensors


def read_num_layers(fields: Fields) -> int:
    return fields.size("num_hidden_layers", most=MOST_LAYERS)


def read_common(
    fields: Fields, *, num_kv_heads: tuple[int | None, ...] = (), head_dim: int | None = None, norm_eps: float = 1e-6,
    activation: tuple[str, str] = ("hidden_act", "silu"), tied: bool = False, mlp_dim: tuple[int, ...] = (),
) -> dict[str, Any]:  # fmt: skip
    """Reads the fields common to all families, as arguments of `DecoderConfig`.

    Args:
      num_kv_heads: the family's default, if any; None: the number of query heads.
      head_dim: the family's default; None: `hidden_size / num_attention_heads`.
      norm_eps, tied, mlp_dim: the family's defaults.
      activation: the field that names the activation, and its default.
    """
    num_heads = fields.size("num_attention_heads", most=MOST_HEADS)
    embed_dim = fields.size("hidden_size", most=MOST_DIM)
    head_dim = fields.size("head_dim", head_dim, None, most=MOST_DIM) or head_dim or embed_dim // num_heads
    if head_dim < 1:
        raise fields.refuse("hidden_size", embed_dim, f"as many entries as num_attention_heads, {num_heads}, or more")
    kind = fields.take(*activation)
    if not isinstance(kind, str) or kind not in ACTIVATIONS:
        raise fields.refuse(activation[0], kind, ", ".join(ACTIVATIONS))
    tokenizer = fields.take("jaxkv_tokenizer", None)
    if tokenizer not in (None, "bytes"):
        raise fields.refuse("jaxkv_tokenizer", tokenizer, "'bytes'")
    return dict(
        family=fields.family,
        vocab_size=fields.size("vocab_size"),
        embed_dim=embed_dim,
        mlp_dim=fields.size("intermediate_size", *mlp_dim, most=MOST_DIM),
        num_heads=num_heads,
        num_kv_heads=fields.size("num_key_value_heads", *num_kv_heads, most=MOST_HEADS) or num_heads,
        head_dim=head_dim,
        max_seq_len=_read_max_seq_len(fields),
        attention_scale=head_dim**-0.5,
        norm_eps=fields.number("rms_norm_eps", norm_eps, least=0),
        activation=ACTIVATIONS[kind],
        tie_embeddings=fields.flag("tie_word_embeddings", tied),
        bos_id=fields.size("bos_token_id", None, least=0),
        eos_ids=read_token_ids(fields.take("eos_token_id", None), f"eos_token_id in {fields.where}"),
        byte_tokens=tokenizer == "bytes",
    )


def read_uniform(
    fields: Fields, *, theta: float = 10_000.0, rope: Mapping[str, Any] | None = None, **defaults: Any
) -> dict[str, Any]:  # fmt: skip
    """Reads the fields common to families whose layers all rotate alike, as arguments of `DecoderConfig`: no windows.

    Args:
      theta, rope: options of `parse_ropes`.
      **defaults: those of `read_common`.
    """
    num_layers, common = read_num_layers(fields), read_common(fields, **defaults)
    found = parse_ropes(fields, common["max_seq_len"], theta=theta, **rope or {})[FULL]
    return common | {"windows": (None,) * num_layers, "ropes": (found,) * num_layers}


def _read_max_seq_len(fields: Fields) -> int:
    """Reads `max_position_embeddings`, or if missing its name in the first conversions of LLaMA."""
    name, first_name = "max_position_embeddings", "max_sequence_length"
    return fields.size(first_name if name not in fields.left and first_name in fields.left else name)


def read_token_ids(value: Any, name: str) -> tuple[int, ...]:
    """Reads one token or a list of tokens; None is no token."""
    tokens = value if isinstance(value, list) else [] if value is None else [value]
    return tuple(integer(name, token, least=0) for token in tokens)


def make_experts(fields: Fields, **values: Any) -> ExpertsConfig:
    """Makes the config of experts. Raises ValueError, which names the file, for values that do not go together."""
    return make_part(ExpertsConfig, "experts", fields, **values)


def make_part(kind: Any, what: str, fields: Fields, **values: Any) -> Any:
    """Makes the config of a part of blocks. Raises ValueError, which names the file, for values that do not go
    together."""
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(f"The {what} of {fields.where}: {error}") from error


def read_layer_kinds(fields: Fields, name: str, default: list[str], known: tuple[str, ...]) -> list[str]:
    """Reads a list of kinds, one of the known ones for each layer; as many as `default` has."""
    found = fields.take(name, None)
    if found is None:
        return default
    if not isinstance(found, list) or len(found) != len(default) or not all(kind in known for kind in found):
        raise fields.refuse(name, found, f"one of {', '.join(known)} for each of the {len(default)} layers")
    return found


def read_windows(fields: Fields, default: list[str], window: int | None) -> tuple[int | None, ...]:
    """Reads `layer_types`, or `default`, as each layer's sliding window; None: full attention."""
    types, num_layers = fields.take("layer_types", None), len(default)
    types = default if types is None else types
    if not isinstance(types, list) or len(types) != num_layers or not all(x in (FULL, SLIDING) for x in types):
        raise fields.refuse("layer_types", types, f"one of {FULL} and {SLIDING} for each of the {num_layers} layers")
    if SLIDING in types and window is None:
        raise fields.refuse("layer_types", types, f"{SLIDING} only with a sliding_window, and that is off")
    return tuple(window if kind == SLIDING else None for kind in types)


def render_common(config: DecoderConfig, *, activation: str = "hidden_act") -> dict[str, Any]:
    """Writes the fields that `read_common` reads."""
    return {
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed_dim,
        "intermediate_size": config.mlp_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        activation: next(name for name, kind in ACTIVATIONS.items() if kind == config.activation),
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_id,
        "eos_token_id": list(config.eos_ids) or None,
    } | ({"jaxkv_tokenizer": "bytes"} if config.byte_tokens else {})


def render_uniform(config: DecoderConfig, **options: Any) -> dict[str, Any]:
    """Writes the fields that `read_uniform` reads."""
    return render_common(config, **options) | {"rope_parameters": render_rope(config.ropes[0])}


def spread_ropes(ropes: Mapping[str, Rope], windows: Iterable[int | None]) -> tuple[Rope, ...]:
    """Returns each layer's rotary embedding, of those with a window and those without that `parse_ropes` returns."""
    return tuple(ropes[FULL if window is None else SLIDING] for window in windows)


def render_ropes(config: DecoderConfig) -> dict[str, Any]:
    """Writes the rotary embeddings of layers with a window and of those without."""
    kinds = [FULL if window is None else SLIDING for window in config.windows]
    return {"rope_parameters": {kind: render_rope(rope) for kind, rope in zip(kinds, config.ropes, strict=True)}}


def render_windows(config: DecoderConfig) -> dict[str, Any]:
    """Writes the fields that `read_windows` reads, and the window itself."""
    window = next((window for window in config.windows if window is not None), None)
    types = [FULL if window is None else SLIDING for window in config.windows]
    return {"sliding_window": window, "layer_types": types}
