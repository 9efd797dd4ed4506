"""Writes the metadata of a GGUF file as the fields of a config.json.

An entry that has no such field goes on under its own name, so that the gate for config.json honours, passes or refuses
it as it does any other field.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxkv._core.config.validation import show
from jaxkv._files.gguf import CONTROL, USER_DEFINED, StoredTensor
from jaxkv.models.checkpoints.gguf_experts import NameExperts, name_each, name_joined
from jaxkv.models.rope import Rope

LARGEST_GEMMAS = {46: 144, 62: 168}  # layers of Gemma 2 and 3 27B, whose logits are scaled by the width of the model
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
ROPE_FREQS = "rope_freqs.weight"
DENSE = re.compile(r"blk\.(\d{1,9})\.ffn_gate\.weight")
# Names of entries behind the architecture's, and of the fields that say the same.
FIELDS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq",
    "vocab_size": "vocab_size",
}
SCALING = {
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.attn_factor": "attention_factor",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
# The text of control tokens that end an answer in any model that has them, as in llama.cpp.
ENDS = {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>"}

# Norms behind attention and before and behind the MLP, by what families and GGUF files call them.
LLAMA_NORMS = MappingProxyType({"ffn_norm": "post_attention_layernorm"})
SEED_NORMS = MappingProxyType({"post_attention_norm": "post_attention_layernorm"})
OLMO_NORMS = SEED_NORMS | {"post_ffw_norm": "post_feedforward_layernorm"}
GEMMA_NORMS = OLMO_NORMS | {"ffn_norm": "pre_feedforward_layernorm"}
SECTIONS = ("rope.dimension_sections", "n_deepstack_layers")  # of what is no text: see `families.nested`
GRANITE = {
    "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
}  # fmt: skip
QWEN_EXPERTS = {
    "expert_count": "num_experts", "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}  # fmt: skip
GPT_OSS_EXPERTS = {
    "expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "intermediate_size", "attention.sliding_window": "sliding_window",
}  # fmt: skip
Tensors = Mapping[str, StoredTensor]


@dataclasses.dataclass(frozen=True)
class Architecture:
    """What a GGUF architecture does not say in its metadata.

    Fields:
      model_type: the family, as config.json names it.
      permuted: queries and keys are stored with adjacent entries paired by RoPE, and not those half a head apart.
      norm_offset: what is stored in a norm's weight besides the family's own.
      norms: the names of norms' tensors that are not Llama's.
      names: those of other tensors of a layer, with their suffixes.
      name_experts: names the tensors of a layer's experts.
      biases: fields that say which projections have biases, and what tensor of the first layer shows it.
      complete: adds fields, some from the architecture's own entries, which it takes away, or from tensors' names.
    """

    model_type: str
    permuted: bool = False
    norm_offset: float = 0.0
    norms: Mapping[str, str] = LLAMA_NORMS
    names: Mapping[str, str] = MappingProxyType({})
    name_experts: NameExperts | None = None
    biases: Mapping[str, str] = MappingProxyType({})
    complete: Callable[[dict[str, Any], dict[str, Any], Tensors], None] = lambda *_: None


def _complete_gemma2(fields: dict[str, Any], own: dict[str, Any], tensors: Tensors) -> None:
    fields["query_pre_attn_scalar"] = LARGEST_GEMMAS.get(fields["num_hidden_layers"], fields["head_dim"])
    if isinstance(scale := own.get("attention.scale"), float) and scale > 0:
        fields["query_pre_attn_scalar"] = own.pop("attention.scale") ** -2
    fields["hidden_activation"] = "gelu_pytorch_tanh"
    if "attention.sliding_window" in own:
        fields["sliding_window"] = own.pop("attention.sliding_window")
    _read_layer_types(fields, own)


def _complete_gemma3(fields: dict[str, Any], own: dict[str, Any], tensors: Tensors) -> None:
    _complete_gemma2(fields, own, tensors)
    if fields.get("attn_logit_softcapping") == 0:
        del fields["attn_logit_softcapping"]


def _complete_vision_language(fields: dict[str, Any], own: dict[str, Any], tensors: Tensors) -> None:
    for name in SECTIONS:
        own.pop(name, None)


def _complete_granite(fields: dict[str, Any], own: dict[str, Any], tensors: Tensors) -> None:
    fields |= {field: own.pop(name) for name, field in GRANITE.items() if name in own}


def _complete_qwen3_moe(fields: dict[str, Any], own: dict[str, Any], tensors: Tensors) -> None:
    _complete_vision_language(fields, own, tensors)
    fields |= {field: own.pop(name) for name, field in QWEN_EXPERTS.items()}
    fields["norm_topk_prob"] = True  # as llama.cpp computes it
    fields["mlp_only_layers"] = sorted(int(found[1]) for name in tensors if (found := DENSE.fullmatch(name)))
    if fields.get("intermediate_size") in (None, 0):
        fields["intermediate_size"] = fields["moe_intermediate_size"]


def _complete_gpt_oss(fields: dict[str, Any], own: dict[str, Any], tensors: Tensors) -> None:
    fields |= {field: own.pop(name) for name, field in GPT_OSS_EXPERTS.items() if name in own}
    if isinstance(fields["rope_scaling"], dict):
        fields["rope_scaling"]["truncate"] = False  # which no entry says


ATTENTION = {"attention_bias": "attn_q"}
ROUTER = {f"ffn_gate_inp.{kind}": f"mlp.gate.{kind}" for kind in ("weight", "bias")}
QWEN3_MOE = Architecture(
    "qwen3_moe", names=ROUTER, name_experts=name_each, biases=ATTENTION, complete=_complete_qwen3_moe
)
ARCHITECTURES = {
    "llama": Architecture("llama", permuted=True, biases=ATTENTION | {"mlp_bias": "ffn_up"}),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3", biases=ATTENTION),
    "gemma": Architecture("gemma", norm_offset=1.0, biases=ATTENTION),
    "gemma2": Architecture("gemma2", norm_offset=1.0, norms=GEMMA_NORMS, complete=_complete_gemma2),
    "gemma3": Architecture("gemma3_text", norm_offset=1.0, norms=GEMMA_NORMS, complete=_complete_gemma3),
    "qwen2vl": Architecture("qwen2", complete=_complete_vision_language),
    "qwen3vl": Architecture("qwen3", biases=ATTENTION, complete=_complete_vision_language),
    "qwen3moe": QWEN3_MOE,
    "qwen3vlmoe": QWEN3_MOE,
    "gpt-oss": Architecture(
        "gpt_oss", norms=SEED_NORMS, biases=ATTENTION, complete=_complete_gpt_oss, name_experts=name_joined,
        names={name: own.replace("gate", "router") for name, own in ROUTER.items()}
        | {"attn_sinks.weight": "self_attn.sinks"},
    ),
    "arcee": Architecture("arcee", permuted=True, biases=ATTENTION | {"mlp_bias": "ffn_up"}),
    "granite": Architecture("granite", permuted=True, complete=_complete_granite),
    "smollm3": Architecture("smollm3", permuted=True),
    "olmo2": Architecture("olmo2", norms=OLMO_NORMS),
    "seed_oss": Architecture(
        "seed_oss", norms=SEED_NORMS,
        biases=ATTENTION | {"attention_out_bias": "attn_output", "mlp_bias": "ffn_up"},
    ),
    "ernie4_5": Architecture("ernie4_5", biases={"use_bias": "attn_q"}),
}  # fmt: skip


def find_architecture(metadata: Mapping[str, Any], where: str) -> Architecture:
    """Returns a file's architecture. Raises ValueError if it is not known."""
    kind = metadata.get("general.type", "model")
    if kind != "model":
        raise ValueError(f"{where} holds no model but {show(kind)}: give the model's own file.")
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ValueError(
            f"{where} is of the architecture {show(name)}, but of GGUF files the decoder knows "
            f"{', '.join(ARCHITECTURES)}."
        )
    return ARCHITECTURES[name]


