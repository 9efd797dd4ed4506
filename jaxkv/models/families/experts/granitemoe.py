"""Granite 3 with experts: Granite 3 with experts in place of every MLP, weighted by a softmax over the chosen ones."""

from typing import Any

from jaxkv.models.config import DecoderConfig
from jaxkv.models.config_fields import FULL, MOST_HEADS, Fields
from jaxkv.models.families.family import Family, half, make_experts, read_num_layers, render_common, transpose
from jaxkv.models.families.prenorm.granite import read_granite, render_factors
from jaxkv.models.rope_fields import parse_ropes, render_rope

TENSORS: dict[str, Any] = {
    "experts.gate": half("block_sparse_moe.input_linear.weight", 0, transposed=True),
    "experts.up": half("block_sparse_moe.input_linear.weight", 1, transposed=True),
    "experts.down": transpose("block_sparse_moe.output_linear.weight"),
    "experts.router": "block_sparse_moe.router.layer.weight",
}


def parse(fields: Fields) -> DecoderConfig:
    num_layers, common = read_num_layers(fields), read_granite(fields)
    rope = parse_ropes(fields, common["max_seq_len"], theta=10_000.0)[FULL]
    count = fields.either("num_local_experts", "num_experts", 8, most=MOST_HEADS)
    experts = make_experts(
        fields, count=count, per_token=fields.size("num_experts_per_tok", 2, most=count), mlp_dim=common["mlp_dim"],
        scores="softmax_of_chosen",
    )  # fmt: skip
    return DecoderConfig(
        **common, windows=(None,) * num_layers, ropes=(rope,) * num_layers, experts=experts,
        expert_layers=(True,) * num_layers,
    )  # fmt: skip


def render(config: DecoderConfig) -> dict[str, Any]:
    assert config.experts is not None
    return render_common(config) | render_factors(config) | {
        "rope_parameters": render_rope(config.ropes[0]), "num_local_experts": config.experts.count,
        "num_experts_per_tok": config.experts.per_token,
    }  # fmt: skip


FAMILY = Family(parse=parse, render=render, architectures=("GraniteMoeForCausalLM",), tensors=TENSORS)
