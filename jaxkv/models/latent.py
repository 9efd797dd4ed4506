"""Latent attention (MLA): one short row a token determines all heads' keys and values; the cache keeps the rows."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxkv._core.attention.plan import Step
from jaxkv._layers import attend_or_dense
from jaxkv._products import product_by_heads
from jaxkv.models.blocks.indexer import ChosenTokens, Indexer, mask_chosen
from jaxkv.models.config import DecoderConfig, LatentConfig
from jaxkv.models.layers import norm_weight, rms_norm
from jaxkv.models.rope import Rope
from jaxkv.nnx import project
from pallas_kernels.common.xla_cpu import side_by_side

NORM_EPS = 1e-6  # of the inner norms, independent of the model's other norms


class LatentAttention(nnx.Module):
    """The attention of DeepSeek-V2 (https://arxiv.org/abs/2405.04434), always absorbed: the key up-projection applies
    to queries, and the value up-projection to outputs, so that no head's keys or values are ever computed.

    Shapes: E inputs, H heads, C the rank of rows, N and R the unrotated and rotated entries of a head's key, V the
    entries of its value. `key_down [C + R, E]`, `key_up [H, N, C]`, `value_up [H, V, C]`, `out [H, V, E]`;
    `query [H, N + R, E]`, or where queries have a rank Q `query_down [Q, E]` and `query_up [H, N + R, Q]`.
    """

    def __init__(
        self,
        config: DecoderConfig,
        latent: LatentConfig,
        rope: Rope,
        dtype: Any,
        rngs: nnx.Rngs,
        has_indexer: bool = False,
    ):
        def kernel(num_inputs: int, num_outputs: int) -> jax.Array:
            return nnx.initializers.lecun_normal()(rngs.params(), (num_inputs, num_outputs), dtype)

        def weight(num_inputs: int, *outputs: int) -> nnx.Param:
            return nnx.Param(kernel(num_inputs, math.prod(outputs)).T.reshape(*outputs, num_inputs))

        def zeros(size: int) -> nnx.Param | None:
            return nnx.Param(jnp.zeros((size,), dtype)) if config.out_bias else None

        embed_dim, heads, rank = config.embed_dim, config.num_heads, latent.rank
        key_dim = latent.nope_dim + latent.rope_dim
        self.config, self.latent, self.rope = config, latent, rope
        query_rank = latent.query_rank
        self.query = weight(embed_dim, heads, key_dim) if query_rank is None else None
        self.query_down = weight(embed_dim, query_rank) if query_rank else None
        self.query_down_bias = zeros(query_rank) if query_rank else None
        self.query_norm = norm_weight(config, query_rank, dtype) if query_rank else None
        self.query_up = weight(query_rank, heads, key_dim) if query_rank else None
        self.key_down, self.key_down_bias = weight(embed_dim, latent.width), zeros(latent.width)
        self.key_norm = norm_weight(config, rank, dtype)
        self.key_up, self.value_up = weight(rank, heads, latent.nope_dim), weight(rank, heads, latent.value_dim)
        out = kernel(heads * latent.value_dim, embed_dim)
        self.out = nnx.Param(out.reshape(heads, latent.value_dim, embed_dim))
        self.out_bias = zeros(embed_dim)
        index = config.index if has_indexer else None
        self.indexer = None if index is None else Indexer(index, latent, embed_dim, rope, dtype, rngs)

    def __call__(
        self, x: jax.Array, cache: Any = None, *, layer: Any = 0, positions: jax.Array, step: Step | None = None
    ) -> tuple[jax.Array, Any]:
        """Attends as `jaxkv.nnx.Attention` does, in the same three steps."""
        y, cache = self.attend(self.inputs(x, positions), cache, layer, step)
        return self.output(y), cache

    def inputs(self, x: jax.Array, positions: jax.Array) -> tuple:
        latent, compressed = self.latent, self._compressed_queries(x)
        index = None if self.indexer is None else self.indexer.inputs(x, compressed, positions)
        q = self._queries(x, compressed)
        row = project("...e,re->...r", x, self.key_down, self.key_down_bias)
        rotated_q, rotated_k = self.rope(q[..., latent.nope_dim :], row[..., None, latent.rank :], positions)
        key = rms_norm(row[..., : latent.rank], self.key_norm, self.config, NORM_EPS)[..., None, :]
        rest = self.rope.heat(q[..., : latent.nope_dim], positions)
        absorbed = product_by_heads(rest, self.key_up[...].astype(x.dtype), outputs_first=False)
        return side_by_side(absorbed, rotated_q), side_by_side(key, rotated_k), key, index

    def attend(
        self, inputs: tuple, cache: Any, layer: Any, step: Step | None, deterministic: bool = False
    ) -> tuple[jax.Array, Any]:
        q, k, key, index = inputs
        chosen: Any = ChosenTokens(cache, None)
        if isinstance(cache, ChosenTokens):
            cache, chosen = cache.cache, cache
            if self.indexer is not None:
                cache, tokens = self.indexer.choose(index, cache, layer, step)
                chosen = ChosenTokens(cache, tokens)
        options: dict[str, Any] = {"scale": self.config.attention_scale, "deterministic": deterministic}
        if chosen.tokens is not None:
            options |= {"mask": mask_chosen(chosen.tokens)} if cache is None else {"tokens": chosen.tokens}
        v = key if cache is None else None  # in a cache the values are part of the keys
        out, after = attend_or_dense(q, k, v, cache, layer, step, **options)
        return out, after if self.config.index is None else chosen._replace(cache=after)

    def output(self, y: jax.Array) -> jax.Array:
        y = product_by_heads(y, self.value_up[...].astype(y.dtype), outputs_first=True)
        return project("...hv,hve->...e", y, self.out, self.out_bias)

    def _compressed_queries(self, x: jax.Array) -> jax.Array:
        """Computes the queries before their up-projection; x itself where they have none."""
        if self.query_down is None:
            return x
        assert self.query_norm is not None
        y = project("...e,qe->...q", x, self.query_down, self.query_down_bias)
        return rms_norm(y, self.query_norm, self.config, NORM_EPS)

    def _queries(self, x: jax.Array, compressed: jax.Array) -> jax.Array:
        if self.query is not None:
            return project("...e,hde->...hd", x, self.query)
        assert self.query_up is not None
        return project("...q,hdq->...hd", compressed, self.query_up)
