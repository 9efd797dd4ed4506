"""Llama 4: chunks in three of four layers, the fourth sees all and does not rotate; experts in some layers or in all.

Queries of layers without a rotation grow with their position; those of others, and their keys, are normalised after it,
without weights. An expert's input, not its output, is multiplied by the sigmoid of its logit, and one more MLP reads
every token. Of models for images and text, the text model is read. Refuses other layer types than `chunked_attention`
and `full_attention`, and temperatures of half positions (`floor_scale`).
"""

import dataclasses
from typing import Any

from jaxkv._core.config.layer_config import LayerConfig
from jaxkv.models.config import DecoderConfig, ExpertsConfig
from jaxkv.models.config_fields import CHUNKED, FULL, MOST_HEADS, Fields
from jaxkv.models.families.family import AsStored, Family, half, read_common, read_num_layers, render_common
from jaxkv.models.families.nested import make_nested
from jaxkv.models.families.prenorm.smollm3 import read_rotating_layers
from jaxkv.models.rope import Rope
from jaxkv.models.rope_fields import parse_ropes, render_rope

MLP, SHARED = "feed_forward.{}_proj.weight", "feed_forward.shared_expert.{}_proj.weight"
TENSORS: dict[str, Any] = {
    "experts.router": "feed_forward.router.weight",
    "experts.gate": half("feed_forward.experts.gate_up_proj", 0),
    "experts.up": half("feed_forward.experts.gate_up_proj", 1),
    "experts.down": AsStored("feed_forward.experts.down_proj"),
}
for _name in ("gate", "up", "down"):
    TENSORS |= {f"mlp.{_name}": MLP.format(_name), f"experts.shared.{_name}": SHARED.format(_name)}
# What transformers takes for fields that a text_config leaves out.
DEFAULTS = {
    "vocab_size": 202_048, "hidden_size": 5120, "intermediate_size": 8192, "num_hidden_layers": 48,
    "num_attention_heads": 40, "max_position_embeddings": 131_072, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def parse(fields: Fields) -> DecoderConfig:
    num_layers = read_num_layers(fields)
    common = read_common(fields, num_kv_heads=(8,), head_dim=128, norm_eps=1e-5)
    if fields.left.get("no_rope_layers") == []:  # as in the first published files
        fields.take("no_rope_layers")
    rotates = read_rotating_layers(fields, num_layers)
    layer = LayerConfig(num_kv_heads=common["num_kv_heads"], head_dim=common["head_dim"])
    chunks = _read_chunks(fields, rotates)
    experts, expert_layers = _read_experts(fields, common["mlp_dim"]), _read_expert_layers(fields, num_layers)
    has_bias, common["mlp_dim"] = fields.flag("attention_bias", False), fields.size("intermediate_size_mlp", 16384)
    rope, still = _read_ropes(fields, common)
    fields.take("for_llm_compressor", None)  # of a tool that quantizes
    return DecoderConfig(
        **common, layers=tuple(dataclasses.replace(layer, chunk=chunk) for chunk in chunks),
        ropes=tuple(rope if x else still for x in rotates), qkv_bias=has_bias, out_bias=has_bias,
        experts=experts if any(expert_layers) else None, expert_layers=expert_layers if any(expert_layers) else (),
    )  # fmt: skip


def _read_chunks(fields: Fields, rotates: list[bool]) -> list[int | None]:
    """Reads the chunk of each layer; None: full attention."""
    chunk, types = fields.size("attention_chunk_size", 8192, None), fields.take("layer_types", None)
    types = [CHUNKED if x and chunk is not None else FULL for x in rotates] if types is None else types
    if not isinstance(types, list) or len(types) != len(rotates) or not all(x in (FULL, CHUNKED) for x in types):
        raise fields.refuse("layer_types", types, f"{FULL} or {CHUNKED} for each of the {len(rotates)} layers")
    if CHUNKED in types and chunk is None:
        raise fields.refuse("layer_types", types, f"{CHUNKED} only with an attention_chunk_size")
    return [chunk if kind == CHUNKED else None for kind in types]


def _read_experts(fields: Fields, mlp_dim: int) -> ExpertsConfig:
    count = fields.size("num_local_experts", 16, most=MOST_HEADS)
    return ExpertsConfig(
        count=count, per_token=fields.size("num_experts_per_tok", 1, most=count), mlp_dim=mlp_dim, scores="sigmoid",
        weigh_inputs=True, shared_dim=mlp_dim,
    )  # fmt: skip


def _read_expert_layers(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    every, listed = fields.size("interleave_moe_layer_step", 1), fields.take("moe_layers", None)
    listed = list(range(every - 1, num_layers, every)) if listed is None else listed
    if not isinstance(listed, list) or not all(type(i) is int and 0 <= i < num_layers for i in listed):
        raise fields.refuse("moe_layers", listed, f"a list of layers, each below {num_layers}")
    return tuple(i in listed for i in range(num_layers))


def _read_ropes(fields: Fields, common: dict[str, Any]) -> tuple[Rope, Rope]:
    """Returns the rotation of layers that rotate, and what the others do to their queries."""
    is_normed = fields.flag("use_qk_norm", True)
    is_heated = fields.take("attn_temperature_tuning", True)
    if not isinstance(is_heated, bool) and is_heated != 4:  # 4 in the first published files
        raise fields.refuse("attn_temperature_tuning", is_heated, "true and false")
    beta, length = fields.number("attn_scale", 0.1, least=0), fields.number("floor_scale", 8192, least=1)
    if length != int(length):
        raise fields.refuse("floor_scale", length, "a whole number of positions")
    rope = parse_ropes(fields, common["max_seq_len"], theta=500_000.0, interleaved=True)[FULL]
    still = Rope(theta=rope.theta, partial_rotary_factor=0.0)
    if is_heated and beta:
        still = dataclasses.replace(still, temperature_beta=beta, temperature_length=int(length), temperature_shift=1)
    return dataclasses.replace(rope, norm_eps=common["norm_eps"] if is_normed else None), still


def render(config: DecoderConfig) -> dict[str, Any]:
    chunks, rotates = [layer.chunk for layer in config.layers], [x.partial_rotary_factor != 0 for x in config.ropes]
    rope = next((x for x in config.ropes if x.partial_rotary_factor), Rope(theta=config.ropes[0].theta))
    still = next((x for x in config.ropes if not x.partial_rotary_factor), Rope())
    experts = config.experts
    fields = render_common(config) | {
        "rope_parameters": render_rope(rope), "no_rope_layers": [int(x) for x in rotates],
        "layer_types": [FULL if chunk is None else CHUNKED for chunk in chunks],
        "attention_chunk_size": next((chunk for chunk in chunks if chunk), None),
        "use_qk_norm": rope.norm_eps is not None, "attention_bias": config.out_bias,
        "attn_temperature_tuning": still.temperature_beta > 0, "intermediate_size_mlp": config.mlp_dim,
        "attn_scale": still.temperature_beta, "floor_scale": still.temperature_length or 8192,
        "moe_layers": [i for i, has in enumerate(config.expert_layers) if has],
    }  # fmt: skip
    return fields if experts is None else fields | {
        "num_local_experts": experts.count, "num_experts_per_tok": experts.per_token,
        "intermediate_size": experts.mlp_dim,
    }  # fmt: skip


FAMILY = Family(parse=parse, render=render, architectures=("Llama4ForCausalLM",), tensors=TENSORS)
NESTED_FAMILY = make_nested({"llama4_text": FAMILY}, "Llama4ForConditionalGeneration", defaults=DEFAULTS)
