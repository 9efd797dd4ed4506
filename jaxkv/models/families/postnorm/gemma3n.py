"""Gemma 3n: several residual streams, of which layers compute one; embeddings of their own for each layer.

A low-rank map stands beside attention; the first layers' gates are sparse; MLPs may differ in width; the last layers
read the keys and values of an earlier one of their kind. Of models for images and sound, the text model is read.
Refuses a model without embeddings for each layer, other layer types, and layers that read those of none.
"""

from typing import Any

from jaxkv._core.config.layer_config import LayerConfig
from jaxkv._core.config.validation import integer, real
from jaxkv.models.config import DecoderConfig, StreamsConfig
from jaxkv.models.config_fields import FULL, MOST_DIM, SLIDING, Fields
from jaxkv.models.families import gemma_shared
from jaxkv.models.families.family import Family, read_num_layers, read_windows, spread_ropes
from jaxkv.models.families.nested import make_nested
from jaxkv.models.mixers.block_config import BlockConfig
from jaxkv.models.rope_fields import parse_ropes

TENSORS: dict[str, Any] = gemma_shared.TENSORS | {
    "streams.project": "model.altup_projections.{}.weight",
    "streams.merge": "model.altup_unembed_projections.{}.weight",
    "router": "altup.modality_router.weight",
    "router_norm": "altup.router_norm.weight",
    "predict": "altup.prediction_coefs.weight",
    "correct": "altup.correction_coefs.weight",
    "active_scale": "altup.correct_output_scale",
    "left": "laurel.linear_left.weight",
    "right": "laurel.linear_right.weight",
    "low_rank_norm": "laurel.post_laurel_norm.weight",
}
# What transformers takes for fields that a text_config leaves out.
DEFAULTS = {
    "vocab_size": 262_400, "hidden_size": 2048, "intermediate_size": 16_384, "num_hidden_layers": 35,
    "num_attention_heads": 8, "max_position_embeddings": 32_768, "bos_token_id": 2, "eos_token_id": 1,
}  # fmt: skip


def parse(fields: Fields) -> DecoderConfig:
    num_layers = read_num_layers(fields)
    widths = _read_widths(fields, num_layers)
    common = gemma_shared.read_common(fields, num_kv_heads=2, logit_soft_cap=30.0)
    shape = {"num_kv_heads": common.pop("num_kv_heads"), "head_dim": common.pop("head_dim")}
    types = [SLIDING if (i + 1) % 5 else FULL for i in range(num_layers)]
    windows = read_windows(fields, types, fields.size("sliding_window", 512))
    layers = gemma_shared.share_layers(fields, [LayerConfig(**shape, window=window) for window in windows], 15)
    ropes = parse_ropes(fields, common["max_seq_len"], theta=1e6, local_theta=1e4)
    if (per_layer := gemma_shared.read_per_layer(fields)) is None:
        raise fields.refuse("hidden_size_per_layer_input", 0, "a width above 0")
    sparsities = _read_sparsities(fields, num_layers)
    return DecoderConfig(
        **common, layers=layers, ropes=spread_ropes(ropes, windows),
        blocks=tuple(
            BlockConfig(mlp_dim=None if width == widths[0] else width, gate_sparsity=sparsity)
            for width, sparsity in zip(widths, sparsities, strict=True)
        ),
        per_layer=per_layer, streams=_read_streams(fields),
    )  # fmt: skip


def _read_widths(fields: Fields, num_layers: int) -> list[int]:
    """Reads each layer's `intermediate_size`, and leaves the first's."""
    widths = fields.take("intermediate_size")
    widths = widths if isinstance(widths, list) else [widths] * num_layers
    if len(widths) != num_layers:
        raise fields.refuse("intermediate_size", widths, f"one width, or one for each of the {num_layers} layers")
    widths = [integer(f"intermediate_size in {fields.where}", width, least=1, most=MOST_DIM) for width in widths]
    fields.left["intermediate_size"] = widths[0]
    return widths


def _read_sparsities(fields: Fields, num_layers: int) -> list[float]:
    name, written = "activation_sparsity_pattern", fields.take("activation_sparsity_pattern", None)
    if written is None:
        return [0.95 if i < 10 < num_layers else 0.0 for i in range(num_layers)]
    if not isinstance(written, list) or len(written) != num_layers:
        raise fields.refuse(name, written, f"a number for each of the {num_layers} layers")
    sparsities = [real(f"{name} in {fields.where}", value, least=0) for value in written]
    if max(sparsities) >= 1:
        raise fields.refuse(name, written, "numbers below 1")
    return sparsities


def _read_streams(fields: Fields) -> StreamsConfig:
    for name in ("altup_coef_clip", "altup_lr_multiplier", "query_pre_attn_scalar"):
        fields.take(name, None)  # of training; and published, but read by no version of the model
    count = fields.size("altup_num_inputs", 4, least=2, most=64)
    return StreamsConfig(
        count=count, active=fields.size("altup_active_idx", 0, least=0, most=count - 1),
        rank=fields.size("laurel_rank", 64, most=MOST_DIM), scales=fields.flag("altup_correct_scale", True),
    )  # fmt: skip


def render(config: DecoderConfig) -> dict[str, Any]:
    assert isinstance(config.streams, StreamsConfig)
    return gemma_shared.render_common(config) | {
        "intermediate_size": [block.mlp_dim or config.mlp_dim for block in config.blocks],
        "activation_sparsity_pattern": [block.gate_sparsity for block in config.blocks],
        "altup_num_inputs": config.streams.count, "altup_active_idx": config.streams.active,
        "altup_correct_scale": config.streams.scales, "laurel_rank": config.streams.rank,
    }  # fmt: skip


FAMILY = Family(
    parse=parse, render=render, architectures=("Gemma3nForCausalLM",), tensors=TENSORS,
    name_tensor=gemma_shared.name_tensor,
)  # fmt: skip
NESTED_FAMILY = make_nested(
    {"gemma3n_text": FAMILY}, "Gemma3nForConditionalGeneration", towers=("vision", "audio"), defaults=DEFAULTS
)
