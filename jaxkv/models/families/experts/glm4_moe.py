"""GLM 4.5 to 4.7: DeepSeek V3's experts behind attention with KV heads, of which half of each head's entries rotate.

Norms on queries and keys are behind a switch. Layers behind the last, for multi-token prediction, are skipped.
"""

from typing import Any

from jaxkv.models.config import DecoderConfig
from jaxkv.models.config_fields import FULL, Fields
from jaxkv.models.families.experts_common import (
    count_dense_layers,
    place_experts,
    read_sigmoid_experts,
    render_sigmoid_experts,
)
from jaxkv.models.families.family import Family, read_common, read_num_layers, render_common
from jaxkv.models.families.latent.deepseek import name_tensor
from jaxkv.models.rope_fields import parse_ropes, render_rope


def parse(fields: Fields) -> DecoderConfig:
    num_layers, common = read_num_layers(fields), read_common(fields, num_kv_heads=(8,), norm_eps=1e-5)
    dense = fields.size("first_k_dense_replace", 1, least=0)
    fields.size("num_nextn_predict_layers", fields.size("num_mtp_layers", 1, least=0), least=0)  # skipped
    rope = parse_ropes(fields, common["max_seq_len"], theta=10_000.0, partial=0.5)[FULL]
    experts = read_sigmoid_experts(fields, count=128, mlp_dim=1408)
    return DecoderConfig(
        **common, windows=(None,) * num_layers, ropes=(rope,) * num_layers, qk_norm=fields.flag("use_qk_norm", False),
        qkv_bias=fields.flag("attention_bias", False),
        **place_experts(experts, tuple(i >= dense for i in range(num_layers))),
    )  # fmt: skip


def render(config: DecoderConfig) -> dict[str, Any]:
    rope = render_rope(config.ropes[0]) | {"partial_rotary_factor": config.ropes[0].partial_rotary_factor}
    return render_common(config) | render_sigmoid_experts(config.experts) | {
        "rope_parameters": rope, "attention_bias": config.qkv_bias, "use_qk_norm": config.qk_norm,
        "num_nextn_predict_layers": 0, "first_k_dense_replace": count_dense_layers(config),
    }  # fmt: skip


FAMILY = Family(parse=parse, render=render, architectures=("Glm4MoeForCausalLM",), name_tensor=name_tensor)
