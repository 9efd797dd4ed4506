"""A decoder as Flax's own examples write it: `nnx.MultiHeadAttention` with `decode=True`, whose cache is made by
`init_cache`, holds one index for the whole batch, and takes one token a row at a time."""

import dataclasses

import jax.numpy as jnp
from flax import nnx


@dataclasses.dataclass(frozen=True)
class Config:
    vocab_size: int = 61
    width: int = 32
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8


class AddPositions(nnx.Module):
    """Sinusoids, from where the rows are."""

    def __init__(self, width: int):
        self.width = width

    def __call__(self, x, positions):
        half = self.width // 2
        angles = positions[..., None].astype(jnp.float32) * jnp.exp(-9.2 * jnp.arange(half) / half)[None, None]
        return x + 0.1 * jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


class DecoderBlock(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.norm1 = nnx.LayerNorm(config.width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            config.num_heads,
            config.width,
            config.num_heads * config.head_dim,
            num_kv_heads=config.num_kv_heads,
            use_bias=False,
            decode=True,
            rngs=rngs,
        )
        self.norm2 = nnx.LayerNorm(config.width, rngs=rngs)
        self.mlp1 = nnx.Linear(config.width, 2 * config.width, rngs=rngs)
        self.mlp2 = nnx.Linear(2 * config.width, config.width, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp2(nnx.relu(self.mlp1(self.norm2(x))))


class Decoder(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.config = config
        self.embed = nnx.Embed(config.vocab_size, config.width, rngs=rngs)
        self.add_positions = AddPositions(config.width)
        self.position = nnx.Cache(jnp.zeros((), jnp.int32))
        self.blocks = nnx.List([DecoderBlock(config, rngs) for _ in range(config.num_layers)])
        self.norm = nnx.LayerNorm(config.width, rngs=rngs)

    def init_cache(self, batch: int, places: int):
        self.position[...] = jnp.zeros((), jnp.int32)
        for block in self.blocks:
            block.attention.init_cache((batch, places, self.config.width))

    def __call__(self, tokens):
        x = self.add_positions(self.embed(tokens), jnp.full(tokens.shape, self.position[...]))
        self.position[...] += 1
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(self.norm(x))


def make(config: Config):
    return Decoder(config, nnx.Rngs(0))


def step(model, tokens):
    return jnp.argmax(model(tokens)[:, -1], axis=-1).astype(jnp.int32)


def generate(model, config: Config, tokens, steps: int):
    """Greedy: prompts of one length, token by token, then what follows them."""
    model.init_cache(tokens.shape[0], tokens.shape[1] + steps)
    run = nnx.jit(step, donate_argnames="model")
    for t in range(tokens.shape[1]):
        chosen = [run(model, tokens[:, t : t + 1])]
    for _ in range(steps - 1):
        chosen.append(run(model, chosen[-1][:, None]))
    return jnp.stack(chosen, axis=1)
