"""The tensors of DeepSeek V4: by the names that transformers writes, and from those of DeepSeek's files and of
transformers' modules to these."""

import re
from collections.abc import Mapping
from typing import Any

from jaxkv.models.families.family import AsStored

CONNECTION = {"mix": "fn", "base": "base", "scale": "scale"}
COMPRESSORS = ("compressor", "indexer.compressor")
TENSORS: dict[str, Any] = {
    "head": "head.weight",
    **{f"streams.{name}": f"model.hc_head.hc_{stored}" for name, stored in CONNECTION.items()},
    **{f"attention_connection.{name}": f"hc_attn_{stored}" for name, stored in CONNECTION.items()},
    **{f"mlp_connection.{name}": f"hc_ffn_{stored}" for name, stored in CONNECTION.items()},
    "attention_norm": "attn_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "attention.query_down": "attn.wq_a.weight",
    "attention.query_norm": "attn.q_norm.weight",
    "attention.query_up": "attn.wq_b.weight",
    "attention.key_down": "attn.wkv.weight",
    "attention.key_norm": "attn.norm.weight",
    "attention.sinks": "attn.attn_sink",
    "attention.out_down": "attn.wo_a.weight",
    "attention.out_up": "attn.wo_b.weight",
    **{f"attention.{own}.{name}": f"attn.{own}.{stored}.weight"
       for own in COMPRESSORS for name, stored in {"key": "wkv", "gate": "wgate", "norm": "norm"}.items()},
    **{f"attention.{own}.position_bias": AsStored(f"attn.{own}.ape") for own in COMPRESSORS},
    "attention.indexer.query": "attn.indexer.wq_b.weight",
    "attention.indexer.weights": "attn.indexer.weights_proj.weight",
    "experts.router": "ffn.gate.weight",
    "experts.choice_bias": "ffn.gate.bias",
    "experts.expert_ids": "ffn.gate.tid2eid",
    **{f"experts.{name}": f"ffn.experts.{{}}.{stored}.weight"
       for name, stored in {"gate": "w1", "up": "w3", "down": "w2"}.items()},
    **{f"experts.shared.{name}": f"ffn.shared_experts.{stored}.weight"
       for name, stored in {"gate": "w1", "up": "w3", "down": "w2"}.items()},
}  # fmt: skip
# From the names of DeepSeek's files, then of transformers' modules, to those that transformers writes.
RENAMED = [
    (re.compile(pattern), name)
    for pattern, name in (
        (r"^(layers|norm)\.", r"model.\1."),
        (r"^embed\.", "model.embed_tokens."),
        (r"^hc_head_", "model.hc_head.hc_"),
        (r"^lm_head\.", "head."),
        (r"\.self_attn\.", ".attn."),
        (r"\.mlp\.", ".ffn."),
        (r"\.compressor\.indexer\.(scorer\.)?(q_b_proj|weights_proj)\.", r".indexer.\2."),
        (r"\.compressor\.indexer\.", ".indexer.compressor."),
        (r"\.indexer\.q_b_proj\.", ".indexer.wq_b."),
        (r"\.(attn|compressor)\.kv_norm\.", r".\1.norm."),
        (r"\.(attn|compressor)\.kv_proj\.", r".\1.wkv."),
        (r"\.compressor\.gate_proj\.", ".compressor.wgate."),
        (r"\.compressor\.position_bias$", ".compressor.ape"),
        (r"\.input_layernorm\.", ".attn_norm."),
        (r"\.post_attention_layernorm\.", ".ffn_norm."),
        (r"\.(attn|ffn)_hc\.(fn|base|scale)$", r".hc_\1_\2"),
        (r"\.attn\.sinks$", ".attn.attn_sink"),
        (r"\.q_a_norm\.", ".q_norm."),
        (r"\.attn\.(q|o)_(a|b)_proj\.", r".attn.w\1_\2."),
        (r"\.e_score_correction_bias$", ".bias"),
        (r"(experts.*)\.gate_proj\.", r"\1.w1."),
        (r"(experts.*)\.down_proj\.", r"\1.w2."),
        (r"(experts.*)\.up_proj\.", r"\1.w3."),
        (r"\.scale$", ".weight_scale_inv"),
    )
]


def name_tensor(name: str, config: Mapping[str, Any]) -> str | None:
    """Returns a tensor's name as transformers writes it; None for one of a layer for multi-token prediction."""
    if re.match(r"(model\.)?mtp\.", name):
        return None
    for pattern, new in RENAMED:
        name = pattern.sub(new, name)
    return name


def split_experts(tensors: dict[str, Any]) -> dict[str, Any]:
    """Returns a checkpoint's tensors with those of all experts taken apart, as modules of transformers have them."""
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        stem, _, kind = name.rpartition(".")
        if not stem.endswith(".ffn.experts") or kind not in ("gate_up_proj", "down_proj") or tensor.ndim != 3:
            found[name] = tensor
            continue
        half = tensor.shape[1] // 2
        slices = {"w2": slice(None)} if kind == "down_proj" else {"w1": slice(half), "w3": slice(half, None)}
        for own, rows in slices.items():
            found |= {f"{stem}.{i}.{own}.weight": expert[rows] for i, expert in enumerate(tensor)}
    return found
