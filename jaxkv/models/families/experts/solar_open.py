"""Solar Open: GLM 4.5's experts in every layer, behind Llama's attention. Biases are on queries, keys and values."""

from typing import Any

from jaxkv.models.config import DecoderConfig
from jaxkv.models.config_fields import Fields
from jaxkv.models.families.experts_common import read_sigmoid_experts, render_sigmoid_experts
from jaxkv.models.families.family import Family, read_uniform, render_uniform

WIDTH = 1280  # of an expert


def parse(fields: Fields) -> DecoderConfig:
    common = read_uniform(fields, num_kv_heads=(8,), head_dim=128, norm_eps=1e-5, mlp_dim=(WIDTH,), theta=1_000_000.0)
    fields.must_be("first_k_dense_replace", 0)
    experts = read_sigmoid_experts(fields, count=128, mlp_dim=WIDTH)
    return DecoderConfig(
        **common, qkv_bias=fields.flag("attention_bias", False), experts=experts,
        expert_layers=(True,) * len(common["windows"]),
    )  # fmt: skip


def render(config: DecoderConfig) -> dict[str, Any]:
    return render_uniform(config) | render_sigmoid_experts(config.experts) | {"attention_bias": config.qkv_bias}


FAMILY = Family(parse=parse, render=render, architectures=("SolarOpenForCausalLM",))
