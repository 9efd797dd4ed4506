"""What families with experts share: DeepSeek V3's choice by sigmoids, and which layers have experts."""

from typing import Any

from jaxkv.models.config import DecoderConfig, ExpertsConfig
from jaxkv.models.config_fields import MOST_DIM, MOST_HEADS, Fields
from jaxkv.models.families.family import make_experts

DENSE, SPARSE = "dense", "sparse"


def read_sigmoid_experts(
    fields: Fields, *, count: int | None, per_token: int | None = 8, mlp_dim: int, scale: float = 1.0,
    normalise: bool = True, shared: int | None = 1, shared_name: str = "n_shared_experts",
) -> ExpertsConfig:  # fmt: skip
    """Reads experts that are chosen as DeepSeek V3's are: by sigmoids and a bias, within groups.

    Args:
      count, per_token, mlp_dim, scale, normalise: the family's defaults; None: the config must say it.
      shared: default of the number of shared experts; None: the family has none.
      shared_name: the field that says it.
    """
    written = {name: fields.size(name, None, most=MOST_HEADS)
               for name in ("n_routed_experts", "num_experts", "num_local_experts")}  # fmt: skip
    found = {size for size in written.values() if size is not None}
    if len(found) > 1:
        raise fields.refuse("num_local_experts", written, "one number of experts")
    if not found and count is None:
        raise ValueError(f"{fields.where} lacks the field n_routed_experts.")
    size: int = found.pop() if found else count  # type: ignore[assignment]
    width = fields.size("moe_intermediate_size", mlp_dim, most=MOST_DIM)
    fields.must_be("scoring_func", "sigmoid")
    fields.must_be("topk_method", "noaux_tc")
    groups, within = (fields.size(name, 1, None, most=size) or 1 for name in ("n_group", "topk_group"))
    return make_experts(
        fields, count=size, mlp_dim=width, scores="sigmoid", choice_bias=True,
        per_token=fields.size("num_experts_per_tok", *([] if per_token is None else [per_token]), most=size),
        normalise=fields.flag("norm_topk_prob", normalise),
        scale=fields.number("routed_scaling_factor", scale, above=0),
        groups=groups, groups_per_token=within,
        shared_dim=0 if shared is None else fields.size(shared_name, shared, least=0) * width,
    )  # fmt: skip


def render_sigmoid_experts(
    experts: ExpertsConfig | None, *, count_name: str = "n_routed_experts", shared_name: str | None = "n_shared_experts"
) -> dict[str, Any]:
    """Writes what `read_sigmoid_experts` reads."""
    if experts is None:
        return {}
    shared = {} if shared_name is None else {shared_name: experts.shared_dim // experts.mlp_dim}
    return shared | {
        count_name: experts.count, "num_experts_per_tok": experts.per_token, "moe_intermediate_size": experts.mlp_dim,
        "norm_topk_prob": experts.normalise, "routed_scaling_factor": experts.scale, "n_group": experts.groups,
        "topk_group": experts.groups_per_token,
    }  # fmt: skip


def read_sparse_layers(fields: Fields, num_layers: int, *, dense: int) -> tuple[bool, ...]:
    """Reads which layers have experts: a list of kinds, or the number of layers before them, by default `dense`."""
    dense = fields.size("first_k_dense_replace", dense, least=0)
    kinds = fields.take("mlp_layer_types", None)
    kinds = [DENSE if i < dense else SPARSE for i in range(num_layers)] if kinds is None else kinds
    if not isinstance(kinds, list) or len(kinds) != num_layers or not all(x in (DENSE, SPARSE) for x in kinds):
        raise fields.refuse("mlp_layer_types", kinds, f"one of {DENSE}, {SPARSE} for each of the {num_layers} layers")
    return tuple(kind == SPARSE for kind in kinds)


def render_sparse_layers(config: DecoderConfig) -> dict[str, Any]:
    """Writes what `read_sparse_layers` reads."""
    layers = config.expert_layers or (False,) * config.num_layers
    return {"mlp_layer_types": [SPARSE if has else DENSE for has in layers]}


def count_dense_layers(config: DecoderConfig) -> int:
    """Returns the number of layers before those with experts, for configs that say it."""
    return config.expert_layers.count(False) if config.experts else config.num_layers


def place_experts(experts: ExpertsConfig, layers: tuple[bool, ...]) -> dict[str, Any]:
    """Returns the arguments of `DecoderConfig` for experts in some layers; without one of them, for none."""
    return {"experts": experts, "expert_layers": layers} if any(layers) else {"experts": None, "expert_layers": ()}
