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
from jaxkv.models.layers import ACTIVATIONS, GatedMLP, clip_gated, norm_weight, rms_norm
from jaxkv.models.partition import AXIS, mesh_of_weights, sharding_of
from jaxkv.nnx import project

# Of logits the scores of all experts.
SCORES = {
    "softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid, "sqrtsoftplus": lambda x: jnp.sqrt(jax.nn.softplus(x)),
}  # fmt: skip


class TokenTable(nnx.Variable):
    """Integers that are looked up by token: no `nnx.Param`, for they are not trained."""


class Experts(nnx.Module):
    """The experts of `ExpertsConfig`, in place of a block's MLP.

    Weights of all E experts are stacked in one array: `gate` and `up [E, M, F]`, `down [E, F, M]`; `router [M, E]`.
    With `latent_down [L, M]` and `latent_up [M, L]`, experts read and write L entries. With `by_token`, `expert_ids
    i32[V, k]` are the experts of each token of the vocabulary.
    """

    def __init__(
        self, config: DecoderConfig, experts: ExpertsConfig, dtype: Any, rngs: nnx.Rngs, by_token: bool = False
    ):
        def kernels(*shape: int) -> nnx.Param:
            init = nnx.initializers.lecun_normal(batch_axis=0 if len(shape) == 3 else ())
            return nnx.Param(init(rngs.params(), shape, dtype))

        def zeros(wanted: bool, *shape: int) -> nnx.Param | None:
            return nnx.Param(jnp.zeros(shape, dtype)) if wanted else None

        count, embed_dim, mlp_dim = experts.count, config.embed_dim, experts.mlp_dim
        self.config, self.activation = experts, config.activation
        self.router = kernels(embed_dim, count)
        self.router_bias = zeros(experts.bias, count)
        self.choice_bias = zeros(experts.choice_bias and not by_token, count)
        self.expert_ids = TokenTable(draw_experts(rngs, config.vocab_size, experts)) if by_token else None
        width, latent_dim, gated = experts.latent_dim or embed_dim, experts.latent_dim, config.gated_mlp
        self.latent_down = nnx.Param(kernels(embed_dim, latent_dim)[...].T) if latent_dim else None
        self.latent_up = nnx.Param(kernels(latent_dim, embed_dim)[...].T) if latent_dim else None
        self.gate = kernels(count, width, mlp_dim) if gated else None
        self.gate_bias = zeros(experts.bias and gated, count, mlp_dim)
        self.up, self.up_bias = kernels(count, width, mlp_dim), zeros(experts.bias, count, mlp_dim)
        self.down, self.down_bias = kernels(count, mlp_dim, width), zeros(experts.bias, count, width)
        limit = experts.limit if experts.alpha is None else None
        self.shared = GatedMLP(config, experts.shared_dim, dtype, rngs, 0.0, limit) if experts.shared_dim else None
        self.shared_gate = nnx.Param(kernels(embed_dim, 1)[...].T) if experts.shared_gate else None
        beside, self.decoder = experts.beside_mlp, config
        self.norm, self.router_norm = (norm_weight(config, embed_dim, dtype) if beside else None for _ in range(2))
        self.weight_scale = nnx.Param(jnp.ones((count,), dtype)) if beside else None
        self.post_norm = norm_weight(config, embed_dim, dtype) if experts.post_norm else None

    def __call__(self, x: jax.Array, ids: jax.Array | None = None) -> jax.Array:
        """Maps `[..., M]` to `[..., M]`, of tokens whose `ids [...]` choose experts where there is a table of those."""
        tokens = x.reshape(-1, x.shape[-1])
        ids = None if self.expert_ids is None or ids is None else ids.reshape(-1)
        mesh = mesh_of_weights(self.up[...])
        if mesh is None or self.config.mlp_dim % mesh.shape[AXIS]:
            y, is_complete = self._mix(tokens, ids), self.shared is None
        else:
            y, is_complete = self._mix_on_devices(tokens, ids, mesh), self.shared is None or self._divides_shared(mesh)
        y = y.astype(x.dtype).reshape(x.shape)
        y = y if is_complete else y + self._gated_shared(x)
        return y if self.post_norm is None else rms_norm(y, self.post_norm, self.decoder)

    def _gated_shared(self, x: jax.Array) -> jax.Array:
        """Computes the MLP of all tokens, times its gate where it has one."""
        assert self.shared is not None
        y = self.shared(x)
        return y if self.shared_gate is None else y * jax.nn.sigmoid(project("...e,fe->...f", x, self.shared_gate))

    def _mix(self, tokens: jax.Array, ids: jax.Array | None, bias: Any = True) -> jax.Array:
        """Computes the weighted sum of the chosen experts, `[N, M]` to `f32[N, M]`. On a device with a shard of the
        experts' widths, the device's term of the sum; `bias` tells whether this device adds the output biases."""
        chosen, weights = self.route(tokens, ids)  # [N, k]
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

    def _mix_on_devices(self, tokens: jax.Array, ids: jax.Array | None, mesh: AbstractMesh) -> jax.Array:
        """Computes `_mix` on each device with its shard of every expert's width, then one sum over devices. Without
        this the compiler would gather the experts."""
        graph, state = nnx.split(self)
        flat = nnx.to_flat_state(state)
        paths, params = [path for path, _ in flat], [param[...] for _, param in flat]
        kinds = [type(param) for _, param in flat]
        specs = [sharding_of(("experts", *path), x.shape, mesh).spec for path, x in zip(paths, params, strict=True)]

        def mix_shard(tokens: jax.Array, ids: jax.Array | None, *params: jax.Array) -> jax.Array:
            own = [(path, kind(x)) for path, kind, x in zip(paths, kinds, params, strict=True)]
            experts = nnx.merge(graph, nnx.from_flat_state(own))
            y = experts._mix(tokens, ids, bias=jax.lax.axis_index(AXIS) == 0)
            if experts.shared is not None and self._divides_shared(mesh):
                y += experts._gated_shared(tokens).astype(jnp.float32)
            return jax.lax.psum(y, AXIS)

        whole = PartitionSpec(), PartitionSpec()
        return map_devices(mix_shard, mesh, (*whole, *specs), PartitionSpec())(tokens, ids, *params)

    def route(self, tokens: jax.Array, ids: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
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
        scores = SCORES[config.scores](logits)
        chosen = self._choose(logits if config.choose_by == "logits" else scores, ids)
        weights = jnp.take_along_axis(scores, chosen, axis=-1)
        if config.normalise:
            weights /= weights.sum(axis=-1, keepdims=True) + 1e-20
        if self.weight_scale is not None:
            weights *= self.weight_scale[...].astype(jnp.float32)[chosen]
        return chosen, weights * config.scale

    def _choose(self, preferred: jax.Array, ids: jax.Array | None) -> jax.Array:
        """Returns the experts that tokens prefer, or that a table names for them."""
        if self.expert_ids is not None:
            assert ids is not None, "experts that a table names need the tokens' ids"
            return jnp.take(self.expert_ids[...], ids, axis=0, mode="clip")
        if self.choice_bias is not None:  # balances the load: affects the choice, not the weights
            preferred += self.choice_bias[...].astype(jnp.float32)[None]
        return jax.lax.top_k(self._limit_to_groups(preferred), self.config.per_token)[1]

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
        limit, alpha = self.config.limit, self.config.alpha
        gate, up = clip_gated(gate, up, limit)
        if limit is None or alpha is None:
            return ACTIVATIONS[self.activation](gate) * up
        return gate * jax.nn.sigmoid(gate * alpha) * (up + 1)


def draw_experts(rngs: nnx.Rngs, vocab_size: int, experts: ExpertsConfig) -> jax.Array:
    """Draws different experts for each token, `i32[V, k]`: neighbours, from a random one on."""
    first = jax.random.randint(rngs.params(), (vocab_size, 1), 0, experts.count, jnp.int32)
    return (first + jnp.arange(experts.per_token, dtype=jnp.int32)[None]) % experts.count
