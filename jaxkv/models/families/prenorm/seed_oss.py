"""Seed-OSS: Llama with heads of 128 by default, and biases on queries, keys and values, on the output and in the MLP
behind a switch each."""

from typing import Any

from jaxkv.models.config import DecoderConfig
from jaxkv.models.config_fields import Fields
from jaxkv.models.families.family import Family, read_uniform, render_uniform


def parse(fields: Fields) -> DecoderConfig:
    return DecoderConfig(
        **read_uniform(fields, num_kv_heads=(8,), head_dim=128),
        qkv_bias=fields.flag("attention_bias", True), out_bias=fields.flag("attention_out_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
    )  # fmt: skip


def render(config: DecoderConfig) -> dict[str, Any]:
    own = {"attention_bias": config.qkv_bias, "attention_out_bias": config.out_bias, "mlp_bias": config.mlp_bias}
    return render_uniform(config) | own


FAMILY = Family(parse=parse, render=render, architectures=("SeedOssForCausalLM",))
