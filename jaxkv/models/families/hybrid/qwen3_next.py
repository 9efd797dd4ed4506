"""Qwen 3 Next: gated delta nets in three of four layers, gated attention in the fourth, Qwen 2's experts.

Norm weights are around zero, but for those of the delta nets; a quarter of each head's entries rotates. The projections
of a delta net are fused, by heads of keys. Refuses biases of attention. Multi-token prediction is skipped.
"""

from collections.abc import Mapping
from typing import Any

from jaxkv.models.config import DecoderConfig, ExpertsConfig
from jaxkv.models.config_fields import FULL, MOST_DIM, MOST_HEADS, Fields
from jaxkv.models.families.experts.qwen2_moe import TENSORS as EXPERTS, render_experts
from jaxkv.models.families.experts.qwen3_moe import read_expert_layers, render_expert_layers
from jaxkv.models.families.experts_common import place_experts
from jaxkv.models.families.family import Family, read_common, read_num_layers, render_common
from jaxkv.models.families.hybrid_common import (
    GATED_ATTENTION,
    delta_names,
    every_fourth,
    kinds_of,
    mix,
    mixer_of,
    read_delta,
    read_kinds,
    render_delta,
    rows,
)
from jaxkv.models.mixers.block_config import DeltaConfig
from jaxkv.models.rope_fields import parse_ropes, render_rope

QKVZ, BA = "linear_attn.in_proj_qkvz.weight", "linear_attn.in_proj_ba.weight"


def _qkvz(delta: DeltaConfig) -> tuple[int, ...]:
    """Rows of the queries, keys, values and gates of a head of keys."""
    values = delta.value_channels // delta.key_heads
    return delta.key_dim, delta.key_dim, values, values


def _ba(delta: DeltaConfig) -> tuple[int, ...]:
    return (delta.value_heads // delta.key_heads,) * 2


TENSORS = EXPERTS | GATED_ATTENTION | delta_names("linear_attn")
TENSORS |= {f"mixer.{name}": rows(QKVZ, _qkvz, i, lambda delta: delta.key_heads)
            for i, name in enumerate(("query", "key", "value", "gate"))}  # fmt: skip
TENSORS |= {f"mixer.{name}": rows(BA, _ba, i, lambda delta: delta.key_heads)
            for i, name in enumerate(("beta", "decay"))}  # fmt: skip


def parse(fields: Fields) -> DecoderConfig:
    common, experts = read_qwen_next(fields), read_experts(fields, count=512, per_token=10)
    layers = read_expert_layers(fields, len(common["blocks"]))
    return DecoderConfig(**common, **place_experts(experts, layers))


def read_qwen_next(fields: Fields, *, num_kv_heads: int = 2, mlp_dim: int = 5632) -> dict[str, Any]:
    """Reads the fields common to Qwen 3 Next and 3.5, with a family's defaults, as arguments of `DecoderConfig`."""
    num_layers = read_num_layers(fields)
    common = read_common(fields, num_kv_heads=(num_kv_heads,), head_dim=256, mlp_dim=(mlp_dim,))
    fields.must_be("attention_bias", False)
    kinds = read_kinds(fields, every_fourth(num_layers, fields.size("full_attention_interval", 4)))
    rope = parse_ropes(fields, common["max_seq_len"], theta=10_000.0, partial=0.25)[FULL]
    return common | dict(
        blocks=mix(kinds, read_delta(fields, norm_eps=common["norm_eps"])), ropes=(rope,) * num_layers, qk_norm=True,
        norm_offset=1.0, attention_gate=True,
    )  # fmt: skip


def read_experts(fields: Fields, *, count: int, per_token: int, normalise: bool | None = None) -> ExpertsConfig:
    """Reads the experts, with a family's defaults. Without `normalise`, a field says whether weights are normalised."""
    count = fields.either("num_experts", "num_local_experts", count, most=MOST_HEADS)
    return ExpertsConfig(
        count=count, per_token=fields.size("num_experts_per_tok", per_token, most=count),
        mlp_dim=fields.size("moe_intermediate_size", 512, most=MOST_DIM),
        normalise=fields.flag("norm_topk_prob", True) if normalise is None else normalise,
        shared_dim=fields.size("shared_expert_intermediate_size", 512, most=MOST_DIM), shared_gate=True,
    )  # fmt: skip


def render(config: DecoderConfig) -> dict[str, Any]:
    return render_qwen_next(config) | render_expert_layers(config)


def render_qwen_next(config: DecoderConfig) -> dict[str, Any]:
    rope = render_rope(config.ropes[0]) | {"partial_rotary_factor": config.ropes[0].partial_rotary_factor}
    return render_common(config) | render_delta(mixer_of(config)) | render_experts(config.experts) | {
        "rope_parameters": rope, "layer_types": kinds_of(config),
    }  # fmt: skip


def name_tensor(name: str, config: Mapping[str, Any]) -> str | None:
    """Returns the name itself; None for a tensor of multi-token prediction."""
    return None if name.startswith("mtp.") else name


FAMILY = Family(
    parse=parse, render=render, architectures=("Qwen3NextForCausalLM",), tensors=TENSORS, name_tensor=name_tensor
)
