"""Nemotron-H, Nemotron Nano 2 and 3: a block is attention, Mamba 2, an MLP or experts alone, behind one norm.

Attention does not rotate; MLPs and experts have no gate, and square what is above zero. Experts are DeepSeek V3's, some
of a latent width. Time steps have a least value, `time_step_min`, whatever `time_step_limit` says, as in transformers.
Multi-token prediction is skipped. Refuses windows, and states of another dtype than float32.
"""

from collections.abc import Mapping
from typing import Any

from jaxkv.models.config import DecoderConfig, ExpertsConfig
from jaxkv.models.config_fields import FULL, LINEAR, MOST_DIM, MOST_HEADS, MOST_LAYERS, Fields
from jaxkv.models.families.experts_common import place_experts
from jaxkv.models.families.family import Family, make_experts, make_part, read_common, render_common
from jaxkv.models.families.hybrid_common import mamba_names, mixer_of
from jaxkv.models.mixers.block_config import BlockConfig, SpaceConfig
from jaxkv.models.rope import Rope

MLP, MOE = "mlp", "moe"
LETTERS = {"M": LINEAR, "*": FULL, "-": MLP, "E": MOE}
OLD_KINDS = {"mamba": LINEAR, "attention": FULL}
TENSORS: dict[str, Any] = mamba_names("mixer") | {
    "embed": "model.embeddings.weight", "norm": "model.norm_f.weight",
    "attention_norm": "norm.weight", "mlp_norm": "norm.weight",
    "experts.router": "mixer.gate.weight", "experts.choice_bias": "mixer.gate.e_score_correction_bias",
    "experts.latent_down": "mixer.fc1_latent_proj.weight", "experts.latent_up": "mixer.fc2_latent_proj.weight",
}  # fmt: skip
for _name, _stored in {"query": "q", "key": "k", "value": "v", "out": "o"}.items():
    TENSORS |= {f"attention.{_name}": f"mixer.{_stored}_proj.weight"}
    TENSORS |= {f"attention.{_name}_bias": f"mixer.{_stored}_proj.bias"}
for _name in ("up", "down"):
    TENSORS |= {f"experts.{_name}": f"mixer.experts.{{}}.{_name}_proj.weight"}
    for _part, _prefix in (("mlp", "mixer"), ("experts.shared", "mixer.shared_experts")):
        TENSORS |= {f"{_part}.{_name}": f"{_prefix}.{_name}_proj.weight"}
        TENSORS |= {f"{_part}.{_name}_bias": f"{_prefix}.{_name}_proj.bias"}
# Older names of fields; the newer ones are read.
RENAMED = {"mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel", "mamba_conv_bias": "use_conv_bias",
           "mamba_dt_min": "time_step_min", "attention_head_dim": "head_dim"}  # fmt: skip
MUST_BE = (("mamba_hidden_act", "silu"), ("mamba_ssm_cache_dtype", "float32"), ("sliding_window", None),
           ("n_shared_experts", 1))  # fmt: skip
# Of the initialisation, of kernels, of the precision of sums, and of multi-token prediction.
UNUSED = (
    "chunk_size", "expand", "hidden_dropout", "mamba_chunk_size", "mamba_dt_init_floor", "mamba_dt_limit",
    "mamba_dt_max", "mamba_expand", "mamba_proj_bias", "moe_shared_expert_overlap", "mtp_hybrid_override_pattern",
    "mtp_layers_block_type", "num_nextn_predict_layers", "partial_rotary_factor", "rescale_prenorm_residual",
    "residual_in_fp32", "rope_theta", "time_step_floor", "time_step_limit", "time_step_max", "time_step_rank",
    "use_mamba_kernels",
)  # fmt: skip


def parse(fields: Fields) -> DecoderConfig:
    for old, name in RENAMED.items():
        if (value := fields.take(old, None)) is not None:
            fields.left.setdefault(name, value)
    for name, allowed in MUST_BE:
        fields.must_be(name, allowed)
    for name in UNUSED:
        fields.take(name, None)
    kinds = _read_kinds(fields)
    eps = fields.number("layer_norm_epsilon", 1e-5, least=0)
    common = read_common(
        fields, num_kv_heads=(8, None), head_dim=128, norm_eps=eps, activation=("mlp_hidden_act", "relu2"),
        mlp_dim=(21_504,),
    )  # fmt: skip
    has_bias, mamba = fields.flag("attention_bias", False), _read_mamba(fields, eps)
    experts, layers = _read_experts(fields), tuple(kind == MOE for kind in kinds)
    blocks = {LINEAR: BlockConfig(mixer=mamba, mlp=False), FULL: BlockConfig(mlp=False)}
    return DecoderConfig(
        **common, blocks=tuple(blocks.get(kind, BlockConfig(attention=False)) for kind in kinds), gated_mlp=False,
        ropes=(Rope(partial_rotary_factor=0.0),) * len(kinds), qkv_bias=has_bias, out_bias=has_bias,
        mlp_bias=fields.flag("mlp_bias", False), **place_experts(experts, layers),
    )  # fmt: skip


