"""Kolibri 1: EXAONE 4's attention, with norms before and behind all parts, and experts in every layer.

Experts are chosen by their logits and a bias, and weighted by sigmoids. Layers without a window do not rotate.
"""

from collections.abc import Mapping
from typing import Any

from jaxkv.models.config import DecoderConfig
from jaxkv.models.config_fields import FULL, MOST_DIM, MOST_HEADS, SLIDING, Fields
from jaxkv.models.families.family import (
    Family,
    make_experts,
    read_common,
    read_num_layers,
    read_windows,
)
from jaxkv.models.families.postnorm import exaone4
from jaxkv.models.rope_fields import parse_ropes

WIDTH = 512  # of an expert
# Names in transformers, and as published.
PUBLISHED = {
    "mlp.gate.e_score_correction_bias": "moe.router.expert_bias", "post_self_attn_layernorm": "post_attn_norm",
    "post_mlp_layernorm": "post_ffn_norm",
}  # fmt: skip
TENSORS = {
    "experts.choice_bias": "moe.router.expert_bias", "attention_post_norm": "post_attn_norm.weight",
    "mlp_post_norm": "post_ffn_norm.weight",
}  # fmt: skip


def parse(fields: Fields) -> DecoderConfig:
    num_layers = read_num_layers(fields)
    common = read_common(fields, num_kv_heads=(4,), head_dim=128, mlp_dim=(WIDTH,))
    window = fields.size("sliding_window", 513, None)
    windows = read_windows(fields, [SLIDING if (i + 1) % 5 else FULL for i in range(num_layers)], window)
    rope = parse_ropes(fields, common["max_seq_len"], theta=10_000.0)[FULL]
    count = fields.either("num_experts", "num_local_experts", 384, most=MOST_HEADS)
    experts = make_experts(
        fields, count=count, per_token=fields.size("num_experts_per_tok", 6, most=count), scores="sigmoid",
        mlp_dim=fields.size("moe_intermediate_size", WIDTH, most=MOST_DIM),
        normalise=fields.flag("norm_topk_prob", False), choice_bias=True, choose_by="logits",
        shared_dim=fields.size("shared_expert_intermediate_size", WIDTH, most=MOST_DIM),
    )  # fmt: skip
    return DecoderConfig(
        **common, windows=windows, ropes=exaone4.rotate_windowed(rope, windows, window), qk_norm=True,
        post_norms=True, experts=experts, expert_layers=(True,) * num_layers,
    )  # fmt: skip


def render(config: DecoderConfig) -> dict[str, Any]:
    experts = config.experts
    assert experts is not None
    return exaone4.render(config) | {
        "num_experts": experts.count, "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.mlp_dim, "norm_topk_prob": experts.normalise,
        "shared_expert_intermediate_size": experts.shared_dim,
    }  # fmt: skip


def name_tensor(name: str, config: Mapping[str, Any]) -> str:
    """Returns a tensor's name as published."""
    for new, old in PUBLISHED.items():
        name = name.replace(new, old)
    return name


FAMILY = Family(
    parse=parse, render=render, architectures=("Kolibri1ForCausalLM",), tensors=TENSORS, name_tensor=name_tensor
)
