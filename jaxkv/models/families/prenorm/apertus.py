"""Apertus: Llama with norms on queries and keys, and MLPs without a gate, by xIELU, which has two learned numbers.

Refuses other activations, and norms behind attention and MLP.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxkv.models.config import DecoderConfig
from jaxkv.models.config_fields import Fields
from jaxkv.models.families.family import Family, read_uniform, render_uniform

XIELU = "xielu"
TENSORS = {
    "attention_norm": "attention_layernorm.weight", "mlp_norm": "feedforward_layernorm.weight",
    "mlp.alpha_p": "mlp.act_fn.alpha_p", "mlp.alpha_n": "mlp.act_fn.alpha_n",
}  # fmt: skip
ROPE = {"rope_type": "llama3", "rope_theta": 12e6, "factor": 8.0, "original_max_position_embeddings": 8192,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0}  # fmt: skip
CONSTANTS = {"mlp.act_fn.beta": 0.5, "mlp.act_fn.eps": -1e-6}  # of xIELU, the same in all models


def parse(fields: Fields) -> DecoderConfig:
    fields.must_be("hidden_act", XIELU)
    for name, allowed in (("mlp_bias", False), ("post_norm", False), ("qk_norm", True)):
        fields.must_be(name, allowed)
    common = read_uniform(
        fields, num_kv_heads=(None,), norm_eps=1e-5, theta=12e6, rope={"default": ROPE}
    ) | {"activation": XIELU}  # fmt: skip
    has_bias = fields.flag("attention_bias", False)
    return DecoderConfig(**common, gated_mlp=False, qk_norm=True, qkv_bias=has_bias, out_bias=has_bias)


def render(config: DecoderConfig) -> dict[str, Any]:
    own = {"hidden_act": XIELU, "attention_bias": config.out_bias}
    return render_uniform(dataclasses.replace(config, activation="silu")) | own


def name_tensor(name: str, config: Mapping[str, Any]) -> str | None:
    """Returns the name itself; None for a constant of xIELU."""
    return None if name.endswith((*CONSTANTS,)) else name


FAMILY = Family(
    parse=parse, render=render, architectures=("ApertusForCausalLM",), tensors=TENSORS, name_tensor=name_tensor,
    constants=CONSTANTS,
)  # fmt: skip
