"""DeepSeek V2 and V3: latent attention, leading layers with an MLP, then experts beside a shared one.

V3 (and Kimi K2) scores experts by a sigmoid, with a bias that affects the choice alone. Its extra layers behind the
last, for multi-token prediction, are skipped.
"""

from collections.abc import Mapping
from typing import Any

from jaxkv.models.checkpoint_formats import LAYER
from jaxkv.models.config import DecoderConfig, ExpertsConfig, LatentConfig
from jaxkv.models.config_fields import FULL, MOST_DIM, MOST_HEADS, Fields
from jaxkv.models.families.family import Family, read_common, read_num_layers, render_common
from jaxkv.models.rope_fields import parse_ropes, render_rope

V2, V3 = "deepseek_v2", "deepseek_v3"  # and kimi_k2, another name of V3
# V2's names for choosing the best experts of all, or of a token's best groups; V3's name.
GREEDY, IN_GROUPS, BALANCED = "greedy", "group_limited_greedy", "noaux_tc"


def parse(fields: Fields) -> DecoderConfig:
    num_layers, common, v3 = read_num_layers(fields), read_common(fields, num_kv_heads=(None,)), fields.family != V2
    has_bias = fields.flag("attention_bias", False)
    latent = read_latent(fields, query_rank=1536)
    head_dim = latent.nope_dim + latent.rope_dim
    interleaved = fields.flag("rope_interleave", True) if v3 else True
    rope = parse_ropes(fields, common["max_seq_len"], theta=10_000.0, interleaved=interleaved)[FULL]
    dense = fields.size("first_k_dense_replace", 3 if v3 else 0, least=0)
    fields.must_be("moe_layer_freq", 1)
    fields.must_be("ep_size", 1)
    fields.size("num_nextn_predict_layers", 1, least=0)  # `name_tensor` skips them
    experts = _read_experts(fields, v3)
    expert_layers = tuple(i >= dense for i in range(num_layers))
    return DecoderConfig(**common | dict(
        family=V3 if v3 else V2,
        latent=latent, windows=(None,) * num_layers, ropes=(rope,) * num_layers,
        attention_scale=head_dim**-0.5 * rope.sharpening(rope.mscale_all_dim) ** 2,
        qkv_bias=has_bias, out_bias=has_bias, mlp_bias=False if v3 else fields.flag("mlp_bias", False),
        experts=experts if any(expert_layers) else None, expert_layers=expert_layers if any(expert_layers) else (),
    ))  # fmt: skip


def read_latent(fields: Fields, *, query_rank: int | None, rank: int = 512, nope_dim: int = 128) -> LatentConfig:
    """Reads the sizes of latent attention, with a family's defaults."""
    latent = LatentConfig(
        rank=fields.size("kv_lora_rank", rank, most=MOST_DIM),
        rope_dim=fields.size("qk_rope_head_dim", 64, most=MOST_DIM),
        nope_dim=fields.size("qk_nope_head_dim", nope_dim, most=MOST_DIM),
        value_dim=fields.size("v_head_dim", 128, most=MOST_DIM),
        query_rank=fields.size("q_lora_rank", query_rank, None, most=MOST_DIM),
    )
    head_dim = latent.nope_dim + latent.rope_dim
    if (written := fields.size("qk_head_dim", head_dim)) != head_dim:
        raise fields.refuse("qk_head_dim", written, f"the sum of qk_nope_head_dim and qk_rope_head_dim, {head_dim}")
    return latent


def render_latent(latent: LatentConfig) -> dict[str, Any]:
    """Writes what `read_latent` reads. Configs call the rotated entries of a head its width."""
    return {
        "kv_lora_rank": latent.rank, "qk_rope_head_dim": latent.rope_dim, "qk_nope_head_dim": latent.nope_dim,
        "v_head_dim": latent.value_dim, "q_lora_rank": latent.query_rank, "head_dim": latent.rope_dim,
    }  # fmt: skip


