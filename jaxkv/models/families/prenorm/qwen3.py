"""Qwen 3: Qwen 2 with norms on each head's queries and keys, heads of 128 by default, and biases behind a switch."""

from typing import Any

from jaxkv.models.config import DecoderConfig
from jaxkv.models.config_fields import FULL, Fields
from jaxkv.models.families.family import Family, read_common, read_num_layers, render_common
from jaxkv.models.families.prenorm.qwen2 import read_switched_windows, render_switched_windows
from jaxkv.models.rope_fields import parse_ropes, render_rope


def parse(fields: Fields) -> DecoderConfig:
    num_layers, common = read_num_layers(fields), read_common(fields, head_dim=128)
    has_bias = fields.flag("attention_bias", False)
    rope = parse_ropes(fields, common["max_seq_len"], theta=10_000.0)[FULL]
    return DecoderConfig(
        **common, windows=read_switched_windows(fields, num_layers), ropes=(rope,) * num_layers, qk_norm=True,
        qkv_bias=has_bias, out_bias=has_bias,
    )  # fmt: skip


def render(config: DecoderConfig) -> dict[str, Any]:
    own = {"rope_parameters": render_rope(config.ropes[0]), "attention_bias": config.out_bias}
    return render_common(config) | own | render_switched_windows(config)


FAMILY = Family(parse=parse, render=render, architectures=("Qwen3ForCausalLM",))
