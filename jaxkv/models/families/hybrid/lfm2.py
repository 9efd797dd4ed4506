"""LFM2: gated short convolutions in most layers, in the others Llama's attention with norms on queries and keys.

The width of the MLP is two thirds of what the config says, rounded up to a multiple, unless a switch is off. Refuses
MLPs without a gate, and no rotation (`use_pos_enc`).
"""

from typing import Any

from jaxkv.models.config import DecoderConfig
from jaxkv.models.config_fields import FULL, MOST_DIM, Fields
from jaxkv.models.families.family import Family, read_common, read_num_layers, render_common
from jaxkv.models.families.hybrid_common import kinds_of, mix, mixer_of, read_kinds, whole_conv
from jaxkv.models.mixers.block_config import ShortConvConfig
from jaxkv.models.rope import Rope
from jaxkv.models.rope_fields import parse_ropes, render_rope

CONV = "conv"
TENSORS: dict[str, Any] = {
    "norm": "model.embedding_norm.weight",
    "attention_norm": "operator_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "attention.out": "self_attn.out_proj.weight",
    "attention.position_fn.query_norm": "self_attn.q_layernorm.weight",
    "attention.position_fn.key_norm": "self_attn.k_layernorm.weight",
    "mlp.gate": "feed_forward.w1.weight",
    "mlp.up": "feed_forward.w3.weight",
    "mlp.down": "feed_forward.w2.weight",
    "mixer.project": "conv.in_proj.weight",
    "mixer.project_bias": "conv.in_proj.bias",
    "mixer.conv": whole_conv("conv.conv.weight"),
    "mixer.conv_bias": "conv.conv.bias",
    "mixer.out": "conv.out_proj.weight",
    "mixer.out_bias": "conv.out_proj.bias",
}
# Of the initialisation, or sizes that the code beside the weights does not read.
UNUSED = (
    "block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "block_use_xavier_init", "conv_dim",
    "conv_dim_out", "conv_use_xavier_init", "num_heads",
)  # fmt: skip


def parse(fields: Fields) -> DecoderConfig:
    num_layers, common = read_num_layers(fields), read_lfm(fields)
    for name in ("block_use_swiglu", "use_pos_enc"):
        fields.must_be(name, True)
    for name in UNUSED:
        fields.take(name, None)
    listed = fields.take("full_attn_idxs", None)
    if listed is not None and (not isinstance(listed, list) or not all(type(i) is int for i in listed)):
        raise fields.refuse("full_attn_idxs", listed, "a list of layers")
    attending = range(num_layers) if listed is None else listed
    kinds = read_kinds(fields, [FULL if i in attending else CONV for i in range(num_layers)], (CONV, FULL))
    return DecoderConfig(**common | dict(
        blocks=mix(kinds, read_conv(fields, common["embed_dim"])), ropes=(read_rope(fields, common),) * num_layers,
        mlp_dim=_read_mlp_dim(fields, common),
    ))  # fmt: skip


def read_lfm(fields: Fields, *, mlp_dim: int = 12_288, num_kv_heads: int = 8, **defaults: Any) -> dict[str, Any]:
    """Reads the fields common to LFM2, with experts or without, and LFM3, as arguments of `DecoderConfig`."""
    tied, eps = fields.flag("tie_embedding", True), fields.number("norm_eps", 1e-5, least=0)
    common = read_common(fields, num_kv_heads=(num_kv_heads,), norm_eps=eps, tied=tied, mlp_dim=(mlp_dim,), **defaults)
    return common | {"qk_norm": True}


def read_conv(fields: Fields, channels: int, *, width: int = 3) -> ShortConvConfig:
    """Reads the short convolutions, whose default width is a family's."""
    return ShortConvConfig(
        channels=channels, width=fields.size("conv_L_cache", width, least=2, most=MOST_DIM),
        bias=fields.flag("conv_bias", False),
    )  # fmt: skip


def read_rope(fields: Fields, common: dict[str, Any]) -> Rope:
    return parse_ropes(fields, common["max_seq_len"], theta=1_000_000.0)[FULL]


def _read_mlp_dim(fields: Fields, common: dict[str, Any]) -> int:
    width = fields.size("block_ff_dim", common["mlp_dim"], most=MOST_DIM)
    factor = fields.number("block_ffn_dim_multiplier", 1.0, None, above=0)
    multiple = fields.size("block_multiple_of", 256, most=MOST_DIM)
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return width
    width = int(2 * width / 3)
    adjusted = width if factor is None else -(-int(factor * width) // multiple) * multiple
    if not 0 < adjusted <= MOST_DIM:
        raise fields.refuse("block_ffn_dim_multiplier", factor, f"an MLP of 1 to {MOST_DIM} entries, not {adjusted}")
    return adjusted


def render(config: DecoderConfig) -> dict[str, Any]:
    own = {"layer_types": kinds_of(config, CONV), "block_auto_adjust_ff_dim": False}
    return render_lfm(config) | own | {"rope_parameters": render_rope(config.ropes[0])}


def render_lfm(config: DecoderConfig) -> dict[str, Any]:
    """Writes what `read_lfm` and `read_conv` read."""
    conv, fields = mixer_of(config), render_common(config)
    own = {} if conv is None else {"conv_L_cache": conv.width, "conv_bias": conv.bias}
    return fields | own | {"norm_eps": fields.pop("rms_norm_eps")}


FAMILY = Family(parse=parse, render=render, architectures=("Lfm2ForCausalLM",), tensors=TENSORS)
