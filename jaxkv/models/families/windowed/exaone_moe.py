"""K-EXAONE: EXAONE 4's attention between norms before attention and MLP, not behind, and DeepSeek V3's experts.

Layers without a window do not rotate. Multi-token prediction is skipped. Refuses a `sliding_window_pattern` in letters
without `layer_types`.
"""

from collections.abc import Mapping
from typing import Any

from jaxkv.models.config import DecoderConfig
from jaxkv.models.config_fields import Fields
from jaxkv.models.families.experts_common import (
    place_experts,
    read_sigmoid_experts,
    read_sparse_layers,
    render_sigmoid_experts,
    render_sparse_layers,
)
from jaxkv.models.families.family import Family
from jaxkv.models.families.postnorm import exaone4

TENSORS = {"experts.choice_bias": "mlp.e_score_correction_bias"}
SHARED = "num_shared_experts"


def parse(fields: Fields) -> DecoderConfig:
    common = exaone4.read_exaone(fields)
    layers = read_sparse_layers(fields, len(common["windows"]), dense=1)
    if (listed := fields.take("is_moe_layer", None)) not in (None, list(layers)):
        raise fields.refuse("is_moe_layer", listed, f"the layers that mlp_layer_types says, {list(layers)}")
    fields.size("num_nextn_predict_layers", 0, None, least=0)  # `name_tensor` skips them
    experts = read_sigmoid_experts(fields, count=64, mlp_dim=1024, scale=2.5, shared_name=SHARED)
    return DecoderConfig(**common, **place_experts(experts, layers))


def render(config: DecoderConfig) -> dict[str, Any]:
    experts = render_sigmoid_experts(config.experts, count_name="num_experts", shared_name=SHARED)
    return exaone4.render(config) | render_sparse_layers(config) | experts


def name_tensor(name: str, config: Mapping[str, Any]) -> str | None:
    """Returns a tensor's name as published; None for a tensor of multi-token prediction."""
    if name.startswith("mtp"):
        return None
    return name.replace("mlp.gate.e_score_correction_bias", "mlp.e_score_correction_bias")


FAMILY = Family(
    parse=parse, render=render, architectures=("ExaoneMoeForCausalLM",), tensors=TENSORS, name_tensor=name_tensor
)
