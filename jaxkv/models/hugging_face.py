"""A Hugging Face config.json to a `DecoderConfig` and back: a field is honoured, known to be harmless, or refused."""

from collections.abc import Mapping
from typing import Any, Literal

from jaxkv._core.config.validation import integer, shown
from jaxkv.models import deepseek, gemma3, gpt_oss, qwen3_moe
from jaxkv.models.config import DecoderConfig
from jaxkv.models.fields import FULL, MOST_DIM, MOST_HEADS, MOST_LAYERS, SLIDING, Fields
from jaxkv.models.published import take_quantization
from jaxkv.models.rope_fields import parse_ropes, render_rope

# What is theirs alone, and the rotary embedding, is read by these.
OWN = {"deepseek_v2": deepseek, "deepseek_v3": deepseek, "gpt_oss": gpt_oss, "qwen3_moe": qwen3_moe}
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", *OWN)
GEMMA = ("gemma2", "gemma3_text")
ACTIVATIONS: dict[str, Literal["silu", "gelu_tanh"]] = {
    "silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh",
}  # fmt: skip


def parse(config: Mapping[str, Any], where: str = "config.json") -> DecoderConfig:
    """What a config.json says, in the old or the new form.

    Args:
      config: its fields.
      where: what to call it in errors.

    Raises:
      ValueError: a family or a field that the decoder cannot honour, or a field that is missing; all by name.
    """
    fields = Fields(gemma3.flattened(config, where), where)
    family = fields.take("model_type", None)
    if family not in FAMILIES:
        raise ValueError(
            f"{where} is of the family (model_type) {shown(family)}, but the decoder knows {', '.join(FAMILIES)} and "
            f"{gemma3.NESTED}."
        )
    take_quantization(fields)
    num_layers = fields.size("num_hidden_layers", most=MOST_LAYERS)
    num_heads, embed_dim = (
        fields.size("num_attention_heads", most=MOST_HEADS),
        fields.size("hidden_size", most=MOST_DIM),
    )
    max_seq_len = fields.size("max_position_embeddings")
    kv_default = [None] if family in ("llama", *deepseek.FAMILIES) else [8] if family == "gpt_oss" else []
    num_kv_heads = fields.size("num_key_value_heads", *kv_default, most=MOST_HEADS) or num_heads
    head_default = {"qwen3": 128, "gemma2": 256, "gemma3_text": 256, "gpt_oss": 64}.get(family)
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

    may_have_bias = family in ("llama", "qwen3", *GEMMA, *OWN)
    has_bias = fields.flag("attention_bias", family == "gpt_oss") if may_have_bias else False
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
    common: dict[str, Any] = dict(
        family=family,
        vocab_size=fields.size("vocab_size"),
        embed_dim=embed_dim,
        mlp_dim=fields.size("intermediate_size", most=MOST_DIM),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_seq_len=max_seq_len,
        windows=tuple(window if kind == SLIDING else None for kind in types),
        attention_scale=scale**-0.5,
        attention_soft_cap=attention_soft_cap,
        logit_soft_cap=logit_soft_cap,
        norm_eps=fields.number("rms_norm_eps", 1e-5 if family == "gpt_oss" else 1e-6, least=0),
        norm_offset=1.0 if family in GEMMA else 0.0,
        qk_norm=family in ("qwen3", "qwen3_moe", "gemma3_text"),
        post_norms=family in GEMMA,
        qkv_bias=has_bias or family == "qwen2",
        out_bias=has_bias,
        mlp_bias=fields.flag("mlp_bias", False) if family in ("llama", "deepseek_v2") else False,
        activation=ACTIVATIONS[activation],
        embed_scale=embed_dim**0.5 if family in GEMMA else 1.0,
        tie_embeddings=fields.flag("tie_word_embeddings", family in GEMMA),
        bos_id=fields.size("bos_token_id", None, least=0),
        eos_ids=token_ids(fields.take("eos_token_id", None), f"eos_token_id in {where}"),
        byte_tokens=tokenizer == "bytes",
    )
    if family in OWN:
        common |= OWN[family].parse(fields, common)
    else:
        gemma3_text = family == "gemma3_text"
        ropes = parse_ropes(fields, max_seq_len, theta=1e6 if gemma3_text else 1e4,
                            local_theta=1e4 if gemma3_text else None)  # fmt: skip
        common["ropes"] = tuple(ropes[kind] for kind in types)
    fields.finish()
    return DecoderConfig(**common)


