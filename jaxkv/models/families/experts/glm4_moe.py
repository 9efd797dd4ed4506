"""GLM 4.5 to 4.7: DeepSeek V3's experts behind attention with KV heads, of which half of each head's entries rotate.

Norms on queries and keys are behind a switch. Layers behind the last, for multi-token prediction, are skipped.
"""

from typing import Any

from jaxkv.models.config import DecoderConfig, ExpertsConfig
from jaxkv.models.config_fields import FULL, MOST_DIM, MOST_HEADS, Fields
from jaxkv.models.families.latent.deepseek import name_tensor
from jaxkv.models.families.family import Family, make_experts, read_common, read_num_layers, render_common
from jaxkv.models.rope_fields import parse_ropes, render_rope


def parse(fields: Fields) -> DecoderConfig:
    num_layers, common = read_num_layers(fields), read_common(fields, num_kv_heads=(8,), norm_eps=1e-5)
    dense = fields.size("first_k_dense_replace", 1, least=0)
    fields.size("num_nextn_predict_layers", fields.size("num_mtp_layers", 1, least=0), least=0)  # skipped
    rope = parse_ropes(fields, common["max_seq_len"], theta=10_000.0, partial=0.5)[FULL]
    layers, experts = tuple(i >= dense for i in range(num_layers)), _read_experts(fields)
    return DecoderConfig(
        **common, windows=(None,) * num_layers, ropes=(rope,) * num_layers, qk_norm=fields.flag("use_qk_norm", False),
        qkv_bias=fields.flag("attention_bias", False), experts=experts if any(layers) else None,
        expert_layers=layers if any(layers) else (),
    )  # fmt: skip


def _read_experts(fields: Fields) -> ExpertsConfig:
    count = fields.size("num_local_experts", 128, most=MOST_HEADS)  # the newer name
    count = fields.size("n_routed_experts", count, most=MOST_HEADS)
    mlp_dim = fields.size("moe_intermediate_size", 1408, most=MOST_DIM)
    fields.must_be("scoring_func", "sigmoid")
    fields.must_be("topk_method", "noaux_tc")
    return make_experts(
        fields, count=count, per_token=fields.size("num_experts_per_tok", 8, most=count), mlp_dim=mlp_dim,
        scores="sigmoid", normalise=fields.flag("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor", 1.0, above=0), groups=fields.size("n_group", 1, most=count),
        groups_per_token=fields.size("topk_group", 1, most=count), choice_bias=True,
        shared_dim=fields.size("n_shared_experts", 1, least=0) * mlp_dim,
    )  # fmt: skip


def render(config: DecoderConfig) -> dict[str, Any]:
    experts = config.experts
    fields = render_common(config) | {
        "rope_parameters": render_rope(config.ropes[0]) | {
            "partial_rotary_factor": config.ropes[0].partial_rotary_factor,
        },
        "attention_bias": config.qkv_bias, "use_qk_norm": config.qk_norm, "num_nextn_predict_layers": 0,
        "first_k_dense_replace": config.expert_layers.count(False) if experts else config.num_layers,
    }  # fmt: skip
    if experts is None:
        return fields
    return fields | {
        "n_routed_experts": experts.count, "num_experts_per_tok": experts.per_token, "n_group": experts.groups,
        "moe_intermediate_size": experts.mlp_dim, "n_shared_experts": experts.shared_dim // experts.mlp_dim,
        "norm_topk_prob": experts.normalise, "routed_scaling_factor": experts.scale,
        "topk_group": experts.groups_per_token,
    }  # fmt: skip


FAMILY = Family(parse=parse, render=render, architectures=("Glm4MoeForCausalLM",), name_tensor=name_tensor)
