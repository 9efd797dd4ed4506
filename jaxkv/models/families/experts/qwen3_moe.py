"""Qwen 3 with experts in place of MLPs, in all layers or in some.

A softmax over all experts chooses; the chosen weights are divided by their sum if `norm_topk_prob` is on.
"""

import re
from typing import Any

import numpy as np

from jaxkv.models.config import DecoderConfig, ExpertsConfig
from jaxkv.models.config_fields import MOST_DIM, MOST_HEADS, Fields
from jaxkv.models.families.experts_common import place_experts
from jaxkv.models.families.family import Family, read_uniform, render_uniform
from jaxkv.models.families.prenorm.qwen2 import read_switched_windows, render_switched_windows

FUSED = re.compile(r"(.*\.mlp\.experts)\.(gate_up|down)_proj")


def parse(fields: Fields) -> DecoderConfig:
    common, has_bias = read_uniform(fields), fields.flag("attention_bias", False)
    num_layers = len(common["windows"])
    windows = read_switched_windows(
        fields, num_layers, every_layer=True
    )  # transformers reads max_window_layers, and ignores it
    count = fields.either("num_experts", "num_local_experts", 128, most=MOST_HEADS)
    experts = ExpertsConfig(
        count=count, per_token=fields.size("num_experts_per_tok", 8, most=count),
        mlp_dim=fields.size("moe_intermediate_size", 768, most=MOST_DIM),
        normalise=fields.flag("norm_topk_prob", False),
    )  # fmt: skip
    layers = read_expert_layers(fields, num_layers)
    return DecoderConfig(**common | dict(
        windows=windows, qk_norm=True, qkv_bias=has_bias, out_bias=has_bias,
        **place_experts(experts, layers),
    ))  # fmt: skip


def read_expert_layers(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Reads which layers have experts."""
    every, without = fields.size("decoder_sparse_step", 1), fields.take("mlp_only_layers", None)
    without = [] if without is None else without
    if not isinstance(without, list) or not all(type(i) is int for i in without):
        raise fields.refuse("mlp_only_layers", without, "a list of layers")
    return tuple(i not in without and (i + 1) % every == 0 for i in range(num_layers))


def render_expert_layers(config: DecoderConfig) -> dict[str, Any]:
    """Writes the fields that `read_expert_layers` reads."""
    without = [i for i in range(config.num_layers) if not (config.experts and config.expert_layers[i])]
    return {"mlp_only_layers": without, "decoder_sparse_step": 1}


def render(config: DecoderConfig) -> dict[str, Any]:
    windows = render_switched_windows(config)
    del windows["layer_types"]  # all layers are alike
    fields = render_uniform(config) | windows | render_expert_layers(config) | {"attention_bias": config.out_bias}
    if config.experts is None:
        return fields
    return fields | {
        "num_experts": config.experts.count, "num_experts_per_tok": config.experts.per_token,
        "moe_intermediate_size": config.experts.mlp_dim, "norm_topk_prob": config.experts.normalise,
    }  # fmt: skip


def split_experts(tensors: dict[str, Any]) -> dict[str, Any]:
    """Returns the tensors of each expert for those that hold all of a layer, `[experts, outputs, inputs]` or
    `[experts, inputs, outputs]`, as the two of a layer show together."""
    return {own: x for name, tensor in tensors.items() for own, x in _split(name, tensor, tensors).items()}


def _split(name: str, tensor: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    if (found := FUSED.fullmatch(name)) is None or tensor.ndim != 3 or len(tensor) > MOST_HEADS:
        return {name: tensor}
    kinds = ("down",) if found[2] == "down" else ("gate", "up")
    stored = [tensors.get(f"{found[1]}.{kind}_proj") for kind in ("gate_up", "down")]
    up, down = [list(x.shape[1:]) if x is not None else [] for x in stored]
    if len(down) == 2 and up == [down[1], 2 * down[0]]:
        tensor = np.swapaxes(tensor, 1, 2)
    size = tensor.shape[1] // len(kinds)
    return {
        f"{found[1]}.{i}.{kind}_proj.weight": tensor[i, n * size : (n + 1) * size]
        for i in range(len(tensor)) for n, kind in enumerate(kinds)
    }  # fmt: skip


FAMILY = Family(parse=parse, render=render, architectures=("Qwen3MoeForCausalLM",), repack=split_experts)