def token_ids(value: Any, name: str) -> tuple[int, ...]:
    """One token or a list of them; None: none."""
    several = value if isinstance(value, list) else [] if value is None else [value]
    return tuple(integer(name, token, least=0) for token in several)


def _layer_types(fields: Fields, family: str, num_layers: int) -> tuple[list[str], int | None]:
    """Each layer's kind of attention, and the window of the sliding ones."""
    if family in ("llama", *deepseek.FAMILIES):
        return [FULL] * num_layers, None
    window = fields.size("sliding_window", 128 if family == "gpt_oss" else 4096, None)
    if family == "mistral":
        return [FULL if window is None else SLIDING] * num_layers, window
    if family in GEMMA:
        pattern = fields.size("sliding_window_pattern", 6) if family == "gemma3_text" else 2
        types = [SLIDING if (i + 1) % pattern else FULL for i in range(num_layers)]
    elif family == "gpt_oss":
        types = [FULL if i % 2 else SLIDING for i in range(num_layers)]
    else:
        first = fields.size("max_window_layers", 28, least=0)
        first = 0 if family == "qwen3_moe" else first  # transformers ignores it there
        window = window if fields.flag("use_sliding_window", False) else None
        types = [SLIDING if window is not None and i >= first else FULL for i in range(num_layers)]
    types = fields.take("layer_types", None) or types
    if not isinstance(types, list) or len(types) != num_layers or not all(x in (FULL, SLIDING) for x in types):
        raise fields.refuse("layer_types", types, f"one of {FULL} and {SLIDING} for each of the {num_layers} layers")
    if SLIDING in types and window is None:
        raise fields.refuse("layer_types", types, f"{SLIDING} only with a sliding_window, and that is off")
    return types, window


def render(config: DecoderConfig) -> dict[str, Any]:
    """The fields of a config.json, in the new form, that `parse` reads as `config`."""
    types = [FULL if window is None else SLIDING for window in config.windows]
    window = next((window for window in config.windows if window is not None), None)
    ropes = {kind: render_rope(rope) for kind, rope in zip(types, config.ropes, strict=True)}
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
        "rope_parameters": ropes if config.family == "gemma3_text" else render_rope(config.ropes[0]),
        "hidden_activation" if gemma else "hidden_act": activation,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_id,
        "eos_token_id": list(config.eos_ids) or None,
    }
    if config.family in ("llama", "qwen3", *GEMMA, *OWN):
        fields["attention_bias"] = config.out_bias
    if config.family in ("llama", "deepseek_v2"):
        fields["mlp_bias"] = config.mlp_bias
    if config.family not in ("llama", *deepseek.FAMILIES):
        fields["sliding_window"] = window
    if config.family in ("qwen2", "qwen3", "gpt_oss", *GEMMA):
        fields["layer_types"] = types
    if config.family in ("qwen2", "qwen3", "qwen3_moe"):
        fields["use_sliding_window"] = window is not None
    if gemma:
        fields["query_pre_attn_scalar"] = round(config.attention_scale**-2)
        fields["final_logit_softcapping"] = config.logit_soft_cap
        fields["attn_logit_softcapping"] = config.attention_soft_cap
    if config.family in OWN:
        fields |= OWN[config.family].render(config)
    if config.byte_tokens:
        fields["jaxkv_tokenizer"] = "bytes"
    return fields
