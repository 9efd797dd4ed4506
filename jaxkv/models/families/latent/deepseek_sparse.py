"""DeepSeek V3.2 and GLM-5: DeepSeek V3's layers, which attend to the tokens that an indexer chooses.

In GLM-5 a layer may attend to what an earlier layer's indexer has chosen, and indexers rotate neighbours as pairs.
"""

import dataclasses
from typing import Any

from jaxkv._core.config.layer_config import LayerConfig
from jaxkv.models.config import DecoderConfig, IndexConfig
from jaxkv.models.config_fields import MOST_DIM, MOST_HEADS, MOST_LAYERS, Fields
from jaxkv.models.families.family import Family, read_layer_kinds
from jaxkv.models.families.latent import deepseek

DEEPSEEK, GLM = "deepseek_v32", "glm_moe_dsa"
INDEXED, DENSE, SPARSE, FULL, SHARED = "indexed_attention", "dense", "sparse", "full", "shared"
LETTERS = {"F": FULL, "S": SHARED}
# Where they differ from DeepSeek V3's.
DEFAULTS: dict[str, dict[str, Any]] = {
    DEEPSEEK: {"rms_norm_eps": 1e-6},
    GLM: {
        "n_group": 1, "topk_group": 1, "q_lora_rank": 2048, "qk_nope_head_dim": 192, "v_head_dim": 256,
        "rms_norm_eps": 1e-5,
    },
}  # fmt: skip


def parse(fields: Fields) -> DecoderConfig:
    is_glm, num_layers = fields.family == GLM, fields.size("num_hidden_layers", most=MOST_LAYERS)
    fields.left = DEFAULTS[fields.family] | fields.left | {"num_hidden_layers": num_layers}
    index = IndexConfig(
        heads=fields.size("index_n_heads", 32 if is_glm else 64, most=MOST_HEADS),
        dim=fields.size("index_head_dim", 128, most=MOST_DIM), top_k=fields.size("index_topk", 2048),
        interleaved=is_glm,
    )  # fmt: skip
    fields.must_be("indexer_rope_interleave", is_glm)
    fields.must_be("rope_interleave", True)
    fields.must_be("mlp_bias", False)
    read_layer_kinds(fields, "layer_types", [INDEXED] * num_layers, (INDEXED,))
    indexers = _read_indexers(fields, num_layers) if is_glm else [FULL] * num_layers
    dense = min(fields.size("first_k_dense_replace", 3, least=0), num_layers)
    kinds = read_layer_kinds(
        fields, "mlp_layer_types", [DENSE] * dense + [SPARSE] * (num_layers - dense), (DENSE, SPARSE)
    )  # fmt: skip
    dense = next((i for i, kind in enumerate(kinds) if kind == SPARSE), num_layers)
    if DENSE in kinds[dense:]:
        raise fields.refuse("mlp_layer_types", kinds, "dense layers before all sparse ones")
    fields.left["first_k_dense_replace"] = dense
    found = deepseek.parse(fields)
    latent = found.latent
    assert latent is not None
    if latent.query_rank is None or latent.rope_dim > index.dim:
        raise fields.refuse(
            "q_lora_rank", latent.query_rank, "a rank, and an index_head_dim of qk_rope_head_dim or more"
        )
    layers = tuple(
        LayerConfig.latent(latent.rank, latent.rope_dim, index_dim=index.dim if kind == FULL else None)
        for kind in indexers
    )
    return dataclasses.replace(found, family=fields.family, layers=layers, index=index)


def _read_indexers(fields: Fields, num_layers: int) -> list[str]:
    """Reads which layers have an indexer: a list, a pattern, or every so many layers."""
    every = fields.size("index_topk_freq", 1)
    skipped = fields.size("index_skip_topk_offset", 2, least=0)
    regular = [SHARED if max(i - skipped + 1, 0) % every else FULL for i in range(num_layers)]
    pattern = fields.take("index_topk_pattern", None)
    if isinstance(pattern, str):
        pattern = [LETTERS.get(letter, letter) for letter in pattern]
    default = regular if pattern is None else pattern
    found = read_layer_kinds(fields, "indexer_types", default, (FULL, SHARED))
    if not isinstance(found, list) or len(found) != num_layers or not {*found} <= {FULL, SHARED}:
        raise fields.refuse("index_topk_pattern", pattern, f"F and S, one for each of the {num_layers} layers")
    if found[0] == SHARED:
        raise fields.refuse("indexer_types", found, "a first layer that chooses for itself")
    return found


def render(config: DecoderConfig) -> dict[str, Any]:
    index, is_glm = config.index, config.family == GLM
    assert index is not None
    kinds = [SPARSE if sparse else DENSE for sparse in config.expert_layers or (False,) * config.num_layers]
    fields = deepseek.render(config) | {
        "index_n_heads": index.heads, "index_head_dim": index.dim, "index_topk": index.top_k,
        "layer_types": [INDEXED] * config.num_layers, "mlp_layer_types": kinds,
    }  # fmt: skip
    if is_glm:
        fields["indexer_types"] = [SHARED if layer.index_dim is None else FULL for layer in config.layers]
    return fields


DEEPSEEK_FAMILY = Family(
    parse=parse, render=render, architectures=("DeepseekV32ForCausalLM",), name_tensor=deepseek.name_tensor
)
GLM_FAMILY = Family(
    parse=parse, render=render, architectures=("GlmMoeDsaForCausalLM",), name_tensor=deepseek.name_tensor
)
