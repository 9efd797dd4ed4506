"""Attention to chosen tokens: an indexer of its own, or what an earlier layer's has chosen."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxkv._core.attention.index import choose_tokens, write_index
from jaxkv._core.attention.plan import Step
from jaxkv.models.blocks.part_configs import IndexConfig, LatentConfig
from jaxkv.models.rope import Rope
from jaxkv.nnx import project
from pallas_kernels.common.xla_cpu import side_by_side

NORM_EPS = 1e-6  # of the keys' norm


class ChosenTokens(NamedTuple):
    """What goes from layer to layer in place of the cache: the cache, and the tokens that were chosen last."""

    cache: Any  # None: whole sequences are attended densely
    tokens: jax.Array | None  # i32[S, T, n] or i32[N, n]; None: all


class IndexInputs(NamedTuple):
    """What an indexer makes of the step's tokens."""

    q: jax.Array  # [.., heads, dim]
    weights: jax.Array  # f32[.., heads]
    k: jax.Array  # [.., dim]


class Indexer(nnx.Module):
    """The indexer of DeepSeek sparse attention (https://arxiv.org/abs/2512.02556): scores every earlier token.

    Shapes: E inputs, Q the rank of compressed queries. `query [heads, dim, Q]`, `key [dim, E]`, `weights [heads, E]`;
    keys have a layer norm, `key_norm` and `key_norm_bias [dim]`.
    """

    def __init__(
        self, index: IndexConfig, latent: LatentConfig, embed_dim: int, rope: Rope, dtype: Any, rngs: nnx.Rngs
    ):
        def weight(num_inputs: int, *outputs: int) -> nnx.Param:
            init = nnx.initializers.lecun_normal(in_axis=-1, out_axis=-2)
            return nnx.Param(init(rngs.params(), (*outputs, num_inputs), dtype))

        assert latent.query_rank is not None
        self.index, self.rope_dim = index, latent.rope_dim
        self.rope = dataclasses.replace(rope, interleaved=index.interleaved)
        self.query = weight(latent.query_rank, index.heads, index.dim)
        self.key, self.weights = weight(embed_dim, index.dim), weight(embed_dim, index.heads)
        self.key_norm = nnx.Param(jnp.ones((index.dim,), dtype))
        self.key_norm_bias = nnx.Param(jnp.zeros((index.dim,), dtype))

    def inputs(self, x: jax.Array, queries: jax.Array, positions: jax.Array) -> IndexInputs:
        """Computes queries, weights and keys of tokens.

        Args:
          x: the layer's inputs, `[.., E]`; queries: its compressed queries, `[.., Q]`.
        """
        index, size = self.index, self.rope_dim
        q = project("...q,hdq->...hd", queries, self.query)
        k = self._norm(project("...e,de->...d", x, self.key))[..., None, :]
        rotated_q, rotated_k = self.rope(q[..., :size], k[..., :size], positions)
        if index.dim > size:
            rotated_q, rotated_k = side_by_side(rotated_q, q[..., size:]), side_by_side(rotated_k, k[..., size:])
        weights = project("...e,he->...h", x, self.weights).astype(jnp.float32) * (index.heads * index.dim) ** -0.5
        return IndexInputs(rotated_q, weights, rotated_k[..., 0, :])

    def choose(self, inputs: IndexInputs, cache: Any, layer: Any, step: Step | None) -> tuple[Any, jax.Array | None]:
        """Stores the step's index keys and returns the cache, and the chosen tokens; None: all, where a row cannot hold
        more than `top_k`."""
        q, weights, k = inputs
        if cache is None:
            count = q.shape[-3]
            is_seen = jnp.tril(jnp.ones((count, count), bool)).reshape((1,) * (q.ndim - 3) + (count, count))
            return None, choose_densely(inputs, is_seen, self.index.top_k) if count > self.index.top_k else None
        cache = write_index(cache, k, layer=layer, step=step)
        if cache.config.max_seq_len <= self.index.top_k:
            return cache, None
        found, _ = choose_tokens(cache, layer=layer, q=q, weights=weights, top_k=self.index.top_k, step=step)
        return cache, found

    def _norm(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        wide = wide - wide.mean(axis=-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(jnp.square(wide).mean(axis=-1, keepdims=True) + NORM_EPS)
        shape = (1,) * (x.ndim - 1) + (-1,)
        scale, bias = (p[...].astype(jnp.float32).reshape(shape) for p in (self.key_norm, self.key_norm_bias))
        return (wide * scale + bias).astype(x.dtype)


def choose_densely(inputs: IndexInputs, is_seen: jax.Array, top_k: int) -> jax.Array:
    """Returns the keys that tokens of whole sequences choose, `i32[.., T, top_k]`, of those that they see, `bool[.., T,
    C]`; -1 where there are fewer."""
    q, weights, k = (x.astype(jnp.float32) for x in inputs)
    products = jnp.einsum("...qhd,...cd->...qhc", q, k, precision="highest")
    score = jnp.sum(weights[..., None] * jnp.maximum(products, 0.0), axis=-2)
    best, tokens = jax.lax.top_k(jnp.where(is_seen, score, -jnp.inf), top_k)
    return jnp.where(jnp.isneginf(best), -1, tokens)


def mask_chosen(tokens: jax.Array, count: int | None = None) -> jax.Array:
    """Returns `bool[.., T, C]`: which of so many keys, by default of T, the tokens of whole sequences have chosen."""
    *front, num_tokens, _ = tokens.shape
    count = num_tokens if count is None else count
    flat = tokens.reshape(-1, tokens.shape[-1])
    row = jnp.arange(flat.shape[0], dtype=jnp.int32)[:, None]
    at = jnp.where(flat < 0, count, flat)
    return jnp.zeros((flat.shape[0], count), bool).at[row, at].set(True, mode="drop").reshape(*front, num_tokens, count)
