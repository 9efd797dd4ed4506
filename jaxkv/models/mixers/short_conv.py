"""Gated short convolutions: of three projections of a token, the first gates the input and the second the output."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxkv._core.attention.plan import Step
from jaxkv.models.mixers.block_config import ShortConvConfig
from jaxkv.models.mixers.mixer import MixerModule, convolve
from jaxkv.nnx import project


class ShortConvMixer(MixerModule):
    """`out(c * conv(b * x))`, where `b`, `c` and `x` are projections of the token."""

    mixer: ShortConvConfig

    def inputs(self, x: jax.Array, positions: Any) -> tuple:
        b, c, x = jnp.split(project("...e,ce->...c", x, self.project, self.project_bias), 3, axis=-1)
        return b * x, c, self.conv[...], None if self.conv_bias is None else self.conv_bias[...]

    def attend(self, inputs: tuple, cache: Any, layer: Any, step: Step | None, _: bool = False) -> tuple[Any, Any]:
        x, gate, kernel, bias = inputs
        y, cache = convolve(x, kernel, bias, None, cache, layer, step)
        return y * gate, cache

    def output(self, y: jax.Array) -> jax.Array:
        return project("...c,ce->...e", y, self.out, self.out_bias)
