"""EXAONE 4: Llama with norms behind attention and MLP, not before, and on each head's queries and keys.

With a sliding window, layers without it do not rotate (NoPE). Refuses a `sliding_window_pattern` in letters without
`layer_types`.
"""

import dataclasses
from collections.abc import Iterable
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
from jaxkv.models.families.postnorm.olmo2 import TENSORS
from jaxkv.models.rope import Rope
from jaxkv.models.rope_fields import parse_ropes, render_rope


def parse(fields: Fields) -> DecoderConfig:
    return DecoderConfig(**read_exaone(fields), pre_norms=False, post_norms=True)


def read_exaone(fields: Fields) -> dict[str, Any]:
    """Reads the fields common to EXAONE 4 and K-EXAONE, as arguments of `DecoderConfig`."""
    num_layers, common = read_num_layers(fields), read_common(fields, num_kv_heads=(32,), norm_eps=1e-5)
    window = fields.size("sliding_window", 4096, None)
    windows = read_windows(fields, _read_pattern(fields, num_layers, window), window)
    rope = parse_ropes(fields, common["max_seq_len"], theta=10_000.0)[FULL]
    return common | dict(windows=windows, ropes=rotate_windowed(rope, windows, window), qk_norm=True)


def rotate_windowed(rope: Rope, windows: Iterable[int | None], window: int | None) -> tuple[Rope, ...]:
    """Returns each layer's rotary embedding: with a `window` in the config, layers without one do not rotate."""
    still = rope if window is None else dataclasses.replace(rope, partial_rotary_factor=0.0)
    return tuple(still if x is None else rope for x in windows)


def _read_pattern(fields: Fields, num_layers: int, window: int | None) -> list[str]:
    """Returns the kinds of layers that the pattern describes."""
    if window is None or fields.left.get("layer_types") is not None:
        fields.take("sliding_window_pattern", None)
        return [FULL] * num_layers
    if isinstance(written := fields.left.get("sliding_window_pattern"), str):
        raise fields.refuse("sliding_window_pattern", written, "a number above 0, or layer_types")
    pattern = fields.size("sliding_window_pattern", 4)
    return [SLIDING if (i + 1) % pattern else FULL for i in range(num_layers)]


def render(config: DecoderConfig) -> dict[str, Any]:
    """Writes what `read_exaone` reads."""
    rope = dataclasses.replace(config.ropes[0], partial_rotary_factor=1.0)
    windows = render_windows(config)
    if windows["sliding_window"] is None and config.ropes[0].partial_rotary_factor == 0:
        windows["sliding_window"] = config.max_seq_len  # no layer has it, and so none rotates
    return render_common(config) | windows | {"rope_parameters": render_rope(rope)}


FAMILY = Family(parse=parse, render=render, architectures=("Exaone4ForCausalLM",), tensors=TENSORS)
