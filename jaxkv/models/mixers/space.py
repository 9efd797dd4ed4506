"""Selective state spaces (Mamba 2): a convolution, the recurrence, a gate, and mostly a norm over each group."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from jaxkv._core.attention import mixers
from jaxkv._core.attention.plan import Step
from jaxkv.models.blocks.norms import normalize
from jaxkv.models.layers import scale
from jaxkv.models.mixers.block_config import SpaceConfig
from jaxkv.models.mixers.mixer import MixerModule, convolve, whole_rows
from jaxkv.nnx import project


class SpaceMixer(MixerModule):
    """One projection to a gate, inputs, what writes and reads states, and time steps."""

    mixer: SpaceConfig

    def inputs(self, x: jax.Array, positions: Any) -> tuple:
        mixer = self.mixer
        every = project("...e,ce->...c", scale(x, mixer.input_scale), self.project, self.project_bias)
        if any(scale != 1 for scale in mixer.part_scales):
            scales = np.repeat(np.asarray(mixer.part_scales, np.float32), mixer.projection_sizes)
            every = (every * jnp.expand_dims(scales, tuple(range(every.ndim - 1)))).astype(every.dtype)
        gate, xbc, steps = jnp.split(every, [mixer.channels, sum(mixer.projection_sizes[:4])], axis=-1)
        bias, skip, rates = (param[...].astype(jnp.float32) for param in (self.step_bias, self.skip, self.log_decay))
        steps = jax.nn.softplus(steps.astype(jnp.float32) + jnp.expand_dims(bias, tuple(range(steps.ndim - 1))))
        least, most = mixer.step_limits
        conv_bias = None if self.conv_bias is None else self.conv_bias[...]
        return gate, xbc, jnp.clip(steps, least, most), -jnp.exp(rates), skip, self.conv[...], conv_bias

    def attend(self, inputs: tuple, cache: Any, layer: Any, step: Step | None, _: bool = False) -> tuple[Any, Any]:
        (gate, xbc, steps, rates, skip, kernel, bias), mixer = inputs, self.mixer
        xbc, cache = convolve(xbc, kernel, bias, "silu", cache, layer, step)
        x, b, c = jnp.split(xbc, np.cumsum(mixer.projection_sizes[1:3]), axis=-1)
        x = x.reshape(*x.shape[:-1], mixer.heads, mixer.head_dim)
        b, c = (y.reshape(*y.shape[:-1], mixer.groups, mixer.state_dim) for y in (b, c))
        if cache is None:
            states, options = (mixer.heads, mixer.head_dim, mixer.state_dim), {"A": rates, "D": skip}
            y = whole_rows(pallas_kernels.state_space, states, x.ndim - 2, options, x=x, dt=steps, B=b, C=c)
        else:
            y, cache = mixers.state_space(x, steps, rates, b, c, cache, layer, D=skip, step=step)
        return (y.reshape(gate.shape), gate), cache

    def output(self, outputs: tuple) -> jax.Array:
        y, gate = outputs
        dtype, gate = gate.dtype, jax.nn.silu(gate.astype(jnp.float32))
        y = y.astype(jnp.float32)
        y = self._norm(y) * gate if self.mixer.norm == "before_gate" else self._norm(y * gate)
        y = project("...c,ce->...e", y.astype(dtype), self.out, self.out_bias)
        return scale(y, self.mixer.output_scale)

    def _norm(self, y: jax.Array) -> jax.Array:
        """Returns the norm over each group, or without one y."""
        if self.norm is None:
            return y
        groups = normalize(y.reshape(*y.shape[:-1], self.mixer.groups, -1), eps=self.mixer.norm_eps)
        weight = self.norm[...].astype(jnp.float32)
        return groups.reshape(y.shape) * jnp.expand_dims(weight, tuple(range(y.ndim - 1)))
