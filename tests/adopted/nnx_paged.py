"""A decoder as NNX codebases write it: each layer has a cache of its own that it changes in place, prompts are padded
on the left, and segment ids say what is padding."""

import dataclasses

import jax.numpy as jnp
from flax import nnx

import jaxkv


@dataclasses.dataclass(frozen=True)
class Config:
    vocab_size: int = 61
    width: int = 32
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    theta: float = 10_000.0


def init_cache(config: Config, batch: int, places: int):
    sizes = dict(num_layers=config.num_layers, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim)
    made_for = jaxkv.CacheConfig.uniform(**sizes, max_seqs=batch, max_seq_len=places, dtype="float32")
    return jaxkv.nnx.CacheVariable(jaxkv.init(made_for))


def rope(x, positions, theta):
    half = x.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions[..., None, None].astype(jnp.float32) * frequencies[None, None, None]
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class Attention(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.config = config
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.q_proj = nnx.LinearGeneral(config.width, (heads, dim), use_bias=False, rngs=rngs)
        self.k_proj = nnx.LinearGeneral(config.width, (kv_heads, dim), use_bias=False, rngs=rngs)
        self.v_proj = nnx.LinearGeneral(config.width, (kv_heads, dim), use_bias=False, rngs=rngs)
        self.o_proj = nnx.LinearGeneral((heads, dim), config.width, axis=(-2, -1), use_bias=False, rngs=rngs)
        self.q_norm = nnx.RMSNorm(dim, rngs=rngs)
        self.k_norm = nnx.RMSNorm(dim, rngs=rngs)

    def __call__(self, x, cache, segment_ids):
        q, k, v = self.q_norm(self.q_proj(x)), self.k_norm(self.k_proj(x)), self.v_proj(x)
        positions = cache.positions(x.shape[:2])
        q, k = rope(q, positions, self.config.theta), rope(k, positions, self.config.theta)
        out = cache.attention(q, k, v)
        return self.o_proj(out)


class Block(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.attn_norm = nnx.RMSNorm(config.width, rngs=rngs)
        self.attn = Attention(config, rngs)
        self.mlp_norm = nnx.RMSNorm(config.width, rngs=rngs)
        self.up = nnx.Linear(config.width, 2 * config.width, rngs=rngs)
        self.down = nnx.Linear(2 * config.width, config.width, rngs=rngs)

    def __call__(self, x, cache, segment_ids):
        x = x + self.attn(self.attn_norm(x), cache, segment_ids)
        return x + self.down(nnx.silu(self.up(self.mlp_norm(x))))


class Decoder(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.embed = nnx.Embed(config.vocab_size, config.width, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.num_layers)])
        self.norm = nnx.RMSNorm(config.width, rngs=rngs)

    def __call__(self, tokens, cache, segment_ids):
        x = self.embed(tokens)
        for block, layer in zip(self.blocks, cache.layers, strict=True):
            x = block(x, layer, segment_ids)
        return self.embed.attend(self.norm(x))


def make(config: Config):
    return Decoder(config, nnx.Rngs(0))


def step(model, cache, tokens, segment_ids):
    counts = jaxkv.counts(segment_ids=segment_ids)
    cache.extend(counts)
    logits = model(jaxkv.left_align(tokens, counts), cache, segment_ids)
    return jnp.argmax(jaxkv.last(logits, counts), axis=-1).astype(jnp.int32)


def generate(model, config: Config, tokens, segment_ids, steps: int):
    """Greedy: the prompts, padded on the left, then one token after another."""
    cache = init_cache(config, tokens.shape[0], tokens.shape[1] + steps)
    run = nnx.jit(step, donate_argnames="cache")
    chosen = [run(model, cache, tokens, segment_ids)]
    for _ in range(steps - 1):
        chosen.append(run(model, cache, chosen[-1][:, None], jnp.ones((tokens.shape[0], 1), jnp.int32)))
    return jnp.stack(chosen, axis=1)
