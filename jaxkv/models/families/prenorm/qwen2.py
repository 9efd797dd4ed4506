"""Qwen 2 and 2.5: Llama with biases on queries, keys and values, and sliding windows behind a switch.

With `use_sliding_window` and without `layer_types`, the layers from `max_window_layers` on have the window.
"""

from typing import Any

from jaxkv.models.config import DecoderConfig
from jaxkv.models.config_fields import FULL, SLIDING, Fields
from jaxkv.models.families.family import (
    Family,
    read_uniform,
    read_windows,
    render_uniform,
    render_windows,
)


def parse(fields: Fields) -> DecoderConfig:
    common = read_uniform(fields)
    return DecoderConfig(**common | dict(windows=read_switched_windows(fields, len(common["windows"])), qkv_bias=True))


def read_switched_windows(fields: Fields, num_layers: int, every_layer: bool = False) -> tuple[int | None, ...]:
    """Reads windows behind the switch `use_sliding_window`; with `every_layer` from the first layer on."""
    window, first = fields.size("sliding_window", 4096, None), fields.size("max_window_layers", 28, least=0)
    window, first = window if fields.flag("use_sliding_window", False) else None, 0 if every_layer else first
    types = [SLIDING if window is not None and i >= first else FULL for i in range(num_layers)]
    return read_windows(fields, types, window)


def render_switched_windows(config: DecoderConfig) -> dict[str, Any]:
    fields = render_windows(config)
    return fields | {"use_sliding_window": fields["sliding_window"] is not None}


def render(config: DecoderConfig) -> dict[str, Any]:
    return render_uniform(config) | render_switched_windows(config)


FAMILY = Family(parse=parse, render=render, architectures=("Qwen2ForCausalLM",))
