"""A decoder as Linen codebases write it: a dictionary of caches goes in and comes back, positions and an attention mask
are the caller's, local layers with a window stand between global ones, and logits are capped."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import linen


@dataclasses.dataclass(frozen=True)
class Config:
    vocab_size: int = 61
    width: int = 32
    num_layers: int = 3
    num_heads: int = 4
    num_kv_heads: int = 1
    head_dim: int = 16
    theta: float = 10_000.0
    window: int = 6
    attn_cap: float = 20.0

    @property
    def windows(self):
        return [self.window if i % 2 == 0 else None for i in range(self.num_layers)]


def init_cache(config: Config, batch: int, places: int):
    shape = (batch, places, config.num_kv_heads, config.head_dim)
    return {
        f"layer_{i}": {"k": jnp.zeros(shape), "v": jnp.zeros(shape), "end": jnp.zeros(batch, jnp.int32)}
        for i in range(config.num_layers)
    }


def rope(x, positions, theta):
    half = x.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions[..., None, None].astype(jnp.float32) * frequencies[None, None, None]
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class Attention(linen.Module):
    config: Config
    window: int | None

    @linen.compact
    def __call__(self, x, positions, cache, attn_mask):
        c = self.config
        project = functools.partial(linen.DenseGeneral, use_bias=False)
        q = project((c.num_heads, c.head_dim), name="q")(x)
        k = project((c.num_kv_heads, c.head_dim), name="k")(x)
        v = project((c.num_kv_heads, c.head_dim), name="v")(x)
        q, k = rope(q, positions, c.theta) * c.head_dim**-0.5, rope(k, positions, c.theta)
        rows, num_tokens = x.shape[0], x.shape[1]
        columns = cache["end"][:, None] + jnp.arange(num_tokens, dtype=jnp.int32)[None]
        row = jnp.arange(rows, dtype=jnp.int32)[:, None]
        num_new = jnp.sum(attn_mask.any(axis=-1), axis=1, dtype=jnp.int32)
        columns = jnp.where(jnp.arange(num_tokens, dtype=jnp.int32)[None] < num_new[:, None], columns, -1)
        columns = jnp.where(columns < 0, cache["k"].shape[1], columns)
        keys = cache["k"].at[row, columns].set(k, mode="drop")
        values = cache["v"].at[row, columns].set(v, mode="drop")
        cache = {"k": keys, "v": values, "end": cache["end"] + num_new}
        grouped = q.reshape(rows, num_tokens, c.num_kv_heads, -1, c.head_dim)
        logits = jnp.einsum("btkgd,bskd->bkgts", grouped, keys)
        logits = jnp.tanh(logits / c.attn_cap) * c.attn_cap
        if self.window is not None:
            places = jnp.arange(keys.shape[1], dtype=jnp.int32)
            attn_mask = attn_mask & (places[None, None] > positions[..., None] - self.window)
        weights = jax.nn.softmax(jnp.where(attn_mask[:, None, None], logits, -1e30), axis=-1)
        encoded = jnp.einsum("bkgts,bskd->btkgd", weights, values).reshape(*q.shape)
        return cache, project(c.width, axis=(-2, -1), name="out")(encoded)


class Block(linen.Module):
    config: Config
    window: int | None

    @linen.compact
    def __call__(self, x, positions, cache, attn_mask):
        attention = Attention(self.config, self.window, name="attn")
        cache, attended = attention(linen.RMSNorm(name="attn_norm")(x), positions, cache, attn_mask)
        x = x + attended
        hidden = linen.gelu(linen.Dense(2 * self.config.width, name="up")(linen.RMSNorm(name="mlp_norm")(x)))
        return cache, x + linen.Dense(self.config.width, name="down")(hidden)


class Transformer(linen.Module):
    config: Config

    @linen.compact
    def __call__(self, tokens, positions, cache, attn_mask):
        embed = linen.Embed(self.config.vocab_size, self.config.width, name="embed")
        x = embed(tokens)
        new_cache = {}
        for i, window in enumerate(self.config.windows):
            name = f"layer_{i}"
            new_cache[name], x = Block(self.config, window, name=name)(x, positions, cache[name], attn_mask)
        return embed.attend(linen.RMSNorm(name="norm")(x)), new_cache


def make(config: Config):
    model, cache = Transformer(config), init_cache(config, 1, 1)
    one = jnp.zeros((1, 1), jnp.int32)
    return model, jax.jit(model.init)(jax.random.key(0), one, one, cache, jnp.ones((1, 1, 1), bool))


def step(model, params, cache, tokens, counts):
    """One step of rows whose first `counts` places hold tokens."""
    places = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    positions = cache["layer_0"]["end"][:, None] + places
    is_token = places < counts[:, None]
    columns = jnp.arange(cache["layer_0"]["k"].shape[1], dtype=jnp.int32)
    attn_mask = (columns[None, None] <= positions[..., None]) & is_token[..., None]
    logits, cache = model.apply(params, tokens, positions, cache, attn_mask)
    last = logits[jnp.arange(tokens.shape[0]), jnp.maximum(counts - 1, 0)]
    return jnp.argmax(last, axis=-1).astype(jnp.int32), cache


def generate(model_and_params, config: Config, tokens, counts, steps: int):
    """Greedy: the prompts, padded on the right, then one token after another."""
    model, params = model_and_params
    run = jax.jit(functools.partial(step, model), donate_argnames="cache")
    cache = init_cache(config, tokens.shape[0], tokens.shape[1] + steps)
    token, cache = run(params, cache=cache, tokens=tokens, counts=counts)
    chosen = [token]
    for _ in range(steps - 1):
        token, cache = run(params, cache=cache, tokens=token[:, None], counts=jnp.ones(tokens.shape[0], jnp.int32))
        chosen.append(token)
    return jnp.stack(chosen, axis=1)
