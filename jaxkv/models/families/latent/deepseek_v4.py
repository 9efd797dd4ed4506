"""DeepSeek V4: hyper-connections between all layers, attention to one row a token, experts that tokens choose.

The first layers' experts are those that a table names for each token. Layers have a window, and most of them entries of
several tokens beside it: of few, of which an indexer chooses (`compressed_sparse_attention`), or of many
(`heavily_compressed_attention`). Layers for multi-token prediction are skipped.
"""

from typing import Any

from jaxkv._core.config.layer_config import LayerConfig
from jaxkv.models.config import DecoderConfig, ExpertsConfig, HyperConfig
from jaxkv.models.config_fields import MOST_DIM, MOST_HEADS, Fields
from jaxkv.models.families.deepseek_v4_layers import (
    COMPRESS,
    MAIN,
    read_attention,
    read_layers,
    read_ropes,
    render_layers,
)
from jaxkv.models.families.deepseek_v4_tensors import TENSORS, name_tensor, split_experts
from jaxkv.models.families.family import (
    Family,
    make_experts,
    make_part,
    read_common,
    read_layer_kinds,
    read_num_layers,
    render_common,
)
from jaxkv.models.mixers.block_config import BlockConfig

HASH, ROUTED = "hash_moe", "moe"
SCORES = ("sqrtsoftplus", "softmax", "sigmoid")


def parse(fields: Fields) -> DecoderConfig:
    num_layers = read_num_layers(fields)
    width = fields.size("moe_intermediate_size", 2048, most=MOST_DIM)
    fields.must_be("intermediate_size", width)  # another name of it
    fields.left["intermediate_size"] = width
    fields.must_be("num_key_value_heads", 1)
    for name in ("attention_bias", "mlp_bias"):
        fields.must_be(name, False)
    common = read_common(fields, num_kv_heads=(1,), head_dim=512)
    heads, head_dim = common["num_heads"], common.pop("head_dim")
    del common["num_kv_heads"]
    compressed = read_attention(fields, head_dim)
    if heads % compressed.out_groups:
        raise fields.refuse("o_groups", compressed.out_groups, f"a number that divides num_attention_heads, {heads}")
    ropes = read_ropes(fields, common["max_seq_len"], head_dim, compressed.rope_dim)
    row = LayerConfig.latent(head_dim, 0, window=fields.size("sliding_window", 128))
    routings, compressors = _read_routing(fields, num_layers), read_layers(fields, num_layers)
    blocks = tuple(
        BlockConfig(hash_experts=kind == HASH, compressor=own) for kind, own in zip(routings, compressors, strict=True)
    )
    fields.size("num_nextn_predict_layers", 1, least=0)  # `name_tensor` skips them
    return DecoderConfig(
        **common, compressed=compressed, sinks=True,
        layers=tuple(layer for block in blocks for layer in block.layers(row)), blocks=blocks,
        ropes=tuple(ropes[MAIN if own is None else COMPRESS] for own in compressors),
        experts=_read_experts(fields, width), expert_layers=(True,) * num_layers,
        streams=make_part(
            HyperConfig, "hyper-connections", fields, count=fields.size("hc_mult", 4, least=2, most=64),
            iterations=fields.size("hc_sinkhorn_iters", 20, most=1000), eps=fields.number("hc_eps", 1e-6, least=0),
        ),
    )  # fmt: skip


def _read_routing(fields: Fields, num_layers: int) -> list[str]:
    hashing = fields.size("num_hash_layers", 3, least=0)
    default = [HASH if i < hashing else ROUTED for i in range(num_layers)]
    return read_layer_kinds(fields, "mlp_layer_types", default, (HASH, ROUTED))


def _read_experts(fields: Fields, width: int) -> ExpertsConfig:
    count = fields.either("n_routed_experts", "num_local_experts", 256, most=MOST_HEADS)
    fields.must_be("topk_method", "noaux_tc")
    fields.must_be("norm_topk_prob", True)
    if (scores := fields.take("scoring_func", SCORES[0])) not in SCORES:
        raise fields.refuse("scoring_func", scores, " and ".join(SCORES))
    fields.must_be("n_shared_experts", 1)
    if (dtype := fields.take("expert_dtype", None)) not in (None, "fp4", "fp8"):  # of published files
        raise fields.refuse("expert_dtype", dtype, "fp4 and fp8")
    return make_experts(
        fields, count=count, per_token=fields.size("num_experts_per_tok", 6, most=count), mlp_dim=width, scores=scores,
        normalise=True, scale=fields.number("routed_scaling_factor", 1.5, above=0), choice_bias=True, shared_dim=width,
        limit=fields.number("swiglu_limit", 10.0, above=0), alpha=None,
    )  # fmt: skip


def render(config: DecoderConfig) -> dict[str, Any]:
    experts, streams = config.experts, config.streams
    assert experts is not None and isinstance(streams, HyperConfig)
    fields = render_common(config) | render_layers(config) | {
        "num_key_value_heads": 1,
        "mlp_layer_types": [HASH if block.hash_experts else ROUTED for block in config.blocks],
        "moe_intermediate_size": experts.mlp_dim, "n_routed_experts": experts.count, "n_shared_experts": 1,
        "num_experts_per_tok": experts.per_token, "scoring_func": experts.scores, "norm_topk_prob": True,
        "routed_scaling_factor": experts.scale, "swiglu_limit": experts.limit, "hc_mult": streams.count,
        "hc_sinkhorn_iters": streams.iterations, "hc_eps": streams.eps,
    }  # fmt: skip
    del fields["intermediate_size"]  # another name of moe_intermediate_size
    return fields


FAMILY = Family(
    parse=parse, render=render, architectures=("DeepseekV4ForCausalLM",), tensors=TENSORS, name_tensor=name_tensor,
    repack=split_experts,
)  # fmt: skip
