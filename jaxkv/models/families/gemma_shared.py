"""What Gemma 3n and 4 have in common: unscaled logits, layers that read another's keys, embeddings for each layer."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxkv._core.config.layer_config import LayerConfig
from jaxkv.models.checkpoint_formats import LAYER
from jaxkv.models.config import DecoderConfig, PerLayerConfig
from jaxkv.models.config_fields import MOST_DIM, Fields
from jaxkv.models.families import family
from jaxkv.models.families.postnorm import gemma2
from jaxkv.models.families.postnorm.gemma2 import ACTIVATION

TENSORS = gemma2.TENSORS | {
    "layer_embed.embed": "model.embed_tokens_per_layer.weight",
    "layer_embed.project": "model.per_layer_model_projection.weight",
    "layer_embed.norm": "model.per_layer_projection_norm.weight",
    "per_layer.gate": "per_layer_input_gate.weight",
    "per_layer.out": "per_layer_projection.weight",
    "per_layer.norm": "post_per_layer_input_norm.weight",
}
UNUSED = ("k_proj", "v_proj", "k_norm", "v_norm")  # published for layers that read those of another too


def read_common(fields: Fields, *, num_kv_heads: int, logit_soft_cap: float | None = None) -> dict[str, Any]:
    """Reads the fields common to Gemma 3n and 4, as arguments of `DecoderConfig`."""
    common = family.read_common(
        fields, num_kv_heads=(num_kv_heads,), head_dim=256, tied=True,
        activation=(ACTIVATION, "gelu_pytorch_tanh"),
    )  # fmt: skip
    has_bias = fields.flag("attention_bias", False)
    return common | dict(
        attention_scale=1.0, post_norms=True, qk_norm=True, value_norm=True, qkv_bias=has_bias, out_bias=has_bias,
        embed_scale=common["embed_dim"] ** 0.5,
        logit_soft_cap=fields.number("final_logit_softcapping", logit_soft_cap, None, above=0),
    )  # fmt: skip


def share_layers(fields: Fields, layers: list[LayerConfig], default: int = 0) -> tuple[LayerConfig, ...]:
    """Lets the last layers read the keys and values of the last layer before them that has their window."""
    count = fields.size("num_kv_shared_layers", default, least=0)
    own, readers = layers[: max(len(layers) - count, 0)], layers[max(len(layers) - count, 0) :]
    last = {layer.window: i for i, layer in enumerate(own)}
    if missing := {layer.window for layer in readers} - last.keys():
        raise fields.refuse("num_kv_shared_layers", count, f"it only with a layer of window {missing.pop()} before")
    return (*own, *(dataclasses.replace(layer, shares_with=last[layer.window]) for layer in readers))


def read_per_layer(fields: Fields) -> PerLayerConfig | None:
    """Reads the embeddings of each layer's own."""
    dim = fields.size("hidden_size_per_layer_input", 256, None, least=0, most=MOST_DIM)
    vocab_size = fields.size("vocab_size_per_layer_input", 262_144)
    return PerLayerConfig(dim=dim, vocab_size=vocab_size) if dim else None


def render_common(config: DecoderConfig) -> dict[str, Any]:
    """Writes the fields that the readers above read, and the rotary embeddings."""
    own = config.per_layer
    common = family.render_common(config, activation=ACTIVATION) | family.render_windows(config)
    return common | family.render_ropes(config) | {
        "attention_bias": config.out_bias, "final_logit_softcapping": config.logit_soft_cap,
        "num_kv_shared_layers": sum(layer.shares_with is not None for layer in config.layers),
        "hidden_size_per_layer_input": own.dim if own else 0,
        "vocab_size_per_layer_input": own.vocab_size if own else config.vocab_size,
    }  # fmt: skip


def name_tensor(name: str, config: Mapping[str, Any]) -> str | None:
    """Returns the name itself; None for projections of keys and values in layers that read another's."""
    found, layers, readers = LAYER.match(name), config.get("num_hidden_layers"), config.get("num_kv_shared_layers", 0)
    if found is None or not isinstance(layers, int) or not isinstance(readers, int) or int(found[1]) < layers - readers:
        return name
    return None if any(f"self_attn.{unused}." in name for unused in UNUSED) else name
