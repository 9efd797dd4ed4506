"""Qwen 3 with experts in the place of MLPs, in all layers or in some."""

from typing import Any

from jaxkv.models.config import DecoderConfig, ExpertsConfig
from jaxkv.models.fields import MOST_DIM, MOST_HEADS, Fields
from jaxkv.models.rope_fields import parse_ropes


def parse(fields: Fields, common: dict[str, Any]) -> dict[str, Any]:
    """What a `DecoderConfig` has besides what all families have in common."""
    num_layers = len(common["windows"])
    count = fields.either("num_experts", "num_local_experts", 128, most=MOST_HEADS)
    experts = ExpertsConfig(
        count=count, per_token=fields.size("num_experts_per_tok", 8, most=count),
        mlp_dim=fields.size("moe_intermediate_size", 768, most=MOST_DIM),
        normalise=fields.flag("norm_topk_prob", False),
    )  # fmt: skip
    every, without = fields.size("decoder_sparse_step", 1), fields.take("mlp_only_layers", None)
    without = [] if without is None else without
    if not isinstance(without, list) or not all(type(i) is int for i in without):
        raise fields.refuse("mlp_only_layers", without, "a list of layers")
    layers = tuple(i not in without and (i + 1) % every == 0 for i in range(num_layers))
    ropes = parse_ropes(fields, common["max_seq_len"], theta=10_000.0, yarn=True)
    some = any(layers)
    return dict(
        experts=experts if some else None, expert_layers=layers if some else (),
        ropes=(*ropes.values(),)[:1] * num_layers,
    )  # fmt: skip


def render(config: DecoderConfig) -> dict[str, Any]:
    """The fields that `parse` reads."""
    without = [i for i in range(config.num_layers) if not (config.experts and config.expert_layers[i])]
    fields = {"mlp_only_layers": without, "decoder_sparse_step": 1}
    if config.experts is None:
        return fields
    return fields | {
        "num_experts": config.experts.count, "num_experts_per_tok": config.experts.per_token,
        "moe_intermediate_size": config.experts.mlp_dim, "norm_topk_prob": config.experts.normalise,
    }  # fmt: skip
