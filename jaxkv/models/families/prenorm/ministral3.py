"""Ministral 3: Mistral with YaRN, and queries that grow with their position, so that long texts stay sharp.

`llama_4_scaling_beta` says how much; it counts whole lengths of `original_max_position_embeddings`. The window is off
by default. Refuses `layer_types` with more than one kind.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxkv.models.config import DecoderConfig
from jaxkv.models.config_fields import FULL, Fields
from jaxkv.models.families.family import Family, read_common, read_num_layers, render_common
from jaxkv.models.rope import Rope
from jaxkv.models.rope_fields import parse_ropes, render_rope

ROPE = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16_384,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}  # fmt: skip
BETA = "llama_4_scaling_beta"


def parse(fields: Fields) -> DecoderConfig:
    num_layers, common = read_num_layers(fields), read_common(fields, num_kv_heads=(8,), head_dim=128, norm_eps=1e-5)
    window = fields.size("sliding_window", None)
    rope = read_heated_rope(fields, common["max_seq_len"], ROPE)
    return DecoderConfig(**common, windows=(window,) * num_layers, ropes=(rope,) * num_layers)


def read_heated_rope(fields: Fields, max_seq_len: int, default: dict[str, Any], **options: Any) -> Rope:
    """Reads a rotary embedding, and how queries grow with their position."""
    beta = _take_beta(fields, max_seq_len)
    rope = parse_ropes(fields, max_seq_len, theta=default["rope_theta"], default=default, **options)[FULL]
    if beta and rope.scaling != "yarn":
        raise fields.refuse(BETA, beta, "it only with the rope_type yarn")
    return dataclasses.replace(rope, temperature_beta=beta)


def _take_beta(fields: Fields, max_seq_len: int) -> float:
    """Takes what is no rotation from the fields of the rotary embedding."""
    name = "rope_parameters" if fields.left.get("rope_parameters") is not None else "rope_scaling"
    written = fields.left.get(name)
    if written is None:
        return 0.1
    if not isinstance(written, Mapping):
        return 0.0  # refused where it is read
    inner = fields.nest(written, name)
    beta = inner.number(BETA, 0.0, least=0)
    inner.size("max_position_embeddings", max_seq_len)
    fields.left[name] = inner.left
    return beta


def render(config: DecoderConfig) -> dict[str, Any]:
    rope = render_rope(config.ropes[0]) | {BETA: config.ropes[0].temperature_beta}
    return render_common(config) | {"rope_parameters": rope, "sliding_window": config.windows[0]}


FAMILY = Family(parse=parse, render=render, architectures=("Ministral3ForCausalLM",))
