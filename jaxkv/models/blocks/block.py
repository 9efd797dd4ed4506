"""The blocks of a decoder: attention or a mixer, then an MLP or experts."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxkv._core.attention.plan import Step
from jaxkv._core.cache.cache import Cache
from jaxkv.models.blocks.block_tokens import NOTHING, BlockTokens
from jaxkv.models.blocks.compressed_attention import CompressedAttention
from jaxkv.models.blocks.per_layer import PerLayerGate
from jaxkv.models.blocks.shared_attention import SharedAttention
from jaxkv.models.config import DecoderConfig
from jaxkv.models.experts import Experts
from jaxkv.models.latent import LatentAttention
from jaxkv.models.layers import GatedAttention, GatedMLP, NormedRope, norm_weight, rms_norm, scale
from jaxkv.models.mixers.modules import make_mixer
from jaxkv.nnx import Attention


class Block(nnx.Module):
    """Attention, a mixer that keeps a state, or both side by side; then a gated MLP or experts. Each is added to the
    residual stream."""

    def __init__(self, config: DecoderConfig, layer: int, dtype: Any, rngs: nnx.Rngs):
        own, self.config = config.block(layer), config

        def norm(wanted: bool) -> nnx.Param | None:
            return norm_weight(config, config.embed_dim, dtype) if wanted else None

        before, behind = config.find_norms(layer)
        self.attention_norm = norm(before and own.num_layers > 0)
        self.attention = make_attention(config, layer, dtype, rngs) if own.attention else None
        self.mixer = None if own.mixer is None else make_mixer(config, own.mixer, dtype, rngs)
        self.mlp_norm = norm(before and own.mlp)
        experts = config.experts if config.experts is not None and config.expert_layers[layer] else None
        self.experts = None if experts is None else Experts(config, experts, dtype, rngs, own.hash_experts)
        beside = experts is not None and experts.beside_mlp
        has_mlp, width = (experts is None or beside) and own.mlp, own.mlp_dim or config.mlp_dim
        self.mlp = GatedMLP(config, width, dtype, rngs, own.gate_sparsity) if has_mlp else None
        self.attention_post_norm, self.mlp_post_norm = norm(behind and own.num_layers > 0), norm(behind and own.mlp)
        self.mlp_own_norm, self.experts_own_norm = norm(beside), norm(beside)
        self.per_layer = PerLayerGate(config, config.per_layer, dtype, rngs) if config.per_layer else None
        self.scale = nnx.Param(jnp.ones((1,), dtype)) if config.layer_scale else None

    @property
    def parts(self) -> list[Any]:
        """What the block has before its MLP, in the order of the cache's layers."""
        return [part for part in (self.attention, self.mixer) if part is not None]

    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array,
        cache: Cache | None,
        layers: Sequence[Any],
        step: Step | None,
        deterministic: bool = False,
        tokens: BlockTokens = NOTHING,
    ):
        """Computes the block.

        Args:
          layers: the layers of the cache that `parts` have.
          tokens: what the block reads of the tokens themselves.
        """
        inputs = self.inputs(x, positions)
        with jax.named_scope("attention"):
            y, cache = self.attend(inputs, cache, layers, step, deterministic)
        return self.output(x, y, tokens), cache

    def inputs(self, x: jax.Array, positions: jax.Array) -> tuple:
        """Computes the inputs of attention and of the mixer from the residual stream."""
        with jax.named_scope("attention"):
            x = self._norm(x, self.attention_norm)
            scaled = scale(x, self.config.attention_scales[0])
            return tuple(part.inputs(scaled if part is self.attention else x, positions) for part in self.parts)

    def attend(
        self, inputs: tuple, cache: Cache | None, layers: Sequence[Any], step: Step | None, deterministic: bool = False
    ) -> tuple:
        found = []
        for part, given, layer in zip(self.parts, inputs, self._split_layers(layers), strict=True):
            y, cache = part.attend(given, cache, layer, step, deterministic)
            found.append(y)
        return tuple(found), cache

    def _split_layers(self, layers: Sequence[Any]) -> list[Any]:
        """Returns the cache's layer of each part; a list of them for attention that has several."""
        if not self.parts:
            return []
        count = len(layers) - len(self.parts) + 1
        return [layers[0] if count == 1 else layers[:count], *layers[count:]]

    def output(self, x: jax.Array, outputs: tuple, tokens: BlockTokens = NOTHING) -> jax.Array:
        """Adds the outputs of attention and of the mixer to the residual stream, then the MLP's or the experts'."""
        x = self.add_mlp(self.add_parts(x, outputs), tokens)
        if self.per_layer is not None and tokens.own is not None:
            with jax.named_scope("per_layer"):
                x = x + self.per_layer(x, tokens.own)
        return x if self.scale is None else x * self.scale[...][0]

    def add_parts(self, x: jax.Array, outputs: tuple) -> jax.Array:
        """Adds the outputs of attention and of the mixer to x."""
        for y in self.part_outputs(outputs):
            x = self._add(x, y)
        return x

    def part_outputs(self, outputs: tuple) -> Iterator[jax.Array]:
        """Returns what attention and the mixer add to the residual stream."""
        for part, y in zip(self.parts, outputs, strict=True):
            with jax.named_scope("attention"):
                y = part.output(y)
                y = scale(y, self.config.attention_scales[2]) if part is self.attention else y
                y = self._norm(y, self.attention_post_norm)
            yield y

    def add_mlp(self, x: jax.Array, tokens: BlockTokens = NOTHING) -> jax.Array:
        """Adds the output of the MLP or of the experts to x."""
        return x if self.mlp is None and self.experts is None else self._add(x, self.mlp_output(x, tokens))

    def mlp_output(self, x: jax.Array, tokens: BlockTokens = NOTHING) -> jax.Array:
        """Returns what the MLP or the experts add to the residual stream."""
        with jax.named_scope("mlp"):
            y = self._norm(x, self.mlp_norm)
            if self.mlp is not None and self.experts is not None:
                y = self._norm(self.mlp(y), self.mlp_own_norm)
                y = y + self._norm(self.experts(x, tokens.ids), self.experts_own_norm)
            else:
                y = self.experts(y, tokens.ids) if self.mlp is None else self.mlp(y)  # type: ignore[misc]
            return self._norm(y, self.mlp_post_norm)

    def _norm(self, x: jax.Array, weight: nnx.Param | None) -> jax.Array:
        """Computes a norm that some families leave out: without a weight, returns x."""
        return x if weight is None else rms_norm(x, weight, self.config)

    def _add(self, x: jax.Array, y: jax.Array) -> jax.Array:
        return x + scale(y, self.config.residual_scale)