def _read_experts(fields: Fields, v3: bool) -> ExpertsConfig:
    count = fields.size("n_routed_experts", fields.size("num_local_experts", 256 if v3 else 64, most=MOST_HEADS),
                        most=MOST_HEADS)  # fmt: skip
    mlp_dim = fields.size("moe_intermediate_size", 2048 if v3 else 1407, most=MOST_DIM)
    shared = fields.size("n_shared_experts", 1 if v3 else 2, least=0)
    groups = fields.size("n_group", 8 if v3 else 1, None, most=count)
    within = fields.size("topk_group", 4 if v3 else 1, None, most=count)
    fields.must_be("scoring_func", "sigmoid" if v3 else "softmax")
    method = fields.take("topk_method", BALANCED if v3 else GREEDY)
    if method not in ((BALANCED,) if v3 else (GREEDY, IN_GROUPS)):
        raise fields.refuse("topk_method", method, BALANCED if v3 else f"{GREEDY} and {IN_GROUPS}")
    if method == GREEDY:
        groups = within = 1
    normalise = fields.flag("norm_topk_prob", v3)
    if normalise and not v3:  # transformers reads the field and then ignores it
        raise fields.refuse("norm_topk_prob", normalise, "False")
    try:
        return ExpertsConfig(
            count=count, per_token=fields.size("num_experts_per_tok", *([8] if v3 else []), most=MOST_HEADS),
            mlp_dim=mlp_dim, scores="sigmoid" if v3 else "softmax", normalise=normalise,
            scale=fields.number("routed_scaling_factor", 2.5 if v3 else 1.0, above=0), groups=groups or 1,
            groups_per_token=within or 1, choice_bias=v3, shared_dim=shared * mlp_dim,
        )  # fmt: skip
    except ValueError as error:
        raise error if fields.where in str(error) else ValueError(f"The experts of {fields.where}: {error}") from error


def render(config: DecoderConfig) -> dict[str, Any]:
    latent, experts, v3 = config.latent, config.experts, config.family != V2
    assert latent is not None
    fields = render_common(config) | render_latent(latent) | {
        "rope_parameters": render_rope(config.ropes[0]), "attention_bias": config.out_bias,
        "first_k_dense_replace": config.expert_layers.count(False) if experts else config.num_layers,
    }  # fmt: skip
    if v3:
        fields |= {"rope_interleave": config.ropes[0].interleaved, "num_nextn_predict_layers": 0}
    else:
        fields |= {"mlp_bias": config.mlp_bias}
    if experts is None:
        return fields | {"n_routed_experts": 1, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1}
    method = BALANCED if v3 else GREEDY if experts.groups == experts.groups_per_token else IN_GROUPS
    return fields | {
        "n_routed_experts": experts.count, "num_experts_per_tok": experts.per_token, "topk_method": method,
        "moe_intermediate_size": experts.mlp_dim, "n_shared_experts": experts.shared_dim // experts.mlp_dim,
        "norm_topk_prob": experts.normalise, "routed_scaling_factor": experts.scale, "n_group": experts.groups,
        "topk_group": experts.groups_per_token,
    }  # fmt: skip


def name_tensor(name: str, config: Mapping[str, Any]) -> str | None:
    """Returns the name itself; None for a tensor of a multi-token prediction layer."""
    found, layers, extra = LAYER.match(name), config.get("num_hidden_layers"), config.get("num_nextn_predict_layers", 1)
    if found is None or not isinstance(layers, int) or not isinstance(extra, int):
        return name
    return None if layers <= int(found[1]) < layers + extra else name


V2_FAMILY = Family(parse=parse, render=render, architectures=("DeepseekV2ForCausalLM",))
V3_FAMILY = Family(parse=parse, render=render, architectures=("DeepseekV3ForCausalLM",), name_tensor=name_tensor)
