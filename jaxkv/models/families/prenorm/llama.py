"""Llama 1 to 3 and models built like them (Yi, SmolLM2, DeepSeek-R1-Distill-Llama): the plainest of the decoders.

Two switches add biases to all projections of attention, and to those of the MLP.
"""

from typing import Any

from jaxkv.models.config import DecoderConfig
from jaxkv.models.config_fields import FULL, Fields
from jaxkv.models.families.family import Family, read_common, read_num_layers, render_common
from jaxkv.models.rope_fields import parse_ropes, render_rope


def parse(fields: Fields) -> DecoderConfig:
    num_layers, common = read_num_layers(fields), read_common(fields, num_kv_heads=(None,))
    has_bias = fields.flag("attention_bias", False)
    rope = parse_ropes(fields, common["max_seq_len"], theta=10_000.0)[FULL]
    return DecoderConfig(
        **common, windows=(None,) * num_layers, ropes=(rope,) * num_layers, qkv_bias=has_bias, out_bias=has_bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )  # fmt: skip


def render(config: DecoderConfig) -> dict[str, Any]:
    return render_common(config) | {
        "rope_parameters": render_rope(config.ropes[0]), "attention_bias": config.out_bias,
        "mlp_bias": config.mlp_bias,
    }  # fmt: skip


FAMILY = Family(parse=parse, render=render, architectures=("LlamaForCausalLM",))
