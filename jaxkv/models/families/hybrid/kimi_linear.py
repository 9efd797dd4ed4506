"""Kimi Linear: Kimi delta attention in three of four layers, in the others DeepSeek V3's latent attention, unrotated.

A delta net has a decay for each channel of its keys, and low ranks of its decays and gates. Behind the first layers,
DeepSeek V3's experts. Refuses rotated attention (`mla_use_nope`), other scores than sigmoids, and experts in some
layers only (`moe_layer_freq`).
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxkv.models.config import DecoderConfig, ExpertsConfig
from jaxkv.models.config_fields import FULL, LINEAR, MOST_DIM, MOST_HEADS, Fields
from jaxkv.models.families.experts_common import place_experts
from jaxkv.models.families.family import (
    Family,
    Section,
    make_experts,
    make_part,
    read_common,
    read_num_layers,
    render_common,
)
from jaxkv.models.families.hybrid_common import delta_names, join_convs, kinds_of, mix, mixer_of, read_kinds
from jaxkv.models.families.latent.deepseek import read_latent, render_latent
from jaxkv.models.mixers.block_config import DeltaConfig
from jaxkv.models.rope import Rope

NAMES = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "decay_down": "f_a_proj", "decay": "f_b_proj",
         "gate_down": "g_a_proj", "gate": "g_b_proj", "beta": "b_proj", "norm": "o_norm", "out": "o_proj"}  # fmt: skip
TENSORS: dict[str, Any] = delta_names("self_attn") | {
    f"mixer.{name}": f"self_attn.{stored}.weight" for name, stored in NAMES.items()
} | {
    "mixer.log_decay": Section("self_attn.A_log", lambda config, shape: ((1, 1, *shape, 1), shape, np.s_[...])),
    "experts.gate": "mlp.experts.{}.w1.weight",
    "experts.up": "mlp.experts.{}.w3.weight",
    "experts.down": "mlp.experts.{}.w2.weight",
}  # fmt: skip
MUST_BE = (("mla_use_nope", True), ("moe_router_activation_func", "sigmoid"), ("moe_layer_freq", 1))
# Of rotations and of training: the attention layers do not rotate.
UNUSED = ("rope_theta", "rope_scaling", "rope_parameters", "use_grouped_topk", "num_nextn_predict_layers")
DENSE, SPARSE = "dense", "sparse"


def parse(fields: Fields) -> DecoderConfig:
    num_layers = read_num_layers(fields)
    fields.left.setdefault("max_position_embeddings", fields.size("model_max_length", 1_048_576))
    common = read_common(fields, num_kv_heads=(32,), norm_eps=1e-5)
    for name, allowed in MUST_BE:
        fields.must_be(name, allowed)
    for name in UNUSED:
        fields.take(name, None)
    latent, has_bias = read_latent(fields, query_rank=None), fields.flag("attention_bias", False)
    delta, kinds = _read_delta(fields, common["norm_eps"], num_layers)
    experts, layers = _read_experts(fields), _read_expert_layers(fields, num_layers)
    return DecoderConfig(**common | dict(
        latent=latent, blocks=mix(kinds, delta), ropes=(Rope(partial_rotary_factor=0.0),) * num_layers,
        attention_scale=(latent.nope_dim + latent.rope_dim) ** -0.5, qkv_bias=has_bias, out_bias=has_bias,
        **place_experts(experts, layers),
    ))  # fmt: skip


def _read_delta(fields: Fields, eps: float, num_layers: int) -> tuple[DeltaConfig, list[str]]:
    """Reads the delta nets and the kinds of layers. Published configs nest both, and count layers from 1."""
    nested = fields.take("linear_attn_config", None)
    inner = fields.nest({} if nested is None else nested, "linear_attn_config")
    heads = inner.size("num_heads", fields.size("linear_num_heads", 32, most=MOST_HEADS), most=MOST_HEADS)
    dim = inner.size("head_dim", fields.size("linear_head_dim", 128, most=MOST_DIM), most=MOST_DIM)
    width = inner.size("short_conv_kernel_size", fields.size("linear_conv_kernel_dim", 4, least=2), least=2)
    full, linear = inner.take("full_attn_layers", None), inner.take("kda_layers", None)
    inner.finish()
    default = [FULL if i and i % 4 == 0 else LINEAR for i in range(num_layers)]
    if full is not None or linear is not None:
        listed = [*full, *linear] if isinstance(full, list) and isinstance(linear, list) else []
        if sorted(map(str, listed)) != sorted(map(str, range(1, num_layers + 1))):
            raise inner.refuse("full_attn_layers", full, f"it and kda_layers to name the {num_layers} layers from 1 on")
        default = [FULL if i + 1 in full else LINEAR for i in range(num_layers)]
    delta = make_part(
        DeltaConfig, "delta nets", fields, key_heads=heads, value_heads=heads, key_dim=dim, value_dim=dim, width=width,
        gate_rank=dim, gate="sigmoid", norm_eps=eps,
    )  # fmt: skip
    return delta, read_kinds(fields, default)


def _read_experts(fields: Fields) -> ExpertsConfig:
    count = fields.either("num_experts", "num_local_experts", 256, most=MOST_HEADS)
    mlp_dim = fields.size("moe_intermediate_size", 1024, most=MOST_DIM)
    for published, name in (("num_shared_experts", "n_shared_experts"), ("moe_renormalize", "norm_topk_prob")):
        if name in fields.left:
            fields.left.setdefault(published, fields.take(name))
    return make_experts(
        fields, count=count, per_token=fields.either("num_experts_per_token", "num_experts_per_tok", 8, most=count),
        mlp_dim=mlp_dim, scores="sigmoid", normalise=fields.flag("moe_renormalize", True),
        scale=fields.number("routed_scaling_factor", 2.446, above=0),
        groups=fields.either("num_expert_group", "n_group", 1, most=count),
        groups_per_token=fields.size("topk_group", 1, most=count), choice_bias=True,
        shared_dim=fields.size("num_shared_experts", 1, least=0) * mlp_dim,
    )  # fmt: skip


def _read_expert_layers(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    dense = fields.size("first_k_dense_replace", 1, least=0)
    kinds = fields.take("mlp_layer_types", None) or [DENSE if i < dense else SPARSE for i in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers or not all(x in (DENSE, SPARSE) for x in kinds):
        raise fields.refuse("mlp_layer_types", kinds, f"one of {DENSE}, {SPARSE} for each of the {num_layers} layers")
    return tuple(kind == SPARSE for kind in kinds)


def render(config: DecoderConfig) -> dict[str, Any]:
    latent, delta, experts = config.latent, mixer_of(config), config.experts
    assert latent is not None
    layers = config.expert_layers or (False,) * config.num_layers
    fields = render_common(config) | render_latent(latent) | {
        "pad_token_id": None, "layer_types": kinds_of(config), "attention_bias": config.out_bias,
        "mlp_layer_types": [SPARSE if x else DENSE for x in layers], "model_max_length": config.max_seq_len,
    }  # fmt: skip
    del fields["max_position_embeddings"]
    if delta is not None:
        fields |= {"linear_num_heads": delta.key_heads, "linear_head_dim": delta.key_dim}
        fields |= {"linear_conv_kernel_dim": delta.width}
    if experts is None:
        return fields
    return fields | {
        "num_experts": experts.count, "num_experts_per_token": experts.per_token,
        "topk_group": experts.groups_per_token,
        "moe_intermediate_size": experts.mlp_dim, "num_shared_experts": experts.shared_dim // experts.mlp_dim,
        "moe_renormalize": experts.normalise, "routed_scaling_factor": experts.scale,
        "num_expert_group": experts.groups,
    }  # fmt: skip


def name_tensor(name: str, config: Mapping[str, Any]) -> str:
    """Returns a tensor's name in transformers."""
    return name.replace(".block_sparse_moe.", ".mlp.").replace(".self_attn.forget_gate.", ".self_attn.")


FAMILY = Family(
    parse=parse, render=render, architectures=("KimiLinearForCausalLM",), tensors=TENSORS, name_tensor=name_tensor,
    repack=join_convs,
)  # fmt: skip
