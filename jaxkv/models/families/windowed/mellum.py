"""Mellum 2: Qwen 3's experts and attention, and windows in some layers, which have a rotary embedding of their own.

Multi-token prediction is skipped.
"""

from collections.abc import Mapping
from typing import Any

from jaxkv.models.config import DecoderConfig
from jaxkv.models.config_fields import FULL, MOST_DIM, MOST_HEADS, Fields
from jaxkv.models.families.experts_common import place_experts, read_sparse_layers, render_sparse_layers
from jaxkv.models.families.family import (
    Family,
    make_experts,
    read_common,
    read_num_layers,
    read_windows,
    render_common,
    render_ropes,
    render_windows,
    spread_ropes,
)
from jaxkv.models.rope_fields import parse_ropes

# Of multi-token prediction.
UNUSED = ("num_mtp_layers", "num_nextn_predict_layers", "mtp_layer_types", "mtp_mlp_layer_types")


def parse(fields: Fields) -> DecoderConfig:
    num_layers, common = read_num_layers(fields), read_common(fields, num_kv_heads=(4,), head_dim=128)
    for name in UNUSED:
        fields.take(name, None)
    windows = read_windows(fields, [FULL] * num_layers, fields.size("sliding_window", 1024, None))
    ropes = parse_ropes(fields, common["max_seq_len"], theta=500_000.0, local_theta=10_000.0)
    layers, has_bias = read_sparse_layers(fields, num_layers, dense=0), fields.flag("attention_bias", False)
    count = fields.either("num_experts", "num_local_experts", 64, most=MOST_HEADS)
    experts = make_experts(
        fields, count=count, per_token=fields.size("num_experts_per_tok", 8, most=count),
        mlp_dim=fields.size("moe_intermediate_size", 896, most=MOST_DIM),
        normalise=fields.flag("norm_topk_prob", True),
    )  # fmt: skip
    return DecoderConfig(
        **common, windows=windows, ropes=spread_ropes(ropes, windows), qk_norm=True,
        qkv_bias=has_bias, out_bias=has_bias, **place_experts(experts, layers),
    )  # fmt: skip


def render(config: DecoderConfig) -> dict[str, Any]:
    experts = config.experts
    fields = render_common(config) | render_windows(config) | render_ropes(config) | render_sparse_layers(config)
    fields |= {"attention_bias": config.out_bias}
    return fields if experts is None else fields | {
        "num_experts": experts.count, "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.mlp_dim, "norm_topk_prob": experts.normalise,
    }  # fmt: skip


def name_tensor(name: str, config: Mapping[str, Any]) -> str | None:
    """Returns the name itself; None for a tensor of multi-token prediction."""
    return None if name.startswith("mtp.") else name


FAMILY = Family(parse=parse, render=render, architectures=("MellumForCausalLM",), name_tensor=name_tensor)
