"""dots.llm1: DeepSeek V3's experts behind Qwen 3's attention, with a window from the layer `max_window_layers` on."""

from typing import Any

from jaxkv.models.config import DecoderConfig
from jaxkv.models.config_fields import FULL, SLIDING, Fields
from jaxkv.models.families.experts_common import (
    count_dense_layers,
    place_experts,
    read_sigmoid_experts,
    render_sigmoid_experts,
)
from jaxkv.models.families.family import Family, read_uniform, read_windows, render_uniform, render_windows


def parse(fields: Fields) -> DecoderConfig:
    common, has_bias = read_uniform(fields, num_kv_heads=(32, None)), fields.flag("attention_bias", False)
    num_layers = len(common["windows"])
    window, first = fields.size("sliding_window", 4096, None), fields.size("max_window_layers", 62, least=0)
    fields.take("use_sliding_window", None)  # read by no version of the model
    types = [SLIDING if window is not None and i >= first else FULL for i in range(num_layers)]
    dense = fields.size("first_k_dense_replace", 0, least=0)
    for name in ("moe_layer_freq", "ep_size"):
        fields.must_be(name, 1)
    experts = read_sigmoid_experts(fields, count=None, per_token=None, mlp_dim=1408, normalise=False)
    return DecoderConfig(**common | dict(
        windows=read_windows(fields, types, window), qk_norm=True, qkv_bias=has_bias, out_bias=has_bias,
        **place_experts(experts, tuple(i >= dense for i in range(num_layers))),
    ))  # fmt: skip


def render(config: DecoderConfig) -> dict[str, Any]:
    experts = render_sigmoid_experts(config.experts) or {"n_routed_experts": 1, "num_experts_per_tok": 1}
    return render_uniform(config) | render_windows(config) | experts | {
        "attention_bias": config.out_bias, "first_k_dense_replace": count_dense_layers(config),
    }  # fmt: skip


FAMILY = Family(parse=parse, render=render, architectures=("Dots1ForCausalLM",))
