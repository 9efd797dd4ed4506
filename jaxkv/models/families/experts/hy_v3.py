"""Hunyuan 3 (Hy3): experts chosen by sigmoids and a bias beside a shared MLP, and norms on queries and keys.

Layers behind the last, for multi-token prediction, are skipped. Refuses biases of MLPs.
"""

from collections.abc import Mapping
from typing import Any

from jaxkv.models.config import DecoderConfig
from jaxkv.models.config_fields import MOST_DIM, Fields
from jaxkv.models.families.experts_common import (
    place_experts,
    read_sigmoid_experts,
    read_sparse_layers,
    render_sigmoid_experts,
    render_sparse_layers,
)
from jaxkv.models.families.family import Family, read_uniform, render_uniform
from jaxkv.models.families.latent import deepseek

SCALE, SHARED = "router_scaling_factor", "num_shared_experts"
TENSORS = {"experts.router": "mlp.router.gate.weight", "experts.choice_bias": "mlp.expert_bias"} | {
    f"experts.shared.{name}": f"mlp.shared_mlp.{name}_proj.weight" for name in ("gate", "up", "down")
}
# Names in transformers, and as published.
PUBLISHED = {".mlp.gate.weight": ".mlp.router.gate.weight", ".mlp.e_score_correction_bias": ".mlp.expert_bias",
             ".mlp.shared_experts.": ".mlp.shared_mlp."}  # fmt: skip
MUST_BE: tuple[tuple[str, Any], ...] = (
    ("mlp_bias", False), ("n_group", 1), ("topk_group", 1), ("norm_topk_prob", True), ("qk_norm", True),
    ("route_norm", True), ("moe_router_enable_expert_bias", True), ("moe_router_use_sigmoid", True),
)  # fmt: skip
# Of the precision of sums and products: routers and softmax are computed in float32 anyway.
UNUSED = ("enable_attention_fp32_softmax", "enable_lm_head_fp32", "enable_moe_fp32_combine")


def parse(fields: Fields) -> DecoderConfig:
    common = read_uniform(fields, num_kv_heads=(8,), head_dim=128, norm_eps=1e-5, theta=11_158_840.0)
    for name, allowed in MUST_BE:
        fields.must_be(name, allowed)
    for name in UNUSED:
        fields.take(name, None)
    width = fields.size("moe_intermediate_size", 1536, most=MOST_DIM)
    fields.must_be("expert_hidden_dim", width)  # which says it again
    fields.size("num_nextn_predict_layers", 0, None, least=0)  # `name_tensor` skips them
    layers = read_sparse_layers(fields, len(common["windows"]), dense=1)
    fields.left["routed_scaling_factor"] = fields.number(SCALE, 2.826, above=0)
    experts = read_sigmoid_experts(fields, count=192, mlp_dim=width, shared_name=SHARED)
    has_bias = fields.flag("attention_bias", False)
    return DecoderConfig(**common, qk_norm=True, qkv_bias=has_bias, out_bias=has_bias, **place_experts(experts, layers))


def render(config: DecoderConfig) -> dict[str, Any]:
    experts = render_sigmoid_experts(config.experts, count_name="num_experts", shared_name=SHARED)
    for name in ("n_group", "topk_group", "norm_topk_prob"):  # which the family does not have
        experts.pop(name, None)
    experts |= {SCALE: experts.pop("routed_scaling_factor")} if experts else {}
    own = {"attention_bias": config.out_bias, "num_nextn_predict_layers": 0}
    return render_uniform(config) | render_sparse_layers(config) | experts | own


def name_tensor(name: str, config: Mapping[str, Any]) -> str | None:
    """Returns a tensor's name as published; None for a tensor of multi-token prediction."""
    for new, old in PUBLISHED.items():
        name = name.replace(new, old)
    return deepseek.name_tensor(name, config)


FAMILY = Family(
    parse=parse, render=render, architectures=("HYV3ForCausalLM",), tensors=TENSORS, name_tensor=name_tensor
)
