"""Laguna: gated attention, of as many heads as each layer says, and experts chosen by sigmoids beside a shared MLP.

A gate is the softplus of a projection, for each head or for each of its entries. Layers with a window have a rotary
embedding of their own; in the others half of each head's entries rotates. Refuses experts whose inputs are weighted.
"""

from collections.abc import Mapping
from typing import Any

from jaxkv._core.config.validation import integer
from jaxkv.models.config import DecoderConfig, ExpertsConfig
from jaxkv.models.config_fields import FULL, MOST_DIM, MOST_HEADS, SLIDING, Fields
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
from jaxkv.models.mixers.block_config import BlockConfig
from jaxkv.models.rope_fields import parse_ropes

BIAS, SHARED = "mlp.experts.e_score_correction_bias", "mlp.shared_expert."
TENSORS = {
    "attention.gate": "self_attn.g_proj.weight", "attention.head_gate": "self_attn.g_proj.weight",
    "experts.choice_bias": BIAS,
} | {f"experts.shared.{name}": f"{SHARED}{name}_proj.weight" for name in ("gate", "up", "down")}  # fmt: skip
ROPES = {SLIDING: {"rope_type": "default", "rope_theta": 1e4},
         FULL: {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}}  # fmt: skip
MUST_BE = (("moe_apply_router_weight_on_input", False), ("norm_topk_prob", True), ("decoder_sparse_step", 1))
HEADS, GATING = "num_attention_heads_per_layer", {True: "head", "per-head": "head", "per-element": "entry"}


def parse(fields: Fields) -> DecoderConfig:
    num_layers, common = read_num_layers(fields), read_common(fields, num_kv_heads=(8,), head_dim=128)
    windows = read_windows(fields, [FULL] * num_layers, fields.size("sliding_window", 512, None))
    ropes = parse_ropes(fields, common["max_seq_len"], theta=5e5, local_theta=1e4, default=ROPES, partial=1.0)
    layers, has_bias = read_sparse_layers(fields, num_layers, dense=1), fields.flag("attention_bias", False)
    fields.must_be("mlp_only_layers", [i for i, has in enumerate(layers) if not has])  # which says it again
    gating = fields.take("gating", True)
    if isinstance(gating, list | dict) or gating not in GATING or (gating == 1 and gating is not True):
        raise fields.refuse("gating", gating, "True, 'per-head' and 'per-element'")
    return DecoderConfig(**common | dict(
        windows=windows, blocks=_read_blocks(fields, num_layers, common["num_heads"]), qk_norm=True,
        ropes=spread_ropes(ropes, windows), qkv_bias=has_bias, out_bias=has_bias,
        attention_gate=True, attention_gate_by=GATING[gating], attention_gate_activation="softplus",
        **place_experts(_read_experts(fields), layers),
    ))  # fmt: skip


def _read_blocks(fields: Fields, num_layers: int, num_heads: int) -> tuple[BlockConfig, ...]:
    listed = fields.take(HEADS, None)
    listed = [num_heads] * num_layers if listed is None else listed
    if not isinstance(listed, list) or len(listed) != num_layers:
        raise fields.refuse(HEADS, listed, f"a number of heads for each of the {num_layers} layers")
    sizes = [integer(f"{HEADS} in {fields.where}", size, least=1, most=MOST_HEADS) for size in listed]
    return tuple(BlockConfig(num_heads=None if size == num_heads else size) for size in sizes)


def _read_experts(fields: Fields) -> ExpertsConfig:
    for name, allowed in MUST_BE:
        fields.must_be(name, allowed)
    count = fields.either("num_experts", "num_local_experts", 256, most=MOST_HEADS)
    return make_experts(
        fields, count=count, per_token=fields.size("num_experts_per_tok", 8, most=count), scores="sigmoid",
        mlp_dim=fields.size("moe_intermediate_size", 512, most=MOST_DIM), normalise=True, choice_bias=True,
        scale=fields.number("moe_routed_scaling_factor", 1.0, above=0),
        logit_soft_cap=fields.number("moe_router_logit_softcapping", 0.0, least=0) or None,
        shared_dim=fields.size("shared_expert_intermediate_size", 512, most=MOST_DIM),
    )  # fmt: skip


def render(config: DecoderConfig) -> dict[str, Any]:
    experts = config.experts
    fields = render_common(config) | render_windows(config) | render_ropes(config) | render_sparse_layers(config) | {
        "attention_bias": config.out_bias, HEADS: list(config.query_heads),
        "gating": "per-head" if config.attention_gate_by == "head" else "per-element",
    }  # fmt: skip
    fields |= {} if fields["sliding_window"] else {"sliding_window": config.max_seq_len}  # no layer has it
    return fields if experts is None else fields | {
        "num_experts": experts.count, "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.mlp_dim, "moe_routed_scaling_factor": experts.scale,
        "moe_router_logit_softcapping": experts.logit_soft_cap or 0.0,
        "shared_expert_intermediate_size": experts.shared_dim,
    }  # fmt: skip


def name_tensor(name: str, config: Mapping[str, Any]) -> str:
    """Returns a tensor's name as published."""
    return name.replace("mlp.gate.e_score_correction_bias", BIAS).replace("mlp.shared_experts.", SHARED)


FAMILY = Family(
    parse=parse, render=render, architectures=("LagunaForCausalLM",), tensors=TENSORS, name_tensor=name_tensor
)
