"""A decoder as NNX codebases write it: each layer has a cache of its own that it changes in place, prompts are padded
on the left, and segment ids say what is padding."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx


@dataclasses.dataclass(frozen=True)
class Config:
    vocab_size: int = 61
    width: int = 32
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    theta: float = 10_000.0


class LayerCache(nnx.Module):
    def __init__(self, config: Config, batch: int, places: int):
        shape = (batch, places, config.num_kv_heads, config.head_dim)
        self.k_cache = nnx.Cache(jnp.zeros(shape))
        self.v_cache = nnx.Cache(jnp.zeros(shape))
        self.left_pads = nnx.Cache(jnp.zeros(batch, jnp.int32))
        self.index = nnx.Cache(jnp.zeros((), jnp.int32))


def init_cache(config: Config, batch: int, places: int):
    return nnx.List([LayerCache(config, batch, places) for _ in range(config.num_layers)])


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
        num_tokens = x.shape[1]
        is_pad = (segment_ids == 0).astype(jnp.int32)
        left_pads = cache.left_pads[...] + jnp.where(cache.index[...] == 0, jnp.sum(is_pad, axis=1), 0)
        columns = cache.index[...] + jnp.arange(num_tokens, dtype=jnp.int32)
        positions = columns[None] - left_pads[:, None]
        q, k = rope(q, positions, self.config.theta), rope(k, positions, self.config.theta)
        start = (0, cache.index[...], 0, 0)
        cache.k_cache[...] = jax.lax.dynamic_update_slice(cache.k_cache[...], k, start)
        cache.v_cache[...] = jax.lax.dynamic_update_slice(cache.v_cache[...], v, start)
        places = jnp.arange(cache.k_cache.shape[1], dtype=jnp.int32)
        causal = places[None, None] <= columns[None, :, None]
        held = places[None, None] >= left_pads[:, None, None]
        mask = (causal & held)[:, None]
        out = nnx.dot_product_attention(q, cache.k_cache[...], cache.v_cache[...], mask=mask)
        cache.left_pads[...] = left_pads
        cache.index[...] += num_tokens
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
        for block, layer in zip(self.blocks, cache, strict=True):
            x = block(x, layer, segment_ids)
        return self.embed.attend(self.norm(x))


def make(config: Config):
    return Decoder(config, nnx.Rngs(0))


def step(model, cache, tokens, segment_ids):
    logits = model(tokens, cache, segment_ids)
    return jnp.argmax(logits[:, -1], axis=-1).astype(jnp.int32)


def generate(model, config: Config, tokens, segment_ids, steps: int):
    """Greedy: the prompts, padded on the left, then one token after another."""
    cache = init_cache(config, tokens.shape[0], tokens.shape[1] + steps)
    run = nnx.jit(step, donate_argnames="cache")
    chosen = [run(model, cache, tokens, segment_ids)]
    for _ in range(steps - 1):
        chosen.append(run(model, cache, chosen[-1][:, None], jnp.ones((tokens.shape[0], 1), jnp.int32)))
    return jnp.stack(chosen, axis=1)
