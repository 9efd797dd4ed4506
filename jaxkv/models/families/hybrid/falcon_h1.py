"""Falcon H1: attention and Mamba 2 side by side in every layer, on the same norm's output, and factors of everything.

There are factors of embeddings and logits, of what attention and Mamba read and write, of keys, of Mamba's five
projections, and of the MLP's gate and output. Mamba's norm is behind a switch. Refuses layers without attention
(`attn_layer_indices`) or without an MLP.
"""

from typing import Any

from jaxkv._core.config.validation import real
from jaxkv.models.config import DecoderConfig
from jaxkv.models.config_fields import FULL, MOST_DIM, Fields
from jaxkv.models.families.family import Family, read_common, read_num_layers, render_common
from jaxkv.models.families.hybrid_common import mamba_names, mixer_of, read_mamba, render_mamba
from jaxkv.models.mixers.block_config import BlockConfig
from jaxkv.models.rope_fields import parse_ropes, render_rope

TENSORS: dict[str, Any] = mamba_names("mamba") | {
    "norm": "model.final_layernorm.weight",
    "mlp_norm": "pre_ff_layernorm.weight",
}
for _name in ("gate", "up", "down"):
    TENSORS |= {f"mlp.{_name}": f"feed_forward.{_name}_proj.weight"}
    TENSORS |= {f"mlp.{_name}_bias": f"feed_forward.{_name}_proj.bias"}
ATTENTION = ("attention_in_multiplier", "key_multiplier", "attention_out_multiplier")


def parse(fields: Fields) -> DecoderConfig:
    num_layers, common = read_num_layers(fields), read_common(fields, num_kv_heads=(8, None), norm_eps=1e-5)
    fields.must_be("attn_layer_indices", None)
    fields.must_be("mamba_use_mlp", True)
    for name in ("layer_types", "layers_block_type"):
        fields.must_be(name, ["hybrid"] * num_layers)
    fields.take("mlp_expansion_factor", None)  # intermediate_size says the width
    expanded = fields.size("mamba_expand", 2, most=MOST_DIM) * common["embed_dim"]
    width = fields.size("mamba_d_ssm", 1024, None, most=MOST_DIM) or expanded
    before = fields.flag("mamba_norm_before_gate", True)
    norm = ("before_gate" if before else "after_gate") if fields.flag("mamba_rms_norm", False) else None
    mamba = read_mamba(
        fields, width, norm=norm, norm_eps=common["norm_eps"], out_bias=fields.flag("projectors_bias", False),
        input_scale=_read_factor(fields, "ssm_in_multiplier"), output_scale=_read_factor(fields, "ssm_out_multiplier"),
        part_scales=_read_factors(fields, "ssm_multipliers", 5),
    )  # fmt: skip
    rope = parse_ropes(fields, common["max_seq_len"], theta=10_000.0)[FULL]
    has_bias = fields.flag("attention_bias", False)
    return DecoderConfig(
        **common, blocks=(BlockConfig(mixer=mamba, attention=True),) * num_layers, ropes=(rope,) * num_layers,
        qkv_bias=has_bias, out_bias=has_bias, mlp_bias=fields.flag("mlp_bias", False),
        embed_scale=_read_factor(fields, "embedding_multiplier"),
        logit_divisor=1 / _read_factor(fields, "lm_head_multiplier"),
        attention_scales=tuple(_read_factor(fields, name) for name in ATTENTION),
        mlp_scales=_read_factors(fields, "mlp_multipliers", 2),
    )  # fmt: skip


def _read_factor(fields: Fields, name: str) -> float:
    value = fields.number(name, 1.0, None, above=0)
    return 1.0 if value is None else float(value)


def _read_factors(fields: Fields, name: str, count: int) -> tuple[float, ...]:
    values = fields.take(name, None)
    values = [1.0] * count if values is None else values
    if not isinstance(values, list) or len(values) != count:
        raise fields.refuse(name, values, f"a list of {count} numbers")
    return tuple(float(real(f"{name} in {fields.where}", value, above=0)) for value in values)


def render(config: DecoderConfig) -> dict[str, Any]:
    mamba = mixer_of(config)
    return render_common(config) | render_mamba(mamba) | dict(zip(ATTENTION, config.attention_scales, strict=True)) | {
        "rope_parameters": render_rope(config.ropes[0]), "attention_bias": config.out_bias, "mlp_bias": config.mlp_bias,
        "mamba_d_ssm": mamba.channels, "mamba_rms_norm": mamba.norm is not None, "projectors_bias": mamba.out_bias,
        "mamba_norm_before_gate": mamba.norm == "before_gate", "ssm_in_multiplier": mamba.input_scale,
        "ssm_out_multiplier": mamba.output_scale, "ssm_multipliers": list(mamba.part_scales),
        "embedding_multiplier": config.embed_scale, "lm_head_multiplier": 1 / config.logit_divisor,
        "mlp_multipliers": list(config.mlp_scales),
    }  # fmt: skip


FAMILY = Family(parse=parse, render=render, architectures=("FalconH1ForCausalLM",), tensors=TENSORS)
