"""Hunyuan with experts (A13B): Hunyuan's attention, and experts that a softmax chooses, beside a shared MLP as wide.

Configs may give each layer a number of experts, their width and how many a token goes to: numbers that differ between
layers are refused, as are experts of another width than the shared MLP's, and MLPs without experts beside them.
"""

from typing import Any

from jaxkv._core.config.validation import integer
from jaxkv.models.config import DecoderConfig
from jaxkv.models.config_fields import MOST_DIM, MOST_HEADS, Fields
from jaxkv.models.families.family import Family, make_experts
from jaxkv.models.families.prenorm import hunyuan_v1_dense

TENSORS = hunyuan_v1_dense.TENSORS | {"experts.router": "mlp.gate.wg.weight"} | {
    f"experts.shared.{name}": f"mlp.shared_mlp.{name}_proj.weight" for name in ("gate", "up", "down")
}  # fmt: skip
MUST_BE: tuple[tuple[str, Any], ...] = (
    ("use_mixed_mlp_moe", True), ("moe_layer_num_skipped", 0), ("moe_drop_tokens", False), ("use_mla", False),
    ("group_limited_greedy", False),
)  # fmt: skip
# Of latent attention and of a choice within groups, which are off, and of training.
UNUSED = (
    "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "n_group", "topk_group",
    "norm_topk_prob", "routed_scaling_factor", "sep_token_id", "moe_random_routing_dropped_token",
)  # fmt: skip


def parse(fields: Fields) -> DecoderConfig:
    common = hunyuan_v1_dense.read_hunyuan(fields)
    num_layers, width = len(common["windows"]), common["mlp_dim"]
    for name, allowed in MUST_BE:
        fields.must_be(name, allowed)
    for name in UNUSED:
        fields.take(name, None)
    if (given := _read_size(fields, "moe_intermediate_size", num_layers, width, MOST_DIM)) != width:
        raise fields.refuse("moe_intermediate_size", given, f"the intermediate_size, {width}")
    if (shared := _read_size(fields, "num_shared_expert", num_layers, 1, MOST_HEADS)) != 1:
        raise fields.refuse("num_shared_expert", shared, "1")
    count = fields.take("num_local_experts", None)
    fields.left.setdefault("num_experts", 1 if count is None else count)
    count = _read_size(fields, "num_experts", num_layers, 1, MOST_HEADS)
    per_token = fields.take("num_experts_per_tok", None)
    fields.left.setdefault("moe_topk", 1 if per_token is None else per_token)
    experts = make_experts(
        fields, count=count, per_token=_read_size(fields, "moe_topk", num_layers, 1, count), mlp_dim=width,
        normalise=True, shared_dim=width,
    )  # fmt: skip
    return DecoderConfig(**common, experts=experts, expert_layers=(True,) * num_layers)


def _read_size(fields: Fields, name: str, num_layers: int, default: int, most: int) -> int:
    """Reads a size of all layers, or a list of one for each."""
    written = fields.take(name, default)
    sizes = written if isinstance(written, list) else [written]
    if isinstance(written, list) and (len(written) != num_layers or any(size != written[0] for size in written)):
        raise fields.refuse(name, written, f"one number, or the same number for each of the {num_layers} layers")
    return integer(f"{name} in {fields.where}", sizes[0], least=1, most=most)


def render(config: DecoderConfig) -> dict[str, Any]:
    assert config.experts is not None
    own = {"num_experts": config.experts.count, "moe_topk": config.experts.per_token}
    return hunyuan_v1_dense.render(config) | own


FAMILY = Family(parse=parse, render=render, architectures=("HunYuanMoEV1ForCausalLM",), tensors=TENSORS)
