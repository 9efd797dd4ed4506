"""ERNIE 4.5, dense: Llama with rotations of adjacent pairs, tied embeddings by default, one switch for all biases."""

from typing import Any

from jaxkv.models.config import DecoderConfig
from jaxkv.models.config_fields import Fields
from jaxkv.models.families.family import Family, read_uniform, render_uniform


def parse(fields: Fields) -> DecoderConfig:
    has_bias = fields.flag("use_bias", False)
    common = read_uniform(
        fields, num_kv_heads=(2,), head_dim=128, norm_eps=1e-5, tied=True, theta=500_000.0, rope={"interleaved": True}
    )
    return DecoderConfig(**common, qkv_bias=has_bias, out_bias=has_bias, mlp_bias=has_bias)


def render(config: DecoderConfig) -> dict[str, Any]:
    return render_uniform(config) | {"use_bias": config.out_bias}


FAMILY = Family(parse=parse, render=render, architectures=("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"))
