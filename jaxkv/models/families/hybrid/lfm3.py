"""LFM3: LFM2 with windows in half of the attention layers, norms behind all parts, and a gate for each head.

Layers with a window have a rotary embedding of their own; in the others a share of the pairs rotates. Norms and gates
are behind a switch each.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxkv._core.config.layer_config import LayerConfig
from jaxkv.models.config import DecoderConfig
from jaxkv.models.config_fields import FULL, SLIDING, Fields
from jaxkv.models.families.family import Family, read_num_layers
from jaxkv.models.families.hybrid import lfm2
from jaxkv.models.families.hybrid.lfm2 import CONV
from jaxkv.models.families.hybrid_common import mix, read_kinds
from jaxkv.models.rope_fields import SCALINGS, parse_ropes, render_rope

OTHERS = ("attention.out", "attention.position_fn.query_norm", "attention.position_fn.key_norm")  # as in Llama
TENSORS: dict[str, Any] = {name: stored for name, stored in lfm2.TENSORS.items() if name not in OTHERS} | {
    "attention.head_gate": "self_attn.gate_proj.weight", "attention_post_norm": "post_operator_norm.weight",
    "mlp_post_norm": "post_ffn_norm.weight",
}  # fmt: skip
ROPES = {SLIDING: {"rope_type": "default", "rope_theta": 1e4},
         FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5}}  # fmt: skip


def parse(fields: Fields) -> DecoderConfig:
    num_layers = read_num_layers(fields)
    common = lfm2.read_lfm(fields, mlp_dim=7680, num_kv_heads=4, head_dim=128)
    default = [FULL if i % 4 == 2 else SLIDING if i and i % 4 == 0 else CONV for i in range(num_layers)]
    kinds = read_kinds(fields, default, (CONV, SLIDING, FULL))
    window = fields.size("sliding_window", 256, None)
    if SLIDING in kinds and window is None:
        raise fields.refuse("layer_types", kinds, f"{SLIDING} only with a sliding_window, and that is off")
    has_norms, has_bias = fields.flag("use_sandwich_norm", True), fields.flag("attention_bias", False)
    conv = lfm2.read_conv(fields, common["embed_dim"], width=7)
    blocks = mix([CONV if kind == CONV else FULL for kind in kinds], conv)
    blocks = tuple(dataclasses.replace(block, post_norms=has_norms) for block in blocks)
    layer = LayerConfig(num_kv_heads=common.pop("num_kv_heads"), head_dim=common.pop("head_dim"))
    own = [dataclasses.replace(layer, window=window if kind == SLIDING else None) for kind in kinds]
    ropes = parse_ropes(fields, common["max_seq_len"], theta=1e6, local_theta=1e4, default=ROPES, partial=1.0,
                        scalings=(*SCALINGS, "proportional"))  # fmt: skip
    return DecoderConfig(
        **common, blocks=blocks, layers=[x for block, y in zip(blocks, own, strict=True) for x in block.layers(y)],
        ropes=tuple(ropes[SLIDING if kind == SLIDING else FULL] for kind in kinds), qkv_bias=has_bias,
        out_bias=has_bias, attention_gate=fields.flag("use_attention_gate", True), attention_gate_by="head",
    )  # fmt: skip


def _kinds_of(config: DecoderConfig) -> list[str]:
    windows = iter(config.windows)
    return [CONV if block.mixer is not None else FULL if next(windows) is None else SLIDING for block in config.blocks]


def render(config: DecoderConfig) -> dict[str, Any]:
    kinds = _kinds_of(config)
    ropes = {SLIDING if kind == SLIDING else FULL: render_rope(rope)
             for kind, rope in zip(kinds, config.ropes, strict=True)}  # fmt: skip
    return lfm2.render_lfm(config) | {
        "layer_types": kinds, "rope_parameters": ropes, "attention_bias": config.out_bias,
        "sliding_window": next((window for window in config.windows if window is not None), None),
        "use_sandwich_norm": bool(config.blocks[0].post_norms), "use_attention_gate": config.attention_gate,
        "pad_token_id": None,
    }  # fmt: skip


def name_tensor(name: str, config: Mapping[str, Any]) -> str:
    """Returns a tensor's name as published."""
    return name.replace(".self_attn.g_proj.", ".self_attn.gate_proj.")


FAMILY = Family(
    parse=parse, render=render, architectures=("Lfm3ForCausalLM",), tensors=TENSORS, name_tensor=name_tensor
)
