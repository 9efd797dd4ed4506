"""Arcee's AFM: Llama whose MLP has no gate, and squares what is above zero. Two switches add biases, as in Llama."""

from jaxkv.models.config import DecoderConfig
from jaxkv.models.config_fields import Fields
from jaxkv.models.families.family import Family, read_uniform
from jaxkv.models.families.prenorm.llama import render

ACTIVATION = ("hidden_act", "relu2")


def parse(fields: Fields) -> DecoderConfig:
    common = read_uniform(fields, num_kv_heads=(None,), norm_eps=1e-5, activation=ACTIVATION)
    has_bias = fields.flag("attention_bias", False)
    return DecoderConfig(
        **common, gated_mlp=False, qkv_bias=has_bias, out_bias=has_bias, mlp_bias=fields.flag("mlp_bias", False)
    )


FAMILY = Family(parse=parse, render=render, architectures=("ArceeForCausalLM",))
