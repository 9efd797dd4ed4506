"""GPT-OSS: a sink in every head, windows in every other layer, experts with biases, YaRN."""

from typing import Any

from jaxkv.models.config import DecoderConfig, ExpertsConfig
from jaxkv.models.fields import MOST_HEADS, Fields
from jaxkv.models.rope_fields import parse_ropes

ROPE = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096}  # fmt: skip


def parse(fields: Fields, common: dict[str, Any]) -> dict[str, Any]:
    """What a `DecoderConfig` has besides what all families have in common."""
    count = fields.either("num_local_experts", "num_experts", 128, most=MOST_HEADS)
    per_token = fields.either("num_experts_per_tok", "experts_per_token", 4, most=count)
    fields.size("initial_context_length", None)  # the old name of what stands in the rotary embedding too
    experts = ExpertsConfig(
        count=count, per_token=per_token, mlp_dim=common["mlp_dim"], scores="softmax_of_chosen", bias=True,
        limit=fields.number("swiglu_limit", 7.0, above=0), alpha=fields.number("swiglu_alpha", 1.702, above=0),
    )  # fmt: skip
    ropes = parse_ropes(fields, common["max_seq_len"], theta=150_000.0, yarn=True, default=ROPE)
    return dict(
        experts=experts, expert_layers=(True,) * len(common["windows"]), sinks=True,
        ropes=(*ropes.values(),)[:1] * len(common["windows"]),
    )  # fmt: skip


def render(config: DecoderConfig) -> dict[str, Any]:
    """The fields that `parse` reads."""
    assert config.experts is not None
    return {
        "num_local_experts": config.experts.count, "num_experts_per_tok": config.experts.per_token,
        "swiglu_limit": config.experts.limit, "swiglu_alpha": config.experts.alpha,
    }  # fmt: skip
