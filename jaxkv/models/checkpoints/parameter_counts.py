"""Counts a decoder's parameters from its configuration alone: Flax, which makes them, takes a second to import."""

import functools
import math
from collections.abc import Callable
from typing import Any

from jax.sharding import AbstractMesh

from jaxkv.models.blocks.part_configs import Shapes
from jaxkv.models.config import DecoderConfig
from jaxkv.models.partition import AXIS, sharding_of


@functools.cache
def count_parameters(config: DecoderConfig, devices: int = 1) -> int:
    """Counts a decoder's parameters on each of `devices` devices, without creating any."""
    mesh = AbstractMesh((devices,), (AXIS,))
    # Layers also differ in window and rotation, which does not change the count.
    experts = config.expert_layers or (False,) * config.num_layers
    blocks = [config.block(i) for i in range(config.num_layers)]
    layers = [_attention_kind(config, i) if block.attention else () for i, block in enumerate(blocks)]
    kinds = list(zip(blocks, layers, experts, strict=True))
    of_kind = {kind: _count(layer_shapes(config, kinds.index(kind)), mesh) for kind in set(kinds)}
    return _count(outer_shapes(config), mesh) + sum(of_kind[kind] for kind in kinds)


def _attention_kind(config: DecoderConfig, layer: int) -> tuple[Any, ...]:
    """Returns what the parameters of attention depend on."""
    kept = config.layers[config.first_layer(layer)]
    return kept.num_kv_heads, kept.head_dim, kept.v_head_dim, kept.shares_with is None, kept.index_dim


def _count(shapes: Shapes, mesh: AbstractMesh) -> int:
    found = {path: shape for path, shape in shapes.items() if shape is not None}
    return sum(math.prod(sharding_of(path, shape, mesh).shard_shape(shape)) for path, shape in found.items())


def outer_shapes(config: DecoderConfig) -> Shapes:
    """Returns the shapes of parameters outside the layers."""
    table, own = (config.vocab_size, config.embed_dim), config.per_layer
    shapes: Shapes = {("embed",): table, ("norm",): (config.embed_dim,)}
    if config.streams is not None:
        outer = config.streams.outer_shapes(config.embed_dim)
        shapes |= {("streams", *path): shape for path, shape in outer.items()}
    if own is not None:
        width = config.num_layers * own.dim
        shapes |= {("layer_embed", "embed"): (own.vocab_size, width), ("layer_embed", "norm"): (own.dim,)}
        shapes |= {("layer_embed", "project"): (width, config.embed_dim)}
    return shapes | {("head",): None if config.tie_embeddings else table}


def layer_shapes(config: DecoderConfig, layer: int) -> Shapes:
    """Returns the shapes of a layer's parameters."""
    block, norm = config.block(layer), (config.embed_dim,)
    before, behind = config.find_norms(layer)
    shapes: Shapes = {
        ("attention_norm",): norm if before and block.num_layers else None,
        ("mlp_norm",): norm if before and block.mlp else None,
        ("attention_post_norm",): norm if behind and block.num_layers else None,
        ("mlp_post_norm",): norm if behind and block.mlp else None,
    }
    if own := config.per_layer:
        gate, out = (own.dim, config.embed_dim), (config.embed_dim, own.dim)
        shapes |= {("per_layer", "gate"): gate, ("per_layer", "out"): out, ("per_layer", "norm"): norm}
    if config.streams is not None:
        shapes |= config.streams.block_shapes(config.embed_dim)
    shapes |= {("scale",): (1,) if config.layer_scale else None}
    if block.attention:
        attention = _find_attention(config)(config, layer)
        shapes |= {("attention", *path): shape for path, shape in attention.items()}
    if block.mixer is not None:
        shapes |= {("mixer", name): shape for name, shape in block.mixer.shapes(config.embed_dim).items()}
    if not block.mlp:
        return shapes
    has_experts, beside = config.experts and config.expert_layers[layer], config.experts and config.experts.beside_mlp
    if not has_experts or beside:
        width = block.mlp_dim or config.mlp_dim
        shapes |= {("mlp", *path): shape for path, shape in _mlp_shapes(config, width).items()}
    if not has_experts:
        return shapes
    shapes |= {("mlp_own_norm",): norm, ("experts_own_norm",): norm} if beside else {}
    return shapes | {("experts", *path): shape for path, shape in _expert_shapes(config, layer).items()}


def _find_attention(config: DecoderConfig) -> Callable[[DecoderConfig, int], Shapes]:
    if config.compressed is not None:
        return _compressed_shapes
    return _attention_shapes if config.latent is None else _latent_shapes


def _compressed_shapes(config: DecoderConfig, layer: int) -> Shapes:
    own, compressor = config.compressed, config.block(layer).compressor
    assert own is not None
    shapes = own.shapes(config.embed_dim, config.num_heads, config.head_dim)
    return (
        shapes if compressor is None else shapes | compressor.shapes(config.embed_dim, config.head_dim, own.query_rank)
    )


