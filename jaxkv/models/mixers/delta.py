"""Gated delta nets, with a decay for each head or, as in Kimi Linear, for each key channel."""

from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels
from jaxkv._core.attention import mixers
from jaxkv._core.attention.plan import Step
from jaxkv.models.blocks.norms import normalize
from jaxkv.models.mixers.block_config import DeltaConfig
from jaxkv.models.mixers.mixer import MixerModule, convolve, whole_rows
from jaxkv.nnx import project

GATES = {"silu": jax.nn.silu, "sigmoid": jax.nn.sigmoid}


class DeltaMixer(MixerModule):
    """A gated delta net: convolutions of queries, keys and values, then the gated delta rule, a norm and a gate."""

    mixer: DeltaConfig

    def inputs(self, x: jax.Array, positions: Any) -> tuple:
        qkv = [project("...e,ce->...c", x, weight) for weight in (self.query, self.key, self.value)]
        kernels = [weight[...] for weight in (self.query_conv, self.key_conv, self.value_conv)]
        beta = jax.nn.sigmoid(project("...e,he->...h", x, self.beta).astype(jnp.float32)) * self.mixer.beta_scale
        return jnp.concatenate(qkv, -1), jnp.concatenate(kernels), self._decays(x), beta, self._gate(x)

    def _decays(self, x: jax.Array) -> jax.Array:
        """Returns the logarithms of the decays, `f32[..., H]`, or `[..., H, K]` by channel."""
        inner = x if self.decay_down is None else project("...e,re->...r", x, self.decay_down)
        g = project("...r,hr->...h", inner, self.decay).astype(jnp.float32)
        g = jax.nn.softplus(g + self.decay_bias[...].astype(jnp.float32)[(None,) * (g.ndim - 1)])
        rates = -jnp.exp(self.log_decay[...].astype(jnp.float32))
        if self.decay_down is None:
            return g * rates[(None,) * (g.ndim - 1)]
        g = g.reshape(*x.shape[:-1], self.mixer.value_heads, self.mixer.key_dim)
        return g * rates[(*(None,) * (g.ndim - 2), slice(None), None)]

    def _gate(self, x: jax.Array) -> jax.Array:
        inner = x if self.gate_down is None else project("...e,re->...r", x, self.gate_down)
        return project("...r,cr->...c", inner, self.gate)

    def attend(self, inputs: tuple, cache: Any, layer: Any, step: Step | None, _: bool = False) -> tuple[Any, Any]:
        (qkv, kernel, g, beta, gate), mixer = inputs, self.mixer
        qkv, cache = convolve(qkv, kernel, None, "silu", cache, layer, step)
        q, k, v = jnp.split(qkv, [mixer.key_channels, 2 * mixer.key_channels], axis=-1)
        q, k = (_unit(x.reshape(*x.shape[:-1], mixer.key_heads, mixer.key_dim)) for x in (q, k))
        v = v.reshape(*v.shape[:-1], mixer.value_heads, mixer.value_dim)
        if cache is None:
            states = mixer.value_heads, mixer.key_dim, mixer.value_dim
            y = whole_rows(pallas_kernels.gated_delta_rule, states, v.ndim - 2, q=q, k=k, v=v, g=g, beta=beta)
        else:
            y, cache = mixers.gated_delta_rule(q, k, v, g, beta, cache, layer, step=step)
        return (y, gate), cache

    def output(self, outputs: tuple) -> jax.Array:
        y, gate = outputs
        y = normalize(y, self.norm[...], eps=self.mixer.norm_eps).astype(jnp.float32)
        y = (y * GATES[self.mixer.gate](gate.astype(jnp.float32)).reshape(y.shape)).astype(gate.dtype)
        return project("...c,ce->...e", y.reshape(gate.shape), self.out)


def _unit(x: jax.Array) -> jax.Array:
    """Returns heads divided by their length, in their dtype: kernels take many tokens at once in 16 bits only."""
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt(jnp.sum(jnp.square(y), axis=-1, keepdims=True) + 1e-6)).astype(x.dtype)
