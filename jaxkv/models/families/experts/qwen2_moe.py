"""Qwen 1.5 and 2 with experts: Qwen 2 with experts in place of MLPs, beside a shared one with a gate of its own.

A softmax over all experts chooses; the weights are normalised if `norm_topk_prob` is on. Refuses `use_sliding_window`
without `layer_types`: which layers it means has changed with the version of transformers.
"""

from typing import Any

from jaxkv.models.config import DecoderConfig, ExpertsConfig
from jaxkv.models.config_fields import FULL, MOST_DIM, MOST_HEADS, Fields
from jaxkv.models.families.experts.qwen3_moe import read_expert_layers, render_expert_layers
from jaxkv.models.families.experts_common import place_experts
from jaxkv.models.families.family import (
    Family,
    read_uniform,
    read_windows,
    render_uniform,
    render_windows,
)

TENSORS = {
    f"experts.shared.{name}": f"mlp.shared_expert.{name}_proj.weight" for name in ("gate", "up", "down")
}  # fmt: skip


def parse(fields: Fields) -> DecoderConfig:
    common = read_uniform(fields, num_kv_heads=(16,))
    num_layers = len(common["windows"])
    count = fields.either("num_experts", "num_local_experts", 60, most=MOST_HEADS)
    experts = ExpertsConfig(
        count=count, per_token=fields.size("num_experts_per_tok", 4, most=count),
        mlp_dim=fields.size("moe_intermediate_size", 1408, most=MOST_DIM),
        normalise=fields.flag("norm_topk_prob", False),
        shared_dim=fields.size("shared_expert_intermediate_size", 5632, most=MOST_DIM), shared_gate=True,
    )  # fmt: skip
    layers = read_expert_layers(fields, num_layers)
    return DecoderConfig(**common | dict(
        windows=_read_windows(fields, num_layers), qkv_bias=fields.flag("qkv_bias", True),
        **place_experts(experts, layers),
    ))  # fmt: skip


def _read_windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    window, is_on = fields.size("sliding_window", 4096, None, least=0), fields.flag("use_sliding_window", False)
    fields.take("max_window_layers", None)
    if is_on and fields.left.get("layer_types") is None:
        raise fields.refuse("use_sliding_window", is_on, "it only beside layer_types")
    return read_windows(fields, [FULL] * num_layers, (window or None) if is_on else None)


def render(config: DecoderConfig) -> dict[str, Any]:
    windows = render_windows(config)
    fields = render_uniform(config) | windows | render_expert_layers(config) | {
        "use_sliding_window": windows["sliding_window"] is not None, "qkv_bias": config.qkv_bias,
    }  # fmt: skip
    return fields | render_experts(config.experts)


def render_experts(experts: ExpertsConfig | None) -> dict[str, Any]:
    """Writes the sizes of experts, of which one is shared."""
    return {} if experts is None else {
        "num_experts": experts.count, "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.mlp_dim, "norm_topk_prob": experts.normalise,
        "shared_expert_intermediate_size": experts.shared_dim,
    }  # fmt: skip


FAMILY = Family(parse=parse, render=render, architectures=("Qwen2MoeForCausalLM",), tensors=TENSORS)