def _read_kinds(fields: Fields) -> list[str]:
    """Reads the kinds of blocks: a list, or a pattern of letters."""
    pattern, listed = fields.take("hybrid_override_pattern", None), fields.take("layers_block_type", None)
    kinds = fields.take("layer_types", None) or listed
    if kinds is None and isinstance(pattern, str):
        kinds = [LETTERS.get(letter, letter) for letter in pattern]
    if not isinstance(kinds, list) or not 0 < len(kinds) <= MOST_LAYERS:
        raise fields.refuse("layers_block_type", kinds, "a list, or a hybrid_override_pattern of M, *, - and E")
    kinds = [OLD_KINDS.get(kind, kind) if isinstance(kind, str) else None for kind in kinds]
    if not set(kinds) <= {LINEAR, FULL, MLP, MOE} or FULL not in kinds:
        raise fields.refuse("layers_block_type", kinds, f"{LINEAR}, {FULL}, {MLP} and {MOE}, and at least one {FULL}")
    if (count := fields.size("num_hidden_layers", len(kinds))) != len(kinds):
        raise fields.refuse("num_hidden_layers", count, f"as many layers as there are kinds, {len(kinds)}")
    return kinds


def _read_mamba(fields: Fields, eps: float) -> SpaceConfig:
    has_bias = fields.flag("use_bias", False)
    return make_part(
        SpaceConfig, "Mamba layers", fields,
        heads=fields.size("mamba_num_heads", 128, most=MOST_HEADS),
        head_dim=fields.size("mamba_head_dim", 64, most=MOST_DIM),
        state_dim=fields.size("ssm_state_size", 128, most=MOST_DIM), groups=fields.size("n_groups", 8, most=MOST_HEADS),
        width=fields.size("conv_kernel", 4, least=2, most=MOST_DIM), bias=has_bias, out_bias=has_bias,
        conv_bias=fields.flag("use_conv_bias", True), norm_eps=eps,
        step_limits=(fields.number("time_step_min", 0.001, least=0), None),
    )  # fmt: skip


def _read_experts(fields: Fields) -> ExpertsConfig:
    count = fields.either("n_routed_experts", "num_local_experts", 8, most=MOST_HEADS)
    return make_experts(
        fields, count=count, per_token=fields.size("num_experts_per_tok", 2, most=count), scores="sigmoid",
        mlp_dim=fields.size("moe_intermediate_size", 7688, most=MOST_DIM), choice_bias=True,
        normalise=fields.flag("norm_topk_prob", True), scale=fields.number("routed_scaling_factor", 1.0, above=0),
        groups=fields.size("n_group", 1, most=count), groups_per_token=fields.size("topk_group", 1, most=count),
        shared_dim=fields.size("moe_shared_expert_intermediate_size", 7688, most=MOST_DIM),
        latent_dim=fields.size("moe_latent_size", None, most=MOST_DIM) or 0,
    )  # fmt: skip


def render(config: DecoderConfig) -> dict[str, Any]:
    mamba, experts, layers = mixer_of(config), config.experts, config.expert_layers or (False,) * config.num_layers
    kinds = [
        LINEAR if block.mixer is not None else FULL if block.attention else MOE if has else MLP
        for block, has in zip(config.blocks, layers, strict=True)
    ]
    fields = render_common(config, activation="mlp_hidden_act")
    fields |= {
        "layers_block_type": kinds, "layer_norm_epsilon": fields.pop("rms_norm_eps"), "mlp_bias": config.mlp_bias,
        "attention_bias": config.out_bias,
    } | ({} if mamba is None else {
        "mamba_num_heads": mamba.heads, "mamba_head_dim": mamba.head_dim, "ssm_state_size": mamba.state_dim,
        "n_groups": mamba.groups, "conv_kernel": mamba.width, "use_bias": mamba.bias, "use_conv_bias": mamba.conv_bias,
        "time_step_min": mamba.step_limits[0],
    })  # fmt: skip
    if experts is None:
        return fields
    return fields | {
        "n_routed_experts": experts.count, "num_experts_per_tok": experts.per_token, "n_group": experts.groups,
        "moe_intermediate_size": experts.mlp_dim, "norm_topk_prob": experts.normalise,
        "topk_group": experts.groups_per_token, "routed_scaling_factor": experts.scale,
        "moe_shared_expert_intermediate_size": experts.shared_dim, "moe_latent_size": experts.latent_dim or None,
    }  # fmt: skip


def name_tensor(name: str, config: Mapping[str, Any]) -> str | None:
    """Returns a tensor's name in transformers; None for a tensor of multi-token prediction."""
    if name.startswith("mtp."):
        return None
    return "model." + name.removeprefix("backbone.") if name.startswith("backbone.") else name


FAMILY = Family(
    parse=parse, render=render, architectures=("NemotronHForCausalLM",), tensors=TENSORS, name_tensor=name_tensor
)
