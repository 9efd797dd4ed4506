"""A.X K1: DeepSeek V3 with one more norm, behind the experts and their shared MLP."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxkv.models.config import DecoderConfig
from jaxkv.models.config_fields import Fields
from jaxkv.models.families.experts_common import DENSE, SPARSE
from jaxkv.models.families.family import Family
from jaxkv.models.families.latent.glm4_moe_lite import read_kin, render

NORM = "post_mlp_layernorm.weight"
TENSORS = {"experts.post_norm": NORM}
DEFAULTS: dict[str, Any] = {"n_routed_experts": 192, "num_nextn_predict_layers": 0}


def parse(fields: Fields) -> DecoderConfig:
    every, num_layers = fields.size("moe_layer_freq", 1), fields.left.get("num_hidden_layers")
    if every > 1 and fields.left.get("mlp_layer_types") is None and isinstance(num_layers, int):
        dense = fields.size("first_k_dense_replace", 1, least=0)
        fields.left["mlp_layer_types"] = [SPARSE if i >= dense and i % every == 0 else DENSE for i in range(num_layers)]
    found = read_kin(fields, DEFAULTS)
    if found.latent is None or found.latent.query_rank is None:
        raise fields.refuse("q_lora_rank", None, "a rank")
    experts = None if found.experts is None else dataclasses.replace(found.experts, post_norm=True)
    return dataclasses.replace(found, experts=experts)


def name_tensor(name: str, config: Mapping[str, Any]) -> str | None:
    """Returns a tensor's name as published."""
    return name.replace(f"mlp.{NORM}", NORM)


FAMILY = Family(
    parse=parse, render=render, architectures=("AXK1ForCausalLM",), tensors=TENSORS, name_tensor=name_tensor
)