def make_attention(
    config: DecoderConfig, i: int, dtype: Any, rngs: nnx.Rngs
) -> Attention | LatentAttention | CompressedAttention:
    """Makes a block's attention."""
    rope, kept, own = config.ropes[i], config.layers[config.first_layer(i)], config.block(i)
    num_heads = config.count_heads(i)
    if config.latent is not None:
        return LatentAttention(config, config.latent, rope, dtype, rngs, kept.index_dim is not None)
    if config.compressed is not None:
        return CompressedAttention(config, config.compressed, own.compressor, kept, rope, dtype, rngs)
    by, activation = config.attention_gate_by, config.attention_gate_activation
    kind: Any = functools.partial(GatedAttention, by=by, activation=activation) if config.attention_gate else Attention
    if config.value_norm or kept.shares_with is not None or own.values_are_keys:
        eps = config.norm_eps if config.value_norm else None
        shares: dict[str, Any] = dict(owner=kept.shares_with, values_are_keys=own.values_are_keys)
        kind = functools.partial(SharedAttention, value_eps=eps, **shares)
    return kind(
        config.embed_dim,
        num_heads,
        kept.num_kv_heads,
        kept.head_dim,
        v_head_dim=kept.v_head_dim,
        use_bias=config.qkv_bias,
        use_out_bias=config.out_bias,
        use_sinks=config.has_sinks(i),
        position_fn=NormedRope(config, num_heads, kept, rope, dtype) if config.qk_norm else rope,
        scale=config.attention_scale * config.attention_scales[1],
        soft_cap=config.attention_soft_cap,
        window=kept.window,
        chunk=kept.chunk,
        param_dtype=dtype,
        rngs=rngs,
    )


class OneOf:
    """One of several blocks that differ only in parameters, selected by a loop's index.

    No parameters are copied, unlike slices of stacked parameters. The program holds the products with parameters once
    for each block, and attention once for all.
    """

    __call__ = Block.__call__

    def __init__(self, blocks: list[Block], number: jax.Array):
        self.blocks, self.number = blocks, number

    def inputs(self, *args: jax.Array) -> tuple:
        return jax.lax.switch(self.number, [block.inputs for block in self.blocks], *args)

    def attend(self, *args: Any) -> tuple:
        return self.blocks[0].attend(*args)

    def output(self, *args: Any) -> jax.Array:
        return jax.lax.switch(self.number, [block.output for block in self.blocks], *args)


def stack_blocks(blocks: list[Block]) -> Block:
    """Stacks equal blocks into one, with a leading axis for the blocks in each parameter."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)
