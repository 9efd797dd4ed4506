"""Counts a decoder's parameters from its configuration alone: Flax, which makes them, takes a second to import."""

import functools
import math

from jax.sharding import AbstractMesh

from jaxkv.models.config import DecoderConfig
from jaxkv.models.partition import AXIS, sharding_of

Shapes = dict[tuple[str, ...], tuple[int, ...] | None]  # by path as in a `Decoder`; None: there is no such parameter


@functools.cache
def count_parameters(config: DecoderConfig, devices: int = 1) -> int:
    """Counts a decoder's parameters on each of `devices` devices, without creating any."""
    mesh = AbstractMesh((devices,), (AXIS,))
    # Layers also differ in window and rotation, which does not change the count.
    experts = config.expert_layers or (False,) * config.num_layers
    shapes = [(layer.num_kv_heads, layer.head_dim, layer.v_head_dim) for layer in config.layers]
    kinds = list(zip(config.blocks or shapes, experts, strict=True))
    of_kind = {kind: _count(layer_shapes(config, kinds.index(kind)), mesh) for kind in set(kinds)}
    return _count(outer_shapes(config), mesh) + sum(of_kind[kind] for kind in kinds)


def _count(shapes: Shapes, mesh: AbstractMesh) -> int:
    found = {path: shape for path, shape in shapes.items() if shape is not None}
    return sum(math.prod(sharding_of(path, shape, mesh).shard_shape(shape)) for path, shape in found.items())


def outer_shapes(config: DecoderConfig) -> Shapes:
    """Returns the shapes of parameters outside the layers."""
    table = config.vocab_size, config.embed_dim
    return {("embed",): table, ("norm",): (config.embed_dim,), ("head",): None if config.tie_embeddings else table}


def layer_shapes(config: DecoderConfig, layer: int) -> Shapes:
    """Returns the shapes of a layer's parameters."""
    block, norm = config.block(layer), (config.embed_dim,)
    before, behind = config.pre_norms or block.mixer is not None, config.post_norms and block.mixer is None
    shapes: Shapes = {
        ("attention_norm",): norm if before and block.num_layers else None,
        ("mlp_norm",): norm if before and block.mlp else None,
        ("attention_post_norm",): norm if behind and block.num_layers else None,
        ("mlp_post_norm",): norm if behind and block.mlp else None,
    }
    if block.attention:
        attention = _attention_shapes(config, layer) if config.latent is None else _latent_shapes(config)
        shapes |= {("attention", *path): shape for path, shape in attention.items()}
    if block.mixer is not None:
        shapes |= {("mixer", name): shape for name, shape in block.mixer.shapes(config.embed_dim).items()}
    if not block.mlp:
        return shapes
    if config.experts is None or not config.expert_layers[layer]:
        return shapes | {("mlp", *path): shape for path, shape in _mlp_shapes(config, config.mlp_dim).items()}
    return shapes | {("experts", *path): shape for path, shape in _expert_shapes(config).items()}


def _attention_shapes(config: DecoderConfig, layer: int) -> Shapes:
    width, heads = config.embed_dim, config.num_heads
    kept = config.layers[config.first_layer(layer)]
    kv_heads, head_dim = kept.num_kv_heads, kept.head_dim
    v_head_dim = config.layers[layer].v_head_dim or head_dim
    all_heads, has_norms = config.qk_norm_over == "all_heads", config.qk_norm
    query_norm, key_norm = ((n, head_dim) if all_heads else (head_dim,) for n in (heads, kv_heads))
    bias = config.qkv_bias
    return {
        ("query",): (heads, head_dim, width),
        ("key",): (kv_heads, head_dim, width),
        ("value",): (kv_heads, v_head_dim, width),
        ("out",): (heads, v_head_dim, width),
        ("gate",): (heads, v_head_dim, width) if config.attention_gate else None,
        ("query_bias",): (heads, head_dim) if bias else None,
        ("key_bias",): (kv_heads, head_dim) if bias else None,
        ("value_bias",): (kv_heads, v_head_dim) if bias else None,
        ("out_bias",): (width,) if config.out_bias else None,
        ("sinks",): (heads,) if config.sinks else None,
        ("position_fn", "query_norm"): query_norm if has_norms else None,
        ("position_fn", "key_norm"): key_norm if has_norms else None,
    }


def _latent_shapes(config: DecoderConfig) -> Shapes:
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
    }


def _mlp_shapes(config: DecoderConfig, mlp_dim: int) -> Shapes:
    width, bias = config.embed_dim, config.mlp_bias
    return {
        ("gate",): (mlp_dim, width),
        ("up",): (mlp_dim, width),
        ("down",): (width, mlp_dim),
        ("gate_bias",): (mlp_dim,) if bias else None,
        ("up_bias",): (mlp_dim,) if bias else None,
        ("down_bias",): (width,) if bias else None,
    }


def _expert_shapes(config: DecoderConfig) -> Shapes:
    assert config.experts is not None
    experts, width = config.experts, config.embed_dim
    count, mlp_dim, bias = experts.count, experts.mlp_dim, experts.bias
    shared = _mlp_shapes(config, experts.shared_dim) if experts.shared_dim else {}
    return {
        ("router",): (width, count),
        ("router_bias",): (count,) if bias else None,
        ("choice_bias",): (count,) if experts.choice_bias else None,
        ("shared_gate",): (1, width) if experts.shared_gate else None,
        ("gate",): (count, width, mlp_dim),
        ("up",): (count, width, mlp_dim),
        ("down",): (count, mlp_dim, width),
        ("gate_bias",): (count, mlp_dim) if bias else None,
        ("up_bias",): (count, mlp_dim) if bias else None,
        ("down_bias",): (count, width) if bias else None,
    } | {("shared", *path): shape for path, shape in shared.items()}
