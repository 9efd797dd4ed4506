"""Granite 3: Llama with factors of embeddings, of attention logits and of what layers add, and a divisor of logits."""

from typing import Any

from jaxkv.models.config import DecoderConfig
from jaxkv.models.config_fields import FULL, Fields
from jaxkv.models.families.family import Family, read_common, read_num_layers, render_common
from jaxkv.models.rope_fields import parse_ropes, render_rope


def parse(fields: Fields) -> DecoderConfig:
    num_layers, common = read_num_layers(fields), read_granite(fields)
    rope = parse_ropes(fields, common["max_seq_len"], theta=10_000.0)[FULL]
    return DecoderConfig(
        **common, windows=(None,) * num_layers, ropes=(rope,) * num_layers, mlp_bias=fields.flag("mlp_bias", False)
    )


def read_granite(fields: Fields) -> dict[str, Any]:
    """Reads the fields common to Granite 3 and 4, as arguments of `DecoderConfig`."""
    common, has_bias = read_common(fields, num_kv_heads=(None,)), fields.flag("attention_bias", False)
    return common | dict(
        qkv_bias=has_bias, out_bias=has_bias, attention_scale=fields.number("attention_multiplier", 1.0, above=0),
        embed_scale=fields.number("embedding_multiplier", 1.0, above=0),
        residual_scale=fields.number("residual_multiplier", 1.0, above=0),
        logit_divisor=fields.number("logits_scaling", 1.0, above=0),
    )  # fmt: skip


def render(config: DecoderConfig) -> dict[str, Any]:
    own = {"rope_parameters": render_rope(config.ropes[0]), "mlp_bias": config.mlp_bias}
    return render_common(config) | render_factors(config) | own


def render_factors(config: DecoderConfig) -> dict[str, Any]:
    """Writes what `read_granite` reads."""
    return {
        "attention_bias": config.out_bias, "attention_multiplier": config.attention_scale,
        "embedding_multiplier": config.embed_scale, "residual_multiplier": config.residual_scale,
        "logits_scaling": config.logit_divisor,
    }  # fmt: skip


FAMILY = Family(parse=parse, render=render, architectures=("GraniteForCausalLM",))
