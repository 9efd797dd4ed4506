"""Qwen 3: Qwen 2 with norms on each head's queries and keys, heads of 128 by default, and biases behind a switch."""

from typing import Any

from jaxkv.models.config import DecoderConfig
from jaxkv.models.config_fields import Fields
from jaxkv.models.families.family import Family, read_uniform, render_uniform
from jaxkv.models.families.prenorm.qwen2 import read_switched_windows, render_switched_windows


def parse(fields: Fields) -> DecoderConfig:
    common, has_bias = read_uniform(fields, head_dim=128), fields.flag("attention_bias", False)
    windows = read_switched_windows(fields, len(common["windows"]))
    return DecoderConfig(**common | dict(windows=windows, qk_norm=True, qkv_bias=has_bias, out_bias=has_bias))


def render(config: DecoderConfig) -> dict[str, Any]:
    return render_uniform(config) | {"attention_bias": config.out_bias} | render_switched_windows(config)


FAMILY = Family(parse=parse, render=render, architectures=("Qwen3ForCausalLM",))
