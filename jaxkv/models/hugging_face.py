"""A Hugging Face config.json to a `DecoderConfig` and back: a field is honoured, known to be harmless, or refused."""

from collections.abc import Mapping
from typing import Any, Literal

from jaxkv.models.config import DecoderConfig
from jaxkv.models.rope import Rope

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text")
GEMMA = ("gemma2", "gemma3_text")
ACTIVATIONS: dict[str, Literal["silu", "gelu_tanh"]] = {
    "silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh",
}  # fmt: skip
FULL, SLIDING = "full_attention", "sliding_attention"
# Fields that change nothing in what a decoder computes.
HARMLESS = {
    "_name_or_path", "_sliding_window_pattern", "architectures", "attention_dropout",
    "cache_implementation", "chunk_size_feed_forward", "dtype",
    "id2label", "initializer_range", "is_decoder", "label2id", "num_logits_to_keep", "output_attentions",
    "output_hidden_states", "pad_token_id", "pretraining_tp", "problem_type", "return_dict", "torch_dtype",
    "transformers_version", "unsloth_fixed", "unsloth_version", "use_cache",
}  # fmt: skip
# Fields that must have one of these values where they occur.
MUST_BE = {
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
    "tie_encoder_decoder": (False,),
    "use_bidirectional_attention": (None, False),
}


class _Fields:
    """A dict that remembers what was read, so that what nobody read can be refused."""

    def __init__(self, fields: Mapping[str, Any], where: str):
        self.left, self.where = dict(fields), where

    def take(self, name: str, *default: Any) -> Any:
        if name not in self.left and not default:
            raise ValueError(f"{self.where} lacks the field {name}.")
        return self.left.pop(name, *default)

    def refuse(self, name: str, value: Any, honoured: Any) -> ValueError:
        return ValueError(f"{self.where} has {name} = {value!r}, which the decoder cannot honour; it knows {honoured}.")

    def finish(self) -> None:
        for name, allowed in MUST_BE.items():
            if (value := self.left.pop(name, allowed[0])) not in allowed:
                raise self.refuse(name, value, " and ".join(map(repr, allowed)))
        if unknown := sorted(self.left.keys() - HARMLESS):
            fields = ", ".join(f"{name} = {self.left[name]!r}" for name in unknown)
            raise ValueError(f"{self.where} has fields that the decoder does not know and so cannot honour: {fields}.")


