"""Granite 4: Granite 3 with Mamba 2 in most layers, or in none, and experts beside the MLP, or the MLP alone.

Layers of attention do not rotate unless `position_embedding_type` is "rope". A softmax over the chosen experts weights
them. Refuses other position embeddings and other norms.
"""

import dataclasses
from typing import Any

from jaxkv.models.config import DecoderConfig, ExpertsConfig
from jaxkv.models.config_fields import FULL, LINEAR, MOST_DIM, MOST_HEADS, Fields
from jaxkv.models.families.experts.granitemoe import TENSORS as EXPERTS
from jaxkv.models.families.family import Family, make_experts, read_num_layers, render_common
from jaxkv.models.families.hybrid_common import (
    half_rows,
    kinds_of,
    mamba_names,
    mix,
    mixer_of,
    read_kinds,
    read_mamba,
    render_mamba,
)
from jaxkv.models.families.prenorm.granite import read_granite, render_factors
from jaxkv.models.rope_fields import parse_ropes, render_rope

OLD_KINDS = {"mamba": LINEAR, "attention": FULL}
SHARED = "shared_mlp.input_linear.weight"
TENSORS: dict[str, Any] = mamba_names("mamba") | EXPERTS | {
    "mlp.gate": half_rows(SHARED, 0), "mlp.up": half_rows(SHARED, 1), "mlp.down": "shared_mlp.output_linear.weight",
    "experts.shared.gate": half_rows(SHARED, 0), "experts.shared.up": half_rows(SHARED, 1),
    "experts.shared.down": "shared_mlp.output_linear.weight",
}  # fmt: skip


def parse(fields: Fields) -> DecoderConfig:
    num_layers, common = read_num_layers(fields), read_granite(fields)
    older = fields.take("layers_block_type", None)
    types = fields.take("layer_types", None) or older
    if isinstance(types, list):
        types = [OLD_KINDS.get(kind, kind) if isinstance(kind, str) else kind for kind in types]
    fields.left["layer_types"] = types
    kinds = read_kinds(fields, [LINEAR] * num_layers)
    fields.must_be("normalization_function", "rmsnorm")
    fields.take("init_method", None)
    if LINEAR not in kinds:
        fields.left = {name: value for name, value in fields.left.items() if not name.startswith("mamba_")}
    layers = _read_blocks(fields, kinds, common) if LINEAR in kinds else {"windows": (None,) * num_layers}
    rope = parse_ropes(fields, common["max_seq_len"], theta=10_000.0)[FULL]
    positions = fields.take("position_embedding_type", None)
    if positions not in (None, "nope", "rope"):
        raise fields.refuse("position_embedding_type", positions, "'rope' and 'nope'")
    rope = rope if positions == "rope" else dataclasses.replace(rope, partial_rotary_factor=0.0)
    experts, mlp_dim = _read_experts(fields, common["mlp_dim"])
    return DecoderConfig(**common | layers | dict(
        ropes=(rope,) * num_layers, mlp_dim=mlp_dim, experts=experts,
        expert_layers=(True,) * num_layers if experts else (),
    ))  # fmt: skip


def _read_blocks(fields: Fields, kinds: list[str], common: dict[str, Any]) -> dict[str, Any]:
    width = fields.size("mamba_expand", 2, most=MOST_DIM) * common["embed_dim"]
    return {"blocks": mix(kinds, read_mamba(fields, width, norm_eps=common["norm_eps"]))}


def _read_experts(fields: Fields, width: int) -> tuple[ExpertsConfig | None, int]:
    """Reads the experts, of a width, if there are any, and the width of the MLP beside them."""
    count = fields.size("num_local_experts", 8, None, least=0, most=MOST_HEADS)
    per_token = fields.size("num_experts_per_tok", 2, None, least=0)
    mlp_dim = fields.size("shared_intermediate_size", 1024, most=MOST_DIM)
    if not count:
        return None, mlp_dim
    return make_experts(
        fields, count=count, per_token=per_token, mlp_dim=width, scores="softmax_of_chosen", shared_dim=mlp_dim
    ), mlp_dim  # fmt: skip


def render(config: DecoderConfig) -> dict[str, Any]:
    experts, rope = config.experts, dataclasses.replace(config.ropes[0], partial_rotary_factor=1.0)
    rotates = config.ropes[0].partial_rotary_factor != 0
    mamba = {}
    if config.blocks:
        mamba = render_mamba(mixer_of(config)) | {"mamba_expand": mixer_of(config).channels // config.embed_dim}
    return render_common(config) | render_factors(config) | mamba | {
        "rope_parameters": render_rope(rope), "layer_types": kinds_of(config),
        "position_embedding_type": "rope" if rotates else None,
        "num_local_experts": experts.count if experts else 0,
        "num_experts_per_tok": experts.per_token if experts else 0,
        "intermediate_size": experts.mlp_dim if experts else config.mlp_dim,
        "shared_intermediate_size": config.mlp_dim,
    }  # fmt: skip


FAMILY = Family(parse=parse, render=render, architectures=("GraniteMoeHybridForCausalLM",), tensors=TENSORS)
