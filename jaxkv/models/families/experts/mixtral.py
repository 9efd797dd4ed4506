"""Mixtral: Mistral with experts in place of every MLP, weighted by a softmax over the chosen ones alone."""

from typing import Any

from jaxkv.models.config import DecoderConfig, ExpertsConfig
from jaxkv.models.config_fields import MOST_HEADS, Fields
from jaxkv.models.families.family import Family, read_uniform, render_uniform

TENSORS = {
    "experts.router": "block_sparse_moe.gate.weight",
    "experts.gate": "block_sparse_moe.experts.{}.w1.weight",
    "experts.up": "block_sparse_moe.experts.{}.w3.weight",
    "experts.down": "block_sparse_moe.experts.{}.w2.weight",
}


def parse(fields: Fields) -> DecoderConfig:
    common = read_uniform(fields, num_kv_heads=(8,), norm_eps=1e-5, theta=1_000_000.0)
    window, num_layers = fields.size("sliding_window", None), len(common["windows"])
    count = fields.either("num_local_experts", "num_experts", 8, most=MOST_HEADS)
    experts = ExpertsConfig(
        count=count, per_token=fields.size("num_experts_per_tok", 2, most=count), mlp_dim=common["mlp_dim"],
        scores="softmax_of_chosen",
    )  # fmt: skip
    own = dict(windows=(window,) * num_layers, experts=experts, expert_layers=(True,) * num_layers)
    return DecoderConfig(**common | own)


def render(config: DecoderConfig) -> dict[str, Any]:
    assert config.experts is not None
    return render_uniform(config) | {
        "sliding_window": config.windows[0], "num_local_experts": config.experts.count,
        "num_experts_per_tok": config.experts.per_token,
    }  # fmt: skip


FAMILY = Family(parse=parse, render=render, architectures=("MixtralForCausalLM",), tensors=TENSORS)
