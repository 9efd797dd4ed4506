"""LFM2 with experts: LFM2 with experts behind the first layers, chosen by sigmoids, with a bias behind a switch.

The width of the MLP is what the config says.
"""

from typing import Any

from jaxkv.models.config import DecoderConfig
from jaxkv.models.config_fields import FULL, MOST_DIM, MOST_HEADS, Fields
from jaxkv.models.families.experts_common import count_dense_layers, place_experts
from jaxkv.models.families.family import Family, make_experts, read_num_layers
from jaxkv.models.families.hybrid import lfm2
from jaxkv.models.families.hybrid.lfm2 import CONV
from jaxkv.models.families.hybrid_common import kinds_of, mix, read_kinds
from jaxkv.models.rope_fields import render_rope

TENSORS: dict[str, Any] = lfm2.TENSORS | {
    "experts.router": "feed_forward.gate.weight", "experts.choice_bias": "feed_forward.expert_bias",
    "experts.gate": "feed_forward.experts.{}.w1.weight", "experts.up": "feed_forward.experts.{}.w3.weight",
    "experts.down": "feed_forward.experts.{}.w2.weight",
}  # fmt: skip


def parse(fields: Fields) -> DecoderConfig:
    num_layers, common = read_num_layers(fields), lfm2.read_lfm(fields, mlp_dim=7168)
    if fields.left.get("layer_types") is None:
        raise ValueError(f"{fields.where} lacks the field layer_types.")
    kinds = read_kinds(fields, [FULL] * num_layers, (CONV, FULL))
    dense = fields.size("num_dense_layers", 2, least=0)
    count = fields.either("num_experts", "num_local_experts", 32, most=MOST_HEADS)
    experts = make_experts(
        fields, count=count, per_token=fields.size("num_experts_per_tok", 4, most=count), scores="sigmoid",
        mlp_dim=fields.size("moe_intermediate_size", 1792, most=MOST_DIM),
        normalise=fields.flag("norm_topk_prob", True),
        choice_bias=fields.flag("use_expert_bias", True), scale=fields.number("routed_scaling_factor", 1.0, above=0),
    )  # fmt: skip
    return DecoderConfig(
        **common, blocks=mix(kinds, lfm2.read_conv(fields, common["embed_dim"])),
        ropes=(lfm2.read_rope(fields, common),) * num_layers,
        **place_experts(experts, tuple(i >= dense for i in range(num_layers))),
    )  # fmt: skip


def render(config: DecoderConfig) -> dict[str, Any]:
    experts = config.experts
    fields = lfm2.render_lfm(config) | {
        "layer_types": kinds_of(config, CONV), "rope_parameters": render_rope(config.ropes[0]),
        "num_dense_layers": count_dense_layers(config),
    }  # fmt: skip
    return fields if experts is None else fields | {
        "num_experts": experts.count, "num_experts_per_tok": experts.per_token, "use_expert_bias": experts.choice_bias,
        "moe_intermediate_size": experts.mlp_dim, "norm_topk_prob": experts.normalise,
        "routed_scaling_factor": experts.scale,
    }  # fmt: skip


FAMILY = Family(parse=parse, render=render, architectures=("Lfm2MoeForCausalLM",), tensors=TENSORS)
