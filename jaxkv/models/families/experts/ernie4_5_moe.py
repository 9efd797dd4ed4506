"""ERNIE 4.5 with experts: ERNIE 4.5's attention, and experts that a softmax and a bias choose, beside a shared MLP.

`moe_layer_start_index`, `moe_layer_end_index` and `moe_layer_interval` say which layers have experts. Multi-token
prediction is skipped. Refuses biases (`use_bias`), which would be on the output head too.
"""

from collections.abc import Mapping
from typing import Any

from jaxkv.models.config import DecoderConfig, ExpertsConfig
from jaxkv.models.config_fields import MOST_DIM, MOST_HEADS, MOST_LAYERS, Fields
from jaxkv.models.families.experts_common import place_experts
from jaxkv.models.families.family import Family, Section, make_experts, read_uniform, render_uniform

TENSORS = {
    "experts.choice_bias": Section(
        "mlp.moe_statics.e_score_correction_bias", lambda config, shape: ((1, *shape), (1, *shape), 0)
    )
}
MUST_BE: tuple[tuple[str, Any], ...] = (("use_bias", False), ("moe_gate", "topk"), ("moe_use_aux_free", True))
# Of training, and of multi-token prediction.
UNUSED = ("moe_capacity", "num_nextn_predict_layers")


def parse(fields: Fields) -> DecoderConfig:
    common = read_uniform(
        fields, num_kv_heads=(4, None), norm_eps=1e-5, tied=True, theta=500_000.0, rope={"interleaved": True}
    )
    for name, allowed in MUST_BE:
        fields.must_be(name, allowed)
    for name in UNUSED:
        fields.take(name, None)
    layers, experts = _read_layers(fields, len(common["windows"])), _read_experts(fields)
    return DecoderConfig(**common, **place_experts(experts, layers))


def _read_layers(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Reads which layers have experts."""
    first = fields.size("moe_layer_start_index", 1, least=0)
    last = fields.size("moe_layer_end_index", -1, None, least=-1, most=MOST_LAYERS)
    every = fields.size("moe_layer_interval", 1)
    last = num_layers - 1 if last in (-1, None) else last
    return tuple((i + 1) % every == 0 and first <= i <= last for i in range(num_layers))


def _read_experts(fields: Fields) -> ExpertsConfig:
    count = fields.either("moe_num_experts", "num_experts", 64, most=MOST_HEADS)
    mlp_dim = fields.size("moe_intermediate_size", 1536, most=MOST_DIM)
    least = fields.number("moe_norm_min", 1e-12, least=0)
    if least > 1e-6:
        raise fields.refuse("moe_norm_min", least, "a number that no sum of scores falls below, up to 1e-6")
    return make_experts(
        fields, count=count, per_token=fields.either("moe_k", "num_experts_per_tok", 6, most=count), mlp_dim=mlp_dim,
        normalise=True, choice_bias=True,
        shared_dim=fields.size("moe_num_shared_experts", 2, least=0) * mlp_dim,
    )  # fmt: skip


def render(config: DecoderConfig) -> dict[str, Any]:
    experts, layers = config.experts, [i for i, has in enumerate(config.expert_layers) if has]
    fields = render_uniform(config) | {"moe_layer_start_index": config.num_layers}
    if experts is None:
        return fields
    every = layers[1] - layers[0] if len(layers) > 1 else layers[0] + 1
    return fields | {
        "moe_layer_start_index": layers[0], "moe_layer_end_index": layers[-1], "moe_layer_interval": every,
        "moe_num_experts": experts.count, "moe_k": experts.per_token, "moe_intermediate_size": experts.mlp_dim,
        "moe_num_shared_experts": experts.shared_dim // experts.mlp_dim,
    }  # fmt: skip


def name_tensor(name: str, config: Mapping[str, Any]) -> str | None:
    """Returns a tensor's name as published; None for a tensor of multi-token prediction."""
    if name.startswith(("mtp", "model.mtp")):
        return None
    return name.replace("mlp.gate.moe_statics.", "mlp.moe_statics.")


FAMILY = Family(
    parse=parse, render=render, architectures=("Ernie4_5_MoeForCausalLM",), tensors=TENSORS, name_tensor=name_tensor
)
