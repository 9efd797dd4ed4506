"""K-EXAONE: EXAONE 4's attention between norms before attention and MLP, not behind, and DeepSeek V3's experts.

Layers without a window do not rotate. Multi-token prediction is skipped. Refuses a `sliding_window_pattern` in letters
without `layer_types`.
"""

from collections.abc import Mapping
from typing import Any

from jaxkv.models.config import DecoderConfig
from jaxkv.models.config_fields import Fields
from jaxkv.models.families.experts_common import (
    DENSE,
    SPARSE,
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
    layers = _read_layers(fields, len(common["windows"]))
    fields.size("num_nextn_predict_layers", 0, None, least=0)  # `name_tensor` skips them
    experts = read_sigmoid_experts(fields, count=64, mlp_dim=1024, scale=2.5, shared_name=SHARED)
    return DecoderConfig(**common, **place_experts(experts, layers))


def _read_layers(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Reads which layers have experts; published configs list them as true and false."""
    fields.left.setdefault("first_k_dense_replace", fields.take("first_last_k_dense_replace", 1))
    listed, is_given = fields.take("is_moe_layer", None), fields.left.get("mlp_layer_types") is not None
    if isinstance(listed, list) and len(listed) == num_layers and not is_given and {*map(type, listed)} == {bool}:
        fields.left["mlp_layer_types"] = [SPARSE if has else DENSE for has in listed]
    layers = read_sparse_layers(fields, num_layers, dense=1)
    if listed not in (None, list(layers)):
        raise fields.refuse("is_moe_layer", listed, f"the layers that mlp_layer_types says, {list(layers)}")
    return layers


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
