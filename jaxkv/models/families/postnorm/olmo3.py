"""OLMo 3: OLMo 2 with a sliding window in three of four layers.

Scalings of the rotary embedding hold for full-attention layers alone; `rope_theta` holds for all.
"""

from typing import Any

from jaxkv.models.config import DecoderConfig
from jaxkv.models.config_fields import FULL, SLIDING, Fields
from jaxkv.models.families.family import (
    Family,
    read_num_layers,
    read_windows,
    render_common,
    render_ropes,
    render_windows,
    spread_ropes,
)
from jaxkv.models.families.postnorm.olmo2 import TENSORS, read_olmo
from jaxkv.models.rope_fields import parse_ropes


def parse(fields: Fields) -> DecoderConfig:
    num_layers, common = read_num_layers(fields), read_olmo(fields)
    types = [SLIDING if (i + 1) % 4 else FULL for i in range(num_layers)]
    windows = read_windows(fields, types, fields.size("sliding_window", 4096, None))
    theta = fields.number("rope_theta", 500_000.0, least=1)
    ropes = parse_ropes(fields, common["max_seq_len"], theta=theta, local_theta=theta)
    return DecoderConfig(**common, windows=windows, ropes=spread_ropes(ropes, windows))


def render(config: DecoderConfig) -> dict[str, Any]:
    own = {"attention_bias": config.out_bias}
    return render_common(config) | render_windows(config) | render_ropes(config) | own


FAMILY = Family(parse=parse, render=render, architectures=("Olmo3ForCausalLM",), tensors=TENSORS)
