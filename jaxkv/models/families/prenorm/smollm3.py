"""SmolLM 3: Llama with layers without a rotation (NoPE), every fourth by default, and sliding windows behind a switch.

`no_rope_layers` has a 1 for each layer that rotates. Refuses lists of another length, and other layer types.
"""

import dataclasses
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


def parse(fields: Fields) -> DecoderConfig:
    num_layers, common = read_num_layers(fields), read_common(fields, num_kv_heads=(4,), tied=True)
    rope = parse_ropes(fields, common["max_seq_len"], theta=2_000_000.0)[FULL]
    rotates = read_rotating_layers(fields, num_layers)
    window, is_on = fields.size("sliding_window", None), fields.flag("use_sliding_window", False)
    fields.take("max_window_layers", None)  # read by no version of the model
    window = window if is_on else None
    types = [FULL if window is None or rotating else SLIDING for rotating in rotates]
    has_bias = fields.flag("attention_bias", False)
    still = dataclasses.replace(rope, partial_rotary_factor=0.0)
    return DecoderConfig(
        **common, windows=read_windows(fields, types, window), ropes=tuple(rope if x else still for x in rotates),
        qkv_bias=has_bias, out_bias=has_bias, mlp_bias=fields.flag("mlp_bias", False),
    )  # fmt: skip


def read_rotating_layers(fields: Fields, num_layers: int) -> list[bool]:
    """Reads `no_rope_layers`, or the interval that stands for it: whether each layer rotates."""
    interval, listed = fields.size("no_rope_layer_interval", 4), fields.take("no_rope_layers", None)
    if listed is None:
        return [(i + 1) % interval != 0 for i in range(num_layers)]
    if not isinstance(listed, list) or len(listed) != num_layers or not all(x in (0, 1) for x in listed):
        raise fields.refuse("no_rope_layers", listed, f"a 1 or a 0 for each of the {num_layers} layers")
    return [bool(x) for x in listed]


def render(config: DecoderConfig) -> dict[str, Any]:
    rotates = [rope.partial_rotary_factor != 0 for rope in config.ropes]
    rope = dataclasses.replace(config.ropes[0], partial_rotary_factor=1.0)
    windows = render_windows(config)
    return render_common(config) | windows | {
        "rope_parameters": render_rope(rope), "no_rope_layers": [int(x) for x in rotates],
        "use_sliding_window": windows["sliding_window"] is not None, "attention_bias": config.out_bias,
        "mlp_bias": config.mlp_bias,
    }  # fmt: skip


FAMILY = Family(parse=parse, render=render, architectures=("SmolLM3ForCausalLM",))
