"""GLM 4: Llama with four norms a layer, a fused gate, and a rotation of half of each head's entries, in adjacent pairs.

Biases are on queries, keys and values alone.
"""

from typing import Any

from jaxkv.models.config import DecoderConfig
from jaxkv.models.config_fields import Fields
from jaxkv.models.families.family import Family, Rows, read_uniform, render_common
from jaxkv.models.families.prenorm.phi3 import GATE_UP
from jaxkv.models.rope_fields import render_rope

TENSORS: dict[str, Any] = {
    "attention_post_norm": "post_self_attn_layernorm.weight",
    "mlp_post_norm": "post_mlp_layernorm.weight",
} | {name: Rows("mlp.gate_up_proj.weight", GATE_UP) for name in GATE_UP}


def parse(fields: Fields) -> DecoderConfig:
    rope = {"partial": 0.5, "interleaved": True}
    common = read_uniform(fields, num_kv_heads=(2,), head_dim=128, norm_eps=1.5625e-7, rope=rope)
    return DecoderConfig(**common, post_norms=True, qkv_bias=fields.flag("attention_bias", True))


def render(config: DecoderConfig) -> dict[str, Any]:
    rope = render_rope(config.ropes[0]) | {"partial_rotary_factor": config.ropes[0].partial_rotary_factor}
    return render_common(config) | {"rope_parameters": rope, "attention_bias": config.qkv_bias}


FAMILY = Family(parse=parse, render=render, architectures=("Glm4ForCausalLM",), tensors=TENSORS)
