"""Seed-OSS: Llama with heads of 128 by default, and biases on queries, keys and values, on the output and in the MLP
behind a switch each."""

from typing import Any

from jaxkv.models.config import DecoderConfig
from jaxkv.models.config_fields import FULL, Fields
from jaxkv.models.families.family import Family, read_common, read_num_layers, render_common
from jaxkv.models.rope_fields import parse_ropes, render_rope


def parse(fields: Fields) -> DecoderConfig:
    num_layers, common = read_num_layers(fields), read_common(fields, num_kv_heads=(8,), head_dim=128)
    rope = parse_ropes(fields, common["max_seq_len"], theta=10_000.0)[FULL]
    return DecoderConfig(
        **common, windows=(None,) * num_layers, ropes=(rope,) * num_layers,
        qkv_bias=fields.flag("attention_bias", True), out_bias=fields.flag("attention_out_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
    )  # fmt: skip


def render(config: DecoderConfig) -> dict[str, Any]:
    return render_common(config) | {
        "rope_parameters": render_rope(config.ropes[0]), "attention_bias": config.qkv_bias,
        "attention_out_bias": config.out_bias, "mlp_bias": config.mlp_bias,
    }  # fmt: skip


FAMILY = Family(parse=parse, render=render, architectures=("SeedOssForCausalLM",))
