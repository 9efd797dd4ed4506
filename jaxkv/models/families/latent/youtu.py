"""Youtu-LLM: DeepSeek V3's latent attention, an MLP in every layer, and tied embeddings by default."""

import dataclasses
from typing import Any

from jaxkv.models.config import DecoderConfig
from jaxkv.models.config_fields import MOST_LAYERS, Fields
from jaxkv.models.families.family import Family, render_common
from jaxkv.models.families.latent import deepseek
from jaxkv.models.rope_fields import render_rope

# Of experts, which there are none of: DeepSeek V3's reader asks for them.
NONE = {"first_k_dense_replace": MOST_LAYERS, "n_routed_experts": 1, "num_experts_per_tok": 1, "n_group": 1,
        "topk_group": 1}  # fmt: skip


def parse(fields: Fields) -> DecoderConfig:
    fields.must_be("mlp_bias", False)
    fields.take("embedding_initializer_range", None)
    known = {"tie_word_embeddings": True} | fields.left
    fields.left = known | {name: value for name, value in NONE.items() if name not in known}
    found = deepseek.parse(fields)
    if found.experts is not None:
        raise fields.refuse("n_routed_experts", found.experts.count, "no experts")
    return dataclasses.replace(found, family=fields.family)


def render(config: DecoderConfig) -> dict[str, Any]:
    assert config.latent is not None
    return render_common(config) | deepseek.render_latent(config.latent) | {
        "rope_parameters": render_rope(config.ropes[0]), "rope_interleave": config.ropes[0].interleaved,
        "attention_bias": config.out_bias,
    }  # fmt: skip


FAMILY = Family(parse=parse, render=render, architectures=("YoutuForCausalLM",))
