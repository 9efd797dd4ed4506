"""Granite 3: Llama with factors of embeddings, of attention logits and of what layers add, and a divisor of logits."""

from typing import Any

from jaxkv.models.config import DecoderConfig
from jaxkv.models.config_fields import FULL, Fields
from jaxkv.models.families.family import Family, read_common, read_num_layers, render_common
from jaxkv.models.rope_fields import parse_ropes, render_rope


def parse(fields: Fields) -> DecoderConfig:
    num_layers, common = read_num_layers(fields), read_common(fields, num_kv_heads=(None,))
    has_bias = fields.flag("attention_bias", False)
    rope = parse_ropes(fields, common["max_seq_len"], theta=10_000.0)[FULL]
    return DecoderConfig(**common | dict(
        windows=(None,) * num_layers, ropes=(rope,) * num_layers, qkv_bias=has_bias, out_bias=has_bias,
        mlp_bias=fields.flag("mlp_bias", False), attention_scale=fields.number("attention_multiplier", 1.0, above=0),
        embed_scale=fields.number("embedding_multiplier", 1.0, above=0),
        residual_scale=fields.number("residual_multiplier", 1.0, above=0),
        logit_divisor=fields.number("logits_scaling", 1.0, above=0),
    ))  # fmt: skip


def render(config: DecoderConfig) -> dict[str, Any]:
    return render_common(config) | {
        "rope_parameters": render_rope(config.ropes[0]), "attention_bias": config.out_bias,
        "mlp_bias": config.mlp_bias, "attention_multiplier": config.attention_scale,
        "embedding_multiplier": config.embed_scale, "residual_multiplier": config.residual_scale,
        "logits_scaling": config.logit_divisor,
    }  # fmt: skip


FAMILY = Family(parse=parse, render=render, architectures=("GraniteForCausalLM",))
