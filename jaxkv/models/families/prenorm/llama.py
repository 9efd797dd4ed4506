"""Llama 1 to 3 and models built like them (Yi, SmolLM2, DeepSeek-R1-Distill-Llama): the plainest of the decoders.

Two switches add biases to all projections of attention, and to those of the MLP.
"""

from typing import Any

from jaxkv.models.config import DecoderConfig
from jaxkv.models.config_fields import Fields
from jaxkv.models.families.family import Family, read_uniform, render_uniform


def parse(fields: Fields) -> DecoderConfig:
    common, has_bias = read_uniform(fields, num_kv_heads=(None,)), fields.flag("attention_bias", False)
    return DecoderConfig(**common, qkv_bias=has_bias, out_bias=has_bias, mlp_bias=fields.flag("mlp_bias", False))


def render(config: DecoderConfig) -> dict[str, Any]:
    return render_uniform(config) | {"attention_bias": config.out_bias, "mlp_bias": config.mlp_bias}


FAMILY = Family(parse=parse, render=render, architectures=("LlamaForCausalLM",))
