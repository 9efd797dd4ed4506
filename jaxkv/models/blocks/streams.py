"""Several residual streams, of which a block computes one and predicts the others (AltUp, with LAuReL: Gemma 3n)."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxkv.models.blocks.block import Block
from jaxkv.models.blocks.block_tokens import NOTHING, BlockTokens
from jaxkv.models.config import DecoderConfig, StreamsConfig
from jaxkv.models.layers import norm_weight, rms_norm
from jaxkv.nnx import project


def weight(rngs: nnx.Rngs, dtype: Any, *shape: int) -> nnx.Param:
    """Makes a matrix `[..., outputs, inputs]`."""
    return nnx.Param(nnx.initializers.lecun_normal(in_axis=-1, out_axis=-2)(rngs.params(), shape, dtype))


class Streams(nnx.Module):
    """Makes N streams of embeddings, and one of the last layer's: `project` and `merge` `[N - 1, E, E]`."""

    def __init__(self, config: DecoderConfig, streams: StreamsConfig, dtype: Any, rngs: nnx.Rngs):
        shape = (streams.count - 1, config.embed_dim, config.embed_dim)
        self.project, self.merge = weight(rngs, dtype, *shape), weight(rngs, dtype, *shape)

    def split(self, x: jax.Array) -> jax.Array:
        """Returns `[N, ..., E]`: x and its projections, of x's magnitude."""
        others = [_match(project("...e,fe->...f", x, kernel), x) for kernel in _each(self.project)]
        return jnp.stack([x, *others])

    def join(self, streams: jax.Array) -> jax.Array:
        """Returns the mean of the first stream and of projections of the others, of its magnitude."""
        pairs = zip(_each(self.merge), streams[1:], strict=True)
        others = [_match(project("...e,fe->...f", x, kernel), streams[0]) for kernel, x in pairs]
        return jnp.stack([streams[0], *others]).mean(axis=0)


class StreamsBlock(Block):
    """A block of N residual streams `[N, ..., E]`. `router [N, E]`, `predict [N * N, N]`, `correct [N, N]`; `left` and
    `right` are the two factors of the map beside attention."""

    def __init__(self, config: DecoderConfig, layer: int, dtype: Any, rngs: nnx.Rngs):
        super().__init__(config, layer, dtype, rngs)
        assert isinstance(config.streams, StreamsConfig)
        streams, embed_dim = config.streams, config.embed_dim
        count, self.streams = streams.count, streams
        self.router, self.router_norm = weight(rngs, dtype, count, embed_dim), norm_weight(config, embed_dim, dtype)
        self.predict, self.correct = weight(rngs, dtype, count**2, count), weight(rngs, dtype, count, count)
        self.active_scale = nnx.Param(jnp.ones((embed_dim,), dtype)) if streams.scales else None
        self.left, self.right = (
            weight(rngs, dtype, streams.rank, embed_dim),
            weight(rngs, dtype, embed_dim, streams.rank),
        )
        self.low_rank_norm = norm_weight(config, embed_dim, dtype)

    def inputs(self, x: jax.Array, positions: jax.Array) -> tuple:
        with jax.named_scope("streams"):
            mix = project("...n,mn->...m", self._route(x[self.streams.active]), self.predict)
            mix = mix.reshape(*mix.shape[:-1], self.streams.count, self.streams.count)
            x = x + jnp.einsum("...ji,i...e->j...e", mix, x)  # what each stream will be
        return super().inputs(x[self.streams.active], positions), x

    def attend(self, inputs: tuple, *args: Any) -> tuple:
        y, cache = super().attend(inputs[0], *args)
        return (y, inputs[1]), cache

    def output(self, x: jax.Array, outputs: tuple, tokens: BlockTokens = NOTHING) -> jax.Array:
        outputs, predicted = outputs
        before = predicted[self.streams.active]
        y = self.add_parts(before, outputs) + self._low_rank(self._norm(before, self.attention_norm))
        y = self.add_mlp(y * jnp.asarray(2**-0.5, y.dtype), tokens)
        with jax.named_scope("streams"):
            share = project("...n,mn->...m", self._route(y), self.correct) + 1
            x = predicted + jnp.moveaxis(share, -1, 0)[..., None] * (y - before)[None]
        if self.per_layer is None or tokens.own is None:
            return x
        with jax.named_scope("per_layer"):
            active = x[self.streams.active]
            scaled = active if self.active_scale is None else active * _expand_scale(self.active_scale, active)
            return jnp.concatenate([x[:1], x[1:] + self.per_layer(scaled, tokens.own)[None]])

    def _route(self, x: jax.Array) -> jax.Array:
        """Returns `[..., N]` of a stream `[..., E]`."""
        normed = rms_norm(x, self.router_norm, self.config) * jnp.asarray(x.shape[-1] ** -1.0, x.dtype)
        return jnp.tanh(project("...e,ne->...n", normed, self.router).astype(jnp.float32)).astype(x.dtype)

    def _low_rank(self, x: jax.Array) -> jax.Array:
        y = project("...r,er->...e", project("...e,re->...r", x, self.left), self.right)
        return x + rms_norm(y, self.low_rank_norm, self.config)


def _each(kernels: nnx.Param) -> list[Any]:
    return [kernels[...][i] for i in range(kernels.shape[0])]


def _match(x: jax.Array, wanted: jax.Array) -> jax.Array:
    """Returns x with the root mean square of `wanted`."""
    size, goal = (jnp.mean(jnp.square(y), axis=-1, keepdims=True) for y in (x, wanted))
    return x * jnp.sqrt(goal) / jnp.sqrt(jnp.maximum(size, jnp.asarray(1e-5, size.dtype)))


def _expand_scale(scale: nnx.Param, x: jax.Array) -> jax.Array:
    return jnp.expand_dims(scale[...].astype(x.dtype), tuple(range(x.ndim - 1)))
