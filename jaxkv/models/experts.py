"""Mixture of experts: a router chooses a few of many MLPs for each token.

Tokens are sorted by expert, and each product is a grouped matrix product, as in MegaBlocks
(https://arxiv.org/abs/2211.15841): no expert has a capacity, and no token is dropped.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, PartitionSpec

from jaxkv._core.state.sharding import map_devices
from jaxkv._products import grouped_product
from jaxkv.models.config import DecoderConfig, ExpertsConfig
from jaxkv.models.layers import ACTIVATIONS, GatedMLP, norm_weight, rms_norm
from jaxkv.models.partition import AXIS, mesh_of_weights, sharding_of
from jaxkv.nnx import project


class Experts(nnx.Module):
    """The experts of `ExpertsConfig`, in place of a block's MLP.

    Weights of all E experts are stacked in one array: `gate` and `up [E, M, F]`, `down [E, F, M]`; `router [M, E]`.
    With `latent_down [L, M]` and `latent_up [M, L]`, experts read and write L entries.
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
        width, latent_dim, gated = experts.latent_dim or embed_dim, experts.latent_dim, config.gated_mlp
        self.latent_down = nnx.Param(kernels(embed_dim, latent_dim)[...].T) if latent_dim else None
        self.latent_up = nnx.Param(kernels(latent_dim, embed_dim)[...].T) if latent_dim else None
        self.gate = kernels(count, width, mlp_dim) if gated else None
        self.gate_bias = zeros(experts.bias and gated, count, mlp_dim)
        self.up, self.up_bias = kernels(count, width, mlp_dim), zeros(experts.bias, count, mlp_dim)
        self.down, self.down_bias = kernels(count, mlp_dim, width), zeros(experts.bias, count, width)
        self.shared = GatedMLP(config, experts.shared_dim, dtype, rngs) if experts.shared_dim else None
        self.shared_gate = nnx.Param(kernels(embed_dim, 1)[...].T) if experts.shared_gate else None
        beside, self.decoder = experts.beside_mlp, config
        self.norm, self.router_norm = (norm_weight(config, embed_dim, dtype) if beside else None for _ in range(2))
        self.weight_scale = nnx.Param(jnp.ones((count,), dtype)) if beside else None
        self.post_norm = norm_weight(config, embed_dim, dtype) if experts.post_norm else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[..., M]` to `[..., M]`."""
        tokens = x.reshape(-1, x.shape[-1])
        mesh = mesh_of_weights(self.up[...])
        if mesh is None or self.config.mlp_dim % mesh.shape[AXIS]:
            y, is_complete = self._mix(tokens), self.shared is None
        else:
            y, is_complete = self._mix_on_devices(tokens, mesh), self.shared is None or self._divides_shared(mesh)
        y = y.astype(x.dtype).reshape(x.shape)
        y = y if is_complete else y + self._gated_shared(x)
        return y if self.post_norm is None else rms_norm(y, self.post_norm, self.decoder)

    def _gated_shared(self, x: jax.Array) -> jax.Array:
        """Computes the MLP of all tokens, times its gate where it has one."""
        assert self.shared is not None
        y = self.shared(x)
        return y if self.shared_gate is None else y * jax.nn.sigmoid(project("...e,fe->...f", x, self.shared_gate))

    def _mix(self, tokens: jax.Array, bias: Any = True) -> jax.Array:
        """Computes the weighted sum of the chosen experts, `[N, M]` to `f32[N, M]`. On a device with a shard of the
        experts' widths, the device's term of the sum; `bias` tells whether this device adds the output biases."""
        chosen, weights = self.route(tokens)  # [N, k]
        tokens = tokens if self.norm is None else rms_norm(tokens, self.norm, self.decoder)
        tokens = tokens if self.latent_down is None else project("...e,le->...l", tokens, self.latent_down)
        by_expert = jnp.argsort(chosen.reshape(-1), stable=True)
        expert = chosen.reshape(-1)[by_expert]
        sizes = jnp.bincount(expert, length=self.config.count).astype(jnp.int32)

        def product(x: jax.Array, kernel: nnx.Param, added: nnx.Param | None, is_added: Any = True) -> jax.Array:
            y = grouped_product(x, kernel[...].astype(x.dtype), sizes)
            if added is None:
                return y
            own = added[...].astype(x.dtype)[expert]
            return y + (own if is_added is True else jnp.where(is_added, own, 0))

        rows = tokens[by_expert // self.config.per_token]
        if self.config.weigh_inputs:
            rows, weights = (rows * weights.reshape(-1)[by_expert][:, None]).astype(rows.dtype), jnp.ones_like(weights)
        up = product(rows, self.up, self.up_bias)
        if self.gate is None:
            hidden = ACTIVATIONS[self.activation](up)
        else:
            hidden = self._gate(product(rows, self.gate, self.gate_bias), up)
        out = product(hidden, self.down, self.down_bias, bias)
        out = out[jnp.argsort(by_expert)].reshape(*chosen.shape, tokens.shape[-1]).astype(jnp.float32)
        y = (out * weights[..., None]).sum(axis=1)
        if self.latent_up is None:
            return y
        return project("...l,el->...e", y.astype(tokens.dtype), self.latent_up).astype(jnp.float32)

    def _divides_shared(self, mesh: AbstractMesh) -> bool:
        """Tells whether the shared MLP is sharded too, and summed together with the experts."""
        shared = self.shared
        return shared is not None and shared.down_bias is None and self.config.shared_dim % mesh.shape[AXIS] == 0

    def _mix_on_devices(self, tokens: jax.Array, mesh: AbstractMesh) -> jax.Array:
        """Computes `_mix` on each device with its shard of every expert's width, then one sum over devices. Without
        this the compiler would gather the experts."""
        graph, state = nnx.split(self, nnx.Param)
        flat = nnx.to_flat_state(state)
        paths, params = [path for path, _ in flat], [param[...] for _, param in flat]
        specs = [sharding_of(("experts", *path), x.shape, mesh).spec for path, x in zip(paths, params, strict=True)]

        def mix_shard(tokens: jax.Array, *params: jax.Array) -> jax.Array:
            own = [(path, nnx.Param(x)) for path, x in zip(paths, params, strict=True)]
            experts = nnx.merge(graph, nnx.from_flat_state(own))
            y = experts._mix(tokens, bias=jax.lax.axis_index(AXIS) == 0)
            if experts.shared is not None and self._divides_shared(mesh):
                y += experts._gated_shared(tokens).astype(jnp.float32)
            return jax.lax.psum(y, AXIS)

        return map_devices(mix_shard, mesh, (PartitionSpec(), *specs), PartitionSpec())(tokens, *params)

    def route(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the chosen experts `i32[N, k]` of tokens `[N, M]`, and their weights `f32[N, k]`."""
        config = self.config
        if self.router_norm is not None:
            tokens = rms_norm(tokens.astype(jnp.float32), self.router_norm, self.decoder) * tokens.shape[-1] ** -0.5
        logits = jnp.einsum("nm,me->ne", tokens.astype(jnp.float32), self.router[...].astype(jnp.float32))
        if self.router_bias is not None:
            logits += self.router_bias[...].astype(jnp.float32)[None]
        if (cap := config.logit_soft_cap) is not None:
            logits = cap * jnp.tanh(logits / cap)
        if config.scores == "softmax_of_chosen":
            best, chosen = jax.lax.top_k(logits, config.per_token)
            return chosen, jax.nn.softmax(best, axis=-1)
        scores = jax.nn.softmax(logits, axis=-1) if config.scores == "softmax" else jax.nn.sigmoid(logits)
        preferred = logits if config.choose_by == "logits" else scores
        if self.choice_bias is not None:  # balances the load: affects the choice, not the weights
            preferred += self.choice_bias[...].astype(jnp.float32)[None]
        _, chosen = jax.lax.top_k(self._limit_to_groups(preferred), config.per_token)
        weights = jnp.take_along_axis(scores, chosen, axis=-1)
        if config.normalise:
            weights /= weights.sum(axis=-1, keepdims=True) + 1e-20
        if self.weight_scale is not None:
            weights *= self.weight_scale[...].astype(jnp.float32)[chosen]
        return chosen, weights * config.scale

    def _limit_to_groups(self, scores: jax.Array) -> jax.Array:
        """Gives experts outside of a token's best groups the least score; it is finite, for `jax_debug_infs`."""
        config = self.config
        if config.groups == config.groups_per_token:
            return scores
        grouped = scores.reshape(scores.shape[0], config.groups, -1)
        best = jax.lax.top_k(grouped, 2 if config.scores == "sigmoid" else 1)[0].sum(axis=-1)  # [N, groups]
        _, groups = jax.lax.top_k(best, config.groups_per_token)
        allowed = (groups[:, :, None] == jnp.arange(config.groups, dtype=jnp.int32)[None, None]).any(axis=1)
        return jnp.where(allowed[:, :, None], grouped, jnp.finfo(grouped.dtype).min).reshape(scores.shape)

    def _gate(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        limit = self.config.limit
        if limit is None:
            return ACTIVATIONS[self.activation](gate) * up
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        return gate * jax.nn.sigmoid(gate * self.config.alpha) * (up + 1)
