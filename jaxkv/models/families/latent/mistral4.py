"""Mistral Small 4: DeepSeek V3's latent attention and experts, chosen by a softmax, and Ministral 3's temperature.

Queries grow with their position as a whole, their rotated entries and the others. Published inside a model for images
and text (`mistral3`), as are Mistral Small 3.1 and Ministral 3: of all of them the text model is read. Refuses experts
in groups of which a token goes to some.
"""

from collections.abc import Mapping
from typing import Any

from jaxkv.models.config import DecoderConfig, ExpertsConfig, LatentConfig
from jaxkv.models.config_fields import MOST_DIM, MOST_HEADS, Fields
from jaxkv.models.families.experts_common import place_experts
from jaxkv.models.families.family import Family, half, read_common, read_num_layers, render_common, transpose
from jaxkv.models.families.latent.deepseek import read_latent, render_latent
from jaxkv.models.families.nested import make_nested
from jaxkv.models.families.prenorm import ministral3, mistral
from jaxkv.models.rope_fields import render_rope

ROPE = ministral3.ROPE | {"rope_theta": 1e4, "factor": 128.0, "original_max_position_embeddings": 8192}
TENSORS = {
    "experts.gate": half("mlp.experts.gate_up_proj", 0, transposed=True),
    "experts.up": half("mlp.experts.gate_up_proj", 1, transposed=True),
    "experts.down": transpose("mlp.experts.down_proj"),
}


def parse(fields: Fields) -> DecoderConfig:
    num_layers, common = read_num_layers(fields), read_common(fields, num_kv_heads=(None,))
    has_bias, latent = fields.flag("attention_bias", False), read_latent(fields, query_rank=1024, rank=256, nope_dim=64)
    _take_share(fields, latent)
    interleaved = fields.flag("rope_interleave", True)
    rope = ministral3.read_heated_rope(fields, common["max_seq_len"], ROPE, interleaved=interleaved)
    dense = fields.size("first_k_dense_replace", 0, least=0)
    experts, layers = _read_experts(fields), tuple(i >= dense for i in range(num_layers))
    return DecoderConfig(**common | dict(
        latent=latent, windows=(None,) * num_layers, ropes=(rope,) * num_layers, qkv_bias=has_bias, out_bias=has_bias,
        attention_scale=(latent.nope_dim + latent.rope_dim) ** -0.5 * rope.sharpening(rope.mscale_all_dim) ** 2,
        **place_experts(experts, layers),
    ))  # fmt: skip


def _take_share(fields: Fields, latent: LatentConfig) -> None:
    """Takes the share of a head's entries that rotate, which follows from its sizes."""
    name = "rope_parameters" if fields.left.get("rope_parameters") is not None else "rope_scaling"
    written, share = fields.left.get(name), latent.rope_dim / (latent.nope_dim + latent.rope_dim)
    if isinstance(written, Mapping) and written.get("partial_rotary_factor") == share:
        fields.left[name] = {key: value for key, value in written.items() if key != "partial_rotary_factor"}


def _read_experts(fields: Fields) -> ExpertsConfig:
    count = fields.size("num_local_experts", 128, most=MOST_HEADS)  # the newer name
    count = fields.size("n_routed_experts", count, most=MOST_HEADS)
    mlp_dim = fields.size("moe_intermediate_size", 2048, most=MOST_DIM)
    groups, within = (fields.size(name, 1, None, most=count) or 1 for name in ("n_group", "topk_group"))
    if groups != within:
        raise fields.refuse("topk_group", within, f"it only as n_group, {groups}: a token goes to all groups")
    return ExpertsConfig(
        count=count, per_token=fields.size("num_experts_per_tok", 4, most=count), mlp_dim=mlp_dim,
        normalise=fields.flag("norm_topk_prob", True), scale=fields.number("routed_scaling_factor", 1.0, above=0),
        shared_dim=fields.size("n_shared_experts", 1, least=0) * mlp_dim,
    )  # fmt: skip


def render(config: DecoderConfig) -> dict[str, Any]:
    experts, rope = config.experts, config.ropes[0]
    assert config.latent is not None
    fields = render_common(config) | render_latent(config.latent) | {
        "rope_parameters": render_rope(rope) | {ministral3.BETA: rope.temperature_beta},
        "rope_interleave": rope.interleaved, "attention_bias": config.out_bias,
        "first_k_dense_replace": config.expert_layers.count(False) if experts else config.num_layers,
    }  # fmt: skip
    return fields if experts is None else fields | {
        "n_routed_experts": experts.count, "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.mlp_dim, "n_shared_experts": experts.shared_dim // experts.mlp_dim,
        "norm_topk_prob": experts.normalise, "routed_scaling_factor": experts.scale,
    }  # fmt: skip


FAMILY = Family(parse=parse, render=render, architectures=("Mistral4ForCausalLM",), tensors=TENSORS)
NESTED_FAMILY = make_nested(
    {"mistral": mistral.FAMILY, "ministral3": ministral3.FAMILY, "mistral4": FAMILY}, "Mistral3ForConditionalGeneration"
)
