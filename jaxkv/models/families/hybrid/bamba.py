"""Bamba: Mamba 2 in most layers, in the others attention whose heads rotate by half, and an MLP in all.

`attn_layer_indices` says which layers attend; there must be one.
"""

from typing import Any

from jaxkv.models.config import DecoderConfig
from jaxkv.models.config_fields import FULL, LINEAR, MOST_DIM, Fields
from jaxkv.models.families.family import Family, read_common, read_num_layers, render_common
from jaxkv.models.families.hybrid.falcon_h1 import TENSORS
from jaxkv.models.families.hybrid_common import mix, mixer_of, read_mamba, render_mamba
from jaxkv.models.rope_fields import parse_ropes, render_rope

INDICES = "attn_layer_indices"


def parse(fields: Fields) -> DecoderConfig:
    num_layers, common = read_num_layers(fields), read_common(fields, num_kv_heads=(8, None), norm_eps=1e-5)
    listed = fields.take(INDICES, None)
    if not isinstance(listed, list) or not listed or not all(type(i) is int and 0 <= i < num_layers for i in listed):
        raise fields.refuse(INDICES, listed, f"a list of layers below {num_layers}, at least one")
    kinds = [FULL if i in listed else LINEAR for i in range(num_layers)]
    for name in ("layer_types", "layers_block_type"):  # which say it again
        fields.must_be(name, kinds)
    fields.take("z_loss_coefficient", None)  # of training
    width = fields.size("mamba_expand", 2, most=MOST_DIM) * common["embed_dim"]
    mamba = read_mamba(fields, width, norm_eps=common["norm_eps"])
    rope = parse_ropes(fields, common["max_seq_len"], theta=10_000.0, partial=0.5)[FULL]
    has_bias = fields.flag("attention_bias", False)
    return DecoderConfig(
        **common, blocks=mix(kinds, mamba), ropes=(rope,) * num_layers, qkv_bias=has_bias, out_bias=has_bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )  # fmt: skip


def render(config: DecoderConfig) -> dict[str, Any]:
    mamba, rope = mixer_of(config), config.ropes[0]
    expand = {} if mamba is None else {"mamba_expand": mamba.channels // config.embed_dim}
    return render_common(config) | render_mamba(mamba) | expand | {
        INDICES: [i for i, block in enumerate(config.blocks) if block.attention],
        "rope_parameters": render_rope(rope) | {"partial_rotary_factor": rope.partial_rotary_factor},
        "attention_bias": config.out_bias, "mlp_bias": config.mlp_bias,
    }  # fmt: skip


FAMILY = Family(parse=parse, render=render, architectures=("BambaForCausalLM",), tensors=TENSORS)
