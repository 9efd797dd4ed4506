"""Several residual streams that each part of a block reads, writes and mixes (hyper-connections: DeepSeek V4)."""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxkv.models.blocks.block import Block
from jaxkv.models.blocks.block_tokens import NOTHING, BlockTokens
from jaxkv.models.blocks.norms import normalize
from jaxkv.models.config import DecoderConfig, HyperConfig


class Mixture(NamedTuple):
    """How a part's output returns to N streams, in float32."""

    write: jax.Array  # [N, ...]: factor of the output in each stream
    carry: jax.Array  # [N, N, ...]: from each stream to each


class StreamReader(nnx.Module):
    """Computes weights of a token from its N streams together, `mix [W, N * E]`, `base [W]` and `scale`, and reads the
    streams by the first N of them. All of it is in float32."""

    def __init__(
        self, config: DecoderConfig, streams: HyperConfig, weights: int, scales: int, dtype: Any, rngs: nnx.Rngs
    ):
        init, inputs = nnx.initializers.lecun_normal(in_axis=-1, out_axis=-2), streams.count * config.embed_dim
        self.streams, self.norm_eps = streams, config.norm_eps
        self.mix = nnx.Param(init(rngs.params(), (weights, inputs), dtype))
        self.base, self.scale = nnx.Param(jnp.zeros((weights,), dtype)), nnx.Param(jnp.ones((scales,), dtype))

    def weigh(self, x: jax.Array) -> jax.Array:
        """Returns `f32[..., W]` of streams `[N, ..., E]`, before `scale` and `base`."""
        flat = jnp.moveaxis(x, 0, -2).reshape(*x.shape[1:-1], -1).astype(jnp.float32)
        weights = self.mix[...].astype(jnp.float32)
        return jnp.einsum("...i,wi->...w", normalize(flat, eps=self.norm_eps), weights, precision="highest")

    def read(self, x: jax.Array, weights: jax.Array) -> jax.Array:
        """Returns the sum `[..., E]` of streams, each times a sigmoid of its weight `[..., N]`."""
        shares = jnp.moveaxis(jax.nn.sigmoid(weights) + self.streams.eps, -1, 0)
        return (shares[..., None] * x.astype(jnp.float32)).sum(axis=0).astype(x.dtype)


class HyperStreams(StreamReader):
    """Makes N streams of embeddings, and one of the last layer's."""

    def __init__(self, config: DecoderConfig, streams: HyperConfig, dtype: Any, rngs: nnx.Rngs):
        super().__init__(config, streams, streams.count, 1, dtype, rngs)

    def split(self, x: jax.Array) -> jax.Array:
        """Returns `[N, ..., E]`: N times x."""
        return jnp.broadcast_to(x, (self.streams.count, *x.shape))

    def join(self, streams: jax.Array) -> jax.Array:
        weights = self.weigh(streams)
        return self.read(streams, add_base(weights * self.scale[...].astype(jnp.float32)[0], self.base[...]))


class HyperConnection(StreamReader):
    """What connects a part of a block to N streams; W are the weights to read, to write and to mix them."""

    def __init__(self, config: DecoderConfig, streams: HyperConfig, dtype: Any, rngs: nnx.Rngs):
        super().__init__(config, streams, streams.num_weights, 3, dtype, rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, Mixture]:
        """Returns the part's input `[..., E]`, of streams `[N, ..., E]`, and how its output returns to them."""
        count = self.streams.count
        read, write, carry = self._scale(self.weigh(x))
        carry = jax.nn.softmax(carry.reshape(*carry.shape[:-1], count, count), axis=-1) + self.streams.eps
        carry = make_doubly_stochastic(carry, self.streams.iterations, self.streams.eps)
        write = jnp.moveaxis(2 * jax.nn.sigmoid(write), -1, 0)
        return self.read(x, read), Mixture(write, jnp.moveaxis(carry, (-2, -1), (0, 1)))

    def _scale(self, weights: jax.Array) -> Iterator[jax.Array]:
        """Returns the weights to read, to write and to mix streams, each times its scale."""
        count, scale = self.streams.count, self.scale[...].astype(jnp.float32)
        ends = (count, 2 * count)
        parts = zip(jnp.split(weights, ends, axis=-1), jnp.split(self.base[...], ends), scale, strict=True)
        return (add_base(part * factor, base) for part, base, factor in parts)


def add_base(weights: jax.Array, base: jax.Array) -> jax.Array:
    return weights + jnp.expand_dims(base.astype(jnp.float32), tuple(range(weights.ndim - 1)))


@functools.partial(jax.jit, static_argnums=(1, 2))  # traced once for all layers
def make_doubly_stochastic(x: jax.Array, iterations: int, eps: float) -> jax.Array:
    """Divides matrices `[..., N, N]` by the sums of their columns, then of their rows and columns in turn: Sinkhorn and
    Knopp's algorithm, of which each iteration ends with the columns."""

    def divide(x: jax.Array, axis: int) -> jax.Array:
        return x / (x.sum(axis=axis, keepdims=True) + eps)

    x = divide(x, -2)
    return jax.lax.fori_loop(0, iterations - 1, lambda i, x: divide(divide(x, -1), -2), x)


def mix(x: jax.Array, y: jax.Array, mixture: Mixture) -> jax.Array:
    """Returns streams `[N, ..., E]` mixed among themselves, plus a part's output `[..., E]`."""
    wide = x.astype(jnp.float32)
    carried = (mixture.carry[i][..., None] * wide[i][None] for i in range(x.shape[0]))
    return sum(carried, mixture.write[..., None] * y.astype(jnp.float32)[None]).astype(x.dtype)


class HyperBlock(Block):
    """A block of N residual streams `[N, ..., E]`, each part of which has a connection to them."""

    def __init__(self, config: DecoderConfig, layer: int, dtype: Any, rngs: nnx.Rngs):
        super().__init__(config, layer, dtype, rngs)
        assert isinstance(config.streams, HyperConfig)
        self.attention_connection, self.mlp_connection = (
            HyperConnection(config, config.streams, dtype, rngs) for _ in range(2)
        )

    def inputs(self, x: jax.Array, positions: jax.Array) -> tuple:
        with jax.named_scope("streams"):
            read, mixture = self.attention_connection(x)
        return super().inputs(read, positions), mixture

    def attend(self, inputs: tuple, *args: Any) -> tuple:
        y, cache = super().attend(inputs[0], *args)
        return (y, inputs[1]), cache

    def output(self, x: jax.Array, outputs: tuple, tokens: BlockTokens = NOTHING) -> jax.Array:
        outputs, mixture = outputs
        y = functools.reduce(jnp.add, self.part_outputs(outputs))
        with jax.named_scope("streams"):
            x = mix(x, y, mixture)
            read, mixture = self.mlp_connection(x)
        y = self.mlp_output(read, tokens)
        with jax.named_scope("streams"):
            return mix(x, y, mixture)
