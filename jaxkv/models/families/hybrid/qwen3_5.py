"""Qwen 3.5 and 3.6: Qwen 3 Next without fused projections, with MLPs, or with experts in every layer.

The chosen experts' weights are normalised. Of models for images and text, the text model is read: all positions of a
text's token are the same, so that `mrope_section` changes nothing. Multi-token prediction is skipped. Refuses attention
without an output gate, and states of another dtype than float32.
"""

from typing import Any

from jaxkv.models.config import DecoderConfig
from jaxkv.models.config_fields import Fields
from jaxkv.models.families.experts.qwen2_moe import TENSORS as EXPERTS
from jaxkv.models.families.experts.qwen3_moe import split_experts
from jaxkv.models.families.family import Family
from jaxkv.models.families.hybrid.qwen3_next import name_tensor, read_experts, read_qwen_next, render_qwen_next
from jaxkv.models.families.hybrid_common import GATED_ATTENTION, delta_names, qkv_sizes, rows
from jaxkv.models.families.nested import drop_grid_positions, make_nested

TENSORS: dict[str, Any] = EXPERTS | GATED_ATTENTION | delta_names("linear_attn") | {
    f"mixer.{name}": rows("linear_attn.in_proj_qkv.weight", qkv_sizes, i)
    for i, name in enumerate(("query", "key", "value"))
} | {
    "mixer.gate": "linear_attn.in_proj_z.weight",
    "mixer.beta": "linear_attn.in_proj_b.weight",
    "mixer.decay": "linear_attn.in_proj_a.weight",
}  # fmt: skip
MUST_BE = (("attn_output_gate", True), ("mamba_ssm_dtype", "float32"), ("output_gate_type", "swish"))
MOE_MUST_BE: dict[str, Any] = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
PREDICTION = ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")


def parse(fields: Fields) -> DecoderConfig:
    return DecoderConfig(**_read(fields, num_kv_heads=4, mlp_dim=12_288))


def parse_moe(fields: Fields) -> DecoderConfig:
    for name, allowed in MOE_MUST_BE.items():
        fields.must_be(name, allowed)
    experts = read_experts(fields, count=256, per_token=8, normalise=True)
    common = _read(fields, num_kv_heads=2, mlp_dim=experts.mlp_dim)
    return DecoderConfig(**common, experts=experts, expert_layers=(True,) * len(common["blocks"]))


def _read(fields: Fields, **defaults: int) -> dict[str, Any]:
    for name, allowed in MUST_BE:
        fields.must_be(name, allowed)
    for name in PREDICTION:
        fields.take(name, None)
    fields.left = {name: drop_grid_positions(name, x) for name, x in fields.left.items()}
    return read_qwen_next(fields, **defaults)


FAMILY = Family(
    parse=parse, render=render_qwen_next, architectures=("Qwen3_5ForCausalLM",), tensors=TENSORS,
    name_tensor=name_tensor,
)  # fmt: skip
MOE_FAMILY = Family(
    parse=parse_moe, render=render_qwen_next, architectures=("Qwen3_5MoeForCausalLM",), tensors=TENSORS,
    name_tensor=name_tensor, repack=split_experts,
)  # fmt: skip
NESTED_FAMILY = make_nested({"qwen3_5_text": FAMILY}, "Qwen3_5ForConditionalGeneration")
NESTED_MOE_FAMILY = make_nested({"qwen3_5_moe_text": MOE_FAMILY}, "Qwen3_5MoeForConditionalGeneration")
