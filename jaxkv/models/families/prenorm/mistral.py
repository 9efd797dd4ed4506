"""Mistral 7B and Nemo: Llama without biases, and with one sliding window for all layers or for none."""

from typing import Any

from jaxkv.models.config import DecoderConfig
from jaxkv.models.config_fields import Fields
from jaxkv.models.families.family import Family, read_uniform, render_uniform


def parse(fields: Fields) -> DecoderConfig:
    common, window = read_uniform(fields), fields.size("sliding_window", 4096, None)
    return DecoderConfig(**common | {"windows": (window,) * len(common["windows"])})


def render(config: DecoderConfig) -> dict[str, Any]:
    return render_uniform(config) | {"sliding_window": config.windows[0]}


FAMILY = Family(parse=parse, render=render, architectures=("MistralForCausalLM",))