def read_fields(metadata: Mapping[str, Any], tensors: Mapping[str, StoredTensor], where: str) -> dict[str, Any]:
    """Returns the fields of the config.json that a file's metadata and tensors amount to.

    Args:
      where: name of the file in errors.

    Raises:
      ValueError: an architecture that is not known, or an entry that no field can say.
    """
    architecture = find_architecture(metadata, where)
    prefix = f"{metadata['general.architecture']}."
    own = {name.removeprefix(prefix): _plain(value) for name, value in metadata.items() if name.startswith(prefix)}
    fields: dict[str, Any] = {"model_type": architecture.model_type, "rope_scaling": _read_scaling(own, tensors, where)}
    fields |= {field: own.pop(name) for name, field in FIELDS.items() if name in own}
    if missing := {"num_hidden_layers", "hidden_size", "num_attention_heads"} - fields.keys():
        names = {field: prefix + name for name, field in FIELDS.items()}
        raise ValueError(f"{where} lacks {names[min(missing)]} in its metadata.")
    if architecture.name_experts and (absent := QWEN_EXPERTS.keys() - own.keys()):
        raise ValueError(f"{where} lacks {prefix}{min(absent)} in its metadata.")
    _read_head_dim(fields, own, prefix, where)
    fields.setdefault("num_key_value_heads", fields["num_attention_heads"])
    if "vocab_size" not in fields and "token_embd.weight" in tensors:
        fields["vocab_size"] = tensors["token_embd.weight"].shape[0]
    architecture.complete(fields, own, tensors)
    fields |= {field: f"blk.0.{name}.bias" in tensors for field, name in architecture.biases.items()}
    fields["tie_word_embeddings"] = "output.weight" not in tensors
    fields["bos_token_id"] = metadata.get("tokenizer.ggml.bos_token_id")
    fields["eos_token_id"] = find_ends(metadata)
    return fields | {prefix + name: value for name, value in own.items()}


