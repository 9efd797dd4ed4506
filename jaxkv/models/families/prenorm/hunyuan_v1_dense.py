"""Hunyuan, dense: Llama with norms on each head's queries and keys after their rotation.

The scaling "dynamic" with an `alpha` lengthens all waves once, whatever the text's length; "dynamic" without it is
refused. Refuses attention across layers (`use_cla`), and rotations by more than one position (`xdrope`).
"""

from collections.abc import Mapping
from typing import Any

from jaxkv.models.config import DecoderConfig
from jaxkv.models.config_fields import FULL, MOST_DIM, Fields
from jaxkv.models.families.family import Family, read_common, read_num_layers, render_common
from jaxkv.models.rope_fields import parse_ropes, render_rope

TENSORS = {
    "attention.position_fn.query_norm": "self_attn.query_layernorm.weight",
    "attention.position_fn.key_norm": "self_attn.key_layernorm.weight",
}
MUST_BE: tuple[tuple[str, Any], ...] = (
    ("use_qk_norm", True), ("use_rotary_pos_emb", True), ("norm_type", "rms"), ("use_cla", False),
    ("position_embedding_xdrope", False), ("mlp_bias", False),
)  # fmt: skip
# Settings of classifiers, of training, and of features that are refused where they are on.
UNUSED = (
    "cla_share_factor", "class_num", "dense_list", "enable_lm_head_fp32", "mask_init_id", "num_media_embeds",
    "org_vocab_size", "pool_type", "im_start_id", "im_end_id", "im_newline_id", "text_start_id",
    "text_end_id", "image_token_id", "video_start_id", "video_end_id", "pad_id", "eod_token_id",
)  # fmt: skip


def parse(fields: Fields) -> DecoderConfig:
    return DecoderConfig(**read_hunyuan(fields))


def read_hunyuan(fields: Fields) -> dict[str, Any]:
    """Reads the fields common to Hunyuan with and without experts, as arguments of `DecoderConfig`."""
    num_layers = read_num_layers(fields)
    common = read_common(fields, num_kv_heads=(None,), norm_eps=1e-5)
    for name, allowed in MUST_BE:
        fields.must_be(name, allowed)
    for name in UNUSED:
        fields.take(name, None)
    if (written := fields.size("attention_head_dim", common["head_dim"], most=MOST_DIM)) != common["head_dim"]:
        raise fields.refuse("attention_head_dim", written, f"{common['head_dim']}, the head_dim")
    theta = _read_stretched_theta(fields, common["head_dim"])
    rope = parse_ropes(fields, common["max_seq_len"], theta=theta)[FULL]
    has_bias = fields.flag("attention_bias", False)
    return common | dict(
        windows=(None,) * num_layers, ropes=(rope,) * num_layers, qk_norm=True, qk_norm_over="rotated_head",
        qkv_bias=has_bias, out_bias=has_bias,
    )  # fmt: skip


def _read_stretched_theta(fields: Fields, head_dim: int) -> float:
    """Reads "dynamic" with `alpha` as the base of wavelengths that it amounts to; another scaling is left."""
    name = "rope_parameters" if fields.left.get("rope_parameters") is not None else "rope_scaling"
    written = fields.left.get(name)
    theta = fields.number("rope_theta", 10_000.0, least=1)
    if not isinstance(written, Mapping) or written.get("rope_type", written.get("type")) != "dynamic":
        return theta
    if not written.get("alpha"):
        raise fields.refuse(name, written, "the rope_type dynamic only with an alpha")
    fields.take(name)
    inner = fields.nest(written, name)
    alpha, theta = inner.number("alpha", above=0), inner.number("rope_theta", theta, least=1)
    if head_dim < 4:
        raise fields.refuse("head_dim", head_dim, "4 or more with the rope_type dynamic")
    return theta * alpha ** (head_dim / (head_dim - 2))


def render(config: DecoderConfig) -> dict[str, Any]:
    own = {"rope_parameters": render_rope(config.ropes[0]), "attention_bias": config.out_bias}
    return render_common(config) | own


FAMILY = Family(parse=parse, render=render, architectures=("HunYuanDenseV1ForCausalLM",), tensors=TENSORS)
