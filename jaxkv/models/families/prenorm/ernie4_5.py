"""ERNIE 4.5, dense: Llama with rotations of adjacent pairs, tied embeddings by default, one switch for all biases."""

from typing import Any

from jaxkv.models.config import DecoderConfig
from jaxkv.models.config_fields import FULL, Fields
from jaxkv.models.families.family import Family, read_common, read_num_layers, render_common
from jaxkv.models.rope_fields import parse_ropes, render_rope


def parse(fields: Fields) -> DecoderConfig:
    num_layers = read_num_layers(fields)
    common = read_common(fields, num_kv_heads=(2,), head_dim=128, norm_eps=1e-5, tied=True)
    has_bias = fields.flag("use_bias", False)
    rope = parse_ropes(fields, common["max_seq_len"], theta=500_000.0, interleaved=True)[FULL]
    return DecoderConfig(
        **common, windows=(None,) * num_layers, ropes=(rope,) * num_layers, qkv_bias=has_bias, out_bias=has_bias,
        mlp_bias=has_bias,
    )  # fmt: skip


def render(config: DecoderConfig) -> dict[str, Any]:
    return render_common(config) | {"rope_parameters": render_rope(config.ropes[0]), "use_bias": config.out_bias}


FAMILY = Family(parse=parse, render=render, architectures=("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"))
