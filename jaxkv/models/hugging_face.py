"""A Hugging Face config.json to a `DecoderConfig` and back: a field is honoured, known to be harmless, or refused."""

from collections.abc import Mapping
from typing import Any, Literal

from jaxkv._core.numbers import integer, real, shown
from jaxkv.models.config import DecoderConfig
from jaxkv.models.rope import Rope

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text")
GEMMA = ("gemma2", "gemma3_text")
ACTIVATIONS: dict[str, Literal["silu", "gelu_tanh"]] = {
    "silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh",
}  # fmt: skip
# Far above any model; what is larger is a mistake, or meant to fill the memory.
MOST_LAYERS, MOST_HEADS, MOST_DIM = 512, 2**16, 2**24
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

    def __init__(self, fields: Any, where: str):
        if not isinstance(fields, Mapping):
            raise ValueError(f"{where} must be an object with fields, not {shown(fields)}.")
        self.left, self.where = dict(fields), where

    def take(self, name: str, *default: Any) -> Any:
        if name not in self.left and not default:
            raise ValueError(f"{self.where} lacks the field {name}.")
        return self.left.pop(name, *default)

    # Those of one type; a default of None means that there need be none, and then None may be written, too.

    def size(self, name: str, *default: int | None, least: int = 1, most: int = 2**31 - 1) -> Any:
        value = self.take(name, *default[:1])
        if value is None and None in default:
            return None
        return integer(f"{name} in {self.where}", value, least=least, most=most)

    def number(self, name: str, *default: float | None, least: float | None = None, above: float | None = None) -> Any:
        value = self.take(name, *default[:1])
        if value is None and None in default:
            return None
        return real(f"{name} in {self.where}", value, least=least, above=above, most=1e12)

    def flag(self, name: str, default: bool) -> bool:
        value = self.take(name, default)
        if not isinstance(value, bool):
            raise self.refuse(name, value, "true and false")
        return value

    def refuse(self, name: str, value: Any, honoured: Any) -> ValueError:
        return ValueError(
            f"{self.where} has {name} = {shown(value)}, which the decoder cannot honour; it knows {honoured}."
        )

    def finish(self) -> None:
        for name, allowed in MUST_BE.items():
            value = self.left.pop(name, allowed[0])
            if not any(value is one for one in allowed):
                raise self.refuse(name, value, " and ".join(map(repr, allowed)))
        if unknown := sorted(self.left.keys() - HARMLESS):
            fields = ", ".join(f"{shown(name)[1:-1]} = {shown(self.left[name])}" for name in unknown[:10])
            fields += f", and {len(unknown) - 10} more" if len(unknown) > 10 else ""
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
        raise ValueError(
            f"{where} is of the family (model_type) {shown(family)}, but the decoder knows {', '.join(FAMILIES)}."
        )
    num_layers = fields.size("num_hidden_layers", most=MOST_LAYERS)
    num_heads, embed_dim = (
        fields.size("num_attention_heads", most=MOST_HEADS),
        fields.size("hidden_size", most=MOST_DIM),
    )
    max_seq_len = fields.size("max_position_embeddings")
    kv_default = [None] if family == "llama" else []
    num_kv_heads = fields.size("num_key_value_heads", *kv_default, most=MOST_HEADS) or num_heads
    head_default = {"qwen3": 128, "gemma2": 256, "gemma3_text": 256}.get(family)
    head_dim = fields.size("head_dim", head_default, None, most=MOST_DIM) or head_default or embed_dim // num_heads

    activation = fields.take("hidden_act", "silu")
    if family in GEMMA:  # they write both, and mean the other one
        activation = fields.take("hidden_activation", "gelu_pytorch_tanh")
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        name = "hidden_activation" if family in GEMMA else "hidden_act"
        raise fields.refuse(name, activation, ", ".join(ACTIVATIONS))
    tokenizer = fields.take("jaxkv_tokenizer", None)
    if tokenizer not in (None, "bytes"):
        raise fields.refuse("jaxkv_tokenizer", tokenizer, "'bytes'")

    has_bias = fields.flag("attention_bias", False) if family in ("llama", "qwen3", *GEMMA) else False
    scale = fields.number("query_pre_attn_scalar", 256, above=0) if family in GEMMA else head_dim
    attention_soft_cap = logit_soft_cap = None
    if family in GEMMA:
        attention_soft_cap = fields.number(
            "attn_logit_softcapping", 50.0 if family == "gemma2" else None, None, above=0
        )
        logit_soft_cap = fields.number("final_logit_softcapping", 30.0 if family == "gemma2" else None, None, above=0)
    if family == "gemma3_text" and attention_soft_cap is not None:  # transformers reads it and then ignores it
        raise fields.refuse("attn_logit_softcapping", attention_soft_cap, "None")
    types, window = _layer_types(fields, family, num_layers)
    ropes = _ropes(fields, family, max_seq_len)
    result = DecoderConfig(
        family=family,
        vocab_size=fields.size("vocab_size"),
        embed_dim=embed_dim,
        mlp_dim=fields.size("intermediate_size", most=MOST_DIM),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_seq_len=max_seq_len,
        windows=tuple(window if kind == SLIDING else None for kind in types),
        ropes=tuple(ropes[kind] for kind in types),
        attention_scale=scale**-0.5,
        attention_soft_cap=attention_soft_cap,
        logit_soft_cap=logit_soft_cap,
        norm_eps=fields.number("rms_norm_eps", 1e-6, least=0),
        norm_offset=1.0 if family in GEMMA else 0.0,
        qk_norm=family in ("qwen3", "gemma3_text"),
        post_norms=family in GEMMA,
        qkv_bias=has_bias or family == "qwen2",
        out_bias=has_bias,
        mlp_bias=fields.flag("mlp_bias", False) if family == "llama" else False,
        activation=ACTIVATIONS[activation],
        embed_scale=embed_dim**0.5 if family in GEMMA else 1.0,
        tie_embeddings=fields.flag("tie_word_embeddings", family in GEMMA),
        bos_id=fields.size("bos_token_id", None, least=0),
        eos_ids=token_ids(fields.take("eos_token_id", None), f"eos_token_id in {where}"),
        byte_tokens=tokenizer == "bytes",
    )
    fields.finish()
    return result


