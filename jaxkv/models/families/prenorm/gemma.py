"""Gemma, the first: Llama with norm weights around zero, tied embeddings times the square root of their width, and a
gate by GELU.

The activation "gelu" of the first published files means its approximation by tanh; `hidden_activation` may say it too.
Refuses attention in both directions.
"""

from typing import Any

from jaxkv.models.config import DecoderConfig
from jaxkv.models.config_fields import Fields
from jaxkv.models.families.family import Family, read_uniform, render_uniform

GELU = "gelu_pytorch_tanh"


def parse(fields: Fields) -> DecoderConfig:
    if fields.left.get("hidden_act") == "gelu":
        fields.left["hidden_act"] = GELU
    if (written := fields.take("hidden_activation", None)) not in (None, GELU):
        raise fields.refuse("hidden_activation", written, f"{GELU}, as hidden_act says too")
    common = read_uniform(fields, num_kv_heads=(16,), head_dim=256, tied=True, activation=("hidden_act", GELU))
    has_bias = fields.flag("attention_bias", False)
    return DecoderConfig(
        **common, norm_offset=1.0, embed_scale=common["embed_dim"] ** 0.5, qkv_bias=has_bias, out_bias=has_bias
    )


def render(config: DecoderConfig) -> dict[str, Any]:
    return render_uniform(config) | {"attention_bias": config.out_bias}


FAMILY = Family(parse=parse, render=render, architectures=("GemmaForCausalLM",))
