"""OLMo 2: Llama with norms behind attention and MLP in place of those before, and norms on queries and keys.

A token's queries are normalised together, over all of its heads, and so are its keys. Refuses `clip_qkv`, of OLMo 1.
"""

from typing import Any

from jaxkv.models.config import DecoderConfig
from jaxkv.models.config_fields import FULL, Fields
from jaxkv.models.families.family import Family, read_common, read_num_layers, render_common
from jaxkv.models.rope_fields import parse_ropes, render_rope

TENSORS = {
    "attention_post_norm": "post_attention_layernorm.weight",
    "mlp_post_norm": "post_feedforward_layernorm.weight",
}


def parse(fields: Fields) -> DecoderConfig:
    num_layers, common = read_num_layers(fields), read_olmo(fields)
    rope = parse_ropes(fields, common["max_seq_len"], theta=10_000.0)[FULL]
    return DecoderConfig(**common, windows=(None,) * num_layers, ropes=(rope,) * num_layers)


def read_olmo(fields: Fields, *, norm_eps: float = 1e-5) -> dict[str, Any]:
    """Reads the fields common to OLMo 2, 3 and hybrid, as arguments of `DecoderConfig`."""
    common = read_common(fields, num_kv_heads=(None,), norm_eps=norm_eps)
    has_bias = fields.flag("attention_bias", False)
    return common | dict(
        qk_norm=True, qk_norm_over="all_heads", pre_norms=False, post_norms=True, qkv_bias=has_bias,
        out_bias=has_bias,
    )  # fmt: skip


def render(config: DecoderConfig) -> dict[str, Any]:
    own = {"rope_parameters": render_rope(config.ropes[0]), "attention_bias": config.out_bias}
    return render_common(config) | own


FAMILY = Family(parse=parse, render=render, architectures=("Olmo2ForCausalLM",), tensors=TENSORS)
