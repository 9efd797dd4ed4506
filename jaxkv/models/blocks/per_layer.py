"""Embeddings of their own for each layer (Gemma 3n and 4): made once from the tokens, added behind each layer."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxkv.models.config import DecoderConfig, PerLayerConfig
from jaxkv.models.layers import ACTIVATIONS, norm_weight, rms_norm
from jaxkv.nnx import project


class PerLayerEmbed(nnx.Module):
    """Makes the embeddings of all L layers, P wide: half of each from a table by the token, half projected from the
    token's embedding. `embed [V, L * P]`, `project [L * P, E]`, `norm [P]`, as in checkpoints."""

    def __init__(self, config: DecoderConfig, own: PerLayerConfig, dtype: Any, rngs: nnx.Rngs):
        init, width = nnx.initializers.lecun_normal(in_axis=-1, out_axis=-2), config.num_layers * own.dim
        self.config, self.own = config, own
        self.embed = nnx.Param(init(rngs.params(), (own.vocab_size, width), dtype))
        self.project = nnx.Param(init(rngs.params(), (width, config.embed_dim), dtype))
        self.norm = norm_weight(config, own.dim, dtype)

    def __call__(self, tokens: jax.Array, x: jax.Array) -> jax.Array:
        """Returns `[..., L, P]` of tokens `[...]` and their embeddings `[..., E]`."""
        shape = (*tokens.shape, self.config.num_layers, self.own.dim)
        known = jnp.where(tokens < self.own.vocab_size, tokens, 0)  # tokens of images have no embeddings here
        own = jnp.take(self.embed[...], known, axis=0, mode="clip").reshape(shape)
        mixed = project("...e,fe->...f", x, self.project) * jnp.asarray(self.config.embed_dim**-0.5, x.dtype)
        mixed = rms_norm(mixed.reshape(shape), self.norm, self.config)
        return (mixed + own * jnp.asarray(self.own.dim**0.5, x.dtype)) * jnp.asarray(2**-0.5, x.dtype)


class PerLayerGate(nnx.Module):
    """Computes what a layer's own embeddings `[..., P]` add to its output `[..., E]`, by a gate of that output."""

    def __init__(self, config: DecoderConfig, own: PerLayerConfig, dtype: Any, rngs: nnx.Rngs):
        init = nnx.initializers.lecun_normal(in_axis=-1, out_axis=-2)
        self.config = config
        self.gate = nnx.Param(init(rngs.params(), (own.dim, config.embed_dim), dtype))
        self.out = nnx.Param(init(rngs.params(), (config.embed_dim, own.dim), dtype))
        self.norm = norm_weight(config, config.embed_dim, dtype)

    def __call__(self, x: jax.Array, own: jax.Array) -> jax.Array:
        gate = ACTIVATIONS[self.config.activation](project("...e,fe->...f", x, self.gate))
        return rms_norm(project("...f,ef->...e", gate * own, self.out), self.norm, self.config)
