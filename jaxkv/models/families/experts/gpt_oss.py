"""GPT-OSS: a sink in every head, windows in every other layer, biases everywhere, YaRN.

Every layer has experts, weighted by a softmax over the chosen ones alone, with a clipped gate. All experts are in one
tensor `[E, inputs, outputs]`, with gate and up projections in alternating columns.
"""

from typing import Any

from jaxkv.models.config import DecoderConfig, ExpertsConfig
from jaxkv.models.config_fields import FULL, MOST_HEADS, SLIDING, Fields
from jaxkv.models.families.family import (
    AsStored,
    Columns,
    Family,
    read_uniform,
    read_windows,
    render_uniform,
    render_windows,
)

ROPE = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096}  # fmt: skip
TENSORS: dict[str, str | Columns | AsStored] = {
    "experts.router": "mlp.router.weight",
    "experts.router_bias": "mlp.router.bias",
    "experts.gate": Columns("mlp.experts.gate_up_proj", 0, 2),
    "experts.up": Columns("mlp.experts.gate_up_proj", 1, 2),
    "experts.gate_bias": Columns("mlp.experts.gate_up_proj_bias", 0, 2),
    "experts.up_bias": Columns("mlp.experts.gate_up_proj_bias", 1, 2),
    "experts.down": AsStored("mlp.experts.down_proj"),
    "experts.down_bias": AsStored("mlp.experts.down_proj_bias"),
}


def parse(fields: Fields) -> DecoderConfig:
    common = read_uniform(
        fields, num_kv_heads=(8,), head_dim=64, norm_eps=1e-5, theta=150_000.0, rope={"default": ROPE}
    )
    num_layers = len(common["windows"])
    has_bias = fields.flag("attention_bias", True)
    types = [FULL if i % 2 else SLIDING for i in range(num_layers)]
    windows = read_windows(fields, types, fields.size("sliding_window", 128, None))
    count = fields.either("num_local_experts", "num_experts", 128, most=MOST_HEADS)
    per_token = fields.either("num_experts_per_tok", "experts_per_token", 4, most=count)
    fields.size("initial_context_length", None)  # old name of a field of the rotary embedding
    experts = ExpertsConfig(
        count=count, per_token=per_token, mlp_dim=common["mlp_dim"], scores="softmax_of_chosen", bias=True,
        limit=fields.number("swiglu_limit", 7.0, above=0), alpha=fields.number("swiglu_alpha", 1.702, above=0),
    )  # fmt: skip
    return DecoderConfig(**common | dict(
        windows=windows, qkv_bias=has_bias, out_bias=has_bias, sinks=True, experts=experts,
        expert_layers=(True,) * num_layers,
    ))  # fmt: skip


def render(config: DecoderConfig) -> dict[str, Any]:
    assert config.experts is not None
    return render_uniform(config) | render_windows(config) | {
        "attention_bias": config.out_bias,
        "num_local_experts": config.experts.count, "num_experts_per_tok": config.experts.per_token,
        "swiglu_limit": config.experts.limit, "swiglu_alpha": config.experts.alpha,
    }  # fmt: skip


FAMILY = Family(parse=parse, render=render, architectures=("GptOssForCausalLM",), tensors=TENSORS)