def parse(config: Mapping[str, Any], where: str = "config.json") -> DecoderConfig:
    """What a config.json says, in the old or the new form.

    Args:
      config: its fields.
      where: what to call it in errors.

    Raises:
      ValueError: a family or a field that the decoder cannot honour, or a field that is missing; all by name.
    """
    fields = _Fields(config, where)
    family = fields.take("model_type", None)
    if family not in FAMILIES:
        raise ValueError(f"{where} is of the family {family!r}, but the decoder knows {', '.join(FAMILIES)}.")
    num_layers, num_heads = fields.take("num_hidden_layers"), fields.take("num_attention_heads")
    embed_dim, max_seq_len = fields.take("hidden_size"), fields.take("max_position_embeddings")
    num_kv_heads = fields.take("num_key_value_heads", *([None] if family == "llama" else [])) or num_heads
    head_dim = fields.take("head_dim", {"qwen3": 128, "gemma2": 256, "gemma3_text": 256}.get(family))
    head_dim = head_dim or embed_dim // num_heads

    activation = fields.take("hidden_act", "silu")
    if family in GEMMA:  # they write both, and mean the other one
        activation = fields.take("hidden_activation", "gelu_pytorch_tanh")
    if activation not in ACTIVATIONS:
        name = "hidden_activation" if family in GEMMA else "hidden_act"
        raise fields.refuse(name, activation, ", ".join(ACTIVATIONS))
    tokenizer = fields.take("jaxkv_tokenizer", None)
    if tokenizer not in (None, "bytes"):
        raise fields.refuse("jaxkv_tokenizer", tokenizer, "'bytes'")

    has_bias = fields.take("attention_bias", False) if family in ("llama", "qwen3", *GEMMA) else False
    scale = fields.take("query_pre_attn_scalar", 256) if family in GEMMA else head_dim
    attention_soft_cap = logit_soft_cap = None
    if family in GEMMA:
        attention_soft_cap = fields.take("attn_logit_softcapping", 50.0 if family == "gemma2" else None)
        logit_soft_cap = fields.take("final_logit_softcapping", 30.0 if family == "gemma2" else None)
    if family == "gemma3_text" and attention_soft_cap is not None:  # transformers reads it and then ignores it
        raise fields.refuse("attn_logit_softcapping", attention_soft_cap, "None")
    types, window = _layer_types(fields, family, num_layers)
    ropes = _ropes(fields, family, max_seq_len)
    eos = fields.take("eos_token_id", None)
    result = DecoderConfig(
        family=family,
        vocab_size=fields.take("vocab_size"),
        embed_dim=embed_dim,
        mlp_dim=fields.take("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_seq_len=max_seq_len,
        windows=tuple(window if kind == SLIDING else None for kind in types),
        ropes=tuple(ropes[kind] for kind in types),
        attention_scale=scale**-0.5,
        attention_soft_cap=attention_soft_cap,
        logit_soft_cap=logit_soft_cap,
        norm_eps=fields.take("rms_norm_eps", 1e-6),
        norm_offset=1.0 if family in GEMMA else 0.0,
        qk_norm=family in ("qwen3", "gemma3_text"),
        post_norms=family in GEMMA,
        qkv_bias=has_bias or family == "qwen2",
        out_bias=has_bias,
        mlp_bias=fields.take("mlp_bias", False) if family == "llama" else False,
        activation=ACTIVATIONS[activation],
        embed_scale=embed_dim**0.5 if family in GEMMA else 1.0,
        tie_embeddings=fields.take("tie_word_embeddings", family in GEMMA),
        bos_id=fields.take("bos_token_id", None),
        eos_ids=() if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
        byte_tokens=tokenizer == "bytes",
    )
    fields.finish()
    return result


def _layer_types(fields: _Fields, family: str, num_layers: int) -> tuple[list[str], int | None]:
    """Each layer's kind of attention, and the window of the sliding ones."""
    if family == "llama":
        return [FULL] * num_layers, None
    window = fields.take("sliding_window", 4096)
    if family == "mistral":
        return [FULL if window is None else SLIDING] * num_layers, window
    if family in GEMMA:
        pattern = fields.take("sliding_window_pattern", 6) if family == "gemma3_text" else 2
        types = [SLIDING if (i + 1) % pattern else FULL for i in range(num_layers)]
    else:
        first = fields.take("max_window_layers", 28)
        window = window if fields.take("use_sliding_window", False) else None
        types = [SLIDING if window is not None and i >= first else FULL for i in range(num_layers)]
    types = fields.take("layer_types", None) or types
    if len(types) != num_layers or not set(types) <= {FULL, SLIDING}:
        raise fields.refuse("layer_types", types, f"one of {FULL} and {SLIDING} for each of the {num_layers} layers")
    if SLIDING in types and window is None:
        raise fields.refuse("layer_types", types, f"{SLIDING} only with a sliding_window, and that is off")
    return types, window


def _ropes(fields: _Fields, family: str, max_seq_len: int) -> dict[str, Rope]:
    """The rotary embedding of each kind of layer."""
    new, old = fields.take("rope_parameters", None), fields.take("rope_scaling", None)
    if new is not None and old is not None:
        raise fields.refuse("rope_scaling", old, "it only where there are no rope_parameters, its new name")
    theta = fields.take("rope_theta", 1_000_000.0 if family == "gemma3_text" else 10_000.0)
    if family != "gemma3_text":
        rope = _rope(new or old or {}, theta, max_seq_len, fields.where)
        return {FULL: rope, SLIDING: rope}
    # Gemma 3 rescales only what its full-attention layers see; the others keep short waves of their own.
    local_theta = fields.take("rope_local_base_freq", 10_000.0)
    kinds = _Fields({FULL: old or {}} if new is None else new, f"rope_parameters in {fields.where}")
    ropes = {
        FULL: _rope(kinds.take(FULL, None) or {}, theta, max_seq_len, fields.where),
        SLIDING: _rope(kinds.take(SLIDING, None) or {}, local_theta, max_seq_len, fields.where),
    }
    kinds.finish()
    return ropes


def _rope(parameters: Mapping[str, Any], theta: float, max_seq_len: int, where: str) -> Rope:
    fields = _Fields(parameters, f"The rotary embedding in {where}")
    old_name = fields.take("type", "default")
    scaling = fields.take("rope_type", old_name)
    if scaling not in ("default", "linear", "llama3"):
        raise fields.refuse("rope_type", scaling, "default, linear, llama3")
    if (partial := fields.take("partial_rotary_factor", None)) not in (None, 1.0):
        raise fields.refuse("partial_rotary_factor", partial, "1.0: all of a head's entries are rotated")
    options: dict[str, Any] = {}
    if scaling != "default":
        options["factor"] = float(fields.take("factor"))
    if scaling == "llama3":
        options["low_freq_factor"] = float(fields.take("low_freq_factor"))
        options["high_freq_factor"] = float(fields.take("high_freq_factor"))
        options["original_max_position"] = fields.take("original_max_position_embeddings", max_seq_len)
    rope = Rope(theta=float(fields.take("rope_theta", theta)), scaling=scaling, **options)
    fields.finish()
    return rope


def render(config: DecoderConfig) -> dict[str, Any]:
    """The fields of a config.json, in the new form, that `parse` reads as `config`."""
    types = [FULL if window is None else SLIDING for window in config.windows]
    window = next((window for window in config.windows if window is not None), None)
    ropes = {kind: _render_rope(rope) for kind, rope in zip(types, config.ropes, strict=True)}
    gemma = config.family in GEMMA
    activation = next(name for name, ours in ACTIVATIONS.items() if ours == config.activation)
    fields: dict[str, Any] = {
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
        "rope_parameters": ropes if config.family == "gemma3_text" else _render_rope(config.ropes[0]),
        "hidden_activation" if gemma else "hidden_act": activation,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_id,
        "eos_token_id": list(config.eos_ids) or None,
    }
    if config.family in ("llama", "qwen3", *GEMMA):
        fields["attention_bias"] = config.out_bias
    if config.family == "llama":
        fields["mlp_bias"] = config.mlp_bias
    if config.family != "llama":
        fields["sliding_window"] = window
    if config.family in ("qwen2", "qwen3", *GEMMA):
        fields["layer_types"] = types
    if config.family in ("qwen2", "qwen3"):
        fields["use_sliding_window"] = window is not None
    if gemma:
        fields["query_pre_attn_scalar"] = round(config.attention_scale**-2)
        fields["final_logit_softcapping"] = config.logit_soft_cap
        fields["attn_logit_softcapping"] = config.attention_soft_cap
    if config.byte_tokens:
        fields["jaxkv_tokenizer"] = "bytes"
    return fields


def _render_rope(rope: Rope) -> dict[str, Any]:
    fields: dict[str, Any] = {"rope_type": rope.scaling, "rope_theta": rope.theta}
    if rope.scaling != "default":
        fields["factor"] = rope.factor
    if rope.scaling == "llama3":
        fields["low_freq_factor"] = rope.low_freq_factor
        fields["high_freq_factor"] = rope.high_freq_factor
        fields["original_max_position_embeddings"] = rope.original_max_position
    return fields
