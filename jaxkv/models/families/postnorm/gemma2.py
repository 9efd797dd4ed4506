"""Gemma 2: norm weights around zero, norms before and after attention and MLP, soft caps, alternate sliding windows.

Embeddings are multiplied by the square root of their width; `query_pre_attn_scalar` replaces the head width.
"""

from typing import Any

from jaxkv.models.config import DecoderConfig
from jaxkv.models.config_fields import FULL, SLIDING, Fields
from jaxkv.models.families.family import (
    Family,
    read_common,
    read_num_layers,
    read_windows,
    render_common,
    render_windows,
)
from jaxkv.models.rope_fields import parse_ropes, render_rope

# Attention and MLP are also followed by norms: post_attention_layernorm is the one after attention, not the MLP's.
TENSORS = {
    "attention_post_norm": "post_attention_layernorm.weight",
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "mlp_post_norm": "post_feedforward_layernorm.weight",
}
ACTIVATION = "hidden_activation"


def parse(fields: Fields) -> DecoderConfig:
    num_layers, common = read_num_layers(fields), read_gemma(fields, attention_soft_cap=50.0, logit_soft_cap=30.0)
    types = [FULL if i % 2 else SLIDING for i in range(num_layers)]
    windows = read_windows(fields, types, fields.size("sliding_window", 4096, None))
    rope = parse_ropes(fields, common["max_seq_len"], theta=10_000.0)[FULL]
    return DecoderConfig(**common, windows=windows, ropes=(rope,) * num_layers)


def read_gemma(fields: Fields, *, attention_soft_cap: float | None, logit_soft_cap: float | None) -> dict[str, Any]:
    """Reads the fields common to Gemma 2 and 3, with their default soft caps, as arguments of `DecoderConfig`."""
    fields.take("hidden_act", None)  # configs have both; `hidden_activation` counts
    common = read_common(fields, head_dim=256, tied=True, activation=(ACTIVATION, "gelu_pytorch_tanh"))
    has_bias = fields.flag("attention_bias", False)
    return common | dict(
        attention_scale=fields.number("query_pre_attn_scalar", 256, above=0) ** -0.5,
        attention_soft_cap=fields.number("attn_logit_softcapping", attention_soft_cap, None, above=0),
        logit_soft_cap=fields.number("final_logit_softcapping", logit_soft_cap, None, above=0),
        norm_offset=1.0,
        post_norms=True,
        qkv_bias=has_bias,
        out_bias=has_bias,
        embed_scale=common["embed_dim"] ** 0.5,
    )


def render_gemma(config: DecoderConfig) -> dict[str, Any]:
    return render_common(config, activation=ACTIVATION) | render_windows(config) | {
        "attention_bias": config.out_bias,
        "query_pre_attn_scalar": round(config.attention_scale**-2),
        "final_logit_softcapping": config.logit_soft_cap,
        "attn_logit_softcapping": config.attention_soft_cap,
    }  # fmt: skip


def render(config: DecoderConfig) -> dict[str, Any]:
    return render_gemma(config) | {"rope_parameters": render_rope(config.ropes[0])}


FAMILY = Family(parse=parse, render=render, architectures=("Gemma2ForCausalLM",), tensors=TENSORS)
