"""Experts: of many MLPs each token goes through the few that a router chooses for it.

Tokens are sorted by expert, and each product is one over groups of rows, as in MegaBlocks
(https://arxiv.org/abs/2211.15841): no expert has a capacity, and no token is dropped.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxkv.models.config import DecoderConfig, ExpertsConfig
from jaxkv.models.layers import ACTIVATIONS, GatedMLP


class Experts(nnx.Module):
    """What `ExpertsConfig` says, in a block's place for an MLP.

    Weights of all E experts lie in one array each: `gate` and `up [E, M, F]`, `down [E, F, M]`; `router [M, E]`.
    """

    def __init__(self, config: DecoderConfig, experts: ExpertsConfig, dtype: Any, rngs: nnx.Rngs):
        def kernels(*shape: int) -> nnx.Param:
            init = nnx.initializers.lecun_normal(batch_axis=0 if len(shape) == 3 else ())
            return nnx.Param(init(rngs.params(), shape, dtype))

        def zeros(wanted: bool, *shape: int) -> nnx.Param | None:
            return nnx.Param(jnp.zeros(shape, dtype)) if wanted else None

        count, embed_dim, mlp_dim = experts.count, config.embed_dim, experts.mlp_dim
        self.config, self.activation = experts, config.activation
        self.router = kernels(embed_dim, count)
        self.router_bias = zeros(experts.bias, count)
        self.choice_bias = zeros(experts.choice_bias, count)
        self.gate, self.gate_bias = kernels(count, embed_dim, mlp_dim), zeros(experts.bias, count, mlp_dim)
        self.up, self.up_bias = kernels(count, embed_dim, mlp_dim), zeros(experts.bias, count, mlp_dim)
        self.down, self.down_bias = kernels(count, mlp_dim, embed_dim), zeros(experts.bias, count, embed_dim)
        self.shared = GatedMLP(config, experts.shared_dim, dtype, rngs) if experts.shared_dim else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[..., M]` to `[..., M]`."""
        tokens = x.reshape(-1, x.shape[-1])
        chosen, weights = self.route(tokens)  # [N, k]
        by_expert = jnp.argsort(chosen.reshape(-1), stable=True)
        expert = chosen.reshape(-1)[by_expert]
        sizes = jnp.bincount(expert, length=self.config.count).astype(jnp.int32)

        def product(x: jax.Array, kernel: nnx.Param, bias: nnx.Param | None) -> jax.Array:
            y = jax.lax.ragged_dot(x, kernel[...].astype(x.dtype), sizes)
            return y if bias is None else y + bias[...].astype(x.dtype)[expert]

        rows = tokens[by_expert // self.config.per_token]
        hidden = self._gated(product(rows, self.gate, self.gate_bias), product(rows, self.up, self.up_bias))
        out = product(hidden, self.down, self.down_bias)
        out = out[jnp.argsort(by_expert)].reshape(*chosen.shape, x.shape[-1]).astype(jnp.float32)
        y = (out * weights[..., None]).sum(axis=1).astype(x.dtype).reshape(x.shape)
        return y if self.shared is None else y + self.shared(x)

    def route(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Of each of `[N, M]` tokens the chosen experts `i32[N, k]` and their weights `f32[N, k]`."""
        config = self.config
        logits = jnp.einsum("nm,me->ne", tokens.astype(jnp.float32), self.router[...].astype(jnp.float32))
        if self.router_bias is not None:
            logits += self.router_bias[...].astype(jnp.float32)[None]
        if config.scores == "softmax_of_chosen":
            best, chosen = jax.lax.top_k(logits, config.per_token)
            return chosen, jax.nn.softmax(best, axis=-1)
        scores = jax.nn.softmax(logits, axis=-1) if config.scores == "softmax" else jax.nn.sigmoid(logits)
        preferred = scores
        if self.choice_bias is not None:  # it balances the load: it changes who is chosen, not by which weight
            preferred = scores + self.choice_bias[...].astype(jnp.float32)[None]
        _, chosen = jax.lax.top_k(self._within_groups(preferred), config.per_token)
        weights = jnp.take_along_axis(scores, chosen, axis=-1)
        if config.normalise:
            weights /= weights.sum(axis=-1, keepdims=True) + 1e-20
        return chosen, weights * config.scale

    def _within_groups(self, scores: jax.Array) -> jax.Array:
        """-inf for experts outside a token's best groups, which are taken for devices in DeepSeek's papers."""
        config = self.config
        if config.groups == config.groups_per_token:
            return scores
        grouped = scores.reshape(scores.shape[0], config.groups, -1)
        best = jax.lax.top_k(grouped, 2 if config.scores == "sigmoid" else 1)[0].sum(axis=-1)  # [N, groups]
        _, groups = jax.lax.top_k(best, config.groups_per_token)
        allowed = (groups[:, :, None] == jnp.arange(config.groups, dtype=jnp.int32)[None, None]).any(axis=1)
        return jnp.where(allowed[:, :, None], grouped, -jnp.inf).reshape(scores.shape)

    def _gated(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        limit = self.config.limit
        if limit is None:
            return ACTIVATIONS[self.activation](gate) * up
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        return gate * jax.nn.sigmoid(gate * self.config.alpha) * (up + 1)