def _attention_shapes(config: DecoderConfig, layer: int) -> Shapes:
    width, block, kept = config.embed_dim, config.block(layer), config.layers[config.first_layer(layer)]
    heads = config.count_heads(layer)
    kv_heads, head_dim = kept.num_kv_heads, kept.head_dim
    v_head_dim, stores = kept.v_head_dim or head_dim, kept.shares_with is None
    has_values = stores and not block.values_are_keys
    all_heads, has_norms = config.qk_norm_over == "all_heads", config.qk_norm
    query_norm, key_norm = ((n, head_dim) if all_heads else (head_dim,) for n in (heads, kv_heads))
    bias, by_head = config.qkv_bias, config.attention_gate_by == "head"
    return {
        ("query",): (heads, head_dim, width),
        ("key",): (kv_heads, head_dim, width) if stores else None,
        ("value",): (kv_heads, v_head_dim, width) if has_values else None,
        ("out",): (heads, v_head_dim, width),
        ("gate",): (heads, v_head_dim, width) if config.attention_gate and not by_head else None,
        ("head_gate",): (heads, width) if config.attention_gate and by_head else None,
        ("query_bias",): (heads, head_dim) if bias else None,
        ("key_bias",): (kv_heads, head_dim) if bias and stores else None,
        ("value_bias",): (kv_heads, v_head_dim) if bias and has_values else None,
        ("out_bias",): (width,) if config.out_bias else None,
        ("sinks",): (heads,) if config.has_sinks(layer) else None,
        ("position_fn", "query_norm"): query_norm if has_norms else None,
        ("position_fn", "key_norm"): key_norm if has_norms and stores else None,
    }


def _latent_shapes(config: DecoderConfig, layer: int) -> Shapes:
    assert config.latent is not None
    latent, width, heads, has_bias = config.latent, config.embed_dim, config.num_heads, config.out_bias
    rank, key_dim = latent.query_rank, latent.nope_dim + latent.rope_dim
    return {
        ("query",): None if rank else (heads, key_dim, width),
        ("query_down",): (rank, width) if rank else None,
        ("query_down_bias",): (rank,) if rank and has_bias else None,
        ("query_norm",): (rank,) if rank else None,
        ("query_up",): (heads, key_dim, rank) if rank else None,
        ("key_down",): (latent.width, width),
        ("key_down_bias",): (latent.width,) if has_bias else None,
        ("key_norm",): (latent.rank,),
        ("key_up",): (heads, latent.nope_dim, latent.rank),
        ("value_up",): (heads, latent.value_dim, latent.rank),
        ("out",): (heads, latent.value_dim, width),
        ("out_bias",): (width,) if has_bias else None,
    } | _indexer_shapes(config, layer)


def _indexer_shapes(config: DecoderConfig, layer: int) -> Shapes:
    index, width = config.index, config.embed_dim
    if index is None or config.latent is None or config.layers[config.first_layer(layer)].index_dim is None:
        return {}
    return {
        ("indexer", "query"): (index.heads, index.dim, config.latent.query_rank or width),
        ("indexer", "key"): (index.dim, width),
        ("indexer", "weights"): (index.heads, width),
        ("indexer", "key_norm"): (index.dim,),
        ("indexer", "key_norm_bias"): (index.dim,),
    }


def _mlp_shapes(config: DecoderConfig, mlp_dim: int) -> Shapes:
    width, bias, gated = config.embed_dim, config.mlp_bias, config.gated_mlp
    learns = config.activation == "xielu"
    return {
        ("alpha_p",): (1,) if learns else None,
        ("alpha_n",): (1,) if learns else None,
        ("gate",): (mlp_dim, width) if gated else None,
        ("up",): (mlp_dim, width),
        ("down",): (width, mlp_dim),
        ("gate_bias",): (mlp_dim,) if bias and gated else None,
        ("up_bias",): (mlp_dim,) if bias else None,
        ("down_bias",): (width,) if bias else None,
    }


def _expert_shapes(config: DecoderConfig, layer: int) -> Shapes:
    assert config.experts is not None
    hashes, table = config.block(layer).hash_experts, (config.vocab_size, config.experts.per_token)
    experts, width = config.experts, config.embed_dim
    count, mlp_dim, bias, gated = experts.count, experts.mlp_dim, experts.bias, config.gated_mlp
    inner, latent_dim = experts.latent_dim or width, experts.latent_dim
    shared = _mlp_shapes(config, experts.shared_dim) if experts.shared_dim else {}
    return {
        ("router",): (width, count),
        ("router_bias",): (count,) if bias else None,
        ("choice_bias",): (count,) if experts.choice_bias and not hashes else None,
        ("expert_ids",): table if hashes else None,
        ("shared_gate",): (1, width) if experts.shared_gate else None,
        ("norm",): (width,) if experts.beside_mlp else None,
        ("router_norm",): (width,) if experts.beside_mlp else None,
        ("weight_scale",): (count,) if experts.beside_mlp else None,
        ("post_norm",): (width,) if experts.post_norm else None,
        ("latent_down",): (latent_dim, width) if latent_dim else None,
        ("latent_up",): (width, latent_dim) if latent_dim else None,
        ("gate",): (count, inner, mlp_dim) if gated else None,
        ("up",): (count, inner, mlp_dim),
        ("down",): (count, mlp_dim, inner),
        ("gate_bias",): (count, mlp_dim) if bias and gated else None,
        ("up_bias",): (count, mlp_dim) if bias else None,
        ("down_bias",): (count, inner) if bias else None,
    } | {("shared", *path): shape for path, shape in shared.items()}
