"""MiniMax M2: experts in every layer, chosen by sigmoids with a bias, and a rotation of a part of each head's entries.

A token's queries are normalised together, over all of its heads, and so are its keys. Refuses linear attention in
`attn_type_list` (M1), norms of another kind, shared experts, and scores without the bias. Multi-token prediction is
skipped.
"""

from typing import Any

from jaxkv.models.config import DecoderConfig, ExpertsConfig
from jaxkv.models.config_fields import FULL, MOST_HEADS, Fields
from jaxkv.models.families.experts.mixtral import TENSORS as MIXTRAL
from jaxkv.models.families.family import Family, read_common, read_num_layers, render_common
from jaxkv.models.rope_fields import parse_ropes, render_rope

TENSORS = MIXTRAL | {"experts.choice_bias": "block_sparse_moe.e_score_correction_bias"}
MUST_BE: tuple[tuple[str, Any], ...] = (
    ("qk_norm_type", "per_layer"), ("use_qk_norm", True), ("scoring_func", "sigmoid"), ("use_routing_bias", True),
    ("shared_intermediate_size", 0), ("attention_bias", False),
)  # fmt: skip
# Of linear attention, of training, and of multi-token prediction.
UNUSED = (
    "layernorm_full_attention_beta", "layernorm_linear_attention_beta", "layernorm_mlp_beta", "mlp_intermediate_size",
    "mtp_transformer_layers", "num_mtp_modules", "use_mtp", "shared_moe_mode",
    "swa_rope_theta",
)  # fmt: skip


def parse(fields: Fields) -> DecoderConfig:
    num_layers, common = read_num_layers(fields), read_common(fields, num_kv_heads=(8,), head_dim=128)
    for name, allowed in MUST_BE:
        fields.must_be(name, allowed)
    for name in UNUSED:
        fields.take(name, None)
    if (kinds := fields.take("attn_type_list", None)) is not None and kinds != [1] * num_layers:
        raise fields.refuse("attn_type_list", kinds, f"full attention, 1, for each of {num_layers} layers")
    rotated = fields.size("rotary_dim", common["head_dim"], most=common["head_dim"])
    rope = parse_ropes(fields, common["max_seq_len"], theta=5e6, partial=rotated / common["head_dim"])[FULL]
    count = fields.either("num_local_experts", "num_experts", 256, most=MOST_HEADS)
    experts = ExpertsConfig(
        count=count, per_token=fields.size("num_experts_per_tok", 8, most=count), mlp_dim=common["mlp_dim"],
        scores="sigmoid", normalise=True, choice_bias=True,
    )  # fmt: skip
    return DecoderConfig(
        **common, windows=(None,) * num_layers, ropes=(rope,) * num_layers, qk_norm=True, qk_norm_over="all_heads",
        experts=experts, expert_layers=(True,) * num_layers,
    )  # fmt: skip


def render(config: DecoderConfig) -> dict[str, Any]:
    assert config.experts is not None
    return render_common(config) | {
        "rope_parameters": render_rope(config.ropes[0]), "num_local_experts": config.experts.count,
        "num_experts_per_tok": config.experts.per_token,
    }  # fmt: skip


FAMILY = Family(parse=parse, render=render, architectures=("MiniMaxM2ForCausalLM",), tensors=TENSORS)
