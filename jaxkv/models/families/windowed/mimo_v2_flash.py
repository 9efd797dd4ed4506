"""MiMo V2 Flash: windows with sinks in five of six layers, values narrower than keys, and DeepSeek V3's experts.

Layers with a window have twice the KV heads, and a rotary embedding of their own. A third of each head's entries
rotates. Values are multiplied by a number; it multiplies attention's output here, which is the same. Multi-token
prediction is skipped. Refuses shared experts, sinks in other layers or in none, and layers of other heads or widths.
"""

from collections.abc import Mapping
from typing import Any

from jaxkv._core.config.layer_config import LayerConfig
from jaxkv.models.config import DecoderConfig
from jaxkv.models.config_fields import FULL, MOST_DIM, MOST_HEADS, SLIDING, Fields
from jaxkv.models.families.experts_common import (
    DENSE,
    SPARSE,
    place_experts,
    read_sigmoid_experts,
    read_sparse_layers,
    render_sigmoid_experts,
    render_sparse_layers,
)
from jaxkv.models.families.family import (
    Family,
    read_common,
    read_num_layers,
    read_windows,
    render_common,
    render_ropes,
    render_windows,
    spread_ropes,
)
from jaxkv.models.mixers.block_config import BlockConfig
from jaxkv.models.rope_fields import parse_ropes

SINKS = "self_attn.attention_sink_bias"
TENSORS = {"attention.sinks": SINKS}
# Older names of fields.
RENAMED = {"swa_rope_theta": "rope_local_base_freq", "layernorm_epsilon": "rms_norm_eps"}
MUST_BE: tuple[tuple[str, Any], ...] = (
    ("n_shared_experts", None), ("add_swa_attention_sink_bias", True), ("add_full_attention_sink_bias", False),
)  # fmt: skip


def parse(fields: Fields) -> DecoderConfig:
    for old, name in RENAMED.items():
        if (value := fields.take(old, None)) is not None:
            fields.left.setdefault(name, value)
    num_layers = read_num_layers(fields)
    common = read_common(fields, num_kv_heads=(4,), head_dim=192, norm_eps=1e-5)
    for name, allowed in MUST_BE:
        fields.must_be(name, allowed)
    kv_heads, head_dim = common.pop("num_kv_heads"), common.pop("head_dim")
    v_head_dim = fields.size("v_head_dim", 128, most=MOST_DIM)
    many = fields.size("swa_num_key_value_heads", 2 * kv_heads, most=MOST_HEADS)
    same = (
        ("swa_num_attention_heads", common["num_heads"]),
        ("swa_head_dim", head_dim),
        ("swa_v_head_dim", v_head_dim),
    )
    for name, size in same:
        fields.must_be(name, size)
    windows, widths = _read_windows(fields, num_layers), {"head_dim": head_dim, "v_head_dim": v_head_dim}
    ropes = parse_ropes(fields, common["max_seq_len"], theta=5e6, local_theta=1e4, partial=0.334)
    if fields.left.get("routed_scaling_factor", 1.0) is None:  # as published
        fields.take("routed_scaling_factor")
    _name_kinds(fields, "moe_layer_freq", "mlp_layer_types", (DENSE, SPARSE))
    layers = read_sparse_layers(fields, num_layers, dense=1)
    experts = read_sigmoid_experts(fields, count=256, mlp_dim=2048, shared=None)
    scale = fields.number("attention_value_scale", 0.707, None, above=0)
    return DecoderConfig(
        **common, layers=tuple(
            LayerConfig(num_kv_heads=kv_heads if x is None else many, window=x, **widths) for x in windows
        ),
        blocks=tuple(BlockConfig(sinks=window is not None) for window in windows),
        ropes=spread_ropes(ropes, windows),
        qkv_bias=fields.flag("attention_bias", False), attention_scales=(1.0, 1.0, 1.0 if scale is None else scale),
        **place_experts(experts, layers),
    )  # fmt: skip


def _read_windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """Reads the windows. A published config says how many tokens one has before the token itself."""
    before, written = fields.size("sliding_window_size", None), fields.size("sliding_window", 129)
    window = written if before is None else before + 1
    if (chunk := fields.take("attention_chunk_size", None)) not in (None, window, before):
        raise fields.refuse("attention_chunk_size", chunk, "the size of windows")
    _name_kinds(fields, "hybrid_layer_pattern", "layer_types", (FULL, SLIDING))
    kinds = [FULL if i == 0 or (i + 1) % 6 == 0 else SLIDING for i in range(num_layers)]
    return read_windows(fields, kinds, window)


def _name_kinds(fields: Fields, old: str, new: str, names: tuple[str, str]) -> None:
    """Writes a published list of 0 and 1 as transformers' list of names."""
    listed = fields.take(old, None)
    if listed is None or fields.left.get(new) is not None:
        return
    if not isinstance(listed, list) or not all(type(x) is int and x in (0, 1) for x in listed):
        raise fields.refuse(old, listed, "a list of 0 and 1")
    fields.left[new] = [names[x] for x in listed]


def render(config: DecoderConfig) -> dict[str, Any]:
    layer = config.layers[0]
    v_head_dim, kv_heads = layer.v_head_dim or layer.head_dim, {x.window is None: x.num_kv_heads for x in config.layers}
    fields = render_common(config) | render_windows(config) | render_ropes(config) | render_sparse_layers(config)
    fields |= {} if fields["sliding_window"] else {"sliding_window": config.max_seq_len}  # no layer has it
    return fields | render_sigmoid_experts(config.experts, shared_name=None) | {
        "num_key_value_heads": kv_heads.get(True, config.num_kv_heads), "v_head_dim": v_head_dim,
        "swa_num_key_value_heads": kv_heads.get(False, config.num_kv_heads), "attention_bias": config.qkv_bias,
        "attention_value_scale": config.attention_scales[2],
    }  # fmt: skip


def name_tensor(name: str, config: Mapping[str, Any]) -> str | None:
    """Returns a tensor's name as published; None for a tensor of multi-token prediction."""
    return None if name.startswith("model.mtp.") else name.replace("self_attn.sinks", SINKS)


FAMILY = Family(
    parse=parse, render=render, architectures=("MiMoV2FlashForCausalLM",), tensors=TENSORS, name_tensor=name_tensor
)