def token_ids(value: Any, name: str) -> tuple[int, ...]:
    """One token or a list of them; None: none."""
    several = value if isinstance(value, list) else [] if value is None else [value]
    return tuple(integer(name, token, least=0) for token in several)


def _layer_types(fields: _Fields, family: str, num_layers: int) -> tuple[list[str], int | None]:
    """Each layer's kind of attention, and the window of the sliding ones."""
    if family == "llama":
        return [FULL] * num_layers, None
    window = fields.size("sliding_window", 4096, None)
    if family == "mistral":
        return [FULL if window is None else SLIDING] * num_layers, window
    if family in GEMMA:
        pattern = fields.size("sliding_window_pattern", 6) if family == "gemma3_text" else 2
        types = [SLIDING if (i + 1) % pattern else FULL for i in range(num_layers)]
    else:
        first = fields.size("max_window_layers", 28, least=0)
        window = window if fields.flag("use_sliding_window", False) else None
        types = [SLIDING if window is not None and i >= first else FULL for i in range(num_layers)]
    types = fields.take("layer_types", None) or types
    if not isinstance(types, list) or len(types) != num_layers or not all(x in (FULL, SLIDING) for x in types):
        raise fields.refuse("layer_types", types, f"one of {FULL} and {SLIDING} for each of the {num_layers} layers")
    if SLIDING in types and window is None:
        raise fields.refuse("layer_types", types, f"{SLIDING} only with a sliding_window, and that is off")
    return types, window


def _ropes(fields: _Fields, family: str, max_seq_len: int) -> dict[str, Rope]:
    """The rotary embedding of each kind of layer."""
    new, old = fields.take("rope_parameters", None), fields.take("rope_scaling", None)
    if new is not None and old is not None:
        raise fields.refuse("rope_scaling", old, "it only where there are no rope_parameters, its new name")
    theta = fields.number("rope_theta", 1_000_000.0 if family == "gemma3_text" else 10_000.0, least=1)
    if family != "gemma3_text":
        rope = _rope(_first(new, old, {}), theta, max_seq_len, fields.where)
        return {FULL: rope, SLIDING: rope}
    # Gemma 3 rescales only what its full-attention layers see; the others keep short waves of their own.
    local_theta = fields.number("rope_local_base_freq", 10_000.0, least=1)
    kinds = _Fields({FULL: _first(old, {})} if new is None else new, f"rope_parameters in {fields.where}")
    ropes = {
        FULL: _rope(_first(kinds.take(FULL, None), {}), theta, max_seq_len, fields.where),
        SLIDING: _rope(_first(kinds.take(SLIDING, None), {}), local_theta, max_seq_len, fields.where),
    }
    kinds.finish()
    return ropes


def _first(*values: Any) -> Any:
    """The first that is not None."""
    return next(value for value in values if value is not None)


def _rope(parameters: Any, theta: float, max_seq_len: int, where: str) -> Rope:
    fields = _Fields(parameters, f"The rotary embedding in {where}")
    old_name = fields.take("type", "default")
    scaling = fields.take("rope_type", old_name)
    if not isinstance(scaling, str) or scaling not in ("default", "linear", "llama3"):
        raise fields.refuse("rope_type", scaling, "default, linear, llama3")
    if (partial := fields.number("partial_rotary_factor", None)) not in (None, 1.0):
        raise fields.refuse("partial_rotary_factor", partial, "1.0: all of a head's entries are rotated")
    options: dict[str, Any] = {"scaling": scaling}
    if scaling != "default":
        options["factor"] = fields.number("factor", above=0)
    if scaling == "llama3":
        options["low_freq_factor"] = fields.number("low_freq_factor", above=0)
        options["high_freq_factor"] = fields.number("high_freq_factor", above=options["low_freq_factor"])
        options["original_max_position"] = fields.size("original_max_position_embeddings", max_seq_len)
    rope = Rope(theta=fields.number("rope_theta", theta, least=1), **options)
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
