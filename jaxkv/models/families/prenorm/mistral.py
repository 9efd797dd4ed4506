"""Mistral 7B and Nemo: Llama without biases, and with one sliding window for all layers or for none."""

from typing import Any

from jaxkv.models.config import DecoderConfig
from jaxkv.models.config_fields import FULL, Fields
from jaxkv.models.families.family import Family, read_common, read_num_layers, render_common
from jaxkv.models.rope_fields import parse_ropes, render_rope


def parse(fields: Fields) -> DecoderConfig:
    num_layers, common = read_num_layers(fields), read_common(fields)
    window = fields.size("sliding_window", 4096, None)
    rope = parse_ropes(fields, common["max_seq_len"], theta=10_000.0)[FULL]
    return DecoderConfig(**common, windows=(window,) * num_layers, ropes=(rope,) * num_layers)


def render(config: DecoderConfig) -> dict[str, Any]:
    rope = {"rope_parameters": render_rope(config.ropes[0])}
    return render_common(config) | rope | {"sliding_window": config.windows[0]}


FAMILY = Family(parse=parse, render=render, architectures=("MistralForCausalLM",))
