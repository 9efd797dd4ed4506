"""OLMoE: Llama with experts in place of every MLP, and norms on queries and keys.

A token's queries are normalised together, over all of its heads, and so are its keys. A softmax over all experts
chooses. Refuses `clip_qkv`.
"""

from typing import Any

from jaxkv.models.config import DecoderConfig
from jaxkv.models.config_fields import MOST_HEADS, Fields
from jaxkv.models.families.family import Family, make_experts, read_uniform, render_uniform


def parse(fields: Fields) -> DecoderConfig:
    common, has_bias = read_uniform(fields, num_kv_heads=(None,), norm_eps=1e-5), fields.flag("attention_bias", False)
    fields.must_be("clip_qkv", None)
    count = fields.either("num_experts", "num_local_experts", 64, most=MOST_HEADS)
    experts = make_experts(
        fields, count=count, per_token=fields.size("num_experts_per_tok", 8, most=count), mlp_dim=common["mlp_dim"],
        normalise=fields.flag("norm_topk_prob", False),
    )  # fmt: skip
    return DecoderConfig(
        **common, qkv_bias=has_bias, out_bias=has_bias, qk_norm=True, qk_norm_over="all_heads", experts=experts,
        expert_layers=(True,) * len(common["windows"]),
    )  # fmt: skip


def render(config: DecoderConfig) -> dict[str, Any]:
    assert config.experts is not None
    return render_uniform(config) | {
        "attention_bias": config.out_bias, "num_experts": config.experts.count,
        "num_experts_per_tok": config.experts.per_token, "norm_topk_prob": config.experts.normalise,
    }  # fmt: skip


FAMILY = Family(parse=parse, render=render, architectures=("OlmoeForCausalLM",))
