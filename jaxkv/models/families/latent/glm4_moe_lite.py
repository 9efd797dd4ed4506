"""GLM 4.7 Flash: DeepSeek V3's latent attention, and GLM 4.5's experts behind the first layer.

Layers behind the last, for multi-token prediction, are skipped.
"""

import dataclasses
from typing import Any

from jaxkv.models.config import DecoderConfig
from jaxkv.models.config_fields import MOST_LAYERS, Fields
from jaxkv.models.families.experts_common import place_experts, read_sparse_layers, render_sparse_layers
from jaxkv.models.families.family import Family
from jaxkv.models.families.latent import deepseek

# Where they differ from DeepSeek V3's.
DEFAULTS: dict[str, Any] = {
    "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256, "n_routed_experts": 64, "num_experts_per_tok": 4,
    "moe_intermediate_size": 1536, "routed_scaling_factor": 1.8, "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5,
}  # fmt: skip


def parse(fields: Fields) -> DecoderConfig:
    fields.must_be("partial_rotary_factor", 1.0)
    return read_kin(fields, DEFAULTS)


def read_kin(fields: Fields, defaults: dict[str, Any]) -> DecoderConfig:
    """Reads a model built of DeepSeek V3's layers, of which a list says which have experts; by default all but the
    first."""
    num_layers = fields.size("num_hidden_layers", most=MOST_LAYERS)
    layers = read_sparse_layers(fields, num_layers, dense=1)
    if (count := fields.size("num_local_experts", None)) is not None:
        fields.left.setdefault("n_routed_experts", count)
    fields.left = defaults | fields.left | {"num_hidden_layers": num_layers, "first_k_dense_replace": 0}
    found = deepseek.parse(fields)
    assert found.experts is not None
    return dataclasses.replace(found, family=fields.family, **place_experts(found.experts, layers))


def render(config: DecoderConfig) -> dict[str, Any]:
    fields = deepseek.render(config)
    del fields["first_k_dense_replace"]
    return fields | render_sparse_layers(config)


FAMILY = Family(parse=parse, render=render, architectures=("Glm4MoeLiteForCausalLM",), name_tensor=deepseek.name_tensor)