def find_ends(metadata: Mapping[str, Any]) -> list[int]:
    """Returns the tokens that end a text: those that the metadata names, and control tokens known for it."""
    named = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    tokens, types = metadata.get("tokenizer.ggml.tokens", ()), metadata.get("tokenizer.ggml.token_type", ())
    known = (
        i
        for i, (token, kind) in enumerate(zip(tokens, types, strict=False))
        if kind in (CONTROL, USER_DEFINED) and token in ENDS
    )
    return list(dict.fromkeys([token for token in named if token is not None] + list(known)))


def _plain(value: Any) -> Any:
    """Returns an array as a list, or as one number where all are the same, as many files say for each layer."""
    if not isinstance(value, np.ndarray):
        return value
    values = value[:4096].tolist()
    return values[0] if values and len(set(values)) == 1 and not isinstance(values[0], bool) else values


def _read_head_dim(fields: dict[str, Any], own: dict[str, Any], prefix: str, where: str) -> None:
    """Sets the width of a head, and refuses values of another width, and heads of which only a part is rotated."""
    said = fields.get("head_dim") or _divide(fields["hidden_size"], fields["num_attention_heads"])
    fields["head_dim"] = said
    for name in ("attention.value_length", "rope.dimension_count"):
        if (value := own.pop(name, said)) != said:
            raise ValueError(
                f"{where} has {prefix}{name} = {show(value)}, which the decoder cannot honour; it knows {show(said)}, "
                "the width of a head."
            )


def _divide(a: Any, b: Any) -> Any:
    return a // b if isinstance(a, int) and isinstance(b, int) and b > 0 else None


def _read_layer_types(fields: dict[str, Any], own: dict[str, Any]) -> None:
    """Reads which layers have the window, as a period or layer by layer."""
    pattern = own.pop("attention.sliding_window_pattern", None)
    if isinstance(pattern, list):
        fields["layer_types"] = ["sliding_attention" if is_sliding else "full_attention" for is_sliding in pattern]
    elif pattern is not None:
        fields["sliding_window_pattern"] = pattern


def _read_scaling(own: dict[str, Any], tensors: Mapping[str, StoredTensor], where: str) -> dict[str, Any] | None:
    """Reads the scaling of the rotary embedding; Llama 3's is a tensor."""
    own.pop("rope.scaling.finetuned", None)
    kind = own.pop("rope.scaling.type", "linear" if own.get("rope.scaling.factor", 1.0) not in (0, 1) else "none")
    if ROPE_FREQS in tensors:
        return _match_llama3(tensors[ROPE_FREQS].read(np.dtype(np.float32)), own, where)
    if kind == "none":
        own.pop("rope.scaling.factor", None)
        return None
    return {"rope_type": kind} | {field: own.pop(name) for name, field in SCALING.items() if name in own}


def _match_llama3(factors: np.ndarray, own: Mapping[str, Any], where: str) -> dict[str, Any] | None:
    """Returns the parameters of Llama 3's scaling from the factors by which it divides frequencies."""
    factor, theta = float(np.max(factors)), own.get("rope.freq_base", 10_000.0)
    if np.all(factors == 1):
        return None
    options = dict(LLAMA3)
    original = options.pop("original_max_position_embeddings")
    if math.isfinite(factor) and factor > 1 and isinstance(theta, float):
        plain, scaled = (
            Rope(theta=theta, scaling=kind, factor=factor, original_max_position=original, **options)  # type: ignore[arg-type]
            for kind in ("default", "llama3")
        )
        width = 2 * factors.size
        if np.allclose(plain.frequencies(width) / scaled.frequencies(width), factors, rtol=1e-3):
            return LLAMA3 | {"rope_type": "llama3", "factor": factor}
    raise ValueError(
        f"{where} has a tensor {ROPE_FREQS} which the decoder cannot honour; it knows the factors of Llama 3's scaling."
    )
